"""Calls that a checkpoint makes again in the backward pass, to compute its forward pass once more.

torch restores the random numbers of the checkpoint's process for that, and cannot restore those of others: a dropout
there would draw another mask, and gradients would belong to a forward pass that never was. So such a call says whose
checkpoint it is (`Modes.recomputes`), and a callee of another process refuses the result if the function has drawn
random numbers. Calls that the function makes meanwhile say the same, on whatever worker, also those that are made in
callbacks of such calls' futures.

torch does not say which thread has drawn, so whatever draws on the callee meanwhile is taken for the function: rather
an error for nothing than gradients that are wrong. A checkpoint with preserve_rng_state=False asks for no such care.

    recomputing_process()    at the caller: the process whose checkpoint makes this call again
    Recomputation()          at the callee, before the function runs;  check() after it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
import torch.utils.checkpoint

from ..errors import GradientError
from ..primitives import current

_FILE = torch.utils.checkpoint.__file__
_RECOMPUTES = "backward", "recompute_fn"  # there; of a reentrant checkpoint, and of the other kind


def recomputing_process() -> int:
    """Inside of torch's engine: the process with a checkpoint that has this code run again; 0: none. Where one is
    inside of another it is that of the inner one, whose forward pass has drawn in this pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _RECOMPUTES and code.co_filename == _FILE:
            names = frame.f_locals
            if names.get("preserve_rng_state", getattr(names.get("ctx"), "preserve_rng_state", True)):
                return current.process_id
        frame = frame.f_back
    return current.current_recomputes()


def run_as_part(recomputes: int, task: Callable[[], None]) -> None:
    """Runs a task whose calls are made again by a checkpoint of this process; 0: by none."""
    token = current.recomputes.set(recomputes)
    try:
        task()
    finally:
        current.recomputes.reset(token)


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
