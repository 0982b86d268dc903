"""Events: the one hook for profiler, statistics, command line and dashboard, which are only readers.

A worker reports each stage of a message here. With no subscriber the cost is one truth test.

    send      encoding and writing; from `write` on, writing
    read      taken out of its connection
    receive   handling it, up to where another thread takes over
    decode    rebuilding its body
    run       the function of a call
    wait      for an answer, or for something of a pass
    pass      torch's engine at work on this worker's part of a pass
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .errors import text_of
from .primitives.text import clean_lines

logger = logging.getLogger("telegrad")


def _clean(record: logging.LogRecord) -> bool:
    """Filters no record, but makes it harmless for terminals: it may have texts of other workers."""
    text = record.getMessage()
    if (harmless := clean_lines(text)) != text:
        record.msg, record.args = harmless, ()
    if record.exc_info and not record.exc_text:  # which formatters take for the traceback
        record.exc_text = clean_lines(logging.Formatter().formatException(record.exc_info))
    return True


logger.addFilter(_clean)


def log_by(submit: Callable[[Callable[[], None]], object], level: int, text: str, *args: object) -> None:
    """Has another thread log a text. For threads that read: handlers of logs are users' code, and may block."""
    if logger.isEnabledFor(level):
        submit(partial(logger.log, level, text, *args))


class Event(NamedTuple):
    """One step of one message. `stage` is one of the above; `phase` is "started", "complete" or "failed"."""

    stage: str
    phase: str
    kind: str
    message_id: int
    peer: str
    nbytes: int = 0
    detail: str = ""
    reply_to: int = 0  # the message that this one answers
    at: float = 0.0  # time.perf_counter(); set when it is emitted


class Events:
    """The subscribers of one worker."""

    def __init__(self) -> None:
        # Replaced as a whole, never changed in place: it is read with no lock.
        self.subscribers: tuple[Callable[[Event], None], ...] = ()
        self._changing = threading.Lock()  # guards the replacing
        self._submit: Callable[[], Callable[[Callable[[], None]], object] | None] = lambda: None

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Calls `subscriber` with each event, on the thread where it happens. Returns a function that ends it."""
        with self._changing:
            self.subscribers = (*self.subscribers, subscriber)

        def unsubscribe() -> None:
            with self._changing:
                self.subscribers = tuple(s for s in self.subscribers if s is not subscriber)

        return unsubscribe

    def log_by(self, submit: Callable[[Callable[[], None]], object]) -> None:
        """Has the threads that `submit` belongs to log failures of subscribers. Weakly: a subscription, which may be
        kept for long, must not keep the worker."""
        self._submit = weakref.WeakMethod(submit)

    def span(self, stage: str, kind: str, message_id: int, peer: str, detail: str = "") -> Span:
        """Reports that a stage has started, and, as a context manager or by `end`, that it is over."""
        self.emit(Event(stage, "started", kind, message_id, peer, 0, detail, 0, time.perf_counter()))
        return Span(self, stage, kind, message_id, peer)

    def emit(self, event: Event) -> None:
        for subscriber in self.subscribers:
            try:
                subscriber(event)
            except Exception as error:  # a reader must never break the run
                text = "an event subscriber failed and was ignored: %r: %s"
                submit = self._submit() or (lambda task: task())
                log_by(submit, logging.ERROR, text, subscriber, f"{type(error).__name__}: {text_of(error)}")


class Span(NamedTuple):
    """A stage that has started."""

    events: Events
    stage: str
    kind: str
    message_id: int
    peer: str

    def end(self, phase: str = "complete") -> None:
        self.events.emit(Event(self.stage, phase, self.kind, self.message_id, self.peer, 0, "", 0, time.perf_counter()))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end("complete" if kind is None else "failed")
