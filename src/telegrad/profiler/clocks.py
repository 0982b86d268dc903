"""One clock for all workers.

The root's clock counts. The offset of another one is measured by exchanges: the root asks for the time, and takes the
answer for the time in the middle between question and answer. Of several exchanges the quickest counts, and its error
is at most half of its duration.

The messages themselves settle the rest: none was read before it was written. Where two clocks contradict that, they are
moved, by no more than is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .spans import End, Message

EXCHANGES = 9
_ROUNDS = 100  # of settling; each one carries a correction one worker further


@dataclass(frozen=True, slots=True)
class Exchange:
    """At `at` of the root's clock, the other one showed `offset` more, give or take `uncertainty`. In seconds."""

    at: float
    offset: float
    uncertainty: float


def exchange(ask: Callable[[], float], times: int = EXCHANGES) -> Exchange:
    """The quickest of several exchanges. `ask` gives the other clock's time."""
    best: Exchange | None = None
    for _ in range(times):
        before = time.perf_counter()
        there = ask()
        after = time.perf_counter()
        middle, half = (before + after) / 2, (after - before) / 2
        if best is None or half < best.uncertainty:
            best = Exchange(middle, there - middle, half)
    assert best is not None
    return best


@dataclass(slots=True)
class Clock:
    """A worker's clock, against the root's: off by `offset` at `at`, and by `drift` seconds more each second."""

    offset: float = 0.0
    uncertainty: float = 0.0
    at: float = 0.0
    drift: float = 0.0
    moved: float = 0.0  # by what messages say

    def to_root(self, there: float) -> float:
        here = there - self.offset
        if self.drift:
            here = self.at + (there - self.offset - self.at) / (1 + self.drift)
        return here + self.moved


def clock_of(exchanges: Sequence[Exchange]) -> Clock:
    """From the exchanges with one worker, in the order in which they were made."""
    if not exchanges:
        return Clock()
    best = min(exchanges, key=lambda e: e.uncertainty)
    first, last = exchanges[0], exchanges[-1]
    apart, change = last.at - first.at, last.offset - first.offset
    # Two clocks of one host don't drift. Between hosts it is seen once it is more than could be a mistake.
    if abs(change) > 2 * (first.uncertainty + last.uncertainty):
        return Clock(first.offset, max(first.uncertainty, last.uncertainty), first.at, change / apart)
    return Clock(best.offset, best.uncertainty, best.at)


def settle(clocks: Mapping[str, Clock], messages: Iterable[Message], root: str) -> list[Message]:
    """Moves clocks until no message is read before it is written. Returns the messages for which that cannot be had."""
    messages = list(messages)
    # How much later the reader's clock must be, for each pair of workers.
    needed: dict[tuple[str, str], float] = {}
    for message in messages:
        pair = message.sent.worker, message.read.worker
        late = clocks[pair[0]].to_root(message.sent.at) - clocks[pair[1]].to_root(message.read.at)
        needed[pair] = max(late, needed.get(pair, late))
    moved = dict.fromkeys(clocks, 0.0)
    for _ in range(_ROUNDS):
        is_settled = True
        for (writer, reader), late in needed.items():
            missing = late + moved[writer] - moved[reader]
            if writer != reader and missing > 1e-9:
                is_settled = False
                # The root stays: then its peer's clock goes back.
                if reader == root:
                    moved[writer] -= missing
                elif writer == root:
                    moved[reader] += missing
                else:
                    moved[reader] += missing / 2
                    moved[writer] -= missing / 2
        if is_settled:
            break
    for name, by in moved.items():
        clocks[name].moved = by
    return [m for m in messages if _at(clocks, m.sent) > _at(clocks, m.read) + 1e-9]


def _at(clocks: Mapping[str, Clock], end: End) -> float:
    return clocks[end.worker].to_root(end.at)
