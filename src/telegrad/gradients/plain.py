"""Plain: what this worker has sent and received outside of contexts.

It takes the place of a context, with the id 0, but has no end of its own. Each Send has exactly one Recv, on another
worker, and is kept exactly as long as that lives:

    a Recv dies here      its id is noted, by a finaliser
    soon after            its sender is told (Forget): in the next message that goes there, or in one of its own
    Forget comes          the Send goes; with it the graph behind it, with that the Recvs in there, and so on

A message that was read and is never decoded is forgotten in the same way.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from ..events import log_by
from ..messages import COUNTER_BITS, MOST_ENDS, Forget, Kind, LogEntry
from ..primitives import current
from ..primitives.interrupts import finaliser
from . import deep
from .context import Context, Sent
from .host import Host, Task, tell
from .local_graph import Graph, Node, Reach
from .pasts import Member, Past, ids_of

_AT_ONCE = 0.5e-3  # seconds
_SOON = 20e-3  # seconds after which a sender hears of Recvs that have died, if no message went there meanwhile


class _Thread(threading.local):
    untracked = False


thread = _Thread()


@contextmanager
def untracked() -> Iterator[None]:
    """Has the calls that this thread makes meanwhile follow no tensors, in no context: they and their answers bring
    leaves."""
    context_id, before = current.context_id.get(), thread.untracked
    try:
        current.context_id.set(0)
        thread.untracked = True
        yield
    finally:  # an interrupt can come at a call: after the first of these, all is as before
        thread.untracked = before
        current.context_id.set(context_id)


class _Ref(weakref.ref[Node]):
    """A Recv, weakly."""

    __slots__ = ("ids",)
    ids: tuple[int, ...]


class _Received(dict[int, Any]):
    """Recvs by the ids of their tensors, weakly. One that has died leaves when its sender is about to be told."""

    def get(self, id: int, default: Any = None) -> Any:
        ref = dict.get(self, id)
        node = None if ref is None else ref()
        return default if node is None else node


class Undecoded:
    """A message with tensors that require grad, which was read. Dies with the message."""

    __slots__ = ("_ids", "_plain")

    def __init__(self, ids: tuple[int, ...], plain: Plain) -> None:
        self._ids = ids
        self._plain = plain
        plain.undecoded.add(ids[0])

    @finaliser
    def __del__(self) -> None:
        if self._ids[0] in self._plain.undecoded:
            self._plain.undecoded.discard(self._ids[0])
            self._plain.note(*self._ids)


class Plain(Context):
    """What one worker has sent and received outside of contexts."""

    worker_id: int = -1
    new_id: Callable[[], int] = lambda: 0
    receivers: dict[int, int] = msgspec.field(default_factory=dict)  # by message that was sent: to which worker
    undecoded: set[int] = msgspec.field(default_factory=set)  # messages that were read, by their ids
    groups: Any = msgspec.field(default_factory=weakref.WeakValueDictionary)  # Pasts of this worker's groups, by id
    # Written by finalisers, which must not lock:
    dead: deque[int] = msgspec.field(default_factory=deque)  # ids of received tensors whose Recv has died
    clearing: bool = False
    clear_soon: Task | None = None
    free_soon: Task | None = None  # frees deep graphs
    submit: Callable[[Task], None] = lambda task: task()  # has another thread run it
    name_of: Callable[[int], str] = str  # a worker's name, by its id
    # Guarded by the lock:
    to_forget: dict[int, list[int]] = msgspec.field(default_factory=dict)  # by worker: the dead that it has sent

    # -- tensors that are sent -------------------------------------------------------------------------

    def add(self, found: Sequence[Sent]) -> None:
        """Keeps the tensors of a message that is about to be sent."""
        first = found[0]
        with self.lock:
            for sent in found:
                self.sends[sent.id] = sent
            first.graph.sends += len(found)
            self.receivers[first.message] = first.to

    def new_group(self, members: Reach) -> Past:
        """Makes a Past that stands for several."""
        group = Past(-self.new_id(), tuple(members))
        self.groups[group.id] = group
        return group

    def depends_on(self, id: int) -> Sequence[Member] | None:
        """Says what a tensor or a group of this worker depends on; None if there is none of that id."""
        past = self.past_of(id) if id > 0 else self.groups.get(id)
        return None if past is None else past.depends_on

    def past_of(self, id: int) -> Past | None:
        """Returns the Past of a tensor that this worker has sent."""
        sent = self.sends.get(id)
        return None if sent is None else sent.past

    def forget_sent(self, peer: int, ids: Iterable[int]) -> tuple[Task | None, list[int]]:
        """Forgets Sends whose Recvs have died at `peer`. While reading: the task frees what was behind them. Returns
        also the ids that were not sent there, and that it has no right to name."""
        dead: list[Sent] = []
        wrong: list[int] = []
        with self.lock:
            for id in ids:
                sent = self.sends.get(id)
                if sent is None:
                    continue  # it went with a peer that was lost
                if sent.to != peer:
                    wrong.append(id)
                    continue
                del self.sends[id]
                dead.append(sent)
        return partial(self._free, dead) if dead else None, wrong

    def _free(self, dead: list[Sent]) -> None:
        """Frees Sends that were forgotten, and with the last of a message what is known of the graph behind it."""
        while dead:
            sent = dead.pop()
            graph, message = sent.graph, sent.message
            del sent
            with self.lock:
                graph.sends -= 1
                is_last = not graph.sends
                if is_last:
                    self.receivers.pop(message, None)
            if is_last:
                graph.clear()

    def on_forgotten(self, peer: int, ids: Iterable[int]) -> Task | None:
        """Takes the word of a worker that Recvs have died there. While reading: the task frees what was behind them."""
        task, wrong = self.forget_sent(peer, ids)
        if wrong:
            name = self.name_of(peer)
            text = "worker %r has forgotten %d tensors that it was not sent; this is dropped"
            log_by(self.submit, logging.WARNING, text, name, len(wrong))
        return task

    def on_lost(self, peer: int) -> Task | None:
        """Forgets all that was sent to a worker that is gone."""
        ids = [id for id, sent in list(self.sends.items()) if sent.to == peer]
        with self.lock:
            self.to_forget.pop(peer, None)
        return self.forget_sent(peer, ids)[0]

    # -- tensors that were received --------------------------------------------------------------------

    def keep_track(self, recv: Node) -> None:
        """Notes that tensors were received, and notices the death of their Recv."""
        ref = _Ref(recv, self._on_death)
        ref.ids = recv.ids
        for past in recv.members:
            past.recv = self.received[past.id] = ref

    def recvs(self) -> list[Node]:
        """Returns all Recvs that live."""
        refs = {id(ref): ref for ref in list(self.received.values())}  # not a set: that of a dead one has no hash
        return [node for ref in refs.values() if (node := ref()) is not None]

    @finaliser
    def _on_death(self, ref: _Ref) -> None:
        self.note(*ref.ids)

    def note(self, *ids: int) -> None:
        """Notes that Recvs have died. From finalisers: on any thread, under any lock."""
        self.dead.extend(ids)
        clear_soon = self.clear_soon
        if not self.clearing and clear_soon is not None:
            self.clearing = True
            clear_soon()

    def _sort_locked(self) -> None:
        while self.dead:
            id = self.dead.popleft()
            dict.pop(self.received, id, None)
            self.to_forget.setdefault(id >> COUNTER_BITS, []).append(id)

    def outgoing(self, to: int) -> tuple[int, ...]:
        """Takes what a message to that worker is to tell it."""
        with self.lock:
            self._sort_locked()
            if len(self.to_forget.get(to, ())) > MOST_ENDS:
                return ()  # _clear() is about to send them by themselves
            return tuple(self.to_forget.pop(to, ()))

    def not_written(self, ids: Iterable[int], to: int) -> None:
        """Has a message tell it that is sent after one that was not."""
        with self.lock:
            self.to_forget.setdefault(to, []).extend(ids)
        if (clear_soon := self.clear_soon) is not None:
            clear_soon()

    def start(self, host: Host) -> None:
        """Tells the senders of what has died, from now on."""
        self.submit, self.name_of = host.submit, host.name_of
        self.clear_soon = host.later(_SOON, partial(self._clear, host))
        self.free_soon = host.later(_AT_ONCE, deep.free)
        deep.add_wake(self.free_soon)

    def _clear(self, host: Host) -> None:
        self.clearing = False
        with self.lock:
            self._sort_locked()
            told, self.to_forget = self.to_forget, {}
        for worker, ids in told.items():
            if worker == self.worker_id:
                task, _ = self.forget_sent(worker, ids)
                if task is not None:
                    task()
            else:
                for start in range(0, len(ids), MOST_ENDS):
                    tell(host, worker, Kind.FORGET, Forget(tuple(ids[start : start + MOST_ENDS])))

    def close(self) -> None:
        """Ends with the worker."""
        # A tensor that is kept must not keep the worker.
        self.clear_soon, self.submit, self.name_of = None, lambda task: task(), str
        if (free_soon := self.free_soon) is not None:
            self.free_soon = None
            deep.remove_wake(free_soon)
        with self.lock:
            dead = list(self.sends.values())
            self.sends.clear()
        self.received.clear()
        self._free(dead)


def make_plain(worker_id: int, new_id: Callable[[], int]) -> Plain:
    plain = Plain(0, Graph(lambda members: 0), worker_id=worker_id, new_id=new_id)
    plain.received = _Received()
    return plain


def entries_of(
    members: Iterable[Member], look_up: Callable[[int], tuple[Sequence[Member], int] | None]
) -> list[LogEntry]:
    """Returns all that is known here of what is upstream of these, them included."""
    found: dict[int, LogEntry] = {}
    waiting = list(members)
    while waiting:
        member = waiting.pop()
        id = member if type(member) is int else member.id  # type: ignore[union-attr]
        if id in found:
            continue
        known = look_up(id) if type(member) is int else (member.depends_on, 0)  # type: ignore[union-attr]
        if known is not None:
            behind, context = known
            found[id] = LogEntry(id, context, ids_of(behind))
            waiting.extend(behind)
    return list(found.values())
