"""Whether a training run over several workers has the same bits each time.

    scripts/same-bits        one run: prints a hash of all bits of the parameters and losses
    scripts/same-bits 50     50 runs, on one core and on all, idle and beside a program that keeps them busy: all must
                             have the same hash

A convolution and dropout on one worker, a linear layer and dropout on another; weights and masks are drawn there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STEPS = 5
PATIENCE = 120.0  # seconds, for a run


def train() -> str:
    """Returns the hash of one run."""
    import torch
    from torch import nn

    import telegrad
    from telegrad.nn import RemoteModule
    from telegrad.optim import DistributedOptimizer

    class Encoder(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())

    class Head(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8 * 16 * 16, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    bits = hashlib.sha256()
    # Optimizers import dynamo: once, and not in each worker.
    with telegrad.ForkServer(preload=["torch._dynamo"]) as server, telegrad.LocalCluster(["a", "b"], server=server):
        model = nn.Sequential(RemoteModule("a", Encoder), RemoteModule("b", Head))
        optimizer = DistributedOptimizer(torch.optim.Adam, model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            loss = model(torch.rand(8, 16, 16, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bits.update(loss.detach().numpy().tobytes())
        for name, value in model.state_dict().items():
            bits.update(name.encode() + value.numpy().tobytes())
    return bits.hexdigest()


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keeps this many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], cwd="/") for _ in range(cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_apart(number: int) -> str:
    """Runs it in a new process, in one of four ways; returns the hash."""
    cores = sorted(os.sched_getaffinity(0))
    if number % 2:
        cores = cores[:1]
    with busy(len(cores) if number % 4 > 1 else 0):
        command = [sys.executable, __file__, "--on", ",".join(map(str, cores))]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True).stdout.strip()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--on"]:
        os.sched_setaffinity(0, map(int, arguments[1].split(",")))
        arguments = []
    if not arguments:
        print(train())
        return 0
    found: dict[str, int] = {}
    for number in range(int(arguments[0])):
        bits = run_apart(number)
        found[bits] = found.get(bits, 0) + 1
    for bits, times in found.items():
        print(f"{bits}: {times} runs")
    return len(found) != 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
