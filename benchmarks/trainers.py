"""Training steps of a model: how they are made, checked against one process, and measured.

    In contexts    torch's way, and telegrad's with the same program
    Plainly        as in one process: `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`

A figure measures telegrad in one of the two ways, and torch in contexts, the only way it has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from benchmarks import stages
from benchmarks.backends import TELEGRAD, Backend
from benchmarks.callee import process_id
from benchmarks.cputime import used_by
from benchmarks.figures import Session
from benchmarks.sampling import timed, timed_by_itself
from benchmarks.step_models import Build, Model

LR = 1e-3
EPS = 1e-6  # not smaller: where a gradient is 0 but for rounding, a step would be made of that
CHECKED_STEPS = 4
CPU_BATCH = 10


@dataclass
class Trainer:
    """A step on the same batch, again and again."""

    model: Model
    optimizer: Any
    autograd: Any = None
    """None: plainly."""
    parts: tuple[float, ...] = ()
    """Seconds of the last step: forward, backward, the optimizer with what clears the gradients."""

    def step(self) -> float:
        """Returns the loss."""
        if self.autograd is None:
            return self._plainly()
        with self.autograd.context() as context_id:
            start = perf_counter()
            loss = self.model.loss()
            forward = perf_counter()
            self.autograd.backward(context_id, [loss])
            backward = perf_counter()
            self.optimizer.step(context_id)
            self.parts = (forward - start, backward - forward, perf_counter() - backward)
            return loss.item()

    def _plainly(self) -> float:
        start = perf_counter()
        loss = self.model.loss()
        forward = perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.parts = (forward - start, backward - forward, perf_counter() - backward)
        return loss.item()

    def seconds_of(self, part: int) -> float:
        self.step()
        return self.parts[part]

    def values(self) -> list[torch.Tensor]:
        """The parameters as they are now, wherever they are."""
        own = [parameter.detach().clone() for parameter in self.model.own.parameters()]
        return own + [value.clone() for stage in self.model.stages for value in stage.values()]


def local_trainer(build: Build) -> Trainer:
    model = build(stages.here)
    parameters = [*model.own.parameters(), *(one for stage in model.stages for one in stage.parameters())]
    return Trainer(model, torch.optim.AdamW(parameters, lr=LR, eps=EPS))


def trainer(session: Session, build: Build, *, plain: bool) -> Trainer:
    """Spread over the peers, checked, and trained for a few steps by that."""
    made = _plain(session, build) if plain and session.backend == TELEGRAD else _in_contexts(session, build)
    check(made, local_trainer(build), session.backend)
    return made


def _in_contexts(session: Session, build: Build) -> Trainer:
    backend = session.backend
    model = build(stages.held(backend.rpc, session.peers))
    own = [backend.rpc.RRef(parameter) for parameter in model.own.parameters()]
    handles = own + [handle for stage in model.stages for handle in stage.parameters()]
    return Trainer(
        model, backend.optim.DistributedOptimizer(torch.optim.AdamW, handles, lr=LR, eps=EPS), backend.autograd
    )


def _plain(session: Session, build: Build) -> Trainer:
    model = build(stages.remote(session.peers))
    parameters = [*model.own.parameters(), *(one for stage in model.stages for one in stage.parameters())]
    return Trainer(model, session.backend.optim.DistributedOptimizer(torch.optim.AdamW, parameters, lr=LR, eps=EPS))


def check(found: Trainer, expected: Trainer, backend: Backend) -> None:
    """Losses and parameters after a few steps must be those of one process."""
    before = expected.values()
    losses = [(found.step(), expected.step()) for _ in range(CHECKED_STEPS)]
    ours, theirs = torch.tensor(losses).unbind(1)

    def what(text: str) -> str:
        return f"{backend.name} trained differently from one process: losses {losses}. {text}"

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=what)
    for there, here, at_first in zip(found.values(), expected.values(), before, strict=True):
        if torch.equal(here, at_first):
            raise AssertionError(f"a parameter of shape {tuple(here.shape)} is not trained: it checks nothing")
        torch.testing.assert_close(there, here, rtol=1e-3, atol=LR / 10, msg=what)


# -- what figures measure ----------------------------------------------------------------------------


def time_step(session: Session, *, build: Build, plain: bool) -> list[float]:
    """One sample: forward, backward, the optimizer's step, and what clears the gradients."""
    return timed(trainer(session, build, plain=plain).step, session.repeats)


def time_part(session: Session, *, build: Build, plain: bool, part: int) -> list[float]:
    """One sample: a part of a step; see `Trainer.parts`."""
    made = trainer(session, build, plain=plain)
    return timed_by_itself(lambda: made.seconds_of(part), session.repeats)


def cpu_of_step(session: Session, *, build: Build, plain: bool) -> list[float]:
    """One sample: the processor time that all processes used for one of a batch of steps."""
    return cpu_of_call(session, trainer(session, build, plain=plain).step)


def time_local_step(session: Session, *, build: Build) -> list[float]:
    torch.set_num_threads(1)
    return timed(local_trainer(build).step, session.repeats)


def cpu_of_call(session: Session, call: Any) -> list[float]:
    pids = [os.getpid(), *(session.backend.rpc.rpc_sync(peer, process_id) for peer in session.peers)]
    return used_by(pids, call, session.repeats, batch=2 if session.quick else CPU_BATCH)
