"""The critical path: the chain of work and messages that the end of a step waited for, link by link.

It is followed backwards. A thread that works has done so since its last wait, or since it began to handle a message; a
wait was ended by a message; and a message leads to the thread that sent it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .breakdown import Interval, by_thread
from .timeline import MESSAGES, ChromeEvent, parents_of

_LONGEST = 100_000  # links


@dataclass(frozen=True, slots=True)
class Link:
    """One piece of the path. In microseconds."""

    worker: str
    what: str  # compute, wire or wait
    name: str  # the function, or the message
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Message:
    id: str
    reply_to: str
    name: str
    sender: tuple[int, int]
    sent: float
    reader: tuple[int, int]
    read: float


class _Graph:
    def __init__(self, events: Sequence[ChromeEvent]) -> None:
        self.threads = by_thread(events)
        starts = {e["id"]: e for e in events if e.get("cat") == MESSAGES and e["ph"] == "s"}
        self.read_at: dict[int, list[_Message]] = defaultdict(list)  # by process, in the order of reading
        self.by_id: dict[str, _Message] = {}
        for event in events:
            if event.get("cat") == MESSAGES and event["ph"] == "f" and (start := starts.get(event["id"])):
                args = event["args"]
                message = _Message(
                    args["message"], args.get("reply_to", ""), event["name"], (start["pid"], start["tid"]),
                    start["ts"], (event["pid"], event["tid"]), event["ts"],
                )  # fmt: skip
                self.read_at[event["pid"]].append(message)
                self.by_id[message.id] = message
        for messages in self.read_at.values():
            messages.sort(key=lambda m: m.read)
        self._parents = {thread: parents_of(slices) for thread, slices in self.threads.items()}
        self._by_category: dict[Any, list[ChromeEvent]] = defaultdict(list)
        for thread, slices in self.threads.items():
            for slice_ in slices:
                self._by_category[thread, slice_["cat"]].append(slice_)
        self._runs_by_end = {thread: self._runs_of(thread) for thread in self.threads}

    def _runs_of(self, thread: tuple[int, int]) -> list[ChromeEvent]:
        return sorted(self._by_category.get((thread, "run"), []), key=_end)

    def enclosing(self, thread: tuple[int, int], at: float, category: str) -> ChromeEvent | None:
        """The innermost slice of that kind around a moment, or at the end of which it is."""
        slices, parents = self.threads.get(thread, []), self._parents.get(thread, [])
        place = bisect_left(slices, at, key=_start) - 1
        while place >= 0:
            slice_ = slices[place]
            if slice_["cat"] == category and at <= _end(slice_):
                return slice_
            place = parents[place]
        return None

    def last(self, thread: tuple[int, int], category: str, at: float, floor: float) -> ChromeEvent | None:
        """The slice of that kind that began last in between."""
        slices = self._by_category.get((thread, category), [])
        place = bisect_left(slices, at, key=_start) - 1
        return slices[place] if place >= 0 and slices[place]["ts"] >= floor else None

    def last_run_ended(self, thread: tuple[int, int], start: float, end: float) -> float:
        """When a function ended last in between; `start` if none did."""
        runs = self._runs_by_end.get(thread, [])
        place = bisect_left(runs, end, key=_end) - 1
        return max(start, _end(runs[place])) if place >= 0 else start

    def ended_by(self, wait: ChromeEvent, end: float) -> _Message | None:
        """The message that a wait was for: the answer to its call, or the last one that came in it."""
        messages = self.read_at.get(wait["pid"], [])
        first = bisect_left(messages, wait["ts"], key=_read)
        last = bisect_right(messages, end, key=_read)
        within = messages[first:last]
        answers = [m for m in within if m.reply_to == wait["args"].get("message")]
        found = answers or within
        return found[-1] if found else None

    def busy_before(self, pid: int, at: float) -> tuple[tuple[int, int], float] | None:
        """The thread of a process that was last at work on something before a moment, and when."""
        found: tuple[float, tuple[int, int], float] | None = None
        for thread, slices in self.threads.items():
            if thread[0] == pid:
                place = bisect_left(slices, at, key=_start)
                for slice_ in reversed(slices[max(0, place - 50) : place]):
                    if slice_["cat"] in ("run", "handle") and (found is None or slice_["ts"] > found[0]):
                        found = slice_["ts"], thread, min(at, slice_["ts"] + slice_["dur"])
        return None if found is None else (found[1], found[2])


def _start(slice_: ChromeEvent) -> float:
    return slice_["ts"]  # type: ignore[no-any-return]


def _end(slice_: ChromeEvent) -> float:
    return slice_["ts"] + slice_["dur"]  # type: ignore[no-any-return]


def _read(message: _Message) -> float:
    return message.read


def critical_path(
    events: Sequence[ChromeEvent], processes: Mapping[int, str], root: str, windows: Sequence[Interval]
) -> list[Link]:
    """The links of all windows, the first one first."""
    graph = _Graph(events)
    program = next((e for e in events if e.get("cat") == "program" and processes.get(e["pid"]) == root), None)
    if program is None:
        return []
    links: list[Link] = []
    for window in windows:
        links += reversed(_follow(graph, processes, (program["pid"], program["tid"]), window))
    return links


def _follow(graph: _Graph, processes: Mapping[int, str], thread: tuple[int, int], window: Interval) -> list[Link]:
    floor, at = window
    links: list[Link] = []

    def add(pid: int, what: str, name: str, start: float, end: float) -> None:
        start = max(start, floor)
        if end > start:
            links.append(Link(processes.get(pid, str(pid)), what, name, start, end))

    def jump(message: _Message) -> tuple[tuple[int, int], float]:
        there = processes.get(message.reader[0], "?")
        add(message.sender[0], "wire", f"{message.name} to {there}", message.sent, message.read)
        return message.sender, message.sent

    while at > floor and len(links) < _LONGEST:
        handled = graph.enclosing(thread, at, "handle")
        if handled is None and graph.enclosing(thread, at, "program") is None:
            # A thread that somebody has given something to do. Whoever was at work then is taken to be who.
            earlier = graph.busy_before(thread[0], at)
            if earlier is None:
                break
            add(thread[0], "wait", "for a thread", earlier[1], at)
            if earlier[0] == thread and earlier[1] >= at:
                break
            thread, at = earlier
            continue
        began = handled["ts"] if handled is not None else floor
        wait = graph.last(thread, "wait", at, began)
        if wait is not None:
            end = min(at, _end(wait))
            _add_work(graph, add, thread, end, at)
            message = graph.ended_by(wait, end)
            if message is None or message.sent >= at:
                add(thread[0], "wait", wait["name"], wait["ts"], end)
                at = wait["ts"]
            else:
                add(thread[0], "wait", "waking up", message.read, end)
                thread, at = jump(message)
            continue
        _add_work(graph, add, thread, began, at)
        message = graph.by_id.get(handled["args"]["message"]) if handled is not None else None
        if message is None or message.sent >= at:
            break
        add(thread[0], "wait", "for a thread", message.read, began)
        thread, at = jump(message)
    return links


def _add_work(graph: _Graph, add: Any, thread: tuple[int, int], start: float, end: float) -> None:
    """What the thread did in between, under the names of the functions that it ran."""
    while end > start:
        run = graph.enclosing(thread, end, "run")
        if run is not None:
            name, begin = run["name"], max(start, run["ts"])
        else:
            name = "program" if graph.enclosing(thread, end, "program") is not None else "telegrad"
            begin = graph.last_run_ended(thread, start, end)
        if begin >= end:
            return
        add(thread[0], "compute", name, begin, end)
        end = begin
