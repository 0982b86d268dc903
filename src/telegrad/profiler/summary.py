"""Summary: where the time of a step went on each worker, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..primitives.text import clean
from .breakdown import STATES, Interval, breakdown
from .chrome import MESSAGES, ChromeEvent, end_of
from .critical_path import Link, critical_path

TITLES = dict(zip(STATES, ("compute", "serialising", "on the wire", "waiting", "idle"), strict=True))
_SHOWN = 8  # links of the critical path, the longest
_STEP = "ProfilerStep#"


@dataclass(frozen=True)
class WorkerTime:
    """The time of one worker, in microseconds, of all steps together."""

    name: str
    time: Mapping[str, float]  # by state, see TITLES
    messages_out: int
    bytes_out: int
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """Prints as a table; `to_dict()` has the same as data. Times are in microseconds, of all steps together."""

    length: float
    steps: int  # 0: the program did not count any
    workers: Sequence[WorkerTime]
    path: Sequence[Link]
    missing: Mapping[str, str] = field(default_factory=dict)

    def path_shares(self) -> list[tuple[str, str, str, float]]:
        """(worker, what, name, microseconds) on the critical path, the most first."""
        shares: dict[tuple[str, str, str], float] = defaultdict(float)
        for link in self.path:
            shares[link.worker, link.what, link.name] += link.duration
        return sorted([(*key, time) for key, time in shares.items()], key=lambda share: -share[3])

    def to_dict(self) -> dict[str, Any]:
        """The same as data, for JSON."""
        return {
            "length": self.length,
            "steps": self.steps,
            "workers": {
                w.name: {
                    **{state: w.time[state] for state in STATES},
                    "messages_out": w.messages_out,
                    "bytes_out": w.bytes_out,
                    "note": w.note,
                }
                for w in self.workers
            },
            "critical_path": [
                dict(zip(("worker", "what", "name", "time"), share, strict=True)) for share in self.path_shares()
            ],
            "missing": dict(self.missing),
        }

    # -- as text ---------------------------------------------------------------------------------------

    def _title(self) -> str:
        if self.steps > 1:
            return f"{self.steps} steps, {_time(self.length / self.steps)} each"
        return f"{'one step' if self.steps else 'everything'}, {_time(self.length)}"

    def _per_step(self, time: float) -> tuple[str, str]:
        """The time of one step, and its share."""
        return _time(time / max(self.steps, 1)), f"{time / self.length:.0%}" if self.length else "0%"

    def _rows(self) -> list[list[str]]:
        """The table, its header first."""
        rows = [["worker", *TITLES.values(), "messages out", "bytes out"]]
        for worker in self.workers:
            times = [" ".join(self._per_step(worker.time[state])) for state in STATES]
            rows.append([clean(worker.name), *times, str(worker.messages_out), _bytes(worker.bytes_out)])
        return rows

    def _lines_below(self) -> list[str]:
        """The critical path, and notes."""
        shares = [(time, f"{clean(w)}: {_link(what, clean(name))}") for w, what, name, time in self.path_shares()]
        if len(shares) > _SHOWN:
            rest = sum(time for time, _ in shares[_SHOWN:])
            shares[_SHOWN:] = [(rest, f"{len(shares) - _SHOWN} others")]
        lines = ["critical path, the longest first:"] if shares else []
        for time, text in shares:
            per_step, share = self._per_step(time)
            lines.append(f"  {per_step:>9} {share:>4}  {text}")
        lines += [clean(f"worker {w.name!r}: {w.note}") for w in self.workers if w.note]
        return lines + [clean(f"worker {name!r} is missing: {why}") for name, why in self.missing.items()]

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self._title()]
        for first, *rest in rows:
            cells = [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *self._lines_below()])

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(str(self))  # as it is: rich would show the fields of a dataclass


def _link(what: str, name: str) -> str:
    return {"compute": name, "wire": f"{name} (wire)", "wait": f"waiting: {name}"}[what]


def _time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} us"
    return f"{microseconds / 1000:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def summarise(events: Sequence[ChromeEvent], about: Mapping[str, Any], processes: Mapping[int, str]) -> Summary:
    """The summary of a trace's steps; of all of it, if the program did not count any."""
    root = about.get("root", "")
    steps = _steps(events, processes, root)
    windows = steps or _windows(events, about)
    times = breakdown(events, processes, windows)
    out: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for event in events:
        if event.get("cat") == MESSAGES and event["ph"] == "s":
            count, size = out[event["pid"]]
            out[event["pid"]] = count + 1, size + event["args"]["bytes"]
    notes = {name: said.get("note", "") for name, said in about.get("workers", {}).items()}
    workers = [WorkerTime(name, times[name], *out[pid], notes.get(name, "")) for pid, name in processes.items()]
    missing = {name: said["why"] for name, said in about.get("missing", {}).items()}
    path = critical_path(events, processes, root, windows)
    return Summary(sum(end - start for start, end in windows), len(steps), workers, path, missing)


def _windows(events: Sequence[ChromeEvent], about: Mapping[str, Any]) -> list[Interval]:
    if about:
        return [(start, end) for start, end in about.get("windows") or [about["window"]]]
    slices = [e for e in events if e.get("ph") == "X"]
    return [(min(e["ts"] for e in slices), max(e["ts"] + e.get("dur", 0) for e in slices))] if slices else []


def _steps(events: Sequence[ChromeEvent], processes: Mapping[int, str], root: str) -> list[Interval]:
    """The steps that the program counted, with profile.step()."""
    found = {
        e["name"]: (e["ts"], end_of(e))
        for e in events
        if e.get("ph") == "X" and e["name"].startswith(_STEP) and processes.get(e["pid"]) == root
    }
    return sorted(found.values())
