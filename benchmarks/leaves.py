"""How backward grows with the leaves of a remote function: the slope beyond that of one process is what distribution
costs for a leaf more.

    x -> tanh(x * leaf) -> ...     each leaf has a gradient of its own, which may be kept as it is, as a weight's is
    x -> x + leaf -> ...           all leaves get one and the same tensor, which must be copied for each
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.backends import backend_here
from benchmarks.figures import Growth, Repeats, Samples, Session
from benchmarks.passes import WAYS, one_pass
from benchmarks.programs import loss_of
from benchmarks.sampling import timed_by_size

SIZE = 64  # elements of each
COUNTS = (1, 10, 100, 400)

# -- what the owner runs -----------------------------------------------------------------------------

_leaves: dict[int, list[Tensor]] = {}


def make_leaves(count: int) -> list[Tensor]:
    """Close to 1, so that a long product is neither 0 nor infinite; no two alike."""
    generator = torch.Generator().manual_seed(count)
    return [(1 + 0.01 * (torch.rand(SIZE, generator=generator) - 0.5)).requires_grad_() for _ in range(count)]


def through_leaves(x: Tensor, count: int, shared: bool) -> Tensor:
    """Run by the owner: what comes out depends on each of its leaves."""
    if count not in _leaves:
        _leaves[count] = make_leaves(count)
    for leaf in _leaves[count]:
        x = x + leaf if shared else torch.tanh(x * leaf)
    return x


def gradients_of_leaves(count: int, context_id: int | None) -> list[Tensor | None]:
    """Run by the owner: the gradients in `.grad`, or in a context."""
    if context_id is None:
        return [leaf.grad for leaf in _leaves[count]]
    found = backend_here().autograd.get_gradients(context_id)
    return [found[leaf] for leaf in _leaves[count]]


def clear_leaves(count: int) -> None:
    for leaf in _leaves[count]:
        leaf.grad = None


# -- passes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaves:
    """Passes through a function of so many leaves, which a peer owns; or this process, without a session."""

    session: Session | None
    count: int
    shared: bool
    plain: bool
    x: Tensor

    def seconds(self) -> float:
        """What `backward` took."""
        return self._run(look=False)[0]

    def check(self) -> None:
        local = Leaves(None, self.count, self.shared, plain=True, x=self.x)
        torch.testing.assert_close(self._run(look=True)[1], local._run(look=True)[1])

    def _run(self, look: bool) -> tuple[float, list[Tensor | None]]:
        with one_pass(self.session, plain=self.plain) as this:
            loss = loss_of(self._at_owner(through_leaves, self.x, self.count, self.shared))
            start = perf_counter()
            this.backward(loss)
            took = perf_counter() - start
            found = self._at_owner(gradients_of_leaves, self.count, this.context_id) if look else []
        if this.context_id is None:
            self.x.grad = None
            found = [None if one is None else one.clone() for one in found]
            self._at_owner(clear_leaves, self.count)
        return took, found

    def _at_owner(self, func: Callable[..., Any], *args: Any) -> Any:
        if self.session is None:
            return func(*args)
        return self.session.backend.rpc.rpc_sync(self.session.peer, func, args=args)


def time_leaves(session: Session, *, shared: bool, plain: bool) -> Samples:
    passes = _passes(session, shared, plain)
    for one in passes.values():
        one.check()
    return _time(passes, session)


def time_local_leaves(session: Session, *, shared: bool) -> Samples:
    torch.set_num_threads(1)
    return _time(_passes(None, shared, plain=True), session)


def _passes(session: Session | None, shared: bool, plain: bool) -> dict[int, Leaves]:
    x = torch.full((SIZE,), 0.5, requires_grad=True)
    return {count: Leaves(session, count, shared, plain, x) for count in COUNTS}


def _time(passes: dict[int, Leaves], session: Session) -> Samples:
    return timed_by_size({count: one.seconds for count, one in passes.items()}, session.repeats, at_least=20)


def _growths(name: str, title: str, *, shared: bool) -> tuple[Growth, ...]:
    return tuple(
        Growth(
            name=name + end,
            title=f"{title}: {way}",
            measure=partial(time_leaves, shared=shared, plain=plain),
            local=partial(time_local_leaves, shared=shared),
            repeats=Repeats(count=20, warmup=3),
            unit="µs",
            of="leaves",
            base=10,
            goals={100: 0.80, 400: 0.80},
            slope_goal=1e-6,
        )
        for end, way, plain in WAYS
    )


GROWTHS = (
    *_growths("leaves", "backward, leaves", shared=False),
    *_growths("leaves-shared", "backward, leaves with one gradient", shared=True),
)
