"""The profiler of all threads that serve calls. Events stand for a worker's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from telegrad._torch import ExperimentalConfig, parse_legacy_records, profiler_enabled
from telegrad.compat import profiling
from telegrad.events import Events

CONFIG = torch.autograd.ProfilerConfig(  # type: ignore[attr-defined]
    torch.autograd.ProfilerState.CPU, False, False, False, False, False, ExperimentalConfig()
)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    events = Events()
    monkeypatch.setattr(profiling, "current_worker", lambda: SimpleNamespace(events=events))
    yield events
    assert events.subscribers == ()


def serve(events: Events, function: object) -> bool:
    """Runs a function as a worker serves a call; returns whether the profiler stays on."""
    with events.span("run", "call", 1, "a"):
        function()  # type: ignore[operator]
    return profiler_enabled()


def names(records: list[object]) -> list[list[str]]:
    return [[event.name for event in parse_legacy_records(each)] for each in records]


def test_the_function_that_ends_a_profile_is_not_profiled_any_more(events: Events) -> None:
    for _ in range(2):
        assert not serve(events, lambda: profiling.enable(CONFIG))
        assert not serve(events, lambda: torch.ones(1) + 1)
        found: list[object] = []
        assert not serve(events, lambda: found.extend(profiling.disable()))  # noqa: B023
        assert [each for each in names(found) if "aten::add" in each]
    with pytest.raises(RuntimeError, match="no server profile is on"):
        profiling.disable()


def test_the_calls_of_a_thread_follow_one_another(events: Events) -> None:
    """Were they side by side, torch would take one for a part of another."""
    profiling.enable(CONFIG)
    for _ in range(3):
        serve(events, lambda: torch.ones(1) + 1)
    times = [
        (event.time_range.start, event.time_range.end)
        for each in profiling.disable()
        for event in parse_legacy_records(each)
        if event.name == "aten::add"
    ]
    assert len(times) == 3
    assert sorted(sum(times, ())) == list(sum(times, ()))


def test_a_function_that_runs_when_the_last_profile_ends(events: Events) -> None:
    """Its thread is not profiled any more once it has ended, and others are not any more at once."""
    runs, may_end, stayed_on = threading.Event(), threading.Event(), []

    def long() -> None:
        runs.set()
        may_end.wait(60)

    thread = threading.Thread(target=lambda: stayed_on.append(serve(events, long)))
    profiling.enable(CONFIG)
    thread.start()
    assert runs.wait(60)
    profiling.disable()
    try:
        assert not serve(events, lambda: stayed_on.append(profiler_enabled()))
    finally:
        may_end.set()
        thread.join(60)
    assert stayed_on == [False, False]


def test_a_worker_that_comes_after_another(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has shut down with its profile on."""
    profiling.enable(CONFIG)
    later = Events()
    monkeypatch.setattr(profiling, "current_worker", lambda: SimpleNamespace(events=later))
    profiling.enable(CONFIG)
    assert events.subscribers == ()
    serve(later, lambda: torch.ones(1) + 1)
    assert [each for each in names(profiling.disable()) if "aten::add" in each]
    profiling.disable()
    assert later.subscribers == ()
