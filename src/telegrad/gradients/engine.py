"""The engine: what a worker does for gradients. It plans passes, takes part in those of others, and ends contexts.

    backward(), grad()   plan (planning.py): which Sends of which workers will get gradients; then the pass (rooted.py)
    on_message()         Begin, Gradients, Done, End, Release from others, for their passes (parts.py) or this worker's

`on_message` is called by threads that read: it never blocks and runs no user code. What takes longer it
returns, to be run by somebody who does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import GradientError, NotStartedError, PeerLostError, UnknownContextError
from ..messages import COUNTER_BITS, Begin, Done, End, Envelope, Kind, Member, Release, sender_of
from ..primitives.interrupts import critical, interruptible
from .contexts import Context, Contexts
from .host import Host, Task, disbelieve, tell
from .local_pass import Gradient, Roots
from .participant import Parts
from .plan import Planner, checked_roots, edge_of, no_leaves
from .root import How, RootedPasses


class Engine:
    """Of one worker."""

    host: Host

    def __init__(self, member: Member, contexts: Contexts) -> None:
        self._name = member.name
        self._id = member.id
        self._contexts = contexts
        self.parts = Parts(member, contexts)
        self.rooted = RootedPasses(member, contexts, self.parts)
        self._planner = Planner(member.id, contexts, lambda worker: self.host.name_of(worker))

    def connect(self, host: Host) -> None:
        """Before the first message comes."""
        self.host = self.parts.host = self.rooted.host = host

    # -- what users call -------------------------------------------------------------------------------

    def backward(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        *,
        grad_tensors: Sequence[Gradient] | None,
        retain_graph: bool,
        create_graph: bool,
        into_grad: bool,
        timeout: float | None,
    ) -> None:
        """Runs a backward pass, to its end on every worker. `timeout` None: no limit."""
        with critical():
            context = self._contexts.get(context_id)
            edges, gradients = checked_roots(roots, grad_tensors)
            with context.lock:
                reach, leaves, checkpoints = context.graph.walk_once(edges)
            plan = self._planner.plan(reach, edges)
            start = Roots(no_leaves(roots), gradients, leaves, checkpoints, reach)
            self.rooted.run(context, plan, start, How(retain_graph, create_graph, into_grad, timeout))

    def grad(
        self,
        context_id: int,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        grad_outputs: Sequence[Gradient] | None,
        retain_graph: bool,
        create_graph: bool,
        timeout: float | None,
    ) -> tuple[Gradient, ...]:
        """The gradients of the inputs, which are tensors of this worker. Nothing else is computed or kept."""
        with critical():
            context = self._contexts.get(context_id)
            edges, gradients = checked_roots(outputs, grad_outputs)
            with context.lock:
                reach, _, _ = context.graph.walk_once(edges)
            targets = {edge_of(tensor) for tensor in inputs}
            plan = self._planner.plan_for(context, reach, edges, targets)
            start = Roots(no_leaves(outputs), gradients, inputs=tuple(inputs))
            return self.rooted.run(context, plan, start, How(retain_graph, create_graph, False, timeout)).results

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of this worker's leaves in a context, from all passes that are done."""
        with critical():
            context = self._contexts.get(context_id)
            self.parts.settle(context)
            with context.lock:
                return context.gradients.copy()

    def update_gradient(
        self, context_id: int, leaf: torch.Tensor, callback: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        """Replaces a leaf's gradient by what the callback makes of it; None leaves it as it is."""
        with critical():
            context = self._contexts.get(context_id)
            self.parts.settle(context)
            with context.lock:
                gradient = context.gradients.get(leaf)
            if gradient is None:
                raise GradientError("The grad for the variable should exist in dist_autograd context.")
            changed = interruptible(callback, gradient)  # outside of the lock: it is the user's
            if changed is not None:
                with context.lock:
                    context.gradients.replace(leaf, changed)

    def statistics(self) -> dict[str, int]:
        contexts = self._contexts.all()
        return {
            "contexts": len(contexts),
            "passes": len(self.parts),
            "passes_begun_here": len(self.rooted),
            "sends": sum(len(c.sends) for c in contexts),
            "received": sum(len(c.received) for c in contexts),
            "gradients": sum(len(c.gradients) for c in contexts),
            "log_entries": len(self._contexts.log),
        }

    @property
    def busy(self) -> int:
        """How many passes this worker takes part in now."""
        return len(self.parts)

    # -- messages --------------------------------------------------------------------------------------

    def on_message(self, peer: int, envelope: Envelope, frames: Any) -> Task | None:
        """A message of a pass has come. Called while reading: what takes longer is returned."""
        if envelope.kind == Kind.GRADIENTS:
            task = self.parts.on_gradients(peer, envelope, frames)
            if envelope.autograd is not None and envelope.autograd.done:
                self.rooted.on_done(peer, envelope.autograd.during, None)
            return task
        match self.host.open_control(envelope, frames):
            case Begin() as begin:
                if begin.pass_id >> COUNTER_BITS == peer:
                    return self.parts.on_begin(begin, envelope.depth)
                self._disbelieve(peer, f"the begin of pass {begin.pass_id}, whose root it is not")
            case Done(pass_id, failure):
                return self.rooted.on_done(peer, pass_id, failure)
            case End(pass_id, aborted):
                if pass_id >> COUNTER_BITS == peer:
                    return self.parts.on_end(pass_id, aborted)
                self._disbelieve(peer, f"the end of pass {pass_id}, whose root it is not")
            case Release(context_id):
                return partial(self._on_release, context_id, peer)
        return None

    # -- ends ------------------------------------------------------------------------------------------

    def release(self, context_id: int, *, told_by: int | None = None, tell: bool = True) -> set[int]:
        """Ends a context here, and tells the workers that it was sent to. Returns them: without `tell`, they are
        left to the caller."""
        context = self._contexts.take_out(context_id)
        if context is None:
            return set()
        others = context.known_workers - {told_by, self._id, context.owner}
        for worker in others if tell else ():
            self.tell_released(worker, context_id)
        self._end_passes_of(context)
        return others

    def tell_released(self, worker: int, context_id: int) -> None:
        """Tells a worker that a context has ended."""
        if worker != self._id:
            tell(self.host, worker, Kind.RELEASE, Release(context_id))

    def _on_release(self, context_id: int, told_by: int) -> None:
        """A worker tells of the end of a context: its owner, or one that has told of the context itself. From any other
        it is not believed: a context that is not known here must not be buried before its first message comes."""
        context = self._contexts.find(context_id)
        if told_by == sender_of(context_id) or (context is not None and told_by in context.heard_from):
            self.release(context_id, told_by=told_by)
        elif context is not None:
            self._disbelieve(told_by, f"the end of context {context_id}, which it has no part in")

    def _disbelieve(self, peer: int, what: str) -> None:
        disbelieve(self._name, self.host.name_of(peer), peer, what)

    def _end_passes_of(self, context: Context) -> None:
        ended = UnknownContextError(f"context {context.id} ended while its backward pass ran")
        for local in self.parts.of_context(context.id):
            if not self.rooted.fail(local.pass_id, ended):
                self.parts.end(local, str(ended))

    def on_lost(self, peer: int, name: str, reason: str) -> None:
        """A worker is gone: passes that need it fail, its own passes and contexts end."""
        lost = PeerLostError(f"worker {name!r} is gone: {reason}")
        lost.worker_id = peer
        self.rooted.on_lost(peer, lost)
        self.parts.on_lost(peer, name, lost)
        for context in self._contexts.of_owner(peer):
            self.release(context.id, told_by=peer)

    def tick(self) -> None:
        """Now and then."""
        self.parts.end_early_ones()

    def close(self) -> None:
        """This worker shuts down: everything ends."""
        self.parts.close()
        ended = NotStartedError(f"worker {self._name!r} was shut down during a backward pass")
        self.rooted.fail_all(ended)
        for local in self.parts.all():
            self.parts.end(local, str(ended))
        for context in self._contexts.all():
            self._contexts.take_out(context.id)
