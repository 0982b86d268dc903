"""One worker's part of a context's graph, as plain data: what a picture is made of.

    take(context, roots)  -> Part: nodes and edges, in the order of the computation

A Part holds numbers and names only. It travels, and it keeps no node, tensor or context alive. Taking it changes
nothing, so it can be taken at any time, also while a pass runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..messages import COUNTER_BITS, sender_of
from .contexts import Context, Sent
from .diagnosis import PartState
from .local_graph import Edge as TorchEdge
from .local_graph import Graph
from .nodes import AccumulateGrad, RecvNode


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the graph; of one of the kinds below."""

    worker: str = ""  # its name
    worker_id: int = -1
    name: str = ""
    shape: tuple[int, ...] | None = None  # of the tensor that it gives; None where torch does not say
    dtype: str = ""
    nbytes: int = 0
    active: bool | None = None  # whether the roots lead to it; None: there are no roots


@dataclass(frozen=True, kw_only=True)
class Operation(Node):
    """A node of torch's, by torch's name: MulBackward0, say."""


@dataclass(frozen=True, kw_only=True)
class Leaf(Node):
    """A tensor that gradients are gathered for."""


@dataclass(frozen=True, kw_only=True)
class Root(Node):
    """A tensor that a backward pass starts from: a loss."""


@dataclass(frozen=True, kw_only=True)
class _End(Node):
    id: int = 0  # of the tensor, the same at both ends
    message: int = 0
    place: int = 0  # among the tensors of the message that require grad
    count: int = 1  # of these
    peer: str = ""  # the worker at the other end
    peer_id: int = -1
    is_inferred: bool = False  # its worker has not told of it; the other end shows that it must be there

    @property
    def label(self) -> str:
        """The message in short, as its sender counts: m5; m5.1 for the second of its tensors."""
        number = self.message & ((1 << COUNTER_BITS) - 1)
        return f"m{number}" if self.count == 1 else f"m{number}.{self.place}"


@dataclass(frozen=True, kw_only=True)
class Send(_End):
    """The sender's end of a tensor."""

    awaited: bool = False  # a pass cannot go on before its gradient comes, or could not and failed


@dataclass(frozen=True, kw_only=True)
class Recv(_End):
    """The receiver's end of a tensor."""

    context: int = 0  # in which it came


@dataclass(frozen=True)
class Edge:
    """From a node to one that uses what it gives: gradients go the other way. Both are places in a list of nodes."""

    tail: int
    head: int


@dataclass
class Part:
    """One worker's part of a graph."""

    worker_id: int
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    known_workers: tuple[int, ...] = ()
    passes: tuple[PartState, ...] = ()

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


def take(
    worker_id: int,
    context: Context | None,
    others: Sequence[Context] = (),
    also: Iterable[int] = (),
    roots: Sequence[torch.Tensor] = (),
) -> Part:
    """Takes this worker's part of a context's graph: what its Sends, its Recvs and the roots lead to. `also` are
    tensors that this worker has sent in other contexts, and that the graph goes on from."""
    sends: list[Sent] = []
    part = Part(worker_id)
    starts: list[TorchEdge] = []
    recvs: list[Any] = []
    if context is not None:
        sends += list(context.sends.values())
        recvs = list(context.received.values())
        part.known_workers = tuple(context.known_workers)
    sends += [sent for id in also for other in others if (sent := other.sends.get(id)) is not None]
    starts += [sent.edge for sent in sends if not sent.is_leaf]
    starts += [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
    graph = Graph(lambda members: -1)  # a walk of its own: the context's is left alone
    try:
        graph.walk(starts)
        _add_nodes(part, graph, sends, recvs, roots)
    finally:
        starts.clear()
        recvs.clear()
        graph.clear()
    return part


def _add_nodes(part: Part, graph: Graph, sends: list[Sent], recvs: list[Any], roots: Sequence[torch.Tensor]) -> None:
    worker_id = part.worker_id
    # By the ids of Python's objects, which are kept alive meanwhile: nodes by the walk, leaves and Recvs by the lists.
    places: dict[int, int] = {}
    leaves: list[torch.Tensor] = []
    received: dict[int, int] = {}  # by the id of the tensor

    def place_of(leaf: torch.Tensor) -> int:
        place = places.get(id(leaf))
        if place is None:
            name = type(leaf).__name__ if type(leaf) is not torch.Tensor else "leaf"
            place = places[id(leaf)] = part.add(Leaf(worker_id=worker_id, name=name, **_described(leaf)))
            leaves.append(leaf)
        return place

    def place_behind(node: Any, number: int) -> int:
        if type(node) is not RecvNode:
            return places[id(node)]
        if (place := received.get(node.ids[number])) is None:
            ends: dict[str, Any] = {
                "id": node.ids[number],
                "message": node.message,
                "place": node.places[number],
                "count": node.count,
            }
            about = _given_by(node, number) | {"peer_id": sender_of(node.message), "context": node.context}
            place = received[node.ids[number]] = part.add(Recv(worker_id=worker_id, name="Recv", **ends, **about))
        return place

    for recv in {id(recv): recv for recv in recvs}.values():
        for number in range(len(recv.ids)):
            place_behind(recv, number)
    for node in graph.known:  # what a node leads to comes before it
        kind = type(node)
        if kind is AccumulateGrad:
            places[id(node)] = place_of(node.variable)
        elif node is not None:
            name = node.name().rpartition("::")[2]
            nexts = [place_behind(*edge) for edge in node.next_functions if edge[0] is not None]
            place = places[id(node)] = part.add(Operation(worker_id=worker_id, name=name, **_given_by(node)))
            part.edges += [Edge(next, place) for next in nexts]
    for sent in sends:
        tail = place_of(sent.leaf) if sent.leaf is not None else place_behind(*sent.edge)
        about: dict[str, Any] = {
            "id": sent.id,
            "message": sent.message,
            "place": sent.place,
            "count": sent.count,
            "peer_id": sent.to,
        }
        part.edges.append(Edge(tail, part.add(Send(worker_id=worker_id, name="Send", **about, **_described(sent)))))
    for number, root in enumerate(roots):
        tail = place_of(root) if root.grad_fn is None else place_behind(root.grad_fn, root.output_nr)
        added = part.add(Root(worker_id=worker_id, name=f"root {number}", **_described(root)))
        part.edges.append(Edge(tail, added))


def _given_by(node: Any, number: int = 0) -> dict[str, Any]:
    """Describes a tensor that a node gives, as far as torch says it."""
    metadata = getattr(node, "_input_metadata", ())
    return _described(metadata[number]) if metadata else {}


def _described(tensor: Any) -> dict[str, Any]:
    """Describes a tensor, or anything else with a shape and a dtype."""
    dtype: torch.dtype = tensor.dtype
    name = str(dtype).removeprefix("torch.")
    try:
        shape = tuple([int(size) for size in tensor.shape])
    except (RuntimeError, TypeError, ValueError):  # a nested tensor has none
        return {"dtype": name}
    return {"shape": shape, "dtype": name, "nbytes": math.prod(shape) * dtype.itemsize}
