"""Trace: what all workers did, as one file that Perfetto opens.

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
from .summary import Summary, summarise
from .timeline import FORMAT, MESSAGES, ChromeEvent

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
        """The names of those that something is known of."""
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
        """The workers that took part and of which nothing came, and why."""
        return {name: said["why"] for name, said in self.about.get("missing", {}).items()}

    def summary(self) -> Summary:
        """Where the time went, worker by worker, and what the slowest chain of work was."""
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
    events: list[ChromeEvent] = []
    about = _merged_about(traces, numbers, base)
    for place, trace in enumerate(traces):
        shift = (trace.base_ns - base) / 1000
        names = trace.processes
        for event in trace.events:
            moved = dict(event)
            if "pid" in moved:
                moved["pid"] = _number_of(place, moved["pid"], names, trace, numbers)
            if "ts" in moved:
                moved["ts"] = round(moved["ts"] + shift, 3)
            if "id" in moved:
                moved["id"] = f"{place}/{moved['id']}"
            events.append(moved)
    return Trace(events, about, base_ns=base)


def _number_of(place: int, pid: Any, names: dict[int, str], trace: Trace, numbers: dict[Any, int]) -> int:
    """The process that a process of one of the traces becomes: a worker's own, or a new one."""
    key: Any = (place, pid)
    if trace.about and pid in names:
        said = trace.about["workers"][names[pid]]
        key = names[pid], said["process"]
    return numbers.setdefault(key, len(numbers) + 1)


def _merged_about(traces: Sequence[Trace], numbers: dict[Any, int], base: int) -> dict[str, Any]:
    if not all(trace.about for trace in traces):
        return {}
    about: dict[str, Any] = {"format": FORMAT, "root": traces[0].about["root"], "workers": {}, "missing": {}}
    windows = []
    for place, trace in enumerate(traces):
        shift = (trace.base_ns - base) / 1000
        windows.append([edge + shift for edge in trace.about["window"]])
        names = trace.processes
        for name, said in trace.about["workers"].items():
            number = _number_of(place, said["pid"], names, trace, numbers)
            about["workers"].setdefault(name, {**said, "pid": number})
        for name, said in trace.about["missing"].items():
            number = _number_of(place, said["pid"], names, trace, numbers)
            about["missing"][name] = {**said, "pid": number}
    about["window"] = [min(w[0] for w in windows), max(w[1] for w in windows)]
    about["windows"] = windows
    for count in ("messages", "bytes", "one_ended", "contradicting", "crossing"):
        about[count] = sum(trace.about[count] for trace in traces)
    return about
