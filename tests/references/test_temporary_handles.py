"""Handles that die while the value that they refer to is still being created, or a call that uses it is in flight."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.errors import CallTimeoutError, ConnectError
from telegrad.nn import RemoteModule
from telegrad.primitives import clock
from telegrad.primitives.current import current_worker

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
def workers() -> Iterator[dict[str, telegrad.Worker]]:
    with telegrad.LocalCluster(["a"], transport="inproc", options=telegrad.Options(rpc_timeout=PATIENCE)) as cluster:
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


def test_an_owner_that_is_never_reached_keeps_nothing_here(workers, held_back, dialling, caplog):
    rref = rpc.remote("a", Kept, args=(torch.ones(1),), timeout=1.0)
    for task in held_back:
        task()
    assert "rpc.remote() to worker 'a' failed" in caplog.text
    assert current_worker().references.statistics()["held"] == 0
    with pytest.raises(CallTimeoutError, match="timed out"):
        rref.to_here()
