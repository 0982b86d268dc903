"""Devices in a pass, as far as that can be shown without one: tests/cuda has the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.gradients import devices
from telegrad.gradients.nodes import AccumulateGrad


def node(device: str, *nexts: Any) -> Any:
    metadata = (SimpleNamespace(device=torch.device(device)),)
    return type("Node", (), {"_input_metadata": metadata, "next_functions": tuple((n, 0) for n in nexts)})()


def leaf() -> Any:
    return (torch.zeros(1, requires_grad=True) * 1).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_a_cpu_node_behind_a_device_needs_the_pump() -> None:
    assert devices.mixes_devices([node("cuda:0", node("cuda:0", node("cpu")))])
    assert devices.mixes_devices([node("cpu", node("cuda:0", node("cuda:0")), node("cuda:1", node("cpu")))])


def test_no_pump_for_one_kind_of_device_or_leaves() -> None:
    accumulate = leaf()
    assert type(accumulate) is AccumulateGrad
    assert not devices.mixes_devices([node("cpu", node("cpu", accumulate))])
    assert not devices.mixes_devices([node("cuda:0", node("cuda:1", accumulate, None))])
    assert not devices.mixes_devices([node("cpu", node("cuda:0", node("cuda:0")))])  # as behind each Wait
    assert not devices.mixes_devices([None])


def test_a_shared_node_is_looked_at_once() -> None:
    deep = node("cpu")
    for _ in range(60):
        deep = node("cpu", deep, deep)
    assert not devices.mixes_devices([deep])


def slow_double(x: torch.Tensor) -> torch.Tensor:
    y = x * 2

    def slow(gradient: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.02)  # longer than the first wait
        return gradient

    y.register_hook(slow)
    return y


def test_a_pass_on_the_cpu_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has touched CUDA, a pass whose tensors are all on the CPU waits plainly."""
    pumped = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(devices, "pump", lambda: pumped.append(None))
    with telegrad.LocalCluster(["a"], transport="inproc"):
        x = torch.arange(3.0, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("a", slow_double, args=(x.sin(),))
            autograd.backward(context_id, [y.sum() + rpc.rpc_sync("a", slow_double, args=(y,)).sum()], timeout=30.0)
            found = autograd.get_gradients(context_id)[x]
    torch.testing.assert_close(found, 6 * x.detach().cos())
    assert not pumped
