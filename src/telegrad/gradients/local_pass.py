"""LocalPass: one worker's part of one pass, its state, and what has arrived for it.

Threads that read bring messages (participant.py); torch's engine works on it on another thread (engine_call.py).

# Note [what a dropped part leaves]
A part that fails or is dropped may be the last to hold gradients, messages and what was sent: gigabytes, and tensors
whose end runs users' code. A thread that reads drops none of it. It takes the part out of the table, so that what comes
later finds the pass over, and the task that it returns holds the part and what has left it, until it runs elsewhere.
"""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec

from ..errors import GradientError
from ..messages import Begin, Envelope
from ..primitives import clock
from ..primitives.waiter import Waiter
from .backward_pass import Outcome, Part, State
from .contexts import Context, Contexts, Sent
from .diagnosis import MOST_DUE, Awaited, PartState
from .leaves import GradientTable
from .local_graph import NOTHING, Node, Reach
from .outbox import Gradient, Outbox


class Roots(msgspec.Struct, eq=False, frozen=True):
    """The engine's starts at the worker that called backward() or grad()."""

    tensors: Sequence[Any] = ()  # or edges
    gradients: Sequence[Gradient] = ()
    leaves: Sequence[Node] = ()  # that they lead to, and no Send does
    checkpoints: Sequence[Node] = ()
    reach: Reach = NOTHING
    inputs: Sequence[Any] | None = None  # of grad(): what to return the gradients of
    accumulates: bool = False  # these go to `.grad` instead


_NO_ROOTS = Roots()

_LONGEST_TURN = 60.0  # seconds; of another pass with a leaf, where there is no deadline
_LOOK = 0.2  # seconds, after which a thread that waits for such a turn looks whether its own pass goes on


class InterruptedPassError(GradientError):
    """Inside the engine: the pass is over, and what is waited for will not come."""


class LatePassError(InterruptedPassError):
    """Inside the engine: the time of the pass is over."""


class Arrived(msgspec.Struct, eq=False):
    """Gradients as they were read."""

    envelope: Envelope
    frames: Any
    messages: tuple[int, ...]  # whose gradients these are


