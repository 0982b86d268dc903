"""Workers that die at every step of a pass. Each test has a cluster of its own, of real processes. The chain of calls
that they run is in fault_programs.py."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

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
    die,
    die_at,
    forward,
    open_gate,
    soon,
    wait_at_gate,
    wait_for_arrival,
    wait_until,
)

import telegrad
from telegrad import autograd, errors, rpc


@pytest.fixture(autouse=True)
def gates() -> Iterator[None]:
    yield
    programs.forget_gates()


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def trio(transport: str, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["b", "c"], transport=transport, server=server) as cluster:
        yield cluster


@pytest.fixture
def quartet(transport: str, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a", "b", "c"], transport=transport, server=server) as cluster:
        yield cluster


def kill(cluster: telegrad.LocalCluster, name: str) -> None:
    os.kill(cluster.pids[name], signal.SIGKILL)


def check_blames(error: BaseException | None, victim: str) -> None:
    """It names the worker that is gone, not the one that noticed it first."""
    assert type(error) is errors.BackwardError, repr(error)
    assert str(error).startswith(f"Error on Node {error.worker_id}: worker {victim!r} is gone"), str(error)
    assert error.worker == victim
    assert type(error.__cause__) is errors.PeerLostError, repr(error.__cause__)


# Each of these is a step that b and c come to: (stage, phase, kind of message).
STEPS = {
    "at begin": ("receive", "started", "begin"),
    "with gradients on their way to it": ("receive", "started", "gradients"),
    "before its gradients are out": ("send", "started", "gradients"),
    "after its gradients are out": ("send", "complete", "gradients"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_that_dies_at_a_step_of_the_pass(trio, victim, step):
    survivor = {"b": "c", "c": "b"}[victim]
    with autograd.context() as context_id:
        loss = forward()
        rpc.rpc_sync(victim, die_at, args=STEPS[step])
        check_blames(backward_error(context_id, loss), victim)
        check_shows_nothing(context_id, "driver", survivor)
    check_works_with(survivor)
    check_nothing_is_left("driver", survivor)


def test_a_worker_that_dies_before_its_report(trio):
    """c's gradients are for b, and its report is for the driver."""
    with autograd.context() as context_id:
        loss = forward()
        rpc.rpc_sync("c", die_at, args=("send", "started", "done"))
        check_blames(backward_error(context_id, loss), "c")
        check_shows_nothing(context_id, "driver", "b")
    check_works_with("b")
    check_nothing_is_left("driver", "b")


@pytest.mark.parametrize("way", ["function", "leaf hook"])
@pytest.mark.parametrize("place", ["outer", "last", "inner"])
def test_a_worker_that_dies_in_users_code(trio, place, way):
    victim = programs.PLACES[place]
    survivor = {"b": "c", "c": "b"}[victim]
    with autograd.context() as context_id:
        error = backward_error(context_id, forward(Fault(place, way, die)), into="grad")
        check_blames(error, victim)
        check_shows_nothing(context_id, "driver", survivor)
    check_works_with(survivor)
    check_nothing_is_left("driver", survivor)


@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_that_is_killed_while_the_pass_waits(trio, victim):
    """c is in users' code, b waits for it, and the driver waits for both."""
    survivor = {"b": "c", "c": "b"}[victim]
    with autograd.context() as context_id:
        loss = forward(Fault("last", action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=PATIENCE)
        wait_for_arrival("last")
        with soon():
            kill(trio, victim)
            error = running.wait().error
        check_blames(error, victim)
        if survivor == "c":
            rpc.rpc_sync("c", open_gate, args=("last",))
        check_shows_nothing(context_id, "driver", survivor)
    check_works_with(survivor)
    check_nothing_is_left("driver", survivor)


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


@pytest.mark.parametrize("place", ["inner", "last"])
def test_a_worker_that_dies_in_the_forward_pass(trio, place):
    victim = programs.PLACES[place]
    survivor = {"b": "c", "c": "b"}[victim]
    with autograd.context() as context_id:
        with soon(), pytest.raises(errors.PeerLostError, match=f"worker {victim!r} is gone"):
            forward(Fault(place, "call", die))
        check_shows_nothing(context_id, "driver", survivor)
        x = torch.ones(3, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(survivor, programs.twice, args=(x,)).sum()], timeout=PATIENCE)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))
    check_nothing_is_left("driver", survivor)


