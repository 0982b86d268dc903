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
from telegrad.gradients.contexts import Contexts
from telegrad.gradients.local_pass import LocalPass
from telegrad.gradients.outbox import Outbox, Poster
from telegrad.messages import COUNTER_BITS, Begin, Envelope, Kind
from telegrad.options import SHARED_MEMORY_FROM
from telegrad.primitives import clock
from telegrad.primitives.current import current_worker

ROOT, PEER = 1, 2
PASS = (ROOT << COUNTER_BITS) + 7
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, what a test does follows closely."""
    monkeypatch.setattr(module, "_BURST", 60.0)


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
        self.local = LocalPass(is_root=True, pass_id=PASS)
        self.local.context = Contexts(ROOT, self.host.new_message_id).new()
        self.local.begin = Begin(PASS, self.local.context.id, (), None)
        self.begin = Begin(PASS, self.local.context.id, (5,), None)
        self.outbox = self.local.outboxes[PEER] = Outbox(PEER, self.begin)
        self.poster = Poster(self.host, lambda: [self.local], lambda local, error: self.errors.append(error))  # type: ignore[arg-type]

    def add(self, message: int, *gradients: torch.Tensor | None, at_once: bool = False, is_last: bool = False) -> None:
        nbytes, _ = self.poster.weigh(PEER, gradients)
        self.poster.add(self.local, PEER, message, gradients, nbytes=nbytes, at_once=at_once, is_last=is_last)

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
        sending.add(message, torch.ones(2), at_once=True)
    assert [envelope.autograd.begin for _, envelope, _ in sending.host.posted] == [sending.begin, None]


def test_gradients_that_follow_closely_go_together(jumping_clock):
    sending = Sending()
    sending.add(5, torch.ones(2))
    sending.add(6, None, torch.ones(1))
    sending.add(7, torch.ones(2))
    assert sending.sent() == [(Kind.GRADIENTS, (5,), 1)]
    sending.poster.flush(sending.local)
    assert sending.sent()[1:] == [(Kind.GRADIENTS, (6, 7), 3)]
    assert not sending.poster.post(sending.local, sending.outbox), "nothing is left"
    jumping_clock.jump(100.0)
    sending.add(8, torch.ones(2))
    assert sending.sent()[2:] == [(Kind.GRADIENTS, (8,), 1)]


def test_a_gradient_that_waits_is_a_copy():
    """The Function that made it may use its memory again."""
    sending = Sending()
    sending.add(5, torch.ones(2))
    memory = torch.ones(2)
    sending.add(6, memory)
    memory.zero_()
    sending.poster.flush(sending.local)
    assert torch.equal(sending.host.posted[1][2].gradients[0], torch.ones(2))


def test_a_large_gradient_goes_alone():
    """Together they could be more than a message may have."""
    sending = Sending()
    sending.add(5, torch.ones(2))
    sending.add(6, torch.ones(2))
    sending.add(7, torch.ones(SHARED_MEMORY_FROM))
    for task in sending.host.submitted:
        task()
    assert [of for _, of, _ in sending.sent()] == [(5,), (6,), (7,)]


def test_no_outbox_holds_more_than_a_small_message():
    sending = Sending()
    for message in range(5, 40):
        sending.add(message, torch.ones(SHARED_MEMORY_FROM // 40))
    assert len(sending.host.posted) > 2
    assert sending.outbox.nbytes < SHARED_MEMORY_FROM


def test_a_worker_that_gets_no_gradients_is_told_of_the_pass_all_the_same():
    sending = Sending()
    sending.poster.flush(sending.local)
    assert sending.sent() == []  # gradients may still bring it along
    sending.poster.finish(sending.local, -1)
    sending.poster.finish(sending.local, -1)
    assert sending.sent() == [(Kind.BEGIN, (), 0)]


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_begin_says_how_much_time_is_left(jumping_clock, with_gradients):
    sending = Sending()
    sending.local.deadline = clock.now() + 10.0
    jumping_clock.jump(7.0)
    if with_gradients:
        sending.add(5, torch.ones(2))
        begin = sending.host.posted[0][1].autograd.begin
    else:
        sending.poster.finish(sending.local, -1)
        begin = sending.host.posted[0][2]
    assert 2.0 < begin.timeout <= 3.0


def test_what_goes_with_the_report_is_left():
    sending = Sending()
    sending.add(5, torch.ones(2), is_last=True)
    sending.poster.finish(sending.local, PEER)
    assert not sending.host.posted
    assert not sending.host.timers
    sending.poster.post(sending.local, sending.outbox, done=True)
    assert sending.host.posted[0][1].autograd.done


def test_another_thread_writes_what_is_large():
    sending = Sending()
    sending.add(5, torch.ones(SHARED_MEMORY_FROM))
    assert not sending.host.posted
    (task,) = sending.host.submitted
    sending.host.error = PeerLostError("gone")
    task()
    assert sending.errors == [sending.host.error]


def test_a_timer_sends_what_waits_while_the_engine_computes():
    """It is set once, and not put off by what comes later."""
    sending = Sending()
    for message in (5, 6, 7):
        sending.add(message, torch.ones(2))
    (timer,) = sending.host.timers
    timer()
    for task in sending.host.submitted:
        task()
    assert sending.sent() == [(Kind.GRADIENTS, (5,), 1), (Kind.GRADIENTS, (6, 7), 2)]
    sending.add(8, torch.ones(2))
    assert len(sending.host.timers) == 2


def test_what_a_timer_cannot_send_fails_the_part():
    sending = Sending()
    for message in (5, 6):
        sending.add(message, torch.ones(2))
    sending.host.error = PeerLostError("gone")
    sending.poster._post_held()
    (task,) = sending.host.submitted
    task()
    assert sending.errors == [sending.host.error]


def test_a_pass_that_failed_keeps_no_gradients():
    sending = Sending()
    for message in (5, 6):
        sending.add(message, torch.ones(2))
    sending.local.interrupt(ROOT, "it failed")
    assert not sending.local.outboxes


# -- in passes ---------------------------------------------------------------------------------------------


@contextmanager
def gradients_sent(worker: telegrad.Worker) -> Iterator[list[str]]:
    found: list[str] = []

    def see(event: Event) -> None:
        if (event.kind, event.stage, event.phase) == ("gradients", "send", "started"):
            found.append(event.detail)

    undo = worker.events.subscribe(see)
    try:
        yield found
    finally:
        undo()


def test_a_fan_takes_few_messages(monkeypatch):
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
def test_gradients_do_not_wait_for_an_engine_that_computes(count):
    """Those that wait for others to follow go out by the timer."""
    _served.append(threading.Semaphore(0))
    with telegrad.LocalCluster(["a"], transport="inproc"), autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        local = Computes.apply(x, count)  # made before what is received: the engine comes to it after that
        received = [rpc.rpc_sync("a", served, args=(x,)) for _ in range(count)]
        autograd.backward(context_id, [sum([r.sum() for r in received], local.sum())])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 1.0 + count))


# -- gradients whose memory is used again ------------------------------------------------------------------

MEMORY = {size: torch.zeros(size) for size in (3, 20_000)}


class Reuses(torch.autograd.Function):
    """Its gradient is in memory that it uses again, which is right in one process: torch copies what others hold."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        memory = MEMORY[gradient.numel()]
        torch.mul(gradient, ctx.factor, out=memory)
        return memory, None


def pair_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.view_as(x), y.view_as(y)


def same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@pytest.mark.parametrize("size", MEMORY)
@pytest.mark.parametrize("together", [False, True])
def test_a_function_that_uses_the_memory_of_its_gradients_again(size, together):
    with telegrad.LocalCluster(["a"], transport="inproc"):
        for _ in range(5):
            xs = [torch.ones(size, requires_grad=True) for _ in range(4)]
            with autograd.context() as context_id:
                if together:
                    received = [r for n in (0, 2) for r in rpc.rpc_sync("a", pair_of, args=(xs[n], xs[n + 1]))]
                else:
                    received = [rpc.rpc_sync("a", same, args=(x,)) for x in xs]
                losses = [Reuses.apply(r, float(n + 1)).sum() for n, r in enumerate(received)]
                autograd.backward(context_id, [torch.stack(losses).sum()])
                found = autograd.get_gradients(context_id)
                assert [found[x][0].item() for x in xs] == [1.0, 2.0, 3.0, 4.0]
                assert [found[x][-1].item() for x in xs] == [1.0, 2.0, 3.0, 4.0]
