"""`telegrad bench`: the cost of single calls, telegrad beside torch.distributed.rpc, in turn.

Both have the same names, so `median_time` is written once and given the modules of one or the other. telegrad is
measured from the current worker; torch's side is two processes spawned for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing
from rich import box
from rich.console import Console
from rich.table import Table

from .. import autograd, rpc
from ..cluster.local import LocalCluster
from ..errors import TelegradError
from .output import Code, Stopped, console, duration, error_console, show

ROUNDS = 3
PATIENCE = 120.0  # seconds for one round of torch's


class Figure(NamedTuple):
    title: str
    nbytes: int  # of the tensor that is sent there and back; 0: none is sent
    calls: int  # in each round
    warmup: int  # torch needs dozens of large echoes before it is up to speed
    backward: bool = False


FIGURES = (
    Figure("empty call", 0, 400, 100),
    Figure("echo of 64 bytes", 64, 400, 100),
    Figure("echo of 1 MiB", 1 << 20, 80, 60),
    Figure("call and backward", 64, 150, 40, backward=True),
)
LARGE = Figure("echo of 16 MiB", 16 << 20, 15, 20)


class Measured(NamedTuple):
    """Medians of the rounds, in seconds."""

    title: str
    telegrad: float
    torch: float | None


def measure(*, with_torch: bool, as_json: bool) -> int:
    """Starts a worker, measures, and prints the table. Returns the exit code.

    Raises:
        Stopped: something could not be measured.
    """
    target = error_console() if as_json else console()
    if with_torch and not torch_rpc.is_available():
        target.print("note        this torch has no torch.distributed.rpc: telegrad alone")
        with_torch = False
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        target.print(f"note        this machine is busy (load {load:.1f}, {cores} cores); it shows in all times")
    torch.set_num_threads(1)
    try:
        began = time.perf_counter()
        with LocalCluster(["callee"]):
            target.print(f"start-up    {time.perf_counter() - began:.1f} s for a worker")
            results = compare(target, "callee", FIGURES, with_torch=with_torch)
    except (TelegradError, RuntimeError) as error:
        raise Stopped(str(error)) from error
    if as_json:
        told = [{"call": r.title, "telegrad_seconds": r.telegrad, "torch_seconds": r.torch} for r in results]
        print(json.dumps({"torch": torch.__version__, "figures": told}, indent=2))
    return Code.FINE


def compare(target: Console, peer: str, figures: Sequence[Figure], *, with_torch: bool) -> list[Measured]:
    """Measures calls from the current worker to `peer`, beside those between two processes of torch's."""
    beside = ", in turn with torch.distributed.rpc: about 20 s" if with_torch else ""
    target.print(f"measuring   single calls{beside}")  # and no moving picture, which would be measured too
    columns = ("one call", "telegrad", "torch.distributed.rpc", "times as fast")[: 4 if with_torch else 2]
    table = Table(*columns, box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    results = []
    with torch_pair() if with_torch else contextlib.nullcontext() as torchs:
        for figure in figures:
            ours, theirs = [], []
            for number in range(ROUNDS):
                ours.append(median_time(rpc, autograd, peer, figure, warm=number > 0))
                if torchs is not None:
                    theirs.append(torchs(figure, number > 0))
            result = Measured(figure.title, statistics.median(ours), statistics.median(theirs) if theirs else None)
            results.append(result)
            cells = [] if result.torch is None else [duration(result.torch), f"{result.torch / result.telegrad:.1f}"]
            table.add_row(result.title, duration(result.telegrad), *cells)
    show(target, table)
    return results


def nothing() -> None:
    """The smallest function to call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def median_time(rpc: Any, autograd: Any, to: str, figure: Figure, *, warm: bool = False) -> float:
    """Returns the seconds for one call. The modules are telegrad's or torch.distributed's."""
    tensor = torch.ones(figure.nbytes // 4, requires_grad=figure.backward)

    def one() -> object:
        if figure.backward:
            with autograd.context() as context_id:
                loss = rpc.rpc_sync(to, double, args=(tensor,)).sum()
                autograd.backward(context_id, [loss])
                return autograd.get_gradients(context_id)
        return rpc.rpc_sync(to, echo, args=(tensor,)) if figure.nbytes else rpc.rpc_sync(to, nothing)

    for _ in range(0 if warm else figure.warmup):
        one()
    times = []
    for _ in range(figure.calls):
        began = time.perf_counter()
        result = one()
        times.append(time.perf_counter() - began)
        del result  # freed outside of the timed part
    return statistics.median(times)


# -- torch's side ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_pair() -> Iterator[Callable[[Figure, bool], float]]:
    """Starts two processes with torch's RPC. Yields a function that measures one round there; it raises RuntimeError
    if they do not answer."""
    spawn = torch.multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which they inherit: Ctrl-C is for this process alone
    safe_path = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"  # they start with `python -c`, which would import from the current directory
    try:
        # The callee ends first: it would complain about the loss of the caller.
        pools = caller, callee = spawn.Pool(1), spawn.Pool(1)
    finally:
        signal.signal(signal.SIGINT, handler)
        os.environ["PYTHONSAFEPATH"] = safe_path

    with caller, callee:
        for joined in [pool.apply_async(_join_torch, (rank, port)) for rank, pool in enumerate(pools)]:
            _answer(joined)
        yield lambda figure, warm: _answer(caller.apply_async(_time_torch, (figure, warm)))


def _answer(asked: Any) -> Any:
    try:
        return asked.get(PATIENCE)
    except torch.multiprocessing.TimeoutError as error:
        text = f"torch.distributed.rpc did not answer within {PATIENCE:.0f} s; its output may say why"
        raise RuntimeError(text) from error


def _join_torch(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore", message="You are using a Backend")
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)


def _time_torch(figure: Figure, warm: bool) -> float:
    import torch.distributed.autograd as torch_autograd

    return median_time(torch_rpc, torch_autograd, "worker1", figure, warm=warm)
