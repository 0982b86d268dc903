"""A worker's parts in passes alone, with a worker that only notes what it is told: no threads, no messages."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from telegrad.errors import PeerLostError
from telegrad.events import Events
from telegrad.gradients.context import all_sent
from telegrad.gradients.contexts import Contexts
from telegrad.gradients.leaves import GradientTable
from telegrad.gradients.local_pass import LocalPass
from telegrad.gradients.outbox import Outbox
from telegrad.gradients.participant import Parts
from telegrad.messages import COUNTER_BITS, Autograd, Begin, Done, Envelope, Failure, Kind, Member
from telegrad.primitives import clock

OWN, ROOT, PEER, OTHER = 1, 2, 3, 4
PASS = (ROOT << COUNTER_BITS) + 7


class Worker:
    """Worker 1, which has sent a tensor to PEER and later one to OTHER, and has a part in a pass of ROOT."""

    def __init__(self) -> None:
        self.events = Events()
        self.new_message_id = itertools.count(OWN << COUNTER_BITS).__next__
        self.posted: list[tuple[int, Any]] = []
        self.contexts = Contexts(OWN, self.new_message_id)
        self.context = self.contexts.new()
        self.parts = Parts(Member(OWN, "own", (), ""), self.contexts, self, report_here=pytest.fail)
        self.sends = [self._send(to) for to in (PEER, OTHER)]

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def later(self, seconds: float, task: Callable[[], None]) -> Callable[[], None]:
        return task

    def _send(self, to: int) -> int:
        id = self.new_message_id()
        leaf = torch.ones(3, requires_grad=True)
        (self.context.sends[id],) = all_sent(id, to, [leaf], self.context.graph, lambda: 0)
        return id

    def begin(self) -> Callable[[], None] | None:
        return self.parts.on_begin(Begin(PASS, self.context.id, tuple(self.sends), 5.0), 1)

    def gradients_from(self, peer: int, message: int) -> Callable[[], None] | None:
        autograd = Autograd(self.context.id, during=PASS)
        return self.parts.on_gradients(peer, Envelope(Kind.GRADIENTS, 1, message, autograd=autograd), None)

    def name_of(self, worker_id: int) -> str:
        return f"worker{worker_id}"

    def post(self, to: int, envelope: Envelope, body: Any, timeout: float | None, context: object) -> None:
        self.posted.append((to, body))

    def encode_error(self, error: BaseException, to: int) -> Failure:
        return Failure(b"", type(error).__name__, str(error), "")


def test_a_part_starts_when_the_gradients_of_the_last_message_are_here():
    worker = Worker()
    assert worker.begin() is None
    assert worker.gradients_from(PEER, worker.sends[0]) is None
    assert worker.gradients_from(OTHER, worker.sends[1]) is not None


def test_a_part_that_waits_for_a_lost_worker_fails_before_it_starts():
    worker = Worker()
    worker.begin()
    worker.parts.on_lost(PEER, "peer", PeerLostError("worker 'peer' is gone"))
    ((to, done),) = worker.posted
    assert to == ROOT
    assert isinstance(done, Done)
    assert done.pass_id == PASS
    assert done.failure.text == "worker 'peer' is gone"
    assert worker.context.failed.awaited[0].worker == OTHER  # what it waited for first


def test_the_loss_of_a_worker_without_a_part_harms_no_pass():
    worker = Worker()
    worker.begin()
    worker.parts.on_lost(OTHER + 1, "stranger", PeerLostError("gone"))
    assert not worker.posted
    assert worker.gradients_from(OTHER, worker.sends[1]) is not None


def test_the_loss_of_the_root_ends_the_part():
    worker = Worker()
    worker.begin()
    worker.parts.on_lost(ROOT, "root", PeerLostError("gone"))
    assert not worker.posted
    assert len(worker.parts) == 0
    assert worker.gradients_from(OTHER, worker.sends[1]) is None


def test_a_begin_of_a_pass_that_is_over_is_refused():
    worker = Worker()
    worker.parts.on_end(PASS, "it failed")
    refuse = worker.begin()
    assert refuse is not None
    refuse()
    ((to, done),) = worker.posted
    assert to == ROOT
    assert "came after the end of it or its context" in done.failure.text


def test_gradients_that_come_before_begin_are_kept():
    worker = Worker()
    assert worker.gradients_from(OTHER, worker.sends[1]) is None
    assert worker.begin() is not None


def test_a_batch_with_a_lie_in_it_is_dropped_as_a_whole(caplog):
    worker = Worker()
    worker.begin()
    autograd = Autograd(worker.context.id, during=PASS, more=(12345,))
    envelope = Envelope(Kind.GRADIENTS, 1, worker.sends[1], autograd=autograd)
    assert worker.parts.on_gradients(OTHER, envelope, None) is None
    assert "gradients of message 12345, which it was not sent" in caplog.text
    assert not worker.parts.passes[PASS].arrived


def test_tombstones_are_limited(monkeypatch):
    monkeypatch.setattr("telegrad.gradients.participant._TOMBSTONES", 10)
    worker = Worker()
    for number in range(30):
        worker.parts.on_end(PASS + number, "it failed")
    assert len(worker.parts._over) == 10


def test_the_part_of_a_root_never_counts_as_one_that_did_not_begin(jumping_clock):
    """It takes its time to tell all participants, and begins after that."""
    worker = Worker()
    local = LocalPass(is_root=True, pass_id=PASS, since=clock.now())
    local.context = worker.context
    worker.parts.add(local)
    jumping_clock.jump(3600.0)
    worker.parts.end_early_ones()
    assert worker.parts.passes[PASS] is local
    assert not local.is_over


@pytest.mark.parametrize("event", ["the end", "gradients twice", "a late begin", "a begin that was not read"])
def test_what_a_dropped_part_holds_goes_with_the_task(event):
    """Not while reading: it may be gigabytes, and the ends of tensors may run users' code."""
    worker = Worker()
    if event in ("the end", "gradients twice"):
        worker.begin()
    message = worker.sends[0]
    worker.gradients_from(PEER, message)
    ends = [weakref.ref(tensor) for tensor in give(worker.parts.passes[PASS], message)]
    match event:
        case "the end":
            task = worker.parts.on_end(PASS, "it failed")
        case "gradients twice":
            task = worker.gradients_from(PEER, message)
        case "a late begin":
            worker.contexts.take_out(worker.context.id)
            task = worker.begin()
        case _:
            task = worker.parts.on_unread(ROOT, PASS, MemoryError("no memory"))
    assert task is not None
    assert all(end() is not None for end in ends)
    assert not worker.posted
    task()
    assert all(end() is None for end in ends)
    assert len(worker.posted) == (0 if event == "the end" else 1)  # its root hears why


def give(local: LocalPass, message: int) -> list[torch.Tensor]:
    """Has a part hold four tensors, each in another way."""
    tensors = [torch.ones(3) for _ in range(4)]
    leaf = torch.ones(3, requires_grad=True)
    local.gradients = GradientTable.of([(leaf, tensors[0])])
    local.gathering = partial(GradientTable.of, [(leaf, tensors[1])])
    local.outboxes[PEER] = Outbox(PEER, gradients=[tensors[2]])
    local.undecoded[message].frames = tensors[3]
    return tensors
