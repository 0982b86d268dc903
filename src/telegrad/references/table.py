"""References: the values that this worker keeps for others, and those of others that it refers to.

A handle is what users have: an RRef (rref.py). Messages name the handles in them in their envelopes (Lent), so they
count from when a message is read, whether or not it is ever decoded.

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

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..errors import PeerLostError, ProtocolError, TelegradError
from ..events import log_by, logger
from ..gradients.host import Host
from ..messages import MOST_ENDS, Drop, Envelope, Hold, Kind, Lent, Return, sender_of
from .entries import Arrival, Entry, Held, Owned, Task
from .owned_values import OwnedValues

_SOON = 2e-3  # seconds after which the owner hears that a handle has died, if no message went there meanwhile


class References(OwnedValues):
    """The table of one worker: the values that it owns, those that it holds, and the handles in messages."""

    def __init__(self, worker_id: int, name: str, host: Host) -> None:
        super().__init__(worker_id, name, host)
        # Guarded by the lock:
        self._held: dict[int, Held] = {}
        self._loans: dict[int, tuple[Held, int]] = {}  # by number: what was lent, and to whom
        self.to_go_back: dict[int, list[tuple[int, int]]] = {}  # by owner: (value, credits) that are to go back
        # Written by finalisers, which must not lock:
        self.let_go_here: deque[Entry] = deque()  # each once for a handle that has died, and is not yet counted
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
                "being_created": sum(held.is_being_created for held in self._held.values()),
                "on_loan": len(self._loans),
            }

    # -- handles here ----------------------------------------------------------------------------------

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
        self.let_go_here.append(entry)
        clear_soon = self._clear_soon
        if not self._clearing and clear_soon is not None:
            self._clearing = True
            clear_soon()

    def _clear(self) -> None:
        self._clearing = False
        dead: list[Owned] = []
        with self._lock:
            self._count_locked(dead)
            back, self.to_go_back = self.to_go_back, {}
        for owner, credits in back.items():
            for start in range(0, len(credits), MOST_ENDS):
                self._tell(owner, Kind.DROP, Drop(tuple(credits[start : start + MOST_ENDS])))

    def _count_locked(self, dead: list[Owned]) -> None:
        while self.let_go_here:
            entry = self.let_go_here.popleft()
            entry.handles -= 1
            if isinstance(entry, Owned):
                dead += self._unused_locked(entry)
            elif entry.handles == 0 and self._held.get(entry.id) is entry:
                del self._held[entry.id]
                self.to_go_back.setdefault(entry.owner, []).append((entry.id, entry.credits))

    def let_all_go(self) -> None:
        """As if all handles here had died. Those that are still there refer to nothing any more."""
        dead: list[Owned] = []
        with self._lock:
            for held in self._held.values():
                self.to_go_back.setdefault(held.owner, []).append((held.id, held.credits))
            self._held.clear()
            for owned in list(self._owned.values()):
                owned.handles = 0
                dead += self._unused_locked(owned)
        self._clear()

    # -- handles in messages ---------------------------------------------------------------------------

    def outgoing(self, envelope: Envelope, entries: Sequence[Entry], to: int) -> None:
        """Notes in the envelope what the message lends, each of these once; and what is to go back there."""
        lent = []
        dead: list[Owned] = []
        with self._lock:
            if self.let_go_here:
                self._count_locked(dead)
            back: Sequence[tuple[int, int]] = ()
            if len(self.to_go_back.get(to, ())) <= MOST_ENDS:  # else _clear() is about to send them by themselves
                back = self.to_go_back.pop(to, ())
            for entry in {entry.id: entry for entry in entries}.values() if entries else ():
                loan = 0
                if isinstance(entry, Owned):
                    entry.give_credit(to)
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
                self.to_go_back.setdefault(to, []).extend(envelope.dropped)
            for lent in envelope.lent:
                if lent.owner == self._id:
                    owned = self._owned.get(lent.rref)
                    if owned is not None and to in owned.credits:  # else the loss of `to` has taken it
                        owned.take_credits(to, 1)
                        dead += self._unused_locked(owned)
                elif lent.loan:
                    self._end_loan_locked(lent.loan)
        clear_soon = self._clear_soon
        if envelope.dropped and clear_soon is not None:
            clear_soon()
        envelope.lent = envelope.dropped = ()  # it may be sent again

    def incoming(self, envelope: Envelope, sender: int) -> tuple[Arrival, Task | None]:
        """Counts what a message creates, lends and gives back. While reading: never blocks, and runs no user code. The
        task does, where values are not needed any more.

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
        task = self._return_credits(sender, envelope.dropped) if envelope.dropped else None
        holds: list[tuple[Held, Hold]] = []
        with self._lock:
            if creates:
                created = self._owned.get(creates) or self._expect_locked(creates)
                created.begun = True
                if sender == self._id:
                    arrived.append(self._arrive_locked(created, sender))
                else:
                    created.give_credit(sender)
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
        return Arrival(arrived, self.let_go), task

    def _arrive_locked(self, entry: Owned, sender: int) -> Owned:
        """A message with a handle to a value of this worker was read: it counts as one here."""
        entry.handles += 1
        if sender == self._id and sender in entry.credits:
            entry.take_credits(sender, 1)
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
            log_by(
                self.host.submit, logging.WARNING,
                "worker %r says that worker %r, the owner, has lent it the value %d: ignored",
                self.host.name_of(peer), self._name, id,
            )  # fmt: skip
            return None
        with self._lock:
            entry = self._live_locked(id)
            if entry is not None:
                entry.give_credit(peer)
        return partial(self._return_loan, lender, Return(loan, peer))

    def _return_loan(self, lender: int, message: Return) -> None:
        self._tell(lender, Kind.RETURN, message)

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
            log_by(
                self.host.submit, logging.WARNING,
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
            logger.debug("worker %d was not told %s: %s", worker, body, str(error))
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
        """Ends with the worker: handles die without a word."""
        self._clear_soon = None  # RRefs may outlive the interpreter's modules
        self._close_values()
        with self._lock:
            self._held.clear()
            self._loans.clear()
