"""What a suite is made of. Data only: it is pickled into the processes that do the measuring.

A `Task` is one thing to measure. A `Figure` gives samples and is compared between backends; a floor is a figure
in which no backend takes part. A `Growth` gives samples for each of several sizes. A `Section` is measured once
and gives a piece of the results file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.backends import Backend


@dataclass(frozen=True)
class Setting:
    """The processes a task needs. They are started afresh for each round of each backend."""

    workers: int = 2
    """Workers that have joined a group when the task starts; it runs in the first. 0: one process, no group."""
    transport: str | None = None
    """None for the backend's own choice, "tcp", "tcp, tensors too" (see Note [torch over TCP]); or "gpu": its own
    choice, with the first GPU of one worker mapped to the first of the other."""

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.transport or 'default'} transport" if self.workers else "one process"


PAIR = Setting()
PAIR_OVER_TCP = Setting(transport="tcp")
PAIR_ALL_OVER_TCP = Setting(transport="tcp, tensors too")
PAIR_ON_GPU = Setting(transport="gpu")
ALONE = Setting(workers=0)


@dataclass(frozen=True)
class Repeats:
    """How many samples to take, after how many calls that are not counted."""

    count: int
    warmup: int

    def fewer(self) -> Repeats:
        """A fortieth (three at least), for a smoke test."""
        count = max(min(self.count, 3), self.count // 40)
        return replace(self, count=count, warmup=min(self.warmup, count))


@dataclass(frozen=True)
class Session:
    """What a task is given: the backend that runs here and the names of the other workers."""

    backend: Backend
    peers: tuple[str, ...]
    repeats: Repeats
    quick: bool

    @property
    def peer(self) -> str:
        return self.peers[0]


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    """What `--only` takes."""
    title: str
    measure: Callable[[Session], Any]
    repeats: Repeats
    setting: Setting = PAIR


@dataclass(frozen=True, kw_only=True)
class Figure(Task):
    """`measure` returns seconds, one for each sample."""

    unit: str = "µs"
    """The unit it is shown in: s, ms or µs."""
    goal: float | None = None
    """telegrad's median is to be at most this part of torch's."""
    floors: tuple[str, ...] = ()
    """Names of the floors that belong beside this figure."""


Samples = dict[int, list[float]]
"""Size -> seconds, one for each sample."""


@dataclass(frozen=True, kw_only=True)
class Growth(Task):
    """`measure` returns `Samples`. The two sides need not have the same sizes."""

    of: str
    """What is counted: "calls"."""
    base: int
    """Beside the largest size, the one whose time per call (say) is compared with the largest's."""
    unit: str = "ms"
    goal: float | None = None
    """telegrad's time per call (say) at the largest size is to be at most this multiple of that at `base`."""
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Section(Task):
    """`measure` returns anything that can be pickled; `render` makes Markdown of it."""

    render: Callable[[Any], str]


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    """The first word of the results file's name."""
    title: str
    figures: tuple[Figure, ...]
    floors: tuple[Figure, ...] = ()
    growths: tuple[Growth, ...] = ()
    sections: tuple[Section, ...] = ()
    remarks: tuple[str, ...] = ()
    """What a reader of the table must know."""

    @property
    def names(self) -> frozenset[str]:
        """What `--only` can choose from."""
        return frozenset(task.name for task in (*self.figures, *self.growths, *self.sections))

    def only(self, names: frozenset[str]) -> Suite:
        """The part of the suite with these figures, growths and sections, and the floors that belong to them.

        Names that are not in the suite are passed over.
        """
        figures = tuple(figure for figure in self.figures if figure.name in names)
        wanted = {name for figure in figures for name in figure.floors}
        return replace(
            self,
            figures=figures,
            floors=tuple(floor for floor in self.floors if floor.name in wanted),
            growths=tuple(growth for growth in self.growths if growth.name in names),
            sections=tuple(section for section in self.sections if section.name in names),
        )
