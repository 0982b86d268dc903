"""Messages of passes and contexts are believed only from workers that may send them. Each test has one of the workers
lie to another, at a moment that a gate holds, and then looks whether the pass is what it would have been."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import logging
from typing import Any

import fault_programs as programs
import pytest
import torch
from fault_fixtures import workers  # noqa: F401
from fault_programs import (
    PATIENCE,
    Fault,
    InThread,
    backward_error,
    check_nothing_is_left,
    check_works,
    forward,
    open_gate,
    soon,
    wait_at_gate,
    wait_for_arrival,
    wait_until,
)
from torch import Tensor

from telegrad import autograd, errors, rpc
from telegrad.messages import Autograd, Begin, Done, End, Envelope, Failure, Gradients, Kind, Release
from telegrad.worker import Worker

FAILURE = Failure(b"", "LieError", "a lie", "")


def lie(liar: Worker, to: Worker, kind: Kind, body: Any, *, envelope: Envelope | None = None) -> None:
    """Sends a message, and waits until it was taken in."""
    envelope = envelope or Envelope(kind, liar.new_message_id())
    liar.engine.host.post(to.id, envelope, body, PATIENCE, None)
    liar.call(to.id, abs, (1,))  # which was read after it
    wait_until(lambda: not to._threads._tasks, "the end of what is to be done")


def warned(caplog: pytest.LogCaptureFixture, liar: Worker, what: str) -> None:
    text = f"worker {liar.name!r} (id {liar.id}) has sent {what}"

    def is_there() -> bool:
        return any(text in r.getMessage() for r in list(caplog.records) if r.levelno == logging.WARNING)

    wait_until(is_there, text)  # a thread that has taken the task may still be at it
    caplog.clear()


class Held:
    """A pass of the driver that b alone takes part in, and that waits at a gate there."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.x = torch.ones(3, requires_grad=True)
        held = Fault("last", action=wait_at_gate)
        self.loss = rpc.rpc_sync("b", programs.on_c, args=(self.x, (held,))).sum()
        self.context_id = autograd._current_context()._context_id()
        self.running = InThread(autograd.backward, self.context_id, [self.loss], timeout=PATIENCE)
        wait_for_arrival("last")
        (local,) = workers["b"].engine.parts.all()
        self.pass_id = local.pass_id

    def check(self) -> None:
        open_gate("last")
        assert self.running.wait().error is None
        expected = torch.full((3,), programs.FACTORS["last"])
        assert torch.equal(autograd.get_gradients(self.context_id)[self.x], expected)


@pytest.mark.parametrize("failure", [None, FAILURE])
def test_a_report_of_a_worker_that_takes_no_part(workers, caplog, failure):
    with autograd.context():
        held = Held(workers)
        lie(workers["c"], workers["driver"], Kind.DONE, Done(held.pass_id, failure))
        warned(caplog, workers["c"], f"a report of pass {held.pass_id}, which it has no part in")
        held.check()
    check_nothing_is_left()


@pytest.mark.parametrize("aborted", ["", "a lie"])
def test_an_end_that_is_not_the_roots(workers, caplog, aborted):
    with autograd.context():
        held = Held(workers)
        lie(workers["c"], workers["b"], Kind.END, End(held.pass_id, aborted))
        warned(caplog, workers["c"], f"the end of pass {held.pass_id}, whose root it is not")
        held.check()
    check_nothing_is_left()


def test_a_begin_that_is_not_the_roots(workers, caplog):
    driver = workers["driver"]
    with autograd.context() as context_id:
        loss = forward()
        sends = tuple(workers["b"].contexts.find(context_id).sends)
        pass_id = driver.new_message_id()
        lie(workers["c"], workers["b"], Kind.BEGIN, Begin(pass_id, context_id, sends, None))
        warned(caplog, workers["c"], f"the begin of pass {pass_id}, whose root it is not")
        assert not workers["b"].engine.parts.all()
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        programs.check_chain(context_id)
    check_nothing_is_left()


