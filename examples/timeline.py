"""Who was busy when: what the stages of `pipeline.py` note, and the picture of it.

The clock is that of the machine, so the times of several workers on one machine can stand in one picture.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.figure import Figure
from torch import Tensor

COLORS = {"forward": "#4c78a8", "backward": "#e4772e"}


class Bar(NamedTuple):
    what: str  # forward or backward
    number: int  # of the micro-batch
    began: float
    ended: float


class Timeline:
    """What one worker did."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []

    @contextlib.contextmanager
    def forward(self, number: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.bars.append(Bar("forward", number, began, time.monotonic()))

    def watch_backward(self, number: int, inputs: Tensor, outputs: Tensor) -> None:
        """Notes the time from the gradient of the outputs to the gradient of the inputs."""
        began = 0.0

        def on_gradient_of_outputs(_: Tensor) -> None:
            nonlocal began
            began = time.monotonic()

        def on_gradient_of_inputs(_: Tensor) -> None:
            self.bars.append(Bar("backward", number, began, time.monotonic()))

        outputs.register_hook(on_gradient_of_outputs)
        inputs.register_hook(on_gradient_of_inputs)


def stages_busy(rows: dict[str, list[Bar]]) -> float:
    """How many workers were at work, on average."""
    bars = [bar for row in rows.values() for bar in row]
    length = max(bar.ended for bar in bars) - min(bar.began for bar in bars)
    return sum(bar.ended - bar.began for bar in bars) / length


def draw(rows: dict[str, list[Bar]], path: str) -> None:
    """A row for each worker, a bar for each piece of its work."""
    start = min(bar.began for bars in rows.values() for bar in bars)
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplots()
    for name, bars in rows.items():
        for what, color in COLORS.items():
            chosen = [bar for bar in bars if bar.what == what]
            boxes = axes.barh(
                [name] * len(chosen),
                [1e3 * (bar.ended - bar.began) for bar in chosen],
                left=[1e3 * (bar.began - start) for bar in chosen],
                color=color,
                edgecolor="white",
                label=what if name == next(iter(rows)) else None,
            )
            axes.bar_label(boxes, [bar.number for bar in chosen], label_type="center", color="white")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title("one step of training, by micro-batch", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
