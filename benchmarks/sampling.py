"""The clock: how a call is timed, and what is said about the samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.figures import Repeats


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
