"""Devices in a pass, as far as that can be shown without one: tests/cuda has the rest."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import autograd, rpc
from telegrad.gradients import devices, engine_call, waits
from telegrad.gradients.devices import Mix, mix_of
from telegrad.gradients.nodes import AccumulateGrad


def node(device: str, *nexts: Any, kind: type = object) -> Any:
    metadata = (SimpleNamespace(device=torch.device(device)),)
    found = {"_input_metadata": metadata, "next_functions": tuple((n, 0) for n in nexts)}
    return type("Node", (kind,), found)()


def leaf() -> Any:
    return (torch.zeros(1, requires_grad=True) * 1).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_a_cpu_node_behind_a_device_needs_the_pump_often() -> None:
    assert mix_of([node("cuda:0", node("cuda:0", node("cpu")))]) is Mix.BOTH
    assert mix_of([node("cpu", node("cuda:0", node("cuda:0")), node("cuda:1", node("cpu")))]) is Mix.BOTH


def test_a_function_of_the_users_may_return_none_for_which_the_cpu_runs() -> None:
    assert mix_of([node("cuda:0", node("cuda:0"), kind=BackwardCFunction)]) is Mix.BOTH
    assert mix_of([node("cuda:0", leaf(), kind=BackwardCFunction)]) is Mix.DEVICE_ONLY


def test_one_kind_of_device_or_leaves() -> None:
    accumulate = leaf()
    assert type(accumulate) is AccumulateGrad
    assert mix_of([node("cpu", node("cpu", accumulate))]) is Mix.NO_DEVICE
    assert mix_of([node("cuda:0", node("cuda:1", accumulate, None))]) is Mix.DEVICE_ONLY
    assert mix_of([node("cpu", node("cuda:0", node("cuda:0")))]) is Mix.DEVICE_ONLY  # as behind each Wait
    assert mix_of([None]) is Mix.NO_DEVICE


def test_a_shared_node_is_looked_at_once() -> None:
    deep = node("cpu")
    for _ in range(60):
        deep = node("cpu", deep, deep)
    assert mix_of([deep]) is Mix.NO_DEVICE


def slow_double(x: torch.Tensor, seconds: float = 0.02) -> torch.Tensor:
    y = x * 2

    def slow(gradient: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(seconds)  # longer than the first wait
        return gradient

    y.register_hook(slow)
    return y


@pytest.mark.parametrize("limits", [waits._LIMITS, (0.002, 0.001)], ids=["in time", "late"])
def test_a_pass_on_the_cpu_beside_cuda(monkeypatch: pytest.MonkeyPatch, limits: tuple[float, ...]) -> None:
    """In a process that has touched CUDA, a pass whose tensors are all on the CPU waits plainly; if need be for longer
    than the Waits in front do."""
    pumped = []
    monkeypatch.setattr(waits, "_LIMITS", limits)
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


@pytest.mark.parametrize("mix", [Mix.DEVICE_ONLY, Mix.BOTH])
def test_a_pass_with_nothing_for_the_cpu_is_not_pumped_soon(monkeypatch: pytest.MonkeyPatch, mix: Mix) -> None:
    pumped = []
    monkeypatch.setattr(engine_call, "_RARE_DEVICE_POLL", 30.0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(devices, "mix_of", lambda starts: mix)
    monkeypatch.setattr(devices, "pump", lambda: pumped.append(None))
    with telegrad.LocalCluster(["a"], transport="inproc"):
        x = torch.arange(3.0, requires_grad=True)
        rpc.rpc_sync("a", slow_double, args=(x.sin(),)).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    assert bool(pumped) == (mix is Mix.BOTH)


def test_pumps_leave_the_device_time_for_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pump comes before all else on the thread of the device, and where that is slow, so is the pump."""
    pumped = []

    def pump() -> None:
        pumped.append(None)
        threading.Event().wait(0.005)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(devices, "mix_of", lambda starts: Mix.BOTH)
    monkeypatch.setattr(devices, "pump", pump)
    with telegrad.LocalCluster(["a"], transport="inproc"):
        x = torch.arange(3.0, requires_grad=True)
        rpc.rpc_sync("a", slow_double, args=(x.sin(), 0.3)).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    assert 1 <= len(pumped) < 25  # 50 of them were half of the time


def test_a_pass_in_inference_mode_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with telegrad.LocalCluster(["a"], transport="inproc"):
        x = torch.arange(3.0, requires_grad=True)
        loss = rpc.rpc_sync("a", slow_double, args=(x.sin(),)).sum()
        with torch.inference_mode():
            loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def checkpointed(x: torch.Tensor, fails: bool) -> torch.Tensor:
    def inner(h: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        if fails and len(threads) == 2:
            raise RuntimeError("as it should")
        return h.sin() * weight

    return checkpoint(inner, x, use_reentrant=True)


threads: list[str] = []
weight = torch.full((3,), 2.0, requires_grad=True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_reentrant_checkpoint_beside_devices(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """It has a thread of its own: one that waits for a device inside of it would take the pass's own Wait."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    threads.clear()
    with telegrad.LocalCluster(["a"], transport="inproc"):
        x = torch.arange(3.0, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("a", checkpointed, args=(x, fails))
            if fails:
                with pytest.raises(RuntimeError, match="as it should"):
                    autograd.backward(context_id, [y.sum()])
                return
            autograd.backward(context_id, [y.sum()])
            found = autograd.get_gradients(context_id)[x]
            of_weight = rpc.rpc_sync("a", gradient_of_weight, args=(context_id,))
    assert threads[1:] == ["telegrad-engine"]
    torch.testing.assert_close(found, 2 * x.detach().cos())
    torch.testing.assert_close(of_weight, x.detach().sin())


def gradient_of_weight(context_id: int) -> torch.Tensor:
    return autograd.get_gradients(context_id)[weight]
