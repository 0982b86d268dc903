"""Gathers the distributed graph of a context from all workers that have a part of it.

    gather(worker, context_id, roots)  -> Graph: asks the workers that the context knows, and those that they know

Only plain data travels (gradients/snapshot.py). A worker that is gone or does not answer is shown as such, and what
its peers know of it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import CallTimeoutError, PeerLostError, UnknownWorkerError, text_of
from ..gradients.diagnosis import holding_up
from ..gradients.snapshot import Edge, Node, Part, Recv, Root, Send, take
from ..primitives import clock
from ..primitives.current import current_worker
from ..runtime.broadcast import ask
from ..worker import Worker
from .graph import Graph, WorkerPart


def part_here(
    context_id: int, also: Sequence[int], with_passes: bool, roots: Sequence[torch.Tensor] = ()
) -> Part | None:
    """This worker's part; None if it has none. Called by whoever gathers. `also` are tensors that it has sent in other
    contexts; `with_passes`: with the roots of passes that were begun here and run."""
    worker = current_worker()
    context = worker.contexts.find(context_id)
    running = worker.engine.parts.roots_of(context_id) if with_passes else []
    others = [other for other in worker.contexts.all() if other is not context] if also else []
    part = take(worker.id, context, others, also, [*roots, *running])
    part.passes = tuple(worker.engine.parts.states_of(context_id))
    return part if context is not None or part.nodes else None


def gather(worker: Worker, context_id: int, roots: Sequence[torch.Tensor], seconds: float) -> Graph:
    """
    Raises:
        UnknownContextError: this worker does not know the context.
    """
    context = worker.contexts.get(context_id)
    found = _Gathering(worker, context_id, roots, seconds)
    found.ask_all({context.owner})
    active = _planned(found.parts) if not roots else _logged(worker, found.parts[worker.id])
    return _Assembly(worker, context_id, found, active).graph()


class _Gathering:
    """Asks workers for their parts, in waves: each part may name further workers, and further tensors of others."""

    def __init__(self, worker: Worker, context_id: int, roots: Sequence[torch.Tensor], seconds: float) -> None:
        self._worker = worker
        self._context_id = context_id
        self._roots = roots
        self._deadline = clock.now() + seconds
        self.order: dict[int, None] = {worker.id: None}  # who was asked, the nearest first
        self.parts: dict[int, Part] = {}
        self.silent: dict[int, WorkerPart] = {}  # those that gave no part
        self._also: dict[int, set[int]] = {}  # by worker: tensors of other contexts that were asked for

    def ask_all(self, first: set[int]) -> None:
        self._take_own()
        while True:
            unasked = (first | self._named()) - self.parts.keys() - self.silent.keys()
            again = self._find_others_tensors()
            if not unasked and not again:
                return
            self._ask(unasked)
            for worker in again:
                self._ask_again(worker)

    def _take_own(self) -> None:
        also = sorted(self._also.get(self._worker.id, ()))
        part = part_here(self._context_id, also, with_passes=not self._roots, roots=self._roots)
        # Released in this very moment: what is left of it is nothing.
        self.parts[self._worker.id] = part if part is not None else Part(self._worker.id)

    def _named(self) -> set[int]:
        named = {id for part in self.parts.values() for id in part.known_workers}
        return named | {
            node.peer_id for part in self.parts.values() for node in part.nodes if isinstance(node, Send | Recv)
        }

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
            late = isinstance(error, CallTimeoutError)
            reason = "it did not answer in time" if late else text_of(error)
            self._note_silent(id, "gone" if is_gone else "no answer", reason)

    def _note_silent(self, id: int, status: str, reason: str) -> None:
        if id not in self.parts:  # else its first answer stands
            self.silent[id] = WorkerPart(self._worker.name_of(id), id, status, reason)

    def _find_others_tensors(self) -> set[int]:
        """Received tensors whose Send was not told of, since it belongs to another context; the workers to ask."""
        told = {n.id for part in self.parts.values() for n in part.nodes if isinstance(n, Send)}
        answering = {*self.parts, *(id for id, worker in self.silent.items() if worker.status == "no part")}
        workers = set()
        for part in list(self.parts.values()):
            for node in part.nodes:
                if isinstance(node, Recv) and node.id not in told and node.peer_id in answering:
                    asked = self._also.setdefault(node.peer_id, set())
                    if node.id not in asked:
                        asked.add(node.id)
                        workers.add(node.peer_id)
        return workers

    def _ask_again(self, worker: int) -> None:
        if worker == self._worker.id:
            self._take_own()
        else:
            self._ask({worker}, sorted(self._also[worker]))


def _planned(parts: dict[int, Part]) -> set[int]:
    """The tensors that passes bring gradients to."""
    return {id for part in parts.values() for state in part.passes for id in state.sends}


def _logged(worker: Worker, own: Part) -> set[int]:
    """The tensors that the roots lead to by what the log says: it also knows what is on workers that are gone."""
    roots = [place for place, node in enumerate(own.nodes) if isinstance(node, Root)]
    nodes = [own.nodes[place] for place in _reached(roots, own.edges)]
    received = [node.id for node in nodes if isinstance(node, Recv)]
    log = worker.contexts.log
    return set(log.closure([id for id in received if id in log]))


def _reached(starts: Iterable[int], edges: Iterable[Edge]) -> set[int]:
    """The places that lead to one of the starts."""
    tails: dict[int, list[int]] = {}
    for edge in edges:
        tails.setdefault(edge.head, []).append(edge.tail)
    reached = set(starts)
    waiting = list(reached)
    while waiting:
        for tail in tails.get(waiting.pop(), ()):
            if tail not in reached:
                reached.add(tail)
                waiting.append(tail)
    return reached


class _Assembly:
    """Puts the parts together: one list of nodes, Sends joined with their Recvs, names, and what is active."""

    def __init__(self, worker: Worker, context_id: int, found: _Gathering, active: set[int]) -> None:
        self._worker = worker
        self._context_id = context_id
        self._active = active
        self._nodes: list[Node] = []
        self._edges: list[Edge] = []
        self._passes = [state for part in found.parts.values() for state in part.passes]
        self._parts = found.parts
        self._workers = [found.silent.get(id) or WorkerPart(worker.name_of(id), id, "here") for id in found.order]
        self._names = {part.id: part.name for part in self._workers}

    def graph(self) -> Graph:
        for part in self._workers:
            if part.id in self._parts:
                self._add(self._parts[part.id])
        self._join()
        active = self._find_active()
        awaited = self._find_awaited()
        nodes = tuple(
            self._finished(node, None if active is None else place in active, awaited)
            for place, node in enumerate(self._nodes)
        )
        return Graph(self._context_id, tuple(self._workers), nodes, tuple(self._edges), tuple(self._passes))

    def _add(self, part: Part) -> None:
        first = len(self._nodes)
        self._nodes += part.nodes
        self._edges += [Edge(first + edge.tail, first + edge.head) for edge in part.edges]

    def _join(self) -> None:
        """Each Send with its Recv. Where one of them was not told of, there is something in its place."""
        sends = {n.id: place for place, n in enumerate(self._nodes) if isinstance(n, Send)}
        recvs = {n.id: place for place, n in enumerate(self._nodes) if isinstance(n, Recv)}
        for id in {**sends, **recvs}:
            if id not in recvs:
                recvs[id] = self._infer(Recv, self._nodes[sends[id]])
            elif id not in sends:
                sends[id] = self._infer(Send, self._nodes[recvs[id]])
            self._edges.append(Edge(sends[id], recvs[id]))

    def _infer(self, kind: type[Send] | type[Recv], other: Any) -> int:
        node = kind(
            worker_id=other.peer_id,
            name=kind.__name__,
            shape=other.shape,
            dtype=other.dtype,
            nbytes=other.nbytes,
            id=other.id,
            message=other.message,
            place=other.place,
            count=other.count,
            peer_id=other.worker_id,
            is_inferred=True,
        )
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _find_active(self) -> set[int] | None:
        """The places that roots lead to; None if there are none."""
        starts = [
            place
            for place, node in enumerate(self._nodes)
            if isinstance(node, Root) or (isinstance(node, Send) and node.id in self._active)
        ]
        if not starts:
            return None
        active = _reached(starts, self._edges)
        # The root's own part is not there for a pass that has ended. What came to it is used.
        sent = {n.id for place in active if isinstance(n := self._nodes[place], Send)}
        return active | {p for p, n in enumerate(self._nodes) if isinstance(n, Recv) and n.id in sent}

    def _find_awaited(self) -> set[int]:
        """Ids of tensors."""
        gone = {part.id for part in self._workers if part.status == "gone"}
        messages = {(state.worker, a.message) for state in self._passes for a in holding_up(state, gone)}
        planned = {id for state in self._passes for id in state.sends}
        return {
            node.id
            for node in self._nodes
            if isinstance(node, Send) and (node.worker_id, node.message) in messages and node.id in planned
        }

    def _finished(self, node: Node, active: bool | None, awaited: set[int]) -> Node:
        changes: dict[str, Any] = {"worker": self._name_of(node.worker_id), "active": active}
        if isinstance(node, Send | Recv):
            changes["peer"] = self._name_of(node.peer_id)
        if isinstance(node, Send):
            changes["awaited"] = node.id in awaited
        return replace(node, **changes)

    def _name_of(self, id: int) -> str:
        name = self._names.get(id)
        if name is None:
            name = self._names[id] = self._worker.name_of(id)
        return name
