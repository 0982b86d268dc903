"""Copies: of any kind of buffer, by one thread or several, and over when the caller has them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import weakref

import pytest

from telegrad.primitives import interrupts
from telegrad.transport import copying
from telegrad.transport.copying import copy_all, how_many_threads
from telegrad.transport.shared_memory import aligned

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch):
    """Says how many cores this process may use."""

    def set_cores(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))

    return set_cores


def copied(buffers: list) -> list[bytes]:
    """What copy_all() has written; it must have written nothing else."""
    room = sum(aligned(len(b)) for b in buffers)
    memory = memoryview(bytearray(b"\xaa" * (room + 10)))
    places = copy_all(buffers, memory)
    assert bytes(memory[room:]) == b"\xaa" * 10
    at = 0
    for buffer, place in zip(buffers, places, strict=True):
        assert memory[at : at + len(buffer)] == place
        assert bytes(memory[at + len(buffer) : at + aligned(len(buffer))]) == b"\xaa" * (-len(buffer) % 64)
        at += aligned(len(buffer))
    return [bytes(place) for place in places]


@pytest.mark.parametrize("count", [1, 2, 16])
def test_copies_of_any_kind_of_buffer(cores, count):
    cores(count)
    for size in (0, 1, 64 * KIB - 1, 64 * KIB, MIB, 9 * MIB + 3):
        data = random.Random(size).randbytes(size)
        for buffer in (
            data,
            bytearray(data),
            memoryview(bytearray(data)),
            memoryview(data),
            memoryview(data)[7:],
            memoryview(bytearray(data))[7:],
        ):
            assert copied([buffer]) == [bytes(buffer)]


def test_many_buffers_are_one_copy(cores):
    cores(16)
    chance = random.Random(7)
    buffers = [bytearray(chance.randbytes(chance.choice([0, 5, 70 * KIB, 700 * KIB, 3 * MIB]))) for _ in range(30)]
    assert copied(buffers) == [bytes(b) for b in buffers]


def test_how_many_threads(cores):
    for count, expected in ((1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (64, 4)):
        cores(count)
        assert max(how_many_threads(), 1) == expected


def test_small_copies_and_small_machines_start_no_thread(cores):
    cores(16)
    copied([bytearray(8 * MIB - 1)])
    copied([bytearray(MIB - 1)] * 20)
    cores(2)
    copied([bytearray(16 * MIB)])
    assert not copying._helpers._threads


def test_helpers_help_and_end_when_they_are_idle(cores, monkeypatch):
    cores(16)
    monkeypatch.setattr(copying, "_IDLE", 0.05)
    at_it = threading.Barrier(4)
    real = copying.ctypes.memmove
    seen = set()

    def memmove(*move: int) -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            at_it.wait(20)
        real(*move)

    monkeypatch.setattr(copying.ctypes, "memmove", memmove)
    data = random.Random(1).randbytes(16 * MIB)
    assert copied([data]) == [data]
    assert len(seen) == 4
    deadline = time.monotonic() + 5
    while copying._helpers._threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not copying._helpers._threads
    seen.clear()
    at_it.reset()
    assert copied([data]) == [data]  # by new ones


def test_a_caller_that_gets_no_help_copies_alone(cores, monkeypatch):
    cores(16)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying, "_helpers", copying._Helpers())
    monkeypatch.setattr(threading.Thread, "start", start)
    data = random.Random(2).randbytes(16 * MIB)
    assert copied([data]) == [data]


def test_helpers_that_come_too_late_find_nothing_and_hold_nothing(cores, monkeypatch):
    cores(16)
    asked = []
    monkeypatch.setattr(copying._Helpers, "call", lambda self, copy, count: asked.append(copy))

    class Memory(bytearray):
        pass

    data, memory = bytearray(b"x" * (16 * MIB)), Memory(16 * MIB)
    alive = weakref.ref(memory)
    copy_all([data], memoryview(memory))
    assert memory == data
    del memory
    assert alive() is None
    asked[0].help()


def test_a_caller_whose_helpers_are_late_takes_the_rest_at_once(cores, monkeypatch):
    cores(16)
    monkeypatch.setattr(copying._Helpers, "call", lambda self, copy, count: None)
    real, sizes = copying.ctypes.memmove, []

    def memmove(*move: int) -> None:
        real(*move)
        sizes.append(move[2])

    monkeypatch.setattr(copying.ctypes, "memmove", memmove)
    data = [random.Random(n).randbytes(16 * MIB) for n in range(2)]
    assert copied(data) == data
    assert sizes == [4 * MIB, 12 * MIB, 16 * MIB]


def test_after_an_interrupt_no_helper_is_at_it(cores, monkeypatch):
    cores(16)
    real, caller = copying.ctypes.memmove, threading.get_ident()
    helping = threading.Semaphore(0)
    running = []

    def memmove(*move: int) -> None:
        if threading.get_ident() == caller:
            assert helping.acquire(timeout=20)
            raise ZeroDivisionError  # as the handler of a signal may
        running.append(None)
        helping.release()
        time.sleep(0.1)
        real(*move)
        running.pop()

    monkeypatch.setattr(copying.ctypes, "memmove", memmove)
    with pytest.raises(ZeroDivisionError):
        copy_all([bytearray(64 * MIB)], memoryview(bytearray(64 * MIB)))
    assert not running


def test_ctrl_c_waits_for_the_end_of_a_copy(cores, monkeypatch):
    cores(16)
    real, caller = copying.ctypes.memmove, threading.get_ident()
    moved, pressed = [], threading.Event()

    def memmove(*move: int) -> None:
        if threading.get_ident() != caller:
            assert pressed.wait(20)
        elif not pressed.is_set():
            pressed.set()
            signal.raise_signal(signal.SIGINT)
        real(*move)
        moved.append(move[2])

    monkeypatch.setattr(copying.ctypes, "memmove", memmove)
    interrupts.install(cores)
    try:
        with pytest.raises(KeyboardInterrupt):
            copy_all([bytearray(16 * MIB)], memoryview(bytearray(16 * MIB)))
    finally:
        interrupts.uninstall(cores)
    assert sum(moved) == 16 * MIB


def test_several_threads_copy_at_once(cores):
    cores(16)
    data = [random.Random(n).randbytes(8 * MIB) for n in range(4)]
    wrong = []

    def copy(n: int) -> None:
        for _ in range(10):
            if copied([data[n]]) != [data[n]]:
                wrong.append(n)

    threads = [threading.Thread(target=copy, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_fork_copies_with_helpers_of_its_own(cores):
    cores(16)
    data = random.Random(3).randbytes(16 * MIB)
    assert copied([data]) == [data]
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if copied([data]) == [data] and copying._helpers._threads else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
