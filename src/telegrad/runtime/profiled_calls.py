"""Calls in a profile of torch's: the callee's operators stand in the profile of the caller.

    caller   a span around the call; the envelope asks the callee to take part (`Envelope.profiling`)
    callee   runs the function under torch's legacy profiler; the answer carries the events (`Profiled`)
    caller   puts them under the call's key into the profile that was active when the call was made

compat/profiling.py makes an ActiveProfile when a profile of torch's starts, and only after the user has asked for that.
An ActiveProfile belongs to a thread: threads do not see each other's calls.

# Note [why the legacy profiler at the callee]
torch's newer profiler can run once in a process: a second one, on any thread, takes the first one's events away or ends
the process (2.13). A callee may serve several profiled calls, and may be profiled by its own user. The legacy one
belongs to a thread and costs microseconds to start. Both record operators in the same way.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile as legacy_profile

from .._torch import (
    BaseFuture,
    disable_legacy_profiler,
    enable_legacy_profiler,
    find_builtin,
    parse_legacy_records,
    profiler_enabled,
    qualified_name,
)
from ..messages import Profiling, Settings
from ..primitives.interrupts import finaliser

REMOTE = "#remote_op: "  # torch's own mark, between a call's key and an event of the callee
BACKWARD = "torch::distributed::autograd::backward"  # torch's own name for a pass, at its root

Event = Any  # a FunctionEvent of torch's

# How many profiles run in this process, on any thread: while it is 0 a call costs one truth test. Guarded by _lock.
running = 0
_lock = threading.Lock()


class ActiveProfile:
    """A profile that one thread takes, and the calls that it has seen."""

    def __init__(self, settings: Settings, *, asks_callees: bool = True) -> None:
        global running
        self.settings = settings
        self.asks_callees = asks_callees
        self.calls: list[ProfiledCall] = []
        self.is_over = False
        with _lock:
            running += 1

    def end(self) -> None:
        global running
        with _lock:
            running -= not self.is_over
            self.is_over = True

    def with_calls(self, events: list[Event]) -> list[Event]:
        """The profile's own events and those of callees. The span of a call that its caller did not wait for is made
        longer, until the answer."""
        spans: dict[str, deque[Event]] = defaultdict(deque)
        for event in sorted(events, key=lambda event: event.time_range.start):
            spans[event.name].append(event)
        found = list(events)
        for call in self.calls:
            if spans[call.key]:  # else the profile has lost it
                found += call.place(spans[call.key].popleft())
        return found


class _Thread(threading.local):
    active: ActiveProfile | None = None
    is_local_only = False


thread = _Thread()


@contextmanager
def local_only() -> Iterator[None]:
    """Calls made inside, by this thread, are not profiled at their callees."""
    before = thread.is_local_only
    try:
        thread.is_local_only = True
        yield
    finally:
        thread.is_local_only = before


def is_local_only() -> bool:
    """Whether this thread is inside of local_only()."""
    return thread.is_local_only


# -- at the caller -----------------------------------------------------------------------------------------


class Profiled(NamedTuple):
    """An answer's value with the callee's events."""

    value: Any
    events: list[Event]
    seconds: float  # from the start of the function to its result


class ProfiledCall:
    """One call that is made while a profile is taken."""

    def __init__(self, active: ActiveProfile, key: str, caller_waits: bool) -> None:
        self.key = key
        self._caller_waits = caller_waits
        self.asks = Profiling(call=active.settings)
        self._answer: Profiled | None = None
        self._span: Any = record_function(key)
        self._span.__enter__()
        self._began = time.perf_counter()
        self._took = 0.0
        self.is_answered: torch.futures.Future[None] = torch.futures.Future()
        active.calls.append(self)

    def sent(self) -> None:
        """Ends the call's span in the caller's own profile: with the answer, or, if the caller goes on, before it."""
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def answered(self, value: Any) -> Any:
        """Takes the callee's events out of an answer; returns the function's own result. On any thread."""
        self._took = time.perf_counter() - self._began
        if type(value) is Profiled:
            self._answer, value = value._replace(value=None), value.value
        if self._caller_waits:
            self.sent()
        self.is_answered.set_result(None)
        return value

    def place(self, span: Event) -> list[Event]:
        """The callee's events, named and timed as parts of the call: in its middle, as if both ways took equally
        long."""
        span.time_range.end = max(span.time_range.end, span.time_range.start + self._took * 1e6)
        if self._answer is None:
            return []
        free = span.time_range.end - span.time_range.start - self._answer.seconds * 1e6
        shift = span.time_range.start + max(0.0, free / 2)
        for event in self._answer.events:
            event.name = event.trace_name = self.key + REMOTE + event.name
            event.is_remote = True
            event.time_range.start += shift
            event.time_range.end += shift
        return self._answer.events


def begin(mode: str, function: Any, caller: str, callee: str) -> ProfiledCall | None:
    """Notes a call that this thread is about to make; None if it takes no profile. `mode` is sync, async or remote."""
    active = thread.active
    if active is None or active.is_over or not active.asks_callees or thread.is_local_only:
        return None
    key = f"rpc_{mode}#{_name_of(function)}({caller} -> {callee})"
    return ProfiledCall(active, key, caller_waits=mode == "sync")


def newest() -> ProfiledCall | None:
    """The last call in this thread's profile."""
    active = thread.active
    return active.calls[-1] if active is not None and active.calls else None


def _name_of(function: Any) -> str:
    name = find_builtin(function)
    if name is None and isinstance(function, torch.jit.ScriptFunction):
        name = qualified_name(function)
    return name or getattr(function, "__qualname__", None) or repr(function)


def span(name: str) -> Any:
    """Shows a piece of this thread's work in its profile."""
    return record_function(name)


# -- at the callee -----------------------------------------------------------------------------------------


def run(settings: Settings, worker_id: int, function: Callable[[], Any]) -> Any:
    """Runs a function under the profiler: its result as Profiled, or the future of that."""
    if profiler_enabled():
        return function()  # this thread has a profile of its own user
    began = time.perf_counter()
    profile = legacy_profile(record_shapes=settings.shapes, profile_memory=settings.memory, with_flops=settings.flops)
    active = thread.active = ActiveProfile(settings)
    enable_legacy_profiler(profile.config())
    try:
        result = function()
    finally:
        thread.active = None
        records = disable_legacy_profiler()
        active.end()
    own: list[Event] = parse_legacy_records(records)
    for event in own:
        event.node_id = worker_id

    def profiled(value: Any) -> Profiled:
        return Profiled(value, active.with_calls(own), time.perf_counter() - began)

    if isinstance(result, BaseFuture):
        # The events of the function's own calls are there when its future is done.
        return result.then(finaliser(lambda done: profiled(done.value())))
    return profiled(result)


def value_of(result: Any) -> Any:
    """The function's own result."""
    return result.value if type(result) is Profiled else result
