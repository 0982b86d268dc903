"""Gradients of tensors on a CUDA device, beside some on the CPU. torch's engine runs a device's nodes on a thread of
its own: they may come before, between and after what the pass's own thread does."""

from __future__ import annotations

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.primitives import current

pytestmark = pytest.mark.usefixtures("cluster")

PATIENCE = 30.0  # seconds
_weights: dict[str, torch.Tensor] = {}  # by worker


def weight(worker: str | None = None) -> torch.Tensor:
    worker = worker or rpc.get_worker_info().name
    if worker not in _weights:
        _weights[worker] = torch.linspace(-1, 1, 8, device="cuda", dtype=torch.float64).requires_grad_()
    return _weights[worker]


def layer(x: torch.Tensor, worker: str | None = None) -> torch.Tensor:
    return (x.to("cuda") * weight(worker)).sin()


def layer_to_cpu(x: torch.Tensor, worker: str | None = None) -> torch.Tensor:
    return (layer(x, worker) * 2).cpu()


def layer_at_b(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("b", layer, args=(x.cuda(),)) * 3


def both(x: torch.Tensor, y: torch.Tensor, worker: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor on each: their gradients come from two threads."""
    return layer(x, worker) * y.cuda(), (y * 2 + layer(x, worker).cpu()).cos()


def gradient_of_weight(context_id: int) -> torch.Tensor | None:
    return autograd.get_gradients(context_id).get(weight())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(8.0, device="cuda", dtype=torch.float64).requires_grad_()


@pytest.fixture
def z() -> torch.Tensor:
    return torch.ones(8, dtype=torch.float64).requires_grad_()


def test_skips_nested_calls_and_both_devices(x: torch.Tensor, z: torch.Tensor) -> None:
    wa, wb = weight("wanted a"), weight("wanted b")
    for _ in range(20):
        with autograd.context() as context_id:
            h = rpc.rpc_sync("a", layer, args=(x,)) + x
            y = rpc.rpc_sync("a", layer_to_cpu, args=(h,))
            w = rpc.rpc_sync("a", layer_at_b, args=(z * y.sum(),))
            rpc.rpc_sync("a", layer, args=(w,))  # not used
            autograd.backward(context_id, [y.sum() + w.sum().cpu() + h.sum().cpu()], timeout=PATIENCE)
            own = autograd.get_gradients(context_id)
            found = (own[x], own[z], *(rpc.rpc_sync(n, gradient_of_weight, args=(context_id,)) for n in "ab"))
        h = layer(x, "wanted a") + x
        y = layer_to_cpu(h, "wanted a")
        w = layer(z * y.sum(), "wanted b") * 3
        wanted = torch.autograd.grad(y.sum() + w.sum().cpu() + h.sum().cpu(), [x, z, wa, wb])
        torch.testing.assert_close(found, wanted)


def test_a_message_with_a_tensor_on_each_device(x: torch.Tensor, z: torch.Tensor) -> None:
    for _ in range(20):
        with autograd.context() as context_id:
            p, q = rpc.rpc_sync("a", both, args=(x.sin(), z.cos()))
            autograd.backward(context_id, [p.sum().cpu() + q.sum()], timeout=PATIENCE)
            own = autograd.get_gradients(context_id)
            found = (own[x], own[z], rpc.rpc_sync("a", gradient_of_weight, args=(context_id,)))
        p, q = both(x.sin(), z.cos(), "wanted a")
        wanted = torch.autograd.grad(p.sum().cpu() + q.sum(), [x, z, weight("wanted a")])
        torch.testing.assert_close(found, wanted)


def test_gradients_of_gradients(x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        (d,) = autograd.grad(context_id, [rpc.rpc_sync("a", layer, args=(x,)).sum()], [x], create_graph=True)
        (found,) = autograd.grad(context_id, [d.square().sum()], [x])
    (d,) = torch.autograd.grad(layer(x, "wanted a").sum(), [x], create_graph=True)
    (wanted,) = torch.autograd.grad(d.square().sum(), [x])
    torch.testing.assert_close(found, wanted)


def test_a_hook_on_a_device_knows_where_it_runs(x: torch.Tensor) -> None:
    seen = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        worker = current.current_worker()
        seen.append((worker.member.name, current.current_context_id(), rpc.rpc_sync("b", named)))
        return gradient * 2

    with autograd.context() as context_id:
        h = x * 2
        h.register_hook(hook)
        autograd.backward(context_id, [rpc.rpc_sync("a", layer, args=(h,)).sum()], timeout=PATIENCE)
        found = autograd.get_gradients(context_id)[x]
    (wanted,) = torch.autograd.grad(layer(x * 2, "wanted a").sum(), [x])
    torch.testing.assert_close(found, wanted * 2)
    assert seen == [("driver", context_id, ("b", context_id))]


def named() -> tuple[str, int]:
    return rpc.get_worker_info().name, current.current_context_id()


def test_an_error_on_a_device(x: torch.Tensor) -> None:
    with (
        autograd.context() as context_id,
        pytest.raises(RuntimeError, match="this hook fails"),
    ):
        h = rpc.rpc_sync("a", failing_layer, args=(x,))
        autograd.backward(context_id, [h.sum()], timeout=PATIENCE)


def failing_layer(x: torch.Tensor) -> torch.Tensor:
    def hook(gradient: torch.Tensor) -> None:
        raise ValueError("this hook fails")

    y = layer(x)
    y.register_hook(hook)
    return y
