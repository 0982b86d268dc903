"""DistributedDataParallel before and after calls, each of its processes a worker: gradients are averaged over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import autograd, rpc

RANKS = ("w0", "w1")
INPUTS = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[3.0, 2.0, 1.0]])]
AVERAGE = torch.full((1, 3), 2.0)  # of their gradients
SLOW = 60.0  # seconds

_modules: dict[str, DistributedDataParallel] = {}
_weight = torch.full((1,), 3.0, requires_grad=True)


def start_group(path: str, rank: int, **options: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=len(RANKS))
    linear = nn.Linear(3, 1, bias=False)
    nn.init.ones_(linear.weight)
    _modules["ddp"] = DistributedDataParallel(linear, **options)


def end_group() -> None:
    _modules.clear()
    torch.distributed.destroy_process_group()


def on_all(function: Any, *args: Any) -> list[Any]:
    """What both of them return; `args` are those of each. At the same time: they wait for each other."""
    futures = [
        rpc.rpc_async(name, function, args=args[r] if args else (), timeout=SLOW) for r, name in enumerate(RANKS)
    ]
    return [future.wait() for future in futures]


@pytest.fixture(params=[{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def ranks(request: pytest.FixtureRequest, server: telegrad.ForkServer, tmp_path: Any) -> Iterator[None]:
    with telegrad.LocalCluster([*RANKS, "s"], transport="unix", server=server):
        futures = [
            rpc.rpc_async(name, start_group, (str(tmp_path / "store"), rank), request.param, timeout=SLOW)
            for rank, name in enumerate(RANKS)
        ]
        for future in futures:
            future.wait()
        yield
        on_all(end_group)


class Checkpointed(nn.Module):
    """A leaf before a reentrant checkpoint, and another inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
        nn.init.eye_(self.first.weight)
        nn.init.ones_(self.inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, self.first(x), use_reentrant=True)
        return found


def put_checkpoint() -> None:
    _modules["checkpointed"] = DistributedDataParallel(Checkpointed())


def through_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return _modules["checkpointed"](x).sum()


def grads_around_checkpoint() -> list[torch.Tensor | None]:
    return [p.grad for p in _modules["checkpointed"].parameters()]


def forward(x: torch.Tensor, sync: bool = True) -> torch.Tensor:
    module = _modules["ddp"]
    if sync:
        return module(x).sum()
    with module.no_sync():
        return module(x).sum()


def grad() -> torch.Tensor | None:
    return _modules["ddp"].module.weight.grad


def gradient(context_id: int) -> torch.Tensor:
    return autograd.get_gradients(context_id)[_modules["ddp"].module.weight]


def assert_all(found: list[torch.Tensor], wanted: torch.Tensor) -> None:
    for one in found:
        torch.testing.assert_close(one, wanted)


def test_after_the_call(ranks):
    for step in (1, 2):
        sum(on_all(forward, *((x,) for x in INPUTS))).backward()  # type: ignore[attr-defined]
        assert_all(on_all(grad), AVERAGE * step)


def test_after_the_call_with_accumulation(ranks):
    """What is accumulated without being averaged is averaged with the rest."""
    sum(on_all(forward, *((x, False) for x in INPUTS))).backward()  # type: ignore[attr-defined]
    for one, x in zip(on_all(grad), INPUTS, strict=True):
        torch.testing.assert_close(one, x)
    sum(on_all(forward, *((x,) for x in INPUTS))).backward()  # type: ignore[attr-defined]
    assert_all(on_all(grad), AVERAGE * 2)


def test_with_a_reentrant_checkpoint_inside(ranks):
    on_all(put_checkpoint)
    sum(on_all(through_checkpoint, *((x,) for x in INPUTS))).backward()  # type: ignore[attr-defined]
    for first, inner in on_all(grads_around_checkpoint):
        torch.testing.assert_close(inner, AVERAGE)
        torch.testing.assert_close(first, AVERAGE.expand(3, 3))


def test_in_a_context(ranks):
    with autograd.context() as context_id:
        autograd.backward(context_id, [sum(on_all(forward, *((x,) for x in INPUTS)))])  # type: ignore[list-item]
        assert_all(on_all(gradient, (context_id,), (context_id,)), AVERAGE)
    assert on_all(grad) == [None, None]


def weighted(x: torch.Tensor) -> torch.Tensor:
    return x * _weight


def train(x: torch.Tensor) -> torch.Tensor | None:
    rpc.rpc_sync("s", weighted, args=(_modules["ddp"](x),)).sum().backward()
    return grad()


def own_grad() -> torch.Tensor | None:
    return _weight.grad


def test_before_the_call(ranks):
    for step in (1, 2):
        assert_all(on_all(train, *((x,) for x in INPUTS)), AVERAGE * 3 * step)
    # Of all trainers and steps, added up: the weights of the module are ones.
    torch.testing.assert_close(rpc.rpc_sync("s", own_grad), torch.full((1,), 24.0))
