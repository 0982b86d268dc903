"""Deep graphs, and how torch frees them.

torch frees nodes that Python has looked at by recursion, and a chain of some 40,000 overflows the stack. So where
Python has walked over many nodes, about one in a thousand gets a Break: it holds the nodes next to its own, and hands
them on when its own dies. These, and what is behind them, live until `free` lets go of them, one after the other. A
node dies only after all that lead to it, so no recursion comes past a Break, on whichever path.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ..primitives.interrupts import finaliser
from ..primitives.torch_threads import prepared

DEEP = 4096  # nodes; what is smaller is freed by recursion

# A multiplicative hash spreads numbers that follow each other evenly, and leaves no program in step with it.
HASH, BITS = 2654435761, (1 << 32) - 1
PICKED = (1 << 32) // 1024

_LONGEST = 10.0  # seconds until a thread that frees is between two nodes
_BREAK = "telegrad break"  # where a Break is, in the metadata of its node

_to_free: deque[list[Any]] = deque()  # handed on by Breaks; its single operations are atomic
_freeing = allocate_lock()  # held by the one thread that frees; never waited for, but at the end of the process
_is_over = False  # the process ends
# Called when there is something to free: each has free() called soon, on another thread. Replaced as a whole.
_wakes: tuple[Callable[[], object], ...] = ()


class Break:
    """On a node: the nodes next to it."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes

    @finaliser
    def __del__(self) -> None:
        _to_free.append(self._nodes)
        if _freeing.locked():
            return  # free() looks once more
        for wake in _wakes:
            wake()
            return
        start_new_thread(prepared(free), ())


def put_break(node: Any) -> None:
    metadata = node.metadata
    if _BREAK not in metadata:
        metadata[_BREAK] = Break([next for next, _ in node.next_functions if next is not None])


def brace(nodes: Iterable[Any]) -> None:
    """Puts Breaks on some of many nodes that Python has looked at. There may be None among them."""
    for node in nodes:
        if node is not None and node._sequence_nr() * HASH & BITS < PICKED:
            put_break(node)


def free() -> None:
    """Lets go of what Breaks have handed on, and with it of what further Breaks do."""
    while _to_free and not _is_over and _freeing.acquire(blocking=False):
        try:
            while _to_free and not _is_over:
                nodes = _to_free.popleft()
                while nodes:
                    nodes.pop()
        finally:
            _freeing.release()


def add_wake(wake: Callable[[], object]) -> None:
    global _wakes
    _wakes = (*_wakes, wake)


def remove_wake(wake: Callable[[], object]) -> None:
    global _wakes
    _wakes = tuple(other for other in _wakes if other is not wake)


def _in_child() -> None:
    """Forgets, in a fork, the threads that are not there."""
    global _wakes, _freeing
    _wakes = ()
    _freeing = allocate_lock()


os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    """Has nothing freed any more: Python ends threads wherever they are, and inside of a destructor of torch's that
    would end the process with an error. What is left goes with the process."""
    global _is_over
    _is_over = True
    _freeing.acquire(timeout=_LONGEST)  # for good
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_to_free))


atexit.register(_at_exit)
