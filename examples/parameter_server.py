"""A parameter server, and trainers that use it each at its own pace.

What you learn here: each trainer has a context of its own for each step, so passes that run at the same time never mix.
It pulls the weights, and the backward pass pushes the gradients: weights that came from the server are part of the
graph. `rpc.RRef(progress)` is a handle by which the trainers move the progress bars in this process.

    python examples/parameter_server.py --steps 150
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

import telegrad
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

TRAINERS = ["trainer0", "trainer1", "trainer2"]
BATCH = 32


class Server:
    """Lives on the server's worker, with the weights and one optimizer for all trainers."""

    def __init__(self) -> None:
        self.model = new_model()
        handles = [rpc.RRef(parameter) for parameter in self.model.parameters()]
        # Others step between a trainer's pull and its step. More than this would diverge, as it would in one process.
        self.optimizer = DistributedOptimizer(torch.optim.SGD, handles, lr=0.02)

    def pull(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def step(self, context_id: int) -> None:
        """With the gradients of this context alone. Steps for several trainers take turns."""
        self.optimizer.step(context_id)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def wave(x: Tensor) -> Tensor:
    return torch.sin(2 * x)


def train(number: int, steps: int, server: rpc.RRef[Server], progress: rpc.RRef[Progress], bar: int) -> None:
    """Runs on a trainer, which sees only its own part of the wave."""
    random = torch.Generator().manual_seed(number)
    model = new_model()  # for its shape: the weights come from the server
    for _ in range(steps):
        x = number - len(TRAINERS) / 2 + torch.rand(BATCH, 1, generator=random)
        with autograd.context() as context_id:
            weights = server.rpc_sync().pull()
            loss = mse_loss(functional_call(model, weights, x), wave(x))
            autograd.backward(context_id, [loss])  # leaves the gradients on the server, in this context
            server.rpc_sync().step(context_id)
        progress.rpc_sync().advance(bar)


def loss_of(weights: dict[str, Tensor]) -> float:
    """On the whole wave."""
    x = torch.linspace(-len(TRAINERS) / 2, len(TRAINERS) / 2, 200)[:, None]
    return mse_loss(functional_call(new_model(), weights, x), wave(x)).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150, help="how many steps each trainer takes")
    steps = parser.parse_args().steps

    with telegrad.LocalCluster(["server", *TRAINERS]), Progress() as progress:
        server = rpc.remote("server", Server)
        before = loss_of(server.rpc_sync().pull())
        runs = []
        for number, name in enumerate(TRAINERS):
            args = (number, steps, server, rpc.RRef(progress), progress.add_task(name, total=steps))
            runs.append(rpc.rpc_async(name, train, args, timeout=0))
        torch.futures.wait_all(runs)
        after = loss_of(server.rpc_sync().pull())

    print(f"loss on the whole wave: {before:.3f} before training, {after:.3f} after it")
    if after > 0.7 * before:
        sys.exit("it did not learn")


if __name__ == "__main__":
    main()
