"""Attaches Sends and Recvs to the tensors of a message, on its way out and on its way in.

outgoing   tensors that require grad  -> a Send over each, and what the message says of it (Autograd)
merge      what a message says        -> the log; while reading, so before anything that was read later
incoming   tensors of such a message  -> the same, each with a Recv as its history
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from .._torch import current_graph_task_id
from ..errors import GradientError, ProtocolError, UnknownContextError
from ..events import log_by
from ..messages import COUNTER_BITS, Autograd, Envelope, Hello, LogEntry
from ..options import reversed_map
from ..primitives import current
from .context import all_sent
from .contexts import Context, Contexts
from .local_graph import NOTHING, Graph
from .nodes import make_recvs
from .pasts import Member, Past, carried, ids_of, rebuilt
from .plain import Undecoded


class Link(Protocol):
    """A connection, as far as it is needed here."""

    peer: Hello


class Attach:
    def __init__(self, worker_id: int, contexts: Contexts, new_id: Callable[[], int]) -> None:
        self._worker_id = worker_id
        self._contexts = contexts
        self._live = contexts.live
        self._plain = contexts.plain
        self._new_id = new_id

    def outgoing(
        self,
        context: Context,
        envelope: Envelope,
        tensors: Sequence[torch.Tensor],
        connection: object,
        to: int,
    ) -> None:
        """Notes in the envelope what the message says of gradients. It will go by `connection`, to worker `to`.

        Raises:
            UnknownContextError: the context has ended, and a tensor of the message requires grad.
        """
        if context is self._plain:
            self._outgoing_plain(envelope, tensors, to)
            return
        if to != self._worker_id:
            context.known_workers.add(to)
        said = envelope.autograd  # of gradients: what their pass has to say
        if not tensors:
            # Where the context has ended the message does not name it: no worker would tell the receiver of its end.
            if said is None and context.id in self._live:
                envelope.autograd = Autograd(context.id, during=current.current_pass_id())
            return
        if context.id not in self._live:
            self._check_outside(context, tensors)
            return
        log = self._contexts.log
        own: list[LogEntry] = []
        depends_on: list[int] = []
        last = NOTHING
        reach: tuple[int, ...] = ()
        with context.lock:
            sent = all_sent(envelope.id, to, tensors, context.graph, self._new_id)
            for found in sent:
                if found.reach is not last:  # most tensors of a message depend on the same ones
                    last = found.reach
                    reach = self._contexts.logged(context.id, last) if last else ()
                    depends_on += reach
                own.append(LogEntry(found.id, context.id, reach))
        log.merge(own)
        for found in sent:
            context.sends[found.id] = found
        if context.id not in self._live:
            context.clear()
            self._check_outside(context, tensors)
            return
        entries = tuple(log.entries_for(connection, depends_on)) if depends_on else ()
        for entry in entries:
            # A worker that learns of a context must hear of its end.
            if entry.context != context.id and to != self._worker_id:
                if (other := self._live.get(entry.context)) is not None:
                    other.known_workers.add(to)
        envelope.autograd = _with_history(said, context.id, own, entries)

    def _outgoing_plain(self, envelope: Envelope, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Notes in the envelope of a message outside of contexts what it says of gradients."""
        plain, graph = self._plain, Graph(self._plain.new_group, marks=True)
        sent = all_sent(envelope.id, to, tensors, graph, self._new_id)
        own: list[LogEntry] = []
        depends_on: list[Member] = []
        last = NOTHING
        members: tuple[Member, ...] = ()
        ids: tuple[int, ...] = ()
        for found in sent:
            if found.reach is not last:  # most tensors of a message depend on the same ones
                last = found.reach
                members, ids = tuple(last), ids_of(last)
                depends_on += members
            found.past = Past(found.id, members)
            own.append(LogEntry(found.id, 0, ids))
        graph.leave_marks(len(tensors))
        plain.add(sent)
        entries = carried(depends_on, to) if depends_on else ()
        envelope.autograd = _with_history(envelope.autograd, 0, own, entries)

    def _check_outside(self, context: Context, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses a message whose context has ended: tensors without their history would be leaves there, and gradients
        silently missing."""
        raise UnknownContextError(
            f"a message in autograd context {context.id} has {len(tensors)} tensors that require grad, but the "
            f"context has ended on this worker (id {self._worker_id}): their history cannot be recorded. Wait for "
            "calls before their context ends, or detach() what they send and return"
        )

    def written(self, envelope: Envelope, connection: object) -> bool:
        """Notes that a message was written: its receiver knows what it says. False if the context has ended meanwhile,
        and the receiver may not have been told."""
        autograd = envelope.autograd
        if autograd is None or not autograd.context:
            return True
        if autograd.sent:
            self._contexts.log.written(connection, (*autograd.sent, *autograd.entries))
        return autograd.context in self._live

    def not_written(self, envelope: Envelope, to: int) -> None:
        """Forgets the Sends of a message that was not sent: no gradients will come for them."""
        autograd = envelope.autograd
        if autograd is None:
            return
        if not autograd.context:
            task, _ = self._plain.forget_sent(to, [entry.id for entry in autograd.sent])
            if task is not None:
                task()
        elif (context := self._live.get(autograd.context)) is not None:
            for entry in autograd.sent:
                context.sends.pop(entry.id, None)

    def merge(self, envelope: Envelope, connection: Link) -> Undecoded | None:
        """Takes over what a message says. Never blocks, and runs no user code. What is returned is to live as long as
        the message."""
        autograd = envelope.autograd
        if autograd is None:
            return None
        if not autograd.context:
            return self._arrived_plain(envelope.id, autograd, connection.peer.id) if autograd.sent else None
        context = self._live.get(autograd.context) or self._contexts.get_or_make(autograd.context)
        if context is None:
            late = "message %d came after the end of its context %d"
            log_by(self._plain.submit, logging.INFO, late, envelope.id, autograd.context)
            return None
        sender = connection.peer.id
        context.heard_from.add(sender)
        if autograd.sent:
            entries = list(autograd.sent)
            for entry in autograd.entries:
                if entry.context != autograd.context:
                    other = self._contexts.get_or_make(entry.context)
                    if other is None:
                        continue
                    other.heard_from.add(sender)
                entries.append(entry)
            self._contexts.log.merge(entries, connection)
        return None

    def _arrived_plain(self, message: int, autograd: Autograd, sender: int) -> Undecoded:
        ids = tuple([entry.id for entry in autograd.sent])
        for id in ids:
            if id >> COUNTER_BITS != sender or id in self._plain.received:
                raise ProtocolError(f"message {message} of worker {sender} has a tensor {id}, which it has not sent")
        return Undecoded(ids, self._plain)

    def context_of(self, envelope: Envelope) -> Context | None:
        """Returns the context that a message belongs to; a stand-in if it has ended."""
        id = envelope.autograd.context if envelope.autograd is not None else 0
        return (self._live.get(id) or self._contexts.ended(id)) if id else None

    def current(self) -> Context | None:
        """Returns the context that this code runs in; a stand-in if it has ended."""
        id = current.current_context_id()
        return (self._live.get(id) or self._contexts.ended(id)) if id else None

    def incoming(self, envelope: Envelope) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] | None:
        """Returns the function that gives the tensors of a message their history; None for a message with no Send."""
        autograd = envelope.autograd
        if autograd is None or not autograd.sent:
            return None
        came_from = None
        if envelope.device_map is not None:
            came_from = reversed_map(envelope.device_map)
        return partial(self._recv, envelope.id, autograd, came_from)

    def _recv(
        self, message: int, autograd: Autograd, came_from: dict[str, str] | None, tensors: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        sent = autograd.sent
        if len(sent) != len(tensors):
            raise GradientError(f"message {message} has {len(tensors)} tensors that require grad, not {len(sent)}")
        if not autograd.context:
            return self._recv_plain(message, autograd, came_from, tensors)
        received, recvs = make_recvs(message, sent, autograd.context, tensors, came_from)
        context = self._live.get(autograd.context)
        if context is not None:  # else backward() will say that it has ended
            for recv in recvs:
                for id in recv.ids:
                    context.received[id] = recv
        return received

    def _recv_plain(
        self, message: int, autograd: Autograd, came_from: dict[str, str] | None, tensors: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        plain, sent = self._plain, autograd.sent
        found = rebuilt((*autograd.entries, *sent), plain.past_of)
        received, recvs = make_recvs(message, sent, 0, tensors, came_from)
        for recv in recvs:
            recv.members = tuple([found[id] for id in recv.ids])
            plain.keep_track(recv)
        plain.undecoded.discard(sent[0].id)  # from here on it is up to the Recvs
        return received


def _with_history(
    said: Autograd | None, context_id: int, own: Sequence[LogEntry], entries: Sequence[LogEntry]
) -> Autograd:
    """Adds the history of a message's tensors to what gradients say of their pass."""
    if said is None:
        during = current.pass_id.get() if current_graph_task_id() < 0 else current.current_pass_id()
        return Autograd(context_id, tuple(own), tuple(entries), during)
    return Autograd(context_id, tuple(own), tuple(entries), said.during, said.done, said.more, said.begin)


class NoHistoryError(GradientError):
    """Inside the codec: tensors require grad and come without a history."""


def refuse(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Takes the place of `incoming` where a message must not bring leaves."""
    raise NoHistoryError(f"{len(tensors)} tensors that require grad")
