"""The read lease: the right to read the connections of one worker. One thread at a time has it.

    try_take()   a thread that waits for a message takes the lease, if it is free
    on_event     an idle thread of the worker takes it, when something has arrived and the lease was free
    wait()       the holder waits for connections that have something to read
    Turn         the holder keeps the lease while it does other work, and can be relieved of it
    release()    from here on an idle thread is woken for what arrives

There is always a thread that reads or will be woken to read, so no message is left lying.

# Note [an epoll inside of an epoll]
The lease has an epoll of its own, the inner one, with all connections: level-triggered, never armed or disarmed. The
inner epoll's descriptor is registered in the worker's poller, the outer epoll, for one event at a time. So the lease
costs one lock and one epoll_ctl to take, however many connections there are, and idle threads, which sleep in the
outer epoll, are not woken for what the holder reads. Connections without a descriptor (inproc) ring a bell: an eventfd
in the inner epoll, with a queue beside it. The bell also wakes the holder for other reasons.

# Note [who may do what, and when]
holder       wait(), Connection.receive(), release(). Users' code runs only after release(), or inside of a Turn that
             was left. An exception, Ctrl-C among them, leaves the lease with the holder, which must release it.
any thread   try_take(), add(), remove(), ring(), run_unread(), and Turn.relieve()
run_unread   A connection's descriptor may be closed only while no thread is inside of receive(): the number would be
             given to another connection. So the closing is left to the holder, which comes round because the bell
             rings; or it is done at once, where the lease is free. remove() comes first, so that the connection is
             not found again.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import text_of
from ..events import log_by
from ..primitives import clock, current
from ..primitives.interrupts import blocking
from .poller import ARMED, DISARMED, Poller

if TYPE_CHECKING:
    from ..primitives.waiter import Waiter
    from .base import Connection

PATIENCE = 5e-3  # seconds that a thread may keep the lease while it does other work, before it is relieved
_LIVELY = 1e-3  # messages at most this many seconds apart count as close
# Beside devices work of theirs, and hops to threads of torch's, lie between two messages: both limits are so many times
# as long there. On an H200, with both settings in turns in the same processes, passes through ten chained calls took 4
# to 10 % less time in each of four runs, those through one call up to 4 % less, and calls as much as before.
_SPIN_BESIDE_DEVICES, _LIVELY_BESIDE_DEVICES = 3.5, 5
# Two looks of a thread that spins are microseconds apart, unless another thread has its core. Now and then that is the
# system's own work. But if it happens twice within a moment others want the core, and spinning only puts this thread
# behind those that sleep. So no thread of the worker spins for a while: for twice as long as the last time, if it is
# disturbed again soon.
_DISTURBED, _MOMENT = 0.3e-3, 0.05
_CALM, _LONGEST_CALM = 0.2, 3.2
_AT_ONCE = 16  # connections that one look finds
_READABLE = select.EPOLLIN | select.EPOLLRDHUP
_NONE: list[Any] = []


class ReadLease:
    """One worker's. `on_readable` is called with the lease held, on an idle thread, when something has arrived.
    `submit` has another thread run a task."""

    def __init__(
        self,
        poller: Poller,
        spin: float = 0.0,
        submit: Callable[[Callable[[], None]], object] = lambda task: task(),
    ) -> None:
        self.on_readable: Callable[[], None] = self.release
        self._submit = submit
        self.max_spin = spin if (os.cpu_count() or 1) > 1 else 0.0
        self._close_by = _LIVELY
        self._no_devices: list[None] = [None]  # until there are; list.pop decides which thread is first
        self._poller = poller
        self._lock = threading.Lock()  # the lease itself: guards receive() of all connections, and the five below
        self._lively = True  # the last message followed the one before it closely
        self._last = 0.0
        self._no_spin_until = self._calm = 0.0  # seconds; the second is how long the last time without spinning was
        self._disturbed_at = float("-inf")
        self._inner = select.epoll()
        self._fd = self._inner.fileno()
        self._poll = self._inner.poll
        self._set = poller.watch
        # The single operations on these are atomic:
        self._by_fd: dict[int, Connection] = {}
        self._rung: deque[Connection] = deque()  # connections that have rung the bell
        self._unread: deque[Callable[[], None]] = deque()  # see run_unread
        self._is_rung = False
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        poller.own(self._bell)
        self._inner.register(self._bell, select.EPOLLIN)
        self.turn: Turn | None = None  # the last one that began
        self.timer_at = 0.0  # when the timer rings that may relieve a turn; 0: it is not set
        self.start_timer, self._stop_timer = poller.timer(PATIENCE), poller.timer(None)
        poller.register(self._fd, self._on_event)
        poller.on_timer = self._on_timer
        self._set(self._fd, ARMED)
        _leases.add(self)

    # -- taking and releasing --------------------------------------------------------------------------

    def try_take(self) -> bool:
        """Takes the lease, if no thread has it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._set(self._fd, DISARMED)
        except (OSError, ValueError):
            pass  # the worker has closed
        return True

    def release(self) -> None:
        """Gives the lease back. Armed after the release: a thread that is woken before it would find the lease taken,
        and leave."""
        if self._unread:
            self._run_unread()
        if self.timer_at:
            # Nobody is to be relieved: a timer that rings would wake a thread for nothing. First the timer, then the
            # note of it: one that another thread is about to set (_on_timer) must not be stopped and yet be noted.
            self._stop_timer()
            self.timer_at = 0.0
        self._lock.release()
        try:
            self._set(self._fd, ARMED)
        except (OSError, ValueError):
            pass
        if self._unread:
            self._settle()

    def _on_event(self) -> None:
        """On an idle thread. The event has disarmed the descriptor."""
        if self._lock.acquire(blocking=False):
            self.on_readable()

    # -- connections -----------------------------------------------------------------------------------

    def add(self, connection: Connection) -> None:
        """Reads a connection that has a descriptor, from here on."""
        self._by_fd[connection.fd] = connection
        try:
            self._inner.register(connection.fd, _READABLE)
        except BaseException:
            self._by_fd.pop(connection.fd, None)
            raise

    def remove(self, connection: Connection) -> None:
        """Reads a connection no more. Any number of times, and before its descriptor is closed."""
        if self._by_fd.get(connection.fd) is connection:
            # In this order: as long as the epoll finds it, the holder must find the connection, and hear of its end.
            try:
                self._inner.unregister(connection.fd)
            except (OSError, ValueError):
                pass  # another thread removes it, too; or the worker has closed
            self._by_fd.pop(connection.fd, None)

    def ring(self, connection: Connection | None = None) -> None:
        """Wakes the holder, or an idle thread; for a connection without a descriptor, when it has something to read."""
        if connection is not None:
            self._rung.append(connection)
        if not self._is_rung:
            self._is_rung = True
            os.eventfd_write(self._bell, 1)

    def run_unread(self, task: Callable[[], None]) -> None:
        """Runs a quick task while no thread reads: now, or when the holder comes round."""
        self._unread.append(task)
        self._settle()

    def _settle(self) -> None:
        # The holder looks for tasks before it releases, and again after: one of the two threads sees the other.
        if self.try_take():
            self.release()
        elif self._unread:
            self.ring()

    def _run_unread(self) -> None:
        while self._unread:
            task = self._unread.popleft()  # the holder's alone
            try:
                task()
            except Exception as error:
                text = "a connection could not be closed: %s"
                log_by(self._submit, logging.ERROR, text, f"{type(error).__name__}: {text_of(error)}")

    # -- waiting ---------------------------------------------------------------------------------------

    @property
    def linger(self) -> float:
        """How many seconds a thread that has read should wait for the next message before it does something else; 0
        where messages are far apart."""
        return self.max_spin if self._lively and clock.now() >= self._no_spin_until else 0.0

    def expect_devices(self) -> None:
        """Spins for longer from here on: tensors on devices come and go. Any number of times, from any thread."""
        try:
            self._no_devices.pop()
        except IndexError:
            return
        self.max_spin *= _SPIN_BESIDE_DEVICES
        self._close_by *= _LIVELY_BESIDE_DEVICES

    def wait(self, timeout: float | None, waiter: Waiter | None = None) -> list[Connection]:
        """The connections that have something to read. Waits up to `timeout` seconds (0: not at all, None: for ever),
        or until `waiter` is done. The caller holds the lease, and an interrupt leaves it with the caller."""
        poll = self._poll
        try:
            events = poll(0, _AT_ONCE)
            now = clock.now()
            if not events:
                until = None if timeout is None else now + timeout
                # Spinning pays where messages follow each other closely, and costs a core elsewhere.
                spin_until = now + self.max_spin if self._lively and now >= self._no_spin_until else 0.0
                while not events:
                    if (waiter is not None and waiter.done) or (until is not None and now >= until):
                        return _NONE
                    if now >= spin_until:
                        events = self._block(None if until is None else until - now, waiter)
                        now = clock.now()
                        continue
                    os.sched_yield()
                    events = poll(0, _AT_ONCE)
                    before, now = now, clock.now()
                    if now - before > _DISTURBED:
                        spin_until = 0.0
                        self._calm_down(now)
        except (OSError, ValueError):
            if not self._closed:
                raise
            return _NONE
        self._lively = now - self._last < self._close_by
        self._last = now
        found = []
        for fd, _ in events:
            if (connection := self._by_fd.get(fd)) is not None:
                found.append(connection)
        if len(found) != len(events) or self._is_rung:
            self._answer_bell(found)
        return found

    def _calm_down(self, now: float) -> None:
        """A thread that spun was disturbed."""
        before, self._disturbed_at = self._disturbed_at, now
        if now - before > _MOMENT:
            return
        again = now - self._no_spin_until < self._calm
        self._calm = min(2 * self._calm, _LONGEST_CALM) if again else _CALM
        self._no_spin_until = now + self._calm

    def _block(self, timeout: float | None, waiter: Waiter | None) -> list[tuple[int, int]]:
        if waiter is None:
            return blocking(self._poll, timeout, _AT_ONCE)
        waiter.wakes.append(self.ring)
        try:
            return _NONE if waiter.done else blocking(self._poll, timeout, _AT_ONCE)
        finally:
            # Or this thread, when it completes what it waits for itself, would ring, and wake another one for nothing.
            try:
                waiter.wakes.remove(self.ring)
            except ValueError:
                pass  # it rings

    def _answer_bell(self, found: list[Connection]) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            pass  # it did not ring; or it is just about to, and then rings in vain
        # First this, then the queues: a thread that appends and finds the bell still rung is seen.
        self._is_rung = False
        if self._unread:
            self._run_unread()
        rung: dict[Connection, None] = {}
        while self._rung:
            rung[self._rung.popleft()] = None
        found.extend(rung)

    # -- relief ----------------------------------------------------------------------------------------

    def _on_timer(self) -> None:
        turn = self.turn
        if turn is None or not turn.is_away:
            return
        now = clock.now()
        if now - turn.since >= PATIENCE * 0.9:
            turn.relieve()
        else:
            self.timer_at = now + PATIENCE
            self.start_timer()

    def relieve(self) -> None:
        """Relieves the thread that keeps the lease while it does other work, if there is one."""
        if self.turn is not None:
            self.turn.relieve()

    # -- life ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """After the last connection was disposed of. A thread that still waits is let go."""
        self.ring()
        self.run_unread(self._close)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.start_timer = self._stop_timer = _nothing
            self._is_rung = True  # nobody rings any more
            self._poller.unregister(self._fd)
            self._inner.close()
            self.turn = None
            self.on_readable = _nothing

    def abandon(self) -> None:
        """In a fork of the process: lets go of the copies of descriptors. The epoll itself is the parent's."""
        self._lock = threading.Lock()
        self._unread.clear()
        if self.turn is not None:
            self.turn.abandon()
        if not self._closed:
            self._closed = True
            self.start_timer = self._stop_timer = _nothing
            self._inner.close()
            self._by_fd.clear()


