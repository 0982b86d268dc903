"""Futures that their users complete themselves, callbacks that call, and finalisers that call in the middle of
telegrad's own code."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.primitives import current

PATIENCE = 20.0
SOURCE = str(Path(telegrad.__file__).parent)


class Gate:
    event = threading.Event()


def wait_at_gate(value: Any = None) -> Any:
    assert Gate.event.wait(PATIENCE)
    return value


def open_gate() -> None:
    Gate.event.set()


def close_gate() -> None:
    Gate.event.clear()


def echo(x: Any = None) -> Any:
    return x


def make() -> list[int]:
    return [1]


@pytest.fixture
def workers(server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a", "b"], server=server) as cluster:
        rpc.rpc_sync("a", close_gate)
        yield cluster


# -- futures that users complete -------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["death", "close", "answer"])
def test_a_future_that_its_user_completed_hurts_no_other(workers, end):
    mine = rpc.rpc_async("a", wait_at_gate)
    others = [rpc.rpc_async("a", wait_at_gate, args=(n,)) for n in range(3)]
    mine.set_result("given up")
    if end == "death":
        os.kill(workers.pids["a"], signal.SIGKILL)
    elif end == "close":
        workers.worker.close(graceful=False)
    else:
        rpc.rpc_sync("a", open_gate)
    for n, other in enumerate(others):
        if end == "answer":
            assert other.wait(PATIENCE) == n
        else:
            with pytest.raises(errors.PeerLostError):
                other.wait(PATIENCE)
    assert mine.wait() == "given up"


def test_deadlines_go_on_after_a_future_that_its_user_completed(workers):
    mine = rpc.rpc_async("a", wait_at_gate, timeout=0.05)
    mine.set_result(None)
    expired = threading.Event()
    later = rpc.rpc_async("a", wait_at_gate, timeout=0.2)
    later.add_done_callback(lambda _: expired.set())
    assert expired.wait(PATIENCE)
    with pytest.raises(errors.CallTimeoutError):
        later.wait()
    rpc.rpc_sync("a", open_gate)


# -- callbacks that call ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "unix"])
def test_a_callback_behind_collect_all_may_call_while_a_pass_reads(transport, server):
    """torch runs it in the middle of set_result(), where telegrad cannot see it coming. It must not run on a thread
    that holds the lease for itself alone: its own answer would not be read."""
    with telegrad.LocalCluster(["a", "b"], transport=transport, server=server):
        x = torch.ones(2, requires_grad=True)
        called: list[Any] = []
        with autograd.context() as context_id:
            y = rpc.rpc_sync("a", torch.mul, args=(x, x))
            rpc.rpc_sync("b", close_gate)
            future = rpc.rpc_async("b", wait_at_gate, args=(1,))
            collected = torch.futures.collect_all([future])
            after = collected.then(lambda _: called.append(rpc.rpc_sync("b", echo, args=(7,), timeout=PATIENCE)))
            y.register_hook(lambda grad: rpc.rpc_sync("b", open_gate))  # so that its answer comes during the pass
            began = time.monotonic()
            autograd.backward(context_id, [y.sum()])
            after.wait()
        assert called == [7]
        assert time.monotonic() - began < PATIENCE / 2


# -- finalisers that call --------------------------------------------------------------------------------


class Finaliser:
    """Runs a user's finaliser at the n-th line of telegrad's code, as the collector may do anywhere, on all threads of
    this process."""

    def __init__(self, action: Callable[[], Any], at: int) -> None:
        self._action = action
        self.at = at
        self.lines = 0
        self.raised: BaseException | None = None
        self.ran = False

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines >= self.at and not self.ran:
                self.ran = True
                try:
                    self._action()
                except BaseException as error:
                    self.raised = error
        return self.trace

    def run(self, program: Callable[[], None]) -> None:
        threading.settrace_all_threads(self.trace) if sys.version_info >= (3, 12) else threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            program()
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


LARGE = torch.ones(40_000)


def a_call() -> None:
    assert rpc.rpc_sync("a", echo, args=(3,), timeout=PATIENCE) == 3


def a_large_call() -> None:
    assert rpc.rpc_sync("a", echo, args=(LARGE,), timeout=PATIENCE).shape == LARGE.shape


def a_value() -> None:
    rpc.remote("a", make).to_here()


ACTIONS: dict[str, Callable[[], Any]] = {
    "async": lambda: rpc.rpc_async("a", echo, args=(1,)),
    "large": lambda: rpc.rpc_async("a", echo, args=(LARGE,)),
    "remote": lambda: rpc.remote("a", make),
    "sync": lambda: rpc.rpc_sync("a", echo, args=(2,), timeout=PATIENCE),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("program", [a_call, a_large_call, a_value], ids=lambda program: program.__name__)
def test_a_finaliser_may_call_at_every_line(workers, program, action):
    """rpc_async() and remote() always work; rpc_sync() works, or says why it cannot. Nothing ever waits for itself."""
    program()
    counter = Finaliser(lambda: None, 10**9)
    counter.run(program)
    refused = worked = 0
    for at in range(1, counter.lines, 3):
        began = time.monotonic()
        finaliser = Finaliser(ACTIONS[action], at)
        finaliser.run(program)
        assert time.monotonic() - began < PATIENCE / 2, f"at line {at} something waited"
        if isinstance(finaliser.raised, errors.FinaliserError):
            refused += 1
        elif finaliser.raised is not None:
            raise finaliser.raised
        else:
            worked += 1
    assert worked
    assert bool(refused) == (action == "sync")
    a_call()


def test_a_call_of_a_finaliser_is_made_after_all(workers):
    made: list[Any] = []
    unanswered = rpc.rpc_async("a", wait_at_gate)
    with telegrad.primitives.interrupts.critical():  # as in the middle of telegrad's own code
        made.append(rpc.rpc_async("a", echo, args=(5,)))
        rref = rpc.remote("a", make)
        with pytest.raises(errors.FinaliserError, match="rpc_sync.* in a finaliser"):
            rpc.rpc_sync("a", echo)
        with pytest.raises(errors.FinaliserError, match=r"Future\.wait"):
            unanswered.wait()
    assert made[0].wait(PATIENCE) == 5
    assert rref.to_here(PATIENCE) == [1]
    rpc.rpc_sync("a", open_gate)
    unanswered.wait(PATIENCE)


class Calls:
    """Garbage that calls when the collector finds it."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        rpc.rpc_async("a", echo, args=(1,))


