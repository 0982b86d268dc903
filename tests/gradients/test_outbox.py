"""Gradients on their way out: which go together, and that none waits for long."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import PeerLostError
from telegrad.events import Event
from telegrad.gradients import outbox as module
from telegrad.gradients.backward_pass import Part
from telegrad.gradients.contexts import Contexts
from telegrad.gradients.local_pass import LocalPass
from telegrad.gradients.outbox import Outbox, Poster
from telegrad.messages import COUNTER_BITS, Begin, Envelope, Kind
from telegrad.options import SHARED_MEMORY_FROM
from telegrad.primitives.current import current_worker

ROOT, PEER = 1, 2
PASS = (ROOT << COUNTER_BITS) + 7
PATIENCE = 20.0


class Host:
    """Notes what it is given to send."""

    def __init__(self) -> None:
        self.new_message_id = itertools.count(ROOT << COUNTER_BITS).__next__
        self.posted: list[tuple[int, Envelope, Any]] = []
        self.submitted: list[Callable[[], Any]] = []
        self.timers: list[Callable[[], Any]] = []
        self.error: Exception | None = None

    def post(self, to: int, envelope: Envelope, body: Any, timeout: float | None, context: object) -> None:
        if self.error is not None:
            raise self.error
        self.posted.append((to, envelope, body))

    def submit(self, task: Callable[[], Any]) -> None:
        self.submitted.append(task)

    def later(self, seconds: float, task: Callable[[], Any]) -> Callable[[], None]:
        return lambda: self.timers.append(task)


class Sending:
    """A part of the root in a pass that PEER takes part in, and its outbox for PEER."""

    def __init__(self) -> None:
        self.host = Host()
        self.errors: list[Exception] = []
        self.local = LocalPass(PASS, Part(is_root=True))
        self.local.context = Contexts(ROOT, self.host.new_message_id).new()
        self.local.begin = Begin(PASS, self.local.context.id, (), None)
        self.begin = Begin(PASS, self.local.context.id, (5,), None)
        self.outbox = self.local.outboxes[PEER] = Outbox(PEER, self.begin)
        self.poster = Poster(self.host, lambda: [self.local], lambda local, error: self.errors.append(error))  # type: ignore[arg-type]

    def sent(self) -> list[tuple[Kind, tuple[int, ...], int]]:
        """(kind, the messages whose gradients these are, how many gradients) of all that was posted."""
        found = []
        for to, envelope, body in self.host.posted:
            assert to == PEER
            said = envelope.autograd
            of = (envelope.reply_to, *said.more) if said is not None else ()
            found.append((Kind(envelope.kind), of, len(getattr(body, "gradients", ()))))
        return found


def test_the_first_gradients_tell_of_the_pass():
    sending = Sending()
    for message in (5, 6):
        sending.outbox.add(message, [torch.ones(2)])
        assert sending.poster.post(sending.local, sending.outbox)
    assert [envelope.autograd.begin for _, envelope, _ in sending.host.posted] == [sending.begin, None]


def test_gradients_of_several_messages_go_together():
    sending = Sending()
    sending.outbox.add(5, [torch.ones(2)])
    sending.outbox.add(6, [None, torch.ones(1)])
    sending.poster.post(sending.local, sending.outbox)
    assert sending.sent() == [(Kind.GRADIENTS, (5, 6), 3)]
    assert not sending.poster.post(sending.local, sending.outbox), "nothing is left"


def test_a_worker_that_gets_no_gradients_is_told_of_the_pass_all_the_same():
    sending = Sending()
    sending.poster.flush(sending.local)
    sending.poster.flush(sending.local)
    assert sending.sent() == [(Kind.BEGIN, (), 0)]


def test_what_goes_with_the_report_is_left():
    sending = Sending()
    sending.outbox.add(5, [torch.ones(2)])
    sending.poster.flush(sending.local, but=PEER)
    assert not sending.host.posted
    sending.poster.post(sending.local, sending.outbox, done=True)
    assert sending.host.posted[0][1].autograd.done


def test_another_thread_writes_what_is_large():
    sending = Sending()
    sending.outbox.add(5, [torch.ones(SHARED_MEMORY_FROM)])
    sending.poster.post(sending.local, sending.outbox)
    assert not sending.host.posted
    (task,) = sending.host.submitted
    sending.host.error = PeerLostError("gone")
    task()
    assert sending.errors == [sending.host.error]


def test_a_timer_sends_what_waits_while_the_engine_computes():
    sending = Sending()
    sending.outbox.add(5, [torch.ones(2)])
    sending.poster.post_later()
    (timer,) = sending.host.timers
    timer()
    timer()
    assert sending.sent() == [(Kind.GRADIENTS, (5,), 1)]


def test_what_a_timer_cannot_send_fails_the_part():
    sending = Sending()
    sending.outbox.add(5, [torch.ones(2)])
    sending.host.error = PeerLostError("gone")
    sending.poster._post_held()
    assert sending.errors == [sending.host.error]


# -- in passes ---------------------------------------------------------------------------------------------


@contextmanager
def gradients_sent(worker: telegrad.Worker) -> Iterator[list[str]]:
    found: list[str] = []

    def see(event: Event) -> None:
        if (event.kind, event.stage, event.phase) == ("gradients", "send", "complete"):
            found.append(event.detail)

    undo = worker.events.subscribe(see)
    try:
        yield found
    finally:
        undo()


def test_a_fan_takes_few_messages(monkeypatch):
    monkeypatch.setattr("telegrad.gradients.engine_call.BURST", 60.0)  # however slow this machine is
    monkeypatch.setattr(module, "_LINGER", 60.0)
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        workers = {worker.name: worker for worker in cluster._in_process}
        with gradients_sent(current_worker()) as out, gradients_sent(workers["a"]) as back:
            x = torch.ones(3, requires_grad=True)
            with autograd.context() as context_id:
                calls = [rpc.rpc_async("a", torch.mul, args=(x, float(n))) for n in range(32)]
                autograd.backward(context_id, [torch.stack([call.wait() for call in calls]).sum()])
                assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), float(sum(range(32)))))
    assert len(out) == len(back) == 2, "the first ones at once, and then the rest"
    assert sum(len(detail.split()) - 2 for detail in out) == 32


_served: list[threading.Semaphore] = []  # one release for each gradient


class Served(torch.autograd.Function):
    """Says that the gradient has come to this worker."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _served[-1].release()
        return gradient


class Computes(torch.autograd.Function):
    """Computes until the gradients of all calls have come to where they belong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        for _ in range(ctx.count):
            assert _served[-1].acquire(timeout=PATIENCE), "they wait for the engine, which computes"
        return gradient, None


def served(x: torch.Tensor) -> torch.Tensor:
    return Served.apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_gradients_do_not_wait_for_an_engine_that_computes(monkeypatch, count):
    """Those that wait for others to follow go out by the timer."""
    monkeypatch.setattr("telegrad.gradients.engine_call.BURST", 60.0)
    _served.append(threading.Semaphore(0))
    with telegrad.LocalCluster(["a"], transport="inproc"), autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        local = Computes.apply(x, count)  # made before what is received: the engine comes to it after that
        received = [rpc.rpc_sync("a", served, args=(x,)) for _ in range(count)]
        autograd.backward(context_id, [sum([r.sum() for r in received], local.sum())])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 1.0 + count))
