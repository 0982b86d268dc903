"""From what all workers recorded to the events of one trace, in the format that Chrome and Perfetto read.

A process per worker, a thread per thread; X events for spans and operators, s and f events for the two ends of a
message. Times are microseconds since the profile began, of the root's clock.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..runtime.recording import Part
from .clocks import Clock, settle
from .spans import Message, Span, read_parts

ChromeEvent = dict[str, Any]
FORMAT = 1
MESSAGES = "message"  # the category of arrows
_DEVICE_THREADS = 1 << 30  # added to the number of a device's stream
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

    def at(worker: str, there: float) -> float:
        return (clocks[worker].to_root(there) - began) * 1e6

    numbers = {part.worker: part.id + 1 for part in parts}
    slices = _after_start([_slice(span, numbers[span.worker], at) for span in recorded.spans])
    main = next((part for part in parts if part.worker == root), None)
    if main is not None:
        slices.append(_program(main, numbers[root], (ended - began) * 1e6))
    operators, flows, crossing = _operators(parts, numbers, recorded.spans, slices, at)
    arrows: list[ChromeEvent] = []
    messages = [m for m in recorded.messages if m.id not in contradicting and at(m.sent.worker, m.sent.at) >= 0]
    functions = {span.message: span.name for span in recorded.spans if span.stage == "run"}
    for number, message in enumerate(messages, 1):
        arrows += _arrow(number, message, functions, numbers, at)
    gone = {name: max(numbers.values(), default=0) + place for place, name in enumerate(missing, 1)}
    events = [
        *_names(parts, numbers),
        *_gone(missing, gone, (ended - began) * 1e6),
        *slices,
        *operators,
        *flows,
        *arrows,
    ]
    said = {
        "format": FORMAT,
        "root": root,
        "window": [0.0, (ended - began) * 1e6],
        "workers": {part.worker: _said_of(part, numbers[part.worker], clocks[part.worker]) for part in parts},
        "missing": {name: {"pid": gone[name], "why": why} for name, why in missing.items()},
        "messages": len(messages),
        "bytes": sum(message.sent.nbytes for message in messages),
        "one_ended": recorded.one_ended,
        "contradicting": len(contradicting),
        "crossing": crossing,
        "profiler": {"messages": recorded.own_messages, "bytes": recorded.own_bytes},
    }
    return events, said


def _said_of(part: Part, number: int, clock: Clock) -> dict[str, Any]:
    return {
        "pid": number,
        "id": part.id,
        "process": part.process,
        "note": part.missing,
        "clock_uncertainty": round(clock.uncertainty * 1e6, 3),
        "clock_moved": round(clock.moved * 1e6, 3),
    }


def _event(phase: str, category: str, name: str, pid: int, tid: int, ts: float, **more: Any) -> ChromeEvent:
    return {"ph": phase, "cat": category, "name": name, "pid": pid, "tid": tid, "ts": round(ts, 3), **more}


def _slice(span: Span, pid: int, at: Callable[[str, float], float]) -> ChromeEvent:
    start, end = at(span.worker, span.start), at(span.worker, span.end)
    args: dict[str, Any] = {"message": str(span.message), "peer": span.peer} if span.message else {}
    if span.nbytes:
        args["bytes"] = span.nbytes
    return _event(
        "X", span.category, span.name, pid, span.thread, start, dur=round(end, 3) - round(start, 3), args=args
    )  # fmt: skip


def _program(main: Part, pid: int, length: float) -> ChromeEvent:
    """What the profile is around: all of it belongs to somebody's program."""
    return _event("X", "program", "program", pid, main.main_thread, 0.0, dur=round(length, 3), args={})


def _arrow(
    number: int,
    message: Message,
    functions: Mapping[int, str],
    numbers: Mapping[str, int],
    at: Callable[[str, float], float],
) -> list[ChromeEvent]:
    function = functions.get(message.id) or functions.get(message.reply_to)
    name = f"{message.kind} {function}" if function else message.kind
    sent, read = message.sent, message.read
    args: dict[str, Any] = {
        "bytes": sent.nbytes,
        "from": sent.worker,
        "to": read.worker,
        "message": str(message.id),
    }
    if message.reply_to:
        args["reply_to"] = str(message.reply_to)
    leaves, arrives = at(sent.worker, sent.at), at(read.worker, read.at)
    more = {"id": number, "args": args}
    start = _event("s", MESSAGES, name, numbers[sent.worker], sent.thread, leaves, **more)
    arrives = max(arrives, start["ts"])  # what is left after settling is less than a nanosecond
    return [start, _event("f", MESSAGES, name, numbers[read.worker], read.thread, arrives, bp="e", **more)]


def _names(parts: Sequence[Part], numbers: Mapping[str, int]) -> list[ChromeEvent]:
    found = []
    for part in parts:
        pid = numbers[part.worker]
        found.append(_meta("process_name", pid, name=part.worker))
        found.append(_meta("process_sort_index", pid, sort_index=pid))
        for thread, name in part.threads.items():
            found.append({**_meta("thread_name", pid, name=name), "tid": thread})
    return found


