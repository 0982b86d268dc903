"""Errors at every step of a pass: what backward() raises, and what the workers are left with. The chain of calls is in
fault_programs.py; workers that die are in test_deaths.py."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import fault_programs as programs
import pytest
import torch
from fault_programs import (
    PATIENCE,
    PLACES,
    WAYS,
    BoomError,
    Fault,
    InThread,
    Trip,
    backward_error,
    check_error,
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
from torch import Tensor

import telegrad
from telegrad import autograd, current, errors, rpc
from telegrad.events import Event
from telegrad.messages import Autograd, Envelope, Gradients, Kind
from telegrad.worker import Worker


@pytest.fixture(autouse=True)
def gates() -> Iterator[None]:
    yield
    programs.forget_gates()


@pytest.fixture
def trio(transport: str, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    """Workers "b" and "c", and the driver, on each transport."""
    with telegrad.LocalCluster(["b", "c"], transport=transport, server=server) as cluster:
        yield cluster


@pytest.fixture
def workers() -> Iterator[dict[str, Worker]]:
    """The same in this process."""
    with telegrad.LocalCluster(["b", "c"], transport="inproc") as cluster:
        found = {worker.name: worker for worker in cluster._in_process}
        for name in found:
            rpc.rpc_sync(name, rpc.rpc_sync, args=("driver", abs, (1,)))  # all have met, and have threads
        yield found
        found.clear()  # pytest keeps it for longer


def info(name: str) -> telegrad.WorkerInfo:
    return rpc.get_worker_info(name)


# -- exceptions -------------------------------------------------------------------------------------------


def check_exceptions(way: str) -> None:
    """At each place, in this kind of users' code."""
    for place, worker in PLACES.items():
        with autograd.context() as context_id:
            error = backward_error(context_id, forward(Fault(place, way)))
            check_error(error, info(worker), f"boom at {place}", BoomError)
            if worker != "driver":
                traceback = error.__cause__.__cause__
                assert isinstance(traceback, errors.RemoteTraceback)
                assert traceback.worker == worker
                assert "fault_programs.py" in traceback.text and "in fail" in traceback.text
            check_shows_nothing(context_id)
        with autograd.context() as context_id:
            backward_error(context_id, forward(Fault(place, way)), into="grad")
            check_shows_nothing(context_id)
    check_works()
    check_nothing_is_left()


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_the_backward_pass(trio, way):
    check_exceptions(way)


@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint"])
def test_an_exception_in_a_recomputation(workers, way):
    """In this process only: the first checkpoint of a process imports for seconds."""
    check_exceptions(way)


def test_an_exception_in_the_forward_pass(trio):
    for place, worker in PLACES.items():
        with autograd.context() as context_id:
            with pytest.raises(BoomError, match=f"boom at {place}") as caught:
                forward(Fault(place, "call"))
            if worker != "driver":
                assert f"on worker {worker!r}" in str(caught.value.__cause__)
            # What was sent before it is of no use to anybody, and harms nobody.
            autograd.backward(context_id, [forward()], timeout=PATIENCE)
            programs.check_chain(context_id)
    check_nothing_is_left()


def test_a_second_pass_over_a_chain_that_failed_once(trio):
    for place in PLACES:
        with autograd.context() as context_id:
            loss = forward(Fault(place, "hook"))
            first = backward_error(context_id, loss, retain_graph=True)
            second = backward_error(context_id, loss, retain_graph=True)
            assert str(first) == str(second)
            autograd.backward(context_id, [forward()], timeout=PATIENCE)
            programs.check_chain(context_id)
    check_nothing_is_left()


class UnsendableError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot be sent")


def fail_unsendable(place: str) -> None:
    raise UnsendableError(f"unsendable at {place}")


def test_an_exception_that_cannot_be_sent(workers):
    with autograd.context() as context_id:
        error = backward_error(context_id, forward(Fault("last", action=fail_unsendable)))
        assert error.worker == "c"
        assert "unsendable at last" in str(error)
        assert type(error.__cause__) is errors.RemoteError
        assert "UnsendableError" in str(error.__cause__)
    check_works()


class NamelessError(Exception):
    pass


def fail_without_a_text(place: str) -> None:
    raise NamelessError


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_without_a_text(workers, place):
    with autograd.context() as context_id:
        error = backward_error(context_id, forward(Fault(place, action=fail_without_a_text)))
        check_error(error, info(PLACES[place]), "NamelessError", NamelessError)


def interrupt(place: str) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["root", "first"])
def test_ctrl_c_at_the_root(workers, place):
    with autograd.context() as context_id:
        loss = forward(Fault(place, action=interrupt))
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [loss], timeout=PATIENCE)
        check_shows_nothing(context_id)
    check_works()
    check_nothing_is_left()


