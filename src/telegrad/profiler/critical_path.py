"""The critical path: the chain of work and messages that the end of a step waited for, link by link.

It is followed backwards. A thread that works has done so since its last wait, or since it began to handle a message; a
wait was ended by a message; and a message leads to the thread that sent it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from .breakdown import Interval
from .chrome import ChromeEvent, Thread, arrows, by_thread, end_of, parents_of

_LONGEST = 100_000  # links
_start: Callable[[ChromeEvent], float] = itemgetter("ts")


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


class _Message(NamedTuple):
    id: str
    reply_to: str
    name: str
    sender: Thread
    sent: float
    reader: int  # process
    read: float


def _read(message: _Message) -> float:
    return message.read


class _Graph:
    """Slices and messages, with the ways from one to the one before."""

    def __init__(self, events: Sequence[ChromeEvent]) -> None:
        self._threads = by_thread(events)
        self._parents = {thread: parents_of(slices) for thread, slices in self._threads.items()}
        self._by_category: dict[tuple[Thread, str], list[ChromeEvent]] = defaultdict(list)
        for thread, slices in self._threads.items():
            for slice_ in slices:
                self._by_category[thread, slice_["cat"]].append(slice_)
        self._runs_by_end = {t: sorted(self._by_category.get((t, "run"), []), key=end_of) for t in self._threads}
        self._read_at: dict[int, list[_Message]] = defaultdict(list)  # by process, in the order of reading
        self.by_id: dict[str, _Message] = {}
        for sent, read in sorted(arrows(events), key=lambda arrow: _start(arrow[1])):
            args, sender = read["args"], (sent["pid"], sent["tid"])
            id, reply_to = args["message"], args.get("reply_to", "")
            message = _Message(id, reply_to, read["name"], sender, sent["ts"], read["pid"], read["ts"])
            self._read_at[message.reader].append(message)
            self.by_id[id] = message

    def enclosing(self, thread: Thread, at: float, category: str) -> ChromeEvent | None:
        """The innermost slice of that category around a moment, or at the end of which it is."""
        slices, parents = self._threads.get(thread, []), self._parents.get(thread, [])
        place = bisect_left(slices, at, key=_start) - 1
        while place >= 0:
            slice_ = slices[place]
            if slice_["cat"] == category and at <= end_of(slice_):
                return slice_
            place = parents[place]
        return None

    def last(self, thread: Thread, category: str, at: float, floor: float) -> ChromeEvent | None:
        """The slice of that category that began last in between."""
        slices = self._by_category.get((thread, category), [])
        place = bisect_left(slices, at, key=_start) - 1
        return slices[place] if place >= 0 and slices[place]["ts"] >= floor else None

    def ended_by(self, wait: ChromeEvent, end: float) -> _Message | None:
        """The message that a wait was for: the answer to its call, or the last one that came in it."""
        messages = self._read_at.get(wait["pid"], [])
        within = messages[bisect_left(messages, wait["ts"], key=_read) : bisect_right(messages, end, key=_read)]
        answers = [m for m in within if m.reply_to == wait["args"].get("message")]
        found = answers or within
        return found[-1] if found else None

    def busy_before(self, pid: int, at: float) -> tuple[Thread, float] | None:
        """The thread of a process that was last at work on something before a moment, and when."""
        found: tuple[float, Thread, float] | None = None
        for thread, slices in self._threads.items():
            if thread[0] == pid:
                place = bisect_left(slices, at, key=_start)
                for slice_ in reversed(slices[max(0, place - 50) : place]):
                    if slice_["cat"] in ("run", "handle") and (found is None or slice_["ts"] > found[0]):
                        found = slice_["ts"], thread, min(at, end_of(slice_))
        return None if found is None else found[1:]

    def work(self, thread: Thread, start: float, end: float) -> list[tuple[str, float, float]]:
        """The thread's work in between, the last first: (name of the function that it ran, from, to)."""
        found = []
        while end > start:
            run = self.enclosing(thread, end, "run")
            if run is not None:
                name, begin = run["name"], max(start, run["ts"])
            else:
                name = "program" if self.enclosing(thread, end, "program") is not None else "telegrad"
                runs = self._runs_by_end.get(thread, [])
                place = bisect_left(runs, end, key=end_of) - 1
                begin = max(start, end_of(runs[place])) if place >= 0 else start
            if begin >= end:
                break
            found.append((name, begin, end))
            end = begin
        return found


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


def _follow(graph: _Graph, processes: Mapping[int, str], thread: Thread, window: Interval) -> list[Link]:
    floor, at = window
    links: list[Link] = []

    def add(pid: int, what: str, name: str, start: float, end: float) -> None:
        start = max(start, floor)
        if end > start:
            links.append(Link(processes.get(pid, str(pid)), what, name, start, end))

    def add_work(start: float, end: float) -> None:
        for name, begin, until in graph.work(thread, start, end):
            add(thread[0], "compute", name, begin, until)

    def jump(message: _Message) -> tuple[Thread, float]:
        name = f"{message.name} to {processes.get(message.reader, '?')}"
        add(message.sender[0], "wire", name, message.sent, message.read)
        return message.sender, message.sent

    while at > floor and len(links) < _LONGEST:
        handled = graph.enclosing(thread, at, "handle")
        if handled is None and graph.enclosing(thread, at, "program") is None:
            # Another thread has given this one something to do. The one that was at work then is taken to be it.
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
            end = min(at, end_of(wait))
            add_work(end, at)
            message = graph.ended_by(wait, end)
            if message is None or message.sent >= at:
                add(thread[0], "wait", wait["name"], wait["ts"], end)
                at = wait["ts"]
            else:
                add(thread[0], "wait", "waking up", message.read, end)
                thread, at = jump(message)
            continue
        add_work(began, at)
        message = graph.by_id.get(handled["args"]["message"]) if handled is not None else None
        if message is None or message.sent >= at:
            break
        add(thread[0], "wait", "for a thread", message.read, began)
        thread, at = jump(message)
    return links
