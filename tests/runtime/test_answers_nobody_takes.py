"""Answers that their caller does not take: it was stopped, and the call has a deadline. See Note [answers that nobody
takes] in serving.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.primitives.current import current_worker
from telegrad.transport.base import BeforeWaiting, Frames
from telegrad.transport.inproc import InprocConnection

PATIENCE = 30.0  # no wait in a test is longer
CALLS = 5
LIMIT = 1.0


class Stopped:
    """The functions that the caller calls here, which answer when it was stopped."""

    event = threading.Event()


def large_when_stopped() -> torch.Tensor:
    assert Stopped.event.wait(PATIENCE)
    return torch.ones(1 << 21)  # 8 MiB: more than sockets and the limits below take


def fail_when_stopped() -> None:
    assert Stopped.event.wait(PATIENCE)
    raise ValueError("x" * (1 << 21))


@rpc.functions.async_execution
def large_later() -> torch.futures.Future:
    return rpc.rpc_async("driver", large_when_stopped)


class Asked:
    futures: ClassVar[list[torch.futures.Future]] = []


def ask(function: object) -> None:
    Asked.futures = [rpc.rpc_async("driver", function, timeout=LIMIT) for _ in range(CALLS)]


def what_came() -> list[str]:
    found = []
    for future in Asked.futures:
        try:
            found.append(type(future.wait()).__name__)
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.fixture(params=["unix", "tcp"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE, peer_byte_limit=1 << 20)
    with telegrad.LocalCluster(["a"], transport=request.param, server=server, options=options) as cluster:
        Stopped.event.clear()
        yield cluster


def until_served(count: int) -> None:
    until = time.monotonic() + PATIENCE
    while current_worker()._server.being_served != count:
        assert time.monotonic() < until


@pytest.mark.parametrize("function", [large_when_stopped, fail_when_stopped, large_later])
def test_a_stopped_caller_keeps_no_thread_and_no_result_for_longer_than_its_calls_last(cluster, function):
    rpc.rpc_sync("a", ask, args=(function,))
    until_served(CALLS * 2 if function is large_later else CALLS)
    os.kill(cluster.pids["a"], signal.SIGSTOP)
    try:
        Stopped.event.set()
        until_served(0)
    finally:
        os.kill(cluster.pids["a"], signal.SIGCONT)
    assert rpc.rpc_sync("a", what_came).count("CallTimeoutError") >= CALLS - 1  # one was written while there was room
    assert rpc.rpc_sync("a", abs, args=(-1,)) == 1  # it was only slow, and is a worker as before


def test_what_an_answer_that_was_dropped_has_counted_is_undone(cluster):
    x = torch.ones(1 << 21, requires_grad=True)
    kept.append(x)
    try:
        rpc.rpc_sync("a", ask, args=(tracked_when_stopped,))
        until_served(CALLS)
        os.kill(cluster.pids["a"], signal.SIGSTOP)
        try:
            Stopped.event.set()
            until_served(0)
            assert current_worker().contexts.statistics()["sends"] <= 1  # of one that is half out
        finally:
            os.kill(cluster.pids["a"], signal.SIGCONT)
        assert rpc.rpc_sync("a", what_came).count("CallTimeoutError") >= CALLS - 1
    finally:
        kept.clear()


kept: list[torch.Tensor] = []


def tracked_when_stopped() -> torch.Tensor:
    assert Stopped.event.wait(PATIENCE)
    return kept[0] * 2


def test_an_answer_has_the_time_that_its_call_has_left(jumping_clock, monkeypatch):
    limits: list[float | None] = []
    write = InprocConnection.write

    def note(self: InprocConnection, frames: Frames, timeout: float | None = None, before: BeforeWaiting = None) -> int:
        limits.append(timeout)
        return write(self, frames, timeout, before)

    with telegrad.LocalCluster(["a"], transport="inproc"):
        rpc.rpc_sync("a", abs, args=(1,))
        jumping_clock.stop()
        monkeypatch.setattr(InprocConnection, "write", note)
        Jump.jump = jumping_clock.jump
        rpc.rpc_sync("a", Jump.over, args=(6.0,), timeout=10.0)
        rpc.rpc_sync("a", Jump.over, args=(6.0,), timeout=0)
        monkeypatch.undo()
    assert limits == [10.0, 4.0, None, None]


class Jump:
    jump = None

    @classmethod
    def over(cls, seconds: float) -> None:
        cls.jump(seconds)
