"""A bench for code that several threads run: one thread at a time, in every order, on a clock of its own.

    world = World(switches, watched modules)     which order
    world.spawn(function)                        a thread of the world
    world.run()                                  to the end; a deadlock is an error that says who waits where

Threads of the world are real threads of which one runs; the others are held. A thread runs line after line of the
watched modules, and after so many lines as the schedule says another one goes on. It also stops where it would block:
in a Lock of the world, in an epoll, in sleep(). When no thread can go on the clock jumps to the next deadline, so
nothing here ever takes time. `orders()` runs a program in all orders with one switch, and in as many as asked for
with two.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from telegrad.primitives import clock

FOREVER = float("inf")
Check = Callable[[], bool]


class DeadlockError(AssertionError):
    pass


class _Thread:
    def __init__(self, world: World, name: str, function: Callable[[], Any]) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.blocked: Check | None = None  # what it waits for
        self.deadline = FOREVER
        self.where = ""
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.made: NewThread | None = None
        self.thread = threading.Thread(target=self._run, args=(world, function), name=name, daemon=True)

    def _run(self, world: World, function: Callable[[], Any]) -> None:
        self.go.acquire()
        world._mine.current = self
        if world.dead is None:
            sys.settrace(world._trace)
            try:
                self.result = function()
            except BaseException as error:
                self.error = error
            finally:
                sys.settrace(None)
        self.ended = True
        world._next(self)


class World:
    """`switches` are pairs: after so many lines, go on with the n-th of the other threads that can."""

    def __init__(self, switches: Sequence[tuple[int, int]] = (), *watched: ModuleType) -> None:
        self._switches = list(switches)
        self._files = {module.__file__ for module in watched}
        self._mine = threading.local()
        self._over = threading.Event()
        self.threads: list[_Thread] = []
        self.lines = 0  # that were run
        self.now = 1000.0
        self.dead: DeadlockError | None = None
        self.at_line: Callable[[int, str], None] | None = None  # gets each line's number, and its thread's name
        self._fds = itertools.count(100)
        self.epolls: list[Epoll] = []
        self.counts: dict[int, int] = {}  # of eventfds
        self.readable: set[int] = set()  # descriptors of scripted connections

    # -- threads ---------------------------------------------------------------------------------------

    def spawn(self, function: Callable[[], Any], name: str = "") -> _Thread:
        thread = _Thread(self, name or getattr(function, "__name__", "thread"), function)
        self.threads.append(thread)
        thread.thread.start()
        return thread

    def run(self) -> None:
        """Runs all threads to their end."""
        self.threads[0].go.release()
        if not self._over.wait(30):
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            raise AssertionError("a thread of the world runs for ever")
        for thread in self.threads:
            thread.go.release()
            thread.thread.join(10)
        if self.dead is not None:
            raise self.dead

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files or frame.f_code.co_name == "__del__":
            return None  # the collector runs finalisers when it likes: they are not part of any order
        if event == "line":
            self._line(frame)
        return self._trace

    def _line(self, frame: FrameType) -> None:
        self.lines += 1
        me: _Thread = self._mine.current
        if self.at_line is not None:
            self.at_line(self.lines, me.name)
        if self._switches and self.lines >= self._switches[0][0]:
            _, choice = self._switches.pop(0)
            others = [t for t in self.threads if t is not me and self._can_go_on(t)]
            if others:
                me.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                self._hand_to(me, others[choice % len(others)])

    def _can_go_on(self, thread: _Thread) -> bool:
        return not thread.ended and (thread.blocked is None or thread.blocked() or thread.deadline <= self.now)

    def _hand_to(self, me: _Thread, other: _Thread) -> None:
        if other is not me:
            other.go.release()
            me.go.acquire()
        if self.dead is not None:
            raise self.dead

    def _next(self, me: _Thread) -> None:
        """This thread cannot go on, or has ended: another one does."""
        ready = [t for t in self.threads if self._can_go_on(t)]
        if not ready:
            waiting = [t for t in self.threads if not t.ended]
            soonest = min((t.deadline for t in waiting), default=FOREVER)
            if soonest < FOREVER:
                self.now = soonest
                ready = [t for t in waiting if t.deadline <= soonest]
            elif waiting and self.dead is None:
                told = ", ".join(f"{t.name} in {t.where}" for t in waiting)
                self.dead = DeadlockError(f"all wait for ever: {told}")
            if not ready:
                self._over.set()
                if not me.ended:
                    me.go.acquire()
                    if self.dead is not None:
                        raise self.dead
                return
        if me.ended:
            ready[0].go.release()
        else:
            self._hand_to(me, ready[0])

    def block(self, until: Check, timeout: float | None) -> bool:
        """Waits for a condition, on the world's clock; whether it holds."""
        me: _Thread = self._mine.current
        deadline = FOREVER if timeout is None else self.now + max(0.0, timeout)
        while not until():
            if self.now >= deadline:
                return False
            me.blocked, me.deadline = until, deadline
            frame = sys._getframe(1)
            while frame.f_code.co_filename == __file__ and frame.f_back is not None:
                frame = frame.f_back
            me.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
            self._next(me)
            me.blocked, me.deadline = None, FOREVER
        return True

    # -- what modules of telegrad's get instead of the system's ----------------------------------------

    def put_into(self, monkeypatch: Any, *modules: ModuleType) -> None:
        """Replaces the system in modules: time, threading, select and os, as far as each has them."""
        monkeypatch.setattr(clock, "now", lambda: self.now)
        timing = SimpleNamespace(perf_counter=lambda: self.now)
        thread = SimpleNamespace(
            Lock=lambda: Lock(self), RLock=threading.RLock, Thread=partial(NewThread, self),
            current_thread=lambda: self._mine.current.made, get_ident=lambda: id(self._mine.current),
        )  # fmt: skip
        epoll = SimpleNamespace(epoll=lambda: Epoll(self), EPOLLIN=select.EPOLLIN, EPOLLRDHUP=select.EPOLLRDHUP)
        system = SimpleNamespace(
            eventfd=self._eventfd, eventfd_write=self._write, eventfd_read=self._read, close=lambda fd: None,
            cpu_count=lambda: 1, EFD_NONBLOCK=0, EFD_CLOEXEC=0, sched_yield=lambda: None,
        )  # fmt: skip
        for module in modules:
            for name, instead in (("time", timing), ("threading", thread), ("select", epoll), ("os", system)):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, instead)

    def start(self, thread: NewThread) -> None:
        """Starts a thread that a watched module has made. Tests may replace it."""
        self.spawn(thread.target, thread.name).made = thread

    def new_fd(self) -> int:
        return next(self._fds)

    def _eventfd(self, count: int, flags: int) -> int:
        fd = self.new_fd()
        self.counts[fd] = count
        return fd

    def _write(self, fd: int, count: int) -> None:
        self.counts[fd] += count

    def _read(self, fd: int) -> int:
        if not self.counts[fd]:
            raise BlockingIOError
        count, self.counts[fd] = self.counts[fd], 0
        return count

    def is_readable(self, fd: int) -> bool:
        if fd in self.readable or self.counts.get(fd):
            return True
        return any(epoll.fd == fd and epoll.events() for epoll in self.epolls)


