"""Contexts: what one distributed forward has left on this worker, until its end.

The owner makes a context when the program enters it, every other worker when the first message names it. The owner
ends it and tells the workers that it has sent to; each of them tells the workers that it has sent to. A late message
finds a tombstone, and never brings a context back.
"""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..errors import GradientError, UnknownContextError
from ..messages import LogEntry
from .context import Context as Context
from .context import Sent as Sent
from .dependency_log import Log, flatten_groups
from .local_graph import Graph, Node, Reach
from .pasts import Member, Past, ids_of
from .plain import Plain, entries_of, make_plain

_TOMBSTONES = 100_000


class Contexts:
    """All contexts of one worker. `new_id` gives ids that never repeat in the group's life."""

    def __init__(self, worker_id: int, new_id: Callable[[], int]) -> None:
        self._new_id = new_id
        self.plain: Plain = make_plain(worker_id, new_id)
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

    def of_message(self, id: int) -> Context | None:
        """Returns the context that a message names; for one outside of contexts what takes its place."""
        return self.live.get(id) if id else self.plain

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

    def _new_group(self, context_id: int, members: Reach) -> int:
        group = -self._new_id()
        self.log.merge([LogEntry(group, context_id, tuple(sorted(self.logged(context_id, members))))])
        return group

    def logged(self, context_id: int, members: Reach) -> tuple[int, ...]:
        """Returns the ids of what something in a context depends on. What was received outside of contexts is entered
        into the log."""
        ids = ids_of(members)
        if pasts := [member for member in members if type(member) is Past]:
            entries = entries_of(pasts, self.look_up)
            self.log.merge([LogEntry(entry.id, context_id, entry.depends_on) for entry in entries])
        return ids

    def look_up(self, id: int) -> tuple[Sequence[Member], int] | None:
        """Says what is known here of what a tensor or a group depends on, and its context (0: none); None: nothing."""
        found = self.plain.depends_on(id)
        if found is not None:
            return found, 0
        entry = self.log.get(id)
        return None if entry is None else (entry.depends_on, entry.context)

    def nodes_of(self, reach: Iterable[Member]) -> list[Node]:
        """Returns the Recvs that something on this worker leads to."""
        found: dict[int, Node] = {}  # by the ids of Python's objects: one Recv may be that of several tensors
        ids: list[int] = []
        waiting, groups = list(reach), set()
        while waiting:
            member = waiting.pop()
            if type(member) is int:
                ids.append(member)
            elif member.id < 0:  # type: ignore[union-attr]
                if member not in groups:
                    groups.add(member)
                    waiting.extend(member.depends_on)  # type: ignore[union-attr]
            elif (node := member.recv()) is not None:  # type: ignore[union-attr]
                found[id(node)] = node
        if any(number < 0 for number in ids):
            ids = list(flatten_groups(ids, self.log.closure(ids)))
        for number in ids:
            node = self.find_received(number)
            found[id(node)] = node
        return list(found.values())

    def was_released(self, id: int) -> bool:
        return id in self._released

    def statistics(self) -> dict[str, int]:
        contexts, plain = self.all(), self.plain
        return {
            "contexts": len(contexts),
            "sends": len(plain.sends) + sum(len(c.sends) for c in contexts),
            "received": len(plain.received) + sum(len(c.received) for c in contexts),
            "gradients": sum(len(c.gradients) for c in contexts),
            "log_entries": len(self.log),
        }

    def of_owner(self, worker_id: int) -> list[Context]:
        return [context for context in self.all() if context.owner == worker_id]

    def all(self) -> list[Context]:
        with self._lock:
            return list(self.live.values())

    def find_sent(self, id: int) -> Sent:
        """Returns a tensor that this worker has sent, in any context.

        Raises:
            GradientError: there is none of that id.
        """
        sent = self.find_sent_anywhere(id)
        if sent is None:
            raise GradientError(
                f"Could not find send function for autograd message id: {id} (its context has ended, or the connection "
                "with the worker that it was sent to was lost). The graph behind it is gone: run the forward pass again"
            )
        return sent

    def find_sent_anywhere(self, id: int) -> Sent | None:
        """Returns a tensor that this worker has sent in any context; None if there is none, or its context has ended.
        The first tensor of a message has the message's id."""
        found = self.plain.sends.get(id)
        if found is not None:
            return found
        return next((sent for context in self.all() if (sent := context.sends.get(id)) is not None), None)

    def find_received(self, id: int) -> Node:
        """Returns the Recv of a tensor that has come here, in any context.

        Raises:
            GradientError: there is none of that id.
        """
        for context in (self.plain, *self.all()):
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
