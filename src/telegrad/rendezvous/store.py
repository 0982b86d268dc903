"""StoreClient: requests to a store, each with a time limit.

torch's client of a store blocks in C for as long as the store's process is stopped or its host unreachable; its timeout
does not help. So no caller enters it: a thread of the StoreClient makes the requests, one after the other, and a caller
waits for its answer until its own deadline. A request whose caller has given up is not begun.

The thread is a daemon. It ends when there was nothing to ask for a while, and when the client is closed. One that is
stuck in C stays, with the store's descriptor, until the store answers or the process ends; nothing waits for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from .._torch import cpp_log_level
from ..errors import RendezvousError
from ..primitives import clock
from ..primitives.interrupts import critical, interruptible
from ..primitives.torch_threads import prepared

_log_level, _WARNINGS = cpp_log_level, 1
_shown = _WARNINGS if _log_level is None else _log_level.value  # as TORCH_CPP_LOG_LEVEL asks for
_IDLE = 0.5  # seconds without a request after which the thread ends: longer than the pauses of those who poll


class Deadline:
    """The end of a time limit, which the requests of one caller share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = clock.now() + seconds

    def left(self) -> float:
        return max(0.0, self._at - clock.now())


def no_answer(text: str) -> RendezvousError:
    """Makes the error for a store that does not answer."""
    error = RendezvousError(text)
    error.no_answer = True
    return error


class _Request:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.done = False
        # Not an Event: an interrupt in the middle of its code would leave the lock inside of it taken, and the
        # client's thread would wait for that when it sets the event.
        self._answered = threading.Lock()
        self._answered.acquire()
        self.abandoned = False  # its caller waits no longer
        self.result: Any = None
        self.error: BaseException | None = None

    def wait(self, until: Deadline) -> None:
        interruptible(self._answered.acquire, True, min(until.left(), threading.TIMEOUT_MAX))

    def set_done(self) -> None:
        self.done = True
        self._answered.release()


class StoreClient:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._renew()
        self._closed = False
        _clients.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # guards all below, the store and `_closed`
        self._wanted = threading.Condition(self._lock)  # wakes the thread: a request came, or close() did
        self._requests: deque[_Request] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, function: Callable[[Any], Any], until: Deadline) -> Any:
        """Calls `function` with the store, on the client's thread; its result.

        Raises:
            RendezvousError: no answer in time, or the client is closed.
            Exception: the one that the function raises.
        """
        request = _Request(function)
        with critical():
            self._submit(request)
            try:
                request.wait(until)
            finally:
                request.abandoned = not request.done
        if request.abandoned:
            raise no_answer(
                f"the group's store does not answer within {until.seconds:.1f} s; is its process stopped, or its host "
                "gone?"
            )
        try:
            if request.error is not None:
                raise request.error
            return request.result
        finally:
            del request  # an error refers to this frame

    def _submit(self, request: _Request) -> None:
        with self._lock:
            if self._closed:
                raise RendezvousError("the worker has left its group, and uses the group's store no more")
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=prepared(self._work), name="telegrad-store", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._thread = None
                    raise RendezvousError(
                        f"no thread could be started for the group's store: {error}; see ulimit -u, or the "
                        "container's limit of processes"
                    ) from error
            self._requests.append(request)
            self._wanted.notify()

    def close(self) -> None:
        """Lets go of the store: one that this process serves ends with that. Any number of times."""
        with critical(), self._lock:
            self._closed = True
            store, self._store = self._store, None
            requests = list(self._requests)
            self._requests.clear()
            self._wanted.notify()
        del store  # not under the lock: the end of a store takes a while
        for request in requests:
            request.error = RendezvousError("the worker has left its group before the group's store was asked")
            request.set_done()

    # -- the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        with critical():  # so a finaliser that the collector runs here does not ask the store, and wait for itself
            while (request := self._next()) is not None:
                self._carry_out(request)
                request.set_done()  # when no frame here refers to the store: its owner may let go of it now
                del request

    def _next(self) -> _Request | None:
        with self._lock:
            while not self._requests and not self._closed:
                if not self._wanted.wait(_IDLE) and not self._requests:
                    break
            if self._closed or not self._requests:
                self._thread = None
                return None
            return self._requests.popleft()

    def _carry_out(self, request: _Request) -> None:
        store = self._store
        try:
            if self._closed:
                raise RendezvousError("the worker has left its group before the group's store was asked")
            if not request.abandoned:
                request.result = _quietly(request.function, store)
        except BaseException as error:
            request.error = error

    def abandon(self) -> None:
        """In a fork, where the thread is not: the store is the parent's, and this copy of the client is closed."""
        self._renew()
        self._closed = True


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _quietly(function: Callable[[Any], Any], store: Any) -> Any:
    """Calls a function that makes a request. Where its process is gone torch would print pages of C++ frames for each
    request, and the error has it all. Meanwhile no warning of torch's C++ code is shown on any thread."""
    if _log_level is None or _shown != _WARNINGS:
        return function(store)
    _log_level.value = _WARNINGS + 1
    try:
        return function(store)
    finally:
        _log_level.value = _shown  # also if another thread's request is under way: then a failure of that is shown


def _in_child() -> None:
    if _log_level is not None:
        _log_level.value = _shown
    for client in list(_clients):
        client.abandon()


os.register_at_fork(after_in_child=_in_child)
