"""What the tests of faults run: a chain of calls with places where something can go wrong, and what they look at.

    driver                    b                         c
    x ── "first" ──────────▶ "inner" ── h ───────────▶ "last"
                                        │                 │
    loss ◀── "root" ◀─────── "outer" ◀──┴─ h + k ◀─── k ──┘

Each place multiplies by a leaf of its own. A backward pass comes by "root", "outer", "last", "inner" and "first", in
this order. A fault says at which place, in which kind of users' code, and what happens there.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import signal
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.events import Event
from telegrad.primitives import current
from telegrad.worker import Worker

PATIENCE = 30.0  # no wait in a test is longer
SOON = 1.0  # seconds after which a failed pass must have raised

PLACES = {"root": "driver", "outer": "b", "last": "c", "inner": "b", "first": "driver"}  # and their workers
FACTORS = {"first": 2.0, "inner": 3.0, "last": 5.0, "outer": 7.0, "root": 11.0}
WAYS = ("function", "hook", "leaf hook", "leaf node", "post hook")  # and two kinds of checkpoints


# -- what happens at a place ------------------------------------------------------------------------------


class BoomError(ValueError):
    """A user's exception, of a type that every worker can import."""


Action = Callable[[str], None]  # gets the place


def fail(place: str) -> None:
    raise BoomError(f"boom at {place}")


def die(place: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# In-process workers share these; a process has its own.
_arrived: defaultdict[str, threading.Event] = defaultdict(threading.Event)
_gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)


def wait_at_gate(place: str) -> None:
    """Tells the driver's process, and waits there until open_gate()."""
    gate = _gates[place]  # before anybody knows: it may be opened and forgotten at once
    rpc.rpc_sync("driver", _arrive, args=(place,), timeout=0)  # the clock may jump before the answer is here
    assert gate.wait(PATIENCE)


def fail_after_gate(place: str) -> None:
    wait_at_gate(place)
    fail(place)


def _arrive(place: str) -> None:
    _arrived[place].set()


def wait_for_arrival(place: str) -> None:
    """In the driver's process: until a thread stands at the gate."""
    assert _arrived[place].wait(PATIENCE), f"no thread came to the gate at {place!r}"


def open_gate(place: str) -> None:
    """On the worker of the place."""
    _gates[place].set()


def forget_gates() -> None:
    _arrived.clear()
    _gates.clear()


def die_at(stage: str, phase: str, kind: str) -> None:
    """Has this worker's process killed at a step of a message."""

    def see(event: Event) -> None:
        if (event.stage, event.phase, event.kind) == (stage, phase, kind):
            die(kind)

    current.current_worker().events.subscribe(see)


@dataclass(frozen=True)
class Fault:
    place: str
    way: str = "function"  # or "call": in the forward pass
    action: Action = fail


