"""Errors at every step of a pass: what backward() raises, and what the workers are left with. The chain of calls is in
fault_programs.py; workers that die are in test_deaths.py, and what ends while a pass runs in test_endings.py."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import logging
import threading

import fault_programs as programs
import pytest
import torch
from fault_fixtures import fan, held_messages, info, is_event, trio, watching, workers  # noqa: F401
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
    wait_until,
)
from torch import Tensor

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.events import Event
from telegrad.messages import Autograd, Begin, Envelope, Gradients, Kind
from telegrad.primitives import current
from telegrad.worker import Worker

SMALL_MESSAGES = telegrad.Options(max_message_bytes=1 << 18)


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


# -- exceptions of odd kinds ------------------------------------------------------------------------------


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


def fail_at_length_in_call() -> None:
    fail_at_length("call")


def test_a_call_whose_exception_is_too_large_to_be_sent():
    with telegrad.LocalCluster(["b"], transport="inproc", options=SMALL_MESSAGES):
        with soon(), pytest.raises(RuntimeError, match="boom boom"):
            rpc.rpc_sync("b", fail_at_length_in_call, timeout=3.0)
        assert rpc.rpc_sync("b", abs, args=(-1,), timeout=3.0) == 1


# -- gradients that are not what they should be -----------------------------------------------------------


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


BAD_GRADIENTS = {
    "too few": (),
    "too many": (torch.ones(3), torch.ones(3)),
    "of another shape": (torch.ones(4),),
    "of another dtype": (torch.ones(3, dtype=torch.float64),),
}


def forge(
    worker: Worker,
    to: int,
    message: int,
    gradients: tuple[Tensor, ...],
    pass_id: int | None = None,
    begin: Begin | None = None,
) -> None:
    """Sends gradients that no worker would send, by default in the pass that this code runs in."""
    during = current.pass_id.get() if pass_id is None else pass_id
    autograd_of_message = Autograd(current.context_id.get(), during=during, begin=begin)
    envelope = Envelope(Kind.GRADIENTS, worker.new_message_id(), message, autograd=autograd_of_message)
    worker.engine.host.post(to, envelope, Gradients(gradients), PATIENCE, None)


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


def test_gradients_that_come_twice(workers):
    driver = workers["driver"]

    def send_again(place: str) -> None:
        forge(driver, info("b").id, received.grad_fn.message, (torch.ones(3),))

    with autograd.context() as context_id:
        held = Fault("last", action=wait_at_gate)  # b is not done before it has heard of both
        received = rpc.rpc_sync("b", programs.on_b, args=(torch.ones(3, requires_grad=True), (held,)))
        error = backward_error(context_id, Trip.apply(received, send_again, "root").sum())
        assert error.worker == "b"
        assert "came twice" in str(error)
        open_gate("last")
        check_shows_nothing(context_id)
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
        wait_until(lambda: f"the report of worker {info('c').id} came after" in caplog.text, "a word in the log")
        check_shows_nothing(context_id)
    check_works()
    check_nothing_is_left()


def test_a_late_begin_is_dropped_and_logged(workers, held_messages, caplog):
    """The pass has failed on b before c hears of it at all, and c hears of the end first."""
    held, release = held_messages(workers["driver"], "gradients", to="c")  # which tell it of the pass
    failed = threading.Event()

    def see(event: Event) -> None:
        if is_event(event, "send", "complete", "end") and event.peer == "c":
            failed.set()

    with caplog.at_level(logging.INFO, "telegrad"), watching(workers["driver"], see):
        with autograd.context() as context_id:
            loss = fan((Fault("last", "hook", programs.fail_after_gate),), ())
            running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
            assert held.wait(PATIENCE)
            # What makes b fail: its gradients, as if the root had come to it already. (It may have.)
            message = next(iter(workers["b"].contexts.get(context_id).sends))
            (pass_id,) = workers["driver"].engine._roots
            if workers["driver"].engine.parts.passes.get(pass_id).outboxes[info("b").id].begin is not None:
                begin = Begin(pass_id, context_id, (message,), PATIENCE)
                forge(workers["driver"], info("b").id, message, (torch.ones(3),), pass_id, begin)
            programs.wait_for_arrival("last")
            programs.open_gate("last")
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
