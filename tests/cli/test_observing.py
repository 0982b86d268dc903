"""Observers: what they see of a group, and that the group is none the wiser."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.cli.observer import Look, Observer, Report, Seen
from telegrad.primitives.current import current_worker
from telegrad.rendezvous.address import open_store, serve_store
from telegrad.rendezvous.group import Group
from telegrad.runtime import shutdown
from telegrad.worker import Worker

QUICK = telegrad.Options(shutdown_timeout=10.0)


@pytest.fixture
def open_cluster(server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    """Workers "a" and "b" as processes, and the caller's own: a group without a size."""
    with telegrad.LocalCluster(["a", "b"], server=server) as cluster:
        yield cluster


def start_group(store: object, size: int | None, names: str = "xy") -> list[Worker]:
    """Workers of this process, over sockets."""

    def start(rank: int, name: str) -> Worker:
        return Worker.start(name, Group(store, size, 10.0), QUICK, rank=rank if size else -1)

    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(start, range(len(names)), names))


def end_group(workers: list[Worker]) -> None:
    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(lambda worker: worker.close(graceful=True), workers))


def reports(look: Look) -> dict[str, Report]:
    assert not [seen for seen in look.workers if seen.report is None], look
    return {seen.member.name: seen.report for seen in look.workers if seen.report is not None}


def test_what_workers_do_is_seen(open_cluster):
    weight = torch.ones(200, 200, requires_grad=True)
    with Observer(open_cluster.address) as observer, autograd.context() as context_id:
        first = reports(observer.look(sample=10.0))
        for _ in range(5):
            product = rpc.rpc_sync("a", torch.matmul, (weight, weight))
        autograd.backward(context_id, [product.sum()])
        second = reports(observer.look())
    assert sorted(second) == ["a", "b", "driver"]
    assert [r.pid for r in (second["a"], second["driver"])] == [open_cluster.pids["a"], os.getpid()]
    assert first["a"].statistics.calls_served == 0
    assert second["a"].statistics.calls_served == 5
    assert second["b"].statistics.calls_served == 0, "the observer's own calls do not count"
    assert second["a"].statistics.calls_being_served == 0
    assert second["a"].statistics.contexts == 1
    (connection,) = second["a"].statistics.connections.values()
    assert connection.bytes_in > 5 * 4 * 200 * 200
    assert connection.shared_bytes > 0


def test_calls_are_timed_while_an_observer_looks(open_cluster):
    with Observer(open_cluster.address) as observer:
        assert reports(observer.look(sample=0.2))["a"].latency is None
        rpc.rpc_sync("a", time.sleep, (0.05,))
        threading.Event().wait(0.2)
        latency = reports(observer.look(sample=0.2))["a"].latency
        assert latency is not None
        assert latency.calls == 1
        assert 0.05 <= latency.median <= latency.p99 < 1.0
        threading.Event().wait(0.2)
        assert reports(observer.look())["a"].latency is None, "none in the second sample"
        assert open_cluster.call("a", subscribers) == 0, "nothing is timed without being asked for"


def test_a_call_that_still_runs_counts_with_its_time_so_far(open_cluster):
    with Observer(open_cluster.address) as observer:
        observer.look(sample=0.2)
        running = rpc.rpc_async("a", time.sleep, (0.6,))
        threading.Event().wait(0.3)
        report = reports(observer.look())["a"]
        assert report.statistics.calls_being_served == 1
        assert report.latency is not None
        assert 0.2 < report.latency.median < 0.6
        running.wait()


def subscribers() -> int:
    return len(current_worker().events.subscribers)


def test_a_group_of_fixed_size_ends_as_if_there_were_no_observer():
    store = serve_store("127.0.0.1", 0, 10.0)
    workers = start_group(store, 2)
    with Observer(f"tcp://127.0.0.1:{store.port}") as observer:
        look = observer.look(sample=5.0)
        assert look.world_size == 2
        assert sorted(reports(look)) == ["x", "y"]
        assert [member.name for member in workers[0].group.members()] == ["x", "y"], "it took no place"
        assert workers[0].infos() == [telegrad.WorkerInfo("x", 0), telegrad.WorkerInfo("y", 1)]
        end_group(workers)
        for one in observer.look().workers:
            # The observer has read the end of its connection by now, or it finds it as it writes.
            assert one.lost and one.problem.startswith(f"worker {one.member.name!r} "), one
            assert "cannot be reached" in one.problem or "is gone" in one.problem


