"""Planning a pass: what the roots lead to, and which Sends of which workers will get gradients.

roots  -> their edges and gradients (checked_roots)
edges  -> the Recvs that they lead to (local_graph.py) -> the closure over dependency_log.py -> a Plan
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch.autograd.graph import GradientEdge

from ..errors import GradientError, UnknownContextError
from ..messages import COUNTER_BITS, LogEntry, sender_of
from ..primitives import clock, current
from .contexts import Context, Contexts
from .dependency_log import MissingEntryError, flatten_groups, useful
from .host import Host
from .local_graph import Edge, Node, find_received, leads_to
from .pasts import Member, Past, ids_of
from .plain import entries_of

_ASKING = 60.0  # seconds in which others tell what this worker does not know, at most

Limits = Sequence[float | None]  # of time, in seconds; None: no limit


class Plan(msgspec.Struct, frozen=True):
    """The participants of a pass."""

    sends: dict[int, tuple[int, ...]]  # by worker: the tensors that it has sent and that will get gradients
    # Workers that get gradients from others than the root, too, and perhaps before the root's own reach them: they must
    # hear of the pass at once. The others hear of it with the root's first gradients.
    apart: frozenset[int] = frozenset()
    wanted: dict[int, tuple[int, ...]] | None = None  # by worker, for grad(): the received tensors that matter


class Planner:
    def __init__(self, worker_id: int, contexts: Contexts, host: Host) -> None:
        self._id = worker_id
        self._contexts = contexts
        self._host = host

    def plan(self, context: Context, received: Iterable[Member], edges: Sequence[Edge], limits: Limits = ()) -> Plan:
        """Plans a pass over everything that the edges lead to, through these received tensors. Others are asked for as
        many seconds as the shortest of the limits has."""
        if not received:
            return _NO_ONE
        sends: dict[int, Any] = {}
        apart: set[int] = set()
        own, here = self._id, context.received
        for id in self._closure(context, received, edges, limits):
            if id > 0:  # else it is a group
                worker = id >> COUNTER_BITS
                if worker in sends:
                    sends[worker].append(id)
                else:
                    sends[worker] = [id]
                if id not in here and worker != own:
                    apart.add(worker)
        for worker, ids in sends.items():
            sends[worker] = tuple(sorted(ids))
        return Plan(sends, frozenset(apart))

    def check_own(self, past: Past) -> None:
        """
        Raises:
            GradientError: another worker of this process has received it, and sends its gradients itself.
        """
        received, waiting, seen = self._contexts.plain.received, [past], {past.id}
        for past in waiting:
            if past.id < 0:
                for other in past.depends_on:
                    if type(other) is Past and other.id not in seen:
                        seen.add(other.id)
                        waiting.append(other)
            elif (node := past.recv()) is None or received.get(past.id) is not node:
                name = self._host.name_of(self._id)
                raise GradientError(
                    f"the roots depend on tensors received by worker {name!r} and by another worker of this "
                    "process, or one that has shut down: their gradients cannot be sent back in one pass. Send what "
                    f"one of them has received to {name!r} by a call, or detach() it"
                )

    def plan_for(
        self,
        context: Context,
        received: Iterable[Member],
        edges: Sequence[Edge],
        targets: set[Edge],
        limits: Limits = (),
    ) -> Plan:
        """Plans a pass over what leads from the edges to the targets, which are this worker's."""
        entries = self._closure(context, received, edges, limits)
        known: dict[Node, bool] = {}

        def is_source(id: int) -> bool:
            if id >> COUNTER_BITS != self._id:
                return False
            edge = (context.sends.get(id) or self._contexts.find_sent(id)).edge
            return edge in targets or leads_to(edge[0], targets, known)

        reached = {id for id in useful(entries, is_source) if id > 0}
        wanted: dict[int, set[int]] = {self._id: flatten_groups(ids_of(received), entries) & reached}
        for id in reached:
            wanted.setdefault(id >> COUNTER_BITS, set()).update(
                flatten_groups(entries[id].depends_on, entries) & reached
            )
        sends: dict[int, list[int]] = {}
        for id in sorted(reached):
            sends.setdefault(id >> COUNTER_BITS, []).append(id)
        return Plan(
            {worker: tuple(ids) for worker, ids in sends.items()},
            frozenset(sends) - {self._id},
            {worker: tuple(sorted(ids)) for worker, ids in wanted.items()},
        )

    def _closure(
        self, context: Context, received: Iterable[Member], edges: Sequence[Edge], limits: Limits
    ) -> dict[int, LogEntry]:
        try:
            if context.id and Past not in map(type, received):
                return self._contexts.log.closure(received)  # type: ignore[arg-type]
        except MissingEntryError:
            pass  # it has ended; or something upstream was sent outside of contexts, and is not known here
        try:
            seconds = _ASKING
            for limit in limits:
                if limit is not None and limit < seconds:
                    seconds = limit
            found = self._ask_for_closure(received, seconds)
            own, here = self._id, self._contexts.plain.sends
            for id in found:  # those of others they say themselves
                if id >> COUNTER_BITS == own and id not in here and self._contexts.find_sent_anywhere(id) is None:
                    if not context.id:
                        raise self._dropped(id, found)
                    raise MissingEntryError(id)
            for entry in found.values() if not context.id else ():
                if entry.context:
                    raise GradientError(
                        f"the roots depend on a tensor received from another worker in context {entry.context}, whose "
                        "gradients are kept apart from `.grad`. Use telegrad.autograd.backward(context_id, [loss]) "
                        "instead of loss.backward(), before the context ends; or detach() what was received in it"
                    )
            return found
        except MissingEntryError as missing:
            node = find_received(edges, missing.id)
            sender = self._host.name_of(sender_of(abs(missing.id)))
            if not context.id and (node is None or not node.context):
                raise GradientError(
                    f"the roots depend on a tensor that worker {sender!r} has sent. It is gone, or does not answer, or "
                    "has dropped the graph behind that tensor since the tensor's receiver is gone. Run the forward "
                    "pass again"
                ) from None
            of = f"context {node.context}" if node is not None else "the context of a tensor"
            raise UnknownContextError(
                f"the roots depend on tensors received from worker {sender!r} in {of}, which has ended. Run backward() "
                "before it ends, or detach() what is kept from it"
            ) from None

    def _dropped(self, id: int, found: dict[int, LogEntry]) -> GradientError:
        """Makes the error for a tensor of this worker's whose Send is no more: its receiver is lost. That is the worker
        which has sent what depends on it."""
        receivers = {sender_of(abs(entry.id)) for entry in found.values() if id in entry.depends_on}
        names = " or ".join(repr(self._host.name_of(worker)) for worker in sorted(receivers)) or "another worker"
        return GradientError(
            f"the roots depend on a tensor that this worker, {self._host.name_of(self._id)!r}, has sent to worker "
            f"{names}. That worker is gone, and with it its part of the graph. Run the forward pass again"
        )

    def _ask_for_closure(self, starts: Iterable[Member], seconds: float) -> dict[int, LogEntry]:
        """Returns all that is upstream of these, them included, by id. What is not known here the workers are asked for
        that have made it: see pasts.py.

        Raises:
            MissingEntryError: for one that is known nowhere, or was not told in time.
        """
        deadline = clock.now() + seconds
        found: dict[int, LogEntry] = {}
        told: dict[int, tuple[Sequence[Member], int]] = {}
        waiting = list(starts)
        while True:
            unknown: set[int] = set()
            while waiting:
                member = waiting.pop()
                known: tuple[Sequence[Member], int] | None
                if type(member) is int:
                    id, known = member, told.get(member) or self._contexts.look_up(member)
                else:
                    id, known = member.id, (member.depends_on, 0)  # type: ignore[union-attr]
                if known is None:
                    unknown.add(id)
                elif id not in found:
                    behind, in_context = known
                    found[id] = LogEntry(id, in_context, ids_of(behind) if behind else ())
                    waiting += behind
            unknown -= found.keys()
            if not unknown:
                return found
            owners = {sender_of(abs(id)) for id in unknown} - {self._id}
            left = deadline - clock.now()
            answers, _ = self._host.ask(owners, entries_here, (tuple(unknown),), left) if left > 0 else ({}, {})
            for answer in answers.values():
                told.update((entry.id, (entry.depends_on, entry.context)) for entry in answer)
            for id in unknown:
                if id not in told:
                    raise MissingEntryError(id)
            waiting = list(unknown)


