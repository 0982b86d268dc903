"""Waiter: an event that threads wait for, asleep or while they read."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from .interrupts import blocking


class Waiter(msgspec.Struct, eq=False, kw_only=True):
    """An event that is done once, and wakes all threads that wait for it.

    A thread that waits appends a function to `wakes` and looks at `done` after that; `set_done` sets `done` first and
    calls the functions after that, so one of the two sees the other. Each function is popped by one thread, and so
    called once. To wake in vain does no harm.
    """

    done: bool = False
    wakes: list[Callable[[], object]] = []  # its single operations are atomic

    def set_done(self) -> None:
        """Wakes all threads that wait. From any thread, any number of times."""
        self.done = True
        while self.wakes:
            try:
                wake = self.wakes.pop()
            except IndexError:
                return
            wake()

    def sleep(self, timeout: float | None) -> None:
        """Sleeps until set_done() or the timeout. Each thread sleeps on a lock of its own, so an interrupt loses
        nothing."""
        lock = threading.Lock()
        lock.acquire()
        self.wakes.append(lock.release)
        if not self.done:
            blocking(lock.acquire, True, -1 if timeout is None else max(0.0, timeout))
