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
    interruptible(function, *args)   inside of one: users' code, or what blocks while nothing is held
    blocking(function, *args)        inside of one: what blocks while the thread holds something. An interrupt raises in
                                     there, so the caller gives that back with one `except BaseException`
    run_all(steps)                   an ending that must be complete: an interrupt is deferred to its end, also where
                                     a step blocks

On the path of a message the counter is raised and lowered inline. It is always set to a saved value, never
decremented: a section that was left by an exception in the wrong place is mended by the one around it.

Finalisers of telegrad's own are marked (`finaliser`): Python drops an exception that is raised in one. torch drops
those of callbacks of futures. Callbacks of telegrad's own are marked, too. Where users' callbacks may run, an interrupt
that was raised in one is raised again when torch has returned (`calling_back`).

Handlers of other signals that raise (SIGALRM, SIGTERM) are not deferred.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from _signal import getsignal as getsignal  # type: ignore[import-not-found]  # signal.getsignal is Python code, and this runs with every call
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import FinaliserError
from . import clock
from .current import thread
from .untraced import untraced

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

_AGAIN = 0.1  # seconds; a Ctrl-C that follows a deferred one sooner is a key that repeats, not a second one

_SOON = 2e-3  # seconds until an interrupt comes again that came in a finaliser
_DEEPEST = 20  # frames from a finaliser to what it calls

_finalisers: set[Any] = set()  # code of functions that the interpreter calls when an object dies
deferred: list[float] = []  # when the interrupt came that waits for a section's end; the main thread's own
_previous: Callable[[int, Any], Any] = signal.default_int_handler
_users: set[int] = set()  # ids of the objects that want the handler; its single operations are atomic
_raised = 0  # how many interrupts were raised; the main thread's own
_held = 0  # above zero: an ending runs on the main thread, and an interrupt waits for its end


class critical:
    """A critical section, for code that is not on the path of every message."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = thread.critical
        thread.critical = self._before + 1
        if thread.is_main and getsignal(signal.SIGINT) is not on_signal:
            guard()

    def __exit__(self, *_: object) -> None:
        before = self._before
        thread.critical = before
        if deferred and not before:
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
        if deferred:
            deliver()
        result = function(*args)
        thread.critical = before
    except BaseException:
        thread.critical = before
        raise
    return result


def blocking(function: Callable[..., Result], *args: Any) -> Result:
    """Calls a function that blocks while this thread holds something, the read lease, say: an interrupt comes through,
    and a finaliser still sees a critical section."""
    if not thread.critical:
        return function(*args)
    try:
        thread.blocking = True
        if deferred:
            deliver()
        result = function(*args)
        thread.blocking = False
    except BaseException:
        thread.blocking = False
        raise
    return result


class held:
    """Defers Ctrl-C also where the main thread blocks or runs users' code. A second one comes through."""

    def __enter__(self) -> None:
        global _held
        if thread.is_main:
            self._before = _held
            _held = self._before + 1

    def __exit__(self, *_: object) -> None:
        global _held
        if thread.is_main:
            _held = self._before
            if deferred and not thread.critical:
                deliver()


def run_all(steps: list[Callable[[], Any]]) -> None:
    """Runs all steps in their order, whatever some of them raise, and takes them out of the list; then raises the first
    of their errors, or the interrupt.

    A second Ctrl-C breaks into the step that runs, and the rest runs all the same. That step runs once more, since it
    may not have begun: a step can be run twice.
    """
    global _held
    before = _held
    first: BaseException | None = None
    again = False  # the first of the steps was interrupted
    while steps:
        try:
            with held():
                while steps:
                    steps[0]()
                    del steps[0]
                    again = False
        except BaseException as error:
            if thread.is_main:
                _held = before  # a second Ctrl-C may have come before the first line of __exit__
            interrupted = not isinstance(error, Exception)
            if first is None or (interrupted and isinstance(first, Exception)):
                first = error
            if steps and (again or not interrupted):
                del steps[0]
            again = interrupted and not again
    if first is not None:
        try:
            raise first
        finally:
            del first  # which refers to this frame


def deliver() -> None:
    """Raises the interrupt that was deferred, if this is the main thread and no ending runs on it."""
    if thread.is_main and deferred and not _held:
        deferred.clear()
        _raise(sys._getframe())


def _raise(frame: Any) -> None:
    global _raised
    try:
        _previous(signal.SIGINT, frame)
    except KeyboardInterrupt:
        _raised += 1
        raise


def calling_back(function: Callable[..., Result], *args: Any) -> Result:
    """Calls a function of torch's that may run callbacks of a future on this thread. torch drops what they raise, or
    makes another error of it: an interrupt that came in one raises here, when torch has returned."""
    before = _raised
    result = function(*args)
    if _raised != before and thread.is_main:
        raise KeyboardInterrupt
    return result


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception that came out of users' code is a Ctrl-C, and not what that code raised itself."""
    return isinstance(error, KeyboardInterrupt) and thread.is_main


def on_signal(signum: int, frame: Any) -> None:
    """Handles SIGINT."""
    if (thread.critical and not thread.blocking) or _held:
        now = clock.now()
        if not deferred:
            deferred.append(now)
        if now - deferred[0] < _AGAIN:
            return
    elif _is_in_finaliser(frame):
        _thread.start_new_thread(_press_again, ())
        return
    deferred.clear()
    _raise(frame)


def finaliser(function: Function) -> Function:
    """Marks a function whose exceptions go nowhere: the interpreter calls it when an object dies or the process forks,
    or torch when a future is done. An interrupt that comes in it is put off, for a moment, by a thread that presses the
    keys again."""
    _finalisers.add(function.__code__)
    return untraced(function)  # it may run in the middle of what is compiled


def _is_in_finaliser(frame: Any) -> bool:
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_code in _finalisers:
            return True
        frame = frame.f_back
    return False


def _press_again() -> None:
    time.sleep(_SOON)
    # A signal of the system's: it also wakes a main thread that blocks, as _thread.interrupt_main() does not.
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]


def in_finaliser(what: str) -> FinaliserError:
    """The error of a public function that would wait, and was called while this thread is in a critical section."""
    return FinaliserError(
        f"{what} was called in a finaliser (__del__ or a weakref callback) that the garbage collector ran in the "
        "middle of telegrad's own code, where nothing can be waited for; use rpc_async() there, or another thread"
    )


def install(user: object) -> None:
    """Wraps the process's handler of SIGINT, for a worker or a cluster that starts. On any other than the main thread,
    the first call from the main thread does it."""
    _users.add(id(user))
    if thread.is_main:
        guard()


def guard() -> None:
    """Wraps the handler of SIGINT, unless it is wrapped: notebooks and asyncio set their own now and then. On the main
    thread."""
    global _previous
    handler = getsignal(signal.SIGINT)
    if handler is not on_signal and _users and callable(handler):
        _previous = handler
        signal.signal(signal.SIGINT, on_signal)


def uninstall(user: object) -> None:
    """Restores the handler of SIGINT after the last of its users has ended. Any number of times."""
    _users.discard(id(user))
    if not _users and thread.is_main and getsignal(signal.SIGINT) is on_signal:
        signal.signal(signal.SIGINT, _previous)


def _in_child() -> None:
    global _held
    thread.is_main = True
    thread.critical = 0
    thread.blocking = False
    _held = 0
    deferred.clear()


os.register_at_fork(after_in_child=_in_child)
