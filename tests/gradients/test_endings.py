"""What ends while a pass runs: its time, its context, a worker; and the end of the pass itself. The chain of calls is
in fault_programs.py."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fault_programs as programs
import pytest
import torch
from fault_fixtures import fan, held_messages, info, is_event, trio, watching, workers  # noqa: F401
from fault_programs import (
    PATIENCE,
    PLACES,
    Fault,
    InThread,
    Trip,
    check_error,
    check_nothing_is_left,
    check_shows_nothing,
    check_works,
    forward,
    open_gate,
    soon,
    stuck_error,
    wait_at_gate,
    wait_for_arrival,
    wait_until,
)
from torch import Tensor

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.events import Event
from telegrad.gradients import in_process, leaves
from telegrad.gradients.backward_pass import FINISH, BackwardPass, Outcome
from telegrad.messages import Envelope, Kind
from telegrad.primitives import clock, current
from telegrad.primitives.waiter import Waiter

# -- its time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["outer", "last", "inner"])
def test_a_pass_that_is_stuck_ends_in_time_and_says_who_is_not_done(trio, place, jumping_clock):
    with autograd.context() as context_id:
        loss = forward(Fault(place, action=wait_at_gate))
        error = stuck_error(jumping_clock, context_id, loss, place, 1 if place == "inner" else 2)
        assert type(error.__cause__) is errors.CallTimeoutError
        assert repr(PLACES[place]) in str(error)
        assert "are not done" in str(error)
        rpc.rpc_sync(PLACES[place], open_gate, args=(place,))
        check_shows_nothing(context_id)
    rpc.rpc_sync(PLACES[place], programs.forget_gates)
    check_works()
    check_nothing_is_left()


def test_a_root_that_waits_for_nothing_but_reports_ends_in_time(workers, jumping_clock):
    """The root has nothing to wait for but the reports of others."""
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", programs.on_c, args=(torch.ones(3), (Fault("last", "leaf hook", wait_at_gate),)))
        running = InThread(autograd.backward, context_id, [loss.sum()], timeout=60.0)
        programs.wait_for_arrival("last")
        jumping_clock.jump(60.0)
        error = running.wait().error
        assert "workers ['b'] are not done" in str(error)
        open_gate("last")
        check_shows_nothing(context_id)


def hooked_leaf() -> Tensor:
    """Only the first pass that comes to it waits in its hook."""
    found, first = torch.ones(3, requires_grad=True), iter([wait_at_gate])
    found.register_post_accumulate_grad_hook(lambda _: next(first, lambda place: None)("leaf"))
    return found


@pytest.mark.parametrize("place", ["b", "driver"])
def test_a_pass_that_waits_for_the_hooks_of_another_one_ends_in_time(workers, place):
    """And its part at the worker where it waits ends with it."""
    leaf = hooked_leaf()
    leaves_of_b.append(leaf)

    def backward(timeout: float) -> None:
        with autograd.context() as context_id:
            if place == "b":
                loss = rpc.rpc_sync("b", times_leaf_of_b, args=(torch.ones(3, requires_grad=True),))
            else:
                loss = rpc.rpc_sync("b", programs.twice, args=(leaf * 1,))
            autograd.backward(context_id, [loss.sum()], timeout=timeout)

    first = InThread(backward, PATIENCE)
    wait_for_arrival("leaf")
    try:
        error = InThread(backward, 0.5).wait(PATIENCE / 2).error
        assert "timeout (500 ms)" in str(error)
        held_up = "'driver'] are not done: another pass runs the hooks of a leaf of shape (3,)"
        assert (held_up in str(error)) == (place == "driver")
        wait_until(lambda: len(workers["b"].engine.parts) == 1, "only the first pass has a part there")
    finally:
        open_gate("leaf")
        leaves_of_b.clear()
    assert first.wait().error is None


leaves_of_b: list[Tensor] = []


def times_leaf_of_b(x: Tensor) -> Tensor:
    return x * leaves_of_b[0]


@pytest.mark.parametrize("lost", [False, True])
def test_asking_what_a_failed_pass_awaits_is_part_of_its_time_limit(workers, monkeypatch, lost):
    """The one that is asked may be frozen."""
    engine, b = workers["driver"].engine, workers["b"]
    asked: list[float] = []  # seconds by which the question would end after the deadline

    def lose(*_: Any) -> None:
        if lost:
            engine.host.submit(lambda: engine.on_lost(b.id, "b", "in this test"))

    def ask(*args: Any) -> Any:
        asked.append(clock.now() + args[-1] - began - 0.3)
        return {}, {}

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(engine.host, "ask", ask)
        monkeypatch.setattr(b.engine, "on_message", lose)
        began = clock.now()
        with pytest.raises(
            errors.BackwardError, match="'b' is gone" if lost else r"timeout \(300 ms\).*nothing was heard"
        ):
            autograd.backward(context_id, [loss], timeout=0.3)
        monkeypatch.undo()
    assert len(asked) == 1
    assert asked[0] < 0.2  # the time limit counts from a moment later


def test_a_hook_of_the_root_that_waits_for_an_earlier_call():
    """While a thread waits in users' code, another one reads."""
    with telegrad.LocalCluster(["b", "c"], transport="inproc"), autograd.context() as context_id:
        received = rpc.rpc_sync("b", programs.twice, args=(torch.ones(3, requires_grad=True),))
        rpc.rpc_sync("c", abs, args=(1,))
        future = rpc.rpc_async("b", answer_after_gate)

        def wait_for_call(place: str) -> None:
            open_gate("earlier call")
            assert future.wait(3.0) == "answered"

        with soon():
            autograd.backward(context_id, [Trip.apply(received, wait_for_call, "root").sum()], timeout=PATIENCE)