# -- gradients that are not what they should be -----------------------------------------------------------


BAD_GRADIENTS = {
    "too few": (),
    "too many": (torch.ones(3), torch.ones(3)),
    "of another shape": (torch.ones(4),),
    "of another dtype": (torch.ones(3, dtype=torch.float64),),
}


def forge(
    worker: Worker, to: int, message: int, gradients: tuple[Tensor, ...], pass_id: int | None = None
) -> None:
    """Sends gradients that no worker would send, by default in the pass that this code runs in."""
    during = current.pass_id.get() if pass_id is None else pass_id
    autograd_of_message = Autograd(current.context_id.get(), during=during)
    envelope = Envelope(Kind.GRADIENTS, worker.new_message_id(), message, autograd=autograd_of_message)
    worker.engine.host.post(to, envelope, Gradients(gradients), PATIENCE, None)


@contextlib.contextmanager
def watching(worker: Worker, see: Callable[[Event], None]) -> Iterator[None]:
    end = worker.events.subscribe(see)
    try:
        yield
    finally:
        end()


def is_event(event: Event, *expected: str) -> bool:
    return (event.stage, event.phase, event.kind) == expected


@pytest.mark.parametrize("what", BAD_GRADIENTS)
def test_gradients_that_do_not_fit_are_refused_by_the_receiver(workers, what):
    driver = workers["driver"]
    refused = threading.Event()

    def see(event: Event) -> None:
        if is_event(event, "receive", "started", "done"):
            refused.set()

    def send_bad_ones(place: str) -> None:
        forge(driver, info("b").id, received.grad_fn.message, BAD_GRADIENTS[what])
        assert refused.wait(PATIENCE)

    with autograd.context() as context_id, watching(driver, see):
        received = rpc.rpc_sync("b", programs.on_b, args=(torch.ones(3, requires_grad=True), ()))
        loss = Trip.apply(received, send_bad_ones, "root").sum()
        error = backward_error(context_id, loss)
        check_error(error, info("b"), "", errors.GradientError)
        assert str(received.grad_fn.message) in str(error)
        assert "3" in str(error) or "2 gradients" in str(error) or "0 gradients" in str(error)
        check_shows_nothing(context_id)
    check_works()
    check_nothing_is_left()


def test_gradients_that_come_twice_or_for_nobody(workers):
    driver = workers["driver"]

    def send_again(place: str) -> None:
        forge(driver, info("b").id, received.grad_fn.message, (torch.ones(3),))

    def send_for_nobody(place: str) -> None:
        forge(driver, info("b").id, driver.new_message_id(), (torch.ones(3),))

    for act in (send_again, send_for_nobody):
        with autograd.context() as context_id:
            held = Fault("last", action=wait_at_gate)  # b is not done before it has heard of both
            received = rpc.rpc_sync("b", programs.on_b, args=(torch.ones(3, requires_grad=True), (held,)))
            error = backward_error(context_id, Trip.apply(received, act, "root").sum())
            assert error.worker == "b"
            assert "came twice" in str(error) or "has no part in this pass" in str(error)
            open_gate("last")
            check_shows_nothing(context_id)
        programs.forget_gates()
    check_works()
    check_nothing_is_left()


def test_gradients_that_cannot_be_decoded(workers, monkeypatch):
    def bad(*_: object) -> None:
        raise errors.DecodeError("these bytes make no sense")

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(workers["c"].engine.host, "decode", bad)
        error = backward_error(context_id, loss)
        check_error(error, info("c"), "these bytes make no sense", errors.DecodeError)
        monkeypatch.undo()
    check_works()


# -- which failure, and what comes late -------------------------------------------------------------------


def fan(faults_of_b: tuple[Fault, ...], faults_of_c: tuple[Fault, ...]) -> Tensor:
    """
         ┌▶ b ─┐
    x ───┤     ├─▶ loss
         └▶ c ─┘
    """
    x = torch.ones(3, requires_grad=True)
    one = rpc.rpc_async("b", programs.on_c, args=(x, faults_of_b))
    other = rpc.rpc_async("c", programs.on_c, args=(x, faults_of_c))
    return (one.wait() + other.wait()).sum()


def test_the_first_failure_wins(trio):
    for first, second in (("b", "c"), ("c", "b")):
        faults = {first: (Fault("last"),), second: (Fault("last", action=programs.fail_after_gate),)}
        with autograd.context() as context_id:
            error = backward_error(context_id, fan(faults["b"], faults["c"]))
            check_error(error, info(first), "boom at last", BoomError)
            rpc.rpc_sync(second, open_gate, args=("last",))
            check_shows_nothing(context_id)
        rpc.rpc_sync(second, programs.forget_gates)
    check_works()
    check_nothing_is_left()