class Trip(torch.autograd.Function):
    """The identity. Its backward does something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Action, place: str) -> Tensor:
        ctx.action, ctx.place = action, place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.action(ctx.place)
        return gradient, None, None


# -- the chain --------------------------------------------------------------------------------------------

_leaves: weakref.WeakKeyDictionary[Worker, dict[str, Tensor]] = weakref.WeakKeyDictionary()


def at(place: str, x: Tensor, faults: Sequence[Fault]) -> Tensor:
    """What is computed at a place: x times a new leaf, with whatever goes wrong there."""
    leaf = torch.full((3,), FACTORS[place], requires_grad=True)
    _leaves.setdefault(current.current_worker(), {})[place] = leaf
    for fault in faults:
        if fault.place == place:
            x = _with_fault(fault, x, leaf)
    return x * leaf


def _with_fault(fault: Fault, x: Tensor, leaf: Tensor) -> Tensor:
    def act(*_: object) -> None:
        fault.action(fault.place)

    runs = itertools.count()

    def in_recomputation(x: Tensor) -> Tensor:
        if next(runs):
            act()
        return x.sin()

    match fault.way:
        case "call":
            act()
        case "function":
            return Trip.apply(x, fault.action, fault.place)
        case "hook":
            x = x * 1
            x.register_hook(act)
        case "leaf hook":
            leaf.register_hook(act)
        case "leaf node":
            node = torch.autograd.graph.get_gradient_edge(leaf).node
            node.register_prehook(act)
            x = x * leaf  # the graph keeps the node
        case "post hook":
            leaf.register_post_accumulate_grad_hook(act)
        case "checkpoint":
            return checkpoint(in_recomputation, x, use_reentrant=False)
        case "reentrant checkpoint":
            return checkpoint(in_recomputation, x, use_reentrant=True)
        case _:
            raise AssertionError(fault.way)
    return x


def on_b(x: Tensor, faults: Sequence[Fault]) -> Tensor:
    h = at("inner", x, faults)
    return at("outer", h + rpc.rpc_sync("c", on_c, args=(h, faults)), faults)


def on_c(h: Tensor, faults: Sequence[Fault]) -> Tensor:
    return at("last", h, faults)


def forward(*faults: Fault) -> Tensor:
    """The loss, on the driver."""
    x = at("first", torch.ones(3, requires_grad=True), faults)
    y = rpc.rpc_sync("b", on_b, args=(x, faults))
    return at("root", y, faults).sum()


def check_chain(context_id: int) -> None:
    """The gradients of a pass over the chain, on all three workers, are those of plain autograd."""
    leaves = {place: torch.full((3,), factor, requires_grad=True) for place, factor in FACTORS.items()}
    h = leaves["first"] * leaves["inner"]
    loss = ((h + h * leaves["last"]) * leaves["outer"] * leaves["root"]).sum()
    loss.backward()
    for worker in ("driver", "b", "c"):
        found = rpc.rpc_sync(worker, gradients_by_place, args=(context_id,))
        assert found.keys() == {place for place, its in PLACES.items() if its == worker}
        for place, gradient in found.items():
            torch.testing.assert_close(gradient, leaves[place].grad)


def check_works() -> None:
    """A pass in a new context."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [forward()], timeout=PATIENCE)
        check_chain(context_id)


def twice(x: Tensor) -> Tensor:
    return x * 2


def check_works_with(*names: str) -> None:
    """A pass in a new context, with each of these workers alone."""
    for name in names:
        with autograd.context() as context_id:
            x = torch.ones(3, requires_grad=True)
            autograd.backward(context_id, [rpc.rpc_sync(name, twice, args=(x,)).sum()], timeout=PATIENCE)
            torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))


# -- passes and contexts of others than the driver ----------------------------------------------------------


def backward_of_call(context_id: int, faults: tuple[Fault, ...]) -> None:
    """On b: a pass of its own in the driver's context, with c."""
    x = torch.ones(3, requires_grad=True)
    autograd.backward(context_id, [rpc.rpc_sync("c", on_c, args=(x, faults)).sum()], timeout=PATIENCE)


def root_elsewhere(way: str, place: str) -> None:
    """On a: a context of its own, and a pass over calls of b, which calls c."""
    action = {"die": die, "wait": wait_at_gate}[way]
    with autograd.context() as context_id:
        faults = (Fault(place, action=action),)
        y = rpc.rpc_sync("b", on_b, args=(torch.ones(3, requires_grad=True), faults))
        autograd.backward(context_id, [at("root", y, faults).sum()], timeout=PATIENCE)


def call_and_wait(to: str, then: str) -> None:
    """On a: a context, a call of `to` which calls `then`; and then it waits, inside the context."""
    with autograd.context():
        x = torch.ones(3, requires_grad=True)
        kept = rpc.rpc_sync(to, rpc.rpc_sync, args=(then, twice, (x,)))
        wait_at_gate("in the context")
        del kept


# -- looking ----------------------------------------------------------------------------------------------


def gradients_by_place(context_id: int) -> dict[str, Tensor]:
    leaves = _leaves[current.current_worker()]
    place_of = {id(leaf): place for place, leaf in leaves.items()}
    found = autograd.get_gradients(context_id)
    return {place_of[id(leaf)]: gradient for leaf, gradient in found.items() if id(leaf) in place_of}


def shown_here(context_id: int) -> list[str]:
    """The places whose leaf shows a gradient on this worker, in the context or in `.grad`."""
    leaves = _leaves.get(current.current_worker(), {})
    shown = [f".grad at {place}" for place, leaf in leaves.items() if leaf.grad is not None]
    with contextlib.suppress(errors.UnknownContextError):
        shown += [f"a gradient of {tuple(leaf.shape)}" for leaf in autograd.get_gradients(context_id)]
    return shown