def answer_after_gate() -> str:
    assert programs._gates["earlier call"].wait(PATIENCE)
    return "answered"


def in_a_moment(x: Tensor) -> Tensor:
    """Its report comes when the root's own part is long done, to a thread that reads."""
    return Trip.apply(x.requires_grad_(), lambda _: threading.Event().wait(0.1), "")


def test_a_pass_whose_time_is_over_as_the_last_report_comes(workers, monkeypatch):
    """A reading thread has noted the last report, but the root has not heard of it yet when its time is over. Either
    the pass fails, or its gradients count."""
    host = workers["driver"].engine.host
    reported, over = threading.Event(), threading.Event()
    on_report = BackwardPass.on_report

    def slowly(self: BackwardPass, worker: int, error: BaseException | None) -> Outcome:
        outcome = on_report(self, worker, error)
        if outcome is FINISH:
            reported.set()
            assert over.wait(PATIENCE)
        return outcome

    def wait_without_reading(waiter: Waiter, peer: int, deadline: float, turn: object) -> None:
        assert reported.wait(PATIENCE)
        waiter.sleep(deadline - clock.now())

    monkeypatch.setattr(BackwardPass, "on_report", slowly)
    monkeypatch.setattr(host, "begin_turn", lambda: None)
    monkeypatch.setattr(host, "wait", wait_without_reading)
    with autograd.context() as context_id:
        leaf = torch.ones(3, requires_grad=True)
        loss = (rpc.rpc_sync("b", in_a_moment, args=(torch.ones(3),)) * leaf).sum()
        running = InThread(autograd.backward, context_id, [loss], timeout=0.5)
        assert reported.wait(PATIENCE)
        with contextlib.suppress(AssertionError):  # it may wait for the thread that is held up
            running.wait(1.0)
        over.set()
        error = running.wait().error
        assert error is not None or autograd.get_gradients(context_id)
        with soon(3.0):
            wait_until(lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "its end")
    check_nothing_is_left()


