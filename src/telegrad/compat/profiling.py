"""torch's legacy profiler over workers: what a callee's operators cost stands in the profile of the caller.

caller   a span for the call, and `profiled` in the place of the function
callee   runs the function under the profiler, and answers with the result and the events
caller   puts the events under the call's key into the profile that was active when the call was made
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.distributed.rpc.internal import RPCExecMode, _build_rpc_profiling_key

from ..current import current_worker
from ..dispatch import ASYNC_MARK

_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY
_REMOTE = "#remote_op: "  # torch's own mark, between a call's key and an event of the callee

Event = Any
Settings = dict[str, bool]  # of the profiler, as far as they hold on the callee


class _Active:
    """A profile that is being taken."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.remote: list[Event] = []  # of callees


class _Thread(threading.local):
    active: _Active | None = None


_thread = _Thread()
_start_trace = profiler_legacy.profile._start_trace
_parse = profiler_legacy._parse_legacy_records


def _on_start(self: Any) -> None:
    _thread.active = _Active({"record_shapes": self.record_shapes, "profile_memory": self.profile_memory})
    _start_trace(self)


def _parse_with_remote(records: Any) -> list[Event]:
    active, _thread.active = _thread.active, None
    return [*_parse(records), *(active.remote if active is not None else ())]


def follow_calls() -> None:
    """Has torch's legacy profiler take in what callees tell."""
    profiler_legacy.profile._start_trace = _on_start  # type: ignore[method-assign]
    profiler_legacy._parse_legacy_records = _parse_with_remote


def is_on() -> bool:
    return torch.autograd._profiler_enabled() and torch._C._autograd._profiler_type() == _LEGACY  # type: ignore[attr-defined]


class ProfiledCall:
    """One call that is made while a profile is taken."""

    def __init__(self, mode: RPCExecMode, function: Any, to: Any) -> None:
        name = torch.jit._builtins._find_builtin(function)
        if name is None:
            is_scripted = isinstance(function, torch.jit.ScriptFunction)
            name = torch._jit_internal._qualified_name(function) if is_scripted else function.__qualname__
        worker = current_worker()
        self.key = _build_rpc_profiling_key(mode, name, worker.name, worker.info(to).name)
        self.span = torch.autograd.profiler.record_function(self.key)
        self._active = _thread.active or _Active({})
        self.function: Callable[..., Any] = profiled_async if hasattr(function, ASYNC_MARK) else profiled
        self._function = function

    def args(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        return self._function, tuple(args or ()), kwargs or {}, self._active.settings

    def result(self, answer: tuple[Any, list[Event]]) -> Any:
        """The function's own result."""
        value, events = answer
        self.add(events)
        return value

    def add(self, events: list[Event]) -> None:
        for event in events:
            event.name = self.key + _REMOTE + event.name
            event.is_remote = True
        self._active.remote += events


# -- run by the callee -------------------------------------------------------------------------------------


def profiled(function: Any, args: Any, kwargs: Any, settings: Settings) -> tuple[Any, list[Event]]:
    profile = profiler_legacy.profile(**settings)
    profile.__enter__()
    try:
        value = function(*args, **kwargs)
    finally:
        events = _parse_with_remote(torch._C._autograd._disable_profiler_legacy())
    return value, events


def profiled_async(function: Any, args: Any, kwargs: Any, settings: Settings) -> Any:
    active = None

    def run() -> Any:
        nonlocal active
        active = _thread.active
        return function(*args, **kwargs)

    future, events = profiled(run, (), {}, settings)
    # What the function's own calls bring is there when its future is done.
    return future.then(lambda done: (done.value(), [*events, *(active.remote if active is not None else ())]))


setattr(profiled_async, ASYNC_MARK, profiled_async)

_numbers = itertools.count()
_kept: dict[
    tuple[str, int], torch.futures.Future[Any]
] = {}  # by who asks and its number: events of created values


def new_number() -> tuple[str, int]:
    return current_worker().name, next(_numbers)


def _kept_at(number: tuple[str, int]) -> torch.futures.Future[Any]:
    return _kept.setdefault(number, torch.futures.Future())


def profiled_creation(
    number: tuple[str, int], function: Any, args: Any, kwargs: Any, settings: Settings
) -> Any:
    """The value stays here; its events are kept until they are asked for."""
    try:
        value, events = profiled(function, args, kwargs, settings)
    except BaseException:
        _kept_at(number).set_result([])
        raise
    _kept_at(number).set_result(events)
    return value


def events_of_creation(number: tuple[str, int]) -> Any:
    return _kept_at(number).then(lambda done: (_kept.pop(number, None), done.value())[1])


setattr(events_of_creation, ASYNC_MARK, events_of_creation)
