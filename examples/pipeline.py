"""A pipeline of three stages on three workers, fed with micro-batches; and a picture of who was busy when.

What you learn here: any object can live on a worker and be used from the others, such as the queues between these
stages. A stage takes its inputs straight from the stage before, so all stages work at the same time. The backward pass
overlaps as well, with no code for it, and trains exactly as the same model in one process does.

    python examples/pipeline.py --steps 25 --out pipeline.png
"""

from __future__ import annotations

import argparse
import sys
import time
from queue import SimpleQueue

import torch
from rich.progress import track
from timeline import Bar, Timeline, draw, stages_busy
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad
from telegrad import rpc
from telegrad.optim import DistributedOptimizer

NAMES = ["first", "second", "third"]
MICRO_BATCHES, WORK = 6, 0.01  # the work on a micro-batch: seconds of sleep, for want of three cores


class Stage(nn.Module):
    """A part of the model, on a worker of its own."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def run(self, before: rpc.RRef[SimpleQueue[Tensor]], after: rpc.RRef[SimpleQueue[Tensor]]) -> None:
        """The forward pass of all micro-batches. `before` is the queue on the worker before; `after` is here."""
        self.timeline = Timeline()
        for number in range(1, MICRO_BATCHES + 1):
            inputs = before.rpc_sync().get().requires_grad_()
            with self.timeline.forward(number):
                time.sleep(WORK)
                outputs = self.layers(inputs)
            self.timeline.watch_backward(number, inputs, outputs)
            outputs.register_hook(lambda _: time.sleep(2 * WORK))  # backward is about twice the work
            after.local_value().put(outputs)

    def parameter_handles(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def bars(self) -> list[Bar]:
        return self.timeline.bars


def forward(stages: list[rpc.RRef[Stage]], queues: list[rpc.RRef[SimpleQueue[Tensor]]], x: Tensor) -> Tensor:
    for micro_batch in x.chunk(MICRO_BATCHES):
        queues[0].local_value().put(micro_batch)
    torch.futures.wait_all([stage.rpc_async().run(*queues[n : n + 2]) for n, stage in enumerate(stages)])
    return torch.cat([queues[-1].rpc_sync().get() for _ in range(MICRO_BATCHES)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=25, help="how many steps of training")
    parser.add_argument("--out", default="pipeline.png", help="where the picture goes")
    options = parser.parse_args()
    x = torch.randn(96, 4, generator=torch.manual_seed(0))
    y = torch.sin(x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    parts = [model[:2], model[2:4], model[4:]]
    local_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    with telegrad.LocalCluster(NAMES):
        stages = [rpc.remote(name, Stage, args=(part,)) for name, part in zip(NAMES, parts, strict=True)]
        queues = [rpc.RRef(SimpleQueue()), *[rpc.remote(name, SimpleQueue) for name in NAMES]]
        handles = [handle for stage in stages for handle in stage.rpc_sync().parameter_handles()]
        optimizer = DistributedOptimizer(torch.optim.Adam, handles, lr=0.01)
        for _ in track(range(options.steps), description="training"):
            loss = mse_loss(forward(stages, queues, x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            local_optimizer.zero_grad()
            local_loss = mse_loss(model(x), y)
            local_loss.backward()
            local_optimizer.step()
        rows = {name: stage.rpc_sync().bars() for name, stage in zip(NAMES, stages, strict=True)}
    draw(rows, options.out)
    print(f"{options.out}: the last step, with {stages_busy(rows):.1f} of 3 stages busy on average")
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last; in one process: {local_loss:.4f}")
    if losses[-1] > 0.8 * losses[0] or abs(losses[-1] - local_loss) > 1e-3:
        sys.exit("it did not learn")


if __name__ == "__main__":
    main()
