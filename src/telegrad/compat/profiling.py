"""torch's profilers over workers.

follow_profiles()   replaces methods of torch's profile classes, so that profiles have calls in them: see
                    runtime/profiled_calls.py, which does the rest
enable, disable     stand in the places of the C++ functions behind torch's `_server_process_global_profile`, the
                    profiler of all threads that serve calls. Each served function runs under the legacy profiler,
                    and its records belong to all such profiles that are on
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch.autograd import profiler as kineto
from torch.autograd import profiler_legacy as legacy

from .._torch import disable_legacy_profiler, enable_legacy_profiler, profiler_enabled
from ..events import Event, Events
from ..messages import Settings
from ..primitives.current import current_worker
from ..runtime import profiled_calls
from ..runtime.profiled_calls import ActiveProfile

Profile = Any
Records = Any  # of the legacy profiler, of one call

# Whether profiles of torch's newer profiler have calls in them, too.
follows_newer = False
_is_following = False


class _Thread(threading.local):
    ended: ActiveProfile | None = None  # the one whose events are being read
    is_recording = False  # a served function, for a server profile


_thread = _Thread()


def follow_profiles(*, newer: bool = True) -> None:
    """Has calls stand in profiles of torch's that this process takes from now on, with what the callees run for them.
    That replaces methods of torch's profile classes. Any number of times; the last one counts.

    Args:
        newer: in profiles of torch.profiler.profile and torch.autograd.profiler.profile, too. Without it they have
            calls only in those of torch.autograd.profiler_legacy.profile.
    """
    global follows_newer, _is_following
    follows_newer = newer
    if _is_following:
        return
    _is_following = True
    _follow(legacy.profile)
    _follow(kineto.profile)
    parse_legacy, parse_kineto = legacy._parse_legacy_records, kineto.profile._parse_kineto_results
    export_kineto = kineto.profile.export_chrome_trace

    def _parse_legacy_records(records: Any) -> Any:
        active, _thread.ended = _thread.ended, None
        events = parse_legacy(records)
        return events if active is None else active.with_calls(events)

    def _parse_kineto_results(self: Profile, *args: Any, **kwargs: Any) -> Any:
        events, active = parse_kineto(self, *args, **kwargs), _active_of(self)
        return events if active is None else active.with_calls(events)

    def export_chrome_trace(self: Profile, path: str, *args: Any, **kwargs: Any) -> None:
        export_kineto(self, path, *args, **kwargs)
        active = _active_of(self)
        if active is not None and active.calls:
            remote = [event for event in self.function_events if event.is_remote]
            _add_to_trace(path, remote, self.kineto_results.trace_start_ns())

    legacy._parse_legacy_records = _parse_legacy_records
    kineto.profile._parse_kineto_results = _parse_kineto_results  # type: ignore[method-assign]
    kineto.profile.export_chrome_trace = export_chrome_trace  # type: ignore[method-assign]


def _follow(kind: Profile) -> None:
    """Has a class of profiles say when one starts and ends."""
    start_trace, exit_ = kind._start_trace, kind.__exit__

    def _start_trace(self: Profile) -> None:
        settings = Settings(bool(self.record_shapes), bool(self.profile_memory), bool(self.with_flops))
        asks = kind is legacy.profile or follows_newer
        try:
            self._telegrad = ActiveProfile(settings, asks_callees=asks)
            profiled_calls.thread.active = self._telegrad
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


def _active_of(profile: Profile) -> ActiveProfile | None:
    return getattr(profile, "_telegrad", None)


def _end(profile: Profile) -> ActiveProfile | None:
    active = _active_of(profile)
    if active is not None:
        active.end()
        if profiled_calls.thread.active is active:
            profiled_calls.thread.active = None
    return active


def _add_to_trace(path: str, events: list[Any], start_ns: int) -> None:
    """Each callee becomes a process of its own in the trace of the caller."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    shift = (start_ns - trace.get("baseTimeNanoseconds", 0)) / 1000
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        trace["traceEvents"].append({
            "ph": "X", "cat": "cpu_op", "name": event.name, "pid": f"worker {event.node_id}", "tid": event.thread,
            "ts": start + shift, "dur": end - start, "args": {"node": event.node_id},
        })  # fmt: skip
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)


# -- the profiler of all threads that serve ----------------------------------------------------------------

_lock = threading.Lock()  # guards all below
_profiles: list[tuple[Any, list[Records]]] = []  # the configuration, and the records; the innermost last
_recording = 0  # functions that run under the legacy profiler for them
_followed: Events | None = None  # of the worker whose functions are recorded
_unsubscribe: Callable[[], None] | None = None


def enable(config: Any) -> None:
    """Starts a profile inside of those that run."""
    global _followed, _unsubscribe, _recording
    events = current_worker().events
    with _lock:
        _profiles.append((config, []))
        if _followed is not events:  # else it still follows the worker, perhaps for a function of an earlier profile
            if _unsubscribe is not None:  # from a worker that has shut down
                _unsubscribe()
            _followed, _unsubscribe, _recording = events, events.subscribe(_on_event), 0


def disable() -> list[Records]:
    """Ends the innermost profile; returns the records, call by call."""
    with _lock:
        if not _profiles:
            raise RuntimeError("no server profile is on: enter one before you leave it")
        _, records = _profiles.pop()
        _unsubscribe_if_unused_locked()
    # torch reads the times of each call from the first start it finds. From starts of their own the calls of one thread
    # would overlap, and torch drops an event inside of another of the same name.
    starts = [record for thread in chain(*records) for record in thread if record.name() == "__start_profile"]
    return [[starts[:1], *each] for each in records]


def _unsubscribe_if_unused_locked() -> None:
    """Functions that are being recorded, such as the one that calls disable(), still have to switch it off."""
    global _followed, _unsubscribe
    if not _profiles and not _recording and _unsubscribe is not None:
        _unsubscribe()
        _followed = _unsubscribe = None


def _on_event(event: Event) -> None:
    global _recording
    if event.stage != "run":
        return
    if event.phase == "started":
        with _lock:
            if not _profiles or profiler_enabled():
                return
            config = _profiles[-1][0]
            _recording += 1
        _thread.is_recording = True
        enable_legacy_profiler(config)
    elif _thread.is_recording:
        _thread.is_recording = False
        records = disable_legacy_profiler() if profiler_enabled() else None
        with _lock:
            _recording -= 1
            for _, found in _profiles if records is not None else ():
                found.append(records)
            _unsubscribe_if_unused_locked()
