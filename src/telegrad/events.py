"""The one hook for profiler, statistics, command line and dashboard: they are only readers.

`Worker.send` and `Worker.receive` report each stage here. With no subscriber the cost is one truth test.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger("telegrad")


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one message. `stage` is "send" or "receive"; `phase` is "started", "complete" or
    "failed"."""

    stage: str
    phase: str
    kind: str
    message_id: int
    peer: str
    nbytes: int = 0
    detail: str = ""
    at: float = field(default_factory=time.perf_counter)


class Events:
    """The subscribers of one worker."""

    def __init__(self) -> None:
        # Replaced as a whole, never changed in place: it is read with no lock.
        self.subscribers: tuple[Callable[[Event], None], ...] = ()
        self._changing = threading.Lock()  # guards the replacing

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Calls `subscriber` with each event, on the thread where it happens. Returns what ends it."""
        with self._changing:
            self.subscribers = (*self.subscribers, subscriber)

        def unsubscribe() -> None:
            with self._changing:
                self.subscribers = tuple(s for s in self.subscribers if s is not subscriber)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for subscriber in self.subscribers:
            try:
                subscriber(event)
            except Exception:  # a reader must never break the run
                logger.exception("an event subscriber failed and was ignored: %r", subscriber)
