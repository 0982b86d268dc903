"""Scripted functions, modules and methods: by reference where they can be imported, else by value."""

from __future__ import annotations

import pytest
import torch

import telegrad
from telegrad import rpc

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*torch.jit.*is deprecated")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> None:
    """What a module would script when it is imported: torch warns that it is deprecated."""
    global importable
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importable = torch.jit.script(plus_one)


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


def test_a_function_by_value(cluster):
    assert rpc.rpc_sync("a", importable, args=(torch.ones(2),)).tolist() == [2.0, 2.0]
    assert rpc.rpc_sync("a", apply, args=(importable, torch.ones(2))).tolist() == [2.0, 2.0]


def pass_on(function, x):
    return rpc.rpc_sync("b", apply, args=(function, x))


def test_passed_on(cluster):
    assert rpc.rpc_sync("a", pass_on, args=(importable, torch.ones(2))).tolist() == [2.0, 2.0]


def test_modules_and_methods(cluster):
    scale = torch.jit.script(Scale(3.0))
    x = torch.ones(2)
    for function, expected in ((scale, 3.0), (scale.forward, 3.0), (scale.back, 1 / 3)):
        assert torch.equal(rpc.rpc_sync("a", function, args=(x,)), torch.full((2,), expected))
        assert torch.equal(rpc.rpc_sync("a", pass_on, args=(function, x)), torch.full((2,), expected))


def test_by_reference(link, tmp_path, monkeypatch):
    (tmp_path / "has_scripts.py").write_text(
        "import torch\ndef f(x):\n    return x + 1\nf = torch.jit.script(f)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import has_scripts

    assert link.carry(has_scripts.f) == (has_scripts.f,)
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        assert cluster.call("a", apply, has_scripts.f, 1) == 2
