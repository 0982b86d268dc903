"""From all workers' recordings to the events of one trace.

A process per worker, a thread per thread. Times are microseconds since the profile began, of the root's clock.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..runtime.recording import Part
from .chrome import FORMAT, MESSAGES, ON_DEVICE, ChromeEvent, Thread, by_thread, end_of, parents_of
from .clocks import Clock, settle
from .spans import Message, Span, read_parts

_DEVICE_THREADS = 1 << 30  # added to the number of a device's stream
_DEVICE_LANES = ON_DEVICE | {"gpu_user_annotation"}
# Where two clocks of one process, torch's and ours, disagree by no more than this, operators are fitted into the spans
# that they are in. In microseconds.
TOLERANCE = 100.0


def make_trace(
    parts: Sequence[Part],
    clocks: Mapping[str, Clock],
    root: str,
    began: float,
    ended: float,
    missing: Mapping[str, str],
) -> tuple[list[ChromeEvent], dict[str, Any]]:
    """The events, and what the trace says of itself."""
    recorded = read_parts(parts)
    contradicting = {message.id for message in settle(clocks, recorded.messages, root)}
    timeline = _Timeline(parts, clocks, began)
    length = (ended - began) * 1e6
    slices = _after_start([timeline.slice(span) for span in recorded.spans])
    # All that the profile is around belongs to the program that the root runs.
    slices += [
        _event("X", "program", "program", timeline.numbers[root], part.main_thread, 0.0, dur=round(length, 3), args={})
        for part in parts
        if part.worker == root
    ]
    operators, flows = timeline.operators(recorded.spans)
    messages = [
        message
        for message in recorded.messages
        if message.id not in contradicting and timeline.at(message.sent.worker, message.sent.at) >= 0
    ]
    functions = {span.message: span.name for span in recorded.spans if span.stage == "run"}
    arrows = [end for number, m in enumerate(messages, 1) for end in timeline.arrow(number, m, functions)]
    gone = {name: max(timeline.numbers.values(), default=0) + place for place, name in enumerate(missing, 1)}
    said = {
        "format": FORMAT,
        "root": root,
        "window": [0.0, length],
        "workers": {part.worker: timeline.said_of(part) for part in parts},
        "missing": {name: {"pid": gone[name], "why": why} for name, why in missing.items()},
        "messages": len(messages),
        "bytes": sum(message.sent.nbytes for message in messages),
        "one_ended": recorded.one_ended,
        "contradicting": len(contradicting),
        "crossing": _fit(operators, by_thread(slices)),
        "profiler": {"messages": recorded.own_messages, "bytes": recorded.own_bytes},
    }
    return [*timeline.names(), *_gone(missing, gone, length), *slices, *operators, *flows, *arrows], said


def _event(phase: str, category: str, name: str, pid: int, tid: int, ts: float, **more: Any) -> ChromeEvent:
    return {"ph": phase, "cat": category, "name": name, "pid": pid, "tid": tid, "ts": round(ts, 3), **more}


def _meta(what: str, pid: int, **args: Any) -> ChromeEvent:
    return {"ph": "M", "name": what, "pid": pid, "args": args}


class _Timeline:
    """The recordings, with the number that each worker has as a process of the trace, and one clock for all."""

    def __init__(self, parts: Sequence[Part], clocks: Mapping[str, Clock], began: float) -> None:
        self._parts = parts
        self._clocks = clocks
        self._began = began
        self.numbers = {part.worker: part.id + 1 for part in parts}

    def at(self, worker: str, there: float) -> float:
        return (self._clocks[worker].to_root(there) - self._began) * 1e6

    def said_of(self, part: Part) -> dict[str, Any]:
        clock = self._clocks[part.worker]
        return {
            "pid": self.numbers[part.worker],
            "id": part.id,
            "process": part.process,
            "note": part.missing,
            "clock_uncertainty": round(clock.uncertainty * 1e6, 3),
            "clock_moved": round(clock.moved * 1e6, 3),
        }

    def names(self) -> list[ChromeEvent]:
        found = []
        for part in self._parts:
            pid = self.numbers[part.worker]
            found.append(_meta("process_name", pid, name=part.worker))
            found.append(_meta("process_sort_index", pid, sort_index=pid))
            found += [{**_meta("thread_name", pid, name=name), "tid": tid} for tid, name in part.threads.items()]
        return found

    def slice(self, span: Span) -> ChromeEvent:
        start, end = self.at(span.worker, span.start), self.at(span.worker, span.end)
        args: dict[str, Any] = {"message": str(span.message), "peer": span.peer} if span.message else {}
        if span.nbytes:
            args["bytes"] = span.nbytes
        pid, duration = self.numbers[span.worker], round(end, 3) - round(start, 3)
        return _event("X", span.category, span.name, pid, span.thread, start, dur=duration, args=args)

    def arrow(self, number: int, message: Message, functions: Mapping[int, str]) -> list[ChromeEvent]:
        function = functions.get(message.id) or functions.get(message.reply_to)
        name = f"{message.kind} {function}" if function else message.kind
        sent, read = message.sent, message.read
        args = {"bytes": sent.nbytes, "from": sent.worker, "to": read.worker, "message": str(message.id)}
        if message.reply_to:
            args["reply_to"] = str(message.reply_to)
        leaves, arrives = self.at(sent.worker, sent.at), self.at(read.worker, read.at)
        more = {"id": number, "args": args}
        start = _event("s", MESSAGES, name, self.numbers[sent.worker], sent.thread, leaves, **more)
        arrives = max(arrives, start["ts"])  # what is left after settling is less than a nanosecond
        return [start, _event("f", MESSAGES, name, self.numbers[read.worker], read.thread, arrives, bp="e", **more)]

    def operators(self, spans: Sequence[Span]) -> tuple[list[ChromeEvent], list[ChromeEvent]]:
        """torch's own events, each under its worker, and torch's own arrows. Workers may share a process: an event
        belongs to the worker with most spans on its thread."""
        owners: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        process_of = {part.worker: part.process for part in self._parts}
        for span in spans:
            owners[process_of[span.worker], span.thread][span.worker] += 1
        operators: list[ChromeEvent] = []
        flows: list[ChromeEvent] = []
        for part in self._parts:
            exported = json.loads(zlib.decompress(part.operators)) if part.operators else {"traceEvents": []}
            shift = exported.get("baseTimeNanoseconds", 0) - part.clock_offset  # to perf_counter
            for event in exported["traceEvents"]:
                if event.get("ph") not in ("X", "s", "f", "i") or event.get("cat") in ("Trace", "overhead"):
                    continue
                thread = _thread_of(event)
                found = owners.get((part.process, thread))
                worker = found.most_common(1)[0][0] if found else part.worker
                event["pid"], event["tid"] = self.numbers[worker], thread
                event["ts"] = round(self.at(worker, (event["ts"] + shift / 1000) / 1e6), 3)
                if event["ph"] == "X":
                    event["dur"] = round(event.get("dur", 0.0), 3)
                    operators.append(event)
                elif event["ts"] >= 0:
                    event["id"] = f"{part.worker}/{event.get('id')}"
                    flows.append(event)
        return _after_start(operators), flows


def _thread_of(event: ChromeEvent) -> int:
    """The thread of an operator, or a number for the stream of a device."""
    thread = event.get("tid")
    if not isinstance(thread, int):
        return _DEVICE_THREADS + zlib.crc32(str(thread).encode()) % _DEVICE_THREADS
    return _DEVICE_THREADS + thread if event.get("cat") in _DEVICE_LANES else thread


def _gone(missing: Mapping[str, str], numbers: Mapping[str, int], end: float) -> list[ChromeEvent]:
    found = []
    for name, why in missing.items():
        found.append(_meta("process_name", numbers[name], name=f"{name} (missing)"))
        text = f"worker {name!r} is missing: {why}"
        found.append(_event("i", "missing", text, numbers[name], 0, end, s="g", args={"why": why}))
    return found


def _after_start(slices: Iterable[ChromeEvent]) -> list[ChromeEvent]:
    """Leaves out the warm-up. A slice that goes on when the profile begins is there from then on."""
    found = []
    for slice_ in slices:
        end = end_of(slice_)
        if end > 0 or slice_["ts"] >= 0:
            if slice_["ts"] < 0:
                slice_["ts"], slice_["dur"] = 0.0, round(end, 3)
            found.append(slice_)
    return found


def _fit(operators: list[ChromeEvent], around: Mapping[Thread, list[ChromeEvent]]) -> int:
    """Two clocks were read for operators and spans. An operator that reaches over the edge of a span by less than they
    may differ is cut there. Returns how many reach further."""
    parents = {thread: parents_of(spans) for thread, spans in around.items()}
    starts = {thread: [span["ts"] for span in spans] for thread, spans in around.items()}
    crossing = 0
    for operator in operators:
        thread = operator["pid"], operator["tid"]
        if thread not in around:
            continue
        edges: dict[tuple[float, float], None] = {}
        for edge in (operator["ts"], end_of(operator)):
            # Only a span around one of its ends, and not around the other, can be crossed.
            place = bisect_right(starts[thread], edge) - 1
            while place >= 0:
                span = around[thread][place]
                edges[span["ts"], end_of(span)] = None
                place = parents[thread][place]
        crossing += not _fit_one(operator, edges)
    return crossing


def _fit_one(operator: ChromeEvent, spans: Iterable[tuple[float, float]]) -> bool:
    start, end = operator["ts"], end_of(operator)
    for left, right in spans:
        if start < left < end < right:  # over its beginning
            if left - start <= min(TOLERANCE, end - left):
                start = left
            elif end - left <= TOLERANCE:
                end = left
            else:
                return False
        elif left < start < right < end:  # over its end
            if end - right <= min(TOLERANCE, right - start):
                end = right
            elif right - start <= TOLERANCE:
                start = right
            else:
                return False
    operator["ts"], operator["dur"] = start, end - start
    return True
