"""torch's profilers over workers: what a callee's operators cost stands in the profile of its caller.

    caller   a span around the call; the envelope asks the callee to take part (`Envelope.profiling`)
    callee   runs the function under torch's legacy profiler; the answer carries the events (`Profiled`)
    caller   puts them under the call's key into the profile that was active when the call was made

torch.profiler.profile, torch.autograd.profiler.profile and profiler_legacy.profile are all followed. Of the last two
there is one per thread, and so is what is kept here: threads do not see each other's calls.

# Note [why the legacy profiler at the callee]
torch's newer profiler can run once in a process: a second one, on whatever thread, takes the first one's events away
or ends the process (2.13). A callee may serve several profiled calls, and may be profiled by its own user. The legacy
one belongs to a thread and costs microseconds to start. Operators are recorded by both in the same way.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler as kineto
from torch.autograd import profiler_legacy as legacy

from .._torch import (
    BaseFuture,
    disable_legacy_profiler,
    enable_legacy_profiler,
    find_builtin,
    profiler_enabled,
    qualified_name,
)
from ..messages import Profiling, Settings

REMOTE = "#remote_op: "  # torch's own mark, between a call's key and an event of the callee
BACKWARD = "torch::distributed::autograd::backward"  # torch's own name for a pass, at its root
FOLLOWS_CALLS = "_telegrad_follows_calls"  # on a profile of torch's, where False: it wants nothing of callees

Event = Any  # a FunctionEvent of torch's
Profile = Any

# How many profiles run in this process, on any thread: while it is 0 a call costs one truth test. Guarded by _lock.
running = 0
# Whether torch.profiler.profile has calls in it, too. The drop-in leaves them out, as the original does.
asks_with_kineto = True
_lock = threading.Lock()  # guards the counting of `running`


class _Active:
    """A profile that is being taken on one thread, and the calls that it has seen."""

    def __init__(self, settings: Settings, *, asks_callees: bool = True) -> None:
        self.settings = settings
        self.asks_callees = asks_callees
        self.calls: list[ProfiledCall] = []
        self.is_over = False
        with _lock:
            global running
            running += 1

    def end(self) -> None:
        with _lock:
            global running
            running -= not self.is_over
            self.is_over = True

    def with_calls(self, events: list[Event]) -> list[Event]:
        """The profile's own events, with those of callees. Calls whose answer came later than they were sent get the
        time until then."""
        own: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            own[event.name].append(event)
        found = list(events)
        for key in {call.key for call in self.calls}:
            spans = sorted(own[key], key=lambda event: event.time_range.start)
            # As many spans as calls, in the order of their beginnings, unless the profile lost some.
            for call, span in zip([c for c in self.calls if c.key == key], spans, strict=False):
                found += call.place(span)
        return found


class _Thread(threading.local):
    active: _Active | None = None
    ended: _Active | None = None  # the one whose events are being read
    is_local_only = False


_thread = _Thread()


@contextmanager
def local_only() -> Iterator[None]:
    """Calls made inside, by this thread, are not profiled at their callees."""
    before, _thread.is_local_only = _thread.is_local_only, True
    try:
        yield
    finally:
        _thread.is_local_only = before


def is_local_only() -> bool:
    """Whether this thread is inside of local_only()."""
    return _thread.is_local_only


# -- at the caller -----------------------------------------------------------------------------------------


class Profiled:
    """The value of an answer, and what the callee recorded."""

    __slots__ = ("events", "seconds", "value")

    def __init__(self, value: Any, events: list[Event], seconds: float) -> None:
        self.value = value
        self.events = events
        self.seconds = seconds  # that the callee was at it

    def __reduce__(self) -> Any:
        return Profiled, (self.value, self.events, self.seconds)


class ProfiledCall:
    """One call that is made while a profile is taken."""

    def __init__(self, active: _Active, key: str, caller_waits: bool) -> None:
        self.key = key
        self._caller_waits = caller_waits
        self.asks = Profiling(call=active.settings)
        self._answer: Profiled | None = None
        self._span: Any = kineto.record_function(key)
        self._span.__enter__()
        self._began = time.perf_counter()
        self._took = 0.0
        self.is_answered: torch.futures.Future[None] = torch.futures.Future()
        active.calls.append(self)

    def sent(self) -> None:
        """The caller goes on, and does not wait: the profile has the span until here, and the rest is noted."""
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def answered(self, value: Any) -> Any:
        """The function's own result. On any thread."""
        self._took = time.perf_counter() - self._began
        if type(value) is Profiled:
            self._answer, value = value, value.value
            self._answer.value = None
        if self._caller_waits:
            self.sent()
        self.is_answered.set_result(None)
        return value

    def place(self, span: Event) -> list[Event]:
        """The callee's events, named and timed as parts of the call: in its middle, since both ways take as long as far
        as anybody knows."""
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
    """A call is made. `mode` is sync, async or remote. None if this thread has no profile."""
    active = _thread.active
    if active is None or active.is_over or not active.asks_callees or _thread.is_local_only:
        return None
    key = f"rpc_{mode}#{_name_of(function)}({caller} -> {callee})"
    return ProfiledCall(active, key, caller_waits=mode == "sync")


