"""Which worker, and which incoming call, the running code belongs to. The bottom of the layers.

The current worker is a ContextVar: threads that serve a worker have it set, so code running in a call sees
the worker it runs on. Elsewhere the process's default worker (the one of init_rpc) is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import NotStartedError

if TYPE_CHECKING:
    from .worker import Worker


@dataclass(slots=True)
class Serving:
    """The incoming call that this code runs in."""

    caller: str
    message_id: int
    deadline: float | None  # time.monotonic() by which the caller wants its answer
    depth: int  # 1 for a call made by a program's own code, 2 for one made while serving that, ...


worker_var: ContextVar[Worker | None] = ContextVar("telegrad_worker", default=None)
serving: ContextVar[Serving | None] = ContextVar("telegrad_serving", default=None)
context_id: ContextVar[int] = ContextVar("telegrad_context", default=0)  # of autograd; 0: none
pass_id: ContextVar[int] = ContextVar("telegrad_pass", default=0)  # of the pass in whose hooks this code runs


class _Thread(threading.local):
    relieve: Callable[[], None] | None = None  # ends this thread's duty (see duty.py); None: it has none


thread = _Thread()

_default: Worker | None = None  # written by set_default_worker() only


def current_worker() -> Worker:
    """The worker that this code belongs to.

    Raises:
        NotStartedError: there is none, since init_rpc() was not called or shutdown() was.
    """
    worker = worker_var.get() or _default
    if worker is None:
        raise NotStartedError(
            "no worker in this process: call telegrad.rpc.init_rpc() first, or work inside "
            "`with telegrad.LocalCluster([...])`; RPC has not been initialized. Call init_rpc first."
        )
    return worker


def default_worker() -> Worker | None:
    return _default


def set_default_worker(worker: Worker | None) -> None:
    global _default
    _default = worker
