"""Each worker draws random numbers of its own, the same in each run: they follow from a seed and the worker's name."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import errors, rpc
from telegrad.cluster import seeding
from telegrad.cluster.seeding import seed_of
from telegrad.messages import Member
from telegrad.nn import RemoteModule
from telegrad.rendezvous.group import Group

Drawn = tuple[list[float], float, float]


def draw() -> Drawn:
    return torch.rand(3).tolist(), random.random(), float(numpy.random.rand())


def drawn_by(cluster: telegrad.LocalCluster, *names: str) -> dict[str, Drawn]:
    return {name: cluster.call(name, draw) for name in names}


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Those of this process, which are as before afterwards."""
    with torch.random.fork_rng():
        of_python, of_numpy = random.getstate(), numpy.random.get_state()
        yield
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def test_a_workers_numbers_follow_from_seed_and_name(server):
    with telegrad.LocalCluster(["a", "b"], server=server, seed=1) as cluster:
        first = drawn_by(cluster, "a", "b")
    for part in range(3):
        assert first["a"][part] != first["b"][part]
    with telegrad.LocalCluster(["c", "b", "a"], driver="x", server=server, seed=1) as cluster:
        assert drawn_by(cluster, "b", "a") == first
    with telegrad.LocalCluster(["a", "b"], server=server, seed=2) as cluster:
        assert drawn_by(cluster, "a", "b") != first


def test_seeding_all_workers_has_the_time_limit_of_one_call(jumping_clock, monkeypatch):
    """It asks the store, then the workers, and both may be silent."""
    limits: list[float | None] = []
    members = Group.members

    def slow(self: Group, timeout: float | None = None) -> list[Member]:
        limits.append(timeout)
        jumping_clock.jump(6.0)
        return members(self, timeout)

    def ask(*args: Any) -> Any:
        limits.append(args[-1])
        return {}, {}

    with telegrad.LocalCluster(["a"], transport="inproc"):
        rpc.rpc_sync("a", abs, args=(1,))
        jumping_clock.stop()
        monkeypatch.setattr(Group, "members", slow)
        monkeypatch.setattr(seeding, "ask", ask)
        telegrad.manual_seed(1)
        rpc.rpc_sync("a", telegrad.manual_seed, args=(1,), timeout=10.0)  # and that of the call it is made in
        jumping_clock.jump(60.0)
    assert limits == [60.0, 54.0, 10.0, 4.0]


def test_the_seed_is_the_drivers_by_default(server):
    with telegrad.LocalCluster(["a"], server=server, seed=7) as cluster:
        expected = drawn_by(cluster, "a")
    for _ in range(2):
        cluster = telegrad.LocalCluster(["a"], server=server)
        torch.manual_seed(7)
        torch.rand(5)  # what the driver has drawn makes no difference
        before = torch.get_rng_state(), random.getstate()
        with cluster:
            assert drawn_by(cluster, "a") == expected
        assert torch.equal(torch.get_rng_state(), before[0]), "the driver's numbers are its own"
        assert random.getstate() == before[1]


def test_seeds_stay_what_they_are():
    """Results that were published stay reproducible."""
    found = [seed_of("a", 0), seed_of("b", 0), seed_of("a", 2**64 - 1)]
    assert found == [2379206572810317670, 5763660183776770523, 9277231869224996323]


def test_remote_modules_differ_unless_their_workers_are_seeded_alike(cluster, transport):
    def weights() -> list[torch.Tensor]:
        return [RemoteModule(name, nn.Linear, (4, 4)).state_dict()["weight"] for name in "ab"]

    first, second = weights()
    assert not torch.equal(first, second)
    if transport != "inproc":  # there they draw from one generator, one after the other
        for name in "ab":
            cluster.call(name, torch.random.set_rng_state, torch.Generator().manual_seed(3).get_state())
        first, second = weights()
        assert torch.equal(first, second)


def test_manual_seed_seeds_all_workers(server):
    with telegrad.LocalCluster(["a", "b"], server=server, seed=5) as cluster:
        expected = drawn_by(cluster, "a", "b")
        assert drawn_by(cluster, "a", "b") != expected
        for _ in range(2):
            generator = telegrad.manual_seed(5)
            assert drawn_by(cluster, "a", "b") == expected
            here = draw()
            assert generator is torch.default_generator
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        assert draw() == here, "the caller has the seed itself"


def test_workers_in_one_process_share_its_generators():
    with pytest.raises(ValueError, match=r"call torch.manual_seed\(\)"):
        telegrad.LocalCluster(["a"], transport="inproc", seed=1)
    with telegrad.LocalCluster(["a", "b"], transport="inproc") as cluster:
        torch.manual_seed(1)
        expected = torch.rand(3).tolist()
        telegrad.manual_seed(1)
        assert cluster.call("b", draw)[0] == expected


def test_manual_seed_leaves_out_the_dead(server):
    with telegrad.LocalCluster(["a", "b"], server=server, seed=5) as cluster:
        expected = drawn_by(cluster, "b")
        os.kill(cluster.pids["a"], signal.SIGKILL)
        with pytest.raises(errors.PeerLostError):
            cluster.call("a", draw)
        telegrad.manual_seed(5)
        assert drawn_by(cluster, "b") == expected


def test_manual_seed_needs_a_worker_and_a_seed():
    with pytest.raises(errors.NotStartedError):
        telegrad.manual_seed(0)
    with pytest.raises(ValueError, match="invalid literal"):
        telegrad.LocalCluster(["a"], seed="x")


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_checkpoint_preserves_the_random_state_of_its_process(cluster):
    def masked(x: torch.Tensor) -> torch.Tensor:
        return dropout(rpc.rpc_sync("a", twice, args=(x,)))

    for use_reentrant in (False, True):
        torch.manual_seed(0)
        x = torch.ones(50, requires_grad=True)
        y = checkpoint(masked, x, use_reentrant=use_reentrant)
        with torch.random.fork_rng():
            torch.rand(3)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
