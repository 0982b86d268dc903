"""EngineCall: torch's engine at work on one worker's part of a pass. Wait, Send and Recv (nodes.py) call it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .._torch import DisableTorchFunctionSubclass, current_graph_task_id, run_backward
from ..errors import GradientError
from ..messages import COUNTER_BITS
from ..options import SHARED_MEMORY_FROM
from ..primitives import clock, current
from ..primitives.interrupts import interruptible
from ..primitives.waiter import Waiter
from . import devices, nodes
from .captured import Captured, edges_behind
from .checkpoints import watch_checkpoint
from .contexts import Contexts, Sent
from .holding import free_references, kept
from .host import Host
from .leaves import Capture
from .local_graph import Graph, Node
from .local_pass import InterruptedPassError, LatePassError, LocalPass
from .outbox import Gradient, Poster
from .pasts import Member
from .torch_modes import use_up_warning
from .waits import is_unseen, make_waits

_DEVICE_POLL, _RARE_DEVICE_POLL = 1e-3, 20e-3  # seconds
_PUMP_PAUSE = 10  # times as long as the last pump took
_ONE = torch.ones((), device="cpu")  # the gradient of tokens
_BEACON = nodes.make_beacon()
_new_edge: Any = tuple.__new__  # that of a NamedTuple is Python code


_TAKEN: Any = object()


class EngineCall:
    """torch's engine at work on `local`."""

    def __init__(self, local: LocalPass, contexts: Contexts, host: Host, poster: Poster) -> None:
        assert local.context is not None
        assert local.begin is not None
        self._local = local
        self._context = local.context
        self._contexts = contexts
        self._host = host
        self._poster = poster
        self._begin = local.begin
        self._decoded: dict[int, list[Any]] = {}  # by message: gradients that were not asked for yet
        self.capture: Capture | None = None
        self._free = free_references()
        # Guarded by the lock of `local`: a device's thread may post at the same time.
        self._due: dict[int, int] | None = None  # by received message: Recvs that the engine has not come to yet
        self._collected: dict[int, list[Gradient]] = {}  # by received message
        self._events: dict[int, list[devices.Event]] = {}  # the same: these gradients are ready behind them
        self._unposted = 0  # received messages whose gradients are still to be sent
        self._waits = False  # the engine waits for gradients, on its thread
        self.task = -1  # torch's number of the engine call, once it runs
        # See nodes.py:
        self.thread = 0  # which makes the call, and runs the CPU's nodes
        self.before: EngineCall | None = None  # around it on that thread
        self.has_devices = torch.cuda.is_initialized()  # then torch may run nodes on threads of its own
        self._mix: devices.Mix | None = None  # None: not known yet
        self._kept: set[int] = set()  # tensors that were sent: leaves whose gradients go past their nodes
        self._ready: dict[int, devices.Ready] = {}  # by message sent: of its gradients, if some are on devices
        self._is_for_inputs = local.begin.wanted is not None or local.roots.inputs is not None
        # Whether the gradients of leaves are gathered, instead of going to `.grad` at once:
        self._captures = not self._is_for_inputs and (local.context.id != 0 or not local.is_root)
        # For users' code that the engine runs on a thread of its own (primitives/current.py):
        self.pass_id = local.pass_id
        self.context_id = local.context.id
        self.worker: Any = host
        if local.is_root:
            self.serving, self.recomputes = current.serving.get(), current.recomputes.get()
        else:
            root = host.name_of(local.pass_id >> COUNTER_BITS)
            self.serving = current.Serving(root, local.pass_id, local.deadline, local.depth)
            self.recomputes = 0

    def run(self) -> None:
        """Runs torch's engine. Raises what users' code raises in it."""
        local, begin = self._local, self._begin
        self._context.failed = None
        starts: list[Any] = [_BEACON, *local.roots.tensors]
        gradients: list[Any] = [_ONE, *local.roots.gradients]
        leaves: dict[Node, None] = self._add_sends(starts, gradients) if local.sent else {}
        if not local.is_root and begin.wanted is None:
            self._due = self._count_due()
            self._unposted = len(self._due)
        context_token = current.context_id.set(self.context_id)
        pass_token = current.pass_id.set(self.pass_id)
        serving_token = current.serving.set(self.serving)
        nodes.starting(self)
        try:
            if self._is_for_inputs:
                self._run_for_inputs(starts, gradients)
            else:
                self._run_for_leaves(starts, gradients, leaves)
        finally:
            nodes.ended(self)
            current.context_id.reset(context_token)
            current.pass_id.reset(pass_token)
            current.serving.reset(serving_token)

    def _add_sends(self, starts: list[Any], gradients: list[Any]) -> dict[Node, None]:
        """Adds the tensors that were sent to the starts: those of the last message directly, since a participant does
        not start before it has their gradients; the others behind Waits. Returns the leaves among them."""
        local = self._local
        last = -1 if local.is_root else local.order[-1]
        waits: dict[int, list[Sent]] = {}
        inner: set[int] = set()  # of these: messages with tensors that are no small leaves
        for sent in local.sent.values():
            # A leaf's gradient is kept without a copy if nothing else holds it, as a start's would be. And None is no
            # start's gradient; but what is behind a node that returns None runs.
            # Gradients of other messages that are here already go behind Waits all the same: which ones are here is
            # chance, and the order in which the engine adds up gradients must not depend on it.
            if sent.message == last and not sent.is_leaf and (gradient := self.take(sent.id)) is not None:
                starts.append(_new_edge(GradientEdge, sent.edge))
                gradients.append(gradient)
            elif sent.leaf is None or sent.leaf.requires_grad:  # a leaf may have been frozen since
                waits.setdefault(sent.message, []).append(sent)
                if not sent.is_small_leaf:
                    inner.add(sent.message)
        leaves: dict[Node, None] = {}
        if waits:
            with DisableTorchFunctionSubclass():
                if self.has_devices and self._captures:
                    self._kept = {sent.id for all_sent in waits.values() for sent in all_sent if is_unseen(sent)}
                if torch.is_grad_enabled():
                    token = make_waits(waits, inner, leaves, self._kept, has_devices=self.has_devices)
                else:
                    with torch.enable_grad():
                        token = make_waits(waits, inner, leaves, self._kept, has_devices=self.has_devices)
            starts.append(token)
            gradients.append(_ONE)
        return leaves

    def _run_for_leaves(self, starts: list[Any], gradients: list[Any], leaves: dict[Node, None]) -> None:
        """Gathers the gradients of all leaves that the engine comes to; where a plain backward() was called they go to
        `.grad`, as they always do."""
        local, context = self._local, self._context
        if not self._captures:
            self._run_engine(starts, gradients, (), accumulate=True)
            return
        for node in local.roots.leaves:
            leaves[node] = None
        checkpoints = list(local.roots.checkpoints)
        with context.lock:  # others may walk the graphs
            graphs = {context.graph: None}
            for sent in local.sent.values():
                graphs[sent.graph] = None
            for graph in graphs:
                if graph.was_cleared:  # what is not watched would go to `.grad` at once
                    raise InterruptedPassError("the pass is over: what was sent in it is not kept any more")
                for node in graph.leaves:
                    leaves[node] = None
                checkpoints += graph.checkpoints
        if cut := [sent.edge for sent in local.sent.values() if not sent.graph.is_complete]:
            whole = Graph(lambda members: -1)
            whole.walk(cut)
            leaves.update(dict.fromkeys(whole.leaves))
            checkpoints += whole.checkpoints
            whole.clear()
        if self._begin.create_graph:
            use_up_warning()
        if not leaves and not checkpoints and not self._kept:
            self._run_engine(starts, gradients, (), accumulate=True)
            return
        captured = None if checkpoints or self._kept else Captured.of(leaves)
        if captured is not None:
            others = edges_behind((_BEACON.grad_fn, *self._received()))
            found = self._run_engine(starts, gradients, (*captured.inputs, *others), accumulate=False)
            local.gathering = partial(captured.gather, found, gradients)
            if not captured.can_wait(found):
                local.gather()
            return
        for node in checkpoints:
            watch_checkpoint(node)
        capture = self.capture = Capture(self.is_running, local.take, shows=not context.id)
        try:
            capture.watch(leaves)
            self._run_engine(starts, gradients, (), accumulate=True)
        except BaseException:
            if self.has_devices:
                devices.drain(leaves)  # what is added to a leaf from here on would go to `.grad`
            raise
        finally:
            capture.close()
            self.capture = None  # it refers to this call: only the collector would find the two
        local.gradients = capture.gradients

    def _run_for_inputs(self, starts: list[Any], gradients: list[Any]) -> None:
        """Computes only what leads to the inputs of grad(), or to a Recv that it wants."""
        inputs = self._local.roots.inputs or ()
        anchors = edges_behind((_BEACON.grad_fn, *self._received()))
        accumulates = self._local.roots.accumulates
        found = self._run_engine(starts, gradients, (*inputs, *anchors), accumulate=accumulates)
        self._local.results = () if accumulates else tuple(found[: len(inputs)])

    def _run_engine(self, starts: list[Any], gradients: list[Any], inputs: tuple[Any, ...], accumulate: bool) -> Any:
        begin = self._begin
        keep_graph = begin.retain_graph or begin.create_graph
        # Users' code runs in there: hooks, functions, finalisers.
        try:
            return interruptible(
                run_backward, tuple(starts), tuple(gradients), keep_graph, begin.create_graph, inputs, True, accumulate
            )
        except BaseException:
            nodes.drop_leftovers()
            raise

    def _received(self) -> list[Node]:
        """Returns the Recvs that the pass comes to on this worker."""
        local = self._local
        members: set[Member]
        if self._begin.wanted is not None:
            members = set(self._begin.wanted)
        else:
            members = set(local.roots.reach)
            for sent in local.sent.values():
                members |= sent.reach
        received, found = self._context.received, {}
        for member in members:
            node = received.get(member) if type(member) is int else None
            if node is None:  # a group, or received elsewhere than in this context
                return self._contexts.nodes_of(members)
            found[id(node)] = node
        return list(found.values())

    def _count_due(self) -> dict[int, int]:
        """Counts how many Recvs of each received message the engine will come to."""
        due: dict[int, int] = {}
        for node in self._received():
            due[node.message] = due.get(node.message, 0) + 1
        return due

    def is_running(self) -> bool:
        """Whether this code runs in it."""
        return current_graph_task_id() == self.task or nodes.running() is self

    def is_beside_devices(self) -> bool:
        """Whether an engine call inside of this one, on this thread, may wait for a device."""
        return self.has_devices and self.thread == threading.get_ident()

    # -- called by the nodes, inside of the engine -----------------------------------------------------

    def wait_for(self, messages: list[int], limit: float | None) -> None:
        """Waits until the gradients of these messages are here; with a limit, so many seconds at most.

        Raises:
            InterruptedPassError: the pass is over.
            LatePassError: its time is.
        """
        local = self._local
        limit_at = None if limit is None else clock.now() + limit
        for message in messages:
            if message in local.arrived:
                continue
            if local.outboxes:
                self._poster.flush(local)
            with local.lock:
                if message in local.arrived or local.interrupted:
                    waiter = None
                else:
                    waiter = local.waiters[message] = Waiter()
            if waiter is not None:
                self._waits = True
                try:
                    while True:
                        until = local.wait_until()
                        if limit_at is not None:
                            until = limit_at if until is None else min(until, limit_at)
                        if self.has_devices:
                            self._wait_beside_devices(waiter, local.messages[message].to, until)
                        else:
                            self._host.wait(waiter, local.messages[message].to, until, local.turn)
                        if waiter.done or (limit_at is not None and clock.now() >= limit_at) or not local.goes_on():
                            break
                finally:
                    self._waits = False
            if local.interrupted or message not in local.arrived:
                if limit_at is not None and clock.now() >= limit_at and not local.interrupted:
                    return
                self._check(message)
        if local.interrupted:
            self._check(messages[0])

    def _wait_beside_devices(self, waiter: Waiter, peer: int, deadline: float | None) -> None:
        """Waits; and lets CPU nodes run that became ready by a device's work, and would stand behind this Wait."""
        local, shortest = self._local, _DEVICE_POLL
        pause = shortest
        while not waiter.done:
            now = clock.now()
            if deadline is not None and now >= deadline:
                return
            until = now + pause if deadline is None else min(now + pause, deadline)
            self._host.wait(waiter, peer, until, local.turn)
            if waiter.done:
                return
            if self._mix is None:
                edges = [root.grad_fn if hasattr(root, "grad_fn") else root.node for root in local.roots.tensors]
                self._mix = devices.mix_of(
                    [*edges, *(sent.edge[0] for sent in local.sent.values() if not sent.is_leaf)]
                )
            if self._mix is devices.Mix.NO_DEVICE:
                self._host.wait(waiter, peer, deadline, local.turn)
                return
            if self._mix is devices.Mix.DEVICE_ONLY and shortest == _DEVICE_POLL:
                pause = shortest = _RARE_DEVICE_POLL
                continue
            began = clock.now()
            devices.pump()
            # A pump comes before all else on the device's thread. Those of all that wait must leave it time for more.
            pause = min(max(shortest, _PUMP_PAUSE * (clock.now() - began)), _RARE_DEVICE_POLL)

    def _check(self, message: int) -> None:
        if self._local.interrupted:
            raise InterruptedPassError(f"the pass was ended: {self._local.interrupted}")
        if message not in self._local.arrived:
            raise LatePassError(f"the gradients of message {message} did not come in time")

    def take(self, id: int) -> Gradient:
        """Returns the gradient of a tensor that was sent, once. It has arrived."""
        sent = self._local.sent[id]
        gradients = self._decoded.get(sent.message)
        if gradients is None:
            gradients = self._decode(sent.message)
        gradient: Any = gradients[sent.place]
        if gradient is None:
            return None
        gradients[sent.place] = _TAKEN  # a second reference would force a copy of a leaf's gradient
        if gradient is _TAKEN:
            raise GradientError(f"the gradients of message {sent.message} were asked for twice in one pass")
        if gradient.shape != sent.shape or gradient.dtype != sent.dtype:
            raise GradientError(
                f"gradient {sent.place} of message {sent.message} has shape {tuple(gradient.shape)} and dtype "
                f"{gradient.dtype}; the tensor has shape {tuple(sent.shape)} and dtype {sent.dtype}"
            )
        if sent.message in self._ready:
            devices.follow(self._ready[sent.message].streams, gradient)
        found: torch.Tensor = gradient if gradient.device == sent.device else gradient.to(sent.device)
        return found

    def keep(self, ids: Sequence[int]) -> None:
        """Takes the gradients of leaves that were sent, past their nodes: see waits.py."""
        assert self.capture is not None
        for id in ids:
            gradient = self.take(id)
            if gradient is not None:
                sent = self._local.sent[id]
                assert sent.leaf is not None
                ready = self._ready.get(sent.message)
                self.capture.keep(sent.leaf, gradient, is_free=ready is not None and ready.are_apart)

    def _decode(self, message: int) -> list[Any]:
        """Decodes the gradients of a message, with those that came together with them."""
        local = self._local
        with local.lock:
            arrived = local.undecoded.pop(message, None)
        if arrived is None:
            self._check(message)
            raise GradientError(f"the gradients of message {message} were asked for twice in one pass")
        arrived.frames.deadline = local.deadline
        found = self._host.decode(arrived.envelope, arrived.frames).gradients
        ready = devices.Ready.of(found) if self.has_devices else None
        place = 0
        for of in arrived.messages:
            if ready is not None:
                self._ready[of] = ready  # the Sends of one message may run on different streams
            count = local.messages[of].count
            self._decoded[of] = list(found[place : place + count])
            place += count
            if of != message:
                with local.lock:
                    local.undecoded.pop(of, None)
        if place != len(found):
            count = local.messages[message].count
            raise GradientError(
                f"{len(found)} gradients came for message {message}, which carried {count} tensors that require grad"
                if len(arrived.messages) == 1
                else f"{len(found)} gradients came for messages {arrived.messages}, which carried {place} tensors that "
                "require grad"
            )
        return self._decoded[message]

    def post(self, recv: Any, gradients: Sequence[Gradient]) -> None:
        """Sends the gradients of received tensors to their sender, when all those of their message are here; and with
        those of other messages, where one follows the other closely."""
        local = self._local
        if local.interrupted:
            raise InterruptedPassError(f"the pass was ended: {local.interrupted}")
        message = recv.message
        worker = message >> COUNTER_BITS
        if recv.came_from is not None:
            local.device_maps[message] = recv.came_from
        is_whole = len(gradients) == recv.count
        nbytes, at_once = self._poster.weigh(worker, gradients)
        if not is_whole or nbytes >= SHARED_MEMORY_FROM:
            gradients = kept(gradients, self._free)
        if self._begin.wanted is not None:  # a Recv runs for all of its tensors
            wanted = self._begin.wanted
            gradients = [one if id in wanted else None for id, one in zip(recv.ids, gradients, strict=True)]
        with local.lock:
            if not is_whole:
                if self._due is None:
                    self._due = self._count_due()
                found = self._collected.setdefault(message, [None] * recv.count)
                for place, gradient in zip(recv.places, gradients, strict=True):
                    found[place] = gradient
                if self.has_devices:
                    self._events.setdefault(message, []).extend(devices.record(gradients))
                self._due[message] -= 1
                if self._due[message]:
                    return
                gradients = self._collected.pop(message)
            self._unposted -= 1
            # With nothing more to wait for the engine is all but done: the root hears of that in the same message.
            is_last = self._unposted == 0 and not local.missing and worker == self.pass_id >> COUNTER_BITS
        if not is_whole:
            nbytes, at_once = self._poster.weigh(worker, gradients)
        at_once = at_once or self._waits or self._begin.create_graph
        events = self._events.pop(message, ()) if self._events else ()
        self._poster.add(
            local, worker, message, gradients, nbytes=nbytes, at_once=at_once, is_last=is_last, events=events
        )
