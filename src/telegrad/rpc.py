"""The public functions of calls, with torch.distributed.rpc's names and meaning.

    init_rpc("trainer", rank=0, world_size=2)
    total = rpc_sync("ps", torch.add, args=(a, b))
    future = rpc_async("ps", step, args=(batch,))
    shutdown()

The functions act on the current worker: inside a call the one that serves it, else the one of init_rpc().
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from . import functions
from .errors import AlreadyStartedError
from .messages import WorkerInfo
from .options import Options
from .primitives.current import current_worker, default_worker, set_default_worker
from .primitives.futures import Future
from .primitives.text import check_name
from .primitives.untraced import untraced
from .rendezvous.address import open_store
from .rendezvous.group import Group
from .rref import RRef, create
from .runtime.pending import UNSET_TIMEOUT as UNSET_TIMEOUT
from .worker import Worker

__all__ = [
    "Future",
    "Options",
    "RRef",
    "WorkerInfo",
    "functions",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_starting = threading.Lock()  # held by init_rpc() and shutdown(): one default worker at a time


def _in_child() -> None:
    """In a fork: a thread that held the lock is not here to release it."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


@untraced
def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    *,
    init_method: str | None = None,
    options: Options | None = None,
) -> Worker:
    """Makes this process a worker of a group, and waits until all of the group have come.

    With `world_size=None` (and no WORLD_SIZE in the environment) the group has no fixed size: workers join
    and leave at any time.

    Args:
        name: the worker's name, unique in the group.
        backend: ignored, as there is only one.
        rank: this worker's number in a group of fixed size; RANK by default.
        world_size: how many workers there are; WORLD_SIZE by default.
        rpc_backend_options: telegrad's options under torch's name, or torch's: their rpc_timeout, device_maps, devices
            and init_method count; num_worker_threads, _transports and _channels have no effect.
        init_method: where the group meets: `env://` (the default), `tcp://HOST:PORT` or `file:///PATH`.
        options: telegrad's own options.

    Raises:
        TypeError: an argument is of another type, or both kinds of options are given.
        AlreadyStartedError: this process is a worker already.
        ValueError: the name is empty, too long, or cannot be printed.
        NameTakenError: a live worker has the name.
        RendezvousError: the store cannot be reached, or others did not come in time.
    """
    check_name(name)
    if isinstance(backend, Options):
        raise TypeError("backend is an Options object; pass it by name: init_rpc(..., options=...)")
    chosen = Options.of(options, rpc_backend_options)
    with _starting:
        running = default_worker()
        if running is not None:
            raise AlreadyStartedError(
                f"RPC is already initialized in this process, as worker {running.name!r}; call shutdown() first"
            )
        method = init_method
        if method is None:
            method = getattr(rpc_backend_options, "init_method", None)
        if method is None:
            method = "env://"
        store, rank, world_size = open_store(method, rank, world_size, chosen.init_timeout)
        group = Group(store, world_size, chosen.init_timeout)
        worker = Worker.start(name, group, chosen, rank=rank)
        set_default_worker(worker)
        return worker


@untraced
def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Ends this process's worker.

    Graceful: waits for all work in flight, and in a group of fixed size for every other worker to come here.
    `timeout` is in seconds; by default Options.shutdown_timeout, and 0 means no limit.

    Raises:
        NotStartedError: there is no worker.
        RendezvousError: others did not come in time. The worker is closed all the same.
    """
    with _starting:
        worker = default_worker() or current_worker()
        try:
            worker.close(graceful, timeout)
        finally:
            if default_worker() is worker:
                set_default_worker(None)


@untraced
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Runs `func(*args, **kwargs)` on worker `to` and returns the result.

    `timeout` is in seconds: Options.rpc_timeout by default; 0 means no limit. It raises what Worker.call raises.
    """
    return current_worker().calls.call(to, func, () if args is None else args, kwargs, timeout)


@untraced
def rpc_async(
    to: str | int | WorkerInfo,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future:
    """Like rpc_sync, but returns a torch Future at once. It can be waited for, chained, and awaited."""
    return current_worker().calls.call_async(to, func, () if args is None else args, kwargs, timeout)


@untraced
def remote(
    to: str | int | WorkerInfo,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Runs `func(*args, **kwargs)` on worker `to` and leaves the result there. Returns a handle to it at once.

    What the function raises shows when the value is asked for. `timeout` limits how long its creation may take.
    """
    return create(current_worker(), to, func, () if args is None else args, kwargs, timeout)


@untraced
def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The name and id of a worker; of this one without a name.

    Raises:
        UnknownWorkerError: there is no worker of that name.
    """
    return current_worker().info(worker_name)
