"""Definitions: functions and classes that a module holds under their names go by value only once.

A definition gets a number from its sender. Until the callee has answered a message that carried the definition, every
message that refers to it carries it; from then on the number is enough. When anything that went into the definition is
bound anew (see by_value.Dependencies), it is a new one, with a higher number.

    sent      [definitions that the callee may not have yet]  values that refer to (sender, number)
    received  the definitions are rebuilt and kept, then the values are

Messages may be decoded in any order: a number alone is only ever sent to a callee that is known to have it.

What came from a worker that is gone is forgotten. A function of it that was passed on stays alive by ordinary
references, and from then on travels in place, with each message, as a lambda does.

# Note [large definitions that are forgotten]
A namespace and its functions refer to each other, so Python frees them when it next looks for cycles. That is when
enough objects were made, however large they are: a server may see many clients with large globals before. And glibc
keeps what is freed of blocks of megabytes, once it has seen some of that size. When much was forgotten, both are told.
"""

from __future__ import annotations

import bisect
import itertools
import pickle
import struct
import threading
from collections.abc import Callable
from typing import Any

from ..errors import DecodeError, EncodeError
from .by_value import Dependencies, origin_of
from .namespaces import MAIN, Namespace, Namespaces, follow, is_by_value, is_definition, module_attribute
from .pickling_state import Outgoing, defined, of_main

_REFERENCE = struct.Struct("<BQQ")  # in the place of a function's name, which never starts with a zero byte
_MOST_UNANSWERED = 10_000  # messages remembered, before starting anew
_VERSIONS_KEPT = 8  # of one definition, at the callee: calls by an old number may still wait for a thread
_SMALL = 1 << 20  # bytes; a larger definition is pickled again for each callee, not kept
_MUCH = 16 << 20  # bytes of definitions: see Note [large definitions that are forgotten]


class Definition:
    """A function or class as it was when it got its number."""

    def __init__(self, obj: Any, owner: int, number: int, origin: int, made_of: Dependencies, blob: bytes) -> None:
        self.obj = obj
        self.number = number
        self.origin = origin
        self.reference = _REFERENCE.pack(0, owner, number)
        self.is_current = made_of.is_current
        self.blob = blob if len(blob) <= _SMALL else b""
        self.known_to: set[int] = set()  # ids of the workers that have it; its single operations are atomic


