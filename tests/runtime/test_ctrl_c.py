"""Ctrl-C at every line of a call, a wait and a pass, and at thousands of random moments: it comes through, the worker
works after it, its connections live, and nothing is left pending."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
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
from telegrad import autograd, rpc
from telegrad.gradients import plain
from telegrad.primitives import current, interrupts
from telegrad.runtime import profiled_calls
from telegrad.worker import Worker

SOURCE = str(Path(telegrad.__file__).parent)
LARGE = torch.ones(50_000)
PATIENCE = 20.0


def echo(x: Any) -> Any:
    return x


def twice(x: Any) -> Any:
    return x * 2


class Strange:
    """Has users' code run while it is pickled."""

    def __reduce__(self) -> Any:
        return Strange, ()


def call() -> None:
    assert rpc.rpc_sync("a", echo, args=(3,)) == 3


def large_call() -> None:
    assert rpc.rpc_sync("a", echo, args=(LARGE,)).shape == LARGE.shape


def nested_call() -> None:
    rpc.rpc_sync("a", echo, args=([Strange(), LARGE],))


def async_calls() -> None:
    futures = [rpc.rpc_async(to, echo, args=(n,)) for n in range(3) for to in ("a", "b")]
    futures[0].then(lambda done: done.value())
    torch.futures.wait_all(futures[3:])
    for future in futures:
        future.wait()


def value_elsewhere() -> None:
    rref = rpc.remote("a", twice, args=(LARGE,))
    assert rpc.rpc_sync("b", name_of_owner, args=(rref,)) == "a"
    rref.to_here()


def name_of_owner(rref: Any) -> str:
    return rref.owner_name()


def backward_pass() -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("a", twice, args=(x,)) + rpc.rpc_sync("b", twice, args=(x,))
        autograd.backward(context_id, [y.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 4.0))


async def awaiting(*, done: bool) -> None:
    future = rpc.rpc_async("a", echo, args=(3,))
    while done and not future.done():
        await asyncio.sleep(0.001)
    assert await future == 3


def awaits() -> None:
    asyncio.run(awaiting(done=True))
    asyncio.run(awaiting(done=False))


PROGRAMS = [call, large_call, nested_call, async_calls, value_elsewhere, backward_pass]


