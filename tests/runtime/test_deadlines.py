"""A call has one deadline, from when it is made: connecting, encoding and waiting for room all count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jumping_clock import JumpingClock

import telegrad
from telegrad import errors, rpc
from telegrad.messages import Envelope, Forget, Kind
from telegrad.primitives import clock, current
from telegrad.primitives.current import current_worker
from telegrad.references.table import References
from telegrad.rendezvous.group import Group
from telegrad.transport.base import BeforeWaiting, Frames
from telegrad.transport.inproc import InprocConnection

PATIENCE = 30.0  # no wait in a test is longer
LIMIT = 10.0
SPENT = 6.0  # seconds of it, before the message is written


@pytest.fixture
def clock_of_test(jumping_clock: JumpingClock) -> Iterator[JumpingClock]:
    with telegrad.LocalCluster(["a"], transport="inproc"):
        rpc.rpc_sync("a", abs, args=(1,))
        jumping_clock.stop()
        yield jumping_clock


class SlowToEncode:
    jump: Any = None

    def __reduce__(self) -> Any:
        type(self).jump(SPENT)
        return SlowToEncode, ()


class WaitsThere:
    """A function whose answer does not come before the test says so."""

    go_on: threading.Event

    @classmethod
    def wait(cls, _: object) -> None:
        assert cls.go_on.wait(PATIENCE)


def time_left(_: object = None) -> float:
    serving = current.current_serving()
    assert serving is not None and serving.deadline is not None
    return serving.deadline - clock.now()


@pytest.mark.parametrize("way", ["sync", "async", "remote"])
def test_encoding_counts(clock_of_test, way):
    SlowToEncode.jump = clock_of_test.jump
    args = (SlowToEncode(),)
    if way == "sync":
        left = rpc.rpc_sync("a", time_left, args=args, timeout=LIMIT)
    elif way == "async":
        left = rpc.rpc_async("a", time_left, args=args, timeout=LIMIT).wait()
    else:
        left = rpc.remote("a", time_left, args=args, timeout=LIMIT).to_here()
    assert left == pytest.approx(LIMIT - SPENT)


def test_a_call_whose_time_was_over_before_it_was_written(clock_of_test):
    SlowToEncode.jump = lambda _: clock_of_test.jump(LIMIT + 1.0)
    began, go_on = clock.now(), threading.Event()
    WaitsThere.go_on = go_on
    try:
        with pytest.raises(errors.CallTimeoutError, match="ran for more than set timeout"):
            rpc.rpc_sync("a", WaitsThere.wait, args=(SlowToEncode(),), timeout=LIMIT)
        assert clock.now() - began == pytest.approx(LIMIT + 1.0)
    finally:
        go_on.set()


def test_a_caller_that_reads_waits_for_what_is_left(clock_of_test, monkeypatch):
    """It has the read lease since before the call was written, and reads the answer first of all."""
    reader, waited = current_worker().calls.reader, []
    read_for = reader.read_for

    def note(call: Any, timeout: float | None) -> None:
        waited.append(timeout)
        read_for(call, timeout)

    monkeypatch.setattr(reader, "read_for", note)
    SlowToEncode.jump = clock_of_test.jump
    while not waited:  # else another thread was just reading
        rpc.rpc_sync("a", time_left, args=(SlowToEncode(),), timeout=LIMIT)
    assert waited == pytest.approx([LIMIT - SPENT] * len(waited))


def test_waiting_for_room_counts(clock_of_test):
    """Another call's bytes fill the window; they go after a while."""
    worker = current_worker()
    window = worker.calls.peers.find("a").window
    window.enter(worker.options.peer_byte_limit, 1, None)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(worker.call, "a", time_left, timeout=LIMIT)
        until = time.monotonic() + PATIENCE
        while not window._waiting:
            assert time.monotonic() < until
        clock_of_test.jump(SPENT)
        window.leave(worker.options.peer_byte_limit, 1)
        assert found.result(PATIENCE) == pytest.approx(LIMIT - SPENT)


