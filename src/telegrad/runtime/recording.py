"""Recorder: records one worker's part of a timeline, the stages of its messages and its process's operators.

    root          starts a session: recorder.start()
    participants  mark what they send (`Envelope.profiling`). A worker that reads a marked message takes part from then
                  on, and tells the root. Answers don't count: they go to workers that may not be profiled
    root          recorder.hold() on all of them, so that nothing new is recorded, then recorder.collect()

A worker takes part in one session at a time. It stops by itself when the root is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ..errors import TelegradError
from ..events import Event, Events, logger
from ..messages import KIND_NAMES, Envelope, Hello, Kind, Profiling, Session, sender_of
from ..primitives import current
from ..primitives.interrupts import critical, finaliser, interruptible
from ..transport.base import Connection, Frames
from . import profiled_calls
from .torch_profiler import Operators, clock_offset

if TYPE_CHECKING:
    from ..worker import Worker

MOST_ROWS = 4_000_000  # of one worker; about a gigabyte
_MOST_ENDED = 100  # sessions
_TELLING = 30.0  # seconds in which the root hears of a worker that takes part
_ANSWERS = frozenset((int(Kind.REPLY), int(Kind.FAILURE), int(Kind.DONE)))


class Row(NamedTuple):
    """One recorded event. Its times are of time.perf_counter(), in seconds."""

    event: Event
    until: float  # the end of a stage that is recorded as a whole; else 0
    thread: int  # the system's number


class Part(msgspec.Struct):
    """The recording of one worker."""

    worker: str
    id: int
    process: str  # host and process; workers may share one
    began: float
    main_thread: int  # of the root: the thread that began the session; else 0
    ended: float = 0.0
    rows: list[Row] = msgspec.field(default_factory=list)  # appended to on any thread
    threads: dict[int, str] = msgspec.field(default_factory=dict)  # their names
    sent_to: set[int] = msgspec.field(default_factory=set)
    operators: bytes = b""  # torch's export, compressed; none where another worker of the process has it
    missing: str = ""  # why there are no operators, or not all rows
    clock_offset: int = 0  # in nanoseconds: see torch_profiler.py
    started_by: int = 0  # the call by which the root has had it take part; 0: none
    told_by: int = 0  # the call by which it has told the root; 0: none


class _Recording:
    """A recording that goes on."""

    def __init__(self, session: Session, part: Part, *, has_joined: bool) -> None:
        self.session = session
        self.part = part
        self.has_joined = has_joined
        self.is_held = False
        self.operators: Operators | None = None

    def add(self, event: Event, until: float = 0.0) -> None:
        part, thread = self.part, threading.get_native_id()
        if thread not in part.threads:
            part.threads[thread] = threading.current_thread().name
        if len(part.rows) < MOST_ROWS:
            part.rows.append(Row(event, until, thread))
        elif not part.missing:
            part.missing = f"more than {MOST_ROWS} events: the rest is left out"

    def start_operators(self, group: str) -> None:
        self.operators, why = Operators.start(f"{group}/{self.session.id}", self.session.settings)
        self._note_missing(why)

    def stop_operators(self) -> None:
        operators, self.operators = self.operators, None
        if operators is not None:
            self.part.operators, why = operators.stop()
            self._note_missing(why)

    def _note_missing(self, why: str) -> None:
        if why:
            self.part.missing = f"its operators are missing: {why}"


def report(
    events: Events,
    stage: str,
    phase: str,
    envelope: Envelope,
    connection: Connection,
    nbytes: int = 0,
    detail: str = "",
) -> None:
    """Tells the subscribers of a worker how far a message is."""
    kind = KIND_NAMES.get(envelope.kind, "?")
    if not detail and envelope.kind == Kind.GRADIENTS:
        more = envelope.autograd.more if envelope.autograd else ()
        detail = " ".join(map(str, ("of message", envelope.reply_to, *more)))
    peer, now = connection.peer.name, time.perf_counter()
    events.emit(Event(stage, phase, kind, envelope.id, peer, nbytes, detail, envelope.reply_to, now))


class Recorder:
    """Records for the sessions that one worker takes part in, one after the other."""

    def __init__(self, worker: Worker, events: Events) -> None:
        self._worker = worker
        self._events = events
        self._lock = threading.Lock()  # guards the beginning and the end of a recording
        self._recording: _Recording | None = None
        # Sessions that have ended here: a late message must not begin one again, which nobody would end. Its single
        # operations are atomic.
        self._ended: deque[int] = deque(maxlen=_MOST_ENDED)
        self._unsubscribe: Callable[[], None] | None = None  # there while there is a recording
        self.on_joined: Callable[[int], None] | None = None  # of a root: a worker takes part

    # -- the path of a message -------------------------------------------------------------------------

    def mark(self, envelope: Envelope, peer: Hello) -> Envelope:
        """Marks a message that is about to be sent, so that its receiver takes part."""
        recording = self._recording
        if recording is None or recording.is_held:
            return envelope
        if envelope.kind == Kind.CALL and profiled_calls.is_local_only():
            return envelope
        if envelope.kind not in _ANSWERS:
            recording.part.sent_to.add(peer.id)
        call = envelope.profiling.call if envelope.profiling is not None else None
        return replace(envelope, profiling=Profiling(call, recording.session))

    def on_read(self, envelope: Envelope, connection: Connection, frames: Frames, opened: float) -> None:
        """Records a marked message. The reader thread calls it: it takes no time."""
        session = envelope.profiling.session if envelope.profiling is not None else None
        if session is None:
            return
        recording = self._recording
        if recording is None and envelope.kind not in _ANSWERS and session.id not in self._ended:
            recording = self._begin(session, has_joined=False)
        if recording is not None and recording.session.id == session.id:
            kind, peer = KIND_NAMES.get(envelope.kind, "?"), connection.peer.name
            read = Event("read", "complete", kind, envelope.id, peer, frames.nbytes, "", envelope.reply_to, opened)
            recording.add(read, time.perf_counter())

    def on_receive(self) -> None:
        """Joins the session of the first marked message, before that is handled: starts torch's profiler and tells the
        root."""
        recording = self._recording
        if recording is None or recording.has_joined:
            return
        with self._lock:
            if recording.has_joined:
                return
            recording.has_joined = True
        began = time.perf_counter()
        recording.start_operators(self._worker.group.name)
        recording.add(Event("join", "complete", "", 0, "", at=began), time.perf_counter())
        root = sender_of(recording.session.id)
        try:
            args = ("joined", recording.session.id, self._worker.id)
            told: Any = interruptible(self._worker.call_async, root, ask_recorder, args, None, _TELLING)
        except TelegradError:
            self._drop(recording)  # there is no root that would collect it
        else:
            recording.part.told_by = told.call.id
            told.add_done_callback(partial(self._on_told, recording))

    @finaliser
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

    # -- a session: roots and participants call these on each other, by ask_recorder() -------------------

    @property
    def session(self) -> Session | None:
        """The session that this worker takes part in."""
        recording = self._recording
        return None if recording is None else recording.session

    @property
    def sent_to(self) -> set[int]:
        """The workers that were told of the session from here."""
        recording = self._recording
        return set() if recording is None else set(recording.part.sent_to)

    def clock(self) -> float:
        return time.perf_counter()

    def joined(self, session_id: int, worker: int) -> bool:
        """Notes, at the root, that a worker takes part. Returns whether it may."""
        session, on_joined = self.session, self.on_joined
        if on_joined is None or session is None or session.id != session_id:
            return False
        on_joined(worker)
        return True

    def start(self, session: Session) -> bool:
        """Takes part from now on; False if this worker takes part in another session."""
        with critical():
            recording = self._begin(session, has_joined=True)
            if recording.session.id != session.id:
                return False
            serving = current.current_serving()
            if serving is not None and sender_of(session.id) != self._worker.id:  # the root asks for it
                recording.part.started_by = serving.message_id
            if recording.operators is None:
                recording.start_operators(self._worker.group.name)
            return True

    def _begin(self, session: Session, *, has_joined: bool) -> _Recording:
        with self._lock:
            if self._recording is None:
                process, thread = f"{os.uname().nodename}/{os.getpid()}", threading.get_native_id()
                began, main_thread = time.perf_counter(), thread if has_joined else 0
                part = Part(self._worker.name, self._worker.id, process, began, main_thread)
                self._recording = _Recording(session, part, has_joined=has_joined)
                self._unsubscribe = self._events.subscribe(self._on_event)
            return self._recording

    def hold(self, session_id: int) -> bool:
        """Records nothing new from now on, except messages that were sent before. Returns whether it takes part."""
        recording = self._recording
        if recording is None or recording.session.id != session_id:
            return False
        self._hold(recording)
        return True

    def _hold(self, recording: _Recording) -> None:
        with critical():
            with self._lock:
                if recording.is_held:
                    return
                recording.is_held = True
            recording.part.ended = time.perf_counter()
            recording.stop_operators()

    def collect(self, session_id: int) -> Part | None:
        """Ends the recording and returns it; None if this worker takes no part."""
        recording = self._recording
        if recording is None or recording.session.id != session_id:
            return None
        self._drop(recording)
        part = recording.part
        # Copies: a thread that sends or reads a message may still add to the part's own.
        rows, threads, sent_to = list(part.rows), dict(part.threads), set(part.sent_to)
        return replace(part, rows=rows, threads=threads, sent_to=sent_to, clock_offset=clock_offset())

    def drop(self, session_id: int) -> None:
        """Ends the recording, if it is of that session, and keeps nothing of it."""
        self._ended.append(session_id)  # also where no message of it has come yet
        recording = self._recording
        if recording is not None and recording.session.id == session_id:
            self._drop(recording)

    def _drop(self, recording: _Recording) -> None:
        with critical():
            self._hold(recording)
            with self._lock:
                if self._recording is recording:
                    self._ended.append(recording.session.id)
                    self._recording = None
                    unsubscribe, self._unsubscribe = self._unsubscribe, None
                    if unsubscribe is not None:
                        unsubscribe()

    def on_lost(self, peer: int) -> None:
        """Drops the recording if the lost worker was its root."""
        recording = self._recording
        if recording is not None and sender_of(recording.session.id) == peer:
            logger.info("worker %r: the root of a profile is gone, its recording is dropped", self._worker.name)
            self._drop(recording)

    def close(self) -> None:
        """Drops the recording: the worker shuts down."""
        recording = self._recording
        if recording is not None:
            self._drop(recording)


def ask_recorder(method: str, *args: Any) -> Any:
    """Runs a method of this worker's Recorder, for the profiler of another worker."""
    return getattr(current.current_worker().recorder, method)(*args)
