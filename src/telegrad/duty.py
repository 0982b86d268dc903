"""A thread's turn at a connection: it reads, and runs the calls that it read, one after the other.

Most functions are quick. To wake another thread for each message, or to pass the reading on each time, would
cost more than they do. So the thread on duty keeps the reading while it runs functions, and is relieved
of it as soon as one turns out not to be quick: when it makes a call of its own, when it took long the last
time, or when a timer finds it still running. Relieved, it finishes its function as any other thread; the
reading and the calls that it had not begun go to others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from . import current
from .transport.base import Connection
from .transport.poller import Poller

PATIENCE = 5e-3  # seconds that a function may take before its thread is relieved


class Duty:
    """`reading` is held while this exists, by the thread on duty or on its behalf."""

    __slots__ = ("_connection", "_held", "_hand_on", "since", "waiting")

    def __init__(self, connection: Connection, hand_on: Callable[[Any], None]) -> None:
        self._connection = connection
        self._hand_on = hand_on
        self._held: list[None] = []  # not empty: the thread may be relieved. list.pop decides who is first
        self.since = 0.0
        self.waiting: deque[Any] = deque()  # messages that were read and not yet begun

    def relieve(self) -> None:
        """Passes everything on, if the thread is on duty. From any thread, any number of times."""
        try:
            self._held.pop()
        except IndexError:
            return
        self._connection.reading.release()
        self._connection.arm()
        while self.waiting:
            try:
                message = self.waiting.popleft()
            except IndexError:
                return
            self._hand_on(message)

    def take_back(self) -> bool:
        """After a function: whether the thread is still on duty. Then nobody can relieve it until `leave`."""
        try:
            self._held.pop()
        except IndexError:
            return False
        return True

    def leave(self, now: float) -> None:
        """Before a function: from here on the thread can be relieved."""
        self.since = now
        self._held.append(None)


class Roster:
    """The duties of one worker, and the timer that relieves threads."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._duties: set[Duty] = set()  # its single operations are atomic
        self._timer_at = 0.0
        poller.on_timer = self._on_timer

    def begin(self, duty: Duty) -> None:
        """The calling thread goes on duty."""
        self._duties.add(duty)
        current.thread.relieve = duty.relieve

    def end(self, duty: Duty) -> None:
        self._duties.discard(duty)
        current.thread.relieve = None

    def relieve_all(self) -> None:
        for duty in list(self._duties):
            duty.relieve()

    def leave(self, duty: Duty) -> None:
        """Lets a thread on duty run a function."""
        now = time.monotonic()
        duty.leave(now)
        if now >= self._timer_at:
            # Not for each message: a timer that is set may ring early for this one, and is then set again.
            self._timer_at = now + PATIENCE
            self._poller.set_timer(PATIENCE)

    def _on_timer(self) -> None:
        now = time.monotonic()
        again = False
        for duty in list(self._duties):
            if now - duty.since >= PATIENCE * 0.9:
                duty.relieve()
            else:
                again = True
        if again:
            self._timer_at = now + PATIENCE
            self._poller.set_timer(PATIENCE)
