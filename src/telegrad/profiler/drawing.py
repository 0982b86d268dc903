"""A picture of a trace, for reports: a band for each worker, a lane for each of its threads, arrows for messages."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import TraceError
from .breakdown import OWN, innermost
from .timeline import MESSAGES, ChromeEvent
from .trace import Trace

COLORS = {"compute": "#4c78a8", "serialise": "#eeca3b", "wire": "#e4772e", "wait": "#d5d5d5"}
LABELS = {"compute": "compute", "serialise": "serialising", "wire": "on the wire", "wait": "waiting"}
FORWARD, BACKWARD = "#555555", "#c0392b"  # of arrows
_DARK = "#2f4b6c"  # of operators
_MOST_ARROWS = 400
_OPERATORS = frozenset(("cpu_op",))
_INK = "#2b2b2b"


class _Lane(NamedTuple):
    slices: list[ChromeEvent]  # telegrad's own
    operators: list[ChromeEvent]


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
    from matplotlib.figure import Figure

    slices = [e for e in trace.events if e.get("ph") == "X"]
    if not slices:
        raise TraceError("there is nothing to draw: the trace has no spans")
    start, end = _limits(trace, slices)
    start, end = (start if first is None else first), (end if last is None else last)
    if start >= end:
        raise ValueError(f"first is {start} and last is {end}: choose a first that comes before the last")
    lanes = {lane: _Lane([], []) for lane in _lanes(trace, start, end)}
    for event in slices:
        lane = lanes.get((event["pid"], event["tid"]))
        if lane is not None and event.get("cat") in OWN:
            lane.slices.append(event)
        elif lane is not None and event.get("cat") in _OPERATORS:
            lane.operators.append(event)
    for lane in lanes.values():
        lane.slices.sort(key=lambda e: (e["ts"], -e["dur"]))
    height = 1.1 + 0.42 * len(lanes) + 0.22 * len({pid for pid, _ in lanes})
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.subplots()
    scale, unit = _scale(end - start)
    places = _places(list(lanes))
    _draw_bands(axes, trace, places, (end - start) * scale)
    for key, place in places.items():
        _draw_lane(axes, lanes[key], place, start, end, scale)
    _draw_arrows(axes, trace, places, start, end, scale)
    _decorate(figure, axes, trace, (end - start) * scale, unit, max(places.values(), default=0))
    if isinstance(path_or_file, str | os.PathLike):
        figure.savefig(Path(path_or_file), dpi=150)
    else:
        figure.savefig(path_or_file, dpi=150, format="png")


def _limits(trace: Trace, slices: Sequence[ChromeEvent]) -> tuple[float, float]:
    if trace.about:
        first, last = trace.about["window"]
        return first, last
    return min(e["ts"] for e in slices), max(e["ts"] + e["dur"] for e in slices)


def _scale(length: float) -> tuple[float, str]:
    if length < 2_000:
        return 1.0, "microseconds"
    return (1e-3, "milliseconds") if length < 2e6 else (1e-6, "seconds")


def _lanes(trace: Trace, start: float, end: float) -> list[tuple[int, int]]:
    """The threads with something to show, worker by worker; the program's own first."""
    found: dict[int, dict[int, float]] = {pid: {} for pid in trace.processes}
    for event in trace.events:
        shown = event.get("cat") in OWN or event.get("cat") in _OPERATORS
        if event.get("ph") == "X" and shown and event["ts"] < end and event["ts"] + event["dur"] > start:
            threads = found.setdefault(event["pid"], {})
            weight = float("inf") if event["cat"] == "program" else event["dur"]
            threads[event["tid"]] = threads.get(event["tid"], 0.0) + weight
    return [
        (pid, thread)
        for pid, threads in found.items()
        for thread, _ in sorted(threads.items(), key=lambda item: -item[1])
    ]


