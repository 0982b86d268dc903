"""Handles that die while the value that they refer to is still being created, or a call that uses it is in flight."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import CallTimeoutError, ConnectError
from telegrad.nn import RemoteModule
from telegrad.primitives import clock, current
from telegrad.primitives.current import current_worker
from telegrad.runtime.recomputing import run_as_part

PATIENCE = 30.0


class Gate:
    """Holds the constructors of one test until it is opened. The workers are of this process."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()

    def __reduce__(self) -> Any:
        return _gate, ()

    def pass_through(self) -> None:
        self.begun.set()
        assert self.opened.wait(PATIENCE)


_gates: list[Gate] = []


def _gate() -> Gate:
    return _gates[-1]


class Slow:
    """A value whose constructor waits for the gate."""

    def __init__(self, gate: Gate) -> None:
        gate.pass_through()

    def me(self) -> Slow:
        return self

    def value(self) -> int:
        return 7


class Kept:
    """A value that shows that it was made."""

    made: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def __init__(self, value: torch.Tensor) -> None:
        Kept.made.put(value)


class SlowModule(torch.nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        gate.pass_through()

    def forward(self, x: int) -> int:
        return x + 1


@pytest.fixture
def gate() -> Iterator[Gate]:
    _gates.append(Gate())
    yield _gates[-1]
    _gates.pop().opened.set()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[dict[str, telegrad.Worker]]:
    options = telegrad.Options(rpc_timeout=PATIENCE, plain=getattr(request, "param", True))
    with telegrad.LocalCluster(["a"], transport="inproc", options=options) as cluster:
        found = {worker.name: worker for worker in (current_worker(), *cluster._in_process)}
        yield found
        found.clear()


def settle(workers: dict[str, telegrad.Worker]) -> None:
    """Counts the handles that have died by now, and tells their owners, which have heard it when this returns."""
    for worker in workers.values():
        worker.references._clear()
    for name in workers:
        rpc.rpc_sync(name, abs, args=(1,))


@pytest.mark.parametrize("owner", ["driver", "a"])
def test_a_handle_that_dies_while_the_constructor_runs(workers, gate, owner):
    result = rpc.remote(owner, Slow, args=(gate,)).remote().me()
    assert gate.begun.wait(PATIENCE)
    settle(workers)
    gate.opened.set()
    assert result.rpc_sync().value() == 7
    assert result.rpc_sync().value() == 7


@pytest.mark.parametrize("owner", ["driver", "a"])
def test_a_handle_that_dies_before_the_answer_of_its_call(workers, gate, owner):
    answers = [
        rpc.remote(owner, Slow, args=(gate,)).rpc_async().value(),
        rpc.remote(owner, int, args=("7",)).to_here_async(),
        rpc.remote(owner, Slow, args=(gate,))._get_type(blocking=False),
    ]
    assert gate.begun.wait(PATIENCE)
    settle(workers)
    gate.opened.set()
    assert [answer.wait() for answer in answers] == [7, 7, Slow]


@pytest.mark.parametrize("owner", ["driver", "a"])
def test_a_remote_module_that_dies_before_the_answer_of_its_call(workers, gate, owner):
    answer = RemoteModule(owner, SlowModule, (gate,)).forward_async(1)
    assert gate.begun.wait(PATIENCE)
    settle(workers)
    gate.opened.set()
    assert answer.wait() == 2


@pytest.fixture
def dialling(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """No worker can be dialled, and each try takes 10 s, until it is undone."""

    def dial(*_: object) -> None:
        clock_jumps.append(10.0)
        raise ConnectError("it did not answer in time")

    clock_jumps = [0.0]
    now = clock.now
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now", lambda: now() + sum(clock_jumps))
        patch.setattr(current_worker()._peers, "_dial", dial)
        yield patch


@pytest.fixture
def held_back(workers, monkeypatch) -> Iterator[list[Callable[[], None]]]:
    """What the driver's threads are to do, which they do not do by themselves."""
    tasks: list[Callable[[], None]] = []
    monkeypatch.setattr(current_worker().creations._threads, "submit", tasks.append)
    yield tasks
    tasks.clear()


def test_an_owner_that_cannot_be_reached_in_time_shows_when_the_value_is_asked_for(
    workers, held_back, dialling, monkeypatch
):
    """As with an answer that is late: remote() itself gives a handle, and the value is created all the same."""
    given = torch.zeros(2)
    before = workers["a"].references.statistics()
    rref = rpc.remote("a", Kept, args=(given,), timeout=1.0)
    with pytest.raises(CallTimeoutError, match=r"timed out.*worker 'a' \(id 1\) cannot be reached"):
        rref.to_here()
    given.fill_(1.0)
    dialling.undo()
    monkeypatch.undo()
    assert workers["a"].references.statistics() == before
    for task in held_back:
        task()
    assert Kept.made.get(timeout=PATIENCE).tolist() == [0.0, 0.0]
    assert workers["a"].references.statistics()["credits"] == before["credits"] + 1
    with pytest.raises(CallTimeoutError, match="timed out"):
        rref.to_here()
    del rref
    settle(workers)
    assert workers["a"].references.statistics() == before
    assert current_worker().references.statistics()["held"] == 0


def test_a_handle_that_dies_before_its_owner_was_told_to_create_the_value(workers, held_back, dialling, monkeypatch):
    before = workers["a"].references.statistics()
    rpc.remote("a", Kept, args=(torch.ones(1),), timeout=1.0)
    dialling.undo()
    monkeypatch.undo()
    settle(workers)
    for task in held_back:
        task()
    Kept.made.get(timeout=PATIENCE)
    settle(workers)
    assert workers["a"].references.statistics() == before
    assert current_worker().references.statistics()["held"] == 0


def scaled(x: torch.Tensor, weight: torch.Tensor, constant: torch.Tensor) -> tuple[torch.Tensor, bool, bool]:
    """What was computed; whether the weight has come as a parameter; and the caller's mode."""
    return x * weight * constant, isinstance(weight, torch.nn.Parameter), torch.is_grad_enabled()


def found_in(rref: rpc.RRef) -> tuple[torch.Tensor, bool, bool]:
    return rref.local_value()


def backward_there(rref: rpc.RRef) -> None:
    rref.local_value()[0].sum().backward()


def send_what_was_held_back(held_back, dialling, monkeypatch) -> None:
    dialling.undo()
    monkeypatch.undo()
    done = threading.Semaphore(0)
    for task in held_back:
        current_worker().submit(lambda task=task: (task(), done.release()))
        assert done.acquire(timeout=PATIENCE)


def test_gradients_of_a_value_that_was_created_late_come_back(workers, held_back, dialling, monkeypatch):
    """Whoever takes the handle can run backward: the tensors get their gradients, as with a creation in time."""
    x, weight = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.full((2,), 5.0))
    constant = torch.full((2,), 7.0)
    rref = rpc.remote("a", scaled, args=(x * 3, weight, constant), timeout=1.0)
    constant.zero_()
    send_what_was_held_back(held_back, dialling, monkeypatch)
    rpc.rpc_sync("a", backward_there, args=(rref,))
    assert x.grad.tolist() == [105.0, 105.0]
    assert weight.grad.tolist() == [21.0, 21.0]
    result, was_parameter, was_grad = rpc.rpc_sync("a", found_in, args=(rref,))
    assert result.tolist() == [105.0, 105.0]
    assert was_parameter
    assert was_grad


def test_a_value_that_is_created_late_belongs_to_the_context_of_its_caller(workers, held_back, dialling, monkeypatch):
    x, weight = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.full((2,), 5.0))
    with autograd.context() as context_id:
        rref = rpc.remote("a", scaled, args=(x * 3, weight, torch.ones(2)), timeout=1.0)
        send_what_was_held_back(held_back, dialling, monkeypatch)
        result, was_parameter, _ = rpc.rpc_sync("a", found_in, args=(rref,))
        autograd.backward(context_id, [result.sum()])
        gradients = autograd.get_gradients(context_id)
    assert gradients[x].tolist() == [15.0, 15.0]
    assert gradients[weight].tolist() == [3.0, 3.0]
    assert was_parameter


