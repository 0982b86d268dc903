"""From records to the table's rows: medians of rounds, ratios, goals met or not."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.figures import Figure
from benchmarks.runner import Results
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
        return {
            number: self.telegrad.rounds[number].median / self.torch.rounds[number].median for number in both
        }

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
    return Side(
        {record.round: Spread.of(record.value) for record in results.of(name, figure.name) if record.value}
    )


def rows(results: Results, figures: tuple[Figure, ...]) -> list[Row]:
    return [
        Row(figure, side(results, "telegrad", figure), side(results, "torch", figure)) for figure in figures
    ]


def show(seconds: float | None, unit: str) -> str:
    """Three digits that count, with the unit."""
    if seconds is None:
        return "–"
    value = seconds * SCALE[unit]
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
