"""Operators of a process, for a timeline: torch's own profiler on all threads, and its export.

That profiler exists once in a process (see Note [why the legacy profiler at the callee] in profiled_calls.py). So it is
started here only where no other one runs, and workers of one process share it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as kineto

from .._torch import ExperimentalConfig, is_newer_profiler_on, prepare_newer_profile, start_newer_profile
from ..messages import Settings

_lock = threading.Lock()  # guards the look at _session before it is set
_has_started = False
_session = ""  # the one whose operators this process records; none while it is empty


class Operators:
    """The operators of this process while a session runs: see `start`."""

    def __init__(self, profile: Any) -> None:
        self._profile = profile

    @classmethod
    def start(cls, session: str, settings: Settings) -> tuple[Operators | None, str]:
        """Starts torch's profiler. None if another worker of this process has started it for this session; or, with the
        reason, if it cannot start."""
        global _session
        with _lock:
            if _session == session:
                return None, ""
            if _session or is_newer_profiler_on():
                return None, "another profiler runs in its process"
            _session = session
        try:
            profile = _profile(settings)
            with _quietly():
                prepare_newer_profile(profile)
                start_newer_profile(profile)  # torch's own method, also where compat has replaced it: no calls in it
        except BaseException as error:
            _session = ""
            if not isinstance(error, Exception):
                raise
            return None, f"torch's profiler did not start: {error}"
        return cls(profile), ""

    def stop(self) -> tuple[bytes, str]:
        """torch's own export, compressed, or why there is none. Once."""
        global _session
        try:
            self._profile.__exit__(None, None, None)
            if not self._profile.kineto_results.events():
                return b"", "another profiler was started in its process, or nothing was to record"
            with tempfile.TemporaryDirectory(prefix="telegrad-") as directory:
                path = Path(directory, "operators.json")
                self._profile.kineto_results.save(str(path))
                return zlib.compress(path.read_bytes(), 1), ""
        except Exception as error:
            return b"", f"torch's profiler failed: {error}"
        finally:
            _session = ""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leaves out an error that is none: torch's profiler prints it when it first starts on another thread than the main
    one. Other output comes a moment later."""
    global _has_started
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if _has_started or threading.current_thread() is threading.main_thread():
        yield
        return
    _has_started = True
    with tempfile.TemporaryFile() as printed:
        try:
            sys.stderr.flush()
            before = os.dup(2)
        except (OSError, ValueError, AttributeError):  # there is no stderr
            yield
            return
        try:
            os.dup2(printed.fileno(), 2)
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            printed.seek(0)
            for line in printed:
                if b"External init callback" not in line:
                    os.write(2, line)


def _profile(settings: Settings) -> Any:
    known = torch.profiler.supported_activities()
    wanted = {a for a in known if a.name in settings.activities} if settings.activities else known
    devices = {"CUDA": "cuda", "XPU": "xpu", "MTIA": "mtia", "HPU": "hpu"}
    device = next((name for activity, name in devices.items() if activity in {a.name for a in wanted}), None)
    return kineto.profile(
        use_cpu=torch.profiler.ProfilerActivity.CPU in wanted or device is None,
        use_device=device,
        record_shapes=settings.shapes,
        profile_memory=settings.memory,
        with_flops=settings.flops,
        with_stack=settings.stack,
        with_modules=settings.modules,
        use_kineto=True,
        experimental_config=ExperimentalConfig(profile_all_threads=True),
    )


def clock_offset() -> int:
    """The difference of the clock of torch's export to time.perf_counter_ns(), by the quickest of several looks."""
    looks = []
    for _ in range(9):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        after = time.perf_counter_ns()
        looks.append((after - before, unix - (before + after) // 2))
    return min(looks)[1]
