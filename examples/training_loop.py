"""The training loop of one process, with the encoder on one worker and the decoder on another.

What you learn here: the loop does not change. `RemoteModule` puts a part of a model on a worker; the loss,
`loss.backward()`, clipping, the scheduler, the optimizer and the saved state are used as ever. At the end the same loop
runs in one process, and must have the same parameters to the last bit.

    python examples/training_loop.py --steps 100
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad
from telegrad.nn import RemoteModule
from telegrad.nn.utils import clip_grad_norm_
from telegrad.optim import DistributedOptimizer

WIDTH = 32


class Encoder(nn.Sequential):
    """Takes a wave, given by its values at eight places."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Decoder(nn.Sequential):
    """Says how high the wave is, and how fast."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    wanted = 0.5 + torch.rand(steps, 64, 2, generator=random, dtype=torch.float64)
    places = torch.linspace(0, math.pi, 8, dtype=torch.float64)
    return [(y[:, :1] * torch.sin(places * y[:, 1:]), y) for y in wanted]


def train(model: nn.Module, optimizer: Any, clip: Callable[..., Tensor], steps: int, what: str) -> list[float]:
    """The loop. It does not know where the model is."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for x, y in track(batches(steps), description=what):
        loss = mse_loss(model(x), y)
        loss.backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="how many steps of training")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in the workers: several threads add up in another order, and round otherwise
    local = nn.Sequential(Encoder(), nn.GELU(), nn.Linear(WIDTH, WIDTH), Decoder()).double()
    with telegrad.LocalCluster(["a", "b"]):
        model = nn.Sequential(
            RemoteModule("a", Encoder), nn.GELU(), nn.Linear(WIDTH, WIDTH), RemoteModule("b", Decoder)
        )
        model.double().load_state_dict(local.state_dict())  # to begin with the same numbers
        print(model)
        print(f"{sum(p.numel() for p in model.parameters())} parameters")
        optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters(), lr=3e-3)
        losses = train(model, optimizer, clip_grad_norm_, steps, "on three workers")
        trained = model.state_dict()
    train(local, torch.optim.AdamW(local.parameters(), lr=3e-3), nn.utils.clip_grad_norm_, steps, "in one process")

    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    same = all(torch.equal(value, trained[name]) for name, value in local.state_dict().items())
    print(f"parameters after {steps} steps: {'the same bits as' if same else 'NOT the same as'} in one process")
    if not same or losses[-1] > 0.5 * losses[0]:
        sys.exit("it did not learn as in one process")


if __name__ == "__main__":
    main()
