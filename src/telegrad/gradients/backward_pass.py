"""The state of a backward pass: events in, instructions out. No threads, no I/O, no torch.

    Part          one worker's part: which Sends get gradients, what has arrived, how far it is
    BackwardPass  the root's view: who has yet to report, and how it ends

    root           BackwardPass ── Begin ──▶ every participant's Part
    participants   Part: gradients arrive, the engine runs ── Done ──▶ BackwardPass
    root           BackwardPass ── End ──▶ every Part: its gradients count, or (aborted) all is dropped

engine.py and participant.py drive them: with a lock around each event, and they carry the instructions out after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

import msgspec

from ..errors import text_of


class Start(msgspec.Struct, frozen=True):
    """Run torch's engine for this part."""


class Wake(msgspec.Struct, frozen=True):
    """The engine may be waiting for this Send."""

    send: int


class Interrupt(msgspec.Struct, frozen=True):
    """Whatever the engine waits for will not come."""


class Report(msgspec.Struct, frozen=True):
    """Tell the root: done, or failed."""

    error: BaseException | None


class Commit(msgspec.Struct, frozen=True):
    """The gradients of this part count from now on."""


class Discard(msgspec.Struct, frozen=True):
    """All that this part has gathered goes."""


class Late(msgspec.Struct, frozen=True):
    """It came after the end: drop it, and say so in the log."""

    what: str


class Finish(msgspec.Struct, frozen=True):
    """Tell these workers that the pass is done."""

    workers: tuple[int, ...]


class Abort(msgspec.Struct, frozen=True):
    """Tell these workers that the pass is over, and why."""

    workers: tuple[int, ...]
    reason: str


class Complete(msgspec.Struct, frozen=True):
    """backward() returns, or raises this."""

    error: BaseException | None
    worker: int = -1  # where it happened


_START, _INTERRUPT, _COMMIT, _DISCARD, _DONE = Start(), Interrupt(), Commit(), Discard(), Report(None)

PartInstruction = Start | Wake | Interrupt | Report | Commit | Discard | Late
RootInstruction = Finish | Abort | Complete | Late


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
    sends: tuple[int, ...] = ()  # that will get gradients, in the order of their sending
    arrived: set[int] = msgspec.field(default_factory=set)
    missing: set[int] = msgspec.field(default_factory=set)  # of `sends`: those that have not arrived
    is_over: bool = False  # FINISHED or ABORTED
    has_failed: bool = False  # and has said so

    def on_begin(self, sends: Iterable[int]) -> list[PartInstruction]:
        if self.is_over:
            return [Late("the begin of a pass")]
        if self.state is not State.EARLY:
            return self.on_local_end(ProtocolViolationError("the pass was begun twice"))
        self.sends = tuple(sorted(sends))
        self.missing = set(self.sends)
        self.state = State.WAITING
        if self.arrived:
            unknown = self.arrived - self.missing
            if unknown:
                return self.on_local_end(_not_awaited(min(unknown)))
            self.missing -= self.arrived
        return self._start_if_ready()

    def _start_if_ready(self) -> list[PartInstruction]:
        # Gradients are taken in the reverse of the order of sending, so the engine has nothing to do before the last
        # Send has its own.
        if self.is_root or not self.sends or self.sends[-1] in self.arrived:
            self.state = State.RUNNING
            return [_START]
        return []

    def on_gradients(self, send: int) -> list[PartInstruction]:
        if self.is_over or self.state is State.REPORTED:
            return [Late(f"the gradients of message {send}")]
        if send in self.arrived:
            return self.on_local_end(ProtocolViolationError(f"the gradients of message {send} came twice"))
        if self.state is not State.EARLY:
            if send not in self.missing:
                return self.on_local_end(_not_awaited(send))
            self.missing.remove(send)
        self.arrived.add(send)
        if self.state is State.WAITING:
            return self._start_if_ready()
        return [Wake(send)] if self.state is State.RUNNING else []

    def on_local_end(self, error: BaseException | None = None) -> list[PartInstruction]:
        """The engine is done here, or something went wrong here."""
        if self.is_over or self.has_failed or (self.state is State.REPORTED and error is None):
            return []
        self.state = State.REPORTED
        if error is None:
            return [_DONE]
        # Also after it has said that it is done: what it had sent last may not have left.
        self.has_failed = True
        return [_INTERRUPT, _DISCARD, Report(error)]

    def on_lost(self, error: BaseException) -> list[PartInstruction]:
        """A worker is gone that gradients come from. After the report all of them have come, and the root may have
        finished the pass already: what was reported as done must count then."""
        return [] if self.state is State.REPORTED else self.on_local_end(error)

    def on_end(self, aborted: str) -> list[PartInstruction]:
        """The root's last word; or the root is gone, or the context is."""
        if self.is_over:
            return [] if aborted else [Late("the end of a pass")]
        self.is_over = True
        was, self.state = self.state, State.ABORTED
        if not aborted and was is State.REPORTED and not self.has_failed:
            self.state = State.FINISHED
            return [_COMMIT]
        return [_INTERRUPT, _DISCARD]


class BackwardPass:
    """The root's view of a pass. Its own part reports like any other."""

    def __init__(self, root: int, participants: Iterable[int]) -> None:
        self._root = root
        self.others = tuple(sorted(set(participants) - {root}))  # the workers that take part beside the root
        self.missing = {root, *self.others}  # have not reported yet
        self.is_over = False

    def on_report(self, worker: int, error: BaseException | None) -> list[RootInstruction]:
        if self.is_over:
            return [] if error is None else [Late(f"the failure of worker {worker} ({error!r})")]
        if error is not None:
            return self._fail(error, worker)
        self.missing.discard(worker)
        if self.missing:
            return []
        self.is_over = True
        return [Finish(self.others), Complete(None)]

    def on_lost(self, worker: int, error: BaseException) -> list[RootInstruction]:
        """A worker is gone. It matters only if it takes part."""
        if self.is_over or (worker not in self.others):
            return []
        return self._fail(error, worker)

    def on_failure(self, error: BaseException) -> list[RootInstruction]:
        """The deadline, the release of the context, the end of this worker."""
        return [] if self.is_over else self._fail(error, self._root)

    def _fail(self, error: BaseException, worker: int) -> list[RootInstruction]:
        self.is_over = True
        return [Abort(self.others, f"{type(error).__name__}: {text_of(error)}"), Complete(error, worker)]


class ProtocolViolationError(RuntimeError):
    """A message of a pass that no worker would send."""


def _not_awaited(send: int) -> ProtocolViolationError:
    return ProtocolViolationError(f"gradients came for message {send}, whose Send has no part in this pass here")
