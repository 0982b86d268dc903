"""The plot: for each figure telegrad, torch and its floors, as bars on a logarithmic axis of time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Suite
from benchmarks.runner import FLOOR, Results
from benchmarks.summary import Row, Side, rows, show, side

COLOURS = {"telegrad": "#1b6ca8", "torch": "#e08a3c"}
FLOOR_COLOURS = ("#8f8f8f", "#c4c4c4")
BAR_HEIGHT = 0.8
GAP = 0.9
INK = "#222222"


@dataclass(frozen=True)
class Bar:
    seconds: float
    p99: float | None
    colour: str
    label: str


def draw(suite: Suite, results: Results, title: str, path: Path) -> bool:
    """Write the picture; False when there is nothing to draw."""
    groups = [(row.figure.title, _bars(row, suite, results)) for row in rows(results, suite.figures)]
    groups = [(name, bars) for name, bars in groups if bars]
    if not groups:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = sum(len(bars) * BAR_HEIGHT + GAP for _, bars in groups)
    picture, axes = pyplot.subplots(figsize=(10, 1.6 + 0.28 * height), layout="constrained")
    _draw_groups(axes, groups)
    _dress(axes, groups, with_floors=bool(suite.floors))
    picture.suptitle(title, fontsize=10, x=0.01, ha="left")  # of the picture: the names take half of its width
    picture.savefig(path, dpi=130)
    pyplot.close(picture)
    return True


def _bars(row: Row, suite: Suite, results: Results) -> list[Bar]:
    sides = [("telegrad", row.telegrad), ("torch", row.torch)]
    bars = [_bar(one, COLOURS[name], row.figure.unit, _ratio(row) if name == "telegrad" else "") for name, one in sides]
    beside = [floor for floor in suite.floors if floor.name in row.figure.floors]
    bars += [
        _bar(side(results, FLOOR, floor), FLOOR_COLOURS[i % 2], floor.unit, f"  {floor.title}")
        for i, floor in enumerate(beside)
    ]
    return [bar for bar in bars if bar is not None]


def _bar(one: Side, colour: str, unit: str, remark: str) -> Bar | None:
    if one.median is None:
        return None
    return Bar(one.median, one.p99, colour, f"{show(one.median, unit)}{remark}")


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else f"  ({row.ratio:.2f} of torch's)"


def _draw_groups(axes: Any, groups: list[tuple[str, list[Bar]]]) -> None:
    y, ticks = 0.0, []
    for name, bars in groups:
        ticks.append((y + (len(bars) - 1) * BAR_HEIGHT / 2, name))
        for bar in bars:
            axes.barh(y, bar.seconds, height=BAR_HEIGHT * 0.88, color=bar.colour)
            axes.text(bar.seconds * 1.08, y, bar.label, va="center", fontsize=7.5, color=INK)
            y += BAR_HEIGHT
        y += GAP
    axes.set_yticks([where for where, _ in ticks], [name for _, name in ticks])


def _dress(axes: Any, groups: list[tuple[str, list[Bar]]], *, with_floors: bool) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter, NullLocator

    seconds = [bar.seconds for _, bars in groups for bar in bars]
    axes.set_xscale("log")
    axes.set_xlim(min(seconds) / 2, max(seconds) * 12)
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("median time, logarithmic: shorter is better")
    sides = [*COLOURS.items(), *([("floor", FLOOR_COLOURS[0])] if with_floors else [])]
    axes.legend(handles=[Patch(color=colour, label=name) for name, colour in sides], loc="upper right", frameon=False)