def test_the_next_worker_gets_the_id_that_it_would_have_had(open_cluster):
    for _ in range(3):
        with Observer(open_cluster.address) as observer:
            observer.look()
    store, *_ = open_store(open_cluster.address, -1, None, 5.0)
    worker = Worker.start("late", Group(store, None, 5.0), QUICK)
    try:
        assert worker.id == 3
    finally:
        worker.close(graceful=False)


def test_an_observer_that_goes_is_no_loss(open_cluster):
    """Workers ask the owners of their contexts whether these live when they lose a peer. Not for an observer."""
    with autograd.context():
        rpc.rpc_sync("a", torch.mul, (torch.ones(2, requires_grad=True), 2))
        before = open_cluster.worker.statistics().calls_served
        with Observer(open_cluster.address) as observer:
            observer.look()
        rpc.rpc_sync("a", has_only_peers)
        assert open_cluster.worker.statistics().calls_served - before == 1, "the observer's call alone"


def has_only_peers() -> None:
    """Waits until the observer's connection is gone."""
    peers = current_worker()._peers
    deadline = time.monotonic() + 5.0
    while any(connection.peer.is_observer for connection in peers.connections()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_several_look_at_once(open_cluster):
    with Observer(open_cluster.address) as one, Observer(open_cluster.address) as other:
        one.look(sample=0.1)
        other.look(sample=0.1)
        rpc.rpc_sync("b", torch.add, (1, 2))
        for observer in (one, other):
            assert reports(observer.look())["b"].statistics.calls_served == 1


def test_a_worker_that_is_stopped_does_not_hold_up_the_others(open_cluster):
    os.kill(open_cluster.pids["a"], signal.SIGSTOP)
    try:
        with Observer(open_cluster.address, timeout=0.5) as observer:
            began = time.monotonic()
            seen = {one.member.name: one for one in observer.look().workers}
            assert time.monotonic() - began < 3.0
    finally:
        os.kill(open_cluster.pids["a"], signal.SIGCONT)
    assert seen["b"].report is not None
    assert seen["a"].report is None
    assert not seen["a"].lost


def test_a_worker_that_died_is_lost(open_cluster):
    with Observer(open_cluster.address) as observer:
        observer.look()
        os.kill(open_cluster.pids["a"], signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while not (seen := find(observer.look(), "a")).lost:
            assert time.monotonic() < deadline
        assert "worker 'a'" in seen.problem


def find(look: Look, name: str) -> Seen:
    return next(seen for seen in look.workers if seen.member.name == name)


def test_of_a_name_only_the_newest_worker_is_shown():
    store = serve_store("127.0.0.1", 0, 10.0)
    old = Worker.start("x", Group(store, None, 10.0), QUICK)
    shutdown._tear_down(old)  # as if it had been killed: its entry stays
    new = Worker.start("x", Group(store, None, 10.0), QUICK)
    try:
        with Observer(f"127.0.0.1:{store.port}") as observer:
            (seen,) = observer.look().workers
        assert (seen.member.id, seen.lost) == (1, False)
    finally:
        new.close(graceful=False)
        old.group.leave(old.member, tell=False)


def test_a_group_in_a_file(tmp_path: Path):
    workers = start_group(FileStore(str(tmp_path / "meeting"), -1), None, "z")
    try:
        with Observer(f"file://{tmp_path}/meeting") as observer:
            assert sorted(reports(observer.look())) == ["z"]
    finally:
        end_group(workers)


def test_a_group_of_torchruns_last_restart(monkeypatch):
    """torchrun's agent serves one store for all restarts of its workers."""
    store = serve_store("127.0.0.1", 0, 10.0)
    for restart, name in enumerate("uv"):
        workers = start_group(PrefixStore(f"telegrad/{restart}", store), None, name)
        if restart == 0:
            end_group(workers)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    try:
        with Observer("env://") as observer:
            assert sorted(reports(observer.look())) == ["v"]
    finally:
        end_group(workers)


@pytest.mark.parametrize("address", ["", "somewhere", "host:port", "http://127.0.0.1:1", "127.0.0.1:99999", "env://"])
def test_addresses_that_make_no_sense(address, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(errors.AddressError, match="is not an address"):
        Observer(address)


def test_a_store_where_no_group_has_met():
    store = serve_store("127.0.0.1", 0, 10.0)
    with pytest.raises(errors.RendezvousError, match="no group has met there yet"):
        Observer(f"127.0.0.1:{store.port}")
    assert Group(store, 3, 1.0).world_size == 3, "to look has decided nothing about the group"


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(errors.RendezvousError, match="there is no file"):
        Observer(f"file://{tmp_path}/nothing")
    assert not list(tmp_path.iterdir()), "and it is not made"
