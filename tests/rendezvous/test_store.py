"""StoreClient and Group over a store that does not answer: every request ends in time, and nothing is left."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore, Store

import telegrad
from telegrad import errors
from telegrad.cli.observer import ObservedGroup
from telegrad.messages import Member
from telegrad.primitives import clock
from telegrad.primitives.interrupts import critical
from telegrad.rendezvous.group import Group, poll_until
from telegrad.rendezvous.store import Deadline, StoreClient
from telegrad.runtime import shutdown
from telegrad.worker import Worker

PATIENCE = 30.0


class GatedStore(Store):
    """A store in this process that does not answer while its gate is shut, as one whose process is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = HashStore()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # a request waits at the gate
        self.requests = 0

    def _pass(self) -> HashStore:
        self.requests += 1
        if not self.gate.is_set():
            self.entered.set()
        assert self.gate.wait(PATIENCE)
        return self._inner

    def compare_set(self, key, expected, desired):
        return self._pass().compare_set(key, expected, desired)

    def set(self, key, value):
        return self._pass().set(key, value)

    def add(self, key, amount):
        return self._pass().add(key, amount)

    def deleteKey(self, key):  # the name that torch calls
        return self._pass().delete_key(key)

    def check(self, keys):
        return self._pass().check(keys)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


def took(function) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def test_a_first_call_ends_at_its_time_limit_while_the_store_is_stopped(store):
    worker = Worker.start("w", Group(store, None, 5.0))
    store.gate.clear()

    def call() -> None:
        with pytest.raises(
            errors.CallTimeoutError, match=r"store does not answer within 0\.3 s; is its process stopped"
        ):
            worker.call("other", abs, (1,), timeout=0.3)

    assert 0.3 <= took(call) < 3.0
    with pytest.raises(errors.CallTimeoutError, match=r"within 0\.1 s"):
        with critical():
            worker.create("other", abs, (1,), timeout=0.1)
    assert worker.call("w", abs, (-1,)) == 1, "peers that are known need no store"
    store.gate.set()
    worker.close(graceful=False)


def test_a_worker_closes_within_a_second_while_the_store_is_stopped(store):
    worker = Worker.start("w", Group(store, None, 5.0))
    store.gate.clear()
    assert took(lambda: worker.close(graceful=False)) < 3.0
    before = store.requests
    store.gate.set()
    with pytest.raises(errors.RendezvousError, match="has left its group"):
        worker.group.find("w")
    assert store.requests == before, "a closed group does not use its store again"


def test_a_request_whose_caller_has_given_up_is_not_made(store):
    client = StoreClient(store)
    store.gate.clear()
    for _ in range(3):
        with pytest.raises(errors.RendezvousError, match="does not answer"):
            client.ask(lambda it: it.add("n", 1), Deadline(0.05))
    store.gate.set()
    assert client.ask(lambda it: it.add("n", 0), Deadline(PATIENCE)) == 1, "the one that was under way alone"
    client.close()


def test_the_thread_ends_when_a_closed_clients_store_answers_at_last(store):
    client = StoreClient(store)
    store.gate.clear()
    with pytest.raises(errors.RendezvousError):
        client.ask(lambda it: it.add("n", 1), Deadline(0.05))
    client.close()
    assert [t.name for t in threading.enumerate()].count("telegrad-store") == 1
    store.gate.set()
    for thread in threading.enumerate():
        if thread.name == "telegrad-store":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_close_fails_the_requests_that_were_not_begun(store):
    client = StoreClient(store)
    store.gate.clear()
    failed: list[str] = []

    def ask() -> None:
        try:
            client.ask(lambda it: it.add("n", 1), Deadline(PATIENCE))
        except errors.RendezvousError as error:
            failed.append(str(error))

    first, second = threading.Thread(target=ask), threading.Thread(target=ask)
    first.start()
    assert store.entered.wait(PATIENCE)
    second.start()
    while not client._requests:
        assert second.is_alive()
    client.close()
    second.join(PATIENCE)
    assert failed == ["the worker has left its group before the group's store was asked"]
    store.gate.set()
    first.join(PATIENCE)
    assert len(failed) == 1, "the request that was under way has its answer"


def test_a_client_without_requests_keeps_neither_a_thread_nor_the_store():
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    client = StoreClient(thing)
    assert client.ask(lambda it: it is not None, Deadline(PATIENCE))
    thread = client._thread
    del thing, client
    if thread is not None:
        thread.join(PATIENCE)
    gc.collect()
    assert gone() is None


