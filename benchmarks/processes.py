"""Fresh processes for one job, and none left afterwards.

A job goes in (a backend, a setting, tasks); one outcome for each task comes out, whatever happens: a task that
raises, a worker that dies and a job that runs past its limit give outcomes with an error. Only processes started
since the job began are ended, found as descendants of this one; this process adopts orphans, so that children
of a worker that was killed are still among them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.backends import Backend
from benchmarks.figures import Session, Setting, Task
from benchmarks.ports import free_port, meet_at

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

GRACE_S = 5.0
"""How long processes may take to end by themselves once their job is done, or one of them is lost."""

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    backend: Backend
    setting: Setting
    tasks: tuple[Task, ...]
    quick: bool


@dataclass(frozen=True)
class Outcome:
    task: str
    value: Any = None
    error: str | None = None


def run(job: Job, limit_s: float) -> list[Outcome]:
    """Run the tasks of a job, one after the other, in processes of their own.

    Returns:
        One outcome for each task.
    """
    deadline = time.monotonic() + limit_s
    with _none_left():
        receive, send = _spawn.Pipe(duplex=False)
        processes = _start(job, send)
        send.close()
        outcomes, reason = _collect(receive, processes, deadline)
        receive.close()
        if reason is None:
            reason = _join(processes, min(deadline, time.monotonic() + GRACE_S))
    if reason:
        print(f"  {job.backend.name}, {job.setting}: {reason}", file=sys.stderr)
    missing = [task.name for task in job.tasks if task.name not in {outcome.task for outcome in outcomes}]
    return outcomes + [Outcome(name, error=reason or "no result") for name in missing]


def _start(job: Job, report: Connection) -> list[SpawnProcess]:
    port = free_port()
    processes = []
    for rank in range(max(job.setting.workers, 1)):
        process = _spawn.Process(target=_work, args=(rank, job, port, report if rank == 0 else None))
        process.start()
        processes.append(process)
    return processes


def _collect(receive: Connection, processes: list[SpawnProcess], deadline: float) -> tuple[list[Outcome], str | None]:
    """The outcomes, and why there are no more of them (None: the driver was done)."""
    outcomes: list[Outcome] = []
    watched = [process.sentinel for process in processes]
    while (left := deadline - time.monotonic()) > 0:
        ready = wait([receive, *watched], timeout=left)
        if receive in ready:
            try:
                outcome = receive.recv()
            except EOFError:
                return outcomes, f"the driver ended early (exit codes {_exit_codes(processes)})"
            if outcome is None:
                return outcomes, None
            outcomes.append(outcome)
        elif ready:
            # The driver has a moment to tell what the loss did to its task: it says more than an exit code.
            watched.clear()
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if watched:
        return outcomes, "time limit reached"
    return outcomes, f"a worker ended early (exit codes {_exit_codes(processes)})"


def _exit_codes(processes: list[SpawnProcess]) -> list[int | None]:
    """None for a process that still runs. A process that is just ending has a moment to be done."""
    for process in processes:
        process.join(0.1)
    return [process.exitcode for process in processes]


def _join(processes: list[SpawnProcess], deadline: float) -> str | None:
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = _exit_codes(processes)
    return f"did not end cleanly (exit codes {codes})" if any(code != 0 for code in codes) else None


def _work(rank: int, job: Job, port: int, report: Connection | None) -> None:
    """What each process runs. Rank 0 measures; the others serve until it shuts down."""
    end_with_parent()
    if job.setting.pinned:
        _pin(rank)
    meet_at(port)
    names = ["driver", *(f"peer{other}" for other in range(1, job.setting.workers))]
    if job.setting.workers:
        import torch

        torch.set_num_threads(1)
        job.backend.join(names[rank], rank=rank, world_size=job.setting.workers, transport=job.setting.transport)
    if report is not None:
        for task in job.tasks:
            report.send(_outcome(task, job, tuple(names[1:])))
        report.send(None)
    if job.setting.workers:
        job.backend.rpc.shutdown()


def _pin(rank: int) -> None:
    """Keep this process, whose threads are yet to be started, on one of the cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _outcome(task: Task, job: Job, peers: tuple[str, ...]) -> Outcome:
    repeats = task.repeats.fewer() if job.quick else task.repeats
    try:
        return Outcome(task.name, value=task.measure(Session(job.backend, peers, repeats, job.quick)))
    except Exception as error:
        traceback.print_exc()
        return Outcome(task.name, error=f"{type(error).__name__}: {error}")


@contextmanager
def _none_left() -> Iterator[None]:
    """Whatever happens inside, every process that was started inside has ended on the way out."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    resource_tracker.ensure_running()  # multiprocessing's own, for the whole run: it is to stay
    there_before = set(psutil.Process().children(recursive=True))

    def started_since() -> list[psutil.Process]:
        return [one for one in psutil.Process().children(recursive=True) if one not in there_before]

    try:
        yield
        psutil.wait_procs(started_since(), timeout=GRACE_S)
    finally:
        left = started_since()
        if left:
            print(f"  ended {len(left)} processes that were left behind", file=sys.stderr)
        while left:  # again: a process may have started another before it was ended
            for process in left:
                _kill(process)
            psutil.wait_procs(left, timeout=GRACE_S)
            left = started_since()


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def end_with_parent() -> None:
    """Have this process killed when the one that has started it ends, however that ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it had ended before
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere orphans are not adopted."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
