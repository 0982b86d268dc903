"""The state of a backward pass: an event in, what follows from it out. No threads, no I/O, no torch.

    Part          one worker's part: which Sends get gradients, what has arrived, how far it is
    BackwardPass  the root's view: who has yet to report, and how it ends

    root           BackwardPass ── Begin ──▶ every participant's Part
    participants   Part: gradients arrive, the engine runs ── Done ──▶ BackwardPass
    root           BackwardPass ── End ──▶ every Part: its gradients count, or (aborted) all is dropped

LocalPass and RootedPass are these with all else that a pass has on a worker. participant.py and engine.py drive them:
with a lock around each event, and they do what follows after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

import msgspec


class Next(Enum):
    """What follows from an event."""

    START = auto()  # run torch's engine for this part
    WAKE = auto()  # the engine may be waiting for this message
    REPORT = auto()  # tell the root: done
    COMMIT = auto()  # the gradients of this part count from now on
    DROP = auto()  # whatever the engine waits for will not come, and all that this part has gathered goes
    FINISH = auto()  # tell all others that the pass is done; backward() returns
    ABORT = auto()  # tell all others that the pass is over, and why; backward() raises


class Failed(msgspec.Struct, frozen=True):
    """As DROP; and tell the root why."""

    error: BaseException


class Late(msgspec.Struct, frozen=True):
    """It came after the end: drop it, and say so in the log."""

    what: str


START, WAKE, REPORT, COMMIT, DROP, FINISH, ABORT = Next  # an Enum looks up its members in Python code
Outcome = Next | Failed | Late | None


class State(Enum):
    EARLY = auto()  # gradients have come, Begin has not
    WAITING = auto()  # begun; what the engine needs first has not come
    RUNNING = auto()
    REPORTED = auto()  # done or failed here; the root has the last word
    FINISHED = auto()
    ABORTED = auto()


class Part(msgspec.Struct):
    """One worker's part in a pass. `is_root`: it also has roots of its own to start from."""

    is_root: bool = False
    state: State = State.EARLY
    order: tuple[int, ...] = ()  # the messages that will get gradients, in the order of their sending
    arrived: set[int] = msgspec.field(default_factory=set)
    missing: set[int] = msgspec.field(default_factory=set)  # of `order`: those that have not arrived
    is_over: bool = False  # FINISHED or ABORTED
    has_failed: bool = False  # and has said so

    def on_begin(self, messages: Iterable[int]) -> Outcome:
        if self.is_over:
            return Late("the begin of a pass")
        if self.state is not State.EARLY:
            return self.on_local_end(ProtocolViolationError("the pass was begun twice"))
        self.order = tuple(sorted(messages))
        self.missing = set(self.order)
        self.state = State.WAITING
        if self.arrived:
            unknown = self.arrived - self.missing
            if unknown:
                return self.on_local_end(_not_awaited(min(unknown)))
            self.missing -= self.arrived
        # Gradients are taken in the reverse of the order of sending, so the engine has nothing to do before the last
        # message has its own.
        if self.is_root or not self.order or self.order[-1] in self.arrived:
            self.state = State.RUNNING
            return START
        return None

    def on_gradients(self, message: int) -> Outcome:
        if self.is_over or self.state is State.REPORTED:
            return Late(f"the gradients of message {message}")
        if message in self.arrived:
            return self.on_local_end(ProtocolViolationError(f"the gradients of message {message} came twice"))
        if self.state is not State.EARLY:
            if message not in self.missing:
                return self.on_local_end(_not_awaited(message))
            self.missing.remove(message)
        self.arrived.add(message)
        if self.state is State.WAITING and message == self.order[-1]:
            self.state = State.RUNNING
            return START
        return WAKE if self.state is State.RUNNING else None

    def on_local_end(self, error: BaseException | None = None) -> Outcome:
        """The engine is done here, or something went wrong here."""
        if self.is_over or self.has_failed or (self.state is State.REPORTED and error is None):
            return None
        self.state = State.REPORTED
        if error is None:
            return REPORT
        # Also after it has said that it is done: what it had sent last may not have left.
        self.has_failed = True
        return Failed(error)

    def on_lost(self, error: BaseException) -> Outcome:
        """A worker is gone that gradients come from. After the report all of them have come, and the root may have
        finished the pass already: what was reported as done must count then."""
        return None if self.state is State.REPORTED else self.on_local_end(error)

    def on_end(self, aborted: str) -> Outcome:
        """The root's last word; or the root is gone, or the context is."""
        if self.is_over:
            return None if aborted else Late("the end of a pass")
        self.is_over = True
        was, self.state = self.state, State.ABORTED
        if not aborted and was is State.REPORTED and not self.has_failed:
            self.state = State.FINISHED
            return COMMIT
        return DROP


class BackwardPass:
    """The root's view of a pass. Its own part reports like any other."""

    error: BaseException | None = None  # that backward() raises
    worker = -1  # where it happened
    is_over = False

    def __init__(self, root: int, participants: Iterable[int]) -> None:
        self._root = root
        self.others = tuple(sorted(set(participants) - {root}))  # the workers that take part beside the root
        self.missing = {root, *self.others}  # have not reported yet

    def on_report(self, worker: int, error: BaseException | None) -> Outcome:
        if self.is_over:
            return None if error is None else Late(f"the failure of worker {worker} ({error!r})")
        if error is not None:
            return self._fail(error, worker)
        self.missing.discard(worker)
        if self.missing:
            return None
        self.is_over = True
        return FINISH

    def on_lost(self, worker: int, error: BaseException) -> Outcome:
        """A worker is gone. It matters only if it takes part."""
        return None if self.is_over or worker not in self.others else self._fail(error, worker)

    def on_failure(self, error: BaseException) -> Outcome:
        """The deadline, the release of the context, the end of this worker."""
        return None if self.is_over else self._fail(error, self._root)

    def _fail(self, error: BaseException, worker: int) -> Outcome:
        self.is_over = True
        self.error, self.worker = error, worker
        return ABORT


class ProtocolViolationError(RuntimeError):
    """A message of a pass that no worker would send."""


def _not_awaited(message: int) -> ProtocolViolationError:
    return ProtocolViolationError(f"gradients came for message {message}, whose Send has no part in this pass here")
