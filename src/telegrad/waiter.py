"""Waiter: what one thread sleeps on until another one has something for it."""

from __future__ import annotations

import threading

_making_wake = threading.Lock()  # two threads that wait for one thing must wait for one lock


class Waiter:
    """`done` is set last; a thread that waits sets `wake` first and looks at `done` after, so one of the two
    sees the other."""

    __slots__ = ("done", "wake")

    def __init__(self) -> None:
        self.done = False
        self.wake: threading.Lock | None = None

    def set_done(self) -> None:
        self.done = True
        wake = self.wake
        if wake is not None:
            try:
                wake.release()
            except RuntimeError:
                pass  # released already: woken for another reason

    def sleep(self, timeout: float | None) -> None:
        """Sleeps until set_done() or the timeout. One thread at a time per lock; each has its own turn."""
        with _making_wake:
            if self.wake is None:
                self.wake = threading.Lock()
                self.wake.acquire()
        wake = self.wake
        if not self.done and wake.acquire(timeout=-1 if timeout is None else timeout):
            wake.release()  # the next one who waits for the same thing gets through too
