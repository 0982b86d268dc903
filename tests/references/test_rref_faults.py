"""RRefs when workers die, messages fail, and workers shut down. In processes where that matters."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import telegrad
from telegrad import errors, rpc
from telegrad.primitives.current import current_worker
from telegrad.rpc import RRef

PATIENCE = 30.0
_kept: list[Any] = []


@pytest.fixture
def workers() -> Iterator[dict[str, telegrad.Worker]]:
    """Workers "a", "b", "c" and the caller's own, in this process."""
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a", "b", "c"], transport="inproc", options=options) as cluster:
        found = {worker.name: worker for worker in (current_worker(), *cluster._in_process)}
        yield found
        found.clear()  # who keeps the fixture must not keep the workers


@pytest.fixture
def cluster(server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a", "b", "c"], server=server, options=options) as cluster:
        yield cluster


def counts() -> dict[str, int]:
    return current_worker().references.statistics()


def wait_for(wanted: dict[str, int], *workers: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        gc.collect()  # an exception and its frames refer to each other
        found = {name: rpc.rpc_sync(name, counts) for name in workers}
        if all(found[name][what] == n for name in found for what, n in wanted.items()):
            return
        assert time.monotonic() < deadline, f"still {found}"
        threading.Event().wait(0.01)


def keep(rref: Any) -> None:
    _kept.append(rref)


def lend(rref: Any, to: str) -> None:
    rpc.rpc_sync(to, keep, args=(rref,))


def pid() -> int:
    return os.getpid()


def kill(name: str) -> None:
    os.kill(rpc.rpc_sync(name, pid), signal.SIGKILL)


def use_kept() -> Any:
    return _kept[-1].to_here(timeout=PATIENCE)


# -- deaths ------------------------------------------------------------------------------------------------


def test_a_killed_holder_keeps_nothing(cluster):
    rref = rpc.remote("a", int, args=("7",))
    rpc.rpc_sync("b", keep, args=(rref,))
    rref.to_here()
    del rref
    wait_for({"owned": 1}, "a")
    kill("b")
    wait_for({"owned": 0, "on_loan": 0}, "a", "driver")


def test_a_killed_holder_that_got_it_from_a_third(cluster):
    rref = rpc.remote("a", int, args=("7",))
    rpc.rpc_sync("b", lend, args=(rref, "c"))
    del rref
    wait_for({"owned": 1}, "a")
    wait_for({"held": 0, "on_loan": 0}, "b", "driver")
    assert rpc.rpc_sync("c", use_kept) == 7
    kill("c")
    wait_for({"owned": 0}, "a")


def test_a_dead_owner_is_named(cluster):
    rref = rpc.remote("a", int, args=("7",))
    assert rref.to_here() == 7
    kill("a")
    for use in (rref.to_here, rref.rpc_sync().bit_length, rref._get_type):
        with pytest.raises((errors.PeerLostError, errors.UnknownWorkerError), match="'a'"):
            use()
    with pytest.raises((errors.PeerLostError, errors.UnknownWorkerError), match="'a'"):
        rref.to_here_async().wait()
    del rref
    assert rpc.rpc_sync("b", abs, args=(-1,)) == 1


def wait_long(event: Any) -> None:
    event.rpc_sync(timeout=PATIENCE).wait(PATIENCE)


def test_an_owner_that_dies_while_it_creates(cluster):
    event = RRef(threading.Event())
    rref = rpc.remote("a", wait_long, args=(event,))
    future = rref.to_here_async()
    kill("a")
    with pytest.raises(errors.PeerLostError, match="'a'"):
        future.wait()
    with pytest.raises(errors.PeerLostError, match="'a'"):
        rref.to_here()
    event.local_value().set()


def test_a_lender_that_dies(cluster):
    """c has told the owner by then, and keeps it."""
    rref = rpc.remote("a", int, args=("7",))
    rpc.rpc_sync("b", lend, args=(rref, "c"))
    assert rpc.rpc_sync("c", use_kept) == 7
    del rref
    kill("b")
    assert rpc.rpc_sync("c", use_kept) == 7
    wait_for({"owned": 1}, "a")


# -- messages that come to nothing -------------------------------------------------------------------------


class Unloadable:
    """Can be sent, and not be rebuilt."""

    def __reduce__(self) -> Any:
        return fail_to_load, ()


def fail_to_load() -> None:
    raise ValueError("this cannot be rebuilt")


@pytest.mark.parametrize("owner", ["driver", "a", "b"])
def test_a_message_that_cannot_be_decoded_keeps_nothing(workers, owner):
    rref = RRef(1) if owner == "driver" else rpc.remote(owner, int, args=("1",))
    with pytest.raises(errors.DecodeError):
        rpc.rpc_sync("b", keep, args=([Unloadable(), rref],))
    assert rref.to_here() == 1
    del rref
    wait_for({"owned": 0, "held": 0, "on_loan": 0}, *workers)


@pytest.mark.parametrize("owner", ["driver", "a"])
def test_a_message_that_cannot_be_sent_lends_nothing(workers, owner, monkeypatch):
    rref = RRef(1) if owner == "driver" else rpc.remote(owner, int, args=("1",))
    rref.to_here()
    driver = workers["driver"]
    connection = driver._peers.reach("b", PATIENCE)[1]

    def write(*args: object) -> int:
        raise errors.TooLargeError("too large")

    monkeypatch.setattr(connection, "write", write)
    with pytest.raises(errors.TooLargeError):
        rpc.rpc_sync("b", keep, args=(rref,))
    monkeypatch.undo()
    del rref
    wait_for({"owned": 0, "held": 0, "on_loan": 0}, *workers)


def test_a_value_whose_class_is_not_known_there(workers):
    rref = rpc.remote("a", Unloadable)
    with pytest.raises(errors.DecodeError, match="cannot be rebuilt"):
        rref.to_here()
    del rref
    wait_for({"owned": 0, "held": 0}, *workers)


_given_up = threading.Event()  # the workers are of this process


def test_an_answer_that_comes_too_late_keeps_nothing(workers):
    _given_up.clear()
    value = RRef(1)
    with pytest.raises(errors.CallTimeoutError):
        rpc.rpc_sync("a", make_late, args=(value,), timeout=0.05)
    _given_up.set()
    del value
    wait_for({"owned": 0, "held": 0, "on_loan": 0}, *workers)


def make_late(value: Any) -> Any:
    assert _given_up.wait(PATIENCE)
    return RRef(1)


# -- shutdown ----------------------------------------------------------------------------------------------


def test_use_after_shutdown_is_an_error():
    with telegrad.LocalCluster(["a"], transport="inproc"):
        theirs = rpc.remote("a", int, args=("7",))
        assert theirs.to_here() == 7
        own = RRef(5)
    assert own.local_value() == 5
    for use in (theirs.to_here, theirs.rpc_sync().bit_length):
        with pytest.raises(errors.NotStartedError):
            use()
    with pytest.raises(errors.NotStartedError):
        RRef(1)


def test_whoever_waits_for_a_value_hears_of_the_shutdown():
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        a = next(worker for worker in cluster._in_process if worker.name == "a")
        rref = rpc.remote("a", hold_up)
        future = rref.to_here_async()
        a.close(graceful=False)
        del a
        with pytest.raises((errors.PeerLostError, errors.NotStartedError)):
            future.wait()
        _release.set()


_release = threading.Event()


def hold_up() -> None:
    _release.wait(PATIENCE)
