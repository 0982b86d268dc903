"""Forward and backward passes: run on a side, timed, and checked against local autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.backends import TELEGRAD, Backend
from benchmarks.figures import Session
from benchmarks.programs import LOCAL, Program


@dataclass(frozen=True)
class Passes:
    """A program with its leaf, to be run again and again on one side."""

    backend: Backend
    peers: Sequence[str]
    program: Program
    leaf: Tensor

    def whole(self) -> dict[Tensor, Tensor]:
        """Context, calls, backward, gradients, and the end of the context; returns the gradients."""
        autograd = self.backend.autograd
        with autograd.context() as context_id:
            loss = self.program(self.backend.rpc, self.peers, self.leaf)
            autograd.backward(context_id, [loss])
            return autograd.get_gradients(context_id)  # type: ignore[no-any-return]

    def whole_seconds(self) -> float:
        start = perf_counter()
        gradients = self.whole()
        took = perf_counter() - start
        del gradients
        return took

    def backward_seconds(self) -> float:
        """Of a whole pass, what `backward` took."""
        autograd = self.backend.autograd
        with autograd.context() as context_id:
            loss = self.program(self.backend.rpc, self.peers, self.leaf)
            start = perf_counter()
            autograd.backward(context_id, [loss])
            return perf_counter() - start

    def check(self) -> None:
        """One whole pass; its gradient must be local autograd's."""
        found = self.whole()[self.leaf]
        (expected,) = torch.autograd.grad(self.program(LOCAL, self.peers, self.leaf), self.leaf)
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-12):
            raise AssertionError(f"{self.backend.name} gave another gradient than local autograd")


WAYS = (("", "plain", True), ("-context", "contexts", False))
"""How telegrad runs a pass: the end of a figure's name, the word for it, and whether it is without a context. torch
takes a context in any case."""


class Pass(NamedTuple):
    """How a pass is run, and where its gradients go: to a context, or to `.grad`."""

    backward: Callable[[Tensor], None]
    context_id: int | None


@contextmanager
def one_pass(session: Session | None, *, plain: bool) -> Iterator[Pass]:
    """A pass in a context; or plainly: on telegrad's side if `plain`, and in one process (without a session)."""
    if session is None or (plain and session.backend == TELEGRAD):
        yield Pass(Tensor.backward, None)
        return
    autograd = session.backend.autograd
    with autograd.context() as context_id:
        yield Pass(lambda loss: autograd.backward(context_id, [loss]), context_id)
