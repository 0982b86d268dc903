"""Ctrl-C at every line at which a profile begins or ends: nothing goes on recording, and the next profile works."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import telegrad
from telegrad import profiler, rpc
from telegrad.messages import Envelope, Kind, Profiling, Session, Settings
from telegrad.primitives import current, interrupts
from telegrad.runtime import torch_profiler
from telegrad.transport.base import Frames

PATIENCE = 20.0
SOURCE = Path(telegrad.__file__).parent
TRACED = {str(SOURCE / "profiler" / "session.py"), str(SOURCE / "runtime" / "recording.py")}


def echo(x: Any) -> Any:
    return x


def what_is_recorded() -> tuple[bool, str, bool]:
    """The session that this worker takes part in, that of its process's operators, and whether it expects others."""
    recorder = current.current_worker().recorder
    return recorder.session is not None, torch_profiler._session, recorder.on_joined is not None


def begin(presser: Presser) -> bool:
    def program() -> None:
        with profiler.profile():
            sys.settrace(None)
            rpc.rpc_sync("a", echo, args=(1,), timeout=PATIENCE)

    return presser.run(program)


def end(presser: Presser) -> bool:
    prof = profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    prof.start()
    rpc.rpc_sync("a", echo, args=(1,), timeout=PATIENCE)
    came = presser.run(lambda: prof.__exit__(None, None, None))
    if presser.at == 1:  # the line before anything can be deferred
        prof.__exit__(None, None, None)
    return came


class Presser:
    """Presses Ctrl-C at the n-th line of the profiler's code that the main thread runs."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0
        self.place = ""

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
                return None
        return self.trace

    def run(self, program: Callable[[], None]) -> bool:
        """Whether the interrupt came through."""
        sys.settrace(self.trace)
        try:
            program()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


@pytest.mark.parametrize("program", [begin, end], ids=["begin", "end"])
def test_ctrl_c_at_every_line(server, program):
    with telegrad.LocalCluster(["a"], server=server):
        counter = Presser(-1)
        program(counter)
        assert counter.lines > 30
        for at in range(1, counter.lines + 1, 1 if program is begin else 2):
            presser = Presser(at)
            came = program(presser)
            assert came or presser.lines < at, f"the interrupt at {presser.place} was lost"
            assert what_is_recorded() == (False, "", False), presser.place
            assert rpc.rpc_sync("a", what_is_recorded, timeout=PATIENCE) == (False, "", False), presser.place
            assert not current.thread.critical
            assert not interrupts.deferred
        with profiler.profile() as prof:
            rpc.rpc_sync("a", echo, args=(1,), timeout=PATIENCE)
        assert prof.trace.missing == {}
        assert set(prof.trace.workers) == {"driver", "a"}


def test_a_profile_inside_of_another_leaves_that_one_as_it_is(server):
    with telegrad.LocalCluster(["a"], server=server):
        with profiler.profile() as outer:
            with pytest.raises(RuntimeError, match="takes part in another profile already"), profiler.profile():
                pass
            rpc.rpc_sync("a", echo, args=(1,), timeout=PATIENCE)
        assert set(outer.trace.about["workers"]) == {"driver", "a"}


@pytest.mark.parametrize("takes_part", [True, False])
def test_a_message_that_comes_after_its_session_has_ended_does_not_begin_it_again(takes_part):
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        (a,) = (worker for worker in cluster._in_process if worker.name == "a")
        session = Session(cluster.worker.new_message_id(), Settings())
        marked = Envelope(Kind.CALL, cluster.worker.new_message_id(), profiling=Profiling(None, session))
        rpc.rpc_sync("a", echo, args=(1,), timeout=PATIENCE)  # they have met
        connection = cluster.worker.calls.peers.find("a").connection
        if takes_part:
            a.recorder.on_read(marked, connection, Frames(b"", []), 0.0)
            assert a.recorder.session == session
        a.recorder.drop(session.id)
        a.recorder.on_read(marked, connection, Frames(b"", []), 0.0)
        assert a.recorder.session is None