class Turn:
    """One thread's time with the lease, over several reads and other work in between.

    Most functions are quick: to wake another thread for each message, or to release the lease each time, would cost
    more than they do. So the thread keeps the lease while it runs functions, and is relieved of it as soon as
    one turns out not to be quick: when it makes a call of its own, when it took long the last time, or when a timer
    finds it still at it. A relieved thread finishes its function; the lease, and the messages that were read and not
    begun, go to other threads.
    """

    __slots__ = ("_away", "_hand_on", "_lease", "since", "waiting")

    def __init__(self, lease: ReadLease, hand_on: Callable[[Any], None]) -> None:
        """The calling thread holds the lease."""
        self._lease = lease
        self._hand_on = hand_on
        self._away: list[None] = []  # not empty: the thread may be relieved. list.pop decides which thread is first
        self.since = 0.0
        self.waiting: deque[Any] = deque()  # messages that were read and not yet begun
        lease.turn = self
        current.thread.relieve = self.relieve

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def leave(self) -> None:
        """Before other work: from here on the thread can be relieved."""
        self.since = clock.now()
        self._away.append(None)
        now = clock.now()  # after that: a timer that rang before it has not seen this thread
        lease = self._lease
        # Not for each message: a timer that is set may ring early for this one, and is then set again.
        if now >= lease.timer_at:
            lease.timer_at = now + PATIENCE
            lease.start_timer()

    def take_back(self) -> bool:
        """After other work: whether the thread still has the lease. Then it cannot be relieved until `leave`."""
        try:
            self._away.pop()
        except IndexError:
            return False
        return True

    def relieve(self) -> None:
        """Releases the lease, if the thread is at other work. From any thread, any number of times."""
        try:
            self._away.pop()
        except IndexError:
            return
        self._lease.release()
        self.pass_waiting_on()

    def pass_waiting_on(self) -> None:
        """Has other threads run what was read and not begun."""
        while self.waiting:
            try:
                message = self.waiting.popleft()
            except IndexError:
                return
            self._hand_on(message)

    def abandon(self) -> None:
        """In a fork: neither the lease nor the messages are this thread's any more."""
        self._away.clear()
        self.waiting.clear()

    def end(self) -> None:
        """Ends the turn, and releases the lease if the thread still has it."""
        current.thread.relieve = None
        if self._away and self.take_back():
            self._lease.release()


_leases: weakref.WeakSet[ReadLease] = weakref.WeakSet()


def _in_child() -> None:
    for lease in list(_leases):
        lease.abandon()


def _nothing() -> None:
    pass


os.register_at_fork(after_in_child=_in_child)
