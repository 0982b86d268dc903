"""Plain backward() with tensors on a device, and beside it on the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from device import DEVICE, delay, on_side_stream
from torch import nn
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import rpc
from telegrad.nn import RemoteModule
from telegrad.nn.utils import clip_grad_norm_
from telegrad.optim import DistributedOptimizer, GradScaler

pytestmark = pytest.mark.usefixtures("cluster")

SIZES = [16, 1 << 20]  # elements: in the message, and beside it


def times(x: torch.Tensor, factor: float, device: str) -> torch.Tensor:
    """Computes on a device, and gives the result back there."""
    delay()
    return x.to(device) * factor


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("devices", [(DEVICE, DEVICE), ("cpu", DEVICE), (DEVICE, "cpu")])
def test_a_plain_backward(size: int, devices: tuple[str, str]) -> None:
    for _ in range(4):
        x = torch.ones(size, device=DEVICE, requires_grad=True)
        y = rpc.rpc_sync("a", times, args=(x, 2.0, devices[0]))
        z = rpc.rpc_sync("b", times, args=(y.sin().to(DEVICE), 3.0, devices[1]))
        with on_side_stream():
            delay()
            loss = (z.to(DEVICE) * x).sum()
            loss.backward()
        local = torch.ones(size, device=DEVICE, requires_grad=True)
        ((local * 2).sin() * 3 * local).sum().backward()
        torch.testing.assert_close(x.grad, local.grad)


def test_grad_and_a_second_order() -> None:
    x = torch.full((4,), 0.5, device=DEVICE, requires_grad=True)
    y = rpc.rpc_sync("a", times, args=(x, 2.0, DEVICE)).sin()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(first, 2 * torch.cos(2 * x))
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, -4 * torch.sin(2 * x))
    assert x.grad is None


def test_four_threads_at_once() -> None:
    def run(seed: int) -> None:
        try:
            for device in (DEVICE, "cpu") * 4:
                x = torch.full((100,), float(seed), device=device, requires_grad=True)
                rpc.rpc_sync("a", times, args=(x, 2.0, DEVICE)).to(device).mul(x).sum().backward()
                torch.testing.assert_close(x.grad, 4 * x.detach())
            done.append(seed)
        except BaseException as error:
            done.append(error)

    done: list[Any] = []
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [0, 1, 2, 3]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("devices", [("cpu", DEVICE), (DEVICE, "cpu")])
def test_a_checkpoint_that_goes_to_another_device(devices: tuple[str, str], reentrant: bool) -> None:
    """On the root, behind one call and in front of another."""
    outside, inside = devices
    weight = torch.full((8,), 3.0, device=inside, requires_grad=True)

    def block(h: torch.Tensor) -> torch.Tensor:
        return (h.to(inside).sin() * weight).to(outside)

    def loss(call: Any) -> torch.Tensor:
        x = torch.linspace(0, 1, 8, device=outside, requires_grad=True)
        leaves.append(x)
        h = call(x, 2.0, outside)
        h = checkpoint(block, h, use_reentrant=reentrant) + h
        return call(h, 0.5, outside).sum()

    leaves: list[torch.Tensor] = []
    for _ in range(3):
        found = []
        for call in (lambda *args: rpc.rpc_sync("a", times, args=args), times):
            loss(call).backward()
            found.append((leaves[-1].grad, weight.grad))
            weight.grad = None
        torch.testing.assert_close(*found)


@pytest.fixture
def apart(cluster: telegrad.LocalCluster) -> None:
    if not cluster.pids:
        pytest.skip("workers of one process share the thread of the device, which the hook keeps")


@pytest.mark.usefixtures("apart")
def test_a_backward_inside_of_a_hook() -> None:
    """The hook runs on the thread of the device, which the pass in it needs, too."""
    for _ in range(3):
        x, z = (torch.full((8,), value, device=DEVICE, requires_grad=True) for value in (2.0, 3.0))
        h = rpc.rpc_sync("a", times, args=(x, 2.0, DEVICE))
        other = rpc.rpc_sync("b", times, args=(z * z, 5.0, DEVICE)).sum()
        h.register_hook(lambda gradient, other=other: other.backward())
        h.sum().backward()
        assert x.grad.tolist() == [2.0] * 8
        assert z.grad.tolist() == [30.0] * 8


def calls_b(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("b", times, args=(x * x, 3.0, DEVICE)).sin()


def calls_in_checkpoint(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(calls_b, x * 1, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_a_call_inside_of_a_checkpoint(here: bool, reentrant: bool, request: pytest.FixtureRequest) -> None:
    if reentrant:
        request.getfixturevalue("apart")
    for _ in range(3):
        x = torch.full((8,), 0.5, device=DEVICE, requires_grad=True)
        if here:
            calls_in_checkpoint(x, reentrant).sum().backward()
        else:
            rpc.rpc_sync("a", calls_in_checkpoint, args=(x, reentrant)).sum().backward()
        torch.testing.assert_close(x.grad, (3 * x * x).cos().detach() * 6 * x.detach())


class Part(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


@pytest.mark.parametrize("scales", [False, True])
def test_ten_steps_over_remote_modules(scales: bool) -> None:
    torch.manual_seed(1)
    local = nn.Sequential(Part(), nn.Linear(16, 16), Part()).to(DEVICE)
    model = nn.Sequential(
        RemoteModule(f"a/{DEVICE}:0", Part), nn.Linear(16, 16).to(DEVICE), RemoteModule(f"b/{DEVICE}:0", Part)
    )
    model.load_state_dict(local.state_dict())
    ours = DistributedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    scaler, torchs = GradScaler(DEVICE, enabled=scales), torch.amp.GradScaler(DEVICE, enabled=scales)
    theirs = torch.optim.AdamW(local.parameters(), lr=1e-2)
    for step in range(10):
        x = torch.randn(8, 16, device=DEVICE)
        for a_model, optimizer, a_scaler, clip in (
            (model, ours, scaler, clip_grad_norm_),
            (local, theirs, torchs, nn.utils.clip_grad_norm_),
        ):
            loss = a_model(x).square().mean()
            if scales and step == 4:
                loss = loss * float("inf")  # on all owners
            a_scaler.scale(loss).backward()
            a_scaler.unscale_(optimizer)
            clip(a_model.parameters(), 0.1)
            a_scaler.step(optimizer)
            a_scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == torchs.get_scale()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.to(DEVICE), local.state_dict()[name])