class NewThread:
    """What threading.Thread() makes in a watched module."""

    def __init__(self, world: World, target: Callable[[], Any], name: str = "", daemon: bool = True) -> None:
        self.target, self.name, self._world = target, name, world

    def start(self) -> None:
        self._world.start(self)


class Lock:
    def __init__(self, world: World) -> None:
        self._world = world
        self._taken = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._taken:
            limit = None if timeout < 0 else timeout
            if not blocking or not self._world.block(lambda: not self._taken, limit):
                return False
        self._taken = True
        return True

    def release(self) -> None:
        if not self._taken:
            raise RuntimeError("release unlocked lock")
        self._taken = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Epoll:
    """Level-triggered, but for descriptors with EPOLLONESHOT."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fd = world.new_fd()
        self._watched: dict[int, int] = {}
        self._closed = False
        world.epolls.append(self)

    def fileno(self) -> int:
        return self.fd

    def register(self, fd: int, events: int) -> None:
        self._watched[fd] = events

    def modify(self, fd: int, events: int) -> None:
        if fd not in self._watched:
            raise FileNotFoundError(fd)
        self._watched[fd] = events

    def unregister(self, fd: int) -> None:
        if self._watched.pop(fd, None) is None:
            raise FileNotFoundError(fd)

    def events(self) -> list[tuple[int, int]]:
        watched = list(self._watched.items())
        return [(fd, 1) for fd, events in watched if events & select.EPOLLIN and self.world.is_readable(fd)]

    def poll(self, timeout: float | None, most: int = 16) -> list[tuple[int, int]]:
        if self._closed:
            raise ValueError("I/O operation on closed epoll object")
        if timeout != 0:
            self.world.block(lambda: bool(self._closed or self.events()), timeout)
        found = self.events()[:most]
        for fd, _ in found:
            if self._watched[fd] & select.EPOLLONESHOT:
                self._watched[fd] = select.EPOLLONESHOT
        return found

    def close(self) -> None:
        self._closed = True


def orders(
    program: Callable[[Sequence[tuple[int, int]]], int], *, threads: int, two_switches: int = 0, seed: int = 1
) -> Iterator[int]:
    """Runs a program, which takes switches and returns how many lines it ran: as it is, with one switch after each
    line to each of the other threads, and in so many random orders with two. Yields after each run."""
    lines = program(())
    yield lines
    for at in range(1, lines + 1):
        for choice in range(threads - 1):
            program([(at, choice)])
            yield lines
    chooser = random.Random(seed)
    for _ in range(two_switches):
        first, second = sorted(chooser.choices(range(1, lines + 20), k=2))
        program([(first, chooser.randrange(threads - 1)), (second, chooser.randrange(threads - 1))])
        yield lines