def _meta(what: str, pid: int, **args: Any) -> ChromeEvent:
    return {"ph": "M", "name": what, "pid": pid, "args": args}


def _gone(missing: Mapping[str, str], numbers: Mapping[str, int], end: float) -> list[ChromeEvent]:
    found = []
    for name, why in missing.items():
        found.append(_meta("process_name", numbers[name], name=f"{name} (missing)"))
        text = f"worker {name!r} is missing: {why}"
        found.append(_event("i", "missing", text, numbers[name], 0, end, s="g", args={"why": why}))
    return found


# -- operators ---------------------------------------------------------------------------------------------


def _operators(
    parts: Sequence[Part],
    numbers: Mapping[str, int],
    spans: Sequence[Span],
    slices: Sequence[ChromeEvent],
    at: Callable[[str, float], float],
) -> tuple[list[ChromeEvent], list[ChromeEvent], int]:
    """torch's own events, each under its worker; torch's own arrows; how many do not fit into the spans around them."""
    by_thread: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    process_of = {part.worker: part.process for part in parts}
    for span in spans:
        by_thread[process_of[span.worker], span.thread][span.worker] += 1
    around: dict[tuple[int, int], list[ChromeEvent]] = defaultdict(list)
    for slice_ in slices:
        around[slice_["pid"], slice_["tid"]].append(slice_)
    operators: list[ChromeEvent] = []
    flows: list[ChromeEvent] = []
    for part in parts:
        if not part.operators:
            continue
        exported = json.loads(zlib.decompress(part.operators))
        shift = (exported.get("baseTimeNanoseconds", 0) - part.clock_offset) / 1000  # to perf_counter, in microseconds
        for event in exported["traceEvents"]:
            if event.get("ph") not in ("X", "s", "f", "i") or event.get("cat") in ("Trace", "overhead"):
                continue
            is_device = not isinstance(event.get("tid"), int) or event.get("cat") in _ON_DEVICE
            thread = _DEVICE_THREADS + _number(event.get("tid")) if is_device else event["tid"]
            owners = by_thread.get((part.process, thread))
            worker = owners.most_common(1)[0][0] if owners else part.worker
            event["pid"], event["tid"] = numbers[worker], thread
            event["ts"] = round(at(worker, (event["ts"] + shift) / 1e6), 3)
            if event["ph"] == "X":
                event["dur"] = round(event.get("dur", 0.0), 3)
                operators.append(event)
            else:
                event["id"] = f"{part.worker}/{event.get('id')}"
                flows.append(event)
    operators = _after_start(operators)
    return operators, [flow for flow in flows if flow["ts"] >= 0], _fit(operators, around)


def _after_start(events: Iterable[ChromeEvent]) -> list[ChromeEvent]:
    """Without what a warm-up recorded. What goes on when the profile begins is there from then on."""
    found = []
    for event in events:
        end = event["ts"] + event["dur"]
        if end > 0 or event["ts"] >= 0:
            if event["ts"] < 0:
                event["ts"], event["dur"] = 0.0, round(end, 3)
            found.append(event)
    return found


_ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"))


def _number(thread: Any) -> int:
    return thread if isinstance(thread, int) else zlib.crc32(str(thread).encode()) % _DEVICE_THREADS


def _fit(operators: list[ChromeEvent], around: Mapping[tuple[int, int], list[ChromeEvent]]) -> int:
    """Two clocks were read for operators and spans. An operator that reaches over the edge of a span by less than they
    may differ is cut there. Returns how many reach further."""
    by_thread: dict[tuple[int, int], list[ChromeEvent]] = defaultdict(list)
    for operator in operators:
        by_thread[operator["pid"], operator["tid"]].append(operator)
    crossing = 0
    for thread, found in by_thread.items():
        spans = sorted(around.get(thread, ()), key=lambda s: (s["ts"], -s["dur"]))
        starts, parents = [s["ts"] for s in spans], parents_of(spans)
        for operator in found:
            edges: dict[tuple[float, float], None] = {}
            for edge in (operator["ts"], operator["ts"] + operator["dur"]):
                # Only a span around one of its ends, and not around the other, can be crossed.
                place = bisect_right(starts, edge) - 1
                while place >= 0:
                    edges[starts[place], starts[place] + spans[place]["dur"]] = None
                    place = parents[place]
            crossing += not _fit_one(operator, edges)
    return crossing


def parents_of(slices: Sequence[ChromeEvent]) -> list[int]:
    """For each of a thread's slices the place of the one that it is in; -1: none. The outer come before the inner."""
    found: list[int] = []
    stack: list[int] = []
    for place, slice_ in enumerate(slices):
        while stack and slices[stack[-1]]["ts"] + slices[stack[-1]]["dur"] < slice_["ts"]:
            stack.pop()
        found.append(stack[-1] if stack else -1)
        stack.append(place)
    return found


def _fit_one(operator: ChromeEvent, spans: Iterable[tuple[float, float]]) -> bool:
    start, end = operator["ts"], operator["ts"] + operator["dur"]
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
