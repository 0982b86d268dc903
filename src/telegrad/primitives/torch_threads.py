"""torch's settings on the threads that telegrad starts.

torch keeps some of its settings per thread, docs/threads-and-seeds.md has the list. The number of threads that one
operator uses is set for the process, but each thread applies it lazily, and an operator that runs first does not always
do so: it then runs on all cores, and sums in another order. So every thread of telegrad begins here.
"""

from __future__ import annotations

import functools
import os
import sys
from _thread import RLock  # threading.RLock is Python code
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import current
from .untraced import untraced


def begin_thread() -> None:
    """Applies torch.set_num_threads() to this thread, which is new, before anything else runs on it."""
    current.thread.times_set = times_set
    torch.get_num_threads()


def prepared(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Returns what a new thread is to run: `function(*args)`, with torch.set_num_threads() applied before."""

    def run() -> None:
        begin_thread()
        function(*args)

    return run


# Note [a later set_num_threads]
# In torch a later call changes the calling thread and those that are yet to start. Which thread of a worker serves a
# call is a matter of timing, so all of them have to follow. torch cannot be asked for the number from another thread:
# while a worker runs, a function that also counts its calls stands in for torch.set_num_threads, in all modules that
# have that under its name: some were imported before, and say `from torch import set_num_threads`.
times_set = 0  # how often it was called; threads compare theirs with it
_number = 0  # what it was called with last
_followers: set[int] = set()  # the workers that run, by the id of their threads
_below: Callable[[int], None] | None = None  # torch's own function, while ours stands in for it
_lock = RLock()  # guards all of these, and keeps two numbers from being set in different orders


def _stand_in(below: Callable[[int], None]) -> Callable[[int], None]:
    @untraced
    @functools.wraps(below)
    def set_num_threads(*args: Any, **kwargs: Any) -> None:
        global times_set, _number
        with _lock:
            below(*args, **kwargs)
            _number = torch.get_num_threads()
            times_set += 1
            current.thread.times_set = times_set

    return set_num_threads


def follow() -> None:
    """Applies a torch.set_num_threads() that was called on another thread since this one looked last."""
    with _lock:
        current.thread.times_set = times_set
        if _below is not None:
            _below(_number)


def add_follower(threads: object) -> None:
    global _below
    with _lock:
        _followers.add(id(threads))
        if _below is None:
            _below = torch.set_num_threads
            _replace(_below, _stand_in(_below))


def remove_follower(threads: object) -> None:
    """Undoes add_follower(); with the last of them torch's own function is back. Any number of times."""
    global _below
    with _lock:
        _followers.discard(id(threads))
        if not _followers and getattr(torch.set_num_threads, "__wrapped__", None) is _below and _below is not None:
            _replace(torch.set_num_threads, _below)
            _below = None


def _replace(old: Callable[..., None], new: Callable[..., None]) -> None:
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            variables = object.__getattribute__(module, "__dict__")  # one that is loaded late is not loaded by this
            if variables.get("set_num_threads") is old:
                variables["set_num_threads"] = new


def _in_child() -> None:
    """In a fork: the workers are another process's, and so is the thread that held the lock."""
    global _lock
    _lock = RLock()
    for threads in list(_followers):
        _followers.discard(threads)
    remove_follower(None)


os.register_at_fork(after_in_child=_in_child)
