"""The board: the bytes by which the two ends of a device lane lend places in device memory to each other. And the
thread on which device memory is given back.

A board is a small piece of shared memory, made by the end that fills the places; the other end opens it through /proc,
where only the same user may. Each place has two bytes in it. Where the first one is, is its number:

    FREE     not in use; the event was recorded by the end that fills
    NAMED    a message names it
    ARRIVED  the other end has read that message
    TAKEN    ... has seen the event, and copies out
    READ     ... has recorded the event behind its copy: as FREE, once the event is done
    DROPPED  the end that fills does not use it any more
    CLOSED   the other end has closed it

The end that fills makes NAMED of FREE and READ, and DROPPED of those; the other end makes all the other changes. To
change one byte is all that a finaliser may do.

The second one, so many bytes after it (COPY), is written by the end that fills alone. A message is written before what
it names is copied, so that its receiver wakes and decodes meanwhile:

    NOT_YET  the copy into a place that is NAMED is not queued yet
    QUEUED   it is; from here on the event says whether it is done
    FAILED   it will not be
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import time
import weakref
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..errors import text_of
from ..events import logger
from ..primitives import clock, current
from ..primitives.interrupts import blocking
from ..primitives.torch_threads import prepared
from .shared_memory import _SEALS

FREE, NAMED, ARRIVED, TAKEN, READ, DROPPED, CLOSED = range(7)
NOT_YET, QUEUED, FAILED = range(3)
PLACES_END = COPY = 1 << 16  # the first bytes of places are before it, the second ones behind it
BOARD_BYTES = 2 * PLACES_END
TOKEN_BYTES = 16
READER_CLOSED = TOKEN_BYTES  # where the byte is that says, if not 0, that the other end has closed all places
FIRST_PLACE = 64  # the bytes before it are no places

_LONGEST_PAUSE = 0.05  # seconds between two looks of the thread
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # whatever a peer names: opening it does not wait


class Board:
    """A board, at either end. `fd` is -1 at the end that has opened it."""

    def __init__(self, mapped: int, fd: int = -1) -> None:
        self.fd = fd
        # It has no finaliser that the garbage collector could run before those that still write to it.
        self.bytes: mmap.mmap | bytearray = mmap.mmap(mapped, BOARD_BYTES)
        of_this_process.add(self)

    @classmethod
    def make(cls) -> Board:
        """A new one, with a token at its beginning.

        Raises:
            OSError: there are no more descriptors, or there is no more memory.
        """
        fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, BOARD_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # it must never shrink under the other end's feet
            os.pwrite(fd, secrets.token_bytes(TOKEN_BYTES), 0)
            return cls(fd, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, pid: int, fd: int, token: bytes) -> Board:
        """The board of another process, by its descriptor there.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is another one, or none.
        """
        ours = os.open(f"/proc/{pid}/fd/{fd}", _FLAGS)
        try:
            try:
                sealed = fcntl.fcntl(ours, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError:  # no memory at all, but a file, a socket ...
                sealed = False
            if not sealed or os.fstat(ours).st_size != BOARD_BYTES:
                raise ValueError(f"descriptor {fd} of process {pid} is no board")
            if len(token) != TOKEN_BYTES or os.pread(ours, TOKEN_BYTES, 0) != token:
                raise ValueError(f"descriptor {fd} of process {pid} is another board: the process numbers differ")
            return cls(ours)
        finally:
            os.close(ours)

    @property
    def token(self) -> bytes:
        return bytes(self.bytes[:TOKEN_BYTES])

    def close(self) -> None:
        """Closes the descriptor. The bytes stay for as long as the board is referred to. Any number of times."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def abandon(self) -> None:
        """In a fork: nothing that is done to this copy reaches the other end."""
        self.bytes = bytearray(BOARD_BYTES)
        self.close()


class Janitor:
    """Runs what may wait for a device, on a thread that lives while there is something to do.

    A job returns whether it is done; else it runs again, a moment later. It ends by itself in bounded time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._jobs: deque[Callable[[], bool]] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], bool]) -> None:
        """Has a job run, once more if it runs already. Threads that read call it, so it waits for nothing.
        Thread.start() waits for the thread to begin, and so yet another one calls that."""
        with self._lock:
            if job not in self._jobs:
                self._jobs.append(job)
            if self._thread is None:
                thread = threading.Thread(target=prepared(self._run), name="telegrad device memory", daemon=True)
                try:
                    start_new_thread(prepared(self._start, thread), ())
                except RuntimeError:  # the system has no thread to give: the next job tries again
                    return
                self._thread = thread

    def _start(self, thread: threading.Thread) -> None:
        current.thread.critical = 1  # as in _run
        try:
            thread.start()
        except RuntimeError:  # no second thread
            with self._lock:
                self._thread = None

    def wait(self, timeout: float) -> None:
        """Waits until there is nothing to do any more, or for so long."""
        deadline = clock.now() + timeout
        while self._thread is not None and clock.now() < deadline:
            blocking(time.sleep, 2e-3)

    def _run(self) -> None:
        current.thread.critical = 1  # a finaliser that runs in here must not make a call under a lock
        pause = 1e-3
        waker = threading.Event()  # which is never set
        while True:
            with self._lock:
                jobs = list(self._jobs)
                self._jobs.clear()
                if not jobs:
                    self._thread = None
                    return
            again = [job for job in jobs if not self._is_done(job)]
            del jobs
            if again:
                waker.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                with self._lock:
                    self._jobs.extend(job for job in again if job not in self._jobs)
            del again

    def _is_done(self, job: Callable[[], bool]) -> bool:
        try:
            return job()
        except Exception as error:
            logger.warning("device memory was not given back: %s", text_of(error))
            return True

    def abandon(self) -> None:
        """In a fork: the thread is not here, and what it had to do is the parent's."""
        self._lock = threading.Lock()
        self._jobs = deque()
        self._thread = None


class _Forkable(Protocol):
    def abandon(self) -> None: ...


of_this_process: weakref.WeakSet[_Forkable] = weakref.WeakSet()
janitor = Janitor()
of_this_process.add(janitor)


def _in_child() -> None:
    for one in list(of_this_process):
        one.abandon()


os.register_at_fork(after_in_child=_in_child)
