"""What single calls cost: telegrad beside torch.distributed.rpc, in turn. `telegrad bench` prints the table.

Both have the same names, so `median_time` is written once and given the modules of one or the other. telegrad is
measured from the current worker; torch's side is two processes spawned for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing
from rich import box
from rich.console import Console
from rich.table import Table

from .. import autograd, rpc
from .figures import duration
from .output import show

ROUNDS = 3
PATIENCE = 120.0  # seconds for one round of torch's


class Figure(NamedTuple):
    title: str
    nbytes: int | None  # of the tensor that is sent there and back; None: nothing is
    calls: int  # in each round
    warmup: int  # torch needs dozens of large echoes before it is up to speed
    backward: bool = False


FIGURES = (
    Figure("empty call", None, 400, 100),
    Figure("echo of 64 bytes", 64, 400, 100),
    Figure("echo of 1 MiB", 1 << 20, 80, 60),
    Figure("call and backward", 64, 150, 40, backward=True),
)
LARGE = Figure("echo of 16 MiB", 16 << 20, 15, 20)


class Measured(NamedTuple):
    """Medians of rounds, in seconds."""

    title: str
    telegrad: float
    torch: float | None


def nothing() -> None:
    """The smallest function to call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def median_time(rpc: Any, autograd: Any, to: str, figure: Figure, *, warm: bool) -> float:
    """Seconds for one call. The modules are telegrad's or torch.distributed's."""
    tensor = None if figure.nbytes is None else torch.ones(figure.nbytes // 4, requires_grad=figure.backward)

    def one() -> object:
        if figure.backward:
            with autograd.context() as context_id:
                loss = rpc.rpc_sync(to, double, args=(tensor,)).sum()
                autograd.backward(context_id, [loss])
                return autograd.get_gradients(context_id)
        if tensor is None:
            return rpc.rpc_sync(to, nothing, args=())
        return rpc.rpc_sync(to, echo, args=(tensor,))

    for _ in range(0 if warm else figure.warmup):
        one()
    times = []
    for _ in range(figure.calls):
        began = time.perf_counter()
        result = one()
        times.append(time.perf_counter() - began)
        del result  # freed outside of the timed part
    return statistics.median(times)


def measured(figures: Sequence[Figure], peer: str, *, with_torch: bool) -> Iterator[Measured]:
    """Each figure, from the current worker to `peer`, and between two processes of torch's."""
    with contextlib.ExitStack() as running:
        torchs = running.enter_context(torch_pair()) if with_torch else None
        for figure in figures:
            ours, theirs = [], []
            for number in range(ROUNDS):
                ours.append(median_time(rpc, autograd, peer, figure, warm=number > 0))
                if torchs is not None:
                    theirs.append(torchs(figure, number > 0))
            yield Measured(figure.title, statistics.median(ours), statistics.median(theirs) if theirs else None)


def compare(console: Console, peer: str, figures: Sequence[Figure], *, with_torch: bool) -> list[Measured]:
    """Measures and prints the table."""
    beside = ", in turn with torch.distributed.rpc: about 20 s" if with_torch else ""
    console.print(f"measuring   single calls{beside}")  # and no moving picture, which would be measured too
    columns = ("one call", "telegrad", "torch.distributed.rpc", "times as fast")[: 4 if with_torch else 2]
    table = Table(*columns, box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    results = list(measured(figures, peer, with_torch=with_torch))
    for title, ours, theirs in results:
        cells = [duration(ours)]
        if theirs is not None:
            cells += [duration(theirs), f"{theirs / ours:.1f}"]
        table.add_row(title, *cells)
    show(console, table)
    return results


# -- torch's side ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_pair() -> Iterator[Callable[[Figure, bool], float]]:
    """Two processes with torch's RPC; a function that measures one round there.

    That function raises RuntimeError if they end or do not answer.
    """
    spawn = torch.multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    orders: list[Connection | None] = [theirs, None]
    processes = [spawn.Process(target=_torch_worker, args=(rank, port, orders[rank]), daemon=True) for rank in (0, 1)]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which they inherit: Ctrl-C is for us alone
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
    theirs.close()

    def measure(figure: Figure, warm: bool) -> float:
        try:
            ours.send((figure, warm))
            if not ours.poll(PATIENCE):
                raise RuntimeError(f"torch.distributed.rpc did not answer within {PATIENCE:.0f} s")
            seconds: float = ours.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("a process of torch.distributed.rpc has ended; its output says why") from error
        return seconds

    try:
        yield measure
        ours.close()  # the end, to them
        for process in processes:
            process.join(10)
    finally:
        for process in reversed(processes):  # the one that is called first: it would complain about the other
            process.kill()
        for process in processes:
            process.join()
        ours.close()


def _torch_worker(rank: int, port: int, orders: Connection | None) -> None:
    import torch.distributed.autograd as torch_autograd

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore", message="You are using a Backend")
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    with contextlib.suppress(EOFError):
        while orders is not None:
            figure, warm = orders.recv()
            orders.send(median_time(torch_rpc, torch_autograd, "worker1", figure, warm=warm))
    torch_rpc.shutdown()
