"""The rounds. A suite and a plan go in, records come out: one for each task that ran, with the round it was in.

Within a round each setting is run by each backend in turn, so that the two are minutes apart at most; every
second round begins with the other one, so that neither is always first. The floors close each round, and what
growths take in one process. The sections are measured once, at the end, with the first backend of the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.backends import Backend
from benchmarks.figures import ALONE, Setting, Suite, Task
from benchmarks.machine import Load
from benchmarks.processes import Job, run

FLOOR = "floor"


@dataclass(frozen=True)
class Plan:
    backends: tuple[Backend, ...]
    rounds: int = 3
    quick: bool = False
    limit_s: float = 300.0
    """For one backend in one setting of one round."""
    pinned: bool = False
    """What the results file says: the settings of the suite are pinned already."""
    busy: int = 0
    """Busy loops beside the whole run; who starts the run starts them (busy.py)."""


@dataclass(frozen=True)
class Record:
    round: int
    side: str
    """The backend's name, or FLOOR."""
    task: str
    value: Any
    error: str | None


@dataclass(frozen=True)
class Results:
    records: tuple[Record, ...]
    loads: tuple[Load, ...]
    """At the start of each round, then at the end of the run."""

    def of(self, side: str, task: str) -> list[Record]:
        return [record for record in self.records if (record.side, record.task) == (side, task)]

    @property
    def failures(self) -> list[Record]:
        return [record for record in self.records if record.error is not None]


def run_suite(suite: Suite, plan: Plan) -> Results:
    records: list[Record] = []
    loads: list[Load] = []
    for number in range(1, plan.rounds + 1):
        loads.append(Load.now())
        records += _round(number, suite, plan)
    for setting, sections in _by_setting(suite.sections):
        records += _job(plan.rounds, plan.backends[0].name, Job(plan.backends[0], setting, sections, plan.quick), plan)
    return Results(tuple(records), (*loads, Load.now()))


def _round(number: int, suite: Suite, plan: Plan) -> Iterator[Record]:
    in_turn = plan.backends if number % 2 else plan.backends[::-1]
    for setting, tasks in _by_setting((*suite.figures, *suite.growths)):
        for backend in in_turn:
            yield from _job(number, backend.name, Job(backend, setting, tasks, plan.quick), plan)
    floors = (*suite.floors, *(growth.floor for growth in suite.growths if growth.floor))
    if floors:
        yield from _job(number, FLOOR, Job(plan.backends[0], ALONE, floors, plan.quick), plan)


def _job(number: int, side: str, job: Job, plan: Plan) -> Iterator[Record]:
    names = ", ".join(task.name for task in job.tasks)
    print(f"round {number}/{plan.rounds}  {side}  {job.setting}: {names}", file=sys.stderr, flush=True)
    for outcome in run(job, plan.limit_s):
        yield Record(number, side, outcome.task, outcome.value, outcome.error)


def _by_setting(tasks: Sequence[Task]) -> list[tuple[Setting, tuple[Task, ...]]]:
    settings = dict.fromkeys(task.setting for task in tasks)
    return [(setting, tuple(task for task in tasks if task.setting == setting)) for setting in settings]
