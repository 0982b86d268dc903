"""Anomaly mode holds wherever a call or a pass of its user runs, and nowhere after that."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.autograd import detect_anomaly

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.gradients.anomaly import anomaly_mode
from telegrad.gradients.torch_modes import current_modes
from telegrad.nn import RemoteModule

PATIENCE = 30.0
OFF = (False, True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:Error detected in"),
    pytest.mark.filterwarnings("ignore:.*does not have.*forward:UserWarning"),
]


@pytest.fixture(autouse=True)
def is_off_afterwards() -> Iterator[None]:
    yield
    left = state()
    torch.set_anomaly_enabled(False)
    assert left == OFF


def state() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def state_of_third() -> tuple[bool, bool]:
    return rpc.rpc_sync("b", state)


class Broken(nn.Linear):
    """Its weights' gradients are NaN: infinity times zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * 0).sqrt()


class Around(nn.Module):
    """Has one on another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = RemoteModule("b", Broken, (4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def nodes_with_traceback(x: torch.Tensor) -> bool:
    return "nodes_with_traceback" in "".join((x * 2).grad_fn.metadata.get("traceback_", ()))


def test_calls_take_it_along(cluster):
    x = torch.ones(2, requires_grad=True)
    assert not rpc.rpc_sync("a", nodes_with_traceback, args=(x,))
    with detect_anomaly():
        assert rpc.rpc_sync("a", state) == rpc.rpc_async("a", state).wait() == (True, True)
        assert rpc.rpc_sync("a", state_of_third) == (True, True)
        assert rpc.rpc_sync("a", nodes_with_traceback, args=(x,)), "the callee's forward pass is recorded"
    with detect_anomaly(check_nan=False):
        assert rpc.rpc_sync("a", state_of_third) == (True, False)
    for worker in "ab":
        assert rpc.rpc_sync(worker, state) == OFF


@pytest.mark.parametrize("in_context", [False, True], ids=["plain", "context"])
@pytest.mark.parametrize(("where", "name"), [("a", "a"), ("around", "b")])
def test_a_nan_in_a_remote_backward_raises_at_the_root(cluster, where, name, in_context):
    model = RemoteModule("a", Broken, (4, 4)) if where == "a" else RemoteModule("a", Around)

    def run() -> None:
        with autograd.context() if in_context else contextlib.nullcontext() as context_id:
            loss = model(torch.ones(2, 4)).sum()
            if in_context:
                autograd.backward(context_id, [loss], timeout=PATIENCE)
            else:
                loss.backward()

    run()  # as in one process without anomaly mode: the gradients are NaN
    with detect_anomaly(), pytest.raises(errors.BackwardError) as caught:
        run()
    error = caught.value
    assert "Function 'MulBackward0' returned nan values in its 0th output" in str(error)
    assert f"worker {name!r}" in str(error)
    assert error.worker == name
    with detect_anomaly(check_nan=False):
        run()
    for worker in "ab":
        assert rpc.rpc_sync(worker, state) == OFF


_open = threading.Event()
_entered = threading.Event()


def wait_in_it() -> tuple[bool, bool]:
    _entered.set()
    _open.wait(PATIENCE)
    return state()


def let_go() -> tuple[bool, bool]:
    assert _entered.wait(PATIENCE)
    found = state()
    _open.set()
    return found


def test_it_lasts_as_long_as_the_call(server):
    with telegrad.LocalCluster(["a"], server=server):
        with detect_anomaly(check_nan=False):
            future = rpc.rpc_async("a", wait_in_it)
        assert rpc.rpc_sync("a", let_go) == (True, False)  # it is the process's
        assert future.wait() == (True, False)
        assert rpc.rpc_sync("a", state) == OFF


def test_of_several_the_last_ends_it():
    first, second = anomaly_mode(False), anomaly_mode(True)
    with contextlib.ExitStack() as later:
        with first:
            assert state() == (True, False)
            later.enter_context(second)
            assert state() == (True, True)
        assert state() == (True, True)
    assert state() == OFF


def test_what_the_program_has_set_stays():
    with detect_anomaly(check_nan=False):
        with anomaly_mode(False):
            pass
        assert state() == (True, False)
        with anomaly_mode(True):
            assert state() == (True, True)
        assert state() == (True, False)
    left = anomaly_mode(True)
    with detect_anomaly():
        left.__enter__()
    assert state() == OFF, "its program has ended it"
    left.__exit__(None, None, None)


def test_a_fork_has_none_of_it():
    with anomaly_mode(True):
        child = os.fork()
        if not child:
            os._exit(torch.is_anomaly_enabled())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert state() == (True, True)


def test_a_fork_that_is_made_inside_leaves_it():
    inside = anomaly_mode(True)
    inside.__enter__()
    child = os.fork()
    if not child:
        status = 1
        try:
            inside.__exit__(None, None, None)
            status = torch.is_anomaly_enabled()
        finally:
            os._exit(status)
    inside.__exit__(None, None, None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_it_is_a_mode_like_others():
    assert current_modes() is None
    with detect_anomaly():
        modes = current_modes()
    assert modes is not None
    assert (modes.grad, modes.anomaly, modes.check_nan) == (True, True, True)
