"""Gathers the distributed graph of a context from all workers that have a part of it.

Only plain data travels (gradients/snapshot.py). A worker that is gone or does not answer is shown as such, and what
its peers know of it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ..errors import CallTimeoutError, PeerLostError, UnknownWorkerError, text_of
from ..gradients.diagnosis import PartState, holding_up
from ..gradients.snapshot import Edge, Node, Part, Recv, Root, Send, take
from ..primitives import clock
from ..primitives.current import current_worker
from ..runtime.broadcast import ask
from ..worker import Worker
from .graph import Graph, WorkerPart


def part_here(
    context_id: int, also: Sequence[int], with_passes: bool, roots: Sequence[torch.Tensor] = ()
) -> Part | None:
    """Returns this worker's part; None if it has none. Runs on each worker, called by the one that gathers. `also` are
    tensors that it has sent in other contexts; `with_passes`: with the roots of passes that were begun here and run."""
    worker = current_worker()
    context = worker.contexts.find(context_id)
    running = worker.engine.parts.roots_of(context_id) if with_passes else []
    others = [other for other in worker.contexts.all() if other is not context] if also else []
    part = take(worker.id, context, others, also, [*roots, *running])
    part.passes = tuple(worker.engine.parts.states_of(context_id))
    return part if context is not None or part.nodes else None


def gather(worker: Worker, context_id: int, roots: Sequence[torch.Tensor], seconds: float) -> Graph:
    """Asks the workers that the context knows, and those that they know, for so many seconds at most.

    Raises:
        UnknownContextError: this worker does not know the context.
    """
    found = _Gathering(worker, context_id, roots, seconds)
    found.ask_all({worker.contexts.get(context_id).owner})
    active = _planned(found.parts) if not roots else _logged(worker, found.parts[worker.id])
    return _assemble(worker, context_id, found, active)


class _Gathering:
    """Asks workers for their parts, in waves: each part may name further workers, and further tensors of others."""

    def __init__(self, worker: Worker, context_id: int, roots: Sequence[torch.Tensor], seconds: float) -> None:
        self._worker = worker
        self._context_id = context_id
        self._roots = roots
        self._deadline = clock.now() + seconds
        self.order: dict[int, None] = {worker.id: None}  # the workers that were asked, the nearest first
        self.parts: dict[int, Part] = {}
        self.silent: dict[int, WorkerPart] = {}  # the workers that gave no part
        self._also: dict[int, set[int]] = {}  # by worker: tensors of other contexts that were asked for

    def ask_all(self, first: set[int]) -> None:
        self._ask_one(self._worker.id)
        while True:
            unasked = (first | self._named()) - self.parts.keys() - self.silent.keys()
            again = self._find_others_tensors()
            if not unasked and not again:
                return
            self._ask(unasked)
            for worker in again:
                self._ask_one(worker)

    def _named(self) -> set[int]:
        named = {id for part in self.parts.values() for id in part.known_workers}
        nodes = (node for part in self.parts.values() for node in part.nodes)
        return named | {node.peer_id for node in nodes if isinstance(node, Send | Recv)}

    def _ask_one(self, id: int) -> None:
        also = sorted(self._also.get(id, ()))
        if id != self._worker.id:
            self._ask({id}, also)
            return
        part = part_here(self._context_id, also, with_passes=not self._roots, roots=self._roots)
        self.parts[id] = part if part is not None else Part(id)  # None: the context was released in this very moment

    def _ask(self, workers: Iterable[int], also: Sequence[int] = ()) -> None:
        left = self._deadline - clock.now()
        others = sorted(workers, key=self._worker.name_of)
        self.order.update(dict.fromkeys(others))
        if left <= 0:
            for id in others:
                self._note_silent(id, "no answer", "there was no time left to ask it")
            return
        args = (self._context_id, tuple(also), not self._roots)
        answers, errors = ask(self._worker, others, part_here, args, left)
        for id, part in answers.items():
            if part is not None:
                self.parts[id] = part
                self.silent.pop(id, None)
            else:
                self._note_silent(id, "no part", "it has nothing of this context")
        for id, error in errors.items():
            is_gone = isinstance(error, PeerLostError | UnknownWorkerError)
            reason = "it did not answer in time" if isinstance(error, CallTimeoutError) else text_of(error)
            self._note_silent(id, "gone" if is_gone else "no answer", reason)

    def _note_silent(self, id: int, status: str, reason: str) -> None:
        if id not in self.parts:  # else its first answer stands
            self.silent[id] = WorkerPart(self._worker.name_of(id), id, status, reason)

    def _find_others_tensors(self) -> set[int]:
        """Notes the received tensors whose Send belongs to another context, so that its worker did not tell of it.
        Returns the workers to ask again."""
        told = {n.id for part in self.parts.values() for n in part.nodes if isinstance(n, Send)}
        answering = {*self.parts, *(id for id, worker in self.silent.items() if worker.status == "no part")}
        workers = set()
        for node in [node for part in self.parts.values() for node in part.nodes]:
            if isinstance(node, Recv) and node.id not in told and node.peer_id in answering:
                asked = self._also.setdefault(node.peer_id, set())
                if node.id not in asked:
                    asked.add(node.id)
                    workers.add(node.peer_id)
        return workers


def _planned(parts: dict[int, Part]) -> set[int]:
    """The tensors that passes bring gradients to."""
    return {id for part in parts.values() for state in part.passes for id in state.sends}


def _logged(worker: Worker, own: Part) -> set[int]:
    """The tensors that the roots lead to by the log, which also knows of workers that are gone."""
    roots = [place for place, node in enumerate(own.nodes) if isinstance(node, Root)]
    nodes = [own.nodes[place] for place in _reached(roots, own.edges)]
    log = worker.contexts.log
    return set(log.closure([node.id for node in nodes if isinstance(node, Recv) and node.id in log]))


def _reached(starts: Iterable[int], edges: Iterable[Edge]) -> set[int]:
    """The places that lead to one of the starts."""
    tails: dict[int, list[int]] = {}
    for edge in edges:
        tails.setdefault(edge.head, []).append(edge.tail)
    reached = set(starts)
    waiting = list(reached)
    while waiting:
        new = [tail for tail in tails.get(waiting.pop(), ()) if tail not in reached]
        reached.update(new)
        waiting += new
    return reached


# -- the parts put together: one list of nodes, Sends joined with their Recvs, names, and what is active ------


def _assemble(worker: Worker, context_id: int, found: _Gathering, active_sends: set[int]) -> Graph:
    name_of = cache(worker.name_of)
    workers = tuple(found.silent.get(id) or WorkerPart(name_of(id), id, "here") for id in found.order)
    parts = [found.parts[id] for id in found.order if id in found.parts]
    passes = tuple(state for part in found.parts.values() for state in part.passes)
    nodes: list[Node] = []
    edges: list[Edge] = []
    for part in parts:
        edges += [Edge(len(nodes) + edge.tail, len(nodes) + edge.head) for edge in part.edges]
        nodes += part.nodes
    _join(nodes, edges)
    active = _find_active(nodes, edges, active_sends)
    awaited = _find_awaited(nodes, passes, {part.id for part in workers if part.status == "gone"})
    for place, node in enumerate(nodes):
        changes: dict[str, Any] = {"worker": name_of(node.worker_id), "active": active and place in active}
        if isinstance(node, Send | Recv):
            changes["peer"] = name_of(node.peer_id)
        if isinstance(node, Send):
            changes["awaited"] = node.id in awaited
        nodes[place] = replace(node, **changes)
    return Graph(context_id, workers, tuple(nodes), tuple(edges), passes)


def _join(nodes: list[Node], edges: list[Edge]) -> None:
    """Joins each Send with its Recv. An end that was not told of is inferred from the other."""
    sends = {node.id: place for place, node in enumerate(nodes) if isinstance(node, Send)}
    recvs = {node.id: place for place, node in enumerate(nodes) if isinstance(node, Recv)}

    def infer(kind: type[Send] | type[Recv], other: Any) -> int:
        same = {name: getattr(other, name) for name in ("shape", "dtype", "nbytes", "id", "message", "place", "count")}
        ends = {"worker_id": other.peer_id, "peer_id": other.worker_id, "is_inferred": True}
        nodes.append(kind(name=kind.__name__, **same, **ends))
        return len(nodes) - 1

    for id in {**sends, **recvs}:
        if id not in recvs:
            recvs[id] = infer(Recv, nodes[sends[id]])
        elif id not in sends:
            sends[id] = infer(Send, nodes[recvs[id]])
        edges.append(Edge(sends[id], recvs[id]))


def _find_active(nodes: list[Node], edges: list[Edge], sends: set[int]) -> set[int] | None:
    """The places that roots lead to; None if there are no roots."""
    starts = {p for p, n in enumerate(nodes) if isinstance(n, Root) or (isinstance(n, Send) and n.id in sends)}
    if not starts:
        return None
    active = _reached(starts, edges)
    # The root's own part is not there for a pass that has ended. What came to it is used.
    sent = {n.id for place in active if isinstance(n := nodes[place], Send)}
    return active | {p for p, n in enumerate(nodes) if isinstance(n, Recv) and n.id in sent}


def _find_awaited(nodes: list[Node], passes: Iterable[PartState], gone: set[int]) -> set[int]:
    """The ids of the tensors that hold passes up."""
    messages = {(state.worker, a.message) for state in passes for a in holding_up(state, gone)}
    planned = {id for state in passes for id in state.sends}
    sends = [node for node in nodes if isinstance(node, Send) and node.id in planned]
    return {send.id for send in sends if (send.worker_id, send.message) in messages}