def _places(lanes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    places: dict[tuple[int, int], float] = {}
    at, before = 0.0, None
    for lane in lanes:
        at += 0.0 if before is None else 1.0 if lane[0] == before else 1.6
        places[lane] = at
        before = lane[0]
    return places


def _draw_bands(axes: Any, trace: Trace, places: dict[tuple[int, int], float], length: float) -> None:
    rows: dict[int, list[float]] = defaultdict(list)
    for (pid, _), place in places.items():
        rows[pid].append(place)
    for number, (pid, found) in enumerate(rows.items()):
        low, high = min(found) - 0.7, max(found) + 0.7
        axes.axhspan(low, high, color="#f6f6f4" if number % 2 else "#ececea", zorder=0, linewidth=0)
        name = trace.processes.get(pid, str(pid))
        axes.text(
            -0.008 * length, (low + high) / 2, name, ha="right", va="center", fontsize=11, color=_INK, weight="bold"
        )  # fmt: skip


def _draw_lane(axes: Any, lane: _Lane, place: float, start: float, end: float, scale: float) -> None:
    def box(left: float, right: float) -> tuple[float, float]:
        left, right = max(left, start), min(right, end)
        return (left - start) * scale, (right - left) * scale

    pieces = [(*box(left, right), state) for left, right, state in innermost(lane.slices)]
    for state, color in COLORS.items():
        shown = [(left, width) for left, width, found in pieces if found == state and width > 0]
        axes.broken_barh(shown, (place - 0.28, 0.48), facecolors=color, linewidth=0, zorder=2)
    operators = [box(e["ts"], e["ts"] + e["dur"]) for e in lane.operators]
    shown = [(left, width) for left, width in operators if width > 0]
    axes.broken_barh(shown, (place + 0.2, 0.16), facecolors=_DARK, linewidth=0, zorder=5)
    free_from = 0.0
    for event in lane.slices:
        left, width = box(event["ts"], event["ts"] + event["dur"])
        if event["cat"] == "run" and width > 0.004 * (end - start) * scale and left >= free_from:
            inside = [p for p in pieces if p[0] >= left and p[0] + p[1] <= left + width + 1e-9]
            free_from = _draw_name(axes, event["name"], (left, width), inside, place, (end - start) * scale)


def _draw_name(
    axes: Any,
    name: str,
    box: tuple[float, float],
    inside: Sequence[tuple[float, float, str]],
    place: float,
    length: float,
) -> float:
    """In the widest piece of a function's box, or above the box. Returns where there is room for the next one."""
    needed = 0.0062 * length * len(name)
    left, width, state = max(inside, key=lambda piece: piece[1], default=(*box, "compute"))
    fits = needed < width
    axes.text(
        left + width / 2 if fits else box[0],
        place - 0.05 if fits else place - 0.42,
        name,
        ha="center" if fits else "left",
        va="center",
        fontsize=7.5,
        color="white" if fits and state == "compute" else _INK,
        zorder=9,
        clip_on=True,
    )
    return box[0] + max(box[1], needed)


def _draw_arrows(
    axes: Any, trace: Trace, places: dict[tuple[int, int], float], start: float, end: float, scale: float
) -> None:
    starts = {e["id"]: e for e in trace.events if e.get("cat") == MESSAGES and e["ph"] == "s"}
    found = []
    for event in trace.events:
        if event.get("cat") != MESSAGES or event["ph"] != "f" or event["id"] not in starts:
            continue
        sent = starts[event["id"]]
        ends = places.get((sent["pid"], sent["tid"])), places.get((event["pid"], event["tid"]))
        if None not in ends and start <= sent["ts"] and event["ts"] <= end:
            found.append((event["args"]["bytes"], sent, event, ends))
    found.sort(key=lambda arrow: -arrow[0])
    for _, sent, read, (above, below) in found[:_MOST_ARROWS]:
        color = BACKWARD if sent["name"].startswith(("gradients", "begin", "done", "end")) else FORWARD
        width = 0.5 + 0.2 * math.log10(max(1, sent["args"]["bytes"]))
        axes.annotate(
            "",
            xy=((read["ts"] - start) * scale, below),
            xytext=((sent["ts"] - start) * scale, above),
            arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": width, "shrinkA": 0, "shrinkB": 0,
                        "mutation_scale": 7, "alpha": 0.85},
            zorder=8,
        )  # fmt: skip


def _decorate(figure: Any, axes: Any, trace: Trace, length: float, unit: str, lowest: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.set_xlim(0, length)
    axes.set_ylim(lowest + 0.8, -0.8)
    axes.set_yticks([])
    axes.set_xlabel(unit, color=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=_INK)
    marks: list[Any] = [Patch(facecolor=COLORS[kind], label=label) for kind, label in LABELS.items()]
    marks.append(Patch(facecolor=_DARK, label="operators"))
    marks += [
        Line2D([], [], color=FORWARD, label="calls, replies"),
        Line2D([], [], color=BACKWARD, label="backward pass"),
    ]
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False, fontsize=9)
    if trace.missing:
        axes.set_title(f"missing: {', '.join(trace.missing)}", loc="left", fontsize=9, color=BACKWARD)
