"""Scripted functions, modules and methods: by reference where they can be imported, else by value."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import telegrad
from telegrad import rpc

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
