"""Arguments that a call changes in place: the caller is told once, where a result of one process would differ."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import telegrad
from telegrad import autograd, rpc
from telegrad.messages import Call
from telegrad.nn import RemoteModule
from telegrad.rpc import RRef
from telegrad.rref import _invoke
from telegrad.runtime import changes

PATIENCE = 30.0


@pytest.fixture(params=["inproc", "unix"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a", "b"], transport=request.param, server=server, options=options) as cluster:
        yield cluster


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """What callers were told since it was last asked."""
    caplog.set_level(logging.WARNING, logger="telegrad")

    def take() -> list[str]:
        found = [text.partition(" was changed in place by the call")[0] for text in caplog.messages]
        caplog.clear()
        return found

    return take


@dataclass
class Cache:
    """As a model's: its tensors are replaced by longer ones."""

    layers: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def update(self, x: torch.Tensor) -> None:
        before = self.layers[0]["keys"] if self.layers else x[:0]
        self.layers[:] = [{"keys": torch.cat([before, x])}]


class Layer(nn.Module):
    def forward(self, x: torch.Tensor, *, past: Cache | None = None) -> torch.Tensor:
        if past is not None:
            past.update(x)
        return x * 2


def add_to_it(x: torch.Tensor) -> int:
    x.add_(1)
    return 0


