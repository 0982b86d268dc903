"""The threads of a worker: they wait for messages, read them, and run users' functions.

All idle threads sleep in the worker's poller. One that leaves it to work first makes sure that another one
stays, so there is always a thread that reads, whatever the functions do: wait for other calls, hold locks,
sleep. The number of threads follows the need; those with nothing to do end after a while.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from ..events import logger
from ..gradients.torch_modes import flushes_denormals, restore_defaults
from ..primitives import clock, current, torch_threads
from ..primitives.forks import leave_if_orphan
from ..primitives.torch_threads import add_follower, prepared, remove_follower
from ..transport.poller import Poller

Task = Callable[[], None]


class Threads:
    def __init__(
        self, name: str, poller: Poller, idle_timeout: float, on_start: Task, on_idle: Task | None = None
    ) -> None:
        self._name = name
        self._poller = poller
        self._idle_timeout = idle_timeout
        self._on_start = on_start  # runs first on each thread
        self._on_idle = on_idle  # runs now and then while there is nothing else to do; quick, and never raises
        self._flushes_denormals = flushes_denormals()  # on the thread that starts the worker, and so on all of these
        self._tasks: deque[Task] = deque()  # appended and taken on any thread; its operations are atomic
        self._lock = threading.Lock()  # guards all below
        self._idle = 0  # threads that wait for something to do, or are about to
        self._started = 0
        self._threads: set[threading.Thread] = set()
        self._starved = False  # the last thread that was to start could not
        self._closed = False
        _all.add(self)

    def start(self) -> None:
        """Starts the first thread: a message from outside finds it waiting."""
        with self._lock:
            if not self._threads and not self._closed:
                add_follower(self)
                self._spawn_locked()

    def submit(self, task: Task) -> None:
        """Runs a task on one of the threads; on the caller's, when they have ended. Takes the lock only to
        start a thread."""
        self._tasks.append(task)
        if not self._threads or self._starved:
            with self._lock:
                if not self._idle:
                    self._spawn_locked()
        self._poller.wake()
        if self._closed:
            self._run_rest()

    def submit_from_finaliser(self, task: Task) -> None:
        """Like submit, but takes no lock at all. With no thread running, the task waits for the next one."""
        self._tasks.append(task)
        self._poller.wake()

    def new_timer(self, task: Task) -> Callable[[float], None]:
        """Makes a timer: a function that has a task run on one of the threads, so many seconds after it was called. It
        takes no lock. With no thread running, the task waits for the next one."""
        return self._poller.new_timer(task)

    @property
    def count(self) -> int:
        return len(self._threads)

    def _spawn_locked(self) -> None:
        """Starts a thread. Where the system has none to give, the ones that run go on, and the next task, or the next
        thread that has nothing to do, tries again."""
        if self._closed:
            return
        self._started += 1
        name = f"telegrad-{self._name}-{self._started}"
        thread = threading.Thread(target=prepared(self._run), name=name, daemon=True)
        # Not yet idle, but on its way: counted before it runs, or every busy thread would start another one.
        self._threads.add(thread)
        self._idle += 1
        try:
            thread.start()
            self._starved = False
        except (RuntimeError, MemoryError) as error:
            self._threads.discard(thread)
            self._idle -= 1
            if not self._starved:
                self._starved = True
                logger.warning("worker %r: no thread could be started, trying again: %s", self._name, str(error))

    def _run(self) -> None:
        current.thread.critical = 1  # but for users' code, see interrupts.py
        current.thread.is_workers = True
        try:
            current.thread.flushes_denormals = self._flushes_denormals
            restore_defaults()
            self._on_start()
            while (found := self._wait()) is not None:
                for task in found:
                    if current.thread.times_set != torch_threads.times_set:
                        torch_threads.follow()
                    self._attempt(task)
                    del task  # what it holds must not live until the next one comes
                found = None
        except BaseException:  # tasks raise nothing; it came while the thread waited for one, and counted as idle
            leave_if_orphan()
            with self._lock:
                self._idle -= 1
            logger.exception("a thread of worker %r has ended", self._name)
        finally:
            leave_if_orphan()
            with self._lock:
                self._threads.discard(threading.current_thread())
            self._poller.wake()  # on closing, each thread that ends lets the next one go

    def _wait(self) -> list[Task] | None:
        """The next things to do; None if this thread should end. Counted as idle when called; when it returns, not."""
        idle_since = clock.now()
        while True:
            found: list[Task] | None = None
            if not self._closed:
                found = (self._tasks and self._take()) or self._poller.poll(self._idle_timeout)
                if not found and self._tasks:
                    found = self._take()
            with self._lock:
                if found or self._closed:
                    self._idle -= 1
                    if self._closed and not found:
                        return None
                    if not self._idle:
                        self._spawn_locked()
                    return found
                if clock.now() - idle_since < self._idle_timeout:
                    continue  # woken for something that another thread has taken
                if self._idle > 1 and not self._tasks:
                    self._idle -= 1
                    return None
            # The last one stays, and looks after things now and then.
            if self._on_idle is not None:
                self._on_idle()
            idle_since = clock.now()

    def _take(self) -> list[Task] | None:
        try:
            task = self._tasks.popleft()
        except IndexError:
            return None
        if self._tasks:
            self._poller.wake()
        return [task]

    def _attempt(self, task: Task) -> None:
        try:
            task()
        except BaseException as error:  # also a SystemExit: the thread is the worker's
            leave_if_orphan(error)
            logger.exception("a task of worker %r failed", self._name)
        finally:
            with self._lock:
                self._idle += 1

    def _run_rest(self) -> None:
        """Runs the tasks that no thread has taken: others may wait for them."""
        while (rest := self._take()) is not None:
            self._attempt(rest[0])

    def close(self, timeout: float) -> bool:
        """Ends the threads that are idle at once and the others when their task ends; waits for them.

        Returns whether all have ended.
        """
        with self._lock:
            self._closed = True
            threads = [t for t in self._threads if t is not threading.current_thread()]
        self._poller.wake()
        deadline = clock.now() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - clock.now()))
        self._run_rest()
        remove_follower(self)
        return not any(t.is_alive() for t in threads)

    def abandon(self) -> None:
        """In a fork: the only thread that may be there, the one that has forked, runs no other task."""
        self._lock = threading.Lock()
        self._closed = True
        self._tasks.clear()


_all: weakref.WeakSet[Threads] = weakref.WeakSet()


def _in_child() -> None:
    for threads in list(_all):
        threads.abandon()


os.register_at_fork(after_in_child=_in_child)
