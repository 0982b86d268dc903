"""Critical sections: Ctrl-C comes through only where telegrad holds nothing.

# Note [critical sections]
Each thread has a counter, `current.thread.critical`. It is above zero while the thread runs telegrad's own code, and
zero while it runs users' code (functions, callbacks, hooks, pickling) or blocks. It serves two purposes:

Ctrl-C   Python runs signal handlers on the main thread, between any two instructions: also between taking a lock and
         the `try` that gives it back. So the handler looks at the counter. Above zero it notes the interrupt and
         returns; the interrupt is raised where the counter returns to zero, or where the thread is about to block.
         A second Ctrl-C that comes while the first one is still deferred is raised at once, wherever the code is.
finaliser The garbage collector runs users' `__del__` on any thread, also while that thread holds a lock of telegrad's.
         A public function that finds the counter above zero was called from such a finaliser, and must not wait.

    with critical(): ...             a section; calls of public functions, at their outermost level
    interruptible(function, *args)   inside of one: what blocks, or is a user's. An interrupt raises in there, so the
                                     caller gives back what it holds with one `except BaseException`

On the path of a message the counter is raised and lowered inline. It is always set to a saved value, never
decremented: a section that was left by an exception in the wrong place is mended by the one around it.

Handlers of other signals that raise (SIGALRM, SIGTERM) are not deferred.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal is Python code, and this runs with every call
from collections.abc import Callable
from typing import Any, TypeVar

from .current import thread

Result = TypeVar("Result")

_AGAIN = 0.1  # seconds; a Ctrl-C that follows a deferred one sooner is a key that repeats, not a second one

_deferred: list[
    float
] = []  # when the interrupt came that waits for the end of a section; the main thread's own
_previous: Callable[[int, Any], Any] = signal.default_int_handler
_users = 0  # workers that live in this process; the main thread's own


class critical:
    """A critical section, for code that is not on the path of every message."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = thread.critical
        thread.critical = self._before + 1
        if thread.is_main:
            guard()

    def __exit__(self, *_: object) -> None:
        before = self._before
        thread.critical = before
        if _deferred and not before:
            deliver()


def interruptible(function: Callable[..., Result], *args: Any) -> Result:
    """Calls a function that blocks or is a user's, from inside of a critical section."""
    before = thread.critical
    if not before:
        return function(*args)
    # The counter is restored inside of the `try` as well as behind it: no line is left on which an interrupt could
    # leave it at zero.
    try:
        thread.critical = 0
        if _deferred:
            deliver()
        result = function(*args)
        thread.critical = before
    except BaseException:
        thread.critical = before
        raise
    return result


def deliver() -> None:
    """Raises the interrupt that was deferred, if this is the main thread."""
    if thread.is_main and _deferred:
        _deferred.clear()
        _previous(signal.SIGINT, sys._getframe())


def _on_signal(signum: int, frame: Any) -> None:
    if thread.critical:
        now = time.monotonic()
        if not _deferred:
            _deferred.append(now)
        if now - _deferred[0] < _AGAIN:
            return
    _deferred.clear()
    _previous(signum, frame)


def install() -> None:
    """Wraps the process's handler of SIGINT, for a worker that starts. On any other than the main thread, the first
    call from the main thread does it."""
    global _users
    _users += 1
    if thread.is_main:
        guard()


def guard() -> None:
    """Wraps the handler of SIGINT, unless it is wrapped: notebooks and asyncio set their own now and then. On the main
    thread."""
    global _previous
    handler = getsignal(signal.SIGINT)
    if handler is not _on_signal and _users and callable(handler):
        _previous = handler
        signal.signal(signal.SIGINT, _on_signal)


def uninstall() -> None:
    """Restores the handler of SIGINT after the last worker has ended."""
    global _users
    _users = max(0, _users - 1)
    if not _users and thread.is_main and getsignal(signal.SIGINT) is _on_signal:
        signal.signal(signal.SIGINT, _previous)


def _in_child() -> None:
    thread.is_main = True
    thread.critical = 0
    _deferred.clear()


os.register_at_fork(after_in_child=_in_child)
