"""How a call and its backward grow with the tensors of its message that require grad: all used, or one in ten.

The slope beyond that of one process is what distribution costs for a tensor more, one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.figures import Growth, Repeats, Samples, Session
from benchmarks.passes import WAYS, one_pass
from benchmarks.programs import loss_of
from benchmarks.sampling import timed_by_size

SIZE = 64  # elements of each
COUNTS = (1, 10, 100, 1000)
DIRECTIONS = ("forward", "backward")


class Seconds(NamedTuple):
    forward: float
    backward: float


def use_some(tensors: list[Tensor], step: int) -> Tensor:
    """Run by the peer: one in so many is used."""
    return torch.stack(tensors[::step]).sum(0)


@dataclass(frozen=True)
class Message:
    """Passes through a call with so many tensors, of which one in `step` is used; or without a call."""

    session: Session | None
    count: int
    step: int
    plain: bool
    leaf: Tensor

    def seconds(self, part: int) -> float:
        return self._run()[0][part]

    def check(self) -> None:
        local = Message(None, self.count, self.step, plain=True, leaf=self.leaf)
        torch.testing.assert_close(self._run()[1], local._run()[1])

    def _run(self) -> tuple[Seconds, Tensor]:
        """The tensors have a history here, as activations and states have, and no storage in common."""
        sent = [self.leaf * (1 + number / self.count) for number in range(self.count)]
        with one_pass(self.session, plain=self.plain) as this:
            start = perf_counter()
            loss = loss_of(self._used(sent))
            between = perf_counter()
            this.backward(loss)
            took = Seconds(between - start, perf_counter() - between)
            gradient = self._gradient(this.context_id)
        return took, gradient

    def _used(self, sent: list[Tensor]) -> Tensor:
        if self.session is None:
            return use_some(sent, self.step)
        rpc_sync, peer = self.session.backend.rpc.rpc_sync, self.session.peer
        return rpc_sync(peer, use_some, args=(sent, self.step))  # type: ignore[no-any-return]

    def _gradient(self, context_id: int | None) -> Tensor:
        if context_id is not None:
            assert self.session is not None
            return self.session.backend.autograd.get_gradients(context_id)[self.leaf].clone()  # type: ignore[no-any-return]
        gradient, self.leaf.grad = self.leaf.grad, None
        assert gradient is not None
        return gradient


def time_message(session: Session, *, step: int, part: int, plain: bool) -> Samples:
    messages = _messages(session, step, plain)
    for message in messages.values():
        message.check()
    return _time_messages(messages, part, session)


def time_local_message(session: Session, *, step: int, part: int) -> Samples:
    torch.set_num_threads(1)
    return _time_messages(_messages(None, step, plain=True), part, session)


def _messages(session: Session | None, step: int, plain: bool) -> dict[int, Message]:
    leaf = torch.full((SIZE,), 0.5, requires_grad=True)
    return {count: Message(session, count, step, plain, leaf) for count in COUNTS if count >= step}


def _time_messages(messages: dict[int, Message], part: int, session: Session) -> Samples:
    calls = {count: partial(message.seconds, part) for count, message in messages.items()}
    return timed_by_size(calls, session.repeats, at_least=20)


def _growths(name: str, what: str, step: int, goals: tuple[dict[int, float], dict[int, float]]) -> tuple[Growth, ...]:
    """Forward and backward, each way."""
    return tuple(
        Growth(
            name=f"{name}-{direction}{end}",
            title=f"{direction}, {what}: {way}",
            measure=partial(time_message, step=step, part=part, plain=plain),
            local=partial(time_local_message, step=step, part=part),
            repeats=Repeats(count=20, warmup=3),
            unit="µs",
            of="tensors",
            base=10,
            goals=goals[part],
        )
        for part, direction in enumerate(DIRECTIONS)
        for end, way, plain in WAYS
    )


GROWTHS = (
    *_growths("tensors", "tensors, all used", 1, ({100: 0.6, 1000: 0.6}, {100: 0.7, 1000: 0.7})),
    *_growths("tenth", "tensors, one in ten used", 10, ({}, {})),
)