@pytest.mark.parametrize("way", ["sync", "remote"])
def test_connecting_counts(clock_of_test, way):
    worker = current_worker()
    peers = worker.calls.peers
    reach, known = peers.reach, peers.known_peers

    def slow_reach(to: Any, timeout: float | None) -> Any:
        clock_of_test.jump(SPENT)
        peers.reach, peers.known_peers = reach, known
        return reach(to, timeout)

    peers.reach, peers.known_peers = slow_reach, {}  # as if they had not met
    if way == "sync":
        left = worker.call("a", time_left, timeout=LIMIT)
    else:
        left = rpc.remote("a", time_left, timeout=LIMIT).to_here()
    assert left == pytest.approx(LIMIT - SPENT)


def test_connecting_counts_for_a_message_without_an_answer(clock_of_test, monkeypatch):
    worker = current_worker()
    peers, limits = worker.calls.peers, []
    reach, write = peers.reach, InprocConnection.write

    def slow_reach(to: Any, timeout: float | None) -> Any:
        clock_of_test.jump(SPENT)
        return reach(to, timeout)

    def note(self: InprocConnection, frames: Frames, timeout: float | None = None, before: BeforeWaiting = None) -> int:
        if current.thread.is_main:
            limits.append(timeout)
        return write(self, frames, timeout, before)

    monkeypatch.setattr(peers, "reach", slow_reach)
    monkeypatch.setattr(InprocConnection, "write", note)
    a = peers.known_peers.pop(1)
    try:
        for _ in range(2):
            worker.post(1, Envelope(Kind.FORGET, worker.new_message_id()), Forget(()), LIMIT, None)
            peers.known_peers[1] = a
    finally:
        monkeypatch.undo()
    assert limits == [LIMIT - SPENT, LIMIT]


@pytest.fixture
def asked_for(monkeypatch) -> list[float | None]:
    """The time limits of all questions to the group's store that the test and what it calls have asked: threads of the
    workers look up peers of their own accord."""
    limits: list[float | None] = []

    def note(self: Group, timeout: float | None = None) -> float:
        if current.thread.is_main or current.serving.get() is not None:
            limits.append(timeout)
        return until(self, timeout)

    until = Group._until
    monkeypatch.setattr(Group, "_until", note)
    return limits


def ask_of_others(_: object = None) -> None:
    worker = current_worker()
    assert worker.look_up_name(2) == "b"
    assert worker.info("b").id == 2
    assert [info.name for info in worker.infos()] == ["driver", "a", "b"]


def test_the_store_is_asked_within_the_deadline_of_the_call_that_is_served(jumping_clock, asked_for):
    """It may be silent, and the thread that serves the call must come back."""
    with telegrad.LocalCluster(["a", "b"], transport="inproc"):
        rpc.rpc_sync("a", abs, args=(1,))
        jumping_clock.stop()
        asked_for.clear()
        rpc.rpc_sync("a", ask_of_others, timeout=LIMIT)
        assert asked_for == [LIMIT] * 3
        asked_for.clear()
        current_worker().infos()
        assert asked_for == [current_worker().options.rpc_timeout]


def test_the_text_of_a_handle_asks_nobody(asked_for, monkeypatch):
    hold, may_connect = References._hold, threading.Event()

    def hold_later(self: References, *args: Any) -> None:
        assert may_connect.wait(PATIENCE)
        hold(self, *args)

    monkeypatch.setattr(References, "_hold", hold_later)  # a thread that tells the owner of the handle learns its name
    with telegrad.LocalCluster(["a", "b"], transport="inproc"):
        rref = rpc.rpc_sync("a", rpc.remote, args=("b", int))
        asked_for.clear()
        texts = str(rref), repr(rref)
        assert not asked_for
        assert [text.partition("owner = ")[2] for text in texts] == ["'with id 2')"] * 2
        assert rref.owner_name() == "b"
        assert asked_for == [current_worker().options.rpc_timeout]
        assert "owner = 'b'" in repr(rref)
        may_connect.set()
