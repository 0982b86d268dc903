"""The optimizer's step alone, with gradients that are there already: many owners, and one of many tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.backends import TELEGRAD
from benchmarks.figures import ALONE, PAIR, Figure, Repeats, Session, Setting
from benchmarks.models import make_parameters, total
from benchmarks.passes import WAYS
from benchmarks.sampling import timed
from benchmarks.trainers import cpu_of_call

SIZE = 64  # elements of each
LR = 1e-4  # small: some hundred steps with the same gradient leave the numbers ordinary

Measure = Callable[[Session, Callable[[], Any]], list[float]]


def time_optimizer(session: Session, *, tensors: int, plain: bool) -> list[float]:
    """One sample: a step."""
    return _measure(session, tensors, plain, lambda session, step: timed(step, session.repeats))


def cpu_of_optimizer(session: Session, *, tensors: int, plain: bool) -> list[float]:
    """One sample: the processor time that all processes used for a step."""
    return _measure(session, tensors, plain, cpu_of_call)


def time_local_optimizer(session: Session, *, tensors: int) -> list[float]:
    """One sample: a step over as many tensors as all owners have."""
    torch.set_num_threads(1)
    parameters = [torch.linspace(0.5, 1.5, SIZE).mul_(n + 1).requires_grad_() for n in range(tensors)]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    torch.stack([parameter.square().sum() for parameter in parameters]).sum().backward()  # type: ignore[no-untyped-call]
    return timed(optimizer.step, session.repeats)


def _measure(session: Session, tensors: int, plain: bool, measure: Measure) -> list[float]:
    """Steps of an optimizer over all peers, each with so many tensors."""
    backend = session.backend
    rpc, autograd = backend.rpc, backend.autograd
    owned = [rpc.remote(peer, make_parameters, args=(tensors, SIZE)).to_here() for peer in session.peers]
    handles = [handle for handles in owned for handle in handles]
    optimizer = backend.optim.DistributedOptimizer(torch.optim.SGD, handles, lr=LR)

    def loss() -> Tensor:
        """Of which the gradient is twice the parameter."""
        futures = [rpc.rpc_async(peer, total, args=(its,)) for peer, its in zip(session.peers, owned, strict=True)]
        return torch.stack([future.wait() for future in futures]).sum()

    if plain and backend == TELEGRAD:
        loss().backward()  # type: ignore[no-untyped-call]
        return _checked(handles, optimizer.step, session, measure)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss()])
        return _checked(handles, partial(optimizer.step, context_id), session, measure)


def _checked(handles: list[Any], step: Callable[[], Any], session: Session, measure: Measure) -> list[float]:
    """The first step must have moved the first and last parameters of all by the gradient."""
    ends = (handles[0], handles[-1])
    before = [handle.to_here().detach().clone() for handle in ends]
    step()
    for handle, value in zip(ends, before, strict=True):
        torch.testing.assert_close(handle.to_here().detach(), value - 2 * LR * value)
    return measure(session, step)


# -- the figures -------------------------------------------------------------------------------------


def _optimizer(owners: int, tensors: int, setting: Setting, goal: float) -> tuple[Figure, ...]:
    name, title = f"optimizer-{owners}x{tensors}", f"optimizer step, {owners} x {tensors} tensors"
    found = []
    for end, way, plain in WAYS:
        found.append(
            Figure(
                name=name + end,
                title=f"{title}: {way}",
                measure=partial(time_optimizer, tensors=tensors, plain=plain),
                repeats=Repeats(count=200, warmup=20),
                goal=goal,
                setting=setting,
                floors=(f"local-{name}",),
            )
        )
        found.append(
            Figure(
                name=f"{name}{end}-cpu",
                title=f"{title}: {way}, CPU of all",
                measure=partial(cpu_of_optimizer, tensors=tensors, plain=plain),
                repeats=Repeats(count=20, warmup=20),
                setting=setting,
            )
        )
    return tuple(found)


def _local_optimizer(owners: int, tensors: int) -> Figure:
    return Figure(
        name=f"local-optimizer-{owners}x{tensors}",
        title=f"one process, optimizer step over {owners * tensors} tensors",
        measure=partial(time_local_optimizer, tensors=owners * tensors),
        repeats=Repeats(count=200, warmup=20),
        setting=ALONE,
    )


FIGURES = (*_optimizer(4, 25, Setting(workers=5), goal=0.5), *_optimizer(1, 400, PAIR, goal=0.75))
FLOORS = (_local_optimizer(4, 25), _local_optimizer(1, 400))
