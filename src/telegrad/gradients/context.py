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


class Sent(msgspec.Struct, eq=False):
    """One tensor of a message, as the graph knows it. It keeps what is behind the tensor, and the tensor itself only if
    that is a leaf: any other may be changed in place and get another history."""

    id: int
    message: int
    place: int  # among the tensors of the message that require grad
    count: int  # of these
    to: int  # the id of the worker that it was sent to
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    graph: Graph
    reach: Reach
    known_edge: Edge | None = None
    sends: torch.Tensor | None = None  # the token of the message's Sends, if this is no leaf
    number: int = 0  # among the tensors of that
    leaf: torch.Tensor | None = None
    is_leaf: bool = False
    is_small_leaf: bool = False
    alias: torch.Tensor | None = None  # of a leaf: see Note [leaves and threads]
    past: Past | None = None  # outside of contexts

    @property
    def edge(self) -> Edge:
        if self.known_edge is None:
            assert self.leaf is not None
            behind: Any = make_sends((self.leaf,)) if self.alias is None else self.alias
            self.known_edge = behind.grad_fn.next_functions[0]
        return self.known_edge


def all_sent(
    message: int, to: int, tensors: Sequence[torch.Tensor], graph: Graph, new_id: Callable[[], int]
) -> list[Sent]:
    """Returns the tensors of a message to worker `to`. The first has the message's id."""
    count, all_sent, known = len(tensors), list[Sent](), graph.known
    inner: list[torch.Tensor] = []
    for tensor in tensors:  # a comprehension would be a call, in each message
        if not tensor.is_leaf:
            inner.append(tensor)
    sends: Any = make_sends(inner) if inner else None
    edges = enumerate(sends.grad_fn.next_functions if inner else ())
    has_leaves = len(inner) < count
    for place, tensor in enumerate(tensors):
        id = new_id() if place else message
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
        if has_leaves and tensor.is_leaf:
            sent = Sent(id, message, place, count, to, shape, dtype, device, graph, NOTHING)
            sent.is_leaf, sent.leaf, sent.alias = True, tensor, alias_of(tensor)
            sent.is_small_leaf = tensor.layout is torch.strided and tensor.nbytes < SHARED_MEMORY_FROM
        else:
            number, edge = next(edges)
            reach = known.get(edge[0])
            if reach is None:
                reach = graph.visit(*edge)
            sent = Sent(id, message, place, count, to, shape, dtype, device, graph, reach, edge, sends, number)
        all_sent.append(sent)
    return all_sent


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
