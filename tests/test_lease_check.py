"""The check of what threads do while they read finds what breaks the rule, here and in workers of other processes."""

from __future__ import annotations

import threading
import time

import lease_check
import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.events import Event, logger
from telegrad.gradients import adding
from telegrad.gradients.leaves import GradientTable
from telegrad.primitives.current import current_worker
from telegrad.primitives.waiter import Waiter
from telegrad.runtime import calls
from telegrad.serialization import values


def run_engine() -> None:
    x = torch.ones(1, requires_grad=True)
    adding.run_backward((x * 2,), (torch.ones(1),), False, False, (x,), True, False)


ACTS = {
    "takes the lock worker: _closing": lambda: current_worker()._closing.acquire(),
    "blocks in": lambda: calls.blocking(time.sleep, 0),
    "runs users' code": lambda: values.interruptible(abs, -1),
    "decodes a body": lambda: current_worker()._codec.decode(None, None),
    "tells subscribers": lambda: current_worker().events.emit(Event("read", "complete", "call", 1, "a")),
    "sleeps": lambda: Waiter().sleep(0.0),
    "starts a thread": lambda: threading.Thread(target=abs, args=(-1,)).start(),
    "logs 'a text'": lambda: logger.warning("a text"),
    "runs torch's engine": run_engine,
}
ALLOWED = {
    "a short lock": lambda: current_worker().contexts._lock.acquire() and current_worker().contexts._lock.release(),
    "a lock that is not waited for": lambda: (
        current_worker()._closing.acquire(blocking=False) and current_worker()._closing.release()
    ),
}


def while_reading(name: str) -> str:
    """Does one of these while it holds the read lease; returns what was raised."""
    lease = current_worker()._lease
    while not lease.try_take():
        time.sleep(1e-3)
    try:
        (ACTS | ALLOWED)[name]()
    except lease_check.WhileReadingError as error:
        return str(error)
    finally:
        lease.release()
    return ""


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("where", ["driver", "a"])
def test_what_breaks_the_rule_is_an_error_and_is_noted(server: telegrad.ForkServer, where: str, name: str) -> None:
    with telegrad.LocalCluster(["a"], server=server):
        raised = while_reading(name) if where == "driver" else rpc.rpc_sync(where, while_reading, args=(name,))
    assert raised.startswith(name)
    (noted,) = lease_check.take_broken()
    assert name in noted
    assert ("process" in noted) == (where == "a")
    assert "while_reading" in noted  # the stack


@pytest.mark.parametrize("name", ALLOWED)
def test_what_does_not_wait_is_allowed(server: telegrad.ForkServer, name: str) -> None:
    with telegrad.LocalCluster(["a"], server=server):
        assert while_reading(name) == ""


def drop_gradients() -> bool:
    """Lets go of gradients while it holds the read lease; returns whether it held it."""
    lease = current_worker()._lease
    while not lease.try_take():
        time.sleep(1e-3)
    try:
        GradientTable.of([(torch.ones(1, requires_grad=True), torch.ones(1))])
        GradientTable()  # which holds nothing
        return lease_check.is_reading()
    finally:
        lease.release()


@pytest.mark.parametrize("where", ["driver", "a"])
def test_the_end_of_tensors_is_noted(server: telegrad.ForkServer, where: str) -> None:
    with telegrad.LocalCluster(["a"], server=server):
        assert drop_gradients() if where == "driver" else rpc.rpc_sync(where, drop_gradients)
    (noted,) = lease_check.take_broken()
    assert "drops the last reference to a GradientTable" in noted
    assert "drop_gradients" in noted  # the stack


def test_what_is_done_with_no_lease_is_allowed(server: telegrad.ForkServer) -> None:
    with telegrad.LocalCluster(["a"], server=server):
        logger.debug("a text")
        values.interruptible(threading.Lock)
