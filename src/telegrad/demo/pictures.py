"""Pictures of the training: the loss over time, the timeline of one step on all workers, and its graph."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .. import autograd, profiler
from ..errors import DrawingError
from ..graph import Graph
from .training import Training, loss_of

WARM_UP, STEPS = 2, 5  # under the profiler
# A colour, and the variable of the report's style that takes its place there: light or dark, as the reader has it.
INK, FAINT, CURVE = "#5c6775", "#dfe4ea", "#2f66d0"
VARIABLES = {INK: "var(--muted)", FAINT: "var(--line)", CURVE: "var(--accent)"}


def plot_loss(losses: Sequence[tuple[float, float]], path: Path) -> str:
    """Plots the losses, and their moving average, over the seconds of training. Writes a PNG to `path`; returns an SVG
    element in the report's colours."""
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
    figure.savefig(path, dpi=150)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True)
    drawn = buffer.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.S)
    for color, variable in VARIABLES.items():
        drawn = drawn.replace(color, variable)
    return drawn


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those around it: fewer at the beginning, where they fall steeply."""
    most = max(1, len(values) // 40)
    reaches = (min(n, most) for n in range(len(values)))
    windows = (values[n - reach : n + reach + 1] for n, reach in enumerate(reaches))
    return [sum(window) / len(window) for window in windows]


@dataclass(frozen=True)
class Timeline:
    """Some steps, as the profiler saw them."""

    summary: profiler.Summary
    picture: bytes  # of one of them, as PNG
    milliseconds: float  # that this one took


def draw_timeline(training: Training, folder: Path) -> Timeline:
    """Runs some steps under the profiler: trace.json is their timeline, step.png a picture of the median one."""
    schedule = profiler.schedule(wait=0, warmup=WARM_UP, active=STEPS, repeat=1)
    with profiler.profile(schedule=schedule) as profile:
        for _ in range(WARM_UP + STEPS):
            training.step()
            profile.step()
    assert profile.trace is not None
    profile.export_chrome_trace(folder / "trace.json")
    steps = [event for event in profile.trace.events if str(event["name"]).startswith("ProfilerStep#")]
    median = sorted(steps, key=lambda event: float(event["dur"]))[len(steps) // 2]
    picture = folder / "step.png"
    profiler.draw(profile.trace, picture, first=median["ts"], last=median["ts"] + median["dur"])
    return Timeline(profile.summary(), picture.read_bytes(), median["dur"] / 1000)


def draw_graph(training: Training, folder: Path) -> Graph:
    """Gathers the graph of a step when its forward pass is done. Writes graph.svg, if pygraphviz is installed."""
    with autograd.context() as context_id:  # which knows what belongs to this step, and on which workers
        loss = loss_of(training.model, training.batch())
        graph = autograd.graph(context_id, roots=[loss])
    with contextlib.suppress(DrawingError):  # the report says why
        graph.save(folder / "graph.svg")
    return graph
