"""What the report says about growth: how cost rises with size, slopes beside one process, and each size."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.summary import Curve, GrowthRow, Side, Slope, per_one, show
from benchmarks.tables import Grid

GROWTH_REMARK = (
    "The time per call (or per worker) at the largest size, as a multiple of that at a smaller one, at which what "
    "a pass costs however small it is no longer counts for much. 1 is linear."
)

SLOPE_REMARK = (
    "What one more costs: the time at the largest size less that at the smallest, by the sizes between them. Beyond: "
    "less the slope of the same in one process, measured in the same round."
)

YES_NO = {True: "yes", False: "no", None: "–"}


def print_growth(table: Sequence[GrowthRow]) -> None:
    rises(table).print("How cost grows")
    if steep := with_local(table):
        slopes(steep).print("Slopes")


def sections(table: Sequence[GrowthRow], *, picture: str | None) -> list[str]:
    """The paragraphs of the results file."""
    parts = ["## How cost grows", GROWTH_REMARK, rises(table).markdown()]
    if steep := with_local(table):
        parts += ["### Slopes", SLOPE_REMARK, slopes(steep).markdown()]
    if picture:
        parts.append(f"![time against size, on logarithmic axes]({picture})")
    for row in table:
        parts += [f"### {row.growth.title}", *filter(None, [row.growth.remark]), sizes(row).markdown()]
    return parts


def with_local(table: Sequence[GrowthRow]) -> list[GrowthRow]:
    return [row for row in table if row.growth.local is not None]


def rises(table: Sequence[GrowthRow]) -> Grid:
    header = ("growth", "from", "to", "telegrad", "each round", "torch", "each round", "goal", "met")
    return Grid(header, [_rise_row(row) for row in table])


def _rise_row(row: GrowthRow) -> tuple[str, ...]:
    goal = row.growth.goal
    cells = [row.growth.title, str(row.growth.base), f"{row.largest} {row.growth.of}"]
    for curve in (row.telegrad, row.torch):
        rise = row.rise(curve)
        cells.append("–" if rise is None else f"{rise:.2f}")
        cells.append(" ".join(f"{one:.2f}" for one in row.rises(curve)) or "–")
    return (*cells, "–" if goal is None else f"{goal:.2f}", YES_NO[row.met])


def slopes(table: Sequence[GrowthRow]) -> Grid:
    header = (
        "slope",
        "telegrad",
        "beyond",
        "each round",
        "torch",
        "beyond",
        "each round",
        "one process",
        "goal",
        "met",
    )
    return Grid(header, [_slope_row(row) for row in table])


def _slope_row(row: GrowthRow) -> tuple[str, ...]:
    goal, local = row.growth.slope_goal, Slope.of(row.local)
    cells = [f"{row.growth.title}, of {row.growth.of}"]
    for curve in (row.telegrad, row.torch):
        slope = Slope.of(curve)
        beyond = slope.beyond(local)
        cells += [show(slope.median, "µs"), show(beyond.median, "µs")]
        cells.append(" ".join(f"{seconds * 1e6:.2f}" for seconds in beyond.rounds.values()) or "–")
    found = Slope.of(row.telegrad).beyond(local).median
    met = None if goal is None or found is None else found <= goal
    return (*cells, show(local.median, "µs"), show(goal, "µs"), YES_NO[met])


def sizes(row: GrowthRow) -> Grid:
    """Columns for one process and for goals stand only where the growth has them."""
    header = [row.growth.of, "telegrad", "p99", "each", "torch", "p99", "each"]
    header += ["one process", "each"] if row.growth.local else []
    header += ["ratio", "each round", "goal", "met"] if row.growth.goals else ["ratio"]
    known = sorted(row.telegrad.keys() | row.torch.keys())
    return Grid(tuple(header), [_size_row(row, size) for size in known])


def _size_row(row: GrowthRow, size: int) -> tuple[str, ...]:
    cells = [str(size)]
    for curve in (row.telegrad, row.torch):
        one = curve.get(size, Side({}))
        cells += [show(one.median, row.growth.unit), show(one.p99, row.growth.unit)]
        cells.append(show(per_one(curve, size), "µs"))
    if row.growth.local:
        cells += [show(row.local.get(size, Side({})).median, row.growth.unit), show(per_one(row.local, size), "µs")]
    telegrad, torch = per_one(row.telegrad, size), per_one(row.torch, size)
    ratio = None if telegrad is None or torch is None else telegrad / torch
    cells.append("–" if ratio is None else f"{ratio:.3f}")
    if row.growth.goals:
        cells += _goal_cells(row, size, ratio)
    return tuple(cells)


def _goal_cells(row: GrowthRow, size: int, ratio: float | None) -> list[str]:
    goal = row.growth.goals.get(size)
    met = None if goal is None or ratio is None else ratio <= goal
    return [_ratio_of_rounds(row.telegrad, row.torch, size), "–" if goal is None else f"{goal:.2f}", YES_NO[met]]


def _ratio_of_rounds(telegrad: Curve, torch: Curve, size: int) -> str:
    ours, theirs = (curve.get(size, Side({})).rounds for curve in (telegrad, torch))
    both = sorted(ours.keys() & theirs.keys())
    return " ".join(f"{ours[number].median / theirs[number].median:.2f}" for number in both) or "–"
