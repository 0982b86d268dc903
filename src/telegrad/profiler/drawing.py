"""A picture of a trace, for reports: a band for each worker, a lane for each of its threads, arrows for messages."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import TraceError
from .breakdown import innermost
from .chrome import STATE_OF, ChromeEvent, Thread, arrows, by_thread, end_of
from .summary import TITLES
from .trace import Trace

COLORS = {"compute": "#4c78a8", "serialise": "#eeca3b", "wire": "#e4772e", "wait": "#d5d5d5"}
FORWARD, BACKWARD = "#555555", "#c0392b"  # of arrows
_DARK = "#2f4b6c"  # of operators
_MOST_ARROWS = 400
_INK = "#2b2b2b"


def draw(
    trace: Trace,
    path_or_file: str | os.PathLike[str] | IO[bytes],
    *,
    first: float | None = None,
    last: float | None = None,
) -> None:
    """Draws a trace, or its part from `first` to `last` microseconds. A path's suffix says the format (PNG, SVG, PDF);
    a file object gets PNG.

    Raises:
        TraceError: there is nothing to draw.
        ValueError: `first` is not before `last`.
    """
    slices = [e for e in trace.events if e.get("ph") == "X"]
    if not slices:
        raise TraceError("there is nothing to draw: the trace has no spans")
    start, end = trace.about.get("window") or (min(e["ts"] for e in slices), max(map(end_of, slices)))
    start, end = (start if first is None else first), (end if last is None else last)
    if start >= end:
        raise ValueError(f"first is {start} and last is {end}: choose a first that comes before the last")
    figure = _Picture(trace, start, end).figure
    if isinstance(path_or_file, str | os.PathLike):
        figure.savefig(Path(path_or_file), dpi=150)
    else:
        figure.savefig(path_or_file, dpi=150, format="png")


class _Picture:
    """One figure, and the part of the trace that is in it. Places are lanes, from above."""

    def __init__(self, trace: Trace, start: float, end: float) -> None:
        from matplotlib.figure import Figure

        self._trace = trace
        self._start, self._end = start, end
        length = end - start
        self._scale, unit = (1.0, "microseconds") if length < 2_000 else (1e-3, "milliseconds")
        if length >= 2e6:
            self._scale, unit = 1e-6, "seconds"
        self._length = length * self._scale
        self._places = _places(_lanes(trace, start, end))
        height = 1.1 + 0.42 * len(self._places) + 0.22 * len({pid for pid, _ in self._places})
        self.figure: Any = Figure(figsize=(12, height), layout="constrained")
        self._axes = self.figure.subplots()
        self._draw_bands()
        slices = by_thread(trace.events)
        operators: dict[Thread, list[ChromeEvent]] = defaultdict(list)
        for event in trace.events:
            if event.get("ph") == "X" and event.get("cat") == "cpu_op":
                operators[event["pid"], event["tid"]].append(event)
        for thread, place in self._places.items():
            self._draw_lane(slices.get(thread, []), operators[thread], place)
        self._draw_arrows()
        self._decorate(unit)

    def _box(self, left: float, right: float) -> tuple[float, float]:
        """The left edge of something in the picture, and its width."""
        left, right = max(left, self._start), min(right, self._end)
        return (left - self._start) * self._scale, (right - left) * self._scale

    def _draw_bands(self) -> None:
        rows: dict[int, list[float]] = defaultdict(list)
        for (pid, _), place in self._places.items():
            rows[pid].append(place)
        for number, (pid, found) in enumerate(rows.items()):
            low, high = min(found) - 0.7, max(found) + 0.7
            self._axes.axhspan(low, high, color="#f6f6f4" if number % 2 else "#ececea", zorder=0, linewidth=0)
            name, left = self._trace.processes.get(pid, str(pid)), -0.008 * self._length
            look: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 11, "color": _INK, "weight": "bold"}
            self._axes.text(left, (low + high) / 2, name, **look)

    def _draw_lane(self, slices: Sequence[ChromeEvent], operators: Iterable[ChromeEvent], place: float) -> None:
        pieces = [(*self._box(left, right), state) for left, right, state in innermost(slices)]
        for state, color in COLORS.items():
            self._draw_bars([piece[:2] for piece in pieces if piece[2] == state], place - 0.28, 0.48, color, 2)
        self._draw_bars([self._box(e["ts"], end_of(e)) for e in operators], place + 0.2, 0.16, _DARK, 5)
        free_from = 0.0
        for event in slices:
            left, width = self._box(event["ts"], end_of(event))
            if event["cat"] == "run" and width > 0.004 * self._length and left >= free_from:
                inside = [p for p in pieces if p[0] >= left and p[0] + p[1] <= left + width + 1e-9]
                free_from = self._draw_name(event["name"], (left, width), inside, place)

    def _draw_bars(
        self, bars: Iterable[tuple[float, float]], low: float, height: float, color: str, zorder: int
    ) -> None:
        shown = [(left, width) for left, width in bars if width > 0]
        self._axes.broken_barh(shown, (low, height), facecolors=color, linewidth=0, zorder=zorder)

    def _draw_name(
        self, name: str, box: tuple[float, float], inside: Sequence[tuple[float, float, str]], place: float
    ) -> float:
        """In the widest piece of a function's box, or above the box. Returns where there is room for the next one."""
        needed = 0.0062 * self._length * len(name)
        left, width, state = max(inside, key=lambda piece: piece[1], default=(*box, "compute"))
        look: dict[str, Any] = {"va": "center", "fontsize": 7.5, "zorder": 9, "clip_on": True}
        if needed < width:
            color = "white" if state == "compute" else _INK
            self._axes.text(left + width / 2, place - 0.05, name, ha="center", color=color, **look)
        else:
            self._axes.text(box[0], place - 0.42, name, ha="left", color=_INK, **look)
        return box[0] + max(box[1], needed)

    def _draw_arrows(self) -> None:
        found = []
        for sent, read in arrows(self._trace.events):
            ends = self._places.get((sent["pid"], sent["tid"])), self._places.get((read["pid"], read["tid"]))
            if None not in ends and self._start <= sent["ts"] and read["ts"] <= self._end:
                found.append((sent, read, ends))
        found.sort(key=lambda arrow: -arrow[0]["args"]["bytes"])
        for sent, read, (above, below) in found[:_MOST_ARROWS]:
            is_pass = sent["name"].startswith(("gradients", "begin", "done", "end"))
            look = {"arrowstyle": "-|>", "color": BACKWARD if is_pass else FORWARD, "shrinkA": 0, "shrinkB": 0}
            look |= {"linewidth": 0.5 + 0.2 * math.log10(max(1, sent["args"]["bytes"])), "mutation_scale": 7}
            tip, tail = ((e["ts"] - self._start) * self._scale for e in (read, sent))
            self._axes.annotate("", (tip, below), (tail, above), arrowprops={**look, "alpha": 0.85}, zorder=8)

    def _decorate(self, unit: str) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        axes = self._axes
        axes.set_xlim(0, self._length)
        axes.set_ylim(max(self._places.values(), default=0) + 0.8, -0.8)
        axes.set_yticks([])
        axes.set_xlabel(unit, color=_INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=_INK)
        marks: list[Any] = [Patch(facecolor=color, label=TITLES[state]) for state, color in COLORS.items()]
        marks.append(Patch(facecolor=_DARK, label="operators"))
        marks.append(Line2D([], [], color=FORWARD, label="calls, replies"))
        marks.append(Line2D([], [], color=BACKWARD, label="backward pass"))
        self.figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False, fontsize=9)
        if self._trace.missing:
            missing = f"missing: {', '.join(self._trace.missing)}"
            axes.set_title(missing, loc="left", fontsize=9, color=BACKWARD)


def _lanes(trace: Trace, start: float, end: float) -> list[Thread]:
    """The threads with something to show, worker by worker; the program's own first."""
    found: dict[int, dict[int, float]] = {pid: {} for pid in trace.processes}
    for event in trace.events:
        is_shown = event.get("ph") == "X" and (event.get("cat") in STATE_OF or event.get("cat") == "cpu_op")
        if is_shown and event["ts"] < end and end_of(event) > start:
            threads = found.setdefault(event["pid"], {})
            weight = float("inf") if event["cat"] == "program" else event["dur"]
            threads[event["tid"]] = threads.get(event["tid"], 0.0) + weight
    return [(pid, thread) for pid, threads in found.items() for thread in sorted(threads, key=lambda t: -threads[t])]


def _places(lanes: Sequence[Thread]) -> dict[Thread, float]:
    places: dict[Thread, float] = {}
    at, before = 0.0, None
    for lane in lanes:
        at += 0.0 if before is None else 1.0 if lane[0] == before else 1.6
        places[lane] = at
        before = lane[0]
    return places
