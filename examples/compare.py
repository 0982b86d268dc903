"""What single calls cost: telegrad beside torch.distributed.rpc, in turn. `ring.py` prints the table.

Both modules have the same names, so `median_time` is written once and given one or the other. telegrad is
measured from the worker that calls `compare`; torch's side is two processes spawned for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from rich import box
from rich.console import Console
from rich.table import Table

from telegrad import rpc

ROUNDS = 3


class Figure(NamedTuple):
    title: str
    nbytes: int | None  # of the tensor that is sent there and back; None: nothing is
    calls: int  # in each round
    warmup: int  # torch needs dozens of large echoes before it is up to speed


FIGURES = (
    Figure("empty call", None, 400, 100),
    Figure("echo of 64 bytes", 64, 400, 100),
    Figure("echo of 1 MiB", 1 << 20, 80, 60),
    Figure("echo of 16 MiB", 16 << 20, 15, 20),
)


def nothing() -> None:
    """The smallest function to call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def median_time(rpc: Any, to: str, figure: Figure, *, warm: bool) -> float:
    """Seconds for one call. `rpc` is telegrad.rpc or torch.distributed.rpc."""
    function = nothing if figure.nbytes is None else echo
    args = () if figure.nbytes is None else (torch.ones(figure.nbytes // 4),)
    for _ in range(0 if warm else figure.warmup):
        rpc.rpc_sync(to, function, args=args)
    times = []
    for _ in range(figure.calls):
        began = time.perf_counter()
        result = rpc.rpc_sync(to, function, args=args)
        times.append(time.perf_counter() - began)
        del result  # freed outside of the timed part
    return statistics.median(times)


def compare(console: Console, peer: str, *, with_torch: bool) -> None:
    """Measures and prints the table."""
    columns = ("one call", "telegrad", "torch.distributed.rpc", "times as fast")[: 4 if with_torch else 2]
    table = Table(*columns, box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    with contextlib.ExitStack() as running:
        beside = ", in turn with torch.distributed.rpc: about 15 s" if with_torch else ""
        console.print(
            f"measuring   single calls{beside}"
        )  # and no moving picture, which would be measured too
        torchs = running.enter_context(torch_pair()) if with_torch else None
        for figure in FIGURES:
            ours, theirs = [], []
            for number in range(ROUNDS):
                ours.append(median_time(rpc, peer, figure, warm=number > 0))
                if torchs is not None:
                    theirs.append(torchs(figure, number > 0))
            cells = [shown(statistics.median(ours))]
            if theirs:
                ratio = statistics.median(theirs) / statistics.median(ours)
                cells += [shown(statistics.median(theirs)), f"{ratio:.1f}"]
            table.add_row(figure.title, *cells)
    console.print(table)


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


# -- torch's side ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_pair() -> Iterator[Callable[[Figure, bool], float]]:
    """Two processes with torch's RPC; a function that measures one round there."""
    spawn = torch.multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    orders: list[Connection | None] = [theirs, None]
    processes = [
        spawn.Process(target=_torch_worker, args=(rank, port, orders[rank]), daemon=True) for rank in (0, 1)
    ]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which they inherit: Ctrl-C is for us alone
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
    theirs.close()

    def measure(figure: Figure, warm: bool) -> float:
        ours.send((figure, warm))
        seconds: float = ours.recv()
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
    import torch.distributed.rpc as torch_rpc

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore", message="You are using a Backend")
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    with contextlib.suppress(EOFError):
        while orders is not None:
            figure, warm = orders.recv()
            orders.send(median_time(torch_rpc, "worker1", figure, warm=warm))
    torch_rpc.shutdown()
