"""The poller: one epoll per worker, on which all of its idle threads wait for descriptors that are readable.

The kernel wakes one thread per event, the one that went to sleep last. Each descriptor is armed for one event at a time
(EPOLLONESHOT), so one thread gets it, and arming it again passes the reading on to the next thread with no lock and no
wake-up of our own.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from ..primitives import clock
from ..primitives.interrupts import finaliser

_libc = ctypes.PyDLL(None, use_errno=True)  # these calls return at once, so the interpreter lock is kept


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_libc.timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TimerSpec), ctypes.c_void_p)

ARMED = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
# A hang-up is always reported. Without ONESHOT it would be, again and again, until a thread has read it.
DISARMED = select.EPOLLONESHOT


class Poller:
    """One worker's epoll. A descriptor's number may be given to another one while an event is on its way, or while its
    former owner arms it. So a callback may come for nothing, and must do no harm then."""

    def __init__(self) -> None:
        _close_retired()
        self._fds: list[int] = []  # to be closed: see _retire()
        self._epoll = select.epoll()
        self.watch = self._epoll.modify  # (descriptor, ARMED or DISARMED): waits for one event on it, or none
        self._callbacks: dict[int, Callable[[], None]] = {}  # its single operations are atomic
        self._closed = False
        # Edge-triggered and never read: each write wakes one sleeping thread, or the next that goes to sleep.
        self._wake_fd = self._own(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._timer_fd = self._own(_timerfd())
        self._callbacks[self._timer_fd] = self._on_timer
        self.on_timer: Callable[[], None] = _nothing
        _pollers.add(self)

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        return fd

    @finaliser
    def __del__(self) -> None:
        self._wake_fd = -1  # finalisers of one cycle of garbage run in any order
        _close(self._fds)

    def own(self, fd: int) -> None:
        """Closes a descriptor when the poller's own are closed."""
        self._fds.append(fd)

    def register(self, fd: int, callback: Callable[[], None]) -> None:
        """Adds a descriptor, not armed yet."""
        self._callbacks[fd] = callback
        try:
            self._epoll.register(fd, DISARMED)
        except BaseException:
            self._callbacks.pop(fd, None)
            raise

    def unregister(self, fd: int) -> None:
        """Removes a descriptor, before it is closed."""
        if self._callbacks.pop(fd, None) is not None and not self._closed:
            self._epoll.unregister(fd)

    def wake(self) -> None:
        """Lets one thread out of poll(). Takes no lock: finalisers call it."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def timer(self, seconds: float | None) -> Callable[[], object]:
        """Makes a function that has `on_timer` called on one of the threads, so many seconds after it was called (None:
        not at all), and replaces what was set before. It is C code, and not to be called after close() or abandon()."""
        return partial(_libc.timerfd_settime, self._timer_fd, 0, _spec(seconds), None)

    def new_timer(self, callback: Callable[[], None]) -> Callable[[float], None]:
        """Makes a timer: a function that has the callback called, on one of the threads, so many seconds after it was
        called, and replaces what was set before. It takes no lock: finalisers call it."""
        fd = self._own(_timerfd())
        self._callbacks[fd] = callback

        def set_timer(seconds: float) -> None:
            if self._wake_fd >= 0:  # else it is gone
                _libc.timerfd_settime(fd, 0, _spec(seconds), None)

        return set_timer

    def _on_timer(self) -> None:
        self.on_timer()

    def poll(self, timeout: float | None) -> list[Callable[[], None]]:
        """Waits for one event, a wake-up or the timeout; returns the callback of what is readable, if anything."""
        events = self._epoll.poll(timeout, 1)
        callback = self._callbacks.get(events[0][0]) if events else None
        return [] if callback is None else [callback]

    def close(self) -> None:
        """Closes the epoll, after the last thread has left poll()."""
        self.abandon()
        _retire(self._fds)

    def abandon(self) -> None:
        """In a fork of the process: lets go of the epoll, which is the parent's. The other descriptors stay open as
        long as this object: what else was copied with it may still write to them."""
        self._closed = True
        self._wake_fd = -1
        self._epoll.close()
        self._callbacks.clear()  # which refer to us, and would keep two descriptors until the next collection
        self.on_timer = _nothing


_WHILE = 1.0  # seconds
_MOST_RETIRED = 8  # pollers
_retired: deque[tuple[float, list[int]]] = deque()  # when to close them, and descriptors; its operations are atomic


def _retire(fds: list[int]) -> None:
    """Closes descriptors after a while, when the next poller is made or closed; sooner if many more were closed since,
    or the collector finds theirs.

    Not at once: a finaliser on another thread may be about to write to one, and the number must not be another file's.
    """
    _retired.append((clock.now() + _WHILE, fds))
    _close_retired()


def _close_retired() -> None:
    try:
        while _retired and (len(_retired) > _MOST_RETIRED or _retired[0][0] <= clock.now() or not _retired[0][1]):
            _close(_retired.popleft()[1])
    except IndexError:
        pass  # another thread does it


def _close(fds: list[int]) -> None:
    try:
        while True:
            os.close(fds.pop())
    except IndexError:
        pass


def _spec(seconds: float | None) -> _TimerSpec:
    nanoseconds = 0 if seconds is None else max(1, int(seconds * 1e9))  # 0 means never
    return _TimerSpec(0, 0, *divmod(nanoseconds, 10**9))


def _timerfd() -> int:
    fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    return fd


def _nothing() -> None:
    pass


# What a fork does to an epoll it does to its parent's: the two are one. So it lets go of it at once.
_pollers: weakref.WeakSet[Poller] = weakref.WeakSet()


def _in_child() -> None:
    _retired.clear()  # to be closed by the parent; the fork's copies go with their pollers
    for poller in list(_pollers):
        poller.abandon()


os.register_at_fork(after_in_child=_in_child)