def test_a_worker_that_dies_after_its_report_fails_the_pass_or_does_not(trio):
    """The root may have all reports before it knows. Either way all of the pass counts, or nothing does."""
    with autograd.context() as context_id:
        loss = forward()
        rpc.rpc_sync("c", die_at, args=("send", "complete", "done"))
        failed = False
        try:
            with soon():
                autograd.backward(context_id, [loss], timeout=PATIENCE)
        except errors.BackwardError as error:
            failed = True
            check_blames(error, "c")
        if failed:
            check_shows_nothing(context_id, "driver", "b")
        else:
            for worker, places in (("driver", {"first", "root"}), ("b", {"inner", "outer"})):
                found = rpc.rpc_sync(worker, programs.gradients_by_place, args=(context_id,))
                assert found.keys() == places
    check_works_with("b")
    check_nothing_is_left("driver", "b")


def test_a_worker_that_dies_at_the_end_does_not_fail_the_pass(trio):
    with autograd.context() as context_id:
        loss = forward()
        rpc.rpc_sync("c", die_at, args=("receive", "started", "end"))
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        assert autograd.get_gradients(context_id)
    check_works_with("b")
    check_nothing_is_left("driver", "b")


# -- the root, and the owner of a context -----------------------------------------------------------------


def test_the_death_of_the_root_ends_its_pass_on_the_others(quartet):
    future = rpc.rpc_async("a", programs.root_elsewhere, args=("die", "root"))
    with soon(), pytest.raises(errors.PeerLostError, match="worker 'a' is gone"):
        future.wait(PATIENCE)
    with soon():
        check_nothing_is_left("driver", "b", "c")
    check_works_with("b", "c")


@pytest.mark.parametrize("place", ["outer", "last"])
def test_the_death_of_the_root_while_others_are_in_users_code(quartet, place):
    future = rpc.rpc_async("a", programs.root_elsewhere, args=("wait", place))
    wait_for_arrival(place)
    kill(quartet, "a")
    with soon(), pytest.raises(errors.PeerLostError, match="worker 'a' is gone"):
        future.wait(PATIENCE)
    with soon():
        check_nothing_is_left("driver", "b", "c")  # although the engine is still at work at the gate
    rpc.rpc_sync(programs.PLACES[place], open_gate, args=(place,))
    rpc.rpc_sync(programs.PLACES[place], programs.forget_gates)
    programs.check_works()
    check_nothing_is_left("driver", "b", "c")


def test_the_death_of_a_contexts_owner_frees_it_everywhere(quartet):
    """
    a ──▶ b ──▶ c: c has never heard of a but through b
    """
    future = rpc.rpc_async("a", programs.call_and_wait, args=("b", "c"))
    wait_for_arrival("in the context")
    assert rpc.rpc_sync("b", autograd.debug_info)["contexts"] == 1
    assert rpc.rpc_sync("c", autograd.debug_info)["contexts"] == 1
    kill(quartet, "a")
    with soon():
        check_nothing_is_left("b", "c")
    with pytest.raises(errors.PeerLostError):
        future.wait(PATIENCE)


def test_the_death_of_an_owner_frees_the_context_behind_the_driver_too(quartet):
    """
    a ──▶ driver ──▶ c
    """
    future = rpc.rpc_async("a", programs.call_and_wait, args=("driver", "c"))
    wait_for_arrival("in the context")
    kill(quartet, "a")
    with soon():
        check_nothing_is_left("driver", "c")
    with pytest.raises(errors.PeerLostError):
        future.wait(PATIENCE)


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


# -- a worker that hangs ----------------------------------------------------------------------------------


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
