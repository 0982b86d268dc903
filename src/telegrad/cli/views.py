"""The tables of `telegrad top`: figures from two looks at a group, in as many columns as fit the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..primitives.text import clean
from .observer import Look, Report, Seen
from .output import duration, number, size

ANSWERS, SILENT, GONE = "answers", "no answer", "gone"


@dataclass(frozen=True)
class Row:
    """One worker. Rates are None until it was seen twice; all figures are where it does not answer."""

    name: str
    id: int
    rank: int | None
    state: str
    problem: str = ""
    pid: int | None = None
    calls_per_second: float | None = None
    bytes_in_per_second: float | None = None
    bytes_out_per_second: float | None = None
    latency_median: float | None = None
    latency_p99: float | None = None
    latency_calls: int = 0
    round_trip: float | None = None
    calls_served: int | None = None
    calls_being_served: int | None = None
    calls_pending: int | None = None
    contexts: int | None = None
    passes: int | None = None
    pool_bytes: int | None = None
    pool_bytes_free: int | None = None
    bytes_in_flight: int | None = None
    threads: int | None = None


def rows(now: Look, before: Look | None) -> list[Row]:
    earlier = {seen.member.id: seen.report for seen in before.workers} if before is not None else {}
    return [_row(seen, earlier.get(seen.member.id)) for seen in now.workers]


def _row(seen: Seen, before: Report | None) -> Row:
    member, report = seen.member, seen.report
    rank = member.rank if member.rank >= 0 else None
    if report is None:
        return Row(member.name, member.id, rank, GONE if seen.lost else SILENT, seen.problem)
    figures, latency = report.statistics, report.latency
    connections = figures.connections.values()
    calls, came, went = _rates(report, before)
    same = ("calls_served", "calls_being_served", "calls_pending", "contexts", "passes", "threads")
    return Row(
        member.name, member.id, rank, ANSWERS, pid=report.pid,
        calls_per_second=calls, bytes_in_per_second=came, bytes_out_per_second=went,
        latency_median=latency.median if latency else None, latency_p99=latency.p99 if latency else None,
        latency_calls=latency.calls if latency else 0,
        round_trip=seen.round_trip,
        pool_bytes=sum(c.shared_bytes for c in connections),
        pool_bytes_free=sum(c.shared_bytes_free for c in connections),
        bytes_in_flight=sum(figures.bytes_in_flight.values()),
        **{name: getattr(figures, name) for name in same},
    )  # fmt: skip


def _rates(now: Report, before: Report | None) -> list[float | None]:
    """Calls served, bytes in and bytes out, per second."""
    if before is None or now.at <= before.at:
        return [None] * 3
    # A connection that has ended takes its count with it; a rate is not negative for that.
    pairs = zip(_totals(now), _totals(before), strict=True)
    return [max(0.0, (new - old) / (now.at - before.at)) for new, old in pairs]


def _totals(report: Report) -> tuple[int, int, int]:
    connections = report.statistics.connections.values()
    came, went = sum(c.bytes_in for c in connections), sum(c.bytes_out for c in connections)
    return report.statistics.calls_served, came, went


# -- the table -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    title: str
    cell: Callable[[Row], str]
    rank: int  # the highest are dropped first where there is no room


def _count(value: int | None, separator: str = ",") -> str:
    return "-" if value is None else f"{value:{separator}}"


COLUMNS = (
    Column("worker", lambda row: clean(row.name), 0),
    Column("calls/s", lambda row: number(row.calls_per_second), 1),
    Column("in/s", lambda row: size(row.bytes_in_per_second), 2),
    Column("out/s", lambda row: size(row.bytes_out_per_second), 3),
    Column("served in", lambda row: duration(row.latency_median), 4),
    Column("p99", lambda row: duration(row.latency_p99), 8),
    Column("answers in", lambda row: duration(row.round_trip), 10),
    Column("serves", lambda row: _count(row.calls_being_served), 9),
    Column("waits for", lambda row: _count(row.calls_pending), 11),
    Column("contexts", lambda row: _count(row.contexts), 7),
    Column("passes", lambda row: _count(row.passes), 6),
    Column("pool", lambda row: size(row.pool_bytes), 5),
    Column("threads", lambda row: _count(row.threads), 12),
    Column("pid", lambda row: _count(row.pid, ""), 13),
)
_GAP = 2  # between columns: one blank of padding, and one that the box has


def fitting(rows: list[Row], width: int) -> list[tuple[Column, list[str]]]:
    """Returns the columns that there is room for, with their cells. The first always is, with names cut to a third."""
    chosen = [(column, [column.cell(row) for row in rows]) for column in COLUMNS]
    longest = max(10, width // 3)
    names = [name if len(name) <= longest else f"{name[: longest - 1]}…" for name in chosen[0][1]]
    chosen[0] = COLUMNS[0], names

    def total() -> int:
        return sum(max(map(len, (c.title, *cells))) + _GAP for c, cells in chosen) - _GAP

    while len(chosen) > 1 and total() > width:
        chosen.remove(max(chosen, key=lambda pair: pair[0].rank))
    return chosen


def table(rows: list[Row], width: int) -> Table:
    chosen = fitting(rows, width)
    padding = (0, _GAP - 1, 0, 0)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, collapse_padding=True)
    for column, _ in chosen:
        justify = "right" if column.rank else "left"
        made.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for at, row in enumerate(rows):
        cells = [cells[at] for _, cells in chosen]
        if row.state != ANSWERS:
            cells = [cells[0], row.state, *[""] * len(cells)][: len(cells)]
        made.add_row(*map(Text, cells), style={GONE: "red", SILENT: "yellow"}.get(row.state))
    return made


@dataclass
class View:
    """The whole screen. Made anew each time that it is drawn, so it follows the terminal's size."""

    address: str
    world_size: int | None
    rows: list[Row]
    note: str = "q: quit"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(clean(f"telegrad top {self.address}"), style="bold", overflow="ellipsis", no_wrap=True)
        yield Text("\n".join([*summary(self.rows, self.world_size), ""]), overflow="fold")
        room = max(1, options.size.height - 8)
        yield table(self.rows[:room], options.max_width)
        if len(self.rows) > room:
            yield Text(f"and {len(self.rows) - room} more that do not fit here", style="dim")
        for row in self.rows[:room]:
            if row.state == SILENT:
                yield Text(clean(f"{row.name}: {row.problem}"), style="yellow", overflow="ellipsis", no_wrap=True)
        yield Text(self.note, style="dim", overflow="ellipsis", no_wrap=True)


def summary(rows: list[Row], world_size: int | None) -> list[str]:
    here = [row for row in rows if row.state == ANSWERS]
    kind = "an open group" if world_size is None else f"a group of {world_size}"
    calls = sum(row.calls_per_second or 0 for row in here)
    came = sum(row.bytes_in_per_second or 0 for row in here)
    pool = sum(row.pool_bytes or 0 for row in here)
    return [
        f"{len(here)} of {len(rows)} workers answer, {kind}",
        f"{number(calls)} calls/s, {size(came)}/s, {size(pool)} shared",
    ]
