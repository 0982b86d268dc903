"""Tests of deaths that fail today. pytest does not collect this file by itself; run it by its name."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import contextlib
import os
import signal

import fault_programs as programs
import pytest
import torch
from fault_programs import (
    PATIENCE,
    Fault,
    InThread,
    backward_error,
    check_nothing_is_left,
    check_shows_nothing,
    check_works_with,
    forward,
    open_gate,
    soon,
    wait_at_gate,
    wait_for_arrival,
    wait_until,
)
from test_deaths import gates, kill, quartet, transport, trio  # noqa: F401

from telegrad import autograd, errors, rpc


@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_that_was_dead_before_the_pass(trio, victim):
    survivor, id = {"b": "c", "c": "b"}[victim], trio.worker.info(victim).id
    with autograd.context() as context_id:
        loss = forward()
        kill(trio, victim)
        with soon(), contextlib.suppress(errors.PeerLostError):  # until the driver knows it, too
            rpc.rpc_sync(victim, wait_at_gate, args=("nowhere",))
        error = backward_error(context_id, loss)
        assert type(error.__cause__) is errors.PeerLostError
        assert (error.worker, error.worker_id) == (victim, id)
        check_shows_nothing(context_id, "driver", survivor)
    check_works_with(survivor)
    check_nothing_is_left("driver", survivor)


def test_a_context_ends_behind_a_dead_worker_too(trio):
    """
    driver ──▶ b ──▶ c: b dies, and then the driver leaves the context
    """
    with autograd.context():
        rpc.rpc_sync("b", rpc.rpc_sync, args=("c", programs.twice, (torch.ones(3, requires_grad=True),)))
        kill(trio, "b")
        with contextlib.suppress(errors.PeerLostError):
            rpc.rpc_sync("b", wait_at_gate, args=("nowhere",))
    check_nothing_is_left("driver", "c", within=3.0)


def test_a_context_ends_when_its_owner_and_the_worker_between_die(quartet):
    """
    a ──▶ b ──▶ c: both a and b die
    """
    future = rpc.rpc_async("a", programs.call_and_wait, args=("b", "c"))
    wait_for_arrival("in the context")
    for victim in ("b", "a"):
        kill(quartet, victim)
        wait_until(lambda victim=victim: not os.path.exists(f"/proc/{quartet.pids[victim]}/exe"), "its end")
    with pytest.raises(errors.PeerLostError):
        future.wait(PATIENCE)
    check_nothing_is_left("driver", "c", within=3.0)


def test_a_worker_that_takes_nothing_does_not_hold_up_the_root(trio):
    """Its process is stopped, and the gradients for it fill the connection."""
    with autograd.context() as context_id:
        xs = [torch.ones(1 << 13, requires_grad=True) for _ in range(200)]  # 32 KiB each
        loss = sum(rpc.rpc_sync("b", programs.twice, args=(x,)).square().sum() for x in xs)
        os.kill(trio.pids["b"], signal.SIGSTOP)
        try:
            running = InThread(autograd.backward, context_id, [loss], timeout=0.3)
            with soon():
                error = running.wait(3.0).error
        finally:
            os.kill(trio.pids["b"], signal.SIGCONT)
            running.wait()
        assert type(error) is errors.BackwardError
        assert "'b'" in str(error)
    check_works_with("b", "c")
    check_nothing_is_left()


def test_whoever_notices_first_the_dead_worker_is_blamed(trio):
    """c is in users' code, b waits for it, and is killed."""
    id = trio.worker.info("b").id
    with autograd.context() as context_id:
        loss = forward(Fault("last", action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        wait_for_arrival("last")
        kill(trio, "b")
        error = running.wait().error
        assert str(error).startswith(f"Error on Node {id}: worker 'b' is gone"), str(error)
        assert (error.worker, error.worker_id) == ("b", id)
        rpc.rpc_sync("c", open_gate, args=("last",))
    check_nothing_is_left("driver", "c")
