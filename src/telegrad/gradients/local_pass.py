"""One worker's part of one pass, while it runs: what has arrived for it, and torch's engine call.

Messages come in on threads that read; the engine runs on another. Between them are the pure state
(backward_pass.py), the frames of gradients that have arrived, and the Waiters of the engine's Waits.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import current
from ..errors import CallTimeoutError, GradientError
from ..messages import Begin, Envelope
from ..waiter import Waiter
from . import nodes
from .backward_pass import Part, PartInstruction
from .contexts import Context, Sent
from .leaves import Capture, GradientTable
from .local_graph import NOTHING, Node, Reach, members, walk

_run_backward = torch.autograd.Variable._execution_engine.run_backward
_DEVICE_POLL = 1e-3  # seconds

Arrived = tuple[Envelope, Any]  # a Gradients message as it was read: its envelope and its frames
Gradient = torch.Tensor | None


class InterruptedPassError(GradientError):
    """Inside the engine: the pass is over, and what is waited for will not come."""


@dataclass(frozen=True)
class Roots:
    """What the engine starts from at the worker that called backward() or grad()."""

    tensors: Sequence[Any] = ()  # tensors, or torch's GradientEdges
    gradients: Sequence[Gradient] = ()
    reach: Reach = NOTHING  # what they lead to
    inputs: Sequence[torch.Tensor] | None = None  # of grad(): what to return the gradients of


@dataclass(frozen=True)
class Surroundings:
    """What a pass needs of its worker."""

    wait: Callable[[Waiter, int, float | None], None]  # until it is done, or the deadline; who it comes from
    decode: Callable[[Envelope, Any], tuple[Gradient, ...]]
    post: Callable[[LocalPass, int, tuple[Gradient, ...]], None]  # to where the message came from
    find_sent: Callable[[Context, int], Sent]
    find_received: Callable[[int], Node]
    beacon: torch.Tensor


@dataclass(eq=False)
class LocalPass:
    pass_id: int
    around: Surroundings
    part: Part
    since: float = field(default_factory=time.monotonic)
    # Guards `part`, `frames`, `waiters` and `interrupted`. Threads that read take it: held for a moment only.
    lock: Any = field(default_factory=threading.RLock)
    frames: dict[int, Arrived] = field(default_factory=dict)  # by message
    waiters: dict[int, Waiter] = field(default_factory=dict)  # by message
    decoded: dict[int, tuple[Gradient, ...]] = field(
        default_factory=dict
    )  # by message; the engine's thread alone
    interrupted: str = ""
    settled: Waiter = field(default_factory=Waiter)  # the root has said its last word
    gradients: GradientTable = field(
        default_factory=GradientTable
    )  # guarded by `committing` once the engine is done
    committing: Any = field(default_factory=threading.RLock)
    # Set before the engine starts, and never after:
    context: Context | None = None
    begin: Begin | None = None
    roots: Roots = Roots()
    deadline: float | None = None
    depth: int = 1
    root_name: str = ""
    on_own_thread: bool = False  # on the thread that has called backward(), whose modes hold already
    # The engine thread's own:
    sent: dict[int, Sent] = field(default_factory=dict)  # by id
    awaited_from: dict[int, int] = field(default_factory=dict)  # by message: the worker
    counts: Counter[int] = field(default_factory=Counter)  # by message: tensors that were not asked for yet
    capture: Capture = field(default_factory=lambda: Capture(bool))
    results: tuple[Gradient, ...] = ()  # of grad()

    @property
    def context_id(self) -> int:
        return self.context.id if self.context is not None else 0

    def on(self, event: Callable[[Part], list[PartInstruction]]) -> list[PartInstruction]:
        with self.lock:
            return event(self.part)

    def keep(self, message: int, arrived: Arrived) -> list[PartInstruction]:
        """Gradients of a message have come. They are decoded when the engine comes to them."""
        with self.lock:
            instructions = self.part.on_gradients(message)
            if message in self.part.arrived and not self.interrupted:
                self.frames.setdefault(message, arrived)
            return instructions

    def wake(self, message: int) -> None:
        with self.lock:
            waiter = self.waiters.pop(message, None)
        if waiter is not None:
            waiter.set_done()

    def interrupt(self, reason: str) -> None:
        with self.lock:
            self.interrupted = self.interrupted or reason
            waiters = list(self.waiters.values())
            self.waiters.clear()
            self.frames.clear()
        for waiter in waiters:
            waiter.set_done()

    # -- called by the nodes, inside of the engine -----------------------------------------------------

    def wait_for(self, message: int) -> None:
        """Until the gradients of a message are here.

        Raises:
            InterruptedPassError: the pass is over.
            CallTimeoutError: its time is.
        """
        with self.lock:
            if message in self.part.arrived or self.interrupted:
                waiter = None
            else:
                waiter = self.waiters[message] = Waiter()
        if waiter is not None:
            if _has_devices():
                self._wait_beside_devices(waiter)
            else:
                self.around.wait(waiter, self.awaited_from[message], self.deadline)
        self._check(message)

    def _wait_beside_devices(self, waiter: Waiter) -> None:
        """CPU nodes that become ready from a device's work would stand behind this Wait: the engine's CPU thread
        works them off while an engine call of ours is under way inside it."""
        while not waiter.done:
            left = _left(self.deadline)
            if left is not None and left <= 0:
                return
            waiter.sleep(_DEVICE_POLL)
            if not waiter.done:
                _run_device_nodes()

    def _check(self, message: int) -> None:
        if self.interrupted:
            raise InterruptedPassError(f"the pass was ended: {self.interrupted}")
        if message not in self.part.arrived:
            raise CallTimeoutError(
                f"the gradients of message {message} did not come in time: "
                "the backward pass ran for more than set timeout"
            )

    def take(self, sent: int) -> Gradient:
        """The gradient of a tensor that was sent. It has arrived."""
        found = self.sent[sent]
        gradients = self.decoded.get(found.message)
        if gradients is None:
            with self.lock:
                arrived = self.frames.pop(found.message, None)
            if arrived is None:
                self._check(found.message)
                raise GradientError(
                    f"the gradients of message {found.message} were asked for twice in one pass"
                )
            gradients = self.decoded[found.message] = self.around.decode(*arrived)
        count = self.counts[found.message] - 1
        self.counts[found.message] = count
        if count == 0:
            del self.decoded[found.message]  # what is here twice could not be kept without a copy
        return _checked(gradients, found)

    def post(self, message: int, gradients: tuple[Gradient, ...]) -> None:
        """Sends the gradients of a received message to where it came from."""
        if self.interrupted:
            raise InterruptedPassError(f"the pass was ended: {self.interrupted}")
        self.around.post(self, message, gradients)

    # -- the engine call -------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs torch's engine over this worker's part. Raises what users' code raises in it."""
        begin, context = self.begin, self.context
        assert begin is not None
        assert context is not None
        sends = [self.around.find_sent(context, id) for id in begin.sends]
        self.sent = {sent.id: sent for sent in sends}
        self.awaited_from = {sent.message: sent.to for sent in sends}
        self.counts = Counter(sent.message for sent in sends)
        with self.lock:
            arrived = set(self.part.arrived)
        here = [sent.token for sent in sends if sent.message in arrived]
        awaited: dict[int, list[torch.Tensor]] = {}
        for sent in sends:
            if sent.message not in arrived:
                awaited.setdefault(sent.message, []).append(sent.token)
        if awaited:
            with torch.enable_grad():
                here.append(
                    nodes.chain_waits([(message, awaited[message]) for message in wait_order(awaited)])
                )
        one = torch.ones(())
        starts = (self.around.beacon, *self.roots.tensors, *here)
        gradients = (one, *self.roots.gradients, *(one for _ in here))
        keep = begin.retain_graph or begin.create_graph
        with self._as_current():
            if begin.wanted is not None or self.roots.inputs is not None:
                self._run_for_inputs(starts, gradients, keep, begin)
            else:
                self._run_for_leaves(starts, gradients, keep, begin, sends)

    def _run_for_leaves(
        self, starts: Any, gradients: Any, keep: bool, begin: Begin, sends: list[Sent]
    ) -> None:
        capture = Capture(lambda: nodes.running() is self)
        reaches = [self.roots.reach, *(sent.reach for sent in sends)]
        for node in members([reach.checkpoints for reach in reaches]):
            _watch_checkpoint(node)
        self.capture = capture
        try:
            capture.watch(members([reach.leaves for reach in reaches]))
            _run_backward(
                starts, gradients, keep, begin.create_graph, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            capture.close()
        self.gradients = capture.gradients

    def _run_for_inputs(self, starts: Any, gradients: Any, keep: bool, begin: Begin) -> None:
        inputs = list(self.roots.inputs or ())
        wanted = {self.around.find_received(id) for id in begin.wanted or ()}
        anchors = [_anchor_of(node) for node in (self.around.beacon.grad_fn, *wanted)]
        found = _run_backward(
            starts, gradients, keep, begin.create_graph, (*inputs, *anchors),
            allow_unreachable=True, accumulate_grad=False,
        )  # fmt: skip
        self.results = tuple(found[: len(inputs)])

    def watch_nested(self, node: Any, leaves: list[Any]) -> None:
        """Takes the gradients of leaves that an engine call inside of this node comes to."""
        thread = threading.get_ident()
        nested = Capture(lambda: threading.get_ident() == thread and nodes.running() is not self)
        nested.watch(leaves)

        def after(*_: Any) -> None:
            handle.remove()
            nested.close()
            self.capture.gradients.take_over(nested.gradients)

        handle = node.register_hook(after)

    @contextlib.contextmanager
    def _as_current(self) -> Iterator[None]:
        """While the engine runs: its context and pass are the current ones, and its calls share its deadline."""
        context_token = current.context_id.set(self.context_id)
        pass_token = current.pass_id.set(self.pass_id)
        serving_token = None
        if not self.part.is_root:
            serving = current.Serving(self.root_name, self.pass_id, self.deadline, self.depth)
            serving_token = current.serving.set(serving)
        nodes.starting(self)
        try:
            yield
        finally:
            nodes.starting(None)
            nodes.forget(self)
            current.context_id.reset(context_token)
            current.pass_id.reset(pass_token)
            if serving_token is not None:
                current.serving.reset(serving_token)


def wait_order(messages: Iterable[int]) -> list[int]:
    """The order in which Waits are chained. The engine takes them in reverse: the gradients of what was sent last are
    waited for first. Any other order can deadlock: see docs/backward.md."""
    return sorted(messages)


def _checked(gradients: tuple[Gradient, ...], sent: Sent) -> Gradient:
    """
    Raises:
        GradientError: it is not the gradient of what was sent.
    """
    if len(gradients) != sent.count:
        raise GradientError(
            f"{len(gradients)} gradients came for message {sent.message}, which carried {sent.count} tensors that "
            "require grad"
        )
    gradient = gradients[sent.place]
    if gradient is None:
        return None
    if gradient.shape != sent.shape or gradient.dtype != sent.dtype:
        raise GradientError(
            f"gradient {sent.place} of message {sent.message} has shape {tuple(gradient.shape)} and dtype "
            f"{gradient.dtype}; the tensor has shape {tuple(sent.shape)} and dtype {sent.dtype}"
        )
    return gradient if gradient.device == sent.device else gradient.to(sent.device)


def _anchor_of(node: Any) -> torch.Tensor:
    return node.next_functions[0][0].variable  # type: ignore[no-any-return]


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()


# Note [reentrant checkpoints]
# Such a checkpoint's backward computes its forward again and runs an engine call of its own over that. The leaves it
# comes to are known only then, and their gradients belong to the pass as well. So its function is wrapped: inside of
# a pass, what it computed is walked, and its leaves are watched too, but for its own inputs.
def _watch_checkpoint(node: Any) -> None:
    function = node.run_function
    if hasattr(function, "__telegrad__"):
        return
    own_node = weakref.ref(node)

    @functools.wraps(function)
    def recompute(*args: Any) -> Any:
        outputs = function(*args)
        pass_, node = nodes.running(), own_node()
        if isinstance(pass_, LocalPass) and node is not None:
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            starts = [(t.grad_fn, 0) for t in found if isinstance(t, torch.Tensor) and t.grad_fn is not None]
            inputs = {id(a) for a in args if isinstance(a, torch.Tensor)}
            leaves = [n for n in members([_leaves_of(starts)]) if id(n.variable) not in inputs]
            pass_.watch_nested(node, leaves)
        return outputs

    recompute.__telegrad__ = True  # type: ignore[attr-defined]
    node.run_function = recompute


def _leaves_of(starts: list[tuple[Any, int]]) -> frozenset[Any]:
    return walk(starts, {}, lambda received: -1).leaves


def _has_devices() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _run_device_nodes() -> None:
    """An engine call over one node of a device."""
    with torch.enable_grad():
        leaf = torch.zeros((), device="cuda", requires_grad=True)
        torch.autograd.grad(leaf * 1, leaf)
