"""Contexts: what one distributed forward has left on this worker, until its end.

The owner makes a context when the program enters it, every other worker when the first message names it. The owner
ends it and tells the workers that it has sent to; each of them tells the workers that it has sent to. A late message
finds a tombstone, and never brings a context back.
"""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from ..errors import GradientError, UnknownContextError
from ..messages import LogEntry, sender_of
from .dependency_log import Log
from .diagnosis import PartState
from .leaves import GradientTable
from .local_graph import NOTHING, Edge, Graph, Node
from .nodes import alias_of, make_send

_TOMBSTONES = 100_000


class Sent:
    """One tensor of a message, as the graph knows it. It keeps what is behind the tensor, but not its memory.

    `stand_in` takes its place among the inputs of a Wait: a leaf itself, which stays what it is; for any other the
    token of a Send, since the tensor may be changed in place and get another history.
    """

    __slots__ = (
        "_alias", "_edge", "count", "device", "dtype", "graph", "id", "is_leaf", "message", "place", "reach", "shape",
        "stand_in", "to",
    )  # fmt: skip

    def __init__(
        self, id: int, message: int, place: int, count: int, to: int, tensor: torch.Tensor, graph: Graph
    ) -> None:
        self.id = id
        self.message = message
        self.place = place  # among the tensors of the message that require grad
        self.count = count  # of these
        self.to = to  # the id of the worker that it was sent to
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.graph = graph
        node = tensor.grad_fn
        self.is_leaf = node is None
        self._edge: Edge | None = None if node is None else (node, tensor.output_nr)
        self.stand_in = tensor if node is None else make_send(id, tensor)
        self._alias = alias_of(tensor) if node is None else None  # see Note [leaves and threads]
        self.reach = NOTHING if self._edge is None else graph.walk((self._edge,))

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
    failed: PartState | None = None  # what the last pass awaited here, if it failed; numbers only

    @property
    def owner(self) -> int:
        return sender_of(self.id)

    def clear(self) -> None:
        with self.lock:
            self.sends.clear()
            self.graph.clear()


class Contexts:
    """All contexts of one worker. `new_id` gives ids that never repeat in the group's life."""

    def __init__(self, worker_id: int, new_id: Callable[[], int]) -> None:
        self._new_id = new_id
        self._lock = RLock()  # guards all below; held for a moment only
        self.live: dict[int, Context] = {}  # by id; single lookups go without the lock
        self.log = Log(self.live.__contains__)
        self._released: OrderedDict[int, None] = OrderedDict()  # tombstones, the oldest first

    def __len__(self) -> int:
        return len(self.live)

    def new(self) -> Context:
        id = self._new_id()
        context = self.live[id] = Context(id, Graph(partial(self._new_group, id)))
        return context

    def find(self, id: int) -> Context | None:
        return self.live.get(id)

    def get(self, id: int) -> Context:
        """
        Raises:
            UnknownContextError: it is not known here.
        """
        context = self.live.get(id)
        if context is None:
            why = "it has ended" if id in self._released else "no message of it has come here"
            raise UnknownContextError(f"Could not find autograd context with id: {id} ({why})")
        return context

    def get_or_make(self, id: int) -> Context | None:
        """Returns the context of a message that has come; None if it has ended."""
        context = self.live.get(id)
        if context is not None:
            return context
        with self._lock:
            if id in self._released:
                return None
            return self.live.setdefault(id, self.ended(id))

    def ended(self, id: int) -> Context:
        """Makes a context that is not among the live ones: as a stand-in for one that has ended, for what is still sent
        in it."""

        return Context(id, Graph(partial(self._new_group, id)))

    def _new_group(self, context_id: int, members: frozenset[int]) -> int:
        group = -self._new_id()
        self.log.merge([LogEntry(group, context_id, tuple(sorted(members)))])
        return group

    def was_released(self, id: int) -> bool:
        return id in self._released

    def of_owner(self, worker_id: int) -> list[Context]:
        return [context for context in self.all() if context.owner == worker_id]

    def all(self) -> list[Context]:
        with self._lock:
            return list(self.live.values())

    def find_sent(self, context: Context, id: int) -> Sent:
        """Returns a tensor that this worker has sent, in this context or another one.

        Raises:
            GradientError: there is none of that id.
        """
        sent = context.sends.get(id) or self.find_sent_anywhere(id)
        if sent is None:
            raise GradientError(f"Could not find send function for autograd message id: {id}")
        return sent

    def find_sent_anywhere(self, id: int) -> Sent | None:
        """Returns a tensor that this worker has sent in any context; None if there is none, or its context has ended.
        The first tensor of a message has the message's id."""
        return next((sent for context in self.all() if (sent := context.sends.get(id)) is not None), None)

    def find_received(self, id: int) -> Node:
        """Returns the Recv of a tensor that has come here, in any context.

        Raises:
            GradientError: there is none of that id.
        """
        for context in self.all():
            if (node := context.received.get(id)) is not None:
                return node
        raise GradientError(f"Could not find recv function for autograd message id: {id}")

    def take_out(self, id: int) -> Context | None:
        """Ends a context here. Returns it, if it was live: its passes are still to be ended."""
        with self._lock:
            context = self.live.pop(id, None)
            self._released[id] = None
            if len(self._released) > _TOMBSTONES:
                self._released.popitem(last=False)
        self.log.release(id)
        if context is not None:
            context.clear()
        return context
