"""Calls inside of checkpoints are made again in the backward pass, where the callee may draw no random numbers."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import functions, rpc
from telegrad.primitives import current
from telegrad.runtime.recomputing import recomputing_process


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x, 0.5, True)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def dropped_by_seed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).round()


def dropped_in_a_fork(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return dropped(x)


def dropped_elsewhere(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("b", dropped, args=(x,))


class Later(torch.futures.Future):
    """Is done, with random numbers, when someone waits for it."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = x

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        super().add_done_callback(callback)
        self.set_result(dropped(self.x))


@functions.async_execution
def dropped_later(x: torch.Tensor) -> Later:
    return Later(x)


def dropped_in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(dropped, x, use_reentrant=False)


def drawn_beside(x: torch.Tensor) -> torch.Tensor:
    """Draws none itself."""
    other = threading.Thread(target=torch.rand, args=(3,))
    other.start()
    other.join()
    return x * 2


def forward(function: object, reentrant: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(64, requires_grad=True)
    return x, checkpoint(lambda x: rpc.rpc_sync("a", function, args=(x,)).sin(), x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", [doubled, dropped_by_seed, dropped_in_a_fork])
def test_a_call_without_random_numbers_is_made_again(module_cluster, function, reentrant):
    x, y = forward(function, reentrant)
    y.sum().backward()
    other = torch.ones(64, requires_grad=True)
    function(other).sin().sum().backward()
    assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("function", "where"), [(dropped, "a"), (dropped_later, "a"), (dropped_elsewhere, "b")])
def test_random_numbers_that_are_drawn_again_are_refused(module_cluster, reentrant, function, where):
    _, y = forward(function, reentrant)
    with pytest.raises(
        RuntimeError, match=f"dropped.* on worker '{where}' has drawn random numbers in the recomputation"
    ):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_random_numbers_of_another_thread_meanwhile_are_refused_too(module_cluster, reentrant):
    """Nobody can tell whose they were."""
    _, y = forward(drawn_beside, reentrant)
    with pytest.raises(RuntimeError, match="or something else there has, meanwhile"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_preserves_nothing_is_let_be(module_cluster, reentrant):
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(
        lambda x: rpc.rpc_sync("a", drawn_beside, args=(x,)).sin(),
        x, use_reentrant=reentrant, preserve_rng_state=False,
    )  # fmt: skip
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((64,), 2.0) * torch.full((64,), 2.0).cos())


def test_a_checkpoint_inside_of_the_function_preserves_them(module_cluster):
    x = torch.ones(64, requires_grad=True)
    y = rpc.rpc_sync("a", dropped_in_a_checkpoint, args=(x,))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def dropped_by_oneself(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("a", dropped, args=(x,))


def dropped_by_way_of_oneself(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("a", dropped_elsewhere, args=(x,))


def dropped_by_the_driver(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("driver", dropped, args=(x,))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("to", "function"), [("driver", dropped_elsewhere), ("a", dropped_by_way_of_oneself)])
def test_a_call_to_oneself_is_a_part_of_the_recomputation(module_cluster, reentrant, to, function):
    """The workers behind it draw numbers that no one restores."""
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(lambda x: rpc.rpc_sync(to, function, args=(x,)).sin(), x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="dropped on worker 'b' has drawn random numbers in the recomputation"):
        y.sum().backward()


def dropped_one_after_the_other(x: torch.Tensor) -> torch.Tensor:
    return dropped(dropped(x) + rpc.rpc_sync("b", dropped_by_oneself, args=(x,)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", [dropped, dropped_by_oneself, dropped_one_after_the_other])
def test_workers_of_one_process_draw_what_is_preserved(reentrant, function):
    with telegrad.LocalCluster(["a", "b"], transport="inproc"):
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(lambda x: rpc.rpc_sync("a", function, args=(x,)).square(), x, use_reentrant=reentrant)
        state = torch.get_rng_state()
        y.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(x.grad, 2 * y.detach())  # of c * x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("to", "function"), [("driver", dropped), ("a", dropped_by_the_driver)])
def test_the_checkpoints_own_process_draws_what_is_preserved(module_cluster, reentrant, to, function):
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(lambda x: rpc.rpc_sync(to, function, args=(x,)).square(), x, use_reentrant=reentrant)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.grad, 2 * y.detach())


def dropped_in_a_callback(x: torch.Tensor) -> torch.futures.Future[Any]:
    future = rpc.rpc_async("b", doubled, args=(x,))
    return future.then(lambda done: rpc.rpc_sync("b", dropped, args=(done.value(),)))


def dropped_when_all_are_done(x: torch.Tensor) -> torch.futures.Future[Any]:
    futures = [rpc.rpc_async("b", doubled, args=(x,)), rpc.rpc_async("a", doubled, args=(x,))]
    gathered = torch.futures.collect_all(futures)
    return gathered.then(lambda done: rpc.rpc_sync("b", dropped, args=(done.value()[0].value(),)))


def dropped_when_a_value_is_created(x: torch.Tensor) -> torch.futures.Future[Any]:
    rref = rpc.remote("b", doubled, args=(x,))
    return rref._get_future().then(lambda _: rpc.rpc_sync("b", dropped, args=(x,)))


in_a_callback = functions.async_execution(dropped_in_a_callback)
when_all_are_done = functions.async_execution(dropped_when_all_are_done)
when_a_value_is_created = functions.async_execution(dropped_when_a_value_is_created)
CALLBACKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "here": lambda x: dropped_in_a_callback(x).wait(),
    "here, of several": lambda x: dropped_when_all_are_done(x).wait(),
    "here, of a value": lambda x: dropped_when_a_value_is_created(x).wait(),
    "there": lambda x: rpc.rpc_sync("a", in_a_callback, args=(x,)),
    "there, of several": lambda x: rpc.rpc_sync("a", when_all_are_done, args=(x,)),
    "there, of a value": lambda x: rpc.rpc_sync("a", when_a_value_is_created, args=(x,)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", CALLBACKS)
def test_calls_of_callbacks_are_a_part_of_the_recomputation(module_cluster, reentrant, where):
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(lambda x: CALLBACKS[where](x).sin(), x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="dropped on worker 'b' has drawn random numbers in the recomputation"):
        y.sum().backward()


class Dropping:
    def later(self, x: torch.Tensor) -> Later:
        return Later(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_method_whose_future_draws_later_is_refused(module_cluster, reentrant):
    there = rpc.remote("a", Dropping)
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(lambda x: there.rpc_sync().later(x).sin(), x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="on worker 'a' has drawn random numbers in the recomputation"):
        y.sum().backward()


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_that_preserves_nothing_inside_of_one_that_does(module_cluster, outer, inner):
    def unpreserved(x: torch.Tensor) -> torch.Tensor:
        call = lambda x: rpc.rpc_sync("a", dropped, args=(x,))  # noqa: E731
        return checkpoint(call, x, use_reentrant=inner, preserve_rng_state=False).sin()

    x = torch.ones(64, requires_grad=True)
    y = checkpoint(unpreserved, x, use_reentrant=outer)
    with pytest.raises(RuntimeError, match="dropped on worker 'a' has drawn random numbers in the recomputation"):
        y.sum().backward()


def called_in_a_checkpoint(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(lambda y: dropped_elsewhere(y).sin(), x * 2, use_reentrant=reentrant)


_is_initialized = torch.cuda.is_initialized


def pretend_to_have_devices(yes: bool) -> None:
    torch.cuda.is_initialized = (lambda: True) if yes else _is_initialized


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_beside_devices_marks_its_calls(module_cluster, reentrant):
    """A reentrant one has a thread of its own there."""
    x = torch.ones(64, requires_grad=True)
    rpc.rpc_sync("a", pretend_to_have_devices, args=(True,))
    try:
        y = rpc.rpc_sync("a", called_in_a_checkpoint, args=(x, reentrant))
        with pytest.raises(RuntimeError, match="dropped on worker 'b' has drawn random numbers in the recomputation"):
            y.sum().backward()
    finally:
        rpc.rpc_sync("a", pretend_to_have_devices, args=(False,))


def test_on_a_thread_of_torchs_the_pass_says_what_code_belongs_to(monkeypatch):
    """As a device's, where none of our variables is set."""
    monkeypatch.setattr(current, "engine_pass", lambda: types.SimpleNamespace(recomputes=7))
    found: list[int] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: found.append(recomputing_process()))
    y.backward()
    assert found == [7]
    assert recomputing_process() == 0


def test_a_call_of_a_hook_may_draw(module_cluster):
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: rpc.rpc_sync("a", torch.rand, args=(3,)) * 0 + gradient)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
