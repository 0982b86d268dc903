"""Whether anything but torch's engine holds a gradient that a Recv's backward was given.

Such a gradient may be kept without a copy if not, for another thread to send or until others of its message have come:
see Note [gradients that are held elsewhere] in leaves.py, which does the same for the gradients of leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import torch

from .._torch import run_backward
from ..messages import LogEntry
from . import nodes

Gradient = torch.Tensor | None


def kept(gradients: Sequence[Gradient], free: tuple[int, int] | None) -> list[Gradient]:
    """Returns gradients that may be kept beyond the backward that was given them: copies where the Function that made
    them may use their memory again. `free` is what free_references() says."""
    return [
        gradient if gradient is None or gradient.requires_grad or references == free else gradient.clone()
        for gradient, references in zip(gradients, _references(gradients), strict=True)
    ]


def _references(gradients: Sequence[Any]) -> list[tuple[int, int] | None]:
    """Counts how often each gradient is held, in torch and in Python: here by the arguments of the backward, and a loop
    over them."""
    return [None if one is None else (one._use_count(), getrefcount(one)) for one in gradients]


class _Probe:
    """Takes the place of an EngineCall."""

    has_devices, task, capture, before = False, -1, None, None
    found: tuple[int, int] | None = None

    def post(self, recv: Any, gradients: Sequence[torch.Tensor]) -> None:
        (self.found,) = _references(gradients)


@functools.cache
def free_references() -> tuple[int, int] | None:
    """Measures the counts of a gradient that only the engine holds; None if they are not to be relied on. Never inside
    of an engine call."""
    kept: list[Any] = []
    beacon, one = nodes.make_beacon(), torch.ones((), device="cpu")

    def measure(function: Callable[[torch.Tensor], torch.Tensor], *, keep: bool = False) -> tuple[int, int] | None:
        (received,), _ = nodes.make_recvs(1, [LogEntry(1, 0, ())], 0, [one.new_zeros(1)])
        loss, probe = function(received), _Probe()
        if keep:
            loss.grad_fn.register_hook(lambda inputs, outputs: kept.append(inputs))  # type: ignore[union-attr]
        nodes.starting(probe)  # type: ignore[arg-type]
        try:
            run_backward((beacon, loss), (one, one.new_ones(1)), False, False, (), True, True)
        finally:
            nodes.ended(probe)  # type: ignore[arg-type]
        return probe.found

    with torch.enable_grad(), torch.inference_mode(False):
        free = measure(lambda x: x * 2)
        held = (measure(lambda x: x * 2, keep=True), measure(lambda x: x + one.new_zeros(1).requires_grad_()))
        is_reliable = free == measure(lambda x: x * 2) and free not in held
    return free if is_reliable else None
