"""One event for one thread, each time a descriptor is armed."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time

import pytest

import telegrad
from telegrad.transport import poller as poller_module
from telegrad.transport.poller import ARMED, DISARMED, Poller

WAIT = 10.0


@pytest.fixture
def pollers():
    """Makes pollers. pytest holds on to what a fixture gives for longer than the leak check allows."""
    made: list[Poller] = []
    yield lambda: made.append(Poller()) or made[-1]
    while made:
        made.pop().close()


@pytest.fixture
def sockets():
    made = socket.socketpair()
    yield made
    for sock in made:
        sock.close()


def test_an_armed_descriptor_is_reported_once(pollers, sockets):
    poller = pollers()
    near, far = sockets
    calls: list[str] = []
    poller.register(near.fileno(), lambda: calls.append("called"))
    far.send(b"x")
    assert poller.poll(0) == []  # not armed
    poller.watch(near.fileno(), ARMED)
    for callback in poller.poll(WAIT):
        callback()
    assert calls == ["called"]
    assert poller.poll(0) == []
    poller.watch(near.fileno(), ARMED)
    poller.watch(near.fileno(), DISARMED)
    assert poller.poll(0) == []
    poller.watch(near.fileno(), ARMED)
    assert len(poller.poll(WAIT)) == 1
    poller.unregister(near.fileno())
    poller.unregister(near.fileno())


def test_a_hang_up_is_reported_once_though_not_armed(pollers, sockets):
    poller = pollers()
    near, far = sockets
    poller.register(near.fileno(), lambda: None)
    far.close()
    assert len(poller.poll(WAIT)) == 1
    assert poller.poll(0) == []
    poller.watch(near.fileno(), DISARMED)
    assert len(poller.poll(WAIT)) == 1
    assert poller.poll(0) == []
    poller.unregister(near.fileno())


def test_a_wake_up_lets_one_thread_out(pollers):
    poller = pollers()
    out = threading.Semaphore(0)

    def sleep() -> None:
        poller.poll(WAIT)
        out.release()

    threads = [threading.Thread(target=sleep) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        poller.wake()
        assert out.acquire(timeout=WAIT)
    for thread in threads:
        thread.join()


def test_a_wake_up_that_finds_no_thread_is_for_the_next(pollers):
    poller = pollers()
    poller.wake()
    poller.wake()
    began = time.monotonic()
    assert poller.poll(WAIT) == []
    assert time.monotonic() - began < WAIT / 2
    assert poller.poll(0) == []


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.005, 1.05])
def test_a_timer_rings_once(pollers, seconds):
    poller = pollers()
    rang: list[float] = []
    poller.on_timer = lambda: rang.append(time.monotonic())
    began = time.monotonic()
    poller.timer(60.0)()
    poller.timer(seconds)()
    for callback in poller.poll(WAIT):
        callback()
    assert seconds <= rang[0] - began < seconds + WAIT / 2
    assert poller.poll(0) == []
    assert len(rang) == 1


def test_what_cannot_be_watched_is_not_known(pollers, tmp_path):
    poller = pollers()
    with open(tmp_path / "file", "w") as file, pytest.raises(PermissionError):
        poller.register(file.fileno(), lambda: None)
    poller.unregister(file.fileno() if not file.closed else 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        poller.register(10**6, lambda: None)


def test_after_its_end():
    poller = Poller()
    poller.close()
    poller.close()
    poller.wake()  # from a finaliser
    poller.unregister(0)
    with pytest.raises(ValueError, match="closed epoll"):
        poller.watch(0, ARMED)


def test_its_descriptors_go_with_it_and_not_before_a_late_wake_up():
    before = len(os.listdir("/proc/self/fd"))
    poller = Poller()
    poller.close()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del poller  # which nothing else refers to
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_closed_without_the_collector():
    """Those of the last few workers may wait a moment: a finaliser may be about to write to one."""
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            with telegrad.LocalCluster(["a"], transport="inproc"):
                pass
        assert len(os.listdir("/proc/self/fd")) - before < 100, "not 8 for each of 60 workers"
    finally:
        gc.enable()


def test_a_fork_closes_none_of_the_descriptors_that_its_copies_may_write_to(pollers):
    """More of them than a process keeps that has closed them itself."""
    bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2 * poller_module._MOST_RETIRED)]
    for bell in bells:
        pollers().own(bell)
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(OSError):
            for bell in bells:
                os.eventfd_write(bell, 1)
            status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
