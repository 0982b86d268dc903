"""The plot of the loss: as a file, and as part of the report."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

# A colour, and the variable of the report's style that takes its place there: light or dark, as the reader has it.
INK, FAINT, CURVE = "#5c6775", "#dfe4ea", "#2f66d0"
VARIABLES = {INK: "var(--muted)", FAINT: "var(--line)", CURVE: "var(--accent)"}


def plot_loss(losses: Sequence[tuple[float, float]]) -> Figure:
    """The losses over the seconds at which they were had, and how they go on the whole."""
    seconds, values = zip(*losses, strict=True)
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(seconds, values, color=CURVE, alpha=0.3, linewidth=1)
    axes.plot(seconds, smoothed(values), color=CURVE, linewidth=2.2)
    axes.set_xlabel("seconds of training", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.tick_params(color=FAINT, labelcolor=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    return figure


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those around it: fewer at the beginning, where they fall steeply."""
    most = max(1, len(values) // 40)
    reaches = (min(n, most) for n in range(len(values)))
    windows = (values[n - reach : n + reach + 1] for n, reach in enumerate(reaches))
    return [sum(window) / len(window) for window in windows]


def save_png(figure: Figure, path: Path) -> None:
    """As a file."""
    figure.savefig(path, dpi=150)


def inline_svg(figure: Figure) -> str:
    """As an element for the report's page, in its colours."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True)
    drawn = buffer.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.S)
    for color, variable in VARIABLES.items():
        drawn = drawn.replace(color, variable)
    return drawn
