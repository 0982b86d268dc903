"""Calls inside of checkpoints are made again in the backward pass, where the callee may draw no random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import functions, rpc


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_workers_of_one_process_draw_what_is_preserved(reentrant):
    with telegrad.LocalCluster(["a"], transport="inproc"):
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(lambda x: rpc.rpc_sync("a", dropped, args=(x,)), x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())


def test_a_call_of_a_hook_may_draw(module_cluster):
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: rpc.rpc_sync("a", torch.rand, args=(3,)) * 0 + gradient)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