@pytest.fixture
def held_messages() -> Iterator[Callable[..., tuple[threading.Event, threading.Event]]]:
    """Holds messages of a kind up as they are sent. Gives two events: one is being held; let them go."""
    with contextlib.ExitStack() as undo:

        def hold(worker: Worker, kind: str, *, to: str = "") -> tuple[threading.Event, threading.Event]:
            held, release = threading.Event(), threading.Event()

            def see(event: Event) -> None:
                if is_event(event, "send", "started", kind) and to in ("", event.peer):
                    held.set()
                    assert release.wait(PATIENCE)

            undo.callback(worker.events.subscribe(see))
            undo.callback(release.set)
            return held, release

        yield hold


def test_late_gradients_are_dropped_and_logged(workers, held_messages, caplog):
    held, release = held_messages(workers["c"], "gradients")
    with caplog.at_level(logging.INFO, "telegrad"), autograd.context() as context_id:
        loss = fan((Fault("last", action=programs.fail_after_gate),), ())
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        assert held.wait(PATIENCE)
        open_gate("last")
        check_error(running.wait().error, info("b"), "boom at last", BoomError)
        assert "gradients" not in caplog.text
        release.set()
        wait_until(lambda: "the gradients of message" in caplog.text, "a word in the log")
        check_shows_nothing(context_id)
    check_works()
    check_nothing_is_left()


def test_a_late_report_is_dropped_and_logged(workers, held_messages, caplog):
    held, release = held_messages(workers["c"], "done")
    with caplog.at_level(logging.INFO, "telegrad"), autograd.context() as context_id:
        loss = fan((Fault("last", action=programs.fail_after_gate),), (Fault("last"),))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        assert held.wait(PATIENCE)
        open_gate("last")
        check_error(running.wait().error, info("b"), "boom at last", BoomError)
        release.set()
        wait_until(
            lambda: f"the report of worker {info('c').id} came after" in caplog.text, "a word in the log"
        )
        check_shows_nothing(context_id)
    check_works()
    check_nothing_is_left()


def test_a_late_begin_is_dropped_and_logged(workers, held_messages, caplog):
    """The pass has failed on b before c hears of it at all, and c hears of the end first."""
    held, release = held_messages(workers["driver"], "begin", to="c")
    failed = threading.Event()

    def see(event: Event) -> None:
        if is_event(event, "send", "complete", "end") and event.peer == "c":
            failed.set()

    with caplog.at_level(logging.INFO, "telegrad"), watching(workers["driver"], see):
        with autograd.context() as context_id:
            loss = fan((Fault("last", "hook"),), ())
            running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
            assert held.wait(PATIENCE)
            # What makes b fail: its gradients, as if the root had come to it already.
            message = next(iter(workers["b"].contexts.get(context_id).sends))
            (pass_id,) = workers["driver"].engine._roots
            forge(workers["driver"], info("b").id, message, (torch.ones(3),), pass_id)
            assert failed.wait(PATIENCE)
            release.set()
            check_error(running.wait().error, info("b"), "boom at last", BoomError)
            wait_until(lambda: "the begin of" in caplog.text, "a word in the log")
            check_shows_nothing(context_id)
    check_works()
    check_nothing_is_left()


def test_gradients_of_an_unknown_pass_do_not_bring_a_context_back(workers, caplog):
    with autograd.context(wait=True) as context_id:
        loss = forward()
        message = loss.grad_fn.next_functions[0][0].next_functions[0][0].message
        autograd.backward(context_id, [loss], timeout=PATIENCE)
    check_nothing_is_left()
    with caplog.at_level(logging.INFO, "telegrad"):
        token = current.context_id.set(context_id)
        forge(workers["driver"], info("b").id, message, (torch.ones(3),), message)
        current.context_id.reset(token)
        wait_until(lambda: f"after the end of its context {context_id}" in caplog.text, "a word in the log")
    assert not autograd.debug_info()["contexts"]
    with pytest.raises(errors.UnknownContextError):
        rpc.rpc_sync("b", autograd.get_gradients, args=(context_id,))


# -- time -------------------------------------------------------------------------------------------------


def test_a_pass_that_is_stuck_ends_in_time_and_says_who_is_not_done(workers):
    """The root has nothing to wait for but the reports of others."""
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(
            "b", programs.on_c, args=(torch.ones(3), (Fault("last", "leaf hook", wait_at_gate),))
        )
        error = backward_error(context_id, loss.sum(), timeout=0.2)
        assert "workers ['b'] are not done" in str(error)
        open_gate("last")
        check_shows_nothing(context_id)


# -- contexts that end while a pass runs ------------------------------------------------------------------


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


# -- workers that shut down -------------------------------------------------------------------------------


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
        assert not workers[who]._closed_because
        open_gate("last")
        assert running.wait().error is None
        assert closing.wait().error is None
