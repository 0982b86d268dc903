"""Fixtures: a cluster on any transport, a warm fork server for the session, and a leak check around every test."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lease_check
import pytest
import torch
from jumping_clock import JumpingClock

import telegrad
from telegrad.primitives import current, interrupts

TRANSPORTS = ("inproc", "unix", "tcp")

if "PYTEST_XDIST_WORKER" in os.environ:  # others run tests at the same time: what they leave behind is not ours
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="tests-")
    os.chmod(tempfile.tempdir, 0o1777)  # as the usual one: some tests become another user
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

torch.set_num_threads(1)
faulthandler.enable()
# The first store of a process makes a pipe that libuv keeps for good: not ours, so it comes before any look.
torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
gc.collect()
lease_check.install()
lease_check.read_notes()
gc.freeze()  # what torch brought along is not looked at again: the leak check collects after every test


def threads_now() -> set[str]:
    return {f"{t.name} ({t.ident})" for t in threading.enumerate()}


def descriptors_now() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = os.readlink(entry)
        except OSError:
            continue
    return found


def children_now() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


def shared_memory_now() -> set[str]:
    maps = Path("/proc/self/maps").read_text()
    return {line.split()[0] for line in maps.splitlines() if "memfd:telegrad" in line}


def files_now() -> set[str]:
    found = Path(os.environ.get("TMPDIR", "/tmp")).glob("telegrad-*")
    return {str(path) for path in found if not is_locked(path)}


def is_locked(path: Path) -> bool:
    """Whether this is the directory of a fork server that runs: it may be another test run's."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def settled(before: object, look: object, *, within: float = 3.0) -> set:
    """What is there now that was not before, once it has had a moment to go."""
    deadline = time.monotonic() + within
    while True:
        gc.collect()
        extra = set(look()) - set(before)
        if not extra or time.monotonic() > deadline:
            return extra
        threading.Event().wait(0.01)


LOOKS = {
    "threads": threads_now,
    "file descriptors": descriptors_now,
    "child processes": children_now,
    "shared memory": shared_memory_now,
    "files": files_now,
}


@pytest.fixture(scope="module", autouse=True)
def old_things_are_frozen() -> None:
    """Each leak check collects garbage; what earlier modules have brought along would make that slower and slower."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing may be left behind by a test. What a wider fixture holds was there before and does not count."""
    # Fixtures of module and session scope that this test is the first to use come up before the first look.
    for name in request.fixturenames:
        if name in ("server", "module_cluster", "runner"):
            request.getfixturevalue(name)
    gc.collect()
    before = {what: look() for what, look in LOOKS.items()}
    yield
    left = {}
    for what, look in LOOKS.items():
        extra = settled(before[what], look)
        if extra:
            names = descriptors_now() if what == "file descriptors" else {}
            left[what] = sorted(f"{e} -> {names[e]}" if e in names else str(e) for e in extra)
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module", autouse=True)
def reading_is_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """What threads do while they read is checked, but for modules that count calls, or play the part of a reader."""
    if not getattr(request.module, "UNCHECKED", False) and request.path.parent.name != "transport":
        yield
        return
    lease_check.uninstall()
    yield
    lease_check.install()


@pytest.fixture(autouse=True)
def readers_neither_block_nor_run_users_code() -> Iterator[None]:
    lease_check.take_broken()
    yield
    found = lease_check.take_broken()
    assert not found, "\n".join(found)
    assert not lease_check.is_reading()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> Iterator[None]:
    """Processes that run a part of the tests ignore Ctrl-C; tests of it press keys themselves."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_interrupt_is_left() -> Iterator[None]:
    """A test that presses Ctrl-C leaves nothing of it to the next one in this process."""
    yield
    left = (interrupts.deferred[:], interrupts._held, current.thread.critical, current.thread.blocking)
    interrupts.deferred.clear()
    interrupts._held, current.thread.critical, current.thread.blocking = 0, 0, False
    assert left == ([], 0, 0, False), "deferred interrupts, endings, critical sections, blocking sections left behind"
    assert current.thread.is_main


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    return JumpingClock(monkeypatch)


@pytest.fixture(scope="session")
def server() -> Iterator[telegrad.ForkServer]:
    """One warm process that forks all workers of the tests."""
    with telegrad.ForkServer(preload=["torch._dynamo", "pytest", "hypothesis", "checked_workers"]) as server:
        # It has imported torch once it has forked something.
        with telegrad.LocalCluster(["warm"], server=server):
            pass
        yield server


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cluster(transport: str, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    """Workers "a" and "b" and the caller's own "driver", on each transport."""
    with telegrad.LocalCluster(["a", "b"], transport=transport, server=server) as cluster:
        yield cluster
