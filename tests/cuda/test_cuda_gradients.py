"""Gradients of tensors on a device, beside some on the CPU. torch's engine runs a device's nodes on a thread of
its own: they may come before, between and after what the pass's own thread does."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from device import DEVICE
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from telegrad import autograd, rpc
from telegrad.gradients import devices, leaves
from telegrad.primitives import current

pytestmark = pytest.mark.usefixtures("cluster")

PATIENCE = 30.0  # seconds
_weights: dict[str, torch.Tensor] = {}  # by worker


def weight(worker: str | None = None) -> torch.Tensor:
    worker = worker or rpc.get_worker_info().name
    if worker not in _weights:
        _weights[worker] = torch.linspace(-1, 1, 8, device=DEVICE, dtype=torch.float64).requires_grad_()
    return _weights[worker]


def layer(x: torch.Tensor, worker: str | None = None) -> torch.Tensor:
    return (x.to(DEVICE) * weight(worker)).sin()


def layer_to_cpu(x: torch.Tensor, worker: str | None = None) -> torch.Tensor:
    return (layer(x, worker) * 2).cpu()


def layer_at_b(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("b", layer, args=(x.to(DEVICE),)) * 3


def both(x: torch.Tensor, y: torch.Tensor, worker: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor on each: their gradients come from two threads."""
    return layer(x, worker) * y.to(DEVICE), (y * 2 + layer(x, worker).cpu()).cos()


def gradient_of_weight(context_id: int) -> torch.Tensor | None:
    return autograd.get_gradients(context_id).get(weight())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(8.0, device=DEVICE, dtype=torch.float64).requires_grad_()


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


