"""One worker's part of one pass, while it runs: what has arrived for it, and torch's engine call.

Messages come in on threads that read; the engine runs on another. Between them are the pure state
(backward_pass.py), the frames of gradients that have arrived, and the Waiters of the engine's Waits.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from .._torch import run_backward
from ..errors import GradientError
from ..messages import Begin, Envelope, sender_of
from ..primitives import clock, current
from ..primitives.interrupts import interruptible
from ..primitives.waiter import Waiter
from . import nodes
from .backward_pass import Part, PartInstruction, State
from .contexts import Context, Sent
from .diagnosis import MOST_DUE, Awaited, PartState
from .leaves import Capture, GradientTable
from .local_graph import NOTHING, Graph, Node, Reach

_run_backward = run_backward
_INTO_LEAVES, _FOR_INPUTS = (True, True), (True, False)  # allow_unreachable, accumulate_grad
_DEVICE_POLL = 1e-3  # seconds
_ONE = torch.ones(())  # the gradient of tokens

Arrived = tuple[Envelope, Any]  # a Gradients message as it was read: its envelope and its frames
Gradient = torch.Tensor | None


class InterruptedPassError(GradientError):
    """Inside the engine: the pass is over, and what is waited for will not come."""


class LatePassError(InterruptedPassError):
    """Inside the engine: the time of the pass is over."""


class Roots(NamedTuple):
    """What the engine starts from at the worker that called backward() or grad()."""

    tensors: Sequence[torch.Tensor] = ()
    gradients: Sequence[torch.Tensor] = ()
    leaves: Sequence[Node] = ()  # that they lead to, and no Send does
    checkpoints: Sequence[Node] = ()
    reach: Reach = NOTHING
    inputs: Sequence[torch.Tensor] | None = None  # of grad(): what to return the gradients of


NO_ROOTS = Roots()


@dataclass(frozen=True)
class Surroundings:
    """What a pass needs of its worker."""

    worker_id: int
    wait: Callable[[Waiter, int, float | None, Any], None]  # for what comes from a worker, until a deadline
    decode: Callable[[Envelope, Any], tuple[Gradient, ...]]
    post: Callable[[LocalPass, int, tuple[Gradient, ...]], None]  # to where the message came from
    find_sent: Callable[[Context, int], Sent]
    received: Callable[[LocalPass], list[Node]]  # the Recvs that a pass comes to
    beacon: torch.Tensor


class LocalPass:
    __slots__ = (
        "around", "awaited_from", "begin", "capture", "collected", "committing", "context", "counts", "deadline",
        "decoded", "depth", "due", "frames", "gradients", "interrupted", "last", "lock", "on_own_thread", "part",
        "pass_id", "results", "root_name", "roots", "sent", "serving", "settled", "since", "unposted",
        "waiters", "watch", "worker",
    )  # fmt: skip

    def __init__(self, pass_id: int, around: Surroundings, part: Part) -> None:
        self.pass_id = pass_id
        self.around = around
        self.since = clock.now()
        # Guards the five below, and what `post` collects. Threads that read take it: held for a moment only.
        self.lock = threading.RLock()
        self.part = part
        self.frames: dict[int, Arrived] = {}  # by message
        self.waiters: dict[int, Waiter] = {}  # by message
        self.interrupted = ""
        self.settled: Waiter | None = None  # made by whoever waits for the root's last word
        # Set before the engine starts, and never after:
        self.context: Context | None = None
        self.begin: Begin | None = None
        self.roots = NO_ROOTS
        self.deadline: float | None = None
        self.depth = 1
        self.root_name = ""
        self.worker: Any = None
        self.serving: current.Serving | None = None
        self.on_own_thread = False  # on the thread that has called backward(), whose modes hold already
        self.watch: Any = None  # by which that thread waits
        # The engine thread's own:
        self.sent: dict[int, Sent] = {}  # by id
        self.awaited_from: dict[int, int] = {}  # by message: the worker
        self.counts: dict[int, int] = {}  # by message: tensors that were not asked for yet
        self.decoded: dict[int, tuple[Gradient, ...]] = {}  # by message
        self.capture: Capture | None = None
        self.due: dict[int, int] | None = None  # by received message: tensors that the engine has not come to yet
        self.collected: dict[int, list[Gradient]] = {}  # by received message
        self.unposted = 0  # received messages whose gradients are still to be sent
        self.last: tuple[int, tuple[Gradient, ...]] | None = None  # what is sent when the engine is done
        self.results: tuple[Gradient, ...] = ()  # of grad()
        # What came of it, guarded by `committing`:
        self.committing = threading.RLock()
        self.gradients: GradientTable | None = None

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
            if not self.interrupted and self.context is not None:
                self.context.failed = self.describe()
            self.interrupted = self.interrupted or reason
            waiters = list(self.waiters.values())
            self.waiters.clear()
            self.frames.clear()
        for waiter in waiters:
            waiter.set_done()

    def describe(self) -> PartState:
        """What it awaits now. Takes no longer than a look at a few numbers."""
        with self.lock:
            part, begin = self.part, self.begin
            holding_up = list(self.waiters)
            has_started = part.is_root or bool(self.sent)
            if not has_started and part.sends and part.sends[-1] not in part.arrived:
                holding_up = [part.sends[-1]]  # the engine would have nothing to do
            due = (m for m in reversed(part.sends) if m not in part.arrived and m not in holding_up)
            return PartState(
                self.around.worker_id,
                self.pass_id,
                () if begin is None else begin.sends,
                tuple([Awaited(message, self._receiver_of(message)) for message in holding_up]),
                tuple([Awaited(message, self._receiver_of(message)) for message in islice(due, MOST_DUE)]),
                is_done=part.state in (State.REPORTED, State.FINISHED) and not part.has_failed,
                has_failed=part.has_failed,
                is_over=part.is_over,
            )

    def _receiver_of(self, message: int) -> int:
        """The worker that a message was sent to; -1 if that is not known any more."""
        if self.context is not None:
            with contextlib.suppress(GradientError):
                return self.around.find_sent(self.context, message).to  # its first tensor has its id
        return -1

    # -- called by the nodes, inside of the engine -----------------------------------------------------

    def wait_for(self, message: int) -> None:
        """Until the gradients of a message are here.

        Raises:
            InterruptedPassError: the pass is over.
            LatePassError: its time is.
        """
        with self.lock:
            if message in self.part.arrived or self.interrupted:
                waiter = None
            else:
                waiter = self.waiters[message] = Waiter()
        if waiter is not None:
            if nodes.has_devices():
                self._wait_beside_devices(waiter, self.awaited_from[message])
            else:
                self.around.wait(waiter, self.awaited_from[message], self.deadline, self.watch)
        self._check(message)

    def _wait_beside_devices(self, waiter: Waiter, peer: int) -> None:
        """CPU nodes that become ready from a device's work would stand behind this Wait: the engine's CPU thread
        works them off while an engine call of ours is under way inside it."""
        while not waiter.done:
            now = clock.now()
            if self.deadline is not None and now >= self.deadline:
                return
            self.around.wait(waiter, peer, now + _DEVICE_POLL, self.watch)
            if not waiter.done:
                _run_device_nodes()

    def _check(self, message: int) -> None:
        if self.interrupted:
            raise InterruptedPassError(f"the pass was ended: {self.interrupted}")
        if message not in self.part.arrived:
            raise LatePassError(f"the gradients of message {message} did not come in time")

    def take(self, sent: int) -> Gradient:
        """The gradient of a tensor that was sent. It has arrived."""
        found = self.sent[sent]
        gradients = self.decoded.get(found.message)
        if gradients is None:
            with self.lock:
                arrived = self.frames.pop(found.message, None)
            if arrived is None:
                self._check(found.message)
                raise GradientError(f"the gradients of message {found.message} were asked for twice in one pass")
            gradients = self.decoded[found.message] = self.around.decode(*arrived)
        gradient = _checked(gradients, found)
        if gradient is not None:
            self.counts[found.message] -= 1
            if self.counts[found.message] == 0:
                del self.decoded[found.message]  # what is here twice could not be kept without a copy
        return gradient

    def post(self, recv: Any, gradient: Gradient) -> None:
        """Sends the gradient of a received tensor to where it came from, with the others of its message."""
        if self.interrupted:
            raise InterruptedPassError(f"the pass was ended: {self.interrupted}")
        message = recv.message
        with self.lock:  # a device's thread may come with another tensor at the same time
            if recv.count == 1:
                gradients: tuple[Gradient, ...] = (gradient,)
            else:
                found = self.collected.setdefault(message, [None] * recv.count)
                found[recv.place] = gradient
                due = self._due()
                due[message] -= 1
                if due[message]:
                    return
                gradients = tuple(self.collected.pop(message))
            self.unposted -= 1
            is_last = self.unposted == 0 and len(self.part.arrived) == len(self.part.sends)
        if is_last and sender_of(message) == sender_of(self.pass_id):
            # The engine has nothing more to wait for and is all but done: the root hears of that in the same message.
            self.last = (message, gradients)
        else:
            self.around.post(self, message, gradients)

    def _due(self) -> dict[int, int]:
        """How many tensors of each received message this pass comes to."""
        if self.due is None:
            self.due = {}
            for node in self.around.received(self):
                self.due[node.message] = self.due.get(node.message, 0) + 1
        return self.due

    # -- the engine call -------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs torch's engine over this worker's part. Raises what users' code raises in it."""
        begin, context = self.begin, self.context
        assert begin is not None
        assert context is not None
        context.failed = None
        starts: list[Any] = [self.around.beacon, *self.roots.tensors]
        gradients: list[Any] = [_ONE, *self.roots.gradients]
        for id in begin.sends:
            sent = self.sent[id] = self.around.find_sent(context, id)
            self.awaited_from[sent.message] = sent.to
            self.counts[sent.message] = self.counts.get(sent.message, 0) + 1
        leaves = self._add_sends(starts, gradients) if self.sent else []
        if not self.part.is_root and begin.wanted is None:
            self.unposted = len(self._due())
        keep = begin.retain_graph or begin.create_graph
        with self._as_current():
            if begin.wanted is not None or self.roots.inputs is not None:
                self._run_for_inputs(tuple(starts), tuple(gradients), keep, begin)
            else:
                self._run_for_leaves(tuple(starts), tuple(gradients), keep, begin, context, leaves)

    def _add_sends(self, starts: list[Any], gradients: list[Any]) -> list[Node]:
        """The tensors that were sent, as starts: directly where the gradient is here, behind a Wait where not.
        Returns the leaves among them."""
        with self.lock:
            arrived = set(self.part.arrived)
        waits: dict[int, list[Sent]] = {}
        last: list[torch.Tensor] = []
        for sent in self.sent.values():
            # A leaf's gradient is kept without a copy if nobody else holds it, as a start's would be. And None is no
            # start's gradient; but what is behind a node that returns None runs.
            if sent.message in arrived and not sent.is_leaf and (gradient := self.take(sent.id)) is not None:
                starts.append(GradientEdge(*sent.edge))
                gradients.append(gradient)
            elif sent.stand_in.requires_grad:  # a leaf may have been frozen since
                waits.setdefault(sent.message, []).append(sent)
        leaves: list[Node] = []
        for message in wait_order(waits):
            of_message = sorted(waits[message], key=_leaves_first)
            ids = tuple([sent.id for sent in of_message if sent.is_leaf])
            last = [nodes.make_wait(message, ids, [*(sent.stand_in for sent in of_message), *last])]
            nexts = last[0].grad_fn.next_functions  # type: ignore[union-attr]
            leaves += [node for node, _ in nexts[: len(ids)] if node is not None]
        starts += last
        gradients += [_ONE for _ in last]
        return leaves

    def _run_for_leaves(
        self, starts: Any, gradients: Any, keep: bool, begin: Begin, context: Context, sent_leaves: list[Node]
    ) -> None:
        leaves = dict.fromkeys([*sent_leaves, *self.roots.leaves])
        checkpoints = list(self.roots.checkpoints)
        graphs = {sent.graph for sent in self.sent.values()}
        graphs.add(context.graph)
        with context.lock:  # others may walk it
            for graph in graphs:
                leaves.update(dict.fromkeys(graph.leaves))
                checkpoints += graph.checkpoints
        for node in checkpoints:
            _watch_checkpoint(node)
        capture = self.capture = Capture(lambda: nodes.running() is self)
        try:
            capture.watch(leaves)
            if begin.create_graph:
                _use_up_warning()
            # In there runs users' code: hooks, functions, what the collector finds.
            interruptible(_run_backward, starts, gradients, keep, begin.create_graph, (), *_INTO_LEAVES)
        finally:
            capture.close()
            self.capture = None  # it refers to this pass: only the collector would find the two
        self.gradients = capture.gradients

    def _run_for_inputs(self, starts: Any, gradients: Any, keep: bool, begin: Begin) -> None:
        inputs = list(self.roots.inputs or ())
        anchors = [_anchor_of(node) for node in (self.around.beacon.grad_fn, *self.around.received(self))]
        found = interruptible(
            _run_backward, starts, gradients, keep, begin.create_graph, (*inputs, *anchors), *_FOR_INPUTS
        )
        self.results = tuple(found[: len(inputs)])

    def watch_nested(self, node: Any, leaves: list[Any]) -> None:
        """Takes the gradients of leaves that an engine call inside of this node comes to."""
        thread = threading.get_ident()
        nested = Capture(lambda: threading.get_ident() == thread and nodes.running() is not self)
        nested.watch(leaves)

        def after(*_: Any) -> None:
            handle.remove()
            nested.close()
            assert self.capture is not None
            self.capture.gradients.take_over(nested.gradients)

        handle = node.register_hook(after)

    def _as_current(self) -> _AsCurrent:
        return _AsCurrent(self)