def test_an_interrupt_while_the_store_is_stopped_comes_through(store, monkeypatch):
    client = StoreClient(store)
    store.gate.clear()

    def interrupted(function, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr("telegrad.rendezvous.store.interruptible", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.ask(lambda it: it.add("n", 1), Deadline(PATIENCE))
    monkeypatch.undo()
    store.gate.set()
    client.ask(lambda it: it.add("n", 0), Deadline(PATIENCE))
    client.close()


def test_an_error_of_the_store_is_told(store):
    client = StoreClient(store)
    with pytest.raises(ZeroDivisionError):
        client.ask(lambda _: 1 / 0, Deadline(PATIENCE))
    client.close()


def test_a_look_at_a_stopped_store_ends_in_time(store):
    Group(store, 2, 5.0)
    group = ObservedGroup(store, 5.0)
    store.gate.clear()

    def look() -> None:
        with pytest.raises(errors.RendezvousError, match=r"within 0\.2 s"):
            group.members(0.2)

    assert took(look) < 3.0
    group.leave(Member(-1, "observer", (), ""), tell=True)


def test_a_shutdown_of_a_fixed_group_ends_in_time_while_the_store_is_stopped(store):
    worker = Worker.start("w", Group(store, 1, 5.0), telegrad.Options(shutdown_timeout=0.2), rank=0)
    store.gate.clear()

    def close() -> None:
        with pytest.raises(errors.RendezvousError, match="does not answer"):
            worker.close()

    assert took(close) < 5.0
    assert worker.is_closed


def test_waiting_for_one_rank_of_many_costs_two_requests_at_a_time(store, monkeypatch):
    """Workers wait in shutdown() for hours, beside one that works."""
    size, handed_over, ask = 20, [], StoreClient.ask

    def count(self: StoreClient, function: object, until: Deadline) -> object:
        handed_over.append(function)
        return ask(self, function, until)

    worker = Worker.start("w", Group(store, 1, 5.0), rank=0)
    group = worker.group
    group.world_size = size
    for rank in set(range(size)) - {7, 12}:
        group.arrive("end", rank)
    roll = shutdown._RollCall(worker, "end", None)
    assert not roll.is_complete() and roll.missing[0] == 7
    monkeypatch.setattr(StoreClient, "ask", count)
    before = store.requests
    for _ in range(10):
        assert not roll.is_complete()
    assert store.requests - before == 20  # whether it has come, and whether it has left
    assert len(handed_over) == 10
    assert roll.all_missing() == [7, 12]
    group.arrive("end", 7)
    group.arrive("end", 12)
    assert roll.is_complete() and not roll.all_missing()
    group.world_size = 1
    worker.close()


def test_whoever_has_waited_for_long_asks_less_often(monkeypatch):
    now, pauses = [100.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(clock, "now", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    assert not poll_until(lambda: False, 60.0)
    assert now[0] == pytest.approx(160.0)  # and not later
    assert pauses == sorted(pauses[:-1]) + pauses[-1:]
    waited = dict(zip(itertools.accumulate(pauses, initial=0.0), pauses, strict=False))
    assert all(pause <= 0.05 for since, pause in waited.items() if since < 5.0)
    assert all(pause == 0.25 for since, pause in waited.items() if 26.0 < since < 59.5)
    assert len(pauses) < 450  # it was 1,200


def test_a_fork_of_a_client_is_closed_and_leaves_the_parents_alone(store):
    client = StoreClient(store)
    client.ask(lambda it: it.set("key", "value"), Deadline(PATIENCE))
    with client._lock:  # as another thread might hold it at the moment of a fork
        pid = os.fork()
        if pid == 0:
            try:
                client.ask(lambda it: it.set("key", "child"), Deadline(1.0))
            except errors.RendezvousError:
                client.close()
                os._exit(0)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.ask(lambda it: it.compare_set("key", "", "other"), Deadline(PATIENCE)) == b"value"
    client.close()


def test_a_look_for_a_worker_that_has_left_waits_for_no_key(store):
    """GatedStore has no get() and no wait(), which would block all others for as long as the key does not come."""
    group = Group(store, None, 5.0)
    member = Member(0, "w", (), "here")
    group.claim("w", 0, lambda _: False)
    group.publish(member)
    assert group.find("w") == group.find(0) == member
    other = Group(store, None, 5.0)
    group.leave(member, tell=True)
    assert other.find("w") is other.find(0) is None


def test_a_store_whose_process_died_is_named_in_one_line_and_a_lost_peer_comes_first(tmp_path):
    """The rank that serves the store is killed. torch's own messages about that would fill the terminal."""
    script = """
        import os, signal, sys, telegrad
        from telegrad import errors, rpc
        options = telegrad.Options(rpc_timeout=20, shutdown_timeout=20)
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, options=options)
        if rank == 0:
            rpc.shutdown()
        pid = rpc.rpc_sync("w0", os.getpid)
        try:
            rpc.rpc_sync("w0", os.kill, args=(pid, signal.SIGKILL))
        except errors.PeerLostError:
            pass
        for what in (
            lambda: rpc.rpc_sync("w0", abs, args=(1,)), lambda: rpc.get_worker_info("w0"),
            lambda: rpc.rpc_sync("nobody", abs, args=(1,)), rpc.shutdown,
        ):
            try:
                what()
            except errors.TelegradError as error:
                print(type(error).__name__, str(error).count("\\n"), str(error)[:26])
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    first = subprocess.Popen(command, env={**env, "RANK": "0"})
    second = subprocess.run(
        command, env={**env, "RANK": "1"}, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert first.wait(PATIENCE) == -9
    assert second.stderr == ""
    assert second.stdout.splitlines() == [
        "PeerLostError 0 worker 'w0' (id 0) is gone",
        "PeerLostError 0 worker 'w0' (id 0) is gone",
        "RendezvousError 0 the group's store does not",
        "RendezvousError 0 worker 'w0' (rank 0) is go",
    ]
