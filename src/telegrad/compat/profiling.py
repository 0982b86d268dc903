"""torch's private profiler of all threads that serve calls (`_server_process_global_profile`), on telegrad's events.

Its class is torch's own. The two functions here take the places of those in C++ that it calls: while it is on, each
function that a call runs is run under the legacy profiler, and what that records belongs to all profiles that are on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..events import Event
from ..primitives.current import current_worker

Records = Any  # of the legacy profiler, of one call

_lock = threading.Lock()  # guards both below
_profiles: list[tuple[Any, list[Records]]] = []  # the configuration, and what was recorded; the innermost last
_unsubscribe: Callable[[], None] | None = None


class _Thread(threading.local):
    is_recording = False


_thread = _Thread()


def enable(config: Any) -> None:
    """Starts a profile inside of those that run."""
    global _unsubscribe
    with _lock:
        _profiles.append((config, []))
        if _unsubscribe is None:
            _unsubscribe = current_worker().events.subscribe(_on_event)


def disable() -> list[Records]:
    """Ends the innermost profile, and gives what was recorded, call by call."""
    global _unsubscribe
    with _lock:
        if not _profiles:
            raise RuntimeError("no server profile is on: enter one before you leave it")
        _, records = _profiles.pop()
        if not _profiles and _unsubscribe is not None:
            _unsubscribe()
            _unsubscribe = None
        return records


def _on_event(event: Event) -> None:
    if event.stage != "run":
        return
    if event.phase == "started":
        config = _profiles[-1][0] if _profiles else None
        if config is not None and not torch._C._autograd._profiler_enabled():
            torch._C._autograd._enable_profiler_legacy(config)
            _thread.is_recording = True
    elif _thread.is_recording:
        _thread.is_recording = False
        records = torch._C._autograd._disable_profiler_legacy()
        with _lock:
            for _, found in _profiles:
                found.append(records)
