"""The plot of growth: for each growth, time against size on logarithmic axes, telegrad beside torch, and
beside the same in one process where that was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.plot import COLOURS, FLOOR_COLOURS
from benchmarks.summary import Curve, GrowthRow

COLUMNS = 3
GUIDE = "#dddddd"
SIDES = {**COLOURS, "one process": FLOOR_COLOURS[0]}


def draw(table: list[GrowthRow], title: str, path: Path) -> bool:
    """Write the picture; False when there is nothing to draw."""
    if not table:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, len(table))
    lines = math.ceil(len(table) / columns)
    picture, grid = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 0.8 + 3.6 * lines), squeeze=False, layout="constrained"
    )
    panels = list(grid.flat)
    for panel, row in zip(panels, table, strict=False):
        _draw_row(panel, row)
    for panel in panels[len(table) :]:
        panel.set_axis_off()
    panels[0].legend(loc="upper left", frameon=False)
    picture.suptitle(f"{title}\nThe grey lines are linear growth.", fontsize=10, x=0.01, ha="left")
    picture.savefig(path, dpi=130)
    pyplot.close(picture)
    return True


def _draw_row(panel: Any, row: GrowthRow) -> None:
    from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, NullFormatter, NullLocator

    for name, curve in zip(SIDES, (row.telegrad, row.torch, row.local), strict=True):
        if curve:
            _draw_curve(panel, name, curve)
    panel.set_xscale("log")
    panel.set_yscale("log")
    known = sorted(row.telegrad.keys() | row.torch.keys())
    panel.xaxis.set_major_locator(FixedLocator(known))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(EngFormatter(unit="s"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel(row.growth.of)
    panel.set_title(row.growth.title, loc="left", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_curve(panel: Any, name: str, curve: Curve) -> None:
    """The median, a band up to the 99th percentile, and the line through the origin that meets its end."""
    medians = [one.median or math.nan for one in curve.values()]
    tops = [one.p99 or math.nan for one in curve.values()]
    known = list(curve)
    panel.plot(known, [medians[-1] * size / known[-1] for size in known], color=GUIDE, linewidth=1, zorder=1)
    panel.fill_between(known, medians, tops, color=SIDES[name], alpha=0.15, linewidth=0)
    panel.plot(known, medians, color=SIDES[name], marker="o", markersize=3.5, label=name)
