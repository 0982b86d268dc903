"""Pasts: the log of what was sent outside of contexts, as a graph of small objects.

A Past says of a tensor that was sent: it depends on those. Sends and Recvs hold theirs, and each holds what it depends
on, so that all of it goes by itself, with the graph that it tells of. A message carries the Pasts between its tensors
and what its receiver has sent itself, up to a limit. Where the limit cut something off, a number stands for it; the
root of a pass asks the worker that made it (plan.py). So a message costs the same however long the history is, and no
worker has to know what another one remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..messages import COUNTER_BITS, LogEntry

_MOST = 32  # Pasts that a message carries beside those of its own tensors


class Past:
    """What a tensor depends on that was sent outside of contexts. A negative id is no tensor, but stands for several.

    Not a msgspec.Struct: a long chain of these must not be freed by recursion.
    """

    __slots__ = ("__weakref__", "depends_on", "id", "recv")

    def __init__(self, id: int, depends_on: Sequence[Member], recv: Any = None) -> None:
        self.id = id
        self.depends_on = depends_on
        self.recv = recv  # on the worker that has received it: a weak reference to the Recv


# A tensor or a group: as it is known here, or its id. In contexts these are ids always.
Member = int | Past


def id_of(member: Member) -> int:
    return member if type(member) is int else member.id  # type: ignore[union-attr]


def ids_of(members: Iterable[Member]) -> tuple[int, ...]:
    return tuple([member if type(member) is int else member.id for member in members])  # type: ignore[union-attr]


def carried(members: Iterable[Member], to: int) -> list[LogEntry]:
    """Returns what a message to worker `to` carries of all that is upstream of its tensors; of two that depend on each
    other the one upstream comes first. What `to` has sent itself it keeps as long as anything depends on it."""
    found: list[LogEntry] = []
    begun: set[int] = set()
    for member in members:
        _carry(member, to, begun, found)
    return found


# Not inside of the function above: one that refers to itself is left to the garbage collector.
def _carry(member: Member, to: int, begun: set[int], found: list[LogEntry]) -> None:
    if type(member) is not Past or member.id in begun or len(begun) >= _MOST or member.id >> COUNTER_BITS == to:
        return
    begun.add(member.id)
    for other in member.depends_on:
        # Most often there is nothing to carry of a large group. So the same is asked here, without a call.
        if type(other) is Past and other.id >> COUNTER_BITS != to:
            _carry(other, to, begun, found)
    found.append(LogEntry(member.id, 0, ids_of(member.depends_on)))


def rebuilt(entries: Iterable[LogEntry], find_own: Callable[[int], Past | None]) -> dict[int, Past]:
    """Returns the Pasts that a message has carried, by id. `find_own` finds those of what this worker has sent."""
    found: dict[int, Past] = {}
    for entry in entries:
        members: tuple[Member, ...] = ()
        if entry.depends_on:
            members = tuple([found.get(id) or find_own(id) or id for id in entry.depends_on])
        found[entry.id] = Past(entry.id, members)
    return found
