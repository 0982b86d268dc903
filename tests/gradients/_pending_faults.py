"""Tests of faults that fail today. pytest does not collect this file by itself; run it by its name."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from fault_fixtures import workers  # noqa: F401
from fault_programs import (
    PATIENCE,
    InThread,
    Trip,
    check_nothing_is_left,
    check_works,
    forward,
    soon,
    wait_until,
)
from torch import Tensor

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.gradients import engine
from telegrad.gradients.backward_pass import Finish


def fail_at_length() -> None:
    raise ValueError("too long " * 10_000)


def test_whatever_a_task_raises_its_connection_is_read_again():
    """Not even the shortened exception can be sent."""
    options = telegrad.Options(max_message_bytes=2048)
    with telegrad.LocalCluster(["b"], transport="inproc", options=options):
        with pytest.raises(RuntimeError):
            rpc.rpc_sync("b", fail_at_length, timeout=0.5)
        assert rpc.rpc_sync("b", abs, args=(-1,), timeout=3.0) == 1


def test_a_pass_whose_time_is_over_as_the_last_report_comes(workers, monkeypatch):
    """A reading thread has noted the last report, but the root has not heard of it yet when its time is over. Either
    the pass fails, or its gradients count."""
    reported, over = threading.Event(), threading.Event()
    on = engine._Root.on

    def slowly(self: object, event: object) -> list:
        instructions = on(self, event)
        if instructions and isinstance(instructions[0], Finish):
            reported.set()
            assert over.wait(PATIENCE)
        return instructions

    monkeypatch.setattr(engine._Root, "on", slowly)
    with autograd.context() as context_id:
        leaf = torch.ones(3, requires_grad=True)
        loss = (rpc.rpc_sync("b", in_a_moment, args=(torch.ones(3),)) * leaf).sum()
        running = InThread(autograd.backward, context_id, [loss], timeout=0.5)
        if reported.wait(2.0):
            with contextlib.suppress(AssertionError):  # it may wait for the thread that is held up
                running.wait(1.0)
        over.set()
        error = running.wait().error
        assert error is not None or autograd.get_gradients(context_id)
        with soon(3.0):
            wait_until(lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "its end")
    check_nothing_is_left()


def in_a_moment(x: Tensor) -> Tensor:
    """Its report comes when the root's own part is long done, to a thread that reads."""
    return Trip.apply(x.requires_grad_(), lambda _: threading.Event().wait(0.1), "")


def test_a_context_that_ends_as_its_pass_is_noted(workers, monkeypatch):
    driver = workers["driver"]
    find = driver.contexts.find

    def find_after_release(id: int) -> object:
        monkeypatch.undo()
        driver.release_context(context_id)
        return find(id)

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(driver.contexts, "find", find_after_release)
        with soon(), pytest.raises(errors.GradientError):
            autograd.backward(context_id, [loss], timeout=PATIENCE)
    check_works()
    check_nothing_is_left()


def test_an_owner_that_is_busy_keeps_its_context(workers, monkeypatch):
    """c is gone, and b asks the context's owner, who does not answer in time, but lives."""
    asked = threading.Event()

    def too_late(*args: object, **kwargs: object) -> None:
        asked.set()
        raise errors.CallTimeoutError("no answer")

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(workers["b"], "call", too_late)
        workers["b"]._peers.connection_with(workers["c"].id).abort("cut")
        asked.wait(1.0)
        monkeypatch.undo()
        wait_until(lambda: not workers["b"]._threads._tasks, "the end of what is to be done")
        assert workers["b"].contexts.find(context_id) is not None
        del loss
