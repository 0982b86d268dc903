"""Copies of buffers into one stretch of memory; large ones by several threads, where there are cores for it.

One thread copies 5 to 10 GB/s, a fraction of what the memory gives. A large copy is cut into pieces, which the caller
and up to three helpers take one by one. Nothing depends on a helper: one that is late, since the cores or the
interpreter lock are taken, finds no piece left, and the caller waits only for those that are at one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Sequence

from ..primitives import current
from ..primitives.interrupts import critical
from ..primitives.torch_threads import prepared
from .base import Buffer
from .shared_memory import parts

_UNLOCKED_FROM = 64 << 10  # bytes; a smaller copy is over sooner than the interpreter lock is released and taken
WORTH_HELP = 8 << 20  # bytes; waking the helpers takes as long as copying a MiB or two
_SMALLEST_PIECE = 1 << 20  # bytes; with smaller ones the threads would wait for the interpreter lock
_MOST_THREADS = 4  # more of them wait for the memory, and for each other
_IDLE = 1.0  # seconds after which a helper with nothing to do ends

_Move = tuple[int, int, int]  # where to, where from, how many bytes


def copy_all(buffers: Sequence[Buffer], memory: memoryview) -> list[Buffer]:
    """Copies buffers into memory, one after the other; returns their places."""
    copies = parts(memory, map(len, buffers))
    moves: list[_Move] = []
    nbytes = 0
    for copy, buffer in zip(copies, buffers, strict=True):
        length = len(buffer)
        if length < _UNLOCKED_FROM or (isinstance(buffer, memoryview) and buffer.readonly):
            copy[:] = buffer  # type: ignore[index]  # ctypes has no way to the address of read-only memory
        elif length < _SMALLEST_PIECE:
            ctypes.memmove(_address_of(copy), _address_of(buffer), length)
        else:
            moves.append((_address_of(copy), _address_of(buffer), length))
            nbytes += length
    _move_all(moves, nbytes, (buffers, memory))
    return copies


def copy_memory(target: int, source: int, nbytes: int, keep: object) -> None:
    """Copies from address to address. `keep` has what the memory belongs to."""
    _move_all([(target, source, nbytes)], nbytes, keep)


def _move_all(moves: list[_Move], nbytes: int, keep: object) -> None:
    if nbytes >= WORTH_HELP and (threads := how_many_threads()) > 1:
        with critical():
            _Copy(moves, nbytes // (2 * threads), keep).run(threads)
    else:
        for move in moves:
            ctypes.memmove(*move)


def _address_of(buffer: Buffer) -> int:
    if isinstance(buffer, bytes):
        return ctypes.cast(buffer, ctypes.c_void_p).value  # type: ignore[arg-type, return-value]
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def how_many_threads() -> int:
    """How many threads make a large copy; half of the cores are left to others."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)


class _Copy:
    """One copy by several threads: list.pop() decides which of them has a piece."""

    def __init__(self, moves: list[_Move], piece: int, keep: object) -> None:
        self._keep: object = keep
        size = -(-piece // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pieces = [
            (target + at, source + at, min(size, nbytes - at))
            for target, source, nbytes in moves
            for at in range(0, nbytes, size)
        ]
        self._pieces.reverse()
        self._helping: list[threading.Lock] = []  # each is held by a helper while it works

    def run(self, threads: int) -> None:
        first = self._pieces.pop()
        _helpers.call(self, threads - 1)
        try:
            ctypes.memmove(*first)
            if not self._helping:
                self._join_pieces()
            self._work()
        finally:
            # No helper takes a piece from here on. Also after an exception, of a signal's handler: what is copied may
            # be changed or freed as soon as this returns.
            self._pieces.clear()
            for working in self._helping:
                with working:
                    pass
            self._keep = None  # a helper that comes too late must not hold it

    def _join_pieces(self) -> None:
        """Makes one piece of those that adjoin: no helper has come yet, since other threads have the interpreter lock,
        say. Then each further piece would cost the caller another wait for that lock."""
        joined: list[_Move] = []
        with contextlib.suppress(IndexError):
            while True:
                target, source, nbytes = self._pieces.pop()
                if joined and joined[-1][0] + joined[-1][2] == target and joined[-1][1] + joined[-1][2] == source:
                    target, source, nbytes = joined[-1][0], joined[-1][1], joined.pop()[2] + nbytes
                joined.append((target, source, nbytes))
        self._pieces.extend(reversed(joined))

    def help(self) -> None:
        working = threading.Lock()
        with working:
            self._helping.append(working)  # before it takes a piece: the caller looks here after it took the last
            self._work()

    def _work(self) -> None:
        pieces, move = self._pieces, ctypes.memmove  # which lets go of the interpreter lock
        with contextlib.suppress(IndexError):
            while True:
                move(*pieces.pop())


class _Helpers:
    """Threads that help with copies: as many as were asked for at once, started when they are."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Copy] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()  # its single operations are atomic

    def call(self, copy: _Copy, count: int) -> None:
        for _ in range(count):
            self._calls.put(copy)
        # Two callers at once may start one too many, which ends when it is idle.
        while len(self._threads) < count and self._start():
            pass

    def _start(self) -> bool:
        thread = threading.Thread(target=prepared(self._run), name="telegrad-copy", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # there is no thread to be had: the caller copies alone
            self._threads.discard(thread)
            return False
        return True

    def _run(self) -> None:
        current.thread.critical = 1
        try:
            while True:
                # A call that comes while the last helper ends is left to the caller.
                self._calls.get(timeout=_IDLE).help()
        except queue.Empty:
            pass
        finally:
            self._threads.discard(threading.current_thread())


_helpers = _Helpers()


def _in_child() -> None:
    global _helpers
    _helpers = _Helpers()  # a fork has none of the threads


os.register_at_fork(after_in_child=_in_child)
