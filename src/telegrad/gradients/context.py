"""Context: what one distributed forward has left on one worker; and Sent, a tensor that it has sent."""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from typing import Any

import msgspec
import torch

from ..messages import sender_of
from ..options import SHARED_MEMORY_FROM
from .diagnosis import PartState
from .leaves import GradientTable
from .local_graph import NOTHING, Edge, Graph, Node
from .nodes import alias_of, make_send
from .pasts import Past


class Sent:
    """One tensor of a message, as the graph knows it. It keeps what is behind the tensor, but no large memory.

    `stand_in` takes its place among the inputs of a Wait: a leaf itself, which stays what it is; for any other a copy
    of a small tensor, or the token of a Send, since the tensor may be changed in place and get another history.
    """

    __slots__ = (
        "_alias", "_edge", "count", "device", "dtype", "graph", "id", "is_copied", "is_leaf", "is_small_leaf",
        "message", "past", "place", "reach", "shape", "stand_in", "to",
    )  # fmt: skip

    def __init__(
        self, id: int, message: int, place: int, count: int, to: int, tensor: torch.Tensor, graph: Graph,
        copy: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.id = id
        self.message = message
        self.place = place  # among the tensors of the message that require grad
        self.count = count  # of these
        self.to = to  # the id of the worker that it was sent to
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.graph = graph
        self.past: Past | None = None  # outside of contexts
        node = tensor.grad_fn
        self.is_copied = copy is not None
        self._edge: Edge | None
        if node is not None:
            self.is_leaf = self.is_small_leaf = False
            self._edge, self._alias = (node, tensor.output_nr), None
            self.stand_in = make_send(id, tensor) if copy is None else copy
            self.reach = graph.reach_of(node, tensor.output_nr)
            return
        self.is_leaf = True
        self.is_small_leaf = tensor.layout is torch.strided and tensor.nbytes < SHARED_MEMORY_FROM
        self._edge, self._alias = None, alias_of(tensor)  # see Note [leaves and threads]
        self.stand_in, self.reach = tensor, NOTHING

    @property
    def edge(self) -> Edge:
        if self._edge is None:
            behind: Any = make_send(self.id, self.stand_in) if self._alias is None else self._alias
            self._edge = behind.grad_fn.next_functions[0]
        return self._edge


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
