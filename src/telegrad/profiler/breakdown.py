"""The time of a worker, by state: each moment is one of compute, serialise, wire, wait or idle.

A worker has several threads. The first state in this list that any of them is in is the worker's at that moment. While
no thread works, a message on its way to or from the worker makes the moment `wire`; else a thread that waits makes it
`wait`; and with neither the worker is `idle`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .chrome import ON_DEVICE, STATE_OF, ChromeEvent, arrows, by_thread, end_of

STATES = ("compute", "serialise", "wire", "wait", "idle")
Interval = tuple[float, float]
Piece = tuple[float, float, str]  # from, to, state


def breakdown(
    events: Sequence[ChromeEvent], processes: Mapping[int, str], windows: Sequence[Interval]
) -> dict[str, dict[str, float]]:
    """For each worker, the microseconds of each state within the windows."""
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for (pid, _), slices in by_thread(events).items():
        pieces[pid] += innermost(slices)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE | {"cpu_op"}:
            pieces[event["pid"]].append((event["ts"], end_of(event), "operator"))
    for sent, read in arrows(events):
        for pid in {sent["pid"], read["pid"]}:
            pieces[pid].append((sent["ts"], read["ts"], "flight"))
    return {name: _sweep(pieces.get(pid, []), windows) for pid, name in processes.items()}


def innermost(slices: Sequence[ChromeEvent]) -> list[Piece]:
    """The states of a thread, one after the other: of slices inside of each other the innermost counts."""
    found: list[Piece] = []
    stack: list[tuple[float, str]] = []  # (end, state)
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        while stack and stack[-1][0] <= time:
            end, state = stack.pop()
            if end > at:
                found.append((at, end, state))
                at = end
        if stack and time > at:
            found.append((at, time, stack[-1][1]))
        at = max(at, time)

    for slice_ in slices:
        until(slice_["ts"])
        at = slice_["ts"]
        stack.append((end_of(slice_), STATE_OF[slice_["cat"]]))
    until(float("inf"))
    return found


def _sweep(pieces: Iterable[Piece], windows: Sequence[Interval]) -> dict[str, float]:
    changes: list[tuple[float, int, str]] = []
    for start, end, state in [*pieces, *((start, end, "window") for start, end in windows)]:
        if end > start:
            changes += [(start, 1, state), (end, -1, state)]
    changes.sort(key=lambda change: change[0])
    total = dict.fromkeys(STATES, 0.0)
    now: dict[str, int] = defaultdict(int)
    before = 0.0
    for at, change, state in changes:
        if now["window"]:
            total[_state(now)] += at - before
        now[state] += change
        before = at
    return total


def _state(now: Mapping[str, int]) -> str:
    busy = now.get("serialise") or now.get("wire") or now.get("wait")
    # An operator counts by itself only on a thread of which nothing else is known, such as one of the user's.
    if now.get("compute") or (now.get("operator") and not busy):
        return "compute"
    if now.get("serialise"):
        return "serialise"
    if now.get("wire") or now.get("flight"):
        return "wire"
    return "wait" if now.get("wait") else "idle"
