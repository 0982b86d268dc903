"""The clock: how a call is timed, and what is said about the samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.figures import Repeats, Samples


def timed(call: Callable[[], Any], repeats: Repeats) -> list[float]:
    """Seconds that each call took. The result is freed outside the timed part, on every backend alike."""
    for _ in range(repeats.warmup):
        call()
    samples = []
    for _ in range(repeats.count):
        start = perf_counter()
        result = call()
        samples.append(perf_counter() - start)
        del result
    return samples


def timed_by_itself(call: Callable[[], float], repeats: Repeats) -> list[float]:
    """For a call that times a part of itself, and returns the seconds."""
    for _ in range(repeats.warmup):
        call()
    return [call() for _ in range(repeats.count)]


def timed_by_size(calls: Mapping[int, Callable[[], float]], repeats: Repeats, at_least: int) -> Samples:
    """For calls that time themselves: `repeats.count` sweeps over the sizes, so that all see the same machine.

    A size below `at_least` has several samples in each sweep, about `at_least` calls (or what is counted) in all.
    """
    samples: Samples = {size: [] for size in calls}
    for sweep in range(-repeats.warmup, repeats.count):
        for size, call in calls.items():
            seconds = [call() for _ in range(max(1, at_least // size))]
            if sweep >= 0:
                samples[size] += seconds
    return samples


@dataclass(frozen=True)
class Spread:
    median: float
    mean: float
    p99: float
    count: int

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        """The 99th percentile is a sample that was seen: with fewer than 100 samples, the largest."""
        ordered = sorted(samples)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(statistics.median(ordered), statistics.fmean(ordered), p99, len(ordered))
