"""What a suite is made of. Data only: it is pickled into the processes that do the measuring.

A `Task` is one thing to measure. A `Figure` gives samples and is compared between backends; a floor is a figure
in which no backend takes part. A `Growth` gives samples for each of several sizes, and may say what the same takes in
one process. A `Section` is measured once and gives a piece of the results file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from benchmarks.backends import Backend


@dataclass(frozen=True)
class Setting:
    """The processes a task needs. They are started afresh for each round of each backend."""

    workers: int = 2
    """Workers that have joined a group when the task starts; it runs in the first. 0: one process, no group."""
    transport: str | None = None
    """None for the backend's own choice, "tcp", "tcp, tensors too" (see Note [torch over TCP]); or "gpu": its own
    choice, with the first GPU of one worker mapped to the first of the other."""
    pinned: bool = False
    """Each process runs on one core: that of its rank, modulo the cores. Free: where the scheduler puts it."""

    def __str__(self) -> str:
        if not self.workers:
            return "one process"
        return f"{self.workers} workers, {self.transport or 'default'} transport{', pinned' if self.pinned else ''}"


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
    """`measure` returns `Samples`. The two sides need not have the same sizes.

    With `local`, the report also has slopes: seconds for each one more, and how much of that is beyond `local`'s.
    """

    of: str
    """What is counted: "calls"."""
    base: int
    """Beside the largest size, the one whose time per call (say) is compared with the largest's."""
    unit: str = "ms"
    goal: float | None = None
    """telegrad's time per call (say) at the largest size is to be at most this multiple of that at `base`."""
    local: Callable[[Session], Samples] | None = None
    """The same in one process without workers; runs once in each round, in a process of its own."""
    goals: Mapping[int, float] = field(default_factory=dict)
    """Size -> telegrad's median is to be at most this part of torch's."""
    slope_goal: float | None = None
    """telegrad's slope beyond `local`'s is to be at most so many seconds."""
    remark: str = ""

    @property
    def floor(self) -> Task | None:
        """What `local` is measured by."""
        if self.local is None:
            return None
        return Task(name=self.name, title=self.title, measure=self.local, repeats=self.repeats, setting=ALONE)


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

    def pinned(self) -> Suite:
        """The suite with each worker on a core of its own.

        What runs alone stays free: some of it starts processes, which would all share its core.
        """
        return replace(
            self,
            figures=tuple(_pinned(figure) for figure in self.figures),
            growths=tuple(_pinned(growth) for growth in self.growths),
            sections=tuple(_pinned(section) for section in self.sections),
        )


SomeTask = TypeVar("SomeTask", bound=Task)


def _pinned(task: SomeTask) -> SomeTask:
    return replace(task, setting=replace(task.setting, pinned=True)) if task.setting.workers else task
