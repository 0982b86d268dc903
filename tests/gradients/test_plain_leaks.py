"""Nothing is left of what was sent and received outside of contexts. plain_leaks.py does the same for longer."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import plain_leaks
import pytest
import torch
from fault_fixtures import workers  # noqa: F401

import telegrad
from telegrad import autograd, errors, rpc

STEPS = 240
PATIENCE = 20.0  # seconds


def test_nothing_is_left_of_many_steps(server):
    """The collector is off on all workers."""
    for worker, (early, late) in plain_leaks.run(STEPS, "unix", server).items():
        assert early["sends"] < 100 and early["Past"] < 400, worker
        left = {what: count for what, count in late.items() if count and what not in ("memory", "Graph")}
        assert not left, worker
        assert late["Graph"] <= 1, worker  # that of the place of a context
        assert late["memory"] - early["memory"] < 30e6, worker


def test_losses_in_a_list_keep_their_graphs_and_no_more(server):
    with telegrad.LocalCluster(["a", "b"], transport="unix", server=server):
        x = torch.ones(3, requires_grad=True)
        losses: list[Any] = []
        for _ in range(20):
            h = rpc.rpc_sync("a", plain_leaks.weighted, args=(torch.ones(plain_leaks.SIZE) * x.sum(),))
            losses.append(rpc.rpc_sync("b", plain_leaks.weighted, args=(h,)).sum())
            losses[-1].backward()
        del h
        assert autograd.debug_info()["received"] >= 20
        losses[:] = [loss.detach() for loss in losses]
        wait_for({"a": 0, "b": 0})


def wait_for(sends: dict[str, int]) -> None:
    """Waits until workers keep so many Sends, and this one as few Recvs."""
    deadline = time.monotonic() + PATIENCE
    while {name: rpc.rpc_sync(name, autograd.debug_info)["sends"] for name in sends} != sends:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- workers that die between forward and backward ---------------------------------------------------------


def kill(name: str) -> None:
    process = rpc.rpc_sync(name, os.getpid)
    os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when it is known"])
def test_a_worker_that_is_killed_between_forward_and_backward(server, late):
    with telegrad.LocalCluster(["a", "b"], transport="unix", server=server):
        x = torch.full((plain_leaks.SIZE,), 0.1, requires_grad=True)
        h = rpc.rpc_sync("a", plain_leaks.weighted, args=(x,))
        through_both = rpc.rpc_sync("b", plain_leaks.weighted, args=(h,))
        own = rpc.rpc_sync("b", plain_leaks.carried, args=(torch.ones(plain_leaks.SIZE),))
        kill("b")
        if late:
            with pytest.raises(errors.TelegradError):
                rpc.rpc_sync("b", abs, args=(1,), timeout=PATIENCE)
        for tensor in (through_both, own):
            with pytest.raises(errors.GradientError, match=r"'b'.* gone.*[Rr]un the forward pass again") as caught:
                tensor.sum().backward()
            del caught
        assert rpc.rpc_sync("a", plain_leaks.grad) is None
        h.sum().backward()
        wanted = plain_leaks.weighted(x.detach().requires_grad_())
        assert x.grad is not None and torch.isfinite(wanted).all()
        del h, through_both, own, tensor
        gc.collect()  # pytest keeps errors in circles, and those have the tensors
        wait_for({"a": 0})
        assert autograd.debug_info()["received"] == 0


# -- what the errors say -----------------------------------------------------------------------------------


def test_a_graph_that_the_other_side_has_dropped(workers):
    x = torch.ones(3, requires_grad=True)
    found = rpc.rpc_sync("b", torch.mul, args=(x, 2))
    sends = workers["b"].contexts.plain.sends
    sends.clear()
    with pytest.raises(errors.BackwardError, match=r"run the forward pass again \(worker 'b'"):
        found.sum().backward()
    assert x.grad is None


def test_a_graph_that_is_used_twice(workers):
    x = torch.ones(3, requires_grad=True)
    found = rpc.rpc_sync("b", torch.sin, args=(x,))
    found.sum().backward()
    with pytest.raises(errors.BackwardError, match=r"retain_graph=True .*\(worker 'b'"):
        found.sum().backward()
    loss = found.detach().requires_grad_().sin().sum() + rpc.rpc_sync("b", torch.sin, args=(x,)).sin().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def test_what_to_do_after_a_pass_that_failed(workers):
    x = torch.full((plain_leaks.SIZE,), 0.1, requires_grad=True)
    text = r"on purpose' \(worker 'b', in a backward pass\)\. No other worker has kept gradients of it; .* zero it"
    with pytest.raises(errors.BackwardError, match=text):
        rpc.rpc_sync("b", plain_leaks.fails, args=(x,)).sum().backward()
