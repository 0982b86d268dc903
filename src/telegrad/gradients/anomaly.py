"""Anomaly mode on a callee, while it works for callers that have it on.

In torch it is on or off for a whole process. So it is on here from the first call or pass of such a caller to the last,
also for what else runs meanwhile, and as it was before from then on.
"""

from __future__ import annotations

import os
from _thread import RLock  # threading.RLock is Python code
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = RLock()  # guards the two below, and that torch's state follows them
_holds: list[bool] = []  # for each call or pass with anomaly mode on: whether it checks for NaN
_before: tuple[bool, bool] | None = None  # torch's state at the first of them, if it had to be changed


def _state() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _apply_locked() -> None:
    global _before
    if _holds:
        now = _state()
        is_on, checks = _before or now
        wanted = (True, any(_holds) or (is_on and checks))
        if wanted != now:
            _before = _before or now
            torch.set_anomaly_enabled(*wanted)
    elif _before is not None:  # else the process had it on, and its program decides for how long
        torch.set_anomaly_enabled(*_before)
        _before = None


@contextmanager
def anomaly_mode(check_nan: bool) -> Iterator[None]:
    """Holds anomaly mode on while its body runs, whatever other threads do with it."""
    with _lock:
        _holds.append(check_nan)
        _apply_locked()
    try:
        yield
    finally:
        with _lock:
            if check_nan in _holds:  # else this is a fork, made in the body
                _holds.remove(check_nan)
            _apply_locked()


def _in_child() -> None:
    """In a fork: the calls and passes are another process's."""
    global _lock
    _lock = RLock()
    _holds.clear()
    _apply_locked()


os.register_at_fork(after_in_child=_in_child)
