"""The suite `devices`: tensors on a GPU that two processes share. Not one of the default suites: it needs a GPU.

Each sample ends when the device has done its work. torch is given the device map {0: 0}; telegrad needs none.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.callee import MIB, echo
from benchmarks.figures import PAIR_ON_GPU, Figure, Repeats, Session, Suite
from benchmarks.passes import Passes
from benchmarks.programs import Program, chain, same
from benchmarks.sampling import timed, timed_by_itself

KIB = 1024
BUSY_CYCLES = 10_000_000  # some 5 ms

# Without NVIDIA's Multi-Process Service a GPU takes turns between processes.
HAS_MPS = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def time_echo(session: Session, *, nbytes: int) -> list[float]:
    """One sample: a call that returns its argument, until the result is there."""
    x = torch.arange(nbytes // 4, dtype=torch.float32, device="cuda")

    def call() -> Tensor:
        result: Tensor = session.backend.rpc.rpc_sync(session.peer, echo, args=(x,))
        torch.cuda.synchronize()
        return result

    assert torch.equal(call(), x)
    return timed(call, session.repeats)


def time_pass(session: Session, *, program: Program, nbytes: int) -> list[float]:
    """One sample: from entering the context until it is left, and the gradients are there."""
    leaf = (torch.arange(nbytes // 4, dtype=torch.float32, device="cuda") / nbytes).requires_grad_()
    passes = Passes(session.backend, session.peers, program, leaf)
    passes.check()

    def call() -> dict[Tensor, Tensor]:
        gradients = passes.whole()
        torch.cuda.synchronize()
        return gradients

    return timed(call, session.repeats)


def there_and_back(rpc: object, peers: tuple[str, ...], leaf: Tensor) -> Tensor:
    result = rpc.rpc_sync(peers[0], same, args=(leaf,))  # type: ignore[attr-defined]
    return torch.dot(result, leaf.detach())


def time_sending(session: Session, *, nbytes: int) -> list[float]:
    """One sample: until rpc_async() returns, while the stream has work in front of its argument."""
    x = torch.arange(nbytes // 4, dtype=torch.float32, device="cuda")

    def call() -> float:
        torch.cuda._sleep(BUSY_CYCLES)
        y = x + 1
        start = perf_counter()
        future = session.backend.rpc.rpc_async(session.peer, echo, args=(y,))
        took = perf_counter() - start
        future.wait()
        torch.cuda.synchronize()
        return took

    return timed_by_itself(call, session.repeats)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KB"


def _echo(nbytes: int, goal: float, count: int) -> Figure:
    return Figure(
        name=f"echo-{_size(nbytes).replace(' ', '')}",
        title=f"echo {_size(nbytes)}",
        measure=partial(time_echo, nbytes=nbytes),
        repeats=Repeats(count=count, warmup=20),
        goal=goal,
        setting=PAIR_ON_GPU,
    )


def _pass(nbytes: int, goal: float, count: int) -> Figure:
    return Figure(
        name=f"pass-{_size(nbytes).replace(' ', '')}",
        title=f"one call with {_size(nbytes)} each way, backward",
        measure=partial(time_pass, program=there_and_back, nbytes=nbytes),
        repeats=Repeats(count=count, warmup=10),
        goal=goal,
        setting=PAIR_ON_GPU,
    )


SUITE = Suite(
    name="devices",
    title="Tensors on a GPU: telegrad and torch.distributed",
    figures=(
        _echo(KIB, 0.3 if HAS_MPS else 0.5, 200),
        _echo(MIB, 0.3 if HAS_MPS else 0.5, 200),
        _echo(16 * MIB, 0.3 if HAS_MPS else 0.5, 100),
        _echo(256 * MIB, 0.3 if HAS_MPS else 0.08, 20),
        _pass(KIB, 0.8, 100),
        _pass(16 * MIB, 0.8, 60),
        _pass(256 * MIB, 0.6 if HAS_MPS else 0.05, 10),
        Figure(
            name="chain-10",
            title="10 chained calls with 1 KB, backward",
            measure=partial(time_pass, program=partial(chain, length=10), nbytes=KIB),
            repeats=Repeats(count=30, warmup=5),
            goal=0.8,
            setting=PAIR_ON_GPU,
        ),
        Figure(
            name="sending",
            title="rpc_async returns, with 5 ms of work in front of its argument",
            measure=partial(time_sending, nbytes=MIB),
            repeats=Repeats(count=40, warmup=10),
            goal=0.6,
            setting=PAIR_ON_GPU,
        ),
    ),
    remarks=(
        "Two processes share one GPU, by NVIDIA's Multi-Process Service (MPS)."
        if HAS_MPS
        else "Two processes share one GPU, which takes turns between them (time-sliced, without MPS).",
        "All processes run on one host, started afresh for each round of each backend, with one torch thread each.",
    ),
)