def test_gradients_from_another_worker_than_the_message_went_to(workers, caplog):
    with autograd.context() as context_id:
        held = Held(workers)
        (sent,) = workers["driver"].contexts.find(context_id).sends.values()
        for message in (sent.message, workers["driver"].new_message_id()):
            said = Autograd(context_id, during=held.pass_id)
            envelope = Envelope(Kind.GRADIENTS, workers["c"].new_message_id(), message, autograd=said)
            body = Gradients((torch.full((3,), 100.0),))
            lie(workers["c"], workers["driver"], Kind.GRADIENTS, body, envelope=envelope)
            warned(caplog, workers["c"], f"gradients of message {message}, which it was not sent")
        held.check()
    check_nothing_is_left()


def test_the_end_of_a_context_from_a_worker_that_has_no_part_in_it(workers, caplog):
    with autograd.context() as context_id:
        held = Held(workers)
        lie(workers["c"], workers["b"], Kind.RELEASE, Release(context_id))
        warned(caplog, workers["c"], f"the end of context {context_id}, which it has no part in")
        lie(workers["c"], workers["driver"], Kind.RELEASE, Release(context_id))
        warned(caplog, workers["c"], f"the end of context {context_id}, which it has no part in")
        held.check()
    check_nothing_is_left()


def test_the_end_of_a_context_that_is_not_known_yet(workers):
    """It must not be buried before its first message comes."""
    driver = workers["driver"]
    with autograd.context() as context_id:
        lie(workers["c"], workers["b"], Kind.RELEASE, Release(context_id))
        autograd.backward(context_id, [forward()], timeout=PATIENCE)
        programs.check_chain(context_id)
    ended = driver.new_message_id()
    lie(driver, workers["b"], Kind.RELEASE, Release(ended))
    assert workers["b"].contexts.was_released(ended), "its owner is believed"


def test_the_end_of_a_context_that_a_worker_in_the_middle_tells(workers):
    """c has heard of the context from b only, and b tells it."""
    with autograd.context() as context_id:
        loss = forward()
        assert workers["c"].contexts.find(context_id).heard_from == {workers["b"].id}
        del loss
    wait_until(lambda: workers["c"].contexts.was_released(context_id), "the end at c")


# -- contexts and passes that are gone -----------------------------------------------------------------------


def test_a_pass_in_a_context_that_has_ended_on_a_participant(workers):
    """The root hears of it at once."""
    with autograd.context() as context_id:
        loss = forward()
        # It has sent its answer, and looks once more whether the context lives: it would tell the driver if not.
        wait_until(lambda: not workers["b"]._server.being_served, "the end of the call")
        workers["b"].contexts.take_out(context_id)
        with soon():
            error = backward_error(context_id, loss)
        assert isinstance(error.__cause__, errors.UnknownContextError)
        assert error.worker == "b"
        assert f"{context_id} on worker 'b': what it had for the context is gone there" in str(error)
    check_works()
    check_nothing_is_left()


def test_a_pass_that_is_over_on_a_participant_before_it_begins(workers):
    driver = workers["driver"]
    with autograd.context() as context_id:
        loss: Tensor = forward()
        with driver.engine.parts._lock:
            workers["c"].engine.parts._over.update(dict.fromkeys(next_ids(driver, 20)))
        with soon():
            error = backward_error(context_id, loss)
        assert error.worker == "c"
    workers["c"].engine.parts._over.clear()
    check_works()


def next_ids(worker: Worker, count: int) -> range:
    now = worker.new_message_id()
    return range(now, now + count)


def test_gradients_that_came_before_a_begin_that_is_refused(workers):
    b, driver = workers["b"], workers["driver"]
    with autograd.context() as context_id:
        loss = forward()
        (message, *_) = [s.message for s in b.contexts.find(context_id).sends.values() if s.to == driver.id]
        pass_id = driver.new_message_id()
        said = Autograd(context_id, during=pass_id)
        envelope = Envelope(Kind.GRADIENTS, driver.new_message_id(), message, autograd=said)
        lie(driver, b, Kind.GRADIENTS, Gradients((torch.ones(3),)), envelope=envelope)
        assert b.engine.parts.passes.get(pass_id) is not None
        b.engine.release(context_id)
        lie(driver, b, Kind.BEGIN, Begin(pass_id, context_id, (message,), None))
        assert b.engine.parts.passes.get(pass_id) is None
        del loss
    check_nothing_is_left()
