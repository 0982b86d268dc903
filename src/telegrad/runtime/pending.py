"""Calls in flight: each waits for its answer, for the loss of its peer, or for its deadline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import CallTimeoutError
from ..events import log_by, logger
from ..messages import Envelope
from ..primitives import clock, current
from ..primitives.waiter import Waiter
from ..transport.base import Connection, Frames

if TYPE_CHECKING:
    from ..primitives.futures import Future
    from .flow_control import Window
    from .profiled_calls import ProfiledCall

UNSET_TIMEOUT = -1.0  # torch's mark for "the default"
OVERHEAD_BYTES = 1024  # counted for each call in flight beside its bytes: a million tiny calls are not free


class PendingCall(Waiter, eq=False):
    """A call, from when it is sent until it was answered, failed or timed out. The thread that takes it out of
    `PendingCalls` completes it, so it completes once."""

    id: int
    function: str
    peer: str
    timeout: float | None
    deadline: float | None  # clock.now() + timeout, when it was made
    depth: int = 1
    connection: Connection | None = None
    window: Window = None  # type: ignore[assignment]  # that its bytes are counted in; given before it is sent
    future: Future | None = None
    caller_waits: bool = True  # on this thread, at once
    context: int = 0  # of autograd, in which it was sent; 0: none
    nbytes: int = 0  # counted in the window
    envelope: Envelope | None = None
    frames: Frames | None = None
    make_error: Callable[[], BaseException] | None = None  # makes a new one for each thread that asks
    sent: bool = False  # until then the thread that sends it watches its deadline
    claimed: bool = False  # the answer was read, and is being handed on
    profiled: ProfiledCall | None = None  # of a caller that is profiled
    recomputes: int = 0  # the process whose checkpoint makes it again; 0: none
    reading: bool = False  # its caller holds the read lease since before it was written

    def left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - clock.now())

    def stop_reading(self) -> None:
        """Releases the read lease, if its caller holds it since before the call was written."""
        if self.reading:
            self.reading = False
            assert self.connection is not None
            self.connection.lease.release()

    def leave_window(self) -> None:
        """Gives back its place among the bytes in flight. Any number of times."""
        nbytes, self.nbytes = self.nbytes, 0
        if nbytes:
            self.window.leave(nbytes, self.depth)

    def timeout_error(self) -> Callable[[], CallTimeoutError]:
        """Makes the error of a call whose time is over. It does not refer to the call: see Future.fail."""
        limit = int((self.timeout or 0) * 1000)
        return partial(
            CallTimeoutError,
            f"no answer from worker {self.peer!r} to the call of {self.function}: "
            f"RPC ran for more than set timeout ({limit} ms) and will now be marked with an error",
        )


class PendingCalls:
    """The calls in flight, by message id. A timer expires those that no thread waits for: `on_expired` completes them.

    `new_timer` makes a timer: a function that has a task run on a thread of the worker, so many seconds after it was
    called. `submit` has another thread run a task.
    """

    def __init__(
        self,
        on_expired: Callable[[PendingCall], None],
        new_timer: Callable[[Callable[[], None]], Callable[[float], None]],
        submit: Callable[[Callable[[], None]], None] = lambda task: task(),
    ) -> None:
        self.calls: dict[int, PendingCall] = {}  # by message id; its single operations are atomic
        self._on_expired = on_expired
        self._submit = submit
        self._lock = threading.Lock()  # guards all below
        self.next_look = float("inf")  # read with no lock
        self._set_timer = new_timer(self._expire)

    def __len__(self) -> int:
        return len(self.calls)

    def take(self, id: int) -> PendingCall | None:
        return self.calls.pop(id, None)

    def claim(self, id: int, connection: Connection) -> PendingCall | None:
        """Takes out a call whose answer was read. Only the worker that was asked can answer."""
        call = self.calls.get(id)
        if call is None:
            return None
        if call.connection is not connection:
            log_by(
                self._submit, logging.WARNING,
                "worker %r has answered a call of %s that was made to worker %r; the answer is dropped",
                connection.peer.name, call.function, call.peer,
            )  # fmt: skip
            return None
        if self.calls.pop(id, None) is None:
            return None
        call.claimed = True
        return call

    def take_all(self, connection: Connection | None) -> list[PendingCall]:
        """Takes out all calls of a connection, or (None) all calls."""
        calls = [c for c in list(self.calls.values()) if connection is None or c.connection is connection]
        return [c for c in calls if self.take(c.id) is not None]

    def expire_by(self, deadline: float) -> None:
        """Looks at the deadlines of calls no later than by then. Calls whose callers wait watch themselves; for any
        other whose deadline is before `next_look` this must be called."""
        with self._lock:
            if deadline < self.next_look:
                self.next_look = deadline
                self._set_timer(deadline - clock.now())

    def _expire(self) -> None:
        """Completes the calls whose time is over, and sets the timer for the next one."""
        with self._lock:
            self.next_look = float("inf")  # a call that comes from here on sets the timer itself
        now = clock.now()
        soonest = float("inf")
        for call in list(self.calls.values()):
            if call.deadline is None or not call.sent:
                continue
            if call.deadline > now:
                soonest = min(soonest, call.deadline)
            elif self.take(call.id) is not None:
                try:
                    self._on_expired(call)
                except Exception:  # the deadlines of others go on
                    logger.exception("a call of %s on worker %r could not be expired", call.function, call.peer)
        if soonest < float("inf"):
            self.expire_by(soonest)


def effective_timeout(asked: float | None, default: float, enclosing: float | None) -> float | None:
    """The time limit of a call: the one asked for (0: no limit; None, UNSET_TIMEOUT: the default), and never beyond the
    deadline of the call that it is made in."""
    limit: Any = default if asked is None or asked == UNSET_TIMEOUT else asked
    limit = None if limit == 0 else float(limit)
    if enclosing is None:
        return limit  # type: ignore[no-any-return]
    left = max(0.0, enclosing - clock.now())
    return left if limit is None else min(limit, left)


def limit_here(asked: float | None, default: float) -> float | None:
    """The time limit of what this code does now: within the deadline of the call that it is run by, if it is."""
    serving = current.current_serving()
    return effective_timeout(asked, default, serving.deadline if serving else None)
