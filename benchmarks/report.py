"""What a run says: the table on the terminal, the Markdown file and the plot in results/."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import growth_plot, growth_report, plot
from benchmarks.figures import Figure, Suite
from benchmarks.machine import Load, Machine, commit_here
from benchmarks.runner import FLOOR, Plan, Results
from benchmarks.summary import Row, Side, growth_rows, rows, show, side
from benchmarks.tables import Grid

LOAD_REMARK = (
    "Cores busy: during one second in which the benchmark itself did nothing. The averages also count the "
    "benchmark's own work, from the second round on."
)


@dataclass(frozen=True)
class Pictures:
    """The names of the files that were drawn."""

    bars: str | None
    curves: str | None


def print_report(suite: Suite, results: Results, machine: Machine) -> None:
    if suite.figures:
        ratios(rows(results, suite.figures)).print(suite.title)
    if growth := growth_rows(results, suite.growths):
        growth_report.print_growth(growth)
    if suite.floors:
        floors(results, suite.floors).print("Floors")
    for title, text in section_texts(suite, results):
        print(f"{title}\n\n{text}\n")
    print(f"{machine}\nload average: {results.loads[0]} before, {results.loads[-1]} after")
    for failure in results.failures:
        print(f"FAILED round {failure.round}, {failure.side}, {failure.task}: {failure.error}")


def write_report(
    suite: Suite, plan: Plan, results: Results, machine: Machine, *, directory: Path, partial: bool
) -> list[Path]:
    """The results file and its plots; a partial run gets a name of its own, so that it replaces no full one."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    stem = f"{suite.name}{_manner(plan)}{'-partial' if partial else ''}_{machine.slug}_{date}"
    directory.mkdir(parents=True, exist_ok=True)
    table, bars, curves = (directory / f"{stem}{end}" for end in (".md", ".png", "_growth.png"))
    title = "\n".join([suite.title, str(machine), *conditions(plan)])
    drawn = plot.draw(suite, results, title, bars)
    grown = growth_plot.draw(growth_rows(results, suite.growths), title, curves)
    pictures = Pictures(bars.name if drawn else None, curves.name if grown else None)
    table.write_text(_document(suite, plan, results, machine, date, pictures), encoding="utf-8")
    return [table, *([bars] if drawn else []), *([curves] if grown else [])]


def _manner(plan: Plan) -> str:
    """For the file's name: what is not as usual."""
    loops = f"-beside-{plan.busy}-busy-loop{'s' if plan.busy > 1 else ''}"
    return f"{'-pinned' if plan.pinned else ''}{loops if plan.busy else ''}"


def conditions(plan: Plan) -> list[str]:
    """What is not as usual, in sentences."""
    said = []
    if plan.pinned:
        said.append("Each worker pinned to one core (that of its rank, modulo the cores); single processes are free.")
    if plan.busy:
        loops = "one busy loop" if plan.busy == 1 else f"{plan.busy} busy loops"
        said.append(f"With {loops} beside the whole run, on all cores; the load below counts them.")
    return said


def _document(suite: Suite, plan: Plan, results: Results, machine: Machine, date: str, pictures: Pictures) -> str:
    table = rows(results, suite.figures)
    growth = growth_rows(results, suite.growths)
    quick = " **A quick run, with few samples and few workers: not to be quoted.**" if plan.quick else ""
    of = f" Commit {commit}." if (commit := commit_here()) else ""
    parts = [
        f"# {suite.title}",
        *conditions(plan),
        f"{date}. {machine}.{of} {plan.rounds} rounds, backends alternating.{quick}",
    ]
    if table:
        parts += [ratios(table).markdown(), "\n".join(f"- {remark}" for remark in suite.remarks)]
    if pictures.bars:
        parts.append(f"![times, on a logarithmic axis]({pictures.bars})")
    if growth:
        parts += growth_report.sections(growth, picture=pictures.curves)
    if suite.floors:
        parts += ["## Floors", floors(results, suite.floors).markdown()]
    if table:
        parts += ["## Each round", "Median / mean / p99.", each_round(table, plan.rounds).markdown()]
    parts += ["## Load", LOAD_REMARK, load_averages(results.loads).markdown()]
    for title, text in section_texts(suite, results):
        parts += [f"## {title}", text]
    if results.failures:
        lines = [f"- round {one.round}, {one.side}, {one.task}: {one.error}" for one in results.failures]
        parts += ["## Failures", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def ratios(table: list[Row]) -> Grid:
    header = ("figure", "telegrad", "p99", "torch", "p99", "ratio", "each round", "goal", "met")
    return Grid(header, [_ratio_row(row) for row in table])


def _ratio_row(row: Row) -> tuple[str, ...]:
    unit, goal = row.figure.unit, row.figure.goal
    return (
        row.figure.title,
        show(row.telegrad.median, unit),
        show(row.telegrad.p99, unit),
        show(row.torch.median, unit),
        show(row.torch.p99, unit),
        "–" if row.ratio is None else f"{row.ratio:.3f}",
        " ".join(f"{ratio:.2f}" for ratio in row.ratios.values()) or "–",
        "–" if goal is None else f"{goal:.2f}",
        {True: "yes", False: "no", None: "–"}[row.met],
    )


def floors(results: Results, figures: tuple[Figure, ...]) -> Grid:
    sides = [(figure, side(results, FLOOR, figure)) for figure in figures]
    cells = [(figure.title, show(one.median, figure.unit), show(one.p99, figure.unit)) for figure, one in sides]
    return Grid(("floor", "median", "p99"), cells)


def each_round(table: list[Row], rounds: int) -> Grid:
    header = ("figure", "side", "samples", *(f"round {number}" for number in range(1, rounds + 1)))
    cells = []
    for row in table:
        for name, one in (("telegrad", row.telegrad), ("torch", row.torch)):
            if one.rounds:
                cells.append((row.figure.title, name, _samples(one), *_round_cells(row.figure, one, rounds)))
    return Grid(header, cells)


def _samples(one: Side) -> str:
    return str(next(iter(one.rounds.values())).count)


def _round_cells(figure: Figure, one: Side, rounds: int) -> list[str]:
    spreads = [one.rounds.get(number) for number in range(1, rounds + 1)]
    return [
        "failed"
        if spread is None
        else " / ".join(show(value, figure.unit) for value in (spread.median, spread.mean, spread.p99))
        for spread in spreads
    ]


def load_averages(loads: tuple[Load, ...]) -> Grid:
    names = [*(f"before round {number}" for number in range(1, len(loads))), "at the end"]
    cells = [
        (name, *(f"{value:.2f}" for value in (*load.averages, load.busy)))
        for name, load in zip(names, loads, strict=True)
    ]
    return Grid(("load average", "1 min", "5 min", "15 min", "cores busy"), cells)


def section_texts(suite: Suite, results: Results) -> list[tuple[str, str]]:
    """The title and Markdown of each section that was measured."""
    values = {record.task: record.value for record in results.records if record.error is None}
    return [
        (section.title, section.render(values[section.name])) for section in suite.sections if section.name in values
    ]
