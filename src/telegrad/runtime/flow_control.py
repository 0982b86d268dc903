"""Back-pressure: a bound on the bytes of unanswered calls to one peer."""

from __future__ import annotations

import threading

from ..primitives import clock
from ..primitives.waiter import Waiter


class Window:
    """Counts the bytes in flight to one peer. A caller that wants to send more waits until answers have come.

    # Note [why the window is counted per depth]
    A call made while serving another one must never wait for that one's caller, or two workers that call each other
    could block for ever. So each depth of nesting has an allowance of its own: calls of depth d wait only for calls of
    depth d to be answered, and those wait only for calls of depth d + 1. The deepest calls wait for none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards the bytes, and the appending below; held for a moment only
        self._bytes: dict[int, int] = {}  # by depth
        self._waiting: list[Waiter] = []  # its single operations are atomic

    def enter(self, nbytes: int, depth: int, deadline: float | None) -> None:
        """Counts the bytes in, when there is room. One message always fits.

        Raises:
            TimeoutError: there was none by the deadline.
        """
        while True:
            with self._lock:
                used = self._bytes.get(depth, 0)
                if not used or used + nbytes <= self._limit:
                    self._bytes[depth] = used + nbytes
                    return
                waiter = Waiter()
                self._waiting.append(waiter)  # under the lock, so that bytes which leave from here on see it
            left = None if deadline is None else deadline - clock.now()
            if left is not None and left <= 0:
                raise TimeoutError(f"{self.bytes_in_flight()} bytes of calls to it are unanswered")
            waiter.sleep(left)

    def leave(self, nbytes: int, depth: int) -> None:
        with self._lock:
            self._bytes[depth] -= nbytes
        while self._waiting:
            try:
                self._waiting.pop().set_done()
            except IndexError:
                return

    def bytes_in_flight(self) -> int:
        with self._lock:
            return sum(self._bytes.values())
