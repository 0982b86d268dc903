"""The arguments of a call: a tuple or a list, and a dict. What else could be unpacked is refused, and nothing falsy is
lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import telegrad
from telegrad import autograd, rpc
from telegrad.compat import calls as drop_in
from telegrad.nn import RemoteModule
from telegrad.primitives.current import current_worker
from telegrad.rendezvous.group import Group


def given(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


@pytest.fixture
def cluster() -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        yield cluster


def created(to: str, function: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    return rpc.remote(to, function, args, kwargs).to_here()


WAYS: dict[str, Callable[..., Any]] = {
    "rpc_sync": rpc.rpc_sync,
    "rpc_async": lambda *args: rpc.rpc_async(*args).wait(),
    "remote": created,
    "Worker.call": lambda *args: current_worker().call(*args),
    "Worker.call_async": lambda *args: current_worker().call_async(*args).wait(),
    "drop-in rpc_sync": drop_in.rpc_sync,
    "drop-in rpc_async": lambda *args: drop_in.rpc_async(*args).wait(),
    "drop-in remote": lambda *args: drop_in.remote(*args).to_here(),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_that_are_no_tuple_are_refused(cluster, way):
    for wrong in (torch.zeros(1), torch.ones(3), "ab", "", {"k": 1}, {}, {1}, 5, 0, iter(())):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=rf"^args is a tuple, not a {kind}; did you mean args=\(x,\)\?$"):
            WAYS[way]("a", given, wrong)


@pytest.mark.parametrize("way", WAYS)
def test_keyword_arguments_that_are_no_dict_are_refused(cluster, way):
    for wrong in (torch.zeros(1), [], [("k", 1)], 0, ""):
        with pytest.raises(TypeError, match=f"^kwargs is a dict, not a {type(wrong).__name__}; did you mean"):
            WAYS[way]("a", given, (), wrong)


@pytest.mark.parametrize("way", WAYS)
def test_tuples_lists_dicts_and_none_are_accepted(cluster, way):
    call = WAYS[way]
    assert call("a", given, None) == call("a", given, []) == call("a", given, (), {}) == ((), {})
    assert call("a", given, torch.Size([2, 3])) == ((2, 3), {})
    assert call("a", given, [0, None, ""], {"x": 0}) == ((0, None, ""), {"x": 0})
    assert call("a", given, (1,), OrderedDict(x=[])) == ((1,), {"x": []})
    assert call("a", given, (torch.zeros(1),))[0] == (torch.zeros(1),)


def test_an_empty_init_method_is_not_the_default(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(telegrad.errors.RendezvousError, match="init_method '' is not understood"):
        rpc.init_rpc("x", init_method="")
    torchs = torch.distributed.rpc.TensorPipeRpcBackendOptions(init_method="")
    with pytest.raises(telegrad.errors.RendezvousError, match="init_method '' is not understood"):
        rpc.init_rpc("x", rpc_backend_options=torchs)


@pytest.mark.parametrize("nothing", [{}, 0, ""])
def test_options_of_a_worker_that_are_none_are_refused(nothing):
    with pytest.raises(TypeError, match=r"options is a \w+; expected telegrad.Options"):
        telegrad.Worker.start("x", Group(HashStore(), None, 5.0), nothing)


def test_an_empty_device_is_not_the_default(cluster):
    with pytest.raises(RuntimeError, match="[Dd]evice"):
        RemoteModule("a", nn.Identity).cuda("")


def test_the_roots_of_the_drop_in_are_checked_as_torchs_are(cluster):
    with autograd.context() as context_id:
        for wrong in (None, 0):
            with pytest.raises(TypeError, match="roots must be tensors"):
                drop_in.backward(context_id, wrong)
        with pytest.raises(telegrad.errors.GradientError, match="does not have a valid gradient function"):
            drop_in.backward(context_id, iter([torch.zeros((), requires_grad=True)]))
