"""Which file descriptors are readable: one epoll per worker, on which all of its idle threads wait.

The kernel wakes one thread per event, the one that went to sleep last. Each descriptor is armed for one
event at a time (EPOLLONESHOT), so one thread gets it, and arming it again passes the reading on to the
next thread with no lock and no wake-up of our own.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable

_libc = ctypes.PyDLL(None)  # these calls return at once, so the interpreter lock is kept


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_libc.timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TimerSpec), ctypes.c_void_p)

# Without ONESHOT a descriptor whose peer hung up would be reported again and again, whatever it is armed for.
DISARMED = select.EPOLLONESHOT
ARMED = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class Poller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.watch = self._epoll.modify  # (descriptor, ARMED or DISARMED): waits for one event on it, or for none
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._closed = False
        # Edge-triggered and never read: each write wakes one sleeping thread, or the next that goes to sleep.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._timer_fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._timer_fd, select.EPOLLIN | select.EPOLLET)
        self._callbacks[self._timer_fd] = self._on_timer
        self.on_timer: Callable[[], None] = _nothing

    def __del__(self) -> None:
        # Not in close(): a finaliser may be about to wake us, and the number must still be ours then.
        os.close(self._timer_fd)
        os.close(self._wake_fd)
        self._wake_fd = -1  # finalisers of one cycle of garbage run in any order

    def register(self, fd: int, callback: Callable[[], None]) -> None:
        """Knows the descriptor, not armed yet."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, DISARMED)

    def unregister(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None and not self._closed:
            self._epoll.unregister(fd)

    def wake(self) -> None:
        """Lets one thread out of poll(). Takes no lock: finalisers call it."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def set_timer(self, seconds: float) -> None:
        """Calls `on_timer` on one of the threads after so long; replaces what was set before."""
        _libc.timerfd_settime(self._timer_fd, 0, _TimerSpec(0, 0, 0, int(seconds * 1e9)), None)

    def _on_timer(self) -> None:
        self.on_timer()

    def poll(self, timeout: float | None) -> list[Callable[[], None]]:
        """Waits for one event, a wake-up or the timeout; the callback of what is readable, if anything."""
        events = self._epoll.poll(timeout, 1)
        return [callback for fd, _ in events if (callback := self._callbacks.get(fd))]

    def close(self) -> None:
        """After the last thread has left poll()."""
        self._closed = True
        self._epoll.close()


def _nothing() -> None:
    pass
