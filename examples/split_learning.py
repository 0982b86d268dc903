"""Split learning: a clinic has the measurements, a lab has the diagnoses, and neither shows its data to the other.

What you learn here: a model can be split between two parties, each with data, weights and an optimizer of its own. The
backward pass starts where the loss is, at the lab, and finds its way into the clinic's half of the model. All that
crosses the boundary is counted (`worker.events`): activations one way, their gradients the other way.

    python examples/split_learning.py --steps 200
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import telegrad
from telegrad import rpc
from telegrad.events import Event

PATIENTS, BATCH, CUT = 600, 64, 4  # CUT: how wide the model is at the boundary
CONTENTS = {"call": "activations, numbers of patients", "gradients": "of activations", "reply": "the loss"}


def new_half(inputs: int, outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


class Lab:
    """Lives on the lab's worker: the diagnoses never leave it."""

    def __init__(self, diagnoses: Tensor) -> None:
        self.diagnoses = diagnoses
        self.half = new_half(CUT, 1, seed=2)
        self.optimizer = torch.optim.Adam(self.half.parameters(), lr=0.01)

    def learn(self, activations: Tensor, patients: Tensor) -> float:
        """One step. When it returns, the clinic has the gradients of its weights too."""
        self.optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.half(activations), self.diagnoses[patients])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def accuracy(self, activations: Tensor) -> float:
        return ((self.half(activations) > 0) == self.diagnoses).float().mean().item()


def two_spirals() -> tuple[Tensor, Tensor]:
    """The world: measurements (points in the plane) and diagnoses (which of two spirals they are on)."""
    which = torch.arange(PATIENTS) % 2
    radius = torch.rand(PATIENTS, generator=torch.Generator().manual_seed(0))
    angle = 1.5 * math.pi * radius + math.pi * which
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), which.float()[:, None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="how many steps of training")
    steps = parser.parse_args().steps
    measurements, diagnoses = two_spirals()
    half = new_half(2, CUT, seed=1)
    optimizer = torch.optim.Adam(half.parameters(), lr=0.01)
    crossed: Counter[tuple[str, str]] = Counter()  # bytes, by direction and kind of message

    def on_message(event: Event) -> None:
        if event.stage in ("send", "receive"):
            crossed["clinic > lab" if event.stage == "send" else "clinic < lab", event.kind] += event.nbytes

    with telegrad.LocalCluster(["lab"], driver="clinic") as cluster:
        lab = rpc.remote("lab", Lab, args=(diagnoses,))  # only here: a real lab has them already
        before = lab.rpc_sync().accuracy(half(measurements))
        stop = cluster.worker.events.subscribe(on_message)
        for _ in track(range(steps), description="training"):
            patients = torch.randint(PATIENTS, (BATCH,))
            optimizer.zero_grad()
            lab.rpc_sync().learn(half(measurements[patients]), patients)
            optimizer.step()
        stop()
        after = lab.rpc_sync().accuracy(half(measurements))

    print("what crossed the boundary, in bytes for each step:")
    for (direction, kind), nbytes in crossed.most_common():
        print(f"  {direction}  {kind:10} {nbytes / steps:8,.0f}  {CONTENTS.get(kind, '(none: bookkeeping)')}")
    print(f"diagnoses that are right: {before:.0%} before training, {after:.0%} after it")
    if after < 0.9:
        sys.exit("it did not learn")


if __name__ == "__main__":
    main()