@pytest.fixture
def cluster(server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a", "b"], server=server) as cluster:
        for program in PROGRAMS:
            program()
        yield cluster


class Healthy:
    """What must be as it was, after an interrupt."""

    def __init__(self) -> None:
        self.worker: Worker = current.current_worker()
        self.connections = self.worker._peers.connections()

    def check(self) -> None:
        worker = self.worker
        assert not current.thread.critical
        assert not interrupts.deferred
        for to in ("a", "b"):
            began = time.monotonic()
            assert rpc.rpc_sync(to, echo, args=(7,), timeout=PATIENCE) == 7
            assert time.monotonic() - began < PATIENCE / 2
        assert worker._peers.connections() == self.connections, "a healthy connection was ended"

    def check_all(self) -> None:
        """At the end: what was interrupted has left nothing behind."""
        self.check()
        gc.collect()  # the exception of an interrupt refers to frames that refer to it
        worker = self.worker
        deadline = time.monotonic() + PATIENCE
        while True:
            left = {
                "pending": len(worker._pending), "passes": worker.engine.busy, "contexts": len(worker.contexts),
                "in flight": worker._peers.bytes_in_flight(), "held": worker.references.statistics()["held"],
                "lent": worker.references.statistics()["on_loan"],
            }  # fmt: skip
            if not any(left.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert not any(left.values()), left
        for to in ("a", "b"):
            assert rpc.rpc_sync(to, what_is_kept) == {"owned": 0, "contexts": 0, "passes": 0}


def what_is_kept() -> dict[str, int]:
    worker = current.current_worker()
    deadline = time.monotonic() + PATIENCE
    while True:
        owned = worker.references.statistics()["owned"]
        kept = {"owned": owned, "contexts": len(worker.contexts), "passes": worker.engine.busy}
        if not any(kept.values()) or time.monotonic() > deadline:
            return kept
        time.sleep(0.01)


class Presser:
    """Presses Ctrl-C at the n-th line of telegrad's code that the main thread runs."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
                return None
        return self.trace

    def run(self, program: Callable[[], None]) -> bool:
        """Whether the interrupt came through."""
        sys.settrace(self.trace)
        try:
            program()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


@pytest.mark.parametrize("program", [*PROGRAMS, awaits], ids=lambda program: program.__name__)
def test_ctrl_c_at_every_line(cluster, program):
    healthy = Healthy()
    counter = Presser(-1)
    counter.run(program)
    step = 1 if counter.lines < 1500 else 2  # the longest ones: every other line
    lost = []
    for at in range(1, counter.lines + 1, step):
        presser = Presser(at)
        if not presser.run(program) and presser.lines >= at:
            # In a finaliser it comes a moment later; and an exception that a callback raises is torch's to report.
            try:
                time.sleep(0.1)
                lost.append(at)
            except KeyboardInterrupt:
                pass
        healthy.check()
    assert not lost, f"the interrupt at these lines was lost: {lost}"
    healthy.check_all()


@pytest.mark.parametrize("what", ["enter", "untracked", "local_only"])
def test_ctrl_c_while_the_state_of_a_thread_is_changed(cluster, what):
    with autograd.context() as context_id, autograd.context() as inner:
        blocks: dict[str, Callable[[], Any]] = {
            "enter": lambda: autograd.enter(context_id), "untracked": plain.untracked,
            "local_only": profiled_calls.local_only,
        }  # fmt: skip

        def program() -> None:
            with blocks[what]():
                sys.settrace(None)

        counter = Presser(-1)
        counter.run(program)
        for at in range(1, counter.lines + 1):
            presser = Presser(at)
            if not presser.run(program):
                with pytest.raises(KeyboardInterrupt):  # it came in a finaliser
                    time.sleep(PATIENCE)
            gc.collect()  # a generator that was left by its caller ends when it dies
            assert current.current_context_id() == inner, at
            assert not plain.thread.untracked
            assert not profiled_calls.is_local_only()


def press(_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def when_done(how: Callable[[Any], object]) -> None:
    future = rpc.rpc_async("a", echo, args=(3,))
    future.wait()
    how(future)


CALLBACKS: dict[str, Callable[[], object]] = {
    "then, done": lambda: when_done(lambda future: future.then(press)),
    "add_done_callback, done": lambda: when_done(lambda future: future.add_done_callback(press)),
    "then, not done": lambda: slow().then(press).wait(),
    "of a future of then": lambda: slow().then(lambda done: done.value()).then(press).wait(),
    "set_result": lambda: waiting_with(slow()).set_result(5),
}


def slow() -> Any:
    return rpc.rpc_async("a", time.sleep, args=(0.02,))


def waiting_with(future: Any) -> Any:
    future.add_done_callback(press)
    return future


@pytest.mark.parametrize("program", CALLBACKS.values(), ids=CALLBACKS)
def test_ctrl_c_in_a_callback_of_a_future(cluster, program):
    """torch makes a RuntimeError of it, or drops it."""
    healthy = Healthy()
    with pytest.raises(KeyboardInterrupt):
        try:
            program()
        except RuntimeError:  # of the future that `then` made, on another thread than this
            time.sleep(PATIENCE)
    healthy.check()


def test_ctrl_c_while_the_main_thread_completes_the_future_of_a_served_call():
    """torch drops it, and the call must be answered all the same."""
    with telegrad.LocalCluster(["here"], transport="inproc"):
        at, ended = 0, False
        while not ended:
            at += 1
            completed.append(Awaited())
            answer = rpc.rpc_async("here", unfinished)
            assert served.wait(PATIENCE)
            presser = Presser(at)
            interrupted = presser.run(lambda: completed.pop().set_result(7))
            ended = presser.lines < at
            try:
                assert answer.wait(PATIENCE) == 7
                if not interrupted and not ended:
                    time.sleep(PATIENCE)  # it comes a moment later
            except KeyboardInterrupt:
                interrupted = True
            assert interrupted != ended
            assert answer.wait(PATIENCE) == 7
            served.clear()
        assert at > 2


completed: list[Any] = []  # futures of the calls that are served in this process
served = threading.Event()


class Awaited(torch.futures.Future[int]):
    def add_done_callback(self, callback: Any) -> None:
        super().add_done_callback(callback)
        served.set()


@rpc.functions.async_execution
def unfinished() -> Any:
    return completed[0]


def test_ctrl_c_at_random_moments(cluster):
    """10,000 of them, at every place that a signal can come to."""
    healthy = Healthy()
    chooser = random.Random(4)
    before = signal.getsignal(signal.SIGALRM)
    armed, hits, shots = False, 0, 10_000

    def press(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            signal.raise_signal(signal.SIGINT)

    # Python drops an exception that is raised in a callback of the collector's, as hypothesis has one.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    signal.signal(signal.SIGALRM, press)
    try:
        for shot in range(shots):
            program = PROGRAMS[shot % len(PROGRAMS)]
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chooser.uniform(1e-5, 2e-3))
                while armed:
                    program()
                time.sleep(0.05)  # one that came in a finaliser comes a moment later
            except KeyboardInterrupt:
                hits += 1
            if shot % 100 == 0:
                healthy.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.callbacks[:] = callbacks
    assert hits > shots * 0.99
    healthy.check_all()
