"""What one worker records for a timeline: the stages of its messages, and its process's operators.

    root      starts a session: recorder.start()
    everyone  marks what it sends (`Envelope.profiling`); whoever reads a marked message takes part from then on
              (answers excepted: they go to workers that may not be profiled), and tells the root
    root      recorder.hold() everywhere, so that nothing new is recorded, then recorder.collect()

A worker takes part in one session at a time. It stops by itself when the root is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from ..errors import TelegradError
from ..events import Event, Events, logger
from ..messages import KIND_NAMES, Envelope, Hello, Kind, Profiling, Session, sender_of
from ..primitives import current
from ..primitives.interrupts import interruptible
from ..rendezvous.group import Group
from ..transport.base import Connection, Frames
from . import profiled_calls
from .torch_profiler import Operators, clock_offset

MOST_ROWS = 4_000_000  # of one worker; about a gigabyte
_TELLING = 30.0  # seconds in which the root hears of a worker that takes part
_ANSWERS = frozenset((int(Kind.REPLY), int(Kind.FAILURE), int(Kind.DONE)))


class Host(Protocol):
    """The worker, as far as it is needed here."""

    name: str
    id: int
    group: Group

    @property
    def call_async(self) -> Callable[..., Any]: ...


class Row(NamedTuple):
    """One event. Times are of time.perf_counter(), in seconds."""

    at: float
    until: float  # of what is noted when it is over; else 0
    thread: int  # as the system counts them
    stage: str
    phase: str
    kind: str
    message: int
    reply_to: int
    peer: str
    nbytes: int
    detail: str


class Part(msgspec.Struct, frozen=True):
    """What one worker recorded."""

    worker: str
    id: int
    process: str  # which of all processes; workers may share one
    rows: list[Row]
    threads: dict[int, str]  # their names
    began: float
    ended: float
    operators: bytes  # torch's export, compressed; none where another worker of the process has it
    missing: str  # why there are no operators, or not all rows
    clock_offset: int  # in nanoseconds: see operators.py
    sent_to: tuple[int, ...]
    main_thread: int  # of the root: the one that began the session; else 0
    started_by: int  # the call by which the root has had it take part; 0: none
    told_by: int  # the call by which it has told the root; 0: none


class _Recording:
    def __init__(self, session: Session, *, has_joined: bool) -> None:
        self.session = session
        self.began = time.perf_counter()
        self.ended = 0.0
        self.main_thread = threading.get_native_id() if has_joined else 0
        self.started_by = 0
        self.told_by = 0
        self._events: list[tuple[Event, float, int]] = []  # with end and thread; appended to on any thread
        self.threads: dict[int, str] = {}
        self.sent_to: set[int] = set()
        self.has_joined = has_joined
        self.is_held = False
        self.operators: Operators | None = None
        self.exported = b""
        self.missing = ""

    def add(self, event: Event, until: float = 0.0) -> None:
        thread = threading.get_native_id()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        if len(self._events) < MOST_ROWS:
            self._events.append((event, until, thread))
        elif not self.missing:
            self.missing = f"more than {MOST_ROWS} events: the rest is left out"

    def rows(self) -> list[Row]:
        return [
            Row(
                event.at, until, thread, event.stage, event.phase, event.kind, event.message_id, event.reply_to,
                event.peer, event.nbytes, event.detail,
            )
            for event, until, thread in self._events
        ]  # fmt: skip


class Recorder:
    """Of one worker."""

    def __init__(self, worker: Host, events: Events) -> None:
        self._worker = worker
        self._events = events
        self._lock = threading.Lock()  # guards the beginning and the end of a recording
        self._recording: _Recording | None = None
        self.on_joined: Callable[[int], None] | None = None  # of a root: a worker takes part
        self._unsubscribe: Callable[[], None] = _nothing

    # -- the path of a message -------------------------------------------------------------------------

    def mark(self, envelope: Envelope, peer: Hello) -> Envelope:
        """A message is about to be sent: whoever gets it takes part."""
        recording = self._recording
        if recording is None or recording.is_held:
            return envelope
        if envelope.kind == Kind.CALL and profiled_calls.is_local_only():
            return envelope
        if envelope.kind not in _ANSWERS:
            recording.sent_to.add(peer.id)
        call = envelope.profiling.call if envelope.profiling is not None else None
        return msgspec.structs.replace(envelope, profiling=Profiling(call, recording.session))

    def on_read(self, envelope: Envelope, connection: Connection, frames: Frames, opened: float) -> None:
        """A message with something for profilers was read. While reading: takes no time."""
        session = envelope.profiling.session if envelope.profiling is not None else None
        if session is None:
            return
        recording = self._recording
        if recording is None and envelope.kind not in _ANSWERS:
            recording = self._begin(session, has_joined=False)
        if recording is not None and recording.session.id == session.id:
            kind, peer = KIND_NAMES.get(envelope.kind, "?"), connection.peer.name
            read = Event("read", "complete", kind, envelope.id, peer, frames.nbytes, "", envelope.reply_to, opened)
            recording.add(read, time.perf_counter())

    def on_receive(self) -> None:
        """A message is about to be handled. The first one of a session has the worker take part in earnest."""
        recording = self._recording
        if recording is None or recording.has_joined:
            return
        with self._lock:
            if recording.has_joined:
                return
            recording.has_joined = True
        began = time.perf_counter()
        self._start_operators(recording)
        recording.add(Event("join", "complete", "", 0, "", at=began), time.perf_counter())
        root = sender_of(recording.session.id)
        try:
            args = (recording.session.id, self._worker.id)
            told = interruptible(self._worker.call_async, root, profiler_joined, args, None, _TELLING)
        except TelegradError:
            self._drop(recording)  # nobody would ever collect it
        else:
            recording.told_by = told.call.id
            told.add_done_callback(lambda done: self._on_told(recording, done))

    def _on_told(self, recording: _Recording, done: Any) -> None:
        try:
            is_wanted = done.value()
        except TelegradError:
            is_wanted = False
        if not is_wanted:
            self._drop(recording)

    def _on_event(self, event: Event) -> None:
        recording = self._recording
        if recording is not None and not recording.is_held:
            recording.add(event)

    # -- a session -------------------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The one that this worker takes part in."""
        recording = self._recording
        return None if recording is None else recording.session

    @property
    def sent_to(self) -> set[int]:
        """The workers that were told of the session from here."""
        recording = self._recording
        return set() if recording is None else set(recording.sent_to)

    def start(self, session: Session, *, started_by: int = 0) -> bool:
        """Takes part, from now on; False if it does in another session. `started_by` is the root's call."""
        recording = self._begin(session, has_joined=True)
        if recording.session.id != session.id:
            return False
        recording.started_by = started_by
        if recording.operators is None:
            self._start_operators(recording)
        return True

    def _begin(self, session: Session, *, has_joined: bool) -> _Recording:
        with self._lock:
            if self._recording is None:
                self._recording = _Recording(session, has_joined=has_joined)
                self._unsubscribe = self._events.subscribe(self._on_event)
            return self._recording

    def _start_operators(self, recording: _Recording) -> None:
        session = recording.session
        recording.operators, why = Operators.start(f"{self._worker.group.name}/{session.id}", session.settings)
        if why:
            recording.missing = f"its operators are missing: {why}"

    def hold(self, session_id: int) -> bool:
        """Nothing new is recorded but what others have sent before. Returns whether it takes part."""
        recording = self._recording
        if recording is None or recording.session.id != session_id:
            return False
        self._hold(recording)
        return True

    def _hold(self, recording: _Recording) -> None:
        with self._lock:
            if recording.is_held:
                return
            recording.is_held = True
        recording.ended = time.perf_counter()
        operators, recording.operators = recording.operators, None
        if operators is not None:
            recording.exported, why = operators.stop()
            if why:
                recording.missing = f"its operators are missing: {why}"

    def collect(self, session_id: int) -> Part | None:
        """Ends it, and gives what was recorded; None if it takes no part."""
        recording = self._recording
        if recording is None or recording.session.id != session_id:
            return None
        self._drop(recording)
        return Part(
            self._worker.name,
            self._worker.id,
            f"{os.uname().nodename}/{os.getpid()}",
            recording.rows(),
            recording.threads,
            recording.began,
            recording.ended,
            recording.exported,
            recording.missing,
            clock_offset(),
            tuple(recording.sent_to),
            recording.main_thread,
            recording.started_by,
            recording.told_by,
        )

    def _drop(self, recording: _Recording) -> None:
        self._hold(recording)
        with self._lock:
            if self._recording is recording:
                self._recording = None
                self._unsubscribe()

    def on_lost(self, peer: int) -> None:
        """A worker is gone: if it was the root, nobody wants the recording any more."""
        recording = self._recording
        if recording is not None and sender_of(recording.session.id) == peer:
            logger.info("worker %r: the root of a profile is gone, its recording is dropped", self._worker.name)
            self._drop(recording)

    def close(self) -> None:
        """The worker shuts down."""
        recording = self._recording
        if recording is not None:
            self._drop(recording)


def _nothing() -> None:
    pass


# -- what recorders and roots call on each other -----------------------------------------------------------


def profiler_joined(session_id: int, worker_id: int) -> bool:
    """Run by the root: a worker takes part from now on. Returns whether it may."""
    recorder = current.current_worker().recorder
    session, on_joined = recorder.session, recorder.on_joined
    if on_joined is None or session is None or session.id != session_id:
        return False
    on_joined(worker_id)
    return True


def profiler_start(session: Session) -> bool:
    serving = current.current_serving()
    assert serving is not None
    return current.current_worker().recorder.start(session, started_by=serving.message_id)


def profiler_clock() -> float:
    return time.perf_counter()


def profiler_hold(session_id: int) -> bool:
    return current.current_worker().recorder.hold(session_id)


def profiler_collect(session_id: int) -> Part | None:
    return current.current_worker().recorder.collect(session_id)


# The names of all these: what they do is no part of what is profiled.
OWN = frozenset(("profiler_joined", "profiler_start", "profiler_clock", "profiler_hold", "profiler_collect"))
