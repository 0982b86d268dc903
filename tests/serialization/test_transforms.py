"""Tensors of torch's function transforms: refused where they are sent, in arguments, results and values, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import EncodeError
from telegrad.nn import RemoteModule
from telegrad.rpc import RRef

# torch's forward mode uses it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

PATIENCE = 30.0
X = torch.ones(3, 2)
TANGENT = r"a tensor of shape \(3, 2\) has a forward-mode tangent .* inside the remote function"


@pytest.fixture(params=["inproc", "unix"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a"], transport=request.param, server=server, options=options) as cluster:
        yield cluster


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def double_in(found: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    return found["x"][0] * 2


def flat(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("a", double, args=(x,)).sum()


def nested(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("a", double_in, args=({"x": [x]},)).sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    r"vmap,": lambda call: torch.func.vmap(call)(X),
    r"grad \(or vjp, jacrev\),": lambda call: torch.func.grad(call)(X),
    r"jvp \(or jacfwd\),": lambda call: torch.func.jvp(call, (X,), (X,)),
    r"functionalize,": lambda call: torch.func.functionalize(call)(X),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_calls(cluster, name):
    for call in (flat, nested):
        with pytest.raises(EncodeError, match=rf"belongs to torch\.func\.{name} and transforms do not reach"):
            TRANSFORMS[name](call)
    assert flat(X).item() == 12.0


def keep(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    kept.append(x)
    return x.sum()


def escaped(name: str) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    TRANSFORMS[name](lambda x: keep(x, kept))
    return kept[0]


def test_results_that_have_escaped_from_their_transform(cluster):
    for name in ("vmap,", "functionalize,"):
        with pytest.raises(EncodeError, match=r"the result, a Tensor, cannot be sent back: .* belongs to torch.func"):
            rpc.rpc_sync("a", escaped, args=(name,))


def test_calls_inside_of_transforms_that_do_not_depend_on_their_tensors(cluster):
    assert torch.func.vmap(lambda x: x * rpc.rpc_sync("a", abs, args=(-2,)))(X).sum().item() == 12.0
    assert torch.func.grad(lambda x: (x * rpc.rpc_sync("a", of_ones)).sum())(X).sum().item() == 6.0


def of_ones() -> torch.Tensor:
    return torch.ones(2)


def inside() -> torch.Tensor:
    with fwAD.dual_level():
        dual = fwAD.make_dual(X, X)
        tangent = fwAD.unpack_dual(double(dual)).tangent.clone()
    return torch.func.grad(lambda x: double(x).sum())(X) + torch.func.vmap(double)(X) + tangent


def test_transforms_inside_of_the_remote_function(cluster):
    assert rpc.rpc_sync("a", inside).sum().item() == 36.0


def test_dual_tensors_in_arguments(cluster):
    there = RemoteModule("a", nn.Linear, (2, 2))
    module = nn.Linear(2, 2)
    with fwAD.dual_level():
        tracked = X.clone().requires_grad_()
        for dual in (fwAD.make_dual(X, X), fwAD.make_dual(tracked, X), fwAD.make_dual(nn.Parameter(X), X)):
            for call in (flat, nested, there):
                with pytest.raises(EncodeError, match=TANGENT):
                    call(dual)
            with autograd.context(), pytest.raises(EncodeError, match=TANGENT):
                flat(dual)
            module.__dict__["tangent"] = dual
            with pytest.raises(EncodeError, match=TANGENT):
                RemoteModule.from_module("a", module)
        assert flat(fwAD.unpack_dual(fwAD.make_dual(X, X)).primal).item() == 12.0  # they have no tangent


def dual_result(kind: str) -> Any:
    with fwAD.dual_level():
        dual = fwAD.make_dual(X, X)
        if kind == "error":
            raise KeyError(dual)
        rref = RRef(dual)
        return rpc.rpc_sync(rpc.get_worker_info().name, fetch, args=(rref,)) if kind == "value" else flat_to_self(dual)


def flat_to_self(dual: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(rpc.get_worker_info().name, double, args=(dual,))


def fetch(rref: RRef) -> torch.Tensor:
    return rref.local_value()


def test_dual_tensors_of_other_workers(cluster):
    for kind in ("value", "argument"):
        with pytest.raises(EncodeError, match=TANGENT):
            rpc.rpc_sync("a", dual_result, args=(kind,))


def test_a_tensor_whose_storage_was_freed(cluster):
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(EncodeError, match=r"a tensor of shape \(4,\) has no memory: its storage was freed"):
        flat(freed)
    assert flat(torch.ones(0)).item() == 0.0