def newest() -> ProfiledCall | None:
    """The last call that this thread's profile has seen."""
    active = _thread.active
    return active.calls[-1] if active is not None and active.calls else None


def _name_of(function: Any) -> str:
    name = find_builtin(function)
    if name is None and isinstance(function, torch.jit.ScriptFunction):
        name = qualified_name(function)
    return name or getattr(function, "__qualname__", None) or repr(function)


def span(name: str) -> Any:
    """Shows a piece of this thread's work in its profile."""
    return kineto.record_function(name)


# -- at the callee -----------------------------------------------------------------------------------------


def run(settings: Settings, worker_id: int, function: Callable[[], Any]) -> Any:
    """Runs a function under the profiler: its result as Profiled, or the future of that."""
    if profiler_enabled():
        return function()  # this thread has a profile of its own user
    began = time.perf_counter()
    profile = legacy.profile(record_shapes=settings.shapes, profile_memory=settings.memory, with_flops=settings.flops)
    active = _thread.active = _Active(settings)
    _enable_legacy(profile.config())
    try:
        result = function()
    finally:
        _thread.active = None
        records = _disable_legacy()
        active.end()
    own = _parse_legacy(records)
    for event in own:
        event.node_id = worker_id

    def profiled(value: Any) -> Profiled:
        return Profiled(value, active.with_calls(own), time.perf_counter() - began)

    if isinstance(result, BaseFuture):
        # What the function's own calls bring is there when its future is done.
        return result.then(lambda done: profiled(done.value()))
    return profiled(result)


def value_of(result: Any) -> Any:
    """A function's own result."""
    return result.value if type(result) is Profiled else result


# -- torch's profiles --------------------------------------------------------------------------------------

_enable_legacy = enable_legacy_profiler
_disable_legacy = disable_legacy_profiler
_parse_legacy: Callable[[Any], list[Event]] = legacy._parse_legacy_records
_parse_kineto = kineto.profile._parse_kineto_results
_export_kineto = kineto.profile.export_chrome_trace


def _follow(kind: Profile) -> None:
    """Has a class of profiles say when one starts and ends."""
    start_trace, exit_ = kind._start_trace, kind.__exit__

    def _start_trace(self: Profile) -> None:
        if getattr(self, FOLLOWS_CALLS, True):
            settings = Settings(bool(self.record_shapes), bool(self.profile_memory), bool(self.with_flops))
            asks = kind is not kineto.profile or asks_with_kineto
            self._telegrad = _thread.active = _Active(settings, asks_callees=asks)
        try:
            start_trace(self)
        except BaseException:
            _end(self)
            raise

    def __exit__(self: Profile, *error: Any) -> Any:
        _thread.ended = _end(self)
        try:
            return exit_(self, *error)
        finally:
            _thread.ended = None

    kind._start_trace, kind.__exit__ = _start_trace, __exit__


def _end(profile: Profile) -> _Active | None:
    active: _Active | None = getattr(profile, "_telegrad", None)
    if active is not None:
        active.end()
        if _thread.active is active:
            _thread.active = None
    return active


def _parse_legacy_records(records: Any) -> list[Event]:
    active, _thread.ended = _thread.ended, None
    return _parse_legacy(records) if active is None else active.with_calls(_parse_legacy(records))


def _parse_kineto_results(self: Profile, *args: Any, **kwargs: Any) -> list[Event]:
    events: list[Event] = _parse_kineto(self, *args, **kwargs)
    active: _Active | None = getattr(self, "_telegrad", None)
    return events if active is None else active.with_calls(events)


def _export_chrome_trace(self: Profile, path: str, *args: Any, **kwargs: Any) -> None:
    _export_kineto(self, path, *args, **kwargs)
    active: _Active | None = getattr(self, "_telegrad", None)
    if active is not None and active.calls:
        remote = [event for event in self.function_events if event.is_remote]
        _add_to_trace(path, remote, self.kineto_results.trace_start_ns())


def _add_to_trace(path: str, events: list[Event], start_ns: int) -> None:
    """Each callee becomes a process of its own in the trace of the caller."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    shift = (start_ns - trace.get("baseTimeNanoseconds", 0)) / 1000
    for event in events:
        callee, start = f"worker {event.node_id}", event.time_range.start
        args = {"node": event.node_id}
        trace["traceEvents"].append({
            "ph": "X", "cat": "cpu_op", "name": event.name, "pid": callee, "tid": event.thread,
            "ts": start + shift, "dur": event.time_range.end - start, "args": args,
        })  # fmt: skip
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)


_follow(legacy.profile)
_follow(kineto.profile)
legacy._parse_legacy_records = _parse_legacy_records
kineto.profile._parse_kineto_results = _parse_kineto_results  # type: ignore[method-assign]
kineto.profile.export_chrome_trace = _export_chrome_trace  # type: ignore[method-assign]
