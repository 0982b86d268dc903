"""The whole public API in a few seconds: read this first."""

from __future__ import annotations

import asyncio

import pytest
import torch

import telegrad
from telegrad import rpc


def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


@rpc.functions.async_execution
def later(x: torch.Tensor) -> torch.futures.Future:
    return rpc.rpc_async("b", scale, args=(x,)).then(lambda future: future.wait() + 1)


def test_calls(cluster):
    x = torch.arange(4.0)
    assert torch.equal(rpc.rpc_sync("a", scale, args=(x,)), x * 2)
    assert torch.equal(rpc.rpc_sync("a", scale, args=(x,), kwargs={"by": 3}), x * 3)
    assert torch.equal(cluster.call("b", torch.add, x, 1), x + 1)


def test_futures(cluster):
    futures = [rpc.rpc_async("a", scale, args=(torch.tensor(float(n)),)) for n in range(10)]
    assert [f.item() for f in torch.futures.wait_all(futures)] == [2.0 * n for n in range(10)]
    assert rpc.rpc_async("b", scale, args=(torch.ones(1),)).then(lambda f: f.wait().item()).wait() == 2

    async def main() -> float:
        return (await rpc.rpc_async("a", scale, args=(torch.ones(1),))).item()

    assert asyncio.run(main()) == 2


def test_async_execution_and_nesting(cluster):
    assert rpc.rpc_sync("a", later, args=(torch.ones(2),)).tolist() == [3.0, 3.0]


def test_errors(cluster):
    with pytest.raises(ZeroDivisionError) as caught:
        rpc.rpc_sync("a", divmod, args=(1, 0))
    assert "on worker 'a'" in str(caught.value.__cause__)
    with pytest.raises(telegrad.errors.UnknownWorkerError, match="'nobody' is not in this group"):
        rpc.rpc_sync("nobody", abs, args=(1,))


def test_who_is_who(cluster):
    assert rpc.get_worker_info().name == "driver"
    assert rpc.get_worker_info("a").name == "a"
    assert rpc.rpc_sync("b", rpc.get_worker_info).name == "b"
    assert cluster.worker.statistics().name == "driver"
