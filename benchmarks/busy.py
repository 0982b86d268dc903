"""Busy loops beside a run: what a machine is like on which others work too."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.processes import end_with_parent

END_S = 5.0


@contextmanager
def busy_loops(count: int) -> Iterator[list[int]]:
    """Run so many processes that only count, for as long as the `with` lasts; their ids.

    They are killed on the way out, and by the kernel where this process is killed itself.
    """
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Semaphore(0)
    loops = [spawn.Process(target=_loop, args=(started,), daemon=True) for _ in range(count)]
    try:
        for loop in loops:
            loop.start()
        for _ in loops:
            if not started.acquire(timeout=60):
                raise TimeoutError(f"{count} busy loops were to start within a minute")
        yield [loop.pid for loop in loops if loop.pid is not None]
    finally:
        for loop in loops:
            if loop.pid is not None:
                loop.kill()
                loop.join(END_S)


def _loop(started: Any) -> None:
    end_with_parent()
    started.release()
    while True:
        pass