def test_a_value_is_not_created_late_when_its_context_has_ended(workers, held_back, dialling, monkeypatch, caplog):
    """Its tensors would be leaves there, and gradients silently missing."""
    with autograd.context():
        rref = rpc.remote("a", scaled, args=(torch.ones(2, requires_grad=True), *[torch.ones(2)] * 2), timeout=1.0)
    send_what_was_held_back(held_back, dialling, monkeypatch)
    assert "rpc.remote() to worker 'a' failed" in caplog.text
    assert "the context has ended" in caplog.text
    with pytest.raises(CallTimeoutError, match="timed out"):
        rref.to_here()


def test_a_value_that_is_created_late_has_the_modes_of_its_caller(workers, held_back, dialling, monkeypatch):
    with torch.no_grad():
        rref = rpc.remote("a", scaled, args=(torch.ones(2, requires_grad=True), *[torch.ones(2)] * 2), timeout=1.0)
    send_what_was_held_back(held_back, dialling, monkeypatch)
    result, _, was_grad = rpc.rpc_sync("a", found_in, args=(rref,))
    assert not was_grad
    assert not result.requires_grad


def process_of_the_checkpoint() -> int:
    return current.recomputes.get()


def test_a_value_that_is_created_late_belongs_to_the_recomputation_of_its_caller(
    workers, held_back, dialling, monkeypatch
):
    rrefs: list[rpc.RRef] = []
    create = partial(rpc.remote, "a", process_of_the_checkpoint, timeout=1.0)
    run_as_part(7, lambda: rrefs.append(create()))
    send_what_was_held_back(held_back, dialling, monkeypatch)
    assert rpc.rpc_sync("a", found_in, args=(rrefs[0],)) == 7


@pytest.mark.parametrize("workers", [False], indirect=True, ids=["torch's rule"])
@pytest.mark.parametrize("in_context", [False, True])
def test_what_is_created_late_by_torchs_rule_has_parameters_that_are_leaves(
    workers, held_back, dialling, monkeypatch, in_context
):
    x, weight = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.full((2,), 5.0))
    with autograd.context() if in_context else contextlib.nullcontext(0) as context_id:
        rref = rpc.remote("a", leaves_of, args=(x * 3, weight), timeout=1.0)
        send_what_was_held_back(held_back, dialling, monkeypatch)
        (y, was_leaf), (kind, parameter_was_leaf) = rpc.rpc_sync("a", found_in, args=(rref,))
        assert was_leaf is not in_context
        assert kind is torch.nn.Parameter
        assert parameter_was_leaf
        if in_context:
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0]


def leaves_of(y: torch.Tensor, weight: torch.Tensor) -> Any:
    return (y, y.is_leaf), (type(weight), weight.is_leaf)


def test_an_owner_that_is_never_reached_keeps_nothing_here(workers, held_back, dialling, caplog):
    rref = rpc.remote("a", Kept, args=(torch.ones(1),), timeout=1.0)
    for task in held_back:
        task()
    assert "rpc.remote() to worker 'a' failed" in caplog.text
    assert current_worker().references.statistics()["held"] == 0
    with pytest.raises(CallTimeoutError, match="timed out"):
        rref.to_here()
