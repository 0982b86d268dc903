"""torch's rules for device maps, compared with torch's own checks; and groups whose workers have maps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.rpc import TensorPipeRpcBackendOptions, backend_registry
from torch.distributed.rpc import options as torch_options

from telegrad import Options, errors
from telegrad.rendezvous.group import Group
from telegrad.runtime import device_maps
from telegrad.runtime.device_maps import WorkerDevices, check
from telegrad.transport.inproc import Hub
from telegrad.worker import Worker

PATIENCE = 20.0  # seconds


def verdict(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)


# -- the rules, beside torch's own -------------------------------------------------------------------------


def random_worker(dice: random.Random, name: str, names: list[str], count: int) -> WorkerDevices:
    """One that is right more often than not: of a group of several, few must be wrong."""

    def devices(most: int, some_wrong: float) -> list[str]:
        there = ["cpu", *(f"cuda:{index}" for index in range(most))]
        if dice.random() < some_wrong:
            there += [f"cuda:{most}", "xpu:0"]
        return there

    maps = {}
    for to in dice.sample(names, dice.randint(0, len(names))):
        here, there = devices(count, 0.1), devices(dice.randint(0, 3), 0.1)
        picked = dice.sample(here, dice.randint(0, len(here)))
        targets = dice.sample(there, len(there)) if dice.random() < 0.9 else dice.choices(there, k=len(picked))
        maps[to] = dict(zip(picked, targets, strict=False))
    if dice.random() < 0.1:
        maps["none"] = {}
    own = [name for name in devices(count, 0.1) if name != "cpu"]
    listed = dice.sample(own, dice.randint(0, len(own))) if dice.random() < 0.2 else []
    if listed and dice.random() < 0.2:
        listed.append(listed[0])
    return WorkerDevices(name, count, maps, tuple(listed))


def torchs_verdict(workers: list[WorkerDevices], is_whole: bool) -> Any:
    def check_all() -> None:
        backend_registry._validate_device_maps(
            [worker.name for worker in workers],
            {worker.name: worker.count for worker in workers},
            {
                worker.name: {
                    to: {torch.device(here): torch.device(there) for here, there in found.items()}
                    for to, found in worker.maps.items()
                }
                for worker in workers
            },
            {worker.name: [torch.device(name) for name in worker.devices] for worker in workers},
            is_static_group=is_whole,
        )

    return verdict(check_all)


def test_random_groups_get_torchs_verdict_and_words() -> None:
    dice = random.Random(15)
    seen: dict[str, int] = {}
    for _ in range(4000):
        names = [f"w{number}" for number in range(dice.randint(1, 3))]
        workers = [random_worker(dice, name, names, dice.randint(0, 3)) for name in names]
        is_whole = dice.random() < 0.7
        expected = torchs_verdict(workers, is_whole)
        assert verdict(lambda workers=workers, whole=is_whole: check(workers, is_whole=whole)) == expected, workers
        kind = "right" if expected is None else expected[1].split("\n")[0].partition(" has ")[2].partition(" in its")[0]
        seen[kind] = seen.get(kind, 0) + 1
    assert len(seen) == 9, seen  # each of torch's eight errors, and none
    assert min(seen.values()) > 10, seen


@pytest.mark.parametrize(
    "device_map",
    [
        {},
        {"cuda:0": "cuda:1", "cuda:1": "cuda:0"},
        {"cpu": "cuda:0", torch.device("cuda:1"): "cpu"},
        {"cuda:0": "cuda:1", "cuda:1": "cuda:1"},
        {"cpu": "cuda:3", torch.device("cuda:2"): torch.device("cuda:3")},
        {"nonsense": "cuda:0"},
    ],
)
def test_a_map_is_read_as_torch_reads_it(device_map: dict[Any, Any]) -> None:
    def by_torch() -> dict[str, str]:
        found = torch_options._to_device_map(device_map)
        return {str(here): str(there) for here, there in found.items()}

    expected = verdict(by_torch)
    assert verdict(lambda: Options(device_maps={"b": device_map}).device_maps["b"]) == expected


def test_a_list_of_devices_is_read_as_torch_reads_it() -> None:
    for devices in (["cuda:1", torch.device("cuda:0")], ["cpu"], ["cuda:0", "xpu:1"]):
        expected = verdict(lambda devices=devices: tuple(map(str, torch_options._to_device_list(devices))))
        assert verdict(lambda devices=devices: Options(devices=devices).devices) == expected


def test_numbers_are_cuda_devices() -> None:
    options = Options(device_maps={"b": {0: 1, "cpu": 0}}, devices=[0])
    assert options.device_maps == {"b": {"cuda:0": "cuda:1", "cpu": "cuda:0"}}
    assert options.devices == ("cuda:0",)
    assert replace(options, spin=0).device_maps == options.device_maps
    with pytest.raises(RuntimeError, match="Device index must not be negative"):
        Options(device_maps={"b": {-1: 0}})
    with pytest.raises(ValueError, match="say which one, as in 'cuda:0'"):
        Options(device_maps={"b": {"cuda": 0}})


def test_options_of_torch_are_taken_over() -> None:
    theirs = TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}}, devices=["cuda:0", "cuda:1"])
    theirs.set_device_map("b", {"cuda:1": "cuda:0"})
    theirs.set_device_map("c", {"cpu": "cuda:0"})
    options = Options.of(None, theirs)
    assert options.device_maps == {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, "c": {"cpu": "cuda:0"}}
    assert options.devices == ("cuda:0", "cuda:1")
    assert not options.strict_devices
    own = Options(device_maps={"d": {0: 0}})
    assert own.with_those_of_torch(TensorPipeRpcBackendOptions()).device_maps == own.device_maps
    assert Options.of(own) is own
    assert Options.of(None, SimpleNamespace(rpc_timeout=3)).device_maps == {}  # options of a backend with no maps
    # Two that are mapped to one, one after the other, torch sees when workers join: so does telegrad.
    theirs.set_device_map("e", {"cuda:0": "cuda:0"})
    theirs.set_device_map("e", {"cuda:1": "cuda:0"})
    assert Options.of(None, theirs).device_maps["e"] == {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}


# -- groups ------------------------------------------------------------------------------------------------


def start_all(maps: dict[str, Options]) -> dict[str, Worker | Exception]:
    """Starts workers of a group of a fixed size, in the order of their names."""
    store, hub = HashStore(), Hub()
    found: dict[str, Worker | Exception] = {}

    def start(rank: int, name: str) -> None:
        try:
            found[name] = Worker.start(name, Group(store, len(maps), PATIENCE), maps[name], rank=rank, hub=hub)
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=start, args=place) for place in enumerate(sorted(maps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return found


def close_all(found: dict[str, Worker | Exception]) -> None:
    for worker in found.values():
        if isinstance(worker, Worker):
            worker.close(graceful=False)


def test_all_of_a_group_hear_of_a_wrong_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wrong = Options(device_maps={"w2": {0: 1}})
    for _ in range(5):  # those that fail first leave, while others still look
        found = start_all({"w0": Options(), "w1": wrong, "w2": Options(), "w3": Options()})
        close_all(found)
        for error in found.values():
            assert isinstance(error, ValueError), error
            assert str(error) == (
                "Node w1 has target devices with invalid indices in its device map for w2\n"
                "device map = {device(type='cuda', index=0): device(type='cuda', index=1)}\ndevice count = 1"
            )


def test_a_group_with_right_maps_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    maps = {"w1": {"cpu": "cpu"}, "w2": {0: 1}}
    found = start_all({"w0": Options(device_maps=maps), "w1": Options(), "w2": Options(devices=[1])})
    try:
        assert {type(worker) for worker in found.values()} == {Worker}, found
        assert found["w0"].call("w1", torch.neg, (torch.ones(1),)).item() == -1
    finally:
        close_all(found)


def test_a_group_without_maps_asks_for_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("it was asked"))
    monkeypatch.setattr(Group, "exchange", lambda *_: pytest.fail("it was asked"))
    close_all(found := start_all({"w0": Options(), "w1": Options()}))
    assert {type(worker) for worker in found.values()} == {Worker}, found


def test_one_that_comes_later_checks_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes the place of another waits for none: the others need not have said anything."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    store, hub = HashStore(), Hub()

    def start(name: str, rank: int, options: Options) -> Worker:
        return Worker.start(name, Group(store, 1, PATIENCE), options, rank=rank, hub=hub)

    start("w0", 0, Options()).close(graceful=False)
    start("w0", 0, Options(device_maps={"w0": {0: 0}})).close(graceful=False)
    with pytest.raises(ValueError, match="Node w0 has source devices with invalid indices in its device map for w0"):
        start("w0", 0, Options(device_maps={"w0": {1: 0}}))


def test_where_workers_come_and_go_each_checks_its_own_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    store, hub = HashStore(), Hub()

    def start(name: str, device_map: dict[Any, Any]) -> Worker:
        return Worker.start(name, Group(store, None, PATIENCE), Options(device_maps={"w1": device_map}), hub=hub)

    with pytest.raises(ValueError, match="Node w0 has source devices with invalid indices in its device map for w1"):
        start("w0", {1: 0})
    workers = [start("w0", {"cpu": "cuda:7"}), start("w1", {})]
    try:
        with pytest.raises(errors.DecodeError, match="a device map names device cuda:7, and there is none"):
            workers[0].call("w1", torch.neg, (torch.ones(1),))
        assert workers[1].call("w0", torch.neg, (torch.ones(1),)).item() == -1
    finally:
        for worker in workers:
            worker.close(graceful=False)


def test_workers_that_say_nothing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    group = Group(store, 2, 0.2)
    member = device_maps.Member(0, "w0", (), "here", 0)
    with pytest.raises(errors.RendezvousError, match=r"ranks \[1\] have joined, and did not say devices within 0 s"):
        group.exchange("devices", member, b"x")
    group.fail(1, "no such thing")
    with pytest.raises(errors.RendezvousError, match="rank 1 could not join the group: no such thing"):
        group.exchange("devices", member, b"x")
    group.let_go()
