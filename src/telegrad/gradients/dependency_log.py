"""The log: which sent tensor depends on which others. It tells the root of a pass what will get a gradient.

An entry says: this tensor, which was sent, depends on those, which its sender had received. A message carries
the entries of its tensors, and with them the entries of all that is upstream, as far as this connection has
not carried them yet. So a worker that holds a received tensor holds the log of everything behind it.

    sent      entries_for(connection, depends_on)  -> what the receiver may not have yet;  written() marks it
    received  merge(connection, entries)           before anything that was read later is looked at
    backward  closure(ids)                         -> every sent tensor that will get a gradient

A tensor that depends on many others names a group: an entry with a negative id, which is no tensor itself.
So entries stay small however long the history is.
"""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import GradientError
from ..messages import LogEntry


class MissingEntryError(Exception):
    """The log knows nothing of a tensor: its context has ended."""

    def __init__(self, id: int) -> None:
        super().__init__(id)
        self.id = id


class Log:
    """The log of one worker. Entries live as long as the context that they belong to."""

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        self._is_live = is_live  # says whether a context has not ended; what comes later is not taken
        # Guards both below. Held for a moment only, and never while anything else is called: threads that read take it.
        self._lock = RLock()
        # Flat: a message may have thousands of tensors, and Python's garbage collector looks at every object.
        self._entries: dict[int, LogEntry] = {}
        self._of_context: dict[int, list[int]] = {}
        self._told: dict[Any, dict[int, set[int]]] = {}  # by connection and context: entries that its other end has

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: int) -> bool:
        return id in self._entries

    def merge(self, entries: Iterable[LogEntry], connection: object = None) -> None:
        """Takes over what a peer has told; with no connection, what this worker says itself."""
        known = self._entries
        with self._lock:
            for entry in entries:
                id, context = entry.id, entry.context
                if id not in known:
                    if not self._is_live(context):
                        continue
                    known[id] = entry
                    of_context = self._of_context.get(context)
                    if of_context is None:
                        of_context = self._of_context[context] = []
                    of_context.append(id)
                if connection is not None:
                    self._told_by(connection, context).add(id)

    def _told_by(self, connection: object, context: int) -> set[int]:
        told = self._told.get(connection)
        if told is None:
            told = self._told[connection] = {}
        found = told.get(context)
        if found is None:
            found = told[context] = set()
        return found

    def entries_for(self, connection: object, depends_on: Iterable[int]) -> list[LogEntry]:
        """Returns what is upstream of these tensors and was not carried by this connection yet.

        A peer that has an entry has all that is upstream of it, so the walk ends at the first that is known there.
        """
        found: list[LogEntry] = []
        with self._lock:
            told = self._told.get(connection, {})
            waiting = list(depends_on)
            seen = set(waiting)
            while waiting:
                entry = self._entries.get(waiting.pop())
                if entry is None or entry.id in told.get(entry.context, ()):
                    continue
                found.append(entry)
                for id in entry.depends_on:
                    if id not in seen:
                        seen.add(id)
                        waiting.append(id)
        return found

    def get(self, id: int) -> LogEntry | None:
        """Returns the entry of a tensor or a group; None if that is not known."""
        return self._entries.get(id)

    def written(self, connection: object, entries: Iterable[LogEntry]) -> None:
        """Notes that entries were written to a connection: later messages need not carry them.

        Not any earlier: another message could overtake the one that carries them. Two that are written at the same
        time may carry the same entry, which does no harm.
        """
        with self._lock:
            for entry in entries:
                if entry.id in self._entries:
                    self._told_by(connection, entry.context).add(entry.id)

    def closure(self, ids: Iterable[int]) -> dict[int, LogEntry]:
        """Returns all that is upstream of these tensors, them included, by id.

        Raises:
            MissingEntryError: for the first that is not known.
        """
        found: dict[int, LogEntry] = {}
        waiting = list(ids)
        with self._lock:
            while waiting:
                id = waiting.pop()
                if id in found:
                    continue
                entry = self._entries.get(id)
                if entry is None:
                    raise MissingEntryError(id)
                found[id] = entry
                waiting.extend(entry.depends_on)
        return found

    def release(self, context: int) -> None:
        with self._lock:
            for id in self._of_context.pop(context, ()):
                del self._entries[id]
            for connection, told in list(self._told.items()):
                told.pop(context, None)
                if not told:
                    del self._told[connection]


def useful(entries: dict[int, LogEntry], is_source: Callable[[int], bool]) -> set[int]:
    """Returns those of a closure that lead to a source: gradients have to go there to reach it."""
    found: dict[int, bool] = {}
    begun: set[int] = set()
    for start in entries:
        stack = [start]
        while stack:
            id = stack[-1]
            if id in found:
                stack.pop()
                continue
            missing = [d for d in entries[id].depends_on if d not in found]
            if missing:
                if id in begun:
                    raise GradientError(f"the history of tensor {id}, as other workers have told it, goes in a circle")
                begun.add(id)
                stack.extend(missing)
                continue
            found[id] = (id > 0 and is_source(id)) or any(found[d] for d in entries[id].depends_on)
            stack.pop()
    return {id for id, leads in found.items() if leads}


def flatten_groups(depends_on: Iterable[int], entries: dict[int, LogEntry]) -> set[int]:
    """Returns the tensors themselves, where groups stand for several."""
    found: set[int] = set()
    waiting = list(depends_on)
    seen: set[int] = set()
    while waiting:
        id = waiting.pop()
        if id > 0:
            found.add(id)
        elif id not in seen and id in entries:
            seen.add(id)
            waiting.extend(entries[id].depends_on)
    return found
