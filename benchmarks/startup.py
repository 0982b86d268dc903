"""The start-up figure: many workers, each its own process, until a first call to each has worked.

telegrad starts them with `LocalCluster`, torch's come from `torch.multiprocessing.spawn` with `init_rpc` in each.
The clock starts in a fresh process that has imported torch (telegrad's server process is not yet there).
Keep the imports of this module few: each process that `spawn` starts repeats them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from importlib import import_module
from multiprocessing.connection import Connection

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.backends import TORCH
from benchmarks.callee import process_id
from benchmarks.figures import ALONE, Figure, Repeats, Session
from benchmarks.ports import meet_at_free_port

WORKERS = 32
WORKERS_WHEN_QUICK = 4


def time_startup(session: Session) -> list[float]:
    count = WORKERS_WHEN_QUICK if session.quick else WORKERS
    start = _start_torch if session.backend == TORCH else _start_telegrad
    return [start(count) for _ in range(session.repeats.count)]


def _start_telegrad(count: int) -> float:
    telegrad = import_module("telegrad")
    rpc = import_module("telegrad.rpc")
    names = [f"worker{rank}" for rank in range(count)]
    start = time.monotonic()
    with telegrad.LocalCluster(names):
        pids = {rpc.rpc_sync(name, process_id) for name in names}
        took = time.monotonic() - start
    _check_each_is_a_process(pids | {os.getpid()}, count + 1)
    return took


def _start_torch(count: int) -> float:
    """time.monotonic() is one clock for all processes of a host: the last reading is taken in rank 0."""
    meet_at_free_port()
    receive, send = multiprocessing.get_context("spawn").Pipe(duplex=False)
    start = time.monotonic()
    workers = spawn(_torch_worker, args=(count, send), nprocs=count, join=False)
    assert workers is not None
    send.close()
    try:
        pids, connected = receive.recv()
    except EOFError:
        pids, connected = set(), start  # join() below raises what went wrong in the worker
    while not workers.join():
        pass
    _check_each_is_a_process(pids, count)
    return float(connected - start)


def _torch_worker(rank: int, count: int, report: Connection) -> None:
    torch.set_num_threads(1)
    TORCH.join(f"worker{rank}", rank=rank, world_size=count, transport=None)
    if rank == 0:
        others = [f"worker{other}" for other in range(1, count)]
        pids = {TORCH.rpc.rpc_sync(name, process_id) for name in others} | {os.getpid()}
        report.send((pids, time.monotonic()))
    TORCH.rpc.shutdown()


def _check_each_is_a_process(pids: set[int], expected: int) -> None:
    if len(pids) != expected:
        raise AssertionError(f"{expected} processes were to answer, {len(pids)} did")


FIGURE = Figure(
    name="startup",
    title=f"{WORKERS} workers started, called",
    measure=time_startup,
    repeats=Repeats(count=1, warmup=0),
    unit="s",
    goal=0.33,
    setting=ALONE,
)
