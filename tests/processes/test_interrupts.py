"""Ctrl-C while a cluster starts or ends, at every point where it can come through: nothing is left, and the next
cluster on the same fork server works."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import telegrad
from telegrad import errors, rpc
from telegrad.cluster.forkserver import ForkServer, Job
from telegrad.primitives import current, interrupts
from telegrad.rendezvous.group import poll_until

PATIENCE = 30.0
PACKAGE = str(Path(telegrad.__file__).parent)


@pytest.fixture(autouse=True)
def no_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of other tests in this process do not count."""
    monkeypatch.setattr(interrupts, "_users", set())


def children_of(server: ForkServer) -> list[int]:
    pid = server._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def check_nothing_is_left(server: ForkServer) -> None:
    assert poll_until(lambda: not children_of(server), PATIENCE), "worker processes are left"
    assert current.default_worker() is None
    assert current.worker_var.get() is None
    assert current.thread.critical == 0
    assert not interrupts._users
    assert not interrupts.deferred


def check_next_cluster(server: ForkServer) -> None:
    with telegrad.LocalCluster(["next"], server=server) as cluster:
        assert cluster.call("next", os.getpid) == cluster.pids["next"]


class Points:
    """Stands for `interruptible`: counts the calls on the main thread, and raises at the chosen one."""

    def __init__(self) -> None:
        self.seen = 0
        self.chosen = -1

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            self.seen += 1
            if self.seen == self.chosen:
                raise KeyboardInterrupt
        return interrupts.interruptible(function, *args)

    @contextmanager
    def counting(self, chosen: int = -1) -> Iterator[None]:
        self.seen, self.chosen = 0, chosen
        yield
        self.chosen = -1


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Points:
    points = Points()
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("telegrad.")
            and name != "telegrad.primitives.interrupts"
            and hasattr(module, "interruptible")
        ):
            monkeypatch.setattr(module, "interruptible", points)
    return points


def every(points: Points) -> Iterator[int]:
    """Numbers of points to interrupt at, until one is not reached any more."""
    for chosen in range(1, 200):
        yield chosen
        if points.seen < chosen:
            return


def test_an_interrupt_at_each_wait_of_a_start(server, points):
    interrupted = 0
    for chosen in every(points):
        try:
            with points.counting(chosen), telegrad.LocalCluster(["a", "b"], server=server):
                points.chosen = -1
        except KeyboardInterrupt:
            interrupted += 1
        check_nothing_is_left(server)
    assert interrupted > 5
    check_next_cluster(server)


def test_an_interrupt_at_each_wait_of_an_end(server, points):
    """As a second Ctrl-C would break through: the rest of the end runs all the same."""
    interrupted = 0
    for chosen in every(points):
        try:
            with telegrad.LocalCluster(["a"], server=server) as cluster:
                cluster.call("a", abs, -1)
                points.seen, points.chosen = 0, chosen
        except KeyboardInterrupt:
            interrupted += 1
        points.chosen = -1
        check_nothing_is_left(server)
    assert interrupted  # how many waits there are depends on what has ended by itself meanwhile
    check_next_cluster(server)


def trace_lines(visit: Callable[[FrameType], None]) -> Callable[..., Any]:
    """A tracer that visits the lines of telegrad's own code."""

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            visit(frame)
        return local

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    return on_call


class CtrlC:
    """Sends the process SIGINT at one line of telegrad's code on the main thread."""

    def __init__(self) -> None:
        self.lines = 0
        self.at = -1
        self.sent = False

    def visit(self, frame: FrameType) -> None:
        self.lines += 1
        if self.lines == self.at:
            self.sent = True
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def during(self, at: int) -> Iterator[None]:
        self.lines, self.at, self.sent = 0, at, False
        before = sys.gettrace()
        sys.settrace(trace_lines(self.visit))
        try:
            yield
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("transport", ["unix", "inproc"])
def test_ctrl_c_at_many_lines_of_a_start(server, transport):
    ctrl_c, at, interrupted = CtrlC(), 1, 0
    while True:
        try:
            with ctrl_c.during(at), telegrad.LocalCluster(["a"], transport=transport, server=server):
                sys.settrace(None)
        except KeyboardInterrupt:
            interrupted += 1
        check_nothing_is_left(server)
        assert interrupted or at > 1
        if not ctrl_c.sent:
            break
        at = at + 1 if at < 40 else at + at // 20
    assert interrupted >= 20, "an interrupt was lost"
    check_next_cluster(server)


def test_ctrl_c_at_many_lines_of_an_end(server):
    ctrl_c, at, interrupted = CtrlC(), 1, 0
    while True:
        ended: list[int] = []
        try:
            cluster = telegrad.LocalCluster(["a"], server=server)
            cluster.__enter__()
            ended = list(cluster.pids.values())
            with ctrl_c.during(at):
                cluster.__exit__(None, None, None)
        except KeyboardInterrupt:
            interrupted += 1
            if at == 1:  # the line before anything can be deferred
                cluster.__exit__(None, None, None)
        assert not set(ended) & set(children_of(server)), "the interrupt came before the end was complete"
        check_nothing_is_left(server)
        if not ctrl_c.sent:
            break
        at = at + 1 if at < 40 else at + at // 20
    assert interrupted >= 20, "an interrupt was lost"
    check_next_cluster(server)


def test_the_answer_to_a_request_that_was_given_up_goes_to_no_other_request(server):
    """The server answers requests in their order; processes that are not wanted any more are ended."""
    stopped = server._process.pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(errors.ClusterError, match="did not answer within"):
            server.spawn([Job("late", "telegrad.cluster.local:run_child", b"")], timeout=0.01)
    finally:
        os.kill(stopped, signal.SIGCONT)
    check_next_cluster(server)
    check_nothing_is_left(server)
    assert not server._requests


def test_the_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    with telegrad.LocalCluster(["a"], transport="inproc"):
        assert signal.getsignal(signal.SIGINT) is interrupts.on_signal
    assert signal.getsignal(signal.SIGINT) is before


def test_a_start_that_fails_gives_everything_back(server):
    with telegrad.LocalCluster(["a"], server=server) as cluster:
        users = set(interrupts._users)
        with pytest.raises(errors.NameTakenError):
            rpc.Worker.start("a", _group(cluster.address))
        assert interrupts._users == users


def _group(address: str) -> Any:
    from telegrad.rendezvous.address import open_store
    from telegrad.rendezvous.group import Group

    return Group(open_store(address, -1, None, PATIENCE)[0], None, PATIENCE)
