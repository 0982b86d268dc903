"""Calls that a checkpoint makes again in the backward pass, to compute its forward pass once more.

torch restores the random numbers of the caller's process for that, and cannot restore those of the callee: a dropout
there would draw another mask, and gradients would belong to a forward pass that never was. The caller marks such a call
(`Modes.recomputes`), and the callee refuses the result if the function has drawn random numbers. Calls that the
function makes meanwhile are marked, too.

torch does not say which thread has drawn, so whatever draws on the callee meanwhile is taken for the function: rather
an error for nothing than gradients that are wrong. A checkpoint with preserve_rng_state=False asks for no such care.

    is_recomputing()    at the caller: whether this call is one of these
    Recomputation()     at the callee, before the function runs;  check() after it
"""

from __future__ import annotations

import sys

import torch
import torch.utils.checkpoint

from ..errors import GradientError

_FILE = torch.utils.checkpoint.__file__


def is_recomputing() -> bool:
    """Whether this code, inside of torch's engine, is called by a checkpoint that preserves random numbers."""
    frame, found = sys._getframe(1), False
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == _FILE:
            found, names = True, frame.f_locals
            preserves = names.get("preserve_rng_state", getattr(names.get("ctx"), "preserve_rng_state", None))
            if preserves is not None:
                return bool(preserves)
    return found


def _random_states() -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    return found + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else found


class Recomputation:
    """One call of that kind, at the callee."""

    def __init__(self) -> None:
        self._states = _random_states()

    def check(self, worker: str, function: str) -> None:
        """Refuses the result, if torch's random numbers were drawn meanwhile.

        Raises:
            GradientError: they were.
        """
        if not all(map(torch.equal, self._states, _random_states())):
            raise GradientError(
                f"{function} on worker {worker!r} has drawn random numbers in the recomputation of a checkpoint (or "
                "something else there has, meanwhile). They differ from those of its forward pass, so gradients would "
                "be wrong: put the checkpoint inside of the remote function or module, where it preserves them; or "
                "have the function draw inside of torch.random.fork_rng(), after a torch.manual_seed() of its own in "
                "there; or, if it draws none, give checkpoint() preserve_rng_state=False"
            )
