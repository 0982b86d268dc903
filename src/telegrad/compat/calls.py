"""rpc_sync, rpc_async, remote and backward with what torch's do besides calling."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.rpc.api as torch_api

from .. import autograd, rpc
from ..errors import CallTimeoutError, GradientError, PeerLostError, UnknownWorkerError
from ..primitives.interrupts import finaliser
from ..rpc import UNSET_TIMEOUT
from ..rref import RRef
from ..runtime import profiled_calls

Future = torch.futures.Future[Any]


def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_TIMEOUT) -> Any:
    """See telegrad.rpc.rpc_sync."""
    if not callable(func):
        raise TypeError("function should be callable.")
    return rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_TIMEOUT) -> Future:
    """See telegrad.rpc.rpc_async. As with torch, a worker that cannot be reached fails the future."""
    if not callable(func):
        raise TypeError("function should be callable.")
    future: Future = torch.futures.Future()
    try:
        future = rpc.rpc_async(to, func, args, kwargs, timeout)
    except (PeerLostError, CallTimeoutError, UnknownWorkerError) as error:
        if isinstance(error, UnknownWorkerError) and to not in torch_api._ALL_WORKER_NAMES:
            raise  # it was never there
        future.set_exception(error.with_traceback(None))
    if hasattr(torch_api._thread_local_var, "future_list"):
        torch_api._thread_local_var.future_list.append(future)
    return future


def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_TIMEOUT) -> RRef[Any]:
    """See telegrad.rpc.remote."""
    rref = rpc.remote(to, func, args, kwargs, timeout)
    call = profiled_calls.newest() if profiled_calls.running else None
    if call is not None:
        rref._set_profiling_future(call.is_answered)
    return rref


def wait_all(futures: list[Future]) -> list[Any]:
    """torch.futures.wait_all, which ends with the first future that failed. torch's own sees that only of futures
    that were failed in C++."""
    left = list(futures)
    may_go_on = threading.Event()
    failed: list[Future] = []

    @finaliser
    def on_done(future: Future) -> None:
        try:
            future.value()
        except BaseException:
            failed.append(future)
        left.pop()
        if failed or not left:
            may_go_on.set()

    for future in futures:
        future.add_done_callback(on_done)
    if futures:
        may_go_on.wait()
    return [future.wait() for future in (*failed, *futures)][len(failed) :]


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False, **more: Any) -> None:
    """See telegrad.autograd.backward. As with torch, a root must be the result of something."""
    roots = autograd._tensors(roots, "roots")
    for root in roots:
        if root.requires_grad and root.numel() == 1 and root.grad_fn is None:
            raise GradientError("root does not have a valid gradient function.")
    autograd.backward(context_id, roots, retain_graph, **more)