def write_to_a_view(x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
    y.view(-1)[0] = 5
    return x * 2


def append(found: list[torch.Tensor]) -> None:
    found.append(torch.ones(1))


def put(found: dict[str, Any]) -> None:
    found["inner"]["new"] = torch.ones(1)


def fill(cache: Cache) -> None:
    cache.update(torch.ones(1))


def train(module: nn.Module) -> None:
    module(torch.ones(4, 2))


def in_inference(found: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        found.append(torch.ones(1))


CHANGES: dict[str, tuple[Any, Any, str]] = {
    "add_to_it": ((torch.ones(2),), {}, "argument 0"),
    "write_to_a_view": ((torch.ones(2),), {"y": torch.ones(2, 2)}, "argument 'y'"),
    "append": (([],), {}, "argument 0"),
    "put": (({"inner": {}},), {}, "argument 0"),
    "fill": ((Cache(),), {}, "argument 0"),
    "train": ((nn.BatchNorm1d(2),), {}, "argument 0"),
    "in_inference": (([],), {}, "argument 0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_kind_of_change_is_said_once(cluster, told, name):
    args, kwargs, what = CHANGES[name]
    function = globals()[name]
    for _ in range(2):
        rpc.rpc_sync("a", function, args=args, kwargs=kwargs)
    assert told() == [f"worker 'a': {what} of {name}"]
    rpc.rpc_async("b", function, args=args, kwargs=kwargs).wait()
    assert told() == [f"worker 'b': {what} of {name}"]


def test_tensors_that_require_grad(cluster, told):
    x = torch.ones(2, requires_grad=True)
    rpc.rpc_sync("a", add_to_it, args=(x,))
    assert told() == ["worker 'a': argument 0 of add_to_it"]
    with autograd.context():
        rpc.rpc_sync("b", append, args=([x],))
    assert told() == ["worker 'b': argument 0 of append"]


def test_the_text_says_what_to_do(cluster, caplog):
    rpc.rpc_sync("a", add_to_it, args=(torch.ones(2),))
    assert "the caller's stays as it was. Return what was changed, or keep it on that worker" in caplog.text


def test_a_cache_of_a_remote_module(cluster, told):
    layer, other = RemoteModule("a", Layer), RemoteModule("b", nn.Identity)
    x = torch.ones(2)
    for _ in range(2):
        layer(x, past=Cache())
    assert told() == ["worker 'a': argument 'past' of Layer.forward"]
    layer(x)
    other(x)
    layer.forward_async(x, past=None).wait()
    assert told() == []


class Store:
    def __init__(self, found: list[torch.Tensor] | None = None) -> None:
        self.found = [] if found is None else found
        self.found.append(torch.ones(1))

    def take(self, x: torch.Tensor) -> None:
        self.found.append(x.zero_())

    def grow(self) -> None:
        self.found[0].add_(1)


def test_a_remote_module_that_is_called_by_names_only(cluster, told):
    layer = RemoteModule("a", Layer)
    assert torch.equal(layer(x=torch.ones(2)), torch.full((2,), 2.0))
    assert told() == []


class CustomList(list):
    def __len__(self) -> int:
        raise RuntimeError("a user's code")

    def __reduce__(self) -> Any:
        return CustomList, ()


class CustomSet(set):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("a user's code")

    def __reduce__(self) -> Any:
        return CustomSet, ()


@pytest.mark.parametrize("kind", [CustomList, CustomSet])
def test_no_code_of_users_runs(cluster, told, kind):
    assert rpc.rpc_sync("a", id, args=(kind(),))
    assert told() == []


def test_methods_of_values(cluster, told):
    store = rpc.remote("a", Store, args=([],))  # the value has it: nothing is lost
    for _ in range(2):
        store.rpc_sync().grow()
    assert told() == []
    store.rpc_sync().take(torch.ones(1))
    assert told() == ["worker 'a': argument 0 of take"]


def test_the_creation_of_a_value(cluster, told):
    rref = rpc.remote("a", add_to_it, args=(torch.ones(1),))
    assert rref.to_here() == 0
    rref._get_future().wait()
    rpc.rpc_sync("a", abs, args=(1,))  # a thread of the worker writes it
    for _ in range(500):
        if found := told():
            break
        telegrad.rpc.rpc_sync("a", abs, args=(1,))
    assert found == ["worker 'a': argument 0 of add_to_it"]


def returns_it(x: torch.Tensor, found: list[torch.Tensor]) -> Any:
    found.append(x.add_(1))
    return {"found": found}


def returns_a_view(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)[:1]


def takes_apart(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch["count"] = 5
    return batch.pop("x") * 2


def of_the_owner(rref: RRef) -> None:
    rref.local_value().add_(1)


class Slots:
    __slots__ = ("x",)


def reads(*args: Any, **kwargs: Any) -> None: ...


def test_nothing_is_said_without_need(cluster, told):
    x = torch.ones(2)
    rpc.rpc_sync("a", returns_it, args=(x, []))
    rpc.rpc_sync("a", returns_a_view, args=(x,))
    rpc.rpc_sync("a", torch.Tensor.add_, args=(x, 1))
    rpc.rpc_sync("a", takes_apart, args=({"x": x},))
    there = rpc.remote("a", torch.ones, args=(2,))
    rpc.rpc_sync("a", of_the_owner, args=(there,))
    there.rpc_sync().add_(1)
    rpc.rpc_sync("a", reads, args=(x, [x], {"k": x}, Cache(), Slots(), nn.Linear(2, 2)), kwargs={"x": x, "m": [[x]]})
    module = RemoteModule.from_module("a", nn.Linear(2, 2))
    module.load_state_dict(nn.Linear(2, 2).state_dict())
    module(x).sum().backward()
    telegrad.optim.DistributedOptimizer(torch.optim.SGD, module.parameters(), lr=0.1).step()
    circle: list[Any] = [x]
    circle.append(circle)
    rpc.rpc_sync("a", reads, args=(circle,))
    assert told() == []


def test_the_first_calls_of_each_function_are_watched_and_then_a_few():
    sample = changes.Sample()
    takes = [sample.takes(Call(add_to_it, (torch.ones(1),), None), "add_to_it") for _ in range(640)]
    assert all(takes[:64])
    assert sum(takes[64:]) == 576 // 16
    assert sample.takes(Call(Cache, (torch.ones(1),), None), "Cache")
    for method in ("update", "get"):  # each method of each value for itself
        for value in (1, 2):
            assert all(sample.takes(Call(_invoke, (value, method, (), {}), None), "_invoke") for _ in range(64))
            assert sample.takes(Call(_invoke, (value, method, (), {}), None), "_invoke")  # the 65th
            assert not sample.takes(Call(_invoke, (value, method, (), {}), None), "_invoke")
