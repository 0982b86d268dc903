"""A model in two stages, each on the GPU of a worker: two GPUs where there are two, else one for both, else the CPU.

What you learn here: a tensor on a GPU is sent as any other is, and arrives on the same device of the other worker. A
stage moves what comes to the device that it lives on. Nothing has to be synchronised by hand: a call takes along what
is queued on the current stream, and its result, and its gradients, are ready on the streams that ask for them.

    python examples/gpu_pipeline.py --steps 30
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad
from telegrad import rpc
from telegrad.optim import DistributedOptimizer

NAMES = ["front", "back"]
WIDTH, MICRO_BATCHES = 256, 4


def device_of(place: int) -> str:
    """Where the stage of that place lives."""
    count = torch.cuda.device_count()
    return f"cuda:{place % count}" if count else "cpu"


class Stage(nn.Module):
    """A part of the model, on a worker of its own."""

    def __init__(self, layers: nn.Module, device: str) -> None:
        super().__init__()
        self.layers = layers.to(device)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.device))  # type: ignore[no-any-return]

    def parameter_handles(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def through(stages: list[rpc.RRef[Stage]], x: Tensor) -> Tensor:
    """The forward pass: micro-batches follow each other, so that both stages have something to do."""
    halfway = [stages[0].rpc_async().forward(part) for part in x.chunk(MICRO_BATCHES)]
    outputs = [stages[1].rpc_async().forward(part.wait()) for part in halfway]
    return torch.cat([output.wait().to(x.device) for output in outputs])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30, help="how many steps of training")
    steps = parser.parse_args().steps
    here = device_of(0)
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = torch.sin(x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    parts = [model[:2], model[2:]]
    losses = []
    with telegrad.LocalCluster(NAMES):
        # The workers get copies of the parts; the model here is for the comparison below.
        stages = [rpc.remote(name, Stage, args=(parts[n], device_of(n))) for n, name in enumerate(NAMES)]
        handles = [handle for stage in stages for handle in stage.rpc_sync().parameter_handles()]
        optimizer = DistributedOptimizer(torch.optim.Adam, handles, lr=1e-3)
        inputs, targets = x.to(here), y.to(here)
        began = time.perf_counter()
        for _ in track(range(steps), description="training"):
            loss = mse_loss(through(stages, inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        took = time.perf_counter() - began
    stages_on = ", ".join(f"{name} on {device_of(n)}" for n, name in enumerate(NAMES))
    print(f"{stages_on}; the data on {here}; {took / steps * 1e3:.1f} ms for a step")
    model.to(here)
    local = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = mse_loss(torch.cat([model(part) for part in inputs.chunk(MICRO_BATCHES)]), targets)
        local.zero_grad()
        loss.backward()
        local.step()
        local_loss = loss.item()
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last; in one process: {local_loss:.4f}")


if __name__ == "__main__":
    main()
