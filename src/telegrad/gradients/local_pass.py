"""One worker's part of one pass.

LocalPass   its state, and what has arrived for it. Threads that read bring messages (participant.py)
EngineCall  torch's engine at work on it, on another thread; Wait, Send and Recv (nodes.py) call it
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from _thread import RLock  # threading.RLock is Python code
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from .._torch import DisableTorchFunctionSubclass, run_backward
from ..errors import GradientError
from ..messages import COUNTER_BITS, Begin, Envelope, sender_of
from ..primitives import clock, current
from ..primitives.interrupts import interruptible
from ..primitives.waiter import Waiter
from . import nodes
from .backward_pass import Part, PartInstruction, State
from .contexts import Context, Contexts, Sent
from .dependency_log import flatten_groups
from .diagnosis import MOST_DUE, Awaited, PartState
from .host import Host
from .leaves import Capture, GradientTable
from .local_graph import NOTHING, Graph, Node, Reach

_DEVICE_POLL = 1e-3  # seconds
_ONE = torch.ones(())  # the gradient of tokens
_BEACON = nodes.make_beacon()

Gradient = torch.Tensor | None


class InterruptedPassError(GradientError):
    """Inside the engine: the pass is over, and what is waited for will not come."""


class LatePassError(InterruptedPassError):
    """Inside the engine: the time of the pass is over."""


class Roots(NamedTuple):
    """The engine's starts at the worker that called backward() or grad()."""

    tensors: Sequence[torch.Tensor] = ()
    gradients: Sequence[torch.Tensor] = ()
    leaves: Sequence[Node] = ()  # that they lead to, and no Send does
    checkpoints: Sequence[Node] = ()
    reach: Reach = NOTHING
    inputs: Sequence[torch.Tensor] | None = None  # of grad(): what to return the gradients of


_NO_ROOTS = Roots()


@dataclass(eq=False, slots=True)
class LocalPass:
    """One worker's part in one pass: its state, what has arrived for it, and what came of it."""

    pass_id: int
    part: Part
    since: float = field(default_factory=lambda: clock.now())
    # Guards `part` and the three below. Threads that read take it: held for a moment only.
    lock: Any = field(default_factory=RLock)
    frames: dict[int, tuple[Envelope, Any]] = field(default_factory=dict)  # by message: its gradients, as read
    waiters: dict[int, Waiter] = field(default_factory=dict)  # by message: what the engine waits for
    interrupted: str = ""
    settled: Waiter = field(default_factory=Waiter)  # done when the root has said the last word
    # Set before the engine starts, and never after:
    context: Context | None = None
    begin: Begin | None = None
    sent: dict[int, Sent] = field(default_factory=dict)  # by id: the tensors that will get gradients
    roots: Roots = _NO_ROOTS
    deadline: float | None = None
    depth: int = 1
    on_own_thread: bool = False  # on the thread that has called backward(), whose modes hold already
    turn: Any = None  # of that thread with the read lease
    # Left by the engine call:
    last: tuple[int, tuple[Gradient, ...]] | None = None  # a message and its gradients, which go with the report
    results: tuple[Gradient, ...] = ()  # of grad()
    committing: Any = field(default_factory=RLock)  # guards `gradients`
    gradients: GradientTable | None = None

    def begins(self, contexts: Contexts) -> list[PartInstruction]:
        """Looks up the tensors that will get gradients, and begins."""
        assert self.context is not None
        assert self.begin is not None
        try:
            self.sent = {id: contexts.find_sent(self.context, id) for id in self.begin.sends}
        except GradientError as error:
            with self.lock:
                return self.part.on_local_end(error)
        with self.lock:
            return self.part.on_begin({sent.message for sent in self.sent.values()})

    def interrupt(self, worker_id: int, reason: str) -> None:
        """Ends the engine's waiting."""
        with self.lock:
            if not self.interrupted and self.context is not None:
                self.context.failed = self.describe(worker_id)
            self.interrupted = self.interrupted or reason
            waiters = list(self.waiters.values())
            self.waiters.clear()
            self.frames.clear()
        for waiter in waiters:
            waiter.set_done()

    def describe(self, worker_id: int) -> PartState:
        """Says what it awaits now."""
        with self.lock:
            part = self.part
            receivers = {sent.message: sent.to for sent in self.sent.values()}
            holding_up = list(self.waiters)
            if not part.is_root and part.sends and part.sends[-1] not in part.arrived:
                holding_up = [part.sends[-1]]  # the engine would have nothing to do, and has not started
            due = (m for m in reversed(part.sends) if m not in part.arrived and m not in holding_up)
            return PartState(
                worker_id,
                self.pass_id,
                () if self.begin is None else self.begin.sends,
                tuple([Awaited(message, receivers.get(message, -1)) for message in holding_up]),
                tuple([Awaited(message, receivers.get(message, -1)) for message in islice(due, MOST_DUE)]),
                is_done=part.state in (State.REPORTED, State.FINISHED) and not part.has_failed,
                has_failed=part.has_failed,
                is_over=part.is_over,
            )


