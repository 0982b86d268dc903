"""Tensors that are not ready yet: each test puts milliseconds of work in front of them, on a stream of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad import autograd, functions, rpc

pytestmark = pytest.mark.usefixtures("cluster")

PATIENCE = 60.0
SIZES = [16, 1 << 20]  # elements: in the message, and beside it
REPEATS = 8


def delay() -> None:
    """Keeps the current stream busy for some milliseconds."""
    torch.cuda._sleep(10_000_000)


class Slow(torch.autograd.Function):
    """The identity; its gradient, times `factor`, is late on the stream of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        out = torch.zeros_like(gradient)
        delay()
        return out.add_(gradient).mul_(ctx.factor), None


def same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def same_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.view_as(x), y.view_as(y)


def late(x: torch.Tensor) -> torch.Tensor:
    """On a stream of its own, which the default stream waits for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = torch.zeros_like(x)
        delay()
        out.add_(x).mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    out.record_stream(torch.cuda.current_stream())
    return out


@functions.async_execution
def late_future(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Completed on a side stream, before its work is done."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[x.device])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = torch.zeros_like(x)
        delay()
        future.set_result(out.add_(x).mul_(2))
    return future


@functions.async_execution
def late_chain(to: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A call to another worker, and work on its answer on a side stream."""

    def on_answer(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        return late(future.wait())

    return rpc.rpc_async(to, late, args=(x,)).then(on_answer)


@pytest.mark.parametrize("size", SIZES)
def test_calls_on_a_side_stream(size: int) -> None:
    side = torch.cuda.Stream()
    for n in range(REPEATS):
        with torch.cuda.stream(side):
            x = torch.zeros(size, device="cuda")
            delay()
            x.add_(n + 1)
            y = rpc.rpc_sync("a", late, args=(x,))
            delay()
            z = y * 3
            handle = rpc.remote("b", late, args=(z,))
            w = handle.to_here() + 1
        side.synchronize()
        assert w.unique().tolist() == [(n + 1) * 12 + 1]


@pytest.mark.parametrize("size", SIZES)
def test_futures_asked_on_other_streams(size: int) -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for n in range(REPEATS):
        with torch.cuda.stream(side):
            x = torch.zeros(size, device="cuda")
            delay()
            x.add_(n + 1)
            future = rpc.rpc_async("a", late, args=(x,))
            doubled = rpc.rpc_async("b", late, args=(x,)).then(lambda done: late(done.wait()))
        with torch.cuda.stream(other):
            first, second = torch.futures.wait_all([future, doubled])
            total = first + second
        other.synchronize()
        assert total.unique().tolist() == [(n + 1) * 6]


@pytest.mark.parametrize("size", SIZES)
def test_async_execution_completed_on_a_side_stream(size: int) -> None:
    for n in range(REPEATS):
        x = torch.full((size,), n + 1.0, device="cuda")
        assert rpc.rpc_sync("a", late_future, args=(x,)).unique().tolist() == [2 * (n + 1)]
        assert rpc.rpc_sync("a", late_chain, args=("b", x)).unique().tolist() == [4 * (n + 1)]


def test_an_overwrite_after_a_call_was_sent() -> None:
    """What the call takes along is what was there, in the order of the stream, when it was made."""
    for size in SIZES:
        x = torch.zeros(size, device="cuda")
        for n in range(REPEATS):
            delay()
            x.fill_(n)
            future = rpc.rpc_async("a", late, args=(x,))
            x.fill_(-1)
            assert future.wait().unique().tolist() == [2 * n]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_what_a_side_stream_received(size: int) -> None:
    side = torch.cuda.Stream()
    for n in range(REPEATS):
        x = torch.full((size,), 1.0, device="cuda", requires_grad=True)
        side.wait_stream(torch.cuda.current_stream())
        with autograd.context() as context_id:
            with torch.cuda.stream(side):
                y = Slow.apply(rpc.rpc_sync("a", same, args=(x,)), float(n + 2))
                loss = y.sum()
            torch.cuda.current_stream().wait_stream(side)
            autograd.backward(context_id, [loss], timeout=PATIENCE)
            found = autograd.get_gradients(context_id)[x]
            assert found.unique().tolist() == [n + 2]


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_one_message_on_two_streams(size: int) -> None:
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for n in range(REPEATS):
        x = torch.full((size,), 1.0, device="cuda", requires_grad=True)
        z = torch.full((size,), 1.0, device="cuda", requires_grad=True)
        with autograd.context() as context_id:
            p, q = rpc.rpc_sync("a", same_of, args=(x * 1, z * 1))
            one.wait_stream(torch.cuda.current_stream())
            two.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(one):
                first = Slow.apply(p, float(n + 2)).sum()
            with torch.cuda.stream(two):
                second = Slow.apply(q, float(n + 3)).sum()
            for stream in (one, two):
                torch.cuda.current_stream().wait_stream(stream)
            autograd.backward(context_id, [first + second], timeout=PATIENCE)
            found = autograd.get_gradients(context_id)
            assert found[x].unique().tolist() == [n + 2]
            assert found[z].unique().tolist() == [n + 3]


def slow_there(x: torch.Tensor, factor: float) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = Slow.apply(x, factor)
    torch.cuda.current_stream().wait_stream(side)
    return y


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_a_chain_of_side_streams(size: int) -> None:
    side = torch.cuda.Stream()
    for n in range(REPEATS):
        with torch.cuda.stream(side), autograd.context() as context_id:
            x = torch.full((size,), 1.0, device="cuda", requires_grad=True)
            y = rpc.rpc_sync("a", slow_there, args=(Slow.apply(x, 2.0), 3.0))
            z = rpc.rpc_sync("b", slow_there, args=(y, float(n + 1)))
            autograd.backward(context_id, [z.sum()], timeout=PATIENCE)
            found = autograd.get_gradients(context_id)[x] * 1
            side.synchronize()
            assert found.unique().tolist() == [6.0 * (n + 1)]


def test_during_capture_a_call_says_so() -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Exception, match=r"captur"), torch.cuda.graph(graph):
        rpc.rpc_sync("a", same, args=(x,))
    assert torch.equal(rpc.rpc_sync("a", same, args=(x,)), x)