class LocalPass(Part, eq=False, kw_only=True):
    """One worker's part in one pass: its state, what has arrived for it, and what came of it."""

    pass_id: int
    since: float = 0.0  # when the first message of it came, if it was begun elsewhere
    # Guards the state (see Part) and the four below. Threads that read take it: held for a moment only.
    lock: Any = msgspec.field(default_factory=RLock)
    undecoded: dict[int, Arrived] = msgspec.field(default_factory=dict)  # by message: its gradients
    waiters: dict[int, Waiter] = msgspec.field(default_factory=dict)  # by message: what the engine waits for
    outboxes: dict[int, Outbox] = msgspec.field(default_factory=dict)  # by worker
    interrupted: str = ""
    device_maps: dict[int, dict[str, str]] = msgspec.field(
        default_factory=dict
    )  # by received message: for the way back
    settled: Waiter = msgspec.field(default_factory=Waiter)  # done when the root has said the last word
    # Set before the engine starts, and never after:
    context: Context | None = None
    begin: Begin | None = None
    sent: dict[int, Sent] = msgspec.field(default_factory=dict)  # by id: the tensors that will get gradients
    messages: dict[int, Sent] = msgspec.field(default_factory=dict)  # one of these for each message
    roots: Roots = _NO_ROOTS
    deadline: float | None = None
    # At the root of a plain backward(): how many seconds it waits before it asks whether the pass moves elsewhere.
    patience: float | None = None
    moves: Callable[[Callable[[int], PartState]], bool] | None = None
    # At the root: from when on, and how, others are asked what they await, should the pass be late. None: they were.
    asks_at: float = 0.0
    ask: Callable[[Callable[[int], PartState]], object] | None = None
    held_up: str = ""  # by whom
    depth: int = 1
    on_own_thread: bool = False  # on the thread that has called backward(), whose modes hold already
    turn: Any = None  # of that thread with the read lease
    # Left by the engine call:
    results: tuple[Gradient, ...] = ()  # of grad()
    committing: Any = msgspec.field(default_factory=RLock)  # guards the two below
    gathering: Callable[[], GradientTable] | None = None  # makes `gradients` of what the engine has returned
    gradients: GradientTable | None = None
    not_added: Exception | None = None  # at the root: what was raised when they were added up

    @property
    def adds_to_grad(self) -> bool:
        """Whether its gradients go to `.grad`."""
        return self.begin is not None and self.begin.into_grad and self.begin.wanted is None

    def start(self, contexts: Contexts) -> Outcome:
        """Looks up the tensors that will get gradients, and begins."""
        context, begin = self.context, self.begin
        assert context is not None
        assert begin is not None
        all_sent: dict[int, Sent] = {}
        messages: dict[int, Sent] = {}
        try:
            for id in begin.sends:
                sent = all_sent[id] = context.sends.get(id) or contexts.find_sent(id)
                messages[sent.message] = sent
        except GradientError as error:
            with self.lock:
                return self.on_local_end(error)
        with self.lock:
            self.sent, self.messages = all_sent, messages
            return self.on_begin(messages)

    def gather(self) -> None:
        """Sees to it that what the engine has returned is in `gradients`. Any number of times."""
        with self.committing:
            if self.gathering is not None:
                self.gradients, self.gathering = self.gathering(), None

    def wait_until(self) -> float | None:
        """Says until when to wait that begins now."""
        until = self.deadline if self.ask is None else self.asks_at
        if self.patience is None:
            return until
        patient = clock.now() + self.patience
        return patient if until is None else min(patient, until)

    def goes_on(self) -> bool:
        """Says, after a wait that was in vain, whether to wait again."""
        now = clock.now()
        if self.interrupted or (self.deadline is not None and now >= self.deadline):
            return False
        if self.ask is not None and now >= self.asks_at:
            ask, self.ask = self.ask, None
            ask(self.describe)
            return True
        return self.moves is not None and self.moves(self.describe)

    def take(self, lock: Any, held_by: str) -> None:
        """Takes a lock that another pass holds while it runs users' code.

        Raises:
            InterruptedPassError: this pass is over meanwhile.
            LatePassError: its time is.
            GradientError: it has no time limit, and the other one did not give the lock back within a minute.
        """
        until = clock.now() + _LONGEST_TURN if self.deadline is None else self.deadline
        while not lock.acquire(timeout=max(0.0, min(_LOOK, until - clock.now()))):
            if self.interrupted:
                raise InterruptedPassError(f"the pass was ended: {self.interrupted}")
            if clock.now() < until:
                continue
            if self.deadline is None:
                raise GradientError(f"{held_by}, for over {_LONGEST_TURN:.0f} s")
            self.held_up = held_by
            raise LatePassError(held_by)

    def interrupt(self, worker_id: int, reason: str) -> list[Any]:
        """Ends the engine's waiting. Returns what was kept for it: see Note [what a dropped part leaves]."""
        with self.lock:
            if not self.interrupted and self.context is not None:
                self.context.failed = self.describe(worker_id)
            self.interrupted = self.interrupted or reason
            waiters = list(self.waiters.values())
            self.waiters.clear()
            left = [*self.undecoded.values(), *self.outboxes.values()]
            self.undecoded.clear()
            self.outboxes.clear()
        for waiter in waiters:
            waiter.set_done()
        return left

    def describe(self, worker_id: int) -> PartState:
        """Says what it awaits now."""
        with self.lock:
            receivers = {message: sent.to for message, sent in self.messages.items()}
            holding_up = list(self.waiters)
            if not self.is_root and self.order and self.order[-1] not in self.arrived:
                holding_up = [self.order[-1]]  # the engine would have nothing to do, and has not started
            due = (m for m in reversed(self.order) if m not in self.arrived and m not in holding_up)
            return PartState(
                worker_id,
                self.pass_id,
                () if self.begin is None else self.begin.sends,
                tuple([Awaited(message, receivers.get(message, -1)) for message in holding_up]),
                tuple([Awaited(message, receivers.get(message, -1)) for message in islice(due, MOST_DUE)]),
                is_done=self.state in (State.REPORTED, State.FINISHED) and not self.has_failed,
                has_failed=self.has_failed,
                is_over=self.is_over,
            )
