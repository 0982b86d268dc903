"""What can be seen of a step: the timeline of all workers, and the graph that gradients go through."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from .. import autograd, profiler
from ..errors import DrawingError
from ..graph import Graph
from .training import Training, loss_of

WARM_UP, STEPS = 2, 5


@dataclass(frozen=True)
class Timeline:
    """Some steps, as the profiler saw them."""

    summary: profiler.Summary
    picture: bytes  # of one of them, as PNG
    milliseconds: float  # that this one took


def profile(training: Training, folder: Path) -> Timeline:
    """Some steps under the profiler: trace.json is their timeline, and step.png a picture of one of them."""
    schedule = profiler.schedule(wait=0, warmup=WARM_UP, active=STEPS, repeat=1)
    with profiler.profile(schedule=schedule) as profile:
        for _ in range(WARM_UP + STEPS):
            training.step()
            profile.step()
    assert profile.trace is not None
    profile.export_chrome_trace(folder / "trace.json")
    first, last = median_step(profile.trace)
    picture = folder / "step.png"
    profiler.draw(profile.trace, picture, first=first, last=last)
    return Timeline(profile.summary(), picture.read_bytes(), (last - first) / 1000)


def median_step(trace: profiler.Trace) -> tuple[float, float]:
    """When a step began and ended that took neither long nor short."""
    steps = [event for event in trace.events if str(event["name"]).startswith("ProfilerStep#")]
    steps.sort(key=lambda event: float(event["dur"]))
    median = steps[len(steps) // 2]
    return median["ts"], median["ts"] + median["dur"]


def draw_graph(training: Training, folder: Path) -> Graph:
    """The graph of a step, when its forward pass is done. graph.svg is written if there is graphviz to draw it."""
    with autograd.context() as context_id:
        loss = loss_of(training.model, training.batch())
        graph = autograd.graph(context_id, roots=[loss])
    with contextlib.suppress(DrawingError):  # the report says why
        graph.save(folder / "graph.svg")
    return graph
