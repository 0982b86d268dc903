"""From records to the table's rows: medians of rounds, ratios, goals met or not."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.figures import Figure, Growth
from benchmarks.runner import FLOOR, Results
from benchmarks.sampling import Spread

SCALE = {"s": 1.0, "ms": 1e3, "µs": 1e6}


@dataclass(frozen=True)
class Side:
    """One backend (or a floor) in one figure: a spread for each round that worked."""

    rounds: dict[int, Spread]

    @property
    def median(self) -> float | None:
        """The median of the rounds' medians."""
        return statistics.median(spread.median for spread in self.rounds.values()) if self.rounds else None

    @property
    def p99(self) -> float | None:
        """The median of the rounds' 99th percentiles."""
        return statistics.median(spread.p99 for spread in self.rounds.values()) if self.rounds else None


@dataclass(frozen=True)
class Row:
    figure: Figure
    telegrad: Side
    torch: Side

    @property
    def ratios(self) -> dict[int, float]:
        """telegrad's median / torch's, for each round in which both worked."""
        both = sorted(self.telegrad.rounds.keys() & self.torch.rounds.keys())
        return {number: self.telegrad.rounds[number].median / self.torch.rounds[number].median for number in both}

    @property
    def ratio(self) -> float | None:
        if self.telegrad.median is None or self.torch.median is None:
            return None
        return self.telegrad.median / self.torch.median

    @property
    def met(self) -> bool | None:
        """None where there is no goal, or nothing to hold against it."""
        if self.figure.goal is None or self.ratio is None:
            return None
        return self.ratio <= self.figure.goal


def side(results: Results, name: str, figure: Figure) -> Side:
    return Side({record.round: Spread.of(record.value) for record in results.of(name, figure.name) if record.value})


def rows(results: Results, figures: tuple[Figure, ...]) -> list[Row]:
    return [Row(figure, side(results, "telegrad", figure), side(results, "torch", figure)) for figure in figures]


Curve = dict[int, Side]
"""Size -> one backend at that size; the sizes in order."""


@dataclass(frozen=True)
class GrowthRow:
    growth: Growth
    telegrad: Curve
    torch: Curve
    local: Curve

    @property
    def largest(self) -> int:
        return max((*self.telegrad, *self.torch))

    @property
    def met(self) -> bool | None:
        """None where there is no goal, or nothing to hold against it."""
        found = self.rise(self.telegrad)
        if self.growth.goal is None or found is None:
            return None
        return found <= self.growth.goal

    def rise(self, curve: Curve) -> float | None:
        """The time per call (say) at the largest size, as a multiple of that at the base: 1 is linear."""
        large, small = per_one(curve, self.largest), per_one(curve, self.growth.base)
        if large is None or small is None or self.largest <= self.growth.base:
            return None
        return large / small

    def rises(self, curve: Curve) -> list[float]:
        """The same for each round."""
        if self.rise(curve) is None:
            return []
        large, small = curve[self.largest].rounds, curve[self.growth.base].rounds
        scale = self.growth.base / self.largest
        return [large[number].median / small[number].median * scale for number in sorted(large)]


@dataclass(frozen=True)
class Slope:
    """What one more costs, in seconds, by round: from the smallest size to the largest."""

    rounds: dict[int, float]

    @classmethod
    def of(cls, curve: Curve) -> Slope:
        if len(curve) < 2:
            return cls({})
        small, large = min(curve), max(curve)
        first, last = curve[small].rounds, curve[large].rounds
        return cls({number: (last[number].median - first[number].median) / (large - small) for number in sorted(last)})

    def beyond(self, other: Slope) -> Slope:
        """Less the other's, for each round that both have."""
        both = sorted(self.rounds.keys() & other.rounds.keys())
        return Slope({number: self.rounds[number] - other.rounds[number] for number in both})

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds.values()) if self.rounds else None


def per_one(curve: Curve, size: int) -> float | None:
    median = curve[size].median if size in curve else None
    return None if median is None else median / size


def growth_rows(results: Results, growths: tuple[Growth, ...]) -> list[GrowthRow]:
    """Those that were measured, on one side at least."""
    sides = ("telegrad", "torch", FLOOR)
    found = [GrowthRow(growth, *(_curve(results, name, growth) for name in sides)) for growth in growths]
    return [row for row in found if row.telegrad or row.torch]


def _curve(results: Results, name: str, growth: Growth) -> Curve:
    rounds = {record.round: record.value for record in results.of(name, growth.name) if record.value}
    sizes = sorted({size for samples in rounds.values() for size in samples})
    return {size: Side({number: Spread.of(samples[size]) for number, samples in rounds.items()}) for size in sizes}


def show(seconds: float | None, unit: str) -> str:
    """Three digits that count, with the unit."""
    if seconds is None:
        return "–"
    value = seconds * SCALE[unit]
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f} {unit}"
