"""Scripted functions, modules and methods: by reference where they can be imported, else by value. Gradients of what is
in them come back as those of any module do."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import EncodeError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Scale(torch.nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(by))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    @torch.jit.export
    def back(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.by


def apply(function, x):
    return function(x)


def pass_on(function, x):
    return rpc.rpc_sync("b", apply, args=(function, x))


def test_functions_modules_and_methods_by_value(cluster):
    scale = torch.jit.script(Scale(3.0))
    x = torch.ones(2)
    for function in (torch.jit.script(plus_one), scale, scale.forward, scale.back):
        expected = function(x)
        assert torch.equal(rpc.rpc_sync("a", function, args=(x,)), expected)
        assert torch.equal(rpc.rpc_sync("a", apply, args=(function, x)), expected)
        assert torch.equal(rpc.rpc_sync("a", pass_on, args=(function, x)), expected)


def test_parameters_of_modules_arrive(link):
    scale = torch.jit.script(Scale(3.0))
    (found,) = link.carry(scale)
    assert isinstance(found, torch.jit.ScriptModule)
    assert torch.equal(found.by, scale.by)
    assert found.by.requires_grad


@pytest.fixture
def has_scripts(tmp_path, monkeypatch):
    text = "import torch\ndef f(x):\n    return x + 1\nf = torch.jit.script(f)\n"
    (tmp_path / "has_scripts.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("has_scripts")
    del sys.modules["has_scripts"]


def test_functions_by_reference(link, has_scripts, server):
    assert link.carry(has_scripts.f)[0] is has_scripts.f
    with telegrad.LocalCluster(["a"], server=server) as cluster:
        assert cluster.call("a", has_scripts.f, torch.ones(1)).item() == 2
        assert cluster.call("a", apply, has_scripts.f, torch.ones(1)).item() == 2


# -- tensors with a history in scripted modules -------------------------------------------------------------


class Holds(nn.Module):
    """Holds tensors wherever a scripted module may have them, most of them with a history."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.layer.weight
        self.register_buffer("buffer", x * 2)
        self.register_buffer("fixed", torch.ones(3))
        self.attribute = x * 3
        self.several = [x * 4, self.attribute]
        self.named = {"a": x * 5}
        self.pair = (x * 6, 1)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        y = self.tied(self.layer(y)) * self.buffer + self.fixed * self.attribute
        return (y * self.several[0] * self.several[1] + self.named["a"] * self.pair[0]).sum()

    @torch.jit.export
    def halved(self, y: torch.Tensor) -> torch.Tensor:
        return self.forward(y / 2)


class Computes(nn.Module):
    """Has a buffer with a history, and nothing else that requires grad."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("buffer", x * 2)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return (self.buffer * y).sum()


def loaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def leaf() -> torch.Tensor:
    return torch.arange(1.0, 4.0).requires_grad_()


Y = torch.tensor([1.0, -2.0, 3.0])
WAYS: dict[str, Callable[[torch.jit.ScriptModule], torch.Tensor]] = {
    "argument": lambda module: rpc.rpc_sync("a", apply, args=(module, Y)),
    "function": lambda module: rpc.rpc_sync("a", module, args=(Y,)),
    "method": lambda module: rpc.rpc_sync("a", module.halved, args=(2 * Y,)),
    "inside of a module": lambda module: rpc.rpc_sync("a", nn.Sequential(module), args=(Y,)),
    "passed on": lambda module: rpc.rpc_sync("a", pass_on, args=(module, Y)),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_what_scripted_modules_hold(cluster, way):
    x = leaf()
    module = torch.jit.script(Holds(x))
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(Y), leaves, retain_graph=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [WAYS[way](module)], retain_graph=True)
        found = autograd.get_gradients(context_id)
        torch.testing.assert_close([found[each] for each in leaves], list(expected))
    assert all(parameter.is_leaf for parameter in module.parameters())


def test_gradients_of_loaded_and_traced_modules(cluster):
    for module in (loaded(torch.jit.script(Scale(3.0))), torch.jit.trace(Scale(3.0), torch.ones(2))):
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("a", apply, args=(module, Y)).sum()])
            (gradient,) = autograd.get_gradients(context_id).values()
            assert gradient.item() == 2.0


def test_an_attribute_with_a_history_outside_of_contexts(cluster):
    """Attributes that are no buffers are followed, as those of other modules are."""
    x = leaf()
    module = torch.jit.script(Holds(x))
    with torch.no_grad():
        module._c.setattr("buffer", torch.ones(3))
    (expected,) = torch.autograd.grad(module(Y), [x], retain_graph=True)
    rpc.rpc_sync("a", apply, args=(module, Y)).backward()
    torch.testing.assert_close(x.grad, expected)
    assert module.layer.weight.grad is None  # a parameter is a copy, with a leaf of its own


def test_a_parameter_beside_its_scripted_module_is_refused(cluster):
    module = torch.jit.script(Scale(3.0))
    with pytest.raises(EncodeError, match="is sent by itself, and also in a module"):
        rpc.rpc_sync("a", apply, args=(module, module.by))


class CarryError(Exception):
    """Carries a module."""


def raise_with(module: torch.jit.ScriptModule) -> None:
    raise CarryError(module)


def test_a_scripted_module_in_an_exception(cluster):
    with autograd.context() as context_id:
        x = leaf()
        with pytest.raises(CarryError) as caught:
            rpc.rpc_sync("a", raise_with, args=(torch.jit.script(Computes(x)),))
        autograd.backward(context_id, [caught.value.args[0](Y)])
        assert torch.equal(autograd.get_gradients(context_id)[x], 2 * Y)


class Box:
    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


class HasBox(nn.Module):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.box = Box(x)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return (self.box.inside * y).sum()


def test_a_tensor_in_an_object_inside_of_a_scripted_module_is_refused(cluster):
    module = torch.jit.script(HasBox(leaf()))
    refused = pytest.raises(EncodeError, match="make it an attribute of the module, detach.. it, or make the module")
    with refused:
        rpc.rpc_sync("a", apply, args=(module, Y))
    with autograd.context(), refused:
        rpc.rpc_sync("a", apply, args=(module, Y))
    assert rpc.rpc_sync("a", apply, args=(torch.jit.script(HasBox(leaf().detach())), Y)).item() == 6.0


def test_a_dual_tensor_in_a_scripted_module_is_refused(cluster):
    with forward_ad.dual_level():
        module = torch.jit.script(Computes(forward_ad.make_dual(torch.ones(3), torch.ones(3))))
        with pytest.raises(EncodeError, match="has a forward-mode tangent"):
            rpc.rpc_sync("a", apply, args=(module, Y))


def test_parameters_are_leaves_where_the_sender_has_torchs_rule(server):
    """As those of other modules are. What was computed is followed, in contexts."""
    with telegrad.LocalCluster(["a"], server=server, options=telegrad.Options(plain=False)):
        x = leaf()
        module = torch.jit.script(Holds(x))
        for each in (module, loaded(torch.jit.script(Scale(3.0)))):
            assert all(rpc.rpc_sync("a", are_leaves, args=(each,)))
            with autograd.context() as context_id:
                assert all(rpc.rpc_sync("a", are_leaves, args=(each,)))
                loss = rpc.rpc_sync("a", apply, args=(each, Y)).sum()
                autograd.backward(context_id, [loss], retain_graph=True)
                assert list(autograd.get_gradients(context_id)) == ([x] if each is module else [])


def are_leaves(module: torch.jit.ScriptModule) -> list[bool]:
    return [parameter.is_leaf and parameter.requires_grad for parameter in module.parameters()]
