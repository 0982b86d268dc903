"""Processes that multiprocessing starts have what this one has.

A fork has it anyway. A process that is spawned (or comes from multiprocessing's fork server) starts with a bare
interpreter: it unpickles a dictionary from its parent, then imports the parent's script, then runs the target. So what
installs the drop-in is put into that dictionary, to run when it is unpickled: before the script imports anything.
"""

from __future__ import annotations

import multiprocessing.spawn
from pathlib import Path
from typing import Any

from . import profiling

_FIRST_OF_ALL = """
import sys
sys.path.append({where!r})
import telegrad.compat
sys.path.remove({where!r})
telegrad.compat.install(torch_profiler={torch_profiler})
"""


class _InstallsWhenUnpickled:
    def __reduce__(self) -> Any:
        # The child has its parent's sys.path only later: it is told where telegrad is.
        where = str(Path(__file__).resolve().parents[2])
        code = _FIRST_OF_ALL.format(where=where, torch_profiler=profiling.follows_newer)
        return exec, (code,)


def follow_into_children() -> None:
    """Has every process that multiprocessing starts from now on call install() first."""
    before = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**before(name), "telegrad": _InstallsWhenUnpickled()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
