"""Random numbers in the programs of graph_programs.py: where they are drawn, and the generators of the reference.

Workers draw from torch's own generator, after `telegrad.manual_seed()`. In-process workers share it, and draw in the
order of the program; a worker with a process of its own has a stream that follows from the seed and its name. So a
program draws only where that order is fixed: neither in what an async call runs beside others, nor in a call that a
checkpoint makes again. A checkpoint preserves the state of its process: of a program at most one draws, as in-process
workers may run theirs again at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from graph_programs import Call, Checkpoint, Frame, Module, Op, Program, Step, steps_of
from wide_programs import Blend, Layers

from telegrad.cluster.seeding import seed_of

SHARE = 0.4  # of the programs
AFTER = 0.6  # of the steps whose result a Draw can change


@dataclass(frozen=True)
class Draw:
    """Multiplies the value that was made last by random numbers; its name stays."""

    number: int

    def run(self, frame: Frame) -> None:
        x = frame.values[-1]
        frame.values[-1] = x * (0.5 + frame.place.draw(self.number, x)).to(x.device)


def with_random_numbers(program: Program, rng: Random) -> Program:
    """Returns the program, or one that draws random numbers and is the same otherwise."""
    if rng.random() >= SHARE:
        return program
    unsettled = unsettled_bodies(program)
    settled = [body for i, body in enumerate(program.bodies) if i not in unsettled]
    able = [step for body in settled for step in body.steps if isinstance(step, Checkpoint) and not step.calls]
    chosen = rng.choice(able) if able else None
    numbers = itertools.count(1)

    def drawing(steps: Iterable[Step]) -> tuple[Step, ...]:
        made: list[Step] = []
        for step in steps:
            made.append(replace(chosen, steps=drawing(chosen.steps), preserves=True) if step is chosen else step)
            if isinstance(step, (Op, Module, Layers, Blend)) and rng.random() < AFTER:
                made.append(Draw(next(numbers)))
        return tuple(made)

    bodies = (replace(body, steps=drawing(body.steps)) if body in settled else body for body in program.bodies)
    made = replace(program, bodies=tuple(bodies), seed=rng.randrange(1000))
    return made if next(numbers) > 1 else program


def unsettled_bodies(program: Program) -> set[int]:
    """What runs at any time, or again: the bodies of async calls and of those in checkpoints, and what these call."""
    again = [step for outer in steps_of(program) if isinstance(outer, Checkpoint) for step in outer.steps]
    later = [step for step in steps_of(program) if isinstance(step, Call) and step.later]
    found: set[int] = set()
    todo = [*again, *later]
    while todo:
        step = todo.pop()
        if isinstance(step, Checkpoint):
            todo += step.steps
        elif isinstance(step, Call) and step.body not in found:
            found.add(step.body)
            todo += program.bodies[step.body].steps
    return found


def generators(program: Program, names: Sequence[str] = ()) -> list[torch.Generator | None]:
    """What each worker draws from after manual_seed() on the first. `names`: of workers that have a process each."""
    if program.seed is None:
        return [None] * program.workers
    if not names:
        return [torch.Generator().manual_seed(program.seed)] * program.workers
    seeds = [program.seed] + [seed_of(name, program.seed) for name in names[1 : program.workers]]
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def number_traits(program: Program) -> dict[str, bool]:
    """What can be seen of a program without running it."""
    preserving = [step for step in steps_of(program) if isinstance(step, Checkpoint) and step.preserves]
    there = [step for checkpoint in preserving for step in checkpoint.steps]
    drawing = {body.worker for body in program.bodies if any(isinstance(step, Draw) for step in body.steps)}
    return {
        "random numbers": program.seed is not None,
        "random numbers on several workers": len(drawing) > 1,
        "random numbers in a checkpoint": any(isinstance(step, Draw) for step in there),
    }