def same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def test_an_error_on_a_device_while_the_root_waits(x: torch.Tensor) -> None:
    """The gradients that the root waits for do not come any more: the pass ends soon all the same."""
    began = time.monotonic()
    with autograd.context() as context_id, pytest.raises(RuntimeError, match="this hook fails"):
        loss = failing_layer(rpc.rpc_sync("a", same, args=(x * 2,))).sum()
        autograd.backward(context_id, [loss], timeout=PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2


@pytest.mark.parametrize("hooked", [False, True])
def test_a_leaf_of_the_cpus_that_is_ready_before_the_engine_call_has_begun(hooked: bool) -> None:
    """Its gradient comes from the thread of the device, and belongs to the pass from the first on."""
    for _ in range(50):
        x = torch.ones(3, requires_grad=True)
        leaf = torch.full((3,), 2.0, requires_grad=True)
        if hooked:
            leaf.register_post_accumulate_grad_hook(lambda leaf: None)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("a", same, args=(x,))
            autograd.backward(context_id, [(y.to(DEVICE) + leaf.to(DEVICE)).sum()], timeout=PATIENCE)
            found = autograd.get_gradients(context_id)
            assert found[leaf].tolist() == found[x].tolist() == [1.0] * 3
        assert leaf.grad is None


def checkpointed(x: torch.Tensor, device: str) -> torch.Tensor:
    """A reentrant checkpoint inside of another; in each a leaf, on this device."""

    def inner(h: torch.Tensor) -> torch.Tensor:
        return h * _leaf(device, 3.0).to(h.device)

    def outer(h: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, h * _leaf(device, 2.0).to(h.device), use_reentrant=True)

    return checkpoint(outer, x, use_reentrant=True)


_leaves: dict[tuple[str, float], torch.Tensor] = {}


def _leaf(device: str, value: float) -> torch.Tensor:
    return _leaves.setdefault((device, value), torch.tensor(value, device=device, requires_grad=True))


def gradients_of_leaves(context_id: int, device: str) -> list[float]:
    found = autograd.get_gradients(context_id)
    return [found[_leaf(device, value)].item() for value in (2.0, 3.0)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("of_x", ["cpu", DEVICE])
def test_leaves_inside_of_reentrant_checkpoints(of_x: str, device: str) -> None:
    """They run on the thread of their device, which may be another than the checkpoint's."""
    x = torch.ones(4, device=of_x, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("a", checkpointed, args=(x, device)).sum()
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0] * 4
        assert rpc.rpc_sync("a", gradients_of_leaves, args=(context_id, device)) == [12.0, 8.0]


class Nothing(torch.autograd.Function):
    """Two in, two out; the gradient of the first is None, so that the CPU runs what is behind it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        torch.cuda.synchronize()
        return None, gradient


def test_a_gradient_of_none_on_a_device() -> None:
    """A node that gets None is run by the CPU's thread, which may wait for what depends on it."""
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    with autograd.context() as context_id:
        first = rpc.rpc_sync("a", same, args=(x,))
        second = rpc.rpc_sync("a", same, args=(first * 2,))
        loss = Nothing.apply(second.sin(), x * 3).sum()
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        assert autograd.get_gradients(context_id)[x].tolist() == [3.0] * 4


def pass_of(leaf: torch.Tensor, *, also_here: bool) -> torch.Tensor:
    with autograd.context() as context_id:
        loss = (rpc.rpc_sync("a", layer, args=(leaf,)) * rpc.rpc_sync("b", layer, args=(leaf,))).sum()
        if also_here:
            loss = loss + leaf.cos().sum()
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        return autograd.get_gradients(context_id)[leaf]


def local_pass_of(leaf: torch.Tensor, *, also_here: bool) -> torch.Tensor:
    loss = (layer(leaf, "wanted a") * layer(leaf, "wanted b")).sum()
    (found,) = torch.autograd.grad(loss + leaf.cos().sum() if also_here else loss, [leaf])
    return found


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Leaves whose gradients have gone past their nodes."""
    found: list[torch.Tensor] = []
    keep = leaves.Capture.keep

    def note(self: leaves.Capture, leaf: torch.Tensor, gradient: torch.Tensor, *, is_free: bool) -> None:
        found.append(leaf)
        keep(self, leaf, gradient, is_free=is_free)

    monkeypatch.setattr(leaves.Capture, "keep", note)
    return found


@pytest.mark.parametrize("also_here", [False, True])
def test_the_gradient_of_a_leaf_that_was_sent_does_not_go_to_the_thread_of_the_device(
    x: torch.Tensor, also_here: bool, kept: list[torch.Tensor]
) -> None:
    torch.testing.assert_close(pass_of(x, also_here=also_here), local_pass_of(x, also_here=also_here))
    assert [leaf is x for leaf in kept] == [True, True]  # what came from `a`, and what came from `b`


@pytest.mark.parametrize("also_here", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "node", "accumulated"])
def test_hooks_of_a_leaf_that_was_sent_see_and_change_its_whole_gradient(
    x: torch.Tensor, kind: str, also_here: bool, kept: list[torch.Tensor]
) -> None:
    wanted = local_pass_of(x, also_here=also_here)
    seen: list[torch.Tensor] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    def double_first(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (double(gradients[0]),)

    def double_accumulated(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad = double(leaf.grad)

    node: Any = torch.autograd.graph.get_gradient_edge(x).node
    if kind == "tensor":
        x.register_hook(double)
    elif kind == "node":
        node.register_prehook(double_first)
    else:
        x.register_post_accumulate_grad_hook(double_accumulated)
    torch.testing.assert_close(pass_of(x, also_here=also_here), wanted * 2)
    torch.testing.assert_close(seen, [wanted])
    assert kept == []


def test_a_hook_behind_the_node_of_a_leaf_that_was_sent_runs(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    ran: list[None] = []
    node: Any = torch.autograd.graph.get_gradient_edge(x).node
    handle = node.register_hook(lambda *_: ran.append(None))
    pass_of(x, also_here=False)
    assert (len(ran), kept) == (1, [])
    handle.remove()
    pass_of(x, also_here=False)
    assert (len(ran), len(kept)) == (1, 2)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def test_leaves_whose_gradients_share_their_memory_get_each_its_own(x: torch.Tensor) -> None:
    y = x.detach().clone().requires_grad_()
    with autograd.context() as context_id:
        total = sum(rpc.rpc_sync("a", add, args=(x, y)) for _ in range(3))
        autograd.backward(context_id, [total.sum()], timeout=PATIENCE)  # type: ignore[union-attr]
        found = autograd.get_gradients(context_id)
    assert found[x].data_ptr() != found[y].data_ptr()
    torch.testing.assert_close([found[x], found[y]], [torch.full_like(x, 3.0)] * 2)


def test_a_leaf_that_was_frozen_after_it_was_sent_gets_nothing(x: torch.Tensor) -> None:
    y = x.detach().clone().requires_grad_()
    with autograd.context() as context_id:
        result = rpc.rpc_sync("a", add, args=(x, y))
        x.requires_grad_(False)
        autograd.backward(context_id, [result.sum()], timeout=PATIENCE)
        found = autograd.get_gradients(context_id)
    assert list(found) == [y]
    assert x.grad is None and y.grad is None


def test_a_leaf_that_has_another_dtype_since_it_was_sent(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    """It has another node, too, which casts the gradient."""
    with autograd.context() as context_id:
        result = rpc.rpc_sync("a", layer, args=(x,))
        (wanted,) = torch.autograd.grad(layer(x, "wanted a").sum(), [x])
        x.data = x.data.float()
        autograd.backward(context_id, [result.sum()], timeout=PATIENCE)
        found = autograd.get_gradients(context_id)[x]
    assert found.dtype == torch.float32 and kept == []
    torch.testing.assert_close(found, wanted.float())


def test_only_gradients_that_share_no_memory_are_taken_as_they_are() -> None:
    a, b = (torch.zeros(4, device=DEVICE) for _ in range(2))
    for gradients, are_apart in (
        ((a,), True),
        ((a, None, b), True),
        ((a, b[:2], b[2:]), False),
        ((a, a), False),
        ((TwoTensor(a, b),), False),
        ((a, TwoTensor(a.clone(), b)), False),
    ):
        ready = devices.Ready.of(gradients)
        assert ready is not None and ready.are_apart is are_apart
    assert devices.Ready.of((torch.zeros(1), None)) is None