class EngineCall:
    """torch's engine at work on `local`. `post` sends the gradients of a received message."""

    def __init__(self, local: LocalPass, contexts: Contexts, host: Host, post: Callable[..., None]) -> None:
        assert local.context is not None
        assert local.begin is not None
        self._local = local
        self._context = local.context
        self._contexts = contexts
        self._host = host
        self._post = post
        self._begin = local.begin
        self._receivers: dict[int, int] = {}  # by message: the worker that its gradients come from
        self._counts: dict[int, int] = {}  # by message: tensors that were not asked for yet
        self._decoded: dict[int, tuple[Gradient, ...]] = {}  # by message
        self._capture: Capture | None = None
        # Guarded by the lock of `local`: a device's thread may post at the same time.
        self._due: dict[int, int] | None = None  # by received message: tensors that the engine has not come to yet
        self._collected: dict[int, list[Gradient]] = {}  # by received message
        self._unposted = 0  # received messages whose gradients are still to be sent
        # For users' code that the engine runs on a thread of its own (primitives/current.py):
        self.pass_id = local.pass_id
        self.context_id = local.context.id
        self.worker: Any = current.current_worker()
        if local.part.is_root:
            self.serving = current.serving.get()
        else:
            root = host.name_of(sender_of(local.pass_id))
            self.serving = current.Serving(root, local.pass_id, local.deadline, local.depth)

    def run(self) -> None:
        """Runs torch's engine. Raises what users' code raises in it."""
        local, begin = self._local, self._begin
        self._context.failed = None
        starts: list[Any] = [_BEACON, *local.roots.tensors]
        gradients: list[Any] = [_ONE, *local.roots.gradients]
        leaves = self._add_sends(starts, gradients) if local.sent else []
        if not local.part.is_root and begin.wanted is None:
            self._due = self._count_due()
            self._unposted = len(self._due)
        tokens = (
            (current.context_id, current.context_id.set(self.context_id)),
            (current.pass_id, current.pass_id.set(self.pass_id)),
            (current.serving, current.serving.set(self.serving)),
        )
        nodes.starting(self)
        try:
            if begin.wanted is not None or local.roots.inputs is not None:
                self._run_for_inputs(starts, gradients)
            else:
                self._run_for_leaves(starts, gradients, leaves)
        finally:
            nodes.ended(self)
            for variable, token in tokens:
                variable.reset(token)  # type: ignore[arg-type]

    def _add_sends(self, starts: list[Any], gradients: list[Any]) -> list[Node]:
        """Adds the tensors that were sent to the starts: directly where the gradient is here, behind a Wait where not.
        Returns the leaves among them."""
        local = self._local
        for sent in local.sent.values():
            self._receivers[sent.message] = sent.to
            self._counts[sent.message] = self._counts.get(sent.message, 0) + 1
        with local.lock:
            arrived = set(local.part.arrived)
        waits: dict[int, list[Sent]] = {}
        for sent in local.sent.values():
            # A leaf's gradient is kept without a copy if nothing else holds it, as a start's would be. And None is no
            # start's gradient; but what is behind a node that returns None runs.
            if sent.message in arrived and not sent.is_leaf and (gradient := self.take(sent.id)) is not None:
                starts.append(GradientEdge(*sent.edge))
                gradients.append(gradient)
            elif sent.stand_in.requires_grad:  # a leaf may have been frozen since
                waits.setdefault(sent.message, []).append(sent)
        last: list[torch.Tensor] = []
        leaves: list[Node] = []
        with torch.enable_grad(), DisableTorchFunctionSubclass():
            for message in wait_order(waits):
                of_message = waits[message]
                if len(of_message) > 1:
                    of_message.sort(key=lambda sent: not sent.is_leaf)
                ids = tuple([sent.id for sent in of_message if sent.is_leaf])
                last = [nodes.make_wait(message, ids, [*[sent.stand_in for sent in of_message], *last])]
                nexts = last[0].grad_fn.next_functions  # type: ignore[union-attr]
                leaves += [node for node, _ in nexts[: len(ids)] if node is not None]
        starts += last
        gradients += [_ONE for _ in last]
        return leaves

    def _run_for_leaves(self, starts: list[Any], gradients: list[Any], sent_leaves: list[Node]) -> None:
        """Gathers the gradients of all leaves that the engine comes to."""
        local, context = self._local, self._context
        leaves = dict.fromkeys([*sent_leaves, *local.roots.leaves])
        checkpoints = list(local.roots.checkpoints)
        with context.lock:  # others may walk the graphs
            for graph in {context.graph, *[sent.graph for sent in local.sent.values()]}:
                leaves.update(dict.fromkeys(graph.leaves))
                checkpoints += graph.checkpoints
        if self._begin.create_graph:
            _use_up_warning()
        if not leaves and not checkpoints:
            self._run_engine(starts, gradients, (), accumulate=True)
            return
        for node in checkpoints:
            _watch_checkpoint(node)
        capture = self._capture = Capture(lambda: nodes.running() is self)
        try:
            capture.watch(leaves)
            self._run_engine(starts, gradients, (), accumulate=True)
        finally:
            capture.close()
            self._capture = None  # it refers to this call: only the collector would find the two
        local.gradients = capture.gradients

    def _run_for_inputs(self, starts: list[Any], gradients: list[Any]) -> None:
        """Computes only what leads to the inputs of grad(), or to a Recv that it wants."""
        inputs = self._local.roots.inputs or ()
        anchors = [node.next_functions[0][0].variable for node in (_BEACON.grad_fn, *self._received())]
        found = self._run_engine(starts, gradients, (*inputs, *anchors), accumulate=False)
        self._local.results = tuple(found[: len(inputs)])

    def _run_engine(self, starts: list[Any], gradients: list[Any], inputs: tuple[Any, ...], accumulate: bool) -> Any:
        begin = self._begin
        keep_graph = begin.retain_graph or begin.create_graph
        # Users' code runs in there: hooks, functions, finalisers.
        return interruptible(
            run_backward, tuple(starts), tuple(gradients), keep_graph, begin.create_graph, inputs, True, accumulate
        )

    def _received(self) -> list[Node]:
        """Returns the Recvs that the pass comes to on this worker."""
        local = self._local
        if self._begin.wanted is not None:
            ids = set(self._begin.wanted)
        else:
            ids = {id for sent in local.sent.values() for id in sent.reach} | local.roots.reach
            if any(id < 0 for id in ids):
                ids = flatten_groups(ids, self._contexts.log.closure(ids))
        return [self._contexts.find_received(id) for id in ids]

    def _count_due(self) -> dict[int, int]:
        """Counts how many tensors of each received message the engine will come to."""
        due: dict[int, int] = {}
        for node in self._received():
            due[node.message] = due.get(node.message, 0) + 1
        return due

    # -- called by the nodes, inside of the engine -----------------------------------------------------

    def wait_for(self, message: int) -> None:
        """Waits until the gradients of a message are here.

        Raises:
            InterruptedPassError: the pass is over.
            LatePassError: its time is.
        """
        local = self._local
        with local.lock:
            if message in local.part.arrived or local.interrupted:
                waiter = None
            else:
                waiter = local.waiters[message] = Waiter()
        if waiter is not None:
            if nodes.has_devices():
                self._wait_beside_devices(waiter, self._receivers[message])
            else:
                self._host.wait(waiter, self._receivers[message], local.deadline, local.turn)
        self._check(message)

    def _wait_beside_devices(self, waiter: Waiter, peer: int) -> None:
        """Waits, and runs a small engine call now and then: in it the engine's CPU thread works off the CPU nodes
        that became ready from a device's work, and that would stand behind this Wait."""
        deadline = self._local.deadline
        while not waiter.done:
            now = clock.now()
            if deadline is not None and now >= deadline:
                return
            self._host.wait(waiter, peer, now + _DEVICE_POLL, self._local.turn)
            if not waiter.done:
                with torch.enable_grad():
                    leaf = torch.zeros((), device="cuda", requires_grad=True)
                    torch.autograd.grad(leaf * 1, leaf)

    def _check(self, message: int) -> None:
        if self._local.interrupted:
            raise InterruptedPassError(f"the pass was ended: {self._local.interrupted}")
        if message not in self._local.part.arrived:
            raise LatePassError(f"the gradients of message {message} did not come in time")

    def take(self, id: int) -> Gradient:
        """Returns the gradient of a tensor that was sent, once. It has arrived."""
        sent = self._local.sent[id]
        message = sent.message
        gradients = self._decoded.get(message)
        if gradients is None:
            with self._local.lock:
                arrived = self._local.frames.pop(message, None)
            if arrived is None:
                self._check(message)
                raise GradientError(f"the gradients of message {message} were asked for twice in one pass")
            gradients = self._decoded[message] = self._host.decode(*arrived).gradients
        gradient = _checked(gradients, sent)
        if gradient is not None:
            self._counts[message] -= 1
            if self._counts[message] == 0:
                del self._decoded[message]  # a second reference would force a copy of a leaf's gradient
        return gradient

    def post(self, recv: Any, gradient: Gradient) -> None:
        """Sends the gradient of a received tensor to its sender, with the others of its message."""
        local = self._local
        if local.interrupted:
            raise InterruptedPassError(f"the pass was ended: {local.interrupted}")
        message = recv.message
        with local.lock:
            if recv.count == 1:
                gradients: tuple[Gradient, ...] = (gradient,)
            else:
                if self._due is None:
                    self._due = self._count_due()
                self._collected.setdefault(message, [None] * recv.count)[recv.place] = gradient
                self._due[message] -= 1
                if self._due[message]:
                    return
                gradients = tuple(self._collected.pop(message))
            self._unposted -= 1
            is_last = self._unposted == 0 and len(local.part.arrived) == len(local.part.sends)
        if is_last and message >> COUNTER_BITS == self.pass_id >> COUNTER_BITS:
            # The engine has nothing more to wait for and is all but done: the root hears of that in the same message.
            local.last = (message, gradients)
        else:
            self._post(local, message, gradients)

    def watch_nested(self, node: Any, leaves: list[Any]) -> None:
        """Takes the gradients of leaves that an engine call inside of this node comes to."""
        thread = threading.get_ident()
        nested = Capture(lambda: threading.get_ident() == thread and nodes.running() is not self)
        nested.watch(leaves)

        def after(*_: Any) -> None:
            handle.remove()
            nested.close()
            assert self._capture is not None
            self._capture.gradients.take_over(nested.gradients)

        handle = node.register_hook(after)


def wait_order(messages: Iterable[int]) -> list[int]:
    """Returns the order in which Waits are chained. The engine takes them in reverse: the gradients of what was sent
    last are waited for first. Any other order can deadlock: see docs/backward.md."""
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
        call, node = nodes.running(), own_node()
        if isinstance(call, EngineCall) and node is not None:
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            starts = [(t.grad_fn, 0) for t in found if isinstance(t, torch.Tensor) and t.grad_fn is not None]
            inputs = {id(a) for a in args if isinstance(a, torch.Tensor)}
            graph = Graph(lambda received: -1)
            graph.walk(starts)
            call.watch_nested(node, [leaf for leaf in graph.leaves if id(leaf.variable) not in inputs])
            graph.clear()
        return outputs

    recompute.__telegrad__ = True  # type: ignore[attr-defined]
    node.run_function = recompute


@functools.cache
def _use_up_warning() -> None:
    """Has torch give its warning, once in a process, that backward() with create_graph makes a cycle through `.grad`.
    Here it makes none: the gradient never gets there."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        leaf = torch.zeros((), requires_grad=True)
        (leaf * 1).backward(create_graph=True)
        leaf.grad = None
