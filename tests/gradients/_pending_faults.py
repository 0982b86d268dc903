"""Tests of faults that fail today. pytest does not collect this file by itself; run it by its name."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import contextlib
import datetime
import threading

import fault_programs as programs
import pytest
import torch
from fault_programs import (
    PATIENCE,
    PLACES,
    BoomError,
    Fault,
    InThread,
    Trip,
    backward_error,
    check_nothing_is_left,
    check_shows_nothing,
    check_works,
    forward,
    open_gate,
    soon,
    wait_at_gate,
    wait_for_arrival,
    wait_until,
)
from test_faults import fan, gates, held_messages, is_event, trio, watching, workers  # noqa: F401
from torch import Tensor
from torch.distributed import HashStore

import telegrad
from telegrad import autograd, current, errors, rpc
from telegrad.events import Event
from telegrad.gradients import leaves
from telegrad.messages import Envelope, Kind, Member
from telegrad.rendezvous import Group

SMALL_MESSAGES = telegrad.Options(max_message_bytes=1 << 18)


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("has no text")


def fail_speechless(place: str) -> None:
    raise SpeechlessError


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_whose_text_cannot_be_had(workers, place):
    with autograd.context() as context_id:
        error = backward_error(context_id, forward(Fault(place, action=fail_speechless)), timeout=2.0)
        assert error.worker == PLACES[place]
        assert type(error.__cause__) is SpeechlessError
    check_nothing_is_left()


def leave_the_program(place: str) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("place", ["outer", "last"])
def test_a_worker_that_wants_to_exit_does_not_end_the_root(workers, place):
    with autograd.context() as context_id:
        error = backward_error(context_id, forward(Fault(place, action=leave_the_program)))
        assert error.worker == PLACES[place]
    check_works()
    check_nothing_is_left()


def fail_at_length(place: str) -> None:
    raise BoomError("boom " * (1 << 17))


@pytest.mark.parametrize("place", ["outer", "last"])
def test_an_exception_that_is_too_large_to_be_sent(place):
    with telegrad.LocalCluster(["b", "c"], transport="inproc", options=SMALL_MESSAGES):
        with autograd.context() as context_id:
            error = backward_error(context_id, forward(Fault(place, action=fail_at_length)), timeout=3.0)
            assert error.worker == PLACES[place]
            assert "boom boom" in str(error)
        check_works()
        check_nothing_is_left()


class Unsendable(torch.Tensor):
    """A gradient that cannot be sent."""

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("cannot be sent")


class GiveUnsendable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clone().as_subclass(Unsendable)


def give_unsendable(x: Tensor) -> Tensor:
    return GiveUnsendable.apply(x)


@pytest.mark.parametrize("size", [3, 1 << 16], ids=["small", "large"])
def test_a_gradient_that_cannot_be_sent(workers, size):
    """The large one is written by another thread, while its worker has nothing more to do."""
    with autograd.context() as context_id:
        x = torch.ones(size, requires_grad=True)
        loss = rpc.rpc_sync("b", give_unsendable, args=(x,)).sum()
        error = backward_error(context_id, loss, timeout=3.0)
        assert error.worker == "b"
        assert "cannot be sent" in str(error)
    check_works()
    check_nothing_is_left()


@pytest.mark.parametrize("place", ["outer", "last", "inner"])
def test_a_pass_that_is_stuck_ends_in_time_and_says_who_is_not_done(trio, place):
    with autograd.context() as context_id:
        loss = forward(Fault(place, action=wait_at_gate))
        error = backward_error(context_id, loss, timeout=0.2)
        assert "timeout (200 ms)" in str(error)
        assert type(error.__cause__) is errors.CallTimeoutError
        assert repr(PLACES[place]) in str(error)
        assert "are not done" in str(error)
        rpc.rpc_sync(PLACES[place], open_gate, args=(place,))
        check_shows_nothing(context_id)
    rpc.rpc_sync(PLACES[place], programs.forget_gates)
    check_works()
    check_nothing_is_left()


def test_a_hook_of_the_root_that_waits_for_an_earlier_call():
    """Whoever waits in users' code, somebody reads."""
    with telegrad.LocalCluster(["b", "c"], transport="inproc"), autograd.context() as context_id:
        received = rpc.rpc_sync("b", programs.twice, args=(torch.ones(3, requires_grad=True),))
        rpc.rpc_sync("c", abs, args=(1,))
        future = rpc.rpc_async("b", answer_after_gate)

        def wait_for_call(place: str) -> None:
            open_gate("earlier call")
            assert future.wait(3.0) == "answered"

        with soon():
            autograd.backward(
                context_id, [Trip.apply(received, wait_for_call, "root").sum()], timeout=PATIENCE
            )


def answer_after_gate() -> str:
    assert programs._gates["earlier call"].wait(PATIENCE)
    return "answered"


def test_a_context_that_ends_while_a_pass_is_planned(workers, monkeypatch):
    driver = workers["driver"]
    plan = driver.engine._plan

    def plan_and_release(*args: object) -> object:
        found = plan(*args)
        driver.release_context(context_id, wait=True)
        return found

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(driver.engine, "_plan", plan_and_release)
        with soon(), pytest.raises(errors.GradientError, match=f"context.*{context_id}"):
            autograd.backward(context_id, [loss], timeout=3.0)
        monkeypatch.undo()
    check_works()
    check_nothing_is_left()


def test_a_call_that_is_sent_as_its_context_ends_leaves_nothing(workers, held_messages):
    held, release = held_messages(workers["b"], "call", to="c")
    with autograd.context(wait=True):
        future = rpc.rpc_async("b", programs.on_b, args=(torch.ones(3, requires_grad=True), ()))
        assert held.wait(PATIENCE)
    release.set()
    future.wait(PATIENCE)
    check_nothing_is_left(within=2.0)


