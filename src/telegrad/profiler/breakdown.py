"""Where a worker's time went: each moment is one of compute, serialise, wire, wait or idle.

A worker has several threads. Whatever comes first in this list, on any of them, is what the worker does at that moment.
While none of them works, a message on its way to or from the worker makes the moment `wire`; else a thread that waits
makes it `wait`; and with neither the worker is `idle`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .timeline import MESSAGES, ChromeEvent

STATES = ("compute", "serialise", "wire", "wait", "idle")
Interval = tuple[float, float]

# A slice's category -> what the thread does in it, where no other slice is inside.
_STATE_OF = {
    "run": "compute",
    "program": "compute",
    "handle": "serialise",  # what telegrad does with a message, beside the codec
    "serialise": "serialise",
    "wire": "wire",
    "wait": "wait",
    "profiler": "wait",  # a worker that takes part starts to
}
OWN = frozenset(_STATE_OF)  # the categories of telegrad's own slices
_OPERATORS = frozenset(("cpu_op", "kernel", "gpu_memcpy", "gpu_memset"))


def breakdown(
    events: Sequence[ChromeEvent], processes: Mapping[int, str], windows: Sequence[Interval]
) -> dict[str, dict[str, float]]:
    """For each worker, the microseconds of each state within the windows."""
    pieces: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for (pid, _), slices in by_thread(events).items():
        pieces[pid] += innermost(slices)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _OPERATORS:
            pieces[event["pid"]].append((event["ts"], event["ts"] + event["dur"], "operator"))
    for pid, start, end in _in_flight(events):
        pieces[pid].append((start, end, "flight"))
    return {name: _sweep(pieces.get(pid, []), windows) for pid, name in processes.items()}


def by_thread(events: Iterable[ChromeEvent]) -> dict[tuple[int, int], list[ChromeEvent]]:
    """telegrad's own slices, thread by thread, in the order of their beginnings, the outer before the inner."""
    found: dict[tuple[int, int], list[ChromeEvent]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in OWN:
            found[event["pid"], event["tid"]].append(event)
    for slices in found.values():
        slices.sort(key=lambda e: (e["ts"], -e["dur"]))
    return found


def innermost(slices: Sequence[ChromeEvent]) -> list[tuple[float, float, str]]:
    """What a thread did from when to when: of slices inside of each other the innermost counts."""
    found: list[tuple[float, float, str]] = []
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
        stack.append((slice_["ts"] + slice_["dur"], _STATE_OF[slice_["cat"]]))
    until(float("inf"))
    return found


def _in_flight(events: Iterable[ChromeEvent]) -> list[tuple[int, float, float]]:
    """(process, sent, read) of each message, at both of its ends."""
    starts: dict[Any, ChromeEvent] = {}
    found = []
    for event in events:
        if event.get("cat") == MESSAGES and event["ph"] == "s":
            starts[event["id"]] = event
    for event in events:
        if event.get("cat") == MESSAGES and event["ph"] == "f" and (start := starts.get(event["id"])):
            found += [(pid, start["ts"], event["ts"]) for pid in {start["pid"], event["pid"]}]
    return found


def _sweep(pieces: Iterable[tuple[float, float, str]], windows: Sequence[Interval]) -> dict[str, float]:
    changes: list[tuple[float, int, str]] = []
    for start, end, state in pieces:
        if end > start:
            changes += [(start, 1, state), (end, -1, state)]
    for start, end in windows:
        changes += [(start, 1, "window"), (end, -1, "window")]
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
