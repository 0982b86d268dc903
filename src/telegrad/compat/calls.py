"""rpc_sync, rpc_async and remote with what torch's do besides calling: its legacy profiler, and _wait_all()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.rpc.api as torch_api
from torch.distributed.rpc.internal import RPCExecMode, _build_rpc_profiling_key

from .. import rpc
from ..current import current_worker
from ..rref import RRef

UNSET_TIMEOUT = rpc.UNSET_TIMEOUT
_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY


def rpc_sync(
    to: Any,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """See telegrad.rpc.rpc_sync."""
    if not callable(func):
        raise TypeError("function should be callable.")
    if _is_profiled():
        with _span(RPCExecMode.SYNC, func, to):
            return rpc.rpc_sync(to, func, args, kwargs, timeout)
    return rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: Any,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> torch.futures.Future[Any]:
    """See telegrad.rpc.rpc_async."""
    if not callable(func):
        raise TypeError("function should be callable.")
    future: torch.futures.Future[Any]
    if _is_profiled():
        with _span(RPCExecMode.ASYNC, func, to) as span:
            future = span._call_end_callbacks_on_future(rpc.rpc_async(to, func, args, kwargs, timeout))
    else:
        future = rpc.rpc_async(to, func, args, kwargs, timeout)
    if hasattr(torch_api._thread_local_var, "future_list"):
        torch_api._thread_local_var.future_list.append(future)
    return future


def remote(
    to: Any,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """See telegrad.rpc.remote."""
    if _is_profiled():
        with _span(RPCExecMode.REMOTE, func, to):
            return rpc.remote(to, func, args, kwargs, timeout)
    return rpc.remote(to, func, args, kwargs, timeout)


def _is_profiled() -> bool:
    return torch.autograd._profiler_enabled() and torch._C._autograd._profiler_type() == _LEGACY  # type: ignore[attr-defined]


def _span(mode: RPCExecMode, func: Any, to: Any) -> Any:
    """torch's record of a call, under torch's name for it."""
    name = torch.jit._builtins._find_builtin(func)
    if name is None:
        is_scripted = isinstance(func, torch.jit.ScriptFunction)
        name = torch._jit_internal._qualified_name(func) if is_scripted else func.__qualname__
    worker = current_worker()
    key = _build_rpc_profiling_key(mode, name, worker.name, worker.info(to).name)
    return torch.autograd.profiler.record_function(key)
