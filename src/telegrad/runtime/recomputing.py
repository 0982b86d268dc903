"""Calls that a checkpoint makes again in the backward pass, to compute its forward pass once more.

torch restores the random numbers of the caller's process for that, and cannot restore those of the callee: a dropout
there would draw another mask, and gradients would belong to a forward pass that never was. The caller marks such a call
(`Modes.recomputes`), and the callee refuses the result if the function has drawn random numbers. Calls that the
function makes meanwhile are marked, too.

torch does not say which thread has drawn: a thread of the callee's own that draws meanwhile is taken for the function.

    is_recomputing()    at the caller: whether this call is one of these
    Recomputation()     at the callee, before the function runs;  check() after it
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.utils.checkpoint

from ..errors import GradientError
from ..events import logger

if TYPE_CHECKING:
    from .serving import Server

_FILE = torch.utils.checkpoint.__file__


def is_recomputing() -> bool:
    """Whether this code, which runs inside of torch's engine, is called by a checkpoint."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == _FILE:
            return True
    return False


def _random_states() -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    return found + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else found


class Recomputation:
    """One call of that kind, at the callee."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_alone = server.being_served == 1
        self._calls = server.calls_served
        self._states = _random_states()

    def check(self, worker: str, function: str) -> None:
        """Refuses the result, if torch's random numbers were drawn meanwhile.

        Raises:
            GradientError: they were, by this call.
        """
        if all(map(torch.equal, self._states, _random_states())):
            return
        text = (
            f"{function} on worker {worker!r} has drawn random numbers in the recomputation of a checkpoint (or another"
            " thread of that worker has, meanwhile). They differ from those of its forward pass, so gradients would be "
            "wrong: put the checkpoint inside of the remote function or module, where it preserves them; or have the "
            "function draw inside of torch.random.fork_rng(), after a torch.manual_seed() of its own in there"
        )
        if self._is_alone and self._server.calls_served == self._calls:
            raise GradientError(text)
        logger.warning("%s (unless another call did that was served at the same time)", text)
