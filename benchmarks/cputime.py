"""Processor time of several processes, read from outside: a process that is measured is not disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.figures import Repeats

_CPUCLOCK_SCHED = 2  # Linux: the time that all threads of a process have run, in user code and in the kernel


def process_seconds(pids: Iterable[int]) -> float:
    """What these processes have used so far, together."""
    return sum(time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED) for pid in pids)


def used_by(pids: Sequence[int], call: Callable[[], Any], repeats: Repeats, *, batch: int) -> list[float]:
    """Processor seconds of all these processes for one call; a sample is the mean of a batch of calls.

    It is counted from before the first call of a batch until after the last: what a call leaves to be done later
    counts too.
    """
    for _ in range(repeats.warmup):
        call()
    samples = []
    for _ in range(repeats.count):
        before = process_seconds(pids)
        for _ in range(batch):
            call()
        samples.append((process_seconds(pids) - before) / batch)
    return samples
