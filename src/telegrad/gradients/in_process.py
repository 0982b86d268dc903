"""The engines of all workers of this process. A pass over several of them is complete on all when backward() returns:
its caller may look at the `.grad` of any leaf in the process next, and need not make a call for that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine

engines: list[Engine] = []  # its single operations are atomic


def finish(root: Engine, pass_id: int, workers: Sequence[int]) -> tuple[int, ...]:
    """Ends a pass at these workers, where they are of this process; returns the others, which are still to be told."""
    ended = {engine.id for engine in list(engines) if engine is not root and engine.parts.finish_here(pass_id)}
    return tuple([worker for worker in workers if worker not in ended])


# In a fork: its workers are those of another process.
os.register_at_fork(after_in_child=engines.clear)