# -- its context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["outer", "last", "inner"])
def test_releasing_a_context_ends_its_pass_everywhere(trio, place):
    with contextlib.ExitStack() as entered:
        context_id = entered.enter_context(autograd.context())
        loss = forward(Fault(place, action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        wait_for_arrival(place)
        entered.close()
        with soon():
            error = running.wait().error
        text = f"context {context_id} ended while its backward pass ran"
        check_error(error, info("driver"), text, errors.UnknownContextError)
        check_nothing_is_left()  # although the engine is still at work there
        rpc.rpc_sync(PLACES[place], open_gate, args=(place,))
        rpc.rpc_sync(PLACES[place], programs.forget_gates)
    check_works()
    check_nothing_is_left()


def test_releasing_a_context_ends_a_pass_that_another_worker_began(trio):
    with contextlib.ExitStack() as entered:
        context_id = entered.enter_context(autograd.context())
        faults = (Fault("last", action=wait_at_gate),)
        future = rpc.rpc_async("b", programs.backward_of_call, args=(context_id, faults))
        wait_for_arrival("last")
        entered.close()
        with soon(), pytest.raises(errors.BackwardError, match=f"context {context_id} ended while"):
            future.wait(PATIENCE)
        check_nothing_is_left()
        rpc.rpc_sync("c", open_gate, args=("last",))
        rpc.rpc_sync("c", programs.forget_gates)
    check_works()


def test_a_context_that_ends_while_a_pass_is_planned(workers, monkeypatch):
    driver = workers["driver"]
    plan = driver.engine._planner.plan

    def plan_and_release(*args: object) -> object:
        found = plan(*args)
        driver.release_context(context_id, wait=True)
        return found

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(driver.engine._planner, "plan", plan_and_release)
        with soon(), pytest.raises(errors.GradientError, match=f"context.*{context_id}"):
            autograd.backward(context_id, [loss], timeout=3.0)
        monkeypatch.undo()
    check_works()
    check_nothing_is_left()


def test_a_context_that_ends_as_its_pass_is_noted(workers, monkeypatch):
    driver = workers["driver"]

    class ReleasesFirst(dict):  # type: ignore[type-arg]
        def __setitem__(self, pass_id: int, local: object) -> None:
            monkeypatch.undo()
            driver.release_context(context_id)
            driver.engine.parts.passes[pass_id] = local

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(driver.engine.parts, "passes", ReleasesFirst())
        with soon(), pytest.raises(errors.GradientError):
            autograd.backward(context_id, [loss], timeout=PATIENCE)
    check_works()
    check_nothing_is_left()


def test_an_owner_that_is_busy_keeps_its_context(workers, monkeypatch):
    """c is gone, and b asks the context's owner, who does not answer in time, but lives."""
    asked = threading.Event()

    def too_late(*args: object, **kwargs: object) -> None:
        asked.set()
        raise errors.CallTimeoutError("no answer")

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(workers["b"], "call", too_late)
        workers["b"]._peers.connection_with(workers["c"].id).abort("cut")
        asked.wait(1.0)
        monkeypatch.undo()
        wait_until(lambda: not workers["b"]._threads._tasks, "the end of what is to be done")
        assert workers["b"].contexts.find(context_id) is not None
        del loss


def test_a_call_that_is_sent_as_its_context_ends_leaves_nothing(workers, held_messages):
    held, release = held_messages(workers["b"], "call", to="c")
    with autograd.context(wait=True):
        future = rpc.rpc_async("b", programs.on_b, args=(torch.ones(3, requires_grad=True), ()))
        assert held.wait(PATIENCE)
    release.set()
    with pytest.raises(errors.UnknownContextError, match="has ended on this worker"):
        future.wait(PATIENCE)
    check_nothing_is_left(within=2.0)


# -- a worker ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_that_shuts_down_ends_the_pass(workers, victim):
    place = "last"
    with autograd.context() as context_id:
        loss = forward(Fault(place, action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        wait_for_arrival(place)
        closing = InThread(workers[victim].close, graceful=False)
        with soon():
            error = running.wait().error
        assert type(error) is errors.BackwardError
        assert f"worker {victim!r} is gone" in str(error)
        open_gate(place)
        closing.wait()
        survivors = sorted({"driver", "b", "c"} - {victim})
        check_shows_nothing(context_id, *survivors)
    programs.check_works_with(*survivors)
    check_nothing_is_left(*survivors)


def test_a_root_that_shuts_down_ends_its_pass(workers):
    with autograd.context() as context_id:
        loss = forward(Fault("last", action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        wait_for_arrival("last")
        with soon():
            closing = InThread(workers["driver"].close, graceful=False)
            error = running.wait().error
            closing.wait()
        assert type(error) is errors.BackwardError
        assert type(error.__cause__) is errors.NotStartedError
        assert "was shut down during a backward pass" in str(error)
        for name in ("b", "c"):
            engine = workers[name].engine
            wait_until(lambda engine=engine: not any(engine.statistics().values()), "nothing left")
        open_gate("last")


@pytest.mark.parametrize("who", ["driver", "b", "c"])
def test_a_graceful_shutdown_waits_for_the_pass(workers, who):
    with autograd.context() as context_id:
        loss = forward(Fault("last", action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        wait_for_arrival("last")
        closing = InThread(workers[who].close, timeout=PATIENCE)
        assert not workers[who].closed_because
        open_gate("last")
        assert running.wait().error is None
        assert closing.wait().error is None


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


def test_a_participant_that_loses_another_after_its_report_keeps_what_it_reported(workers, held_messages):
    """The root has all reports and finishes the pass: it counts on every worker, or on none."""
    held, release = held_messages(workers["driver"], "end", to="b")
    with autograd.context() as context_id:
        loss = forward()
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        assert held.wait(PATIENCE)
        b, c = workers["b"], workers["c"]
        b._peers.connection_with(c.id).abort("cut")
        wait_until(lambda: b._peers.is_lost(c.id) and not b._threads._tasks, "the loss")
        release.set()
        assert running.wait().error is None
        found = rpc.rpc_sync("b", programs.gradients_by_place, args=(context_id,))
        assert found.keys() == {"inner", "outer"}


# -- the pass itself --------------------------------------------------------------------------------------


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
        wait_until(lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "the pass's end")
        leaf.grad = None  # not before: torch crashes if two threads touch it at once
    assert rpc.rpc_sync(PLACES[place], abs, args=(-1,), timeout=3.0) == 1
    check_works()
    check_nothing_is_left()


def test_an_error_at_the_root_is_its_own(workers, monkeypatch):
    """A call that is read meanwhile adds to `.grad` what is due: it must be answered, and backward() fails."""
    driver, here = workers["driver"], threading.get_ident()
    commits = driver.engine.parts.commits
    add_due = commits.add_due

    def after_a_call(deadline: float | None = None) -> bool:
        if threading.get_ident() == here:
            called = InThread(lambda: driver.call("b", rpc.rpc_sync, ("driver", abs, (-1,)), timeout=PATIENCE))
            assert called.wait().error is None
        return add_due(deadline)

    with autograd.context() as context_id:
        loss = forward()
        leaf = programs._leaves[driver]["first"]
        leaf.grad = torch.zeros(()).expand(3)
        monkeypatch.setattr(commits, "add_due", after_a_call)
        with soon(), pytest.raises(errors.BackwardError):
            autograd.backward(context_id, [loss], timeout=PATIENCE, into="grad")
        monkeypatch.undo()
        leaf.grad = None
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


LEAF = torch.ones(3, requires_grad=True)  # of b
MEANWHILE = threading.Event()


def times_leaf(x: Tensor) -> Tensor:
    return x * LEAF


def call_meanwhile(timeout: float) -> str:
    assert MEANWHILE.wait(PATIENCE)
    try:
        return str(rpc.rpc_sync("driver", abs, args=(-1,), timeout=timeout))
    except errors.CallTimeoutError as error:
        return str(error)


class Blocking(Tensor):
    """Blocks when something is added to it, until it may go on."""

    begun: threading.Event
    go_on: threading.Event

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "add_":
            cls.begun.set()
            assert cls.go_on.wait(PATIENCE)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def blocked(workers) -> Iterator[Callable[[], None]]:
    """Begins a pass that blocks while its gradients are added to `.grad` on b."""
    Blocking.begun, Blocking.go_on = threading.Event(), threading.Event()
    LEAF.grad = torch.zeros(3).as_subclass(Blocking)
    MEANWHILE.clear()
    started: list[InThread] = []

    def one_pass() -> None:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("b", times_leaf, args=(torch.ones(3),)).sum()
            autograd.backward(context_id, [loss], timeout=PATIENCE, into="grad")

    def begin() -> None:
        started.append(InThread(one_pass))
        assert Blocking.begun.wait(PATIENCE)

    yield begin
    Blocking.go_on.set()
    assert started[0].wait().error is None
    wait_until(lambda: LEAF.grad.tolist() == [1.0] * 3, "the gradients")
    LEAF.grad = None


def test_a_call_does_not_wait_beyond_its_deadline_for_gradients_that_are_being_added(workers, blocked):
    """Its answer is here, and another thread blocks while it adds what came before."""
    calling = InThread(workers["driver"].call, "b", call_meanwhile, (0.3,), None, PATIENCE)
    blocked()
    MEANWHILE.set()
    with soon():
        assert "are still being added to `.grad`" in calling.wait(PATIENCE / 2).value


def test_a_call_is_not_run_after_its_deadline_when_gradients_are_being_added(workers, blocked):
    blocked()
    with pytest.raises(errors.CallTimeoutError):
        rpc.rpc_sync("b", abs, args=(-1,), timeout=0.3)
    with soon():
        wait_until(
            lambda: not workers["b"]._server.being_served, "b has given the call up, and its thread is free again"
        )


def test_a_pass_does_not_wait_beyond_its_deadline_for_gradients_that_are_being_added(workers, blocked):
    """Its root is the worker that another pass has its gradients added on."""
    blocked()
    x = torch.ones(3, requires_grad=True)
    with current_in(workers["b"]), autograd.context() as context_id:
        with soon(), pytest.raises(errors.BackwardError, match="another thread that adds"):
            autograd.backward(context_id, [x.sum()], timeout=0.3, into="grad")


@contextlib.contextmanager
def current_in(worker: telegrad.Worker) -> Iterator[None]:
    token = current.worker_var.set(worker)
    try:
        yield
    finally:
        current.worker_var.reset(token)


@pytest.mark.parametrize("kind", ["end", "release"])
def test_a_peer_that_takes_no_message_for_a_while_hurts_nobody_else(workers, monkeypatch, kind):
    """Its connection is full, and the time for a word to it is over. The others must hear it all the same."""
    driver = workers["driver"]
    send, refused = driver.send, []

    def slow(connection: object, envelope: Envelope, body: object, timeout: float | None, *args: object) -> None:
        if envelope.kind == Kind[kind.upper()] and connection.peer.name == "b" and timeout is not None:
            refused.append(envelope.id)
            raise TimeoutError("worker 'b' did not take the message in time")
        send(connection, envelope, body, timeout, *args)

    monkeypatch.setattr(driver, "send", slow)
    with autograd.context() as context_id:
        with contextlib.suppress(errors.BackwardError):
            autograd.backward(context_id, [fan((), (Fault("last"),))], timeout=3.0)
        with soon():
            check_shows_nothing(context_id, "driver", "c")
    wait_until(lambda: bool(refused), "b's refusal")
    check_nothing_is_left(within=2.0)  # b has heard of it, too


def test_ctrl_c_while_the_end_of_a_pass_is_told(workers, monkeypatch):
    """The workers that were not told yet must hear of it all the same."""
    monkeypatch.setattr(in_process, "engines", [])  # as if they were in other processes

    pressed: list[Event] = []

    def press(event: Event) -> None:
        if is_event(event, "send", "started", "end") and not pressed:
            pressed.append(event)
            raise KeyboardInterrupt

    with autograd.context() as context_id:
        loss = forward()
        with watching(workers["driver"], press), pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [loss], timeout=PATIENCE, into="grad")
        with soon(3.0):
            wait_until(lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "the pass's end")
    check_works()
    check_nothing_is_left()


def fail_at_length() -> None:
    raise ValueError("too long " * 10_000)


def test_whatever_a_task_raises_its_connection_is_read_again(caplog):
    """Not even the shortened exception can be sent."""
    options = telegrad.Options(max_message_bytes=2048)
    with (
        telegrad.LocalCluster(["b"], transport="inproc", options=options),
        caplog.at_level(logging.CRITICAL, "telegrad"),  # what is logged holds the worker
    ):
        with pytest.raises(RuntimeError):
            rpc.rpc_sync("b", fail_at_length, timeout=0.5)
        assert rpc.rpc_sync("b", abs, args=(-1,), timeout=3.0) == 1


def test_ctrl_c_while_workers_of_this_process_end_a_pass(workers, monkeypatch):
    def press(*args: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(in_process, "finish", press)
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [loss], timeout=PATIENCE, into="grad")
        with soon(3.0):
            wait_until(lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "its end")
    for found in programs._leaves.values():
        for leaf in found.values():
            leaf.grad = None
    check_works()
    check_nothing_is_left()


def test_ctrl_c_as_all_have_reported(workers, monkeypatch):
    """The root was about to tell the others that the pass is done."""
    driver = workers["driver"]

    def press(*args: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(driver.engine, "_finish", press)
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [loss], timeout=PATIENCE)
        with soon(3.0):
            wait_until(lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "its end")
    check_works()
    check_nothing_is_left()
