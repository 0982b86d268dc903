"""References: the values that this worker keeps for others, and those of others that it refers to.

    Owned   a value of this worker, kept while a handle to it is here or another worker has credits for it
    Held    a value of another worker, to which there are handles here

A handle is what users have: an RRef (rref.py). Messages name the handles in them in their envelopes (Lent), so
they count from when a message is read, whether or not anybody ever decodes it.

# Note [credits]
Each time that a worker is given a handle its owner counts a credit for it. When the last handle there has gone
all of its credits go back in one message (Drop). Credits, and not just names: a handle may be in flight to a
worker while that worker gives up those it has.

    owner -> other    the owner counts a credit before it sends
    other -> owner    nothing is counted: the sender's Drop comes after the message, on the same connection
    other -> third    the sender keeps its own (a loan) until the owner has counted a credit for the third one, which
                      tells the owner (Hold); the owner tells the sender (Return). The third one keeps its handle
                      until it has sent the Hold, so its Drop never overtakes it
    creation          the message that creates a value stands for one credit of its sender, which the owner counts
                      when it reads it
    owner -> itself   as to another: the owner counts a credit of its own while the message is in flight, and the
                      message takes it over when it is read. The message that creates a value does the same

A message that uses a value names a handle to it, unless its sender waits for the answer and so keeps its own.
A worker that is gone has neither credits nor loans. A peer gives back no more than the credits that it has, and
ends no loans but those of its own values: anything else is logged, and changes nothing.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import (
    CallTimeoutError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    TelegradError,
    ValueGoneError,
    text_of,
)
from ..events import logger
from ..messages import Drop, Envelope, Hold, Kind, Lent, Return, sender_of
from ..primitives import clock, current
from ..primitives.futures import Future
from ..primitives.interrupts import finaliser, interruptible, is_interrupt
from ..primitives.waiter import Waiter

if TYPE_CHECKING:
    from ..runtime.pending import PendingCall

Task = Callable[[], None]
_TOMBSTONES = 10_000
_SOON = 2e-3  # seconds after which the owner hears that a handle has died, if no message went there meanwhile


class Owned:
    """A value of this worker."""

    __slots__ = ("begun", "credits", "error", "handles", "id", "is_set", "owner", "value", "waiting")

    def __init__(self, id: int, owner: int) -> None:
        self.id = id
        self.owner = owner
        self.handles = 0  # here, and messages that were read and not decoded yet
        self.credits: dict[int, int] = {}  # by worker, each above zero; its own: messages in flight to itself
        self.begun = False  # the message that creates it has come
        self.is_set = False
        self.value: Any = None
        # What was raised when it was to be created: made anew for everyone who asks.
        self.error: Callable[[], BaseException] | None = None
        self.waiting: list[Task] = []  # called when it is set; they keep it as a handle does


class Held:
    """A value of another worker."""

    __slots__ = ("confirmed", "creation", "credits", "handles", "id", "is_orphan", "owner")

    def __init__(self, id: int, owner: int) -> None:
        self.id = id
        self.owner = owner
        self.handles = 0  # here, on loan, messages that were read and not decoded yet, Holds that were not sent yet
        self.credits = 0  # to be given back
        self.confirmed = False  # the owner keeps it for us
        self.is_orphan = False  # the owner is gone, or cannot be told of it: no loan would ever be returned
        self.creation: PendingCall | None = None  # what creates it, at the worker that called for that


Entry = Owned | Held


class Host(Protocol):
    """What is needed of the worker."""

    def post(self, to: int, envelope: Envelope, body: Any, timeout: float | None, context: None) -> None: ...
    def submit(self, task: Task) -> None: ...
    def later(self, seconds: float, task: Task) -> Task: ...
    def new_message_id(self) -> int: ...
    def name_of(self, worker_id: int) -> str: ...


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


class References:
    """Of one worker."""

    def __init__(self, worker_id: int, name: str, host: Host) -> None:
        self.host = host
        self._id = worker_id
        self._name = name
        # Guards all below but the last two, and the counts of entries; held for a moment only. No value dies in it:
        # that runs users' code.
        self._lock = threading.RLock()
        self._owned: dict[int, Owned] = {}
        self._held: dict[int, Held] = {}
        self._loans: dict[int, tuple[Held, int]] = {}  # by number: what was lent, and to whom
        self._gone: OrderedDict[int, None] = OrderedDict()  # tombstones of values
        self._lost: set[int] = set()  # workers
        self._back: dict[int, list[tuple[int, int]]] = {}  # by owner: (value, credits) that are to go back
        # Written by finalisers, which must not lock:
        self._let_go: deque[Entry] = deque()  # each once for a handle that has died
        self._clearing = False
        self._clear_soon: Task | None = host.later(_SOON, self._clear)  # None after `close`

    def statistics(self) -> dict[str, int]:
        with self._lock:
            shared = [entry.credits for entry in self._owned.values() if entry.credits]
            return {
                "owned": len(self._owned),
                "shared": len(shared),  # of these: with handles on other workers
                "credits": sum(sum(credits.values()) for credits in shared),
                "held": len(self._held),
                "unconfirmed": sum(not held.confirmed and held.creation is None for held in self._held.values()),
                "being_created": sum(_is_being_created(held) for held in self._held.values()),
                "on_loan": len(self._loans),
            }

    def kept_for_others(self) -> dict[int, list[str]]:
        """The values that other workers have handles to, and who these are."""
        with self._lock:
            found = {entry.id: list(entry.credits) for entry in self._owned.values() if entry.credits}
        return {id: [self.host.name_of(worker) for worker in workers] for id, workers in found.items()}

    # -- handles here ----------------------------------------------------------------------------------

    def own(self, value: Any) -> Owned:
        """A value of this worker, with one handle."""
        entry = Owned(self.host.new_message_id(), self._id)
        entry.begun = entry.is_set = True
        entry.value = value
        entry.handles = 1
        with self._lock:
            self._owned[entry.id] = entry
        return entry

    def new(self, owner: int) -> Entry:
        """A value that a worker is about to be told to create, with one handle."""
        id = self.host.new_message_id()
        entry = Owned(id, owner) if owner == self._id else Held(id, owner)
        entry.handles = 1
        with self._lock:
            if isinstance(entry, Owned):
                entry.credits[owner] = 1  # the message's own, until it is read
                self._owned[id] = entry
            else:
                entry.credits = 1  # which the owner counts when it is told to create it
                self._held[id] = entry
        return entry

    def forget(self, entry: Entry) -> None:
        """The message that was to create it was not sent."""
        with self._lock:
            self._owned.pop(entry.id, None)
            self._held.pop(entry.id, None)

    def take(self, id: int, owner: int) -> Entry:
        """One more handle to a value whose handle was in a message."""
        with self._lock:
            entry: Entry | None = self._owned.get(id) if owner == self._id else self._held.get(id)
            if entry is None:
                raise self._gone_error(id, self.host.name_of(owner))
            entry.handles += 1
            return entry

    def let_go(self, entry: Entry) -> None:
        """A handle has died. From finalisers: on any thread, under any lock."""
        self._let_go.append(entry)
        clear_soon = self._clear_soon
        if not self._clearing and clear_soon is not None:
            self._clearing = True
            clear_soon()

    @property
    def unsettled(self) -> bool:
        """Whether handles have died of which others may have to hear."""
        return bool(self._let_go or self._back)

    def _clear(self) -> None:
        self._clearing = False
        dead: list[Owned] = []
        with self._lock:
            self._count_locked(dead)
            back, self._back = self._back, {}
        for owner, credits in back.items():
            self._tell(owner, Kind.DROP, Drop(tuple(credits)))

    def _count_locked(self, dead: list[Owned]) -> None:
        while self._let_go:
            entry = self._let_go.popleft()
            entry.handles -= 1
            if isinstance(entry, Owned):
                dead += self._unused_locked(entry)
            elif entry.handles == 0 and self._held.get(entry.id) is entry:
                del self._held[entry.id]
                self._back.setdefault(entry.owner, []).append((entry.id, entry.credits))

    def let_all_go(self) -> None:
        """As if all handles here had died. Those that are still there refer to nothing any more."""
        dead: list[Owned] = []
        with self._lock:
            for held in self._held.values():
                self._back.setdefault(held.owner, []).append((held.id, held.credits))
            self._held.clear()
            for owned in list(self._owned.values()):
                owned.handles = 0
                dead += self._unused_locked(owned)
        self._clear()

    def _unused_locked(self, entry: Owned) -> Iterable[Owned]:
        """The entry, if nothing needs it any more: it is taken out."""
        if entry.handles > 0 or entry.credits or entry.waiting or self._owned.get(entry.id) is not entry:
            return ()
        del self._owned[entry.id]
        if entry.begun:  # else the message that creates it may still come
            self._gone[entry.id] = None
            if len(self._gone) > _TOMBSTONES:
                self._gone.popitem(last=False)
        return (entry,)

    # -- values here -----------------------------------------------------------------------------------

    def set_value(self, id: int, value: Any) -> None:
        """It was created; or is not needed any more."""
        self._set(id, value, None)

    def set_error(self, id: int, error: BaseException) -> None:
        """It could not be created: whoever asks for it hears why."""
        self._set(id, None, _without_frames(error, self._name))

    def _set(self, id: int, value: Any, error: Callable[[], BaseException] | None) -> None:
        dead: list[Owned] = []
        with self._lock:
            entry = self._owned.get(id)
            if entry is None or entry.is_set:
                return
            entry.value, entry.error, entry.is_set = value, error, True
            waiting, entry.waiting = entry.waiting, []
            dead += self._unused_locked(entry)
        for task in waiting:
            task()

    def value_of(self, entry: Owned, timeout: float | None) -> Any:
        """The value, once it was created. Raises what was raised instead.

        Raises:
            CallTimeoutError: it is not there within `timeout` seconds.
        """
        if not entry.is_set and (waiter := self._wait_for(entry)) is not None:
            self._sleep(entry, waiter, timeout)
        return _result(entry)

    def find(self, id: int, timeout: float | None) -> Any:
        """For another worker: the value, once it was created."""
        with self._lock:
            entry = self._find_locked(id)
            waiter = self._wait_for(entry)
        if waiter is not None:
            self._sleep(entry, waiter, timeout)
        return _result(entry)

    def fetch(self, id: int) -> Any:
        """For another worker: the value, or its future while it is not there. Raises what was raised instead."""
        with self._lock:
            entry = self._find_locked(id)
            if not entry.is_set:
                future = Future(_wait_no_more, logger.debug)
                entry.waiting.append(partial(_complete, future, entry))
                return future
        return _result(entry)

    def _wait_for(self, entry: Owned) -> Waiter | None:
        """Done when the value is set; None if it is."""
        with self._lock:
            if entry.is_set:
                return None
            waiter = Waiter()
            entry.waiting.append(waiter.set_done)
            return waiter

    def _sleep(self, entry: Owned, waiter: Waiter, timeout: float | None) -> None:
        if current.thread.relieve is not None:
            current.thread.relieve()
        deadline = None if timeout is None else clock.now() + timeout
        try:
            while not waiter.done:
                left = None if deadline is None else deadline - clock.now()
                if left is not None and left <= 0:
                    raise CallTimeoutError(
                        f"the value {entry.id} of worker {self._name!r} was not created within {timeout} s: RPC "
                        f"ran for more than set timeout ({int((timeout or 0) * 1000)} ms)"
                    )
                interruptible(waiter.sleep, left)
        finally:
            if not waiter.done:
                self._wait_no_longer(entry, waiter)

    def _wait_no_longer(self, entry: Owned, waiter: Waiter) -> None:
        dead: list[Owned] = []
        with self._lock:
            if waiter.set_done in entry.waiting:
                entry.waiting.remove(waiter.set_done)
            dead += self._unused_locked(entry)

    def _find_locked(self, id: int) -> Owned:
        entry = self._live_locked(id)
        if entry is None:
            raise self._gone_error(id, self._name)
        return entry

    def _gone_error(self, id: int, owner: str) -> ValueGoneError:
        return ValueGoneError(
            f"the value {id} of worker {owner!r} is gone: the last handle to it has gone, or a worker that had one"
        )

    def _live_locked(self, id: int) -> Owned | None:
        """A value of this worker, which may still have to be created; None if it is gone."""
        entry = self._owned.get(id)
        if entry is None and id not in self._gone:
            creator = sender_of(id)
            if creator != self._id and creator not in self._lost:
                entry = self._expect_locked(id)
        return entry

    def _expect_locked(self, id: int) -> Owned:
        """A value that another worker has created; the message that says so may still be in flight."""
        entry = self._owned[id] = Owned(id, self._id)
        return entry

    # -- handles in messages ---------------------------------------------------------------------------

    def outgoing(self, envelope: Envelope, entries: Iterable[Entry], to: int) -> None:
        """Notes in the envelope what the message lends, each of these once; and what is to go back there."""
        lent = []
        dead: list[Owned] = []
        with self._lock:
            self._count_locked(dead)
            back = self._back.pop(to, ())
            for entry in {entry.id: entry for entry in entries}.values():
                loan = 0
                if isinstance(entry, Owned):
                    _give_credit(entry, to)
                elif to != entry.owner and not entry.is_orphan:
                    loan = self.host.new_message_id()
                    entry.handles += 1
                    self._loans[loan] = (entry, to)
                lent.append(Lent(entry.id, entry.owner, loan))
        if dead:
            self.host.submit(dead.clear)  # the end of a value may run users' code
        envelope.lent, envelope.dropped = tuple(lent), tuple(back)

    def not_written(self, envelope: Envelope, to: int) -> None:
        """Takes back what a message that was not sent has lent, and has the credits in it go back with another."""
        dead: list[Owned] = []
        with self._lock:
            if envelope.dropped:
                self._back.setdefault(to, []).extend(envelope.dropped)
            for lent in envelope.lent:
                if lent.owner == self._id:
                    owned = self._owned.get(lent.rref)
                    if owned is not None and to in owned.credits:  # else the loss of `to` has taken it
                        _take_credits(owned, to, 1)
                        dead += self._unused_locked(owned)
                elif lent.loan:
                    self._end_loan_locked(lent.loan)
        clear_soon = self._clear_soon
        if envelope.dropped and clear_soon is not None:
            clear_soon()

    def incoming(self, envelope: Envelope, sender: int) -> Arrival:
        """Counts what a message creates, lends and gives back. While reading: never blocks, and runs no user code.

        Raises:
            ProtocolError: it creates a value under an id of another worker than its sender.
        """
        arrived: list[Entry] = []
        creates = envelope.creates
        if creates and sender_of(creates) != sender:
            raise ProtocolError(
                f"worker {self.host.name_of(sender)!r} (id {sender}) creates the value {creates}, an id that only "
                f"worker {sender_of(creates)} gives"
            )
        if envelope.dropped and (task := self._return_credits(sender, envelope.dropped)) is not None:
            self.host.submit(task)
        holds: list[tuple[Held, Hold]] = []
        with self._lock:
            if creates:
                created = self._owned.get(creates) or self._expect_locked(creates)
                created.begun = True
                if sender == self._id:
                    arrived.append(self._arrive_locked(created, sender))
                else:
                    _give_credit(created, sender)
            for lent in envelope.lent:
                if lent.owner == self._id:
                    owned = self._live_locked(lent.rref)
                    if owned is not None:  # else it went with the worker that had lent it; decoding says so
                        arrived.append(self._arrive_locked(owned, sender))
                    continue
                held = self._held.get(lent.rref)
                if held is None:
                    held = self._held[lent.rref] = Held(lent.rref, lent.owner)
                    held.is_orphan = lent.owner in self._lost
                held.handles += 1
                held.credits += 1
                held.confirmed = True  # by the owner, or by its credit for the worker that has lent it
                if lent.loan:
                    held.handles += 1
                    holds.append((held, Hold(lent.rref, lent.loan)))
                arrived.append(held)
        for held, hold in holds:
            self.host.submit(partial(self._hold, held, hold))
        return Arrival(arrived, self.let_go)

    def _arrive_locked(self, entry: Owned, sender: int) -> Owned:
        """A message with a handle to a value of this worker was read: it counts as one here."""
        entry.handles += 1
        if sender == self._id and sender in entry.credits:
            _take_credits(entry, sender, 1)
        return entry

    def _hold(self, held: Held, hold: Hold) -> None:
        try:
            if not self._tell(held.owner, Kind.HOLD, hold):
                with self._lock:
                    held.is_orphan = True
                    self._end_loans_locked(held.owner)
        finally:
            self.let_go(held)

    def _end_loans_locked(self, lost: int) -> None:
        """Ends the loans to a worker that is gone, and those that no owner will return."""
        for loan, (held, to) in list(self._loans.items()):
            if to == lost or held.is_orphan:
                self._end_loan_locked(loan)

    def on_message(self, peer: int, body: Any) -> Task | None:
        """Another worker tells of its handles. While reading: what takes longer is returned."""
        match body:
            case Hold(id, loan):
                return self._on_hold(peer, id, loan)
            case Drop(credits):
                return self._return_credits(peer, credits)
            case Return(loan, holder):
                self._on_return(peer, loan, holder)
        return None

    def _on_hold(self, peer: int, id: int, loan: int) -> Task | None:
        lender = sender_of(loan)
        if lender == self._id:  # an owner lends its values without loans
            logger.warning(
                "worker %r says that worker %r, the owner, has lent it the value %d: ignored",
                self.host.name_of(peer), self._name, id,
            )  # fmt: skip
            return None
        with self._lock:
            entry = self._live_locked(id)
            if entry is not None:
                _give_credit(entry, peer)
        return partial(self._return_loan, lender, Return(loan, peer))

    def _return_loan(self, lender: int, message: Return) -> None:
        self._tell(lender, Kind.RETURN, message)

    def _return_credits(self, peer: int, credits: Iterable[tuple[int, int]]) -> Task | None:
        """A peer gives credits back."""
        dead: list[Owned] = []
        refused: list[tuple[int, int, int]] = []
        with self._lock:
            for id, count in credits:
                entry = self._owned.get(id)
                if entry is None:
                    continue  # gone before
                has = entry.credits.get(peer, 0)
                if 0 < count <= has:
                    _take_credits(entry, peer, count)
                    dead += self._unused_locked(entry)
                else:
                    refused.append((id, count, has))
        for id, count, has in refused:
            logger.warning(
                "worker %r (id %d) gives back %d credits for the value %d of worker %r, of which it has %d: ignored",
                self.host.name_of(peer), peer, count, id, self._name, has,
            )  # fmt: skip
        # Not on a thread that reads: the end of a value may run users' code.
        return dead.clear if dead else None

    def _on_return(self, peer: int, loan: int, holder: int) -> None:
        """The owner of a lent value has counted a credit for the worker that it was lent to."""
        with self._lock:
            found = self._loans.get(loan)
            if found is None:
                return  # it has ended with one of the two
            entry, to = found
            is_true = peer == entry.owner and holder == to
            if is_true:
                self._end_loan_locked(loan)
        if not is_true:
            logger.warning(
                "worker %r (id %d) ends the loan of value %d to worker %d, as only its owner, worker %d, may: ignored",
                self.host.name_of(peer), peer, entry.id, to, entry.owner,
            )  # fmt: skip

    def _end_loan_locked(self, loan: int) -> None:
        entry, _ = self._loans.pop(loan, (None, 0))
        if entry is not None:
            self.let_go(entry)

    def _tell(self, worker: int, kind: Kind, body: Hold | Drop | Return) -> bool:
        """Sends a one-way message; False if the worker is gone."""
        try:
            if worker == self._id:
                self.on_message(worker, body)
            else:
                self.host.post(worker, Envelope(kind, self.host.new_message_id()), body, None, None)
        except TelegradError as error:
            logger.debug("worker %d was not told %s: %s", worker, body, error)
            return False
        return True

    # -- ends ------------------------------------------------------------------------------------------

    def on_lost(self, peer: int, name: str) -> None:
        """A worker is gone, with its handles."""
        dead: list[Owned] = []
        never: list[int] = []
        with self._lock:
            self._lost.add(peer)
            for entry in list(self._owned.values()):
                if not entry.begun and sender_of(entry.id) == peer:
                    never.append(entry.id)
                if entry.credits.pop(peer, 0):
                    dead += self._unused_locked(entry)
            for held in self._held.values():
                held.is_orphan = held.is_orphan or held.owner == peer
            self._end_loans_locked(peer)
        for id in never:
            self.set_error(id, PeerLostError(f"worker {name!r}, which was to have it created, is gone"))

    def close(self) -> None:
        """Ends with the worker: those who wait for a value hear of it, and handles die without a word."""
        self._clear_soon = None  # RRefs may outlive the interpreter's modules
        with self._lock:
            owned = list(self._owned.values())
            self._owned.clear()
            self._held.clear()
            self._loans.clear()
        for entry in owned:
            if not entry.is_set:
                text = f"worker {self._name!r} was shut down before the value was created"
                entry.error = partial(PeerLostError, text)
                entry.is_set = True
                for task in entry.waiting:
                    task()


def _give_credit(entry: Owned, worker: int) -> None:
    entry.credits[worker] = entry.credits.get(worker, 0) + 1


def _take_credits(entry: Owned, worker: int, count: int) -> None:
    left = entry.credits[worker] - count
    if left:
        entry.credits[worker] = left
    else:
        del entry.credits[worker]


def _is_being_created(held: Held) -> bool:
    return held.creation is not None and not held.creation.done


def _result(entry: Owned) -> Any:
    if entry.error is not None:
        raise entry.error()
    return entry.value


def _without_frames(error: BaseException, worker: str) -> Callable[[], BaseException]:
    """Makes the same exception for each who asks. One that is kept would, once raised, keep the frames that it went
    through, and with them the handle that keeps the value."""
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


def _wait_no_more(call: PendingCall, timeout: float | None) -> None:
    """Nobody can help: it is completed by whoever creates the value."""


def _complete(future: Future, entry: Owned) -> None:
    if entry.error is not None:
        future.fail(entry.error, f"the creation of value {entry.id}")
    else:
        future.set_result(entry.value)
