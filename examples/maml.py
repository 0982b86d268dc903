"""MAML, learning to learn: the tasks are on other workers.

What you learn here: `torch.autograd.grad` differentiates a remote computation as it does a local one, and with
`create_graph=True` its result can be differentiated again. The meta-gradient goes through the inner step, and so twice
through every worker. The same code in one process gives the same gradient, which is checked first.

    python examples/maml.py --steps 150
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad
from telegrad import rpc

WORKERS = ["school", "academy"]
TASKS, POINTS, WIDTH = 4, 10, 32  # tasks in each meta-step, points in each task, hidden units
INNER_RATE = 0.1


def network(weights: list[Tensor], x: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    return torch.tanh(x @ w1.T + b1) @ w2.T + b2


def task_loss(weights: list[Tensor], task: int, part: int) -> Tensor:
    """Runs where the task is: a sine wave, with points to learn from (part 0) and to be judged by (part 1)."""
    random = torch.Generator().manual_seed(task)
    height, phase = 0.5 + torch.rand(2, generator=random) * torch.tensor([1.5, math.pi])
    x = 6 * torch.rand(2, POINTS, 1, generator=random)[part] - 3
    return mse_loss(network(weights, x), height * torch.sin(x + phase))


def losses_there(weights: list[list[Tensor]], tasks: range, part: int) -> list[Tensor]:
    """All tasks at once, each on its worker."""
    given = [(own, task, part) for own, task in zip(weights, tasks, strict=True)]
    calls = [rpc.rpc_async(WORKERS[args[1] % len(WORKERS)], task_loss, args) for args in given]
    return torch.futures.wait_all(calls)


def losses_here(weights: list[list[Tensor]], tasks: range, part: int) -> list[Tensor]:
    return [task_loss(own, task, part) for own, task in zip(weights, tasks, strict=True)]


def meta_loss(weights: list[Tensor], tasks: range, losses: Callable) -> Tensor:
    """The mean loss of all tasks on new points, after an inner step on each task's own points."""
    own = [[weight.clone() for weight in weights] for _ in tasks]  # so one pass serves all tasks
    flat = [weight for each in own for weight in each]
    gradients = iter(torch.autograd.grad(sum(losses(own, tasks, 0)), flat, create_graph=True))
    adapted = [[weight - INNER_RATE * next(gradients) for weight in each] for each in own]
    return torch.stack(losses(adapted, tasks, 1)).mean()


def meta_backward(weights: list[Tensor], tasks: range) -> Tensor:
    """Leaves the meta-gradient in `.grad` of the weights, where an optimizer expects it."""
    loss = meta_loss(weights, tasks, losses_there)
    loss.backward()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150, help="how many meta-steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    weights = [*nn.Linear(1, WIDTH).parameters(), *nn.Linear(WIDTH, 1).parameters()]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    unseen = range(1_000_000, 1_000_016)

    with telegrad.LocalCluster(WORKERS):
        before = meta_backward(weights, unseen)
        local = torch.autograd.grad(meta_loss(weights, unseen, losses_here), weights)
        worst = max((w.grad - here).abs().max().item() for w, here in zip(weights, local, strict=True))
        print(f"meta-gradients across workers and in one process differ by {worst:.1g} at most")
        for step in track(range(options.steps), description="meta-training"):
            optimizer.zero_grad()
            meta_backward(weights, range(step * TASKS, (step + 1) * TASKS))
            optimizer.step()
        after = meta_backward(weights, unseen)

    print(f"loss on new tasks after one inner step: {before:.3f} before meta-training, {after:.3f} after it")
    if worst > 1e-5 or after > 0.8 * before:
        sys.exit("it did not learn")


if __name__ == "__main__":
    main()
