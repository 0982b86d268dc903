"""Trace: the work of all workers, as one file that Perfetto opens.

load(path), merge(paths)  ->  Trace  ->  save(path), summary()
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .chrome import FORMAT, MESSAGES, ChromeEvent
from .summary import Summary, summarise

StrPath = str | os.PathLike[str]


class Trace:
    """Events as Chrome's trace format has them, and what the trace says of itself.

    `about` has the root, the workers with their clocks, those that are missing, and counts; it is empty in a trace that
    telegrad did not make.
    """

    def __init__(self, events: list[ChromeEvent], about: dict[str, Any] | None = None, *, base_ns: int = 0) -> None:
        self.events = events
        self.about = about or {}
        self.base_ns = base_ns  # the time of day at which times are 0

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers whose recordings are in it."""
        return tuple(self.processes.values())

    @property
    def processes(self) -> dict[int, str]:
        """The name of each process; in a trace of telegrad's, of each worker."""
        if self.about:
            return {said["pid"]: name for name, said in self.about["workers"].items()}
        names = {e["pid"]: e["args"].get("name", "") for e in self.events if e.get("name") == "process_name"}
        pids = dict.fromkeys([e["pid"] for e in self.events if e.get("ph") == "X"])
        return {pid: f"{names.get(pid) or 'process'} {pid}".strip() for pid in pids}

    @property
    def missing(self) -> dict[str, str]:
        """The workers that took part and sent no recording, and why."""
        return {name: said["why"] for name, said in self.about.get("missing", {}).items()}

    def summary(self) -> Summary:
        """The time of each worker, by what it did, and the slowest chain of work."""
        return summarise(self.events, self.about, self.processes)

    def save(self, path: StrPath) -> None:
        """Writes it, for Perfetto (ui.perfetto.dev) or chrome://tracing; compressed if the name ends in `.gz`."""
        content = {
            "traceEvents": self.events,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self.base_ns,
            "telegrad": self.about,
        }
        text = json.dumps(content, separators=(",", ":")).encode()
        Path(path).write_bytes(gzip.compress(text, 6) if str(path).endswith(".gz") else text)

    def __repr__(self) -> str:
        arrows = sum(e.get("ph") == "s" and e.get("cat") == MESSAGES for e in self.events)
        return f"Trace(workers={list(self.workers)}, {len(self.events)} events, {arrows} messages)"


def load(path: StrPath) -> Trace:
    """Reads a trace: of telegrad's, or any in Chrome's format, such as torch.profiler's.

    Raises:
        TraceError: it is not a trace, or is cut short.
        OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise TraceError(
                f"{path} is cut short or damaged: {error}; write it again, or copy the whole file"
            ) from error
    try:
        content = json.loads(data)
    except ValueError as error:
        raise TraceError(_not_json(path, data, error)) from error
    if isinstance(content, list):
        content = {"traceEvents": content}
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(
            f"{path} is JSON, but not a trace: it has no list of events under 'traceEvents'. A trace is what "
            "telegrad.profiler.profile or torch.profiler.profile exports"
        )
    about = content.get("telegrad") or {}
    if about and about.get("format") != FORMAT:
        raise TraceError(
            f"{path} has format {about.get('format')!r} of telegrad's traces, and this version reads {FORMAT}; "
            "read it with the version that made it"
        )
    found = [event for event in events if "pid" in event or event.get("ph") == "M"]
    return Trace(found, about, base_ns=int(content.get("baseTimeNanoseconds") or 0))


def _not_json(path: StrPath, data: bytes, error: ValueError) -> str:
    if not data.strip():
        return f"{path} is empty: nothing was written there"
    if data.lstrip()[:1] in (b"{", b"["):
        return f"{path} is cut short: it begins as a trace, and ends in the middle ({error}); write it again"
    return f"{path} is not a trace: it is not even JSON ({error})"


def merge(paths: Iterable[StrPath]) -> Trace:
    """One trace of several, at the times of day at which they were taken. A worker that is in more than one of them
    stays one process.

    Raises:
        TraceError: one of them is not a trace; or there are none.
    """
    traces = [load(path) for path in paths]
    if not traces:
        raise TraceError("there is nothing to merge: give the paths of traces")
    base = min(trace.base_ns for trace in traces)
    numbers: dict[Any, int] = {}
    moved = [_moved(trace, place, base, numbers) for place, trace in enumerate(traces)]
    events = [event for trace in moved for event in trace.events]
    return Trace(events, _merged_about([trace.about for trace in moved]), base_ns=base)


def _moved(trace: Trace, place: int, base_ns: int, numbers: dict[Any, int]) -> Trace:
    """A trace at the time of day of all of them, with numbers for its processes that none of the others has; a worker
    that is in several has one."""
    shift = (trace.base_ns - base_ns) / 1000
    names = trace.processes

    def number_of(pid: Any) -> int:
        key: Any = (place, pid)
        if trace.about and pid in names:
            key = names[pid], trace.about["workers"][names[pid]]["process"]
        return numbers.setdefault(key, len(numbers) + 1)

    about = dict(trace.about)
    if about:
        about["window"] = [edge + shift for edge in about["window"]]
        for which in ("workers", "missing"):
            about[which] = {name: {**said, "pid": number_of(said["pid"])} for name, said in about[which].items()}
    events = [dict(event) for event in trace.events]
    for event in events:
        if "pid" in event:
            event["pid"] = number_of(event["pid"])
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift, 3)
        if "id" in event:
            event["id"] = f"{place}/{event['id']}"
    return Trace(events, about, base_ns=base_ns)


def _merged_about(abouts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not all(abouts):
        return {}
    windows = [about["window"] for about in abouts]
    workers: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    for about in abouts:
        for name, said in about["workers"].items():
            workers.setdefault(name, said)
        missing |= about["missing"]
    counts = ("messages", "bytes", "one_ended", "contradicting", "crossing")
    return {
        "format": FORMAT,
        "root": abouts[0]["root"],
        "window": [min(start for start, _ in windows), max(end for _, end in windows)],
        "windows": windows,
        "workers": workers,
        "missing": missing,
        **{count: sum(about[count] for about in abouts) for count in counts},
    }