class Definitions:
    """The definitions that one worker has sent, and those that it has received. `dump` pickles an object by value."""

    def __init__(self, namespaces: Namespaces, dump: Callable[[Any, Dependencies], bytes]) -> None:
        self._namespaces = namespaces
        self._dump = dump
        # Guards the writing of all below, but single operations. See Note [finalisers] in namespaces.py.
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._current: dict[tuple[int, str, str], Definition] = {}  # by origin, module and name
        self._by_id: dict[int, Definition] = {}  # the same, by the id of the object
        self.unanswered: dict[int, tuple[int, list[Definition]]] = {}  # by message: its peer, what it carried
        self._received: dict[tuple[int, int], Any] = {}  # by owner and number
        self._versions: dict[tuple[int, int, str, str], list[int]] = {}  # by owner, origin, module and name
        self._nbytes: dict[int, int] = {}  # of what was received, by sender
        self._forgotten = 0  # the same, of workers that are gone, since memory was last reclaimed
        self.lost = namespaces.lost  # workers that are gone
        self.lacking: set[tuple[int, str]] = set()  # workers, and what of this `__main__` their own has not got

    # -- sending ---------------------------------------------------------------------------------------

    def name_of(self, function: Any, message: Outgoing) -> bytes:
        """A reference to the function of a call, in the place of its name; empty if there is none."""
        if not is_definition(function) or not is_by_value(function):
            return b""
        definition = self._find(function, message)
        if isinstance(definition, Definition):
            return definition.reference
        return b"" if definition is None else ":".join(definition).encode()

    def reduce(self, obj: Any, message: Outgoing) -> Any:
        """How pickle should save a function or class of a module that is sent by value; NotImplemented: as it is."""
        definition = self._find(obj, message)
        if isinstance(definition, Definition):
            return defined, (self._namespaces.worker_id, definition.number)
        if definition is not None:
            return (of_main, definition[1:]) if definition[0] == "__main__" else (module_attribute, definition)
        path, _, name = obj.__qualname__.rpartition(".")
        if path and "<" not in path:  # it is inside of a class
            origin = origin_of(obj, self._namespaces)
            holder = self._look_up(origin, obj.__module__, path)
            if isinstance(holder, type) and getattr(holder, name, None) is obj:
                # Not in a class that is itself pickled in place: its inside is not there yet when it is looked for.
                outermost = self._look_up(origin, obj.__module__, path.partition(".")[0])
                if self._find(outermost, message) is not None:
                    return getattr, (holder, name)
        return NotImplemented

    def _find(self, obj: Any, message: Outgoing) -> Definition | tuple[str, str] | None:
        """The definition to refer to; or the module and name under which the peer has the object itself."""
        definition = self._by_id.get(id(obj))
        if definition is None or definition.obj is not obj:
            definition = None
            origin = origin_of(obj, self._namespaces)
        else:
            origin = definition.origin
        if message.same_main or origin == message.peer:
            module, name = obj.__module__, obj.__qualname__
            is_named = origin == self._namespaces.worker_id and module in MAIN
            if is_named and self.lacking and (message.peer, name.partition(".")[0]) in self.lacking:
                is_named = False
            if is_named or origin == message.peer:
                shown = "__main__" if module in MAIN else module
                return (shown, name) if self._look_up(origin, module, name) is obj else None
        if message.carried is None:
            return None
        if definition is None or not definition.is_current():
            definition = self._define(obj, origin, obj.__module__, obj.__qualname__)
            if definition is None:
                return None
        if message.peer not in definition.known_to and definition not in message.carried:
            message.carried.append(definition)
        return definition

    def _look_up(self, origin: int, module: str, qualname: str) -> Any:
        """The object that the origin has under a name, as far as it is known here."""
        namespace = self._namespaces.find(origin, module)
        if namespace is None:
            return None
        top, *path = qualname.split(".")
        return follow(namespace.source.get(top), path)

    def _define(self, obj: Any, origin: int, module: str, name: str) -> Definition | None:
        namespace = self._namespaces.find(origin, module)
        if namespace is None or namespace.source.get(name) is not obj:
            return None
        made_of = Dependencies()
        blob = self._blob(obj, namespace, name, made_of)
        with self._lock:  # which is not held while pickling: that may run anything
            last = self._current.get((origin, module, name))
            if last is not None:
                if last.obj is obj and last.is_current():
                    return last
                self._by_id.pop(id(last.obj), None)
            owner = self._namespaces.worker_id
            definition = Definition(obj, owner, next(self._numbers), origin, made_of, blob)
            self._current[origin, module, name] = self._by_id[id(obj)] = definition
            return definition

    def _blob(self, obj: Any, namespace: Namespace, name: str, made_of: Dependencies) -> bytes:
        made_of.add(namespace.source, name)
        version, value = namespace.bindings([name])[name]
        place = (namespace.origin, namespace.module, name, version, namespace.base)
        try:
            return self._dump((place, value), made_of)
        except EncodeError as error:
            raise EncodeError(f"{self._culprit(made_of)}{error}") from error.__cause__

    def _culprit(self, made_of: Dependencies) -> str:
        """Which global it was that could not be pickled. The one that was looked at last is most likely."""
        for _, name, value in reversed(made_of.bindings):
            if not is_definition(value):
                try:
                    self._dump(value, Dependencies())
                except EncodeError:
                    return f"its global {name!r}, a {type(value).__name__}: "
        return ""

    def carry(self, message: Outgoing, answered_as: int | None) -> bytes:
        """The definitions that a message carries. They are known to the peer when it has answered it."""
        assert message.carried is not None
        blobs = [(d.number, d.blob or self._again(d)) for d in message.carried]
        if answered_as is not None:
            if len(self.unanswered) >= _MOST_UNANSWERED:
                self.unanswered.clear()  # what they carried is carried once more
            self.unanswered[answered_as] = (message.peer, message.carried)
        return pickle.dumps((self._namespaces.worker_id, blobs), 5)

    def _again(self, definition: Definition) -> bytes:
        obj = definition.obj
        namespace = self._namespaces.find(definition.origin, obj.__module__)
        if namespace is None:
            raise EncodeError(
                f"{obj.__qualname__} came from worker {definition.origin}, which was lost while this message was made; "
                "send it again"
            )
        return self._blob(obj, namespace, obj.__qualname__, Dependencies())

    def for_peer(self, peer: int, name: str) -> bytes | None:
        """A function or class of this worker's `__main__`, for a peer of the same script that has not got it: it goes
        there by value from now on. None: there is none of that name."""
        for module in MAIN:
            namespace = self._namespaces.find(self._namespaces.worker_id, module)
            if namespace is not None and is_definition(obj := namespace.source.get(name)):
                self.lacking.add((peer, name))
                return self._blob(obj, namespace, name, Dependencies())
        return None

    def on_answered(self, message_id: int, by: int, *, has_run: bool) -> None:
        """Notes that a call was answered; a peer that has run it has the definitions that it carried."""
        peer, carried = self.unanswered.get(message_id, (by, ()))
        if peer == by and self.unanswered.pop(message_id, None) is not None and has_run:
            for definition in carried:
                definition.known_to.add(peer)

    def forget(self, peer: int) -> bool:
        """Forgets what a worker that is gone has sent, and what it was sent. Returns whether memory is to be reclaimed:
        see Note [large definitions that are forgotten]."""
        dead: list[Any] = []  # dies after the lock was released: that may run users' code
        with self._lock:
            dead += (unkept := self._namespaces.forget(peer))
            dead += [self._received.pop(key) for key in list(self._received) if key[0] == peer]
            for name in [name for name in self._versions if name[0] == peer]:
                del self._versions[name]
            self.lacking -= {entry for entry in list(self.lacking) if entry[0] == peer}
            for message in [message for message, (to, _) in list(self.unanswered.items()) if to == peer]:
                dead.append(self.unanswered.pop(message, None))
            places = {(kept.namespace.origin, kept.namespace.module) for kept in unkept}
            for key, definition in list(self._current.items()):
                definition.known_to.discard(peer)
                if key[:2] in places:
                    dead.append(self._current.pop(key))
                    self._by_id.pop(id(definition.obj), None)
            self._forgotten += self._nbytes.pop(peer, 0)
            if is_much := self._forgotten >= _MUCH:
                self._forgotten = 0
        return is_much

    # -- receiving -------------------------------------------------------------------------------------

    def receive(self, carried: Any, sender: int) -> None:
        """Rebuilds what a message carries and is not known yet. Runs users' code."""
        owner, blobs = pickle.loads(carried)
        for number, blob in blobs:
            if (owner, number) in self._received:
                continue
            (origin, module, name, _, _), _ = place, obj = pickle.loads(blob)
            self._keep((owner, origin, module, name), number, self._bind(place, obj, sender))
            with self._lock:
                self._nbytes[sender] = self._nbytes.get(sender, 0) + len(blob)

    def _bind(self, place: tuple[int, str, str, int, dict[str, Any]], obj: Any, sender: int) -> Any:
        origin, module, name, version, base = place
        if origin == self._namespaces.worker_id:
            return obj
        return self._namespaces.get(origin, module, base, sender).adopt_definition(name, version, obj)

    def adopt(self, blob: bytes, sender: int) -> Any:
        """Rebuilds what another worker's for_peer() has given. Runs users' code."""
        place, obj = pickle.loads(blob)
        return self._bind(place, obj, sender)

    def _keep(self, name: tuple[int, int, str, str], number: int, obj: Any) -> None:
        owner = name[0]
        with self._lock:
            if (owner, number) not in self._received:
                numbers = self._versions.setdefault(name, [])
                bisect.insort(numbers, number)
                self._received[owner, number] = obj
                if len(numbers) > _VERSIONS_KEPT:
                    del self._received[owner, numbers.pop(0)]

    def resolve(self, reference: bytes) -> Any:
        """The function that a reference stands for.

        Raises:
            DecodeError: it is forgotten, since it was defined anew so often, or its sender is gone.
        """
        _, owner, number = _REFERENCE.unpack(reference)
        return self.get(owner, number)

    def get(self, owner: int, number: int) -> Any:
        try:
            return self._received[owner, number]
        except KeyError:
            why = (
                f"it was forgotten when the connection with worker {owner} was lost"
                if owner in self.lost
                else f"it was defined anew {_VERSIONS_KEPT} times before this call of it was run"
            )
            raise DecodeError(f"definition {number} of worker {owner} is not known here any more; {why}") from None
