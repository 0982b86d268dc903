"""Which worker, and which incoming call, the running code belongs to.

The current worker is a ContextVar: threads that serve a worker have it set, so code running in a call sees
the worker it runs on. Elsewhere the process's default worker (the one of init_rpc) is taken.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from .._torch import current_graph_task_id
from ..errors import NotStartedError

if TYPE_CHECKING:
    from ..worker import Worker


class Serving(msgspec.Struct, eq=False):
    """The incoming call that this code runs in."""

    caller: str
    message_id: int
    deadline: float | None  # clock.now() by which the caller wants its answer
    depth: int  # 1 for a call made by a program's own code, 2 for one made while serving that, ...


worker_var: ContextVar[Worker | None] = ContextVar("telegrad_worker", default=None)
serving: ContextVar[Serving | None] = ContextVar("telegrad_serving", default=None)
context_id: ContextVar[int] = ContextVar("telegrad_context", default=0)  # of autograd; 0: none
pass_id: ContextVar[int] = ContextVar("telegrad_pass", default=0)  # of the pass in whose hooks this code runs
# The process with a checkpoint that has this code run again in the backward pass, so that the calls that it makes are
# a part of that, too; 0: none. See runtime/recomputing.py.
recomputes: ContextVar[int] = ContextVar("telegrad_recomputes", default=0)
process_id = 0  # of this process, on all machines


def _new_process() -> None:
    global process_id
    process_id = secrets.randbits(62) + 1


_new_process()
os.register_at_fork(after_in_child=_new_process)


class EnginePass(Protocol):
    """The pass that torch's engine runs."""

    worker: Any
    pass_id: int
    serving: Serving | None
    recomputes: int

    @property
    def context_id(self) -> int: ...


def _no_pass() -> EnginePass | None:
    return None


# torch's engine runs the nodes of a device on a thread of its own, where no ContextVar of ours is set. There the
# pass that runs says what the code belongs to. Given by gradients/nodes.py.
engine_pass: Callable[[], EnginePass | None] = _no_pass


class _Thread(threading.local):
    critical = 0  # above zero: this thread runs telegrad's own code. See interrupts.py
    times_set = 0  # see torch_threads.py
    flushes_denormals = False  # of a thread of telegrad: what users' functions find, and what is restored after them
    blocking = False  # in a critical section: an interrupt may come all the same
    is_workers = False  # a worker has started it
    is_orphan = False  # that worker is the parent's, of which this process is a fork: see forks.py
    relieve: Callable[[], None] | None = None  # ends this thread's Turn with the read lease; None: it has none
    is_main = False
    used_devices: tuple[Any, ...] = ()  # of tensors that this thread has decoded: see futures.py

    def __init__(self) -> None:
        # Not by current_thread(), which would keep an object for each thread that Python has not started. A finaliser
        # may run in here, so nothing may be there only after it.
        self.is_main = threading.get_ident() == threading.main_thread().ident


thread = _Thread()

_default: Worker | None = None  # written by set_default_worker() only


def current_worker() -> Worker:
    """The worker that this code belongs to.

    Raises:
        NotStartedError: there is none, since init_rpc() was not called or shutdown() was.
    """
    worker = worker_var.get()
    if worker is None:
        pass_ = None if current_graph_task_id() < 0 else engine_pass()
        worker = _default if pass_ is None else pass_.worker
    if worker is None:
        raise NotStartedError(
            "RPC has not been initialized. Call init_rpc() first, or work inside `with telegrad.LocalCluster([...])`: "
            "no worker in this process (Current RPC agent is not set! Did you initialize the RPC framework?)"
        )
    return worker


# torch's engine runs code only in a graph task, so one C call is enough where there is none.


def current_serving() -> Serving | None:
    """The incoming call that this code runs in."""
    found = serving.get()
    if found is not None or current_graph_task_id() < 0 or (pass_ := engine_pass()) is None:
        return found
    return pass_.serving


def current_recomputes() -> int:
    """The process with a checkpoint that has this code run again; 0: none."""
    found = recomputes.get()
    if found or current_graph_task_id() < 0 or (pass_ := engine_pass()) is None:
        return found
    return pass_.recomputes


def current_context_id() -> int:
    """The autograd context that this code runs in; 0: none."""
    found = context_id.get()
    if found or current_graph_task_id() < 0 or (pass_ := engine_pass()) is None:
        return found
    return pass_.context_id


def current_pass_id() -> int:
    """The pass in whose hooks this code runs; 0: none."""
    found = pass_id.get()
    if found or current_graph_task_id() < 0 or (pass_ := engine_pass()) is None:
        return found
    return pass_.pass_id


def default_worker() -> Worker | None:
    return _default


def set_default_worker(worker: Worker | None) -> None:
    global _default
    _default = worker
