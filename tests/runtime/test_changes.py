"""Arguments that a call changes in place: the caller is told once, where a result of one process would differ."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import telegrad
from telegrad import autograd, functions, rpc
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


def replace(found: dict[str, Any]) -> None:
    """Replaces a tensor by one with the same id."""
    before, found["x"] = id(found["x"]), None
    others = []
    for _ in range(100):
        found["x"] = torch.ones(1)
        if id(found["x"]) == before:
            return
        others.append(found["x"])
    raise AssertionError


def test_a_tensor_in_the_memory_of_another(cluster, told):
    rpc.rpc_sync("a", replace, args=({"x": torch.ones(1)},))
    assert told() == ["worker 'a': argument 0 of replace"]


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


def wait_for_b() -> torch.futures.Future[Any]:
    return rpc.rpc_async("b", abs, args=(1,))


@functions.async_execution
def add_at_once(x: torch.Tensor) -> torch.futures.Future[Any]:
    x.add_(1)
    return wait_for_b()


@functions.async_execution
def add_later(x: torch.Tensor, *, found: list[torch.Tensor]) -> torch.futures.Future[Any]:
    return wait_for_b().then(lambda _: add_to_it(x))


@functions.async_execution
def append_later(x: torch.Tensor, *, found: list[torch.Tensor]) -> torch.futures.Future[Any]:
    return wait_for_b().then(lambda _: append(found))


@functions.async_execution
def return_it_later(x: torch.Tensor, found: list[torch.Tensor]) -> torch.futures.Future[Any]:
    return wait_for_b().then(lambda _: returns_it(x, found))


@functions.async_execution
def fail_later(x: torch.Tensor) -> torch.futures.Future[Any]:
    x.add_(1)
    return wait_for_b().then(lambda _: 1 // 0)


def test_functions_that_return_futures(cluster, told):
    """The arguments are looked at when the future is done."""
    for _ in range(2):
        rpc.rpc_sync("a", add_at_once, args=(torch.ones(2),))
        rpc.rpc_async("a", add_later, args=(torch.ones(2),), kwargs={"found": []}).wait()
        rpc.remote("a", append_later, args=(torch.ones(2),), kwargs={"found": []}).to_here()
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            rpc.rpc_sync("a", fail_later, args=(torch.ones(2),))
    rpc.rpc_sync("a", return_it_later, args=(torch.ones(2), []))
    expected = {"0 of add_at_once", "0 of add_later", "'found' of append_later"}
    found = told()
    for _ in range(500):  # a thread of this worker writes the one about the value
        if len(found) == len(expected):
            break
        rpc.rpc_sync("a", abs, args=(1,))
        found += told()
    assert sorted(found) == sorted(f"worker 'a': argument {what}" for what in expected)


class Later(torch.futures.Future):
    """Is done when someone waits for it."""

    def __init__(self, task: Callable[[], Any]) -> None:
        super().__init__()
        self.task = task

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        super().add_done_callback(callback)
        self.set_result(self.task())


class Counter:
    def add(self, x: torch.Tensor) -> Later:
        return Later(lambda: add_to_it(x))

    def add_and_return(self, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(x.add_(1))
        return future


def test_methods_that_return_futures(cluster, told):
    there = rpc.remote("a", Counter)
    assert torch.equal(there.rpc_sync().add_and_return(torch.ones(2)), torch.full((2,), 2.0))
    assert told() == []
    there.rpc_sync().add(torch.ones(2))
    assert told() == ["worker 'a': argument 0 of add"]


kept: list[weakref.ref[torch.Tensor]] = []
futures: list[torch.futures.Future[int]] = []


@functions.async_execution
def keep_me_waiting(x: torch.Tensor) -> torch.futures.Future[int]:
    kept.append(weakref.ref(x))
    futures.append(torch.futures.Future())
    return futures[-1]


def test_arguments_of_one_call_are_kept_until_its_future_is_done():
    kept.clear()
    futures.clear()

    def soon(is_so: Callable[[], bool]) -> bool:
        for _ in range(500):
            if is_so():
                return True
            rpc.rpc_sync("a", abs, args=(1,))
        return False

    def are_kept(number: int) -> bool:
        return soon(lambda: sum(ref() is not None for ref in kept) == number)

    with telegrad.LocalCluster(["a"], transport="inproc"):
        waiting = [rpc.rpc_async("a", keep_me_waiting, args=(torch.ones(2),)) for _ in range(3)]
        assert soon(lambda: len(futures) == 3)
        assert are_kept(1)
        for future in futures:
            future.set_result(7)
        assert torch.futures.wait_all(waiting) == [7, 7, 7]
        assert are_kept(0)


def late(x: torch.Tensor, *, y: torch.Tensor) -> None:
    if y.item() > 100:
        x.add_(1)


class Late(nn.Module):
    def forward(self, count: int, x: torch.Tensor) -> int:
        return add_to_it(x) if count > 100 else 0


def test_tensors_among_the_arguments_are_watched_in_each_call(cluster, told):
    module = RemoteModule("a", Late)
    for count in range(102):
        rpc.rpc_sync("a", late, args=(torch.ones(2),), kwargs={"y": torch.tensor(count)})
        module(count, torch.ones(2))
        assert count > 100 or told() == []
    assert told() == ["worker 'a': argument 0 of late", "worker 'a': argument 1 of Late.forward"]


def append_and_return(x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
    found.append(x * 2)
    return found[-1]


def put_and_return_the_inner(state: dict[str, Any]) -> Any:
    state["inner"]["x"] = torch.ones(1)
    return [state["inner"]]


class Remember(nn.Module):
    def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        past.append(x)
        return x


def test_a_list_is_changed_also_where_its_new_tensor_is_returned(cluster, told):
    """The caller has the tensor, but not in its list."""
    rpc.rpc_sync("a", append_and_return, args=(torch.ones(1), []))
    RemoteModule("a", Remember)(torch.ones(1), [])
    assert told() == ["worker 'a': argument 1 of append_and_return", "worker 'a': argument 1 of Remember.forward"]
    rpc.rpc_sync("a", put_and_return_the_inner, args=({"inner": {}},))
    assert told() == []


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
