"""Context: what one distributed forward has left on one worker; and Sent, a tensor that it has sent."""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ..messages import sender_of
from ..options import SHARED_MEMORY_FROM
from .diagnosis import PartState
from .leaves import GradientTable
from .local_graph import NOTHING, Edge, Graph, Node, Reach
from .nodes import alias_of, make_sends
from .pasts import Past


class Sent:
    """One tensor of a message, as the graph knows it. It keeps what is behind the tensor, and the tensor itself only if
    that is a leaf: any other may be changed in place and get another history."""

    __slots__ = (
        "_alias", "_edge", "count", "device", "dtype", "graph", "id", "is_leaf", "is_small_leaf", "leaf", "message",
        "number", "past", "place", "reach", "sends", "shape", "to",
    )  # fmt: skip

    def __init__(
        self, id: int, message: int, place: int, count: int, to: int, tensor: torch.Tensor, graph: Graph,
        sends: Node = None, number: int = 0, edge: Edge | None = None, reach: Reach = NOTHING,
    ) -> None:  # fmt: skip
        self.id = id
        self.message = message
        self.place = place  # among the tensors of the message that require grad
        self.count = count  # of these
        self.to = to  # the id of the worker that it was sent to
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.graph = graph
        self.past: Past | None = None  # outside of contexts
        self.sends = sends  # of the message
        self.number = number  # among the tensors of these
        self._edge = edge
        self._alias: Any = None
        self.reach = reach
        self.leaf: torch.Tensor | None = None
        self.is_leaf = self.is_small_leaf = False
        if edge is None:
            self.is_leaf = True
            self.is_small_leaf = tensor.layout is torch.strided and tensor.nbytes < SHARED_MEMORY_FROM
            self.leaf, self._alias = tensor, alias_of(tensor)  # see Note [leaves and threads]

    @property
    def edge(self) -> Edge:
        if self._edge is None:
            assert self.leaf is not None
            node: Any = self._alias.grad_fn if self._alias is not None else make_sends((self.leaf,))
            self._edge = node.next_functions[0]
        return self._edge


def all_sent(
    message: int, to: int, tensors: Sequence[torch.Tensor], graph: Graph, new_id: Callable[[], int]
) -> list[Sent]:
    """Returns the tensors of a message to worker `to`. The first has the message's id."""
    count, found, number = len(tensors), list[Sent](), 0
    inner: list[torch.Tensor] = []
    for tensor in tensors:  # a comprehension would be a call, in each message
        if not tensor.is_leaf:
            inner.append(tensor)
    sends: Any = make_sends(inner) if inner else None
    edges = sends.next_functions if inner else ()
    known = graph.known
    for place, tensor in enumerate(tensors):
        id = new_id() if place else message
        if tensor.is_leaf:
            found.append(Sent(id, message, place, count, to, tensor, graph))
            continue
        edge = edges[number]
        reach = known.get(edge[0])
        if reach is None:
            reach = graph.visit(*edge)
        found.append(Sent(id, message, place, count, to, tensor, graph, sends, number, edge, reach))
        number += 1
    return found


class Context(msgspec.Struct, eq=False, weakref=True):
    """One context on one worker."""

    id: int
    graph: Graph  # as far as Sends lead to it
    # Guards the graph and the gradients. Held while the graph is walked, so never by threads that read. Reentrant: a
    # finaliser may run in it.
    lock: Any = msgspec.field(default_factory=RLock)
    # The operations on these are single, and atomic:
    sends: dict[int, Sent] = msgspec.field(default_factory=dict)  # by id
    received: dict[int, Node] = msgspec.field(default_factory=dict)  # Recv nodes, by the ids of their tensors
    known_workers: set[int] = msgspec.field(default_factory=set)  # ids of the workers that it was sent to
    heard_from: set[int] = msgspec.field(
        default_factory=set
    )  # ids of the workers that sent it here, and will tell of its end
    gradients: GradientTable = msgspec.field(default_factory=GradientTable)
    went_into_grad: bool = False  # a pass has put its gradients into `.grad`
    failed: PartState | None = None  # what the last pass awaited here, if it failed; numbers only

    @property
    def owner(self) -> int:
        return sender_of(self.id)

    def clear(self) -> None:
        with self.lock:
            self.sends.clear()
            self.graph.clear()
