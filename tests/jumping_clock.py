"""telegrad's clock, which a test makes jump: "after 60 seconds" takes no time, and does not depend on how busy the
machine is."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from telegrad.primitives import clock
from telegrad.primitives.interrupts import blocking
from telegrad.primitives.waiter import Waiter
from telegrad.transport import lease, poller


class JumpingClock:
    """In place of `telegrad.primitives.clock.now`, in this process."""

    def __init__(self, monkeypatch: Any) -> None:
        self._ahead = 0.0
        self._time = time.monotonic
        self._sleepers: list[Callable[[], None]] = []  # its single operations are atomic
        monkeypatch.setattr(clock, "now", lambda: self._time() + self._ahead)
        monkeypatch.setattr(Waiter, "sleep", lambda waiter, timeout: self._sleep(waiter, timeout))

    def stop(self) -> None:
        """From here on time passes only by jumps. It stops at a whole second: times that are added to it and taken off
        again come out as they were."""
        now = float(math.ceil(self._time()))
        self._time = lambda: now

    def jump(self, seconds: float) -> None:
        """It is later now: all that waits for a deadline looks again."""
        self._ahead += seconds
        while self._sleepers:
            self._sleepers.pop()()
        for found in list(lease._leases):
            found.ring()
        for found in list(poller._pollers):
            for fd in found._fds[1:]:
                poller._libc.timerfd_settime(fd, 0, poller._TimerSpec(0, 0, 0, 1), None)

    def _sleep(self, waiter: Waiter, timeout: float | None) -> None:
        """As Waiter.sleep(), and a jump wakes the thread, too."""
        woken = threading.Event()
        waiter.wakes.append(woken.set)
        ahead = self._ahead
        self._sleepers.append(woken.set)
        if not waiter.done and ahead == self._ahead:
            blocking(woken.wait, timeout)
