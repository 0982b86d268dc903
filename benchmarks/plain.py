"""The suite `plain`: what it costs that `loss.backward()` finds its way to other workers without a context.

Each row compares two ways that take turns in one process, sample by sample: so both see the same machine. torch has
nothing to compare it with; the measure is telegrad without it, or torch's own backward().
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.callee import echo, tensor_of
from benchmarks.figures import Repeats, Section, Session, Suite
from benchmarks.sampling import Spread
from benchmarks.tables import Grid

NODES = 100
MICRO = 1e6

Way = Callable[[], Any]


@dataclass(frozen=True)
class Compared:
    """Seconds, of two ways to do the same."""

    what: str
    with_it: Spread
    without: Spread
    goal: float

    @property
    def ratio(self) -> float:
        return self.with_it.median / self.without.median


def measure_plain(session: Session) -> tuple[Compared, ...]:
    from telegrad._torch import Variable
    from telegrad.primitives.current import current_worker

    rpc, autograd, peer = session.backend.rpc, session.backend.autograd, session.peer
    calls: Any = current_worker().calls
    plain = calls._plain
    small = tensor_of(64)

    def call() -> None:
        rpc.rpc_sync(peer, echo, args=(small,))

    def call_off() -> float:
        calls._plain = None
        try:
            return _seconds(call)
        finally:
            calls._plain = plain

    found = [_compare("a call with nothing that requires grad; off", lambda: _seconds(call), call_off, session, 1.03)]

    x = torch.ones(16, requires_grad=True)
    rpc.rpc_sync(peer, scaled, args=(x.detach(),))

    def without_context() -> None:
        rpc.rpc_sync(peer, scaled, args=(x,)).sum().backward()

    def in_context() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync(peer, scaled, args=(x,)).sum()])

    ways = (lambda: _seconds(without_context), lambda: _seconds(in_context))
    found.append(_compare("forward and loss.backward(); the same in a context", *ways, session, 1.05))

    leaf = torch.ones(16, requires_grad=True)

    def local() -> float:
        loss = _chain(leaf)
        return _seconds(loss.backward)

    def torchs_own() -> float:
        engine = Variable._execution_engine
        Variable._execution_engine = engine.below
        try:
            return local()
        finally:
            Variable._execution_engine = engine

    title = f"a local backward() of {NODES} nodes"
    alive = rpc.rpc_sync(peer, scaled, args=(x,))
    found.append(_compare(f"{title} while a received tensor lives; torch's own", local, torchs_own, session, 1.15))
    del alive
    while current_worker().engine.plain.received:
        call()  # what has died is noted with the next message
    found.append(_compare(f"{title} while none does; torch's own", local, torchs_own, session, 1.01))
    return tuple(found)


_weight: dict[str, Tensor] = {}


def scaled(x: Tensor) -> Tensor:
    """Run by the peer, which has a leaf of its own."""
    if "w" not in _weight:
        _weight["w"] = torch.ones(16, requires_grad=True)
    return x * _weight["w"]


def _chain(x: Tensor) -> Tensor:
    for _ in range(NODES // 2):
        x = (x * 1.01).tanh()
    return x.sum()


def _seconds(way: Way) -> float:
    began = perf_counter()
    way()
    return perf_counter() - began


def _compare(
    what: str, with_it: Callable[[], float], without: Callable[[], float], session: Session, goal: float
) -> Compared:
    for _ in range(session.repeats.warmup):
        with_it()
        without()
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(session.repeats.count):
        for way in (0, 1) if number % 2 else (1, 0):
            samples[way].append((with_it, without)[way]())
    return Compared(what, Spread.of(samples[0]), Spread.of(samples[1]), goal)


def render_plain(found: tuple[Compared, ...]) -> str:
    header = ("what; compared with", "median", "p99", "compared with", "p99", "ratio", "goal", "met")
    grid = Grid(header, [_row(one) for one in found])
    return f"Medians in µs. The two ways of a row take turns, sample by sample.\n\n{grid.markdown()}"


def _row(one: Compared) -> tuple[str, ...]:
    cells = [f"{value * MICRO:.1f}" for spread in (one.with_it, one.without) for value in (spread.median, spread.p99)]
    met = "yes" if one.ratio <= one.goal else "no"
    return (one.what, *cells, f"{one.ratio:.3f}", f"{one.goal:.2f}", met)


SUITE = Suite(
    name="plain",
    title="loss.backward() without a context: what it costs",
    figures=(),
    sections=(
        Section(
            name="costs",
            title="Costs",
            measure=measure_plain,
            render=render_plain,
            repeats=Repeats(count=2000, warmup=100),
        ),
    ),
    remarks=("Two processes on one host, with one torch thread each; small tensors.",),
)