def check_shows_nothing(context_id: int, *names: str) -> None:
    for name in names or ("driver", "b", "c"):
        shown = rpc.rpc_sync(name, shown_here, args=(context_id,))
        assert not shown, f"worker {name!r} shows {shown} after a failed pass"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        threading.Event().wait(0.002)


def stop(pid: int) -> None:
    """Has a process stand still, until it gets a SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    wait_until(lambda: all("\nState:\tT" in (t / "status").read_text() for t in threads), "it stands still")


def left_at(name: str) -> dict[str, int]:
    return {what: count for what, count in rpc.rpc_sync(name, autograd.debug_info).items() if count}


def check_nothing_is_left(*names: str, within: float = PATIENCE) -> None:
    """After the contexts have ended: soon nothing is kept, on any of these workers."""
    deadline = time.monotonic() + within
    while True:
        left = {name: kept for name in names or ("driver", "b", "c") if (kept := left_at(name))}
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        threading.Event().wait(0.002)


def check_error(
    error: BaseException | None, worker: telegrad.WorkerInfo, text: str, cause: type[BaseException]
) -> None:
    """It is what backward() must raise for a failure with this text on that worker."""
    assert type(error) is errors.BackwardError, repr(error)
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(f"Error on Node {worker.id}: {text}"), str(error)
    assert repr(worker.name) in str(error)
    assert (error.worker, error.worker_id) == (worker.name, worker.id)
    assert type(error.__cause__) is cause, repr(error.__cause__)


class InThread:
    """A call on a thread of its own, with this thread's current worker and context."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.error: BaseException | None = None
        self.value: Any = None
        self._function, self._args, self._kwargs = function, args, kwargs
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._run,))
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._function(*self._args, **self._kwargs)
        except BaseException as error:
            self.error = error
        finally:
            del self._args, self._kwargs

    def wait(self, timeout: float = PATIENCE) -> InThread:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"{self._function} did not end"
        return self


@contextlib.contextmanager
def soon(limit: float = SOON) -> Iterator[None]:
    """Its body must be over soon. Time in which this machine had none for us does not count."""
    tick, over, ticks = 0.005, threading.Event(), 0

    def count() -> None:
        nonlocal ticks
        while not over.wait(tick):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert ticks * tick < limit, f"took {ticks * tick:.2f} s"


def stuck_error(
    clock: Any, context_id: int, loss: Tensor, place: str, awaited: int, **kwargs: Any
) -> errors.BackwardError:
    """What a pass raises that stands still until its time is over: a minute, which takes no time. It stands still when
    a thread is at the gate of a place and so many Sends are awaited."""
    running = InThread(autograd.backward, context_id, [loss], timeout=60.0, **kwargs)
    wait_for_arrival(place)

    def stands_still() -> bool:
        graph = autograd.graph(context_id)
        running = [state for state in graph.passes if not (state.awaited or state.is_done)]
        # Their reports may still be on their way to the root.
        (root,) = current.current_worker().engine._roots.values()
        heard_of = not root.missing & {state.worker for state in graph.passes if state.is_done}
        return len(graph.awaited) == awaited and len(running) == 1 and heard_of  # it is the one at the gate

    wait_until(stands_still, "the pass stands still")
    (root,) = current.current_worker().engine._roots.values()
    clock.jump(59.6)  # within its time it asks the others
    wait_until(lambda: root.states is not None, "the others were asked")
    clock.jump(0.5)
    error = running.wait().error
    assert isinstance(error, errors.BackwardError), error
    assert "timeout (60000 ms)" in str(error)
    return error


def backward_error(context_id: int, loss: Tensor, **kwargs: Any) -> errors.BackwardError:
    """What a pass that fails raises; it does so soon."""
    kwargs.setdefault("timeout", PATIENCE)
    try:
        with soon():
            autograd.backward(context_id, [loss], **kwargs)
    except errors.BackwardError as error:
        return error
    raise AssertionError("the pass did not fail")