@pytest.mark.parametrize("place", ["first", "inner", "last"])
def test_a_grad_that_cannot_be_added_to(workers, place):
    """As with local autograd it is an error; and nothing hangs or is left after it."""
    with autograd.context() as context_id:
        loss = forward()
        leaf = programs._leaves[workers[PLACES[place]]][place]
        leaf.grad = torch.zeros(()).expand(3)
        with soon(), contextlib.suppress(errors.BackwardError):
            autograd.backward(context_id, [loss], timeout=PATIENCE, into="grad")
            assert PLACES[place] != "driver", "an error at the root was lost"
        leaf.grad = None
        wait_until(
            lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "the pass's end"
        )
    assert rpc.rpc_sync(PLACES[place], abs, args=(-1,), timeout=3.0) == 1
    check_works()
    check_nothing_is_left()


def grad_here(place: str) -> Tensor | None:
    return programs._leaves[current.current_worker()][place].grad


def test_what_is_called_after_a_pass_sees_all_of_its_gradients(workers):
    """However long the worker takes to come to the end of the pass: here until the call was answered, or half a
    second."""
    answered = threading.Event()

    def see(event: Event) -> None:
        if is_event(event, "receive", "started", "end"):
            answered.wait(0.5)

    with autograd.context() as context_id, watching(workers["b"], see):
        autograd.backward(context_id, [forward()], timeout=PATIENCE, into="grad")
        grad = rpc.rpc_sync("b", grad_here, args=("inner",))
        answered.set()
        assert grad is not None


def test_two_passes_that_add_to_one_grad_at_once(workers, monkeypatch):
    both = threading.Barrier(2)
    shared = torch.ones(3, requires_grad=True)
    accumulated = leaves.accumulated

    def together(old: Tensor | None, new: Tensor) -> Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # passed by two threads only if nothing keeps them apart
        return accumulated(old, new)

    def one_pass() -> None:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("b", programs.twice, args=(shared * 1,)).sum()
            autograd.backward(context_id, [loss], timeout=PATIENCE, into="grad")

    monkeypatch.setattr(leaves, "accumulated", together)
    running = [InThread(one_pass) for _ in range(2)]
    for each in running:
        assert each.wait().error is None
    torch.testing.assert_close(shared.grad, torch.full((3,), 4.0))


@pytest.mark.parametrize("kind", ["end", "release"])
def test_a_peer_that_takes_no_message_for_a_while_hurts_nobody_else(workers, monkeypatch, kind):
    """Its connection is full, and the time for a word to it is over. The others must hear it all the same."""
    driver = workers["driver"]
    send = driver.send

    def slow(connection: object, envelope: Envelope, *args: object) -> None:
        if envelope.kind == Kind[kind.upper()] and connection.peer.name == "b":
            raise TimeoutError("worker 'b' did not take the message in time")
        send(connection, envelope, *args)

    monkeypatch.setattr(driver, "send", slow)
    with autograd.context() as context_id:
        with contextlib.suppress(errors.BackwardError):
            autograd.backward(context_id, [fan((), (Fault("last"),))], timeout=3.0)
        with soon():
            check_shows_nothing(context_id, "driver", "c")
    check_nothing_is_left("driver", "c", within=2.0)
    monkeypatch.undo()
    for context in workers["b"].contexts.all():
        rpc.rpc_sync("b", autograd._release_context, args=(context.id,))


def fail_at_length_in_call() -> None:
    fail_at_length("call")


def test_a_call_whose_exception_is_too_large_to_be_sent():
    with telegrad.LocalCluster(["b"], transport="inproc", options=SMALL_MESSAGES):
        with soon(), pytest.raises(RuntimeError, match="boom boom"):
            rpc.rpc_sync("b", fail_at_length_in_call, timeout=3.0)
        assert rpc.rpc_sync("b", abs, args=(-1,), timeout=3.0) == 1


def test_a_participant_that_loses_another_blames_that_one(workers):
    """The connection between b and c ends while c is in users' code. The root is connected with both."""
    with autograd.context() as context_id:
        loss = forward(Fault("last", action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        wait_for_arrival("last")
        with soon():
            workers["b"]._peers.connection_with(workers["c"].id).abort("cut")
            error = running.wait().error
        open_gate("last")
        assert type(error) is errors.BackwardError
        assert str(error).startswith(f"Error on Node {error.worker_id}: worker {error.worker!r} is gone")
        assert error.worker in ("b", "c")


def test_ctrl_c_while_the_end_of_a_pass_is_told(workers):
    """Whoever was not told yet must hear of it all the same."""

    def press(event: Event) -> None:
        if is_event(event, "send", "started", "end"):
            raise KeyboardInterrupt

    with autograd.context() as context_id:
        loss = forward()
        with watching(workers["driver"], press), pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [loss], timeout=PATIENCE)
        with soon(3.0):
            wait_until(
                lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "the pass's end"
            )
    check_works()
    check_nothing_is_left()


class Vanishing:
    """A store whose keys go between a question and the next."""

    def __init__(self, store: HashStore) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        for key in keys:
            self._store.delete_key(key)
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_a_worker_that_leaves_while_it_is_looked_up():
    """Whoever looks must not wait until the store's time is over, with all other questions behind it."""
    store = HashStore()
    store.set_timeout(datetime.timedelta(seconds=2))
    group = Group(store, None, PATIENCE)
    group.publish(Member(1, "b", (), "here"))
    group._store = Vanishing(group._store)
    with soon():
        group.find(1)
    group._store = None
