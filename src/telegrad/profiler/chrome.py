"""Events in the format that Chrome and Perfetto read, and how they lie to each other.

X events are spans and operators, s and f events the two ends of a message. Times are in microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

ChromeEvent = dict[str, Any]
Thread = tuple[int, int]  # process and thread
FORMAT = 1  # of what telegrad adds to a trace
MESSAGES = "message"  # the category of arrows
ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))

# The category of one of telegrad's own slices -> what the thread does in it, where no other slice is inside.
STATE_OF = {
    "run": "compute",
    "program": "compute",
    "handle": "serialise",  # telegrad's work on a message, beside the codec
    "serialise": "serialise",
    "wire": "wire",
    "wait": "wait",
    "profiler": "wait",  # a worker that takes part starts to
}


def end_of(slice_: ChromeEvent) -> float:
    return slice_["ts"] + slice_["dur"]  # type: ignore[no-any-return]


def by_thread(events: Iterable[ChromeEvent]) -> dict[Thread, list[ChromeEvent]]:
    """telegrad's own slices, thread by thread, in the order of their beginnings, the outer before the inner."""
    found: dict[Thread, list[ChromeEvent]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in STATE_OF:
            found[event["pid"], event["tid"]].append(event)
    for slices in found.values():
        slices.sort(key=lambda e: (e["ts"], -e["dur"]))
    return found


def parents_of(slices: Sequence[ChromeEvent]) -> list[int]:
    """For each of a thread's slices the place of the one that it is in; -1: none. The outer come before the inner."""
    found: list[int] = []
    stack: list[int] = []
    for place, slice_ in enumerate(slices):
        while stack and end_of(slices[stack[-1]]) < slice_["ts"]:
            stack.pop()
        found.append(stack[-1] if stack else -1)
        stack.append(place)
    return found


def arrows(events: Sequence[ChromeEvent]) -> list[tuple[ChromeEvent, ChromeEvent]]:
    """The two ends of each message, in the order of the reading ends."""
    messages = [event for event in events if event.get("cat") == MESSAGES]
    starts = {event["id"]: event for event in messages if event["ph"] == "s"}
    return [(starts[e["id"]], e) for e in messages if e["ph"] == "f" and e["id"] in starts]