def entries_here(ids: Sequence[int]) -> list[LogEntry]:
    """Returns, for the root of a pass, what this worker knows of these and all that is upstream of them."""
    return entries_of(ids, current.current_worker().contexts.look_up)


_NO_ONE = Plan({})


def edge_of(tensor: torch.Tensor | GradientEdge) -> Edge:
    """Returns where the gradient of a tensor goes."""
    if isinstance(tensor, GradientEdge):
        return tensor.node, tensor.output_nr
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def checked_roots(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
) -> tuple[list[Edge], Sequence[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Returns the edges of the roots; what the engine is to start from; and the gradients: ones, unless others are
    given. In front of a root that is a leaf comes a node: a leaf's own would run before the Beacon, so before it is
    known which pass the engine call belongs to.

    Raises:
        GradientError: in this order: none given, no grad required, no scalar, no gradient function, gradients that
            don't fit.
    """
    if not roots:
        raise GradientError("No tensors provided for gradient computation.")
    if gradients is not None and len(gradients) != len(roots):
        raise GradientError(f"{len(gradients)} gradients were given for {len(roots)} roots")
    found = []
    for place, root in enumerate(roots):
        if not root.requires_grad:
            raise GradientError(f"requires_grad not set on root (root {place})")
        given = None if gradients is None else gradients[place]
        if given is None and root.numel() != 1:
            raise GradientError(
                f"root {place} is not a scalar, all roots need to be scalar (its shape is {tuple(root.shape)}); "
                "give its gradient in grad_tensors"
            )
        if given is not None and given.shape != root.shape:
            raise GradientError(
                f"the gradient of root {place} has shape {tuple(given.shape)}, the root has {tuple(root.shape)}"
            )
        found.append(torch.ones_like(root, requires_grad=False) if given is None else given)
    edges, starts = [], list(roots)
    for place, root in enumerate(roots):
        node = root.grad_fn
        if node is not None:
            edges.append((node, root.output_nr))
            continue
        try:
            edges.append(edge_of(root))
        except RuntimeError as error:
            raise GradientError(f"root {place} does not have a valid gradient function.") from error
        with torch.enable_grad():
            starts[place] = root.view_as(root)
    return edges, starts, tuple(found)