def test_garbage_that_calls(workers):
    threshold = gc.get_threshold()
    gc.set_threshold(5, 5, 5)
    try:
        for _ in range(300):
            Calls()
            a_call()
    finally:
        gc.set_threshold(*threshold)
        gc.collect()
    a_call()


# -- signals of the system -------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_write_to_a_dead_peer_does_not_end_a_process_that_has_sigpipe_at_its_default(transport):
    program = f"""
import os, signal, telegrad
from telegrad import rpc
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with telegrad.LocalCluster(["a"], transport="{transport}") as cluster:
    rpc.rpc_sync("a", abs, args=(1,))
    lease = cluster.worker._lease
    while not lease.try_take(): pass  # no thread notices the end before the write does
    os.kill(cluster.pids["a"], signal.SIGKILL)
    connection = cluster.worker._peers.connections()[0]
    frames = telegrad.transport.base.Frames(b"x", [b"y"])
    try:
        while True:
            connection.write(frames, 5.0)
    except telegrad.errors.ConnectionClosedError as error:
        print("survived")
    lease.release()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (found.returncode, found.stdout) == (0, "survived\n"), found.stderr


def test_threads_of_the_worker_are_critical_and_users_code_is_not(workers):
    assert rpc.rpc_sync("a", counter_here) == 0
    assert rpc.rpc_sync("driver", counter_here) == 0
    seen: list[int] = []
    future = rpc.rpc_async("a", echo)
    future.then(lambda _: seen.append(current.thread.critical)).wait()
    x = torch.ones(1, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("a", torch.mul, args=(x, x))
        y.register_hook(lambda _: seen.append(current.thread.critical))
        autograd.backward(context_id, [y.sum()])
    assert seen == [0, 0]


def counter_here() -> int:
    return current.thread.critical


def test_a_thread_that_blocks_is_open_to_interrupts_and_closed_to_finalisers(workers):
    """It may hold the read lease: a finaliser that waits there would wait for itself."""
    seen: list[int] = []
    with telegrad.primitives.interrupts.critical():
        telegrad.primitives.interrupts.blocking(lambda: seen.append(current.thread.critical))
        telegrad.primitives.interrupts.interruptible(lambda: seen.append(current.thread.critical))
        with pytest.raises(KeyboardInterrupt):
            telegrad.primitives.interrupts.blocking(signal.raise_signal, signal.SIGINT)
        assert not current.thread.blocking
    assert seen == [1, 0]
