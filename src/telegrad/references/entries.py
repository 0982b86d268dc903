"""The entries of a worker's table of references.

Owned     a value of this worker, kept while a handle to it is here or another worker has credits for it
Held      a value of another worker, to which there are handles here
Arrival   the handles in a message that was read and not yet decoded
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RemoteError, RemoteTraceback, text_of
from ..primitives.futures import Future
from ..primitives.interrupts import finaliser, interruptible, is_interrupt

if TYPE_CHECKING:
    from ..runtime.pending import PendingCall

Task = Callable[[], None]


class Owned(msgspec.Struct, eq=False):
    """A value of this worker."""

    id: int
    owner: int
    handles: int = 0  # here, and messages that were read and not decoded yet
    credits: dict[int, int] = {}  # by worker, each above zero; its own: messages in flight to itself
    given: bool = False  # by RRef(value), and not the result of a call
    begun: bool = False  # the message that creates it has come
    is_set: bool = False
    value: Any = None
    error: Callable[[], BaseException] | None = None  # makes what its creation raised, anew for each reader
    waiting: list[Task] = []  # called when it is set; they keep it as a handle does

    def give_credit(self, worker: int) -> None:
        self.credits[worker] = self.credits.get(worker, 0) + 1

    def take_credits(self, worker: int, count: int) -> None:
        left = self.credits[worker] - count
        if left:
            self.credits[worker] = left
        else:
            del self.credits[worker]

    def result(self) -> Any:
        """The value; raises what its creation raised."""
        if self.error is not None:
            raise self.error()
        return self.value

    def complete(self, future: Future) -> None:
        if self.error is not None:
            future.fail(self.error, f"the creation of value {self.id}")
        else:
            future.set_result(self.value)


class Held(msgspec.Struct, eq=False):
    """A value of another worker."""

    id: int
    owner: int
    handles: int = 0  # here, on loan, messages that were read and not decoded yet, Holds that were not sent yet
    credits: int = 0  # to be given back
    confirmed: bool = False  # the owner keeps it for us
    is_orphan: bool = False  # the owner is gone, or cannot be told of it: no loan would ever be returned
    creation: PendingCall | None = None  # the call that creates it, at the worker that made it

    @property
    def is_being_created(self) -> bool:
        return self.creation is not None and not self.creation.done


Entry = Owned | Held


class Arrival:
    """Handles in a message that was read: they count until it was decoded, or dropped."""

    __slots__ = ("_entries", "_let_go")

    def __init__(self, entries: list[Entry], let_go: Callable[[Entry], None]) -> None:
        self._entries = entries
        self._let_go = let_go

    @finaliser
    def __del__(self) -> None:
        for entry in self._entries:
            self._let_go(entry)


def without_frames(error: BaseException, worker: str) -> Callable[[], BaseException]:
    """Makes a function that makes the same exception anew for each reader of a value. One that is kept would, once
    raised, keep the frames that it went through, and with them the handle that keeps the value."""
    text = "".join(traceback.format_exception(error))
    fallback = f"{type(error).__name__}: {text_of(error)}"
    error.__traceback__ = error.__cause__ = error.__context__ = None

    def make() -> BaseException:
        try:
            made: BaseException = interruptible(copy.copy, error)
        except BaseException as failed:
            if is_interrupt(failed):
                raise
            made = RemoteError(fallback)  # its constructor wants other arguments
        made.__cause__ = RemoteTraceback(worker, text)
        return made

    return make
