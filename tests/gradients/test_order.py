"""`.grad` is complete when backward() returns, and sums have the same order in every run."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fault_programs import PATIENCE
from torch import nn

import telegrad
from telegrad import autograd, rpc
from telegrad.nn import RemoteModule

WEIGHT = torch.ones(4, requires_grad=True)
KEPT: dict[str, Any] = {}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


@pytest.fixture
def in_process() -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a", "b"], transport="inproc") as cluster:
        yield cluster
    KEPT.clear()
    WEIGHT.grad = None


# -- workers of one process ---------------------------------------------------------------------------------


def test_grad_of_another_worker_of_this_process_is_complete_when_backward_returns(in_process):
    optimizer = torch.optim.SGD([WEIGHT], lr=0.5)
    for _ in range(2000):
        WEIGHT.grad = None
        rpc.rpc_sync("a", scaled, args=(torch.ones(4, requires_grad=True),)).sum().backward()
        assert WEIGHT.grad is not None
        assert torch.equal(WEIGHT.grad, torch.ones(4))
    before = WEIGHT.detach().clone()
    optimizer.step()
    assert torch.equal(WEIGHT, before - 0.5)
    with torch.no_grad():
        WEIGHT.fill_(1.0)


def test_passes_of_two_workers_of_this_process_add_up_in_turns(in_process):
    def pass_over(names: tuple[str, str]) -> None:
        x = torch.ones(4, requires_grad=True)
        for name in names:
            x = rpc.rpc_sync(name, scaled, args=(x,))
        x.sum().backward()

    for count in range(1, 200):
        pass_over(("a", "b"))
        assert torch.equal(WEIGHT.grad, torch.full((4,), 2.0 * count))


@pytest.mark.parametrize("into", ["grad", "context"])
def test_a_pass_in_a_context_over_workers_of_this_process(in_process, into):
    for _ in range(100):
        WEIGHT.grad = None
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("a", scaled, args=(torch.ones(4, requires_grad=True),)).sum()
            autograd.backward(context_id, [loss], into=into)
            there = rpc.rpc_sync("a", autograd.get_gradients, args=(context_id,))
        assert (WEIGHT.grad is not None) == (into == "grad")
        assert len(there) == (into == "context")


def keep_module(module: Any) -> None:
    KEPT["module"] = module.local_value()


def test_a_remote_module_in_this_process_learns_with_a_local_optimizer(in_process):
    module = RemoteModule("a", nn.Linear, (4, 4))
    rpc.rpc_sync("a", keep_module, args=(module.get_module_rref(),))
    owned = KEPT["module"]
    optimizer = torch.optim.SGD(owned.parameters(), lr=1.0)
    for _ in range(100):
        before = owned.bias.detach().clone()
        optimizer.zero_grad()
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert torch.equal(owned.bias, before - 2.0)


# -- the order of sums --------------------------------------------------------------------------------------


def three_times(x: torch.Tensor) -> None:
    KEPT["inner"] = x * 1
    KEPT["began"] = threading.Event()


def part(number: int) -> torch.Tensor:
    found = KEPT["inner"] * torch.tensor([1e8, 1.0, -1e8])[number]
    if number == 2:  # the part of the message that was sent last: the worker has begun
        found.register_hook(lambda _: KEPT["began"].set())
    return found


def wait_until_began(_: torch.Tensor) -> None:
    assert KEPT["is_local"] or KEPT["began"].wait(PATIENCE)


@contextlib.contextmanager
def gradients_come(order: tuple[int, ...], received: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Gives a loss whose backward pass sends the gradients of these in that order, the last one late."""
    outputs = {}
    for number in reversed(order):  # the engine runs first what was made last
        outputs[number] = received[number] * 1.0
    if order[-1] != 2:
        outputs[order[-1]].register_hook(wait_until_began)
    yield torch.stack([outputs[number] for number in range(3)]).sum()


def sum_of_three(call: Callable[..., Any], order: tuple[int, ...]) -> float:
    x = torch.ones((), requires_grad=True)
    call(three_times, x)
    with gradients_come(order, [call(part, number) for number in range(3)]) as loss:
        loss.backward()
    assert x.grad is not None
    return x.grad.item()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_a_sum_does_not_depend_on_when_gradients_come(in_process, order):
    def call(function: Any, *args: Any) -> Any:
        return rpc.rpc_sync("a", function, args=args)

    # (-1e8 + 1) + 1e8 is 0 in float32, and (1e8 - 1e8) + 1 is 1. Locally the part that was made last comes first.
    KEPT["is_local"] = False
    assert sum_of_three(call, order) == 0.0


def test_the_same_sum_in_one_process():
    def call(function: Any, *args: Any) -> Any:
        return function(*args)

    KEPT["is_local"] = True
    assert sum_of_three(call, (2, 1, 0)) == 0.0
    KEPT.clear()