class _AsCurrent:
    """While the engine runs: its context and pass are the current ones, and its calls share its deadline."""

    __slots__ = ("_context", "_pass", "_pass_token", "_serving")

    def __init__(self, pass_: LocalPass) -> None:
        self._pass = pass_

    def __enter__(self) -> None:
        pass_ = self._pass
        self._context = current.context_id.set(pass_.context_id)
        self._pass_token = current.pass_id.set(pass_.pass_id)
        self._serving = None
        if not pass_.part.is_root:
            pass_.serving = current.Serving(pass_.root_name, pass_.pass_id, pass_.deadline, pass_.depth)
            self._serving = current.serving.set(pass_.serving)
        else:
            pass_.serving = current.serving.get()
        pass_.worker = current.current_worker()
        nodes.starting(pass_)

    def __exit__(self, *_: object) -> None:
        nodes.starting(None)
        nodes.forget(self._pass)
        current.context_id.reset(self._context)
        current.pass_id.reset(self._pass_token)
        if self._serving is not None:
            current.serving.reset(self._serving)


def wait_order(messages: Iterable[int]) -> list[int]:
    """The order in which Waits are chained. The engine takes them in reverse: the gradients of what was sent last are
    waited for first. Any other order can deadlock: see docs/backward.md."""
    return sorted(messages)


def _leaves_first(sent: Sent) -> bool:
    return not sent.is_leaf


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
            graph = Graph(lambda received: -1)
            graph.walk(starts)
            pass_.watch_nested(node, [leaf for leaf in graph.leaves if id(leaf.variable) not in inputs])
            graph.clear()
        return outputs

    recompute.__telegrad__ = True  # type: ignore[attr-defined]
    node.run_function = recompute


@functools.cache
def _use_up_warning() -> None:
    """torch warns, once in a process, that backward() with create_graph makes a cycle through `.grad`. Here it makes
    none: the gradient never gets there."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        leaf = torch.zeros((), requires_grad=True)
        (leaf * 1).backward(create_graph=True)
        leaf.grad = None


def _run_device_nodes() -> None:
    """An engine call over one node of a device."""
    with torch.enable_grad():
        leaf = torch.zeros((), device="cuda", requires_grad=True)
        torch.autograd.grad(leaf * 1, leaf)
