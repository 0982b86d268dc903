"""The values of this worker: created, waited for, and kept while a handle is here or another worker has credits."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ..errors import CallTimeoutError, PeerLostError, ValueGoneError
from ..events import log_by, logger
from ..gradients.host import Host
from ..messages import sender_of
from ..primitives import clock, current
from ..primitives.futures import Future
from ..primitives.interrupts import interruptible
from ..primitives.waiter import Waiter
from .entries import Owned, Task, without_frames

_TOMBSTONES = 10_000


class OwnedValues:
    """The values of one worker, and the credits that others have for them."""

    def __init__(self, worker_id: int, name: str, host: Host) -> None:
        self.host = host
        self._id = worker_id
        self._name = name
        # Guards all below and the counts of entries, for a moment only. No value dies in it: that runs users' code.
        self._lock = threading.RLock()
        self._owned: dict[int, Owned] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()  # tombstones of values
        self._lost: set[int] = set()  # workers

    def own(self, value: Any) -> Owned:
        """A value of this worker, with one handle."""
        entry = Owned(self.host.new_message_id(), self._id)
        entry.given = entry.begun = entry.is_set = True
        entry.value = value
        entry.handles = 1
        with self._lock:
            self._owned[entry.id] = entry
        return entry

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

    def kept_for_others(self) -> dict[int, list[str]]:
        """The values that other workers have handles to, and the names of these workers."""
        with self._lock:
            found = {entry.id: list(entry.credits) for entry in self._owned.values() if entry.credits}
        return {id: [self.host.name_of(worker) for worker in workers] for id, workers in found.items()}

    # -- values here -----------------------------------------------------------------------------------

    def set_value(self, id: int, value: Any) -> None:
        """Sets a value that was created, unless it is not needed any more."""
        self._set(id, value, None)

    def set_error(self, id: int, error: BaseException) -> None:
        """Notes why it could not be created: raised wherever the value is asked for."""
        self._set(id, None, without_frames(error, self._name))

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
        return entry.result()

    def find_set(self, id: int) -> Owned | None:
        """The entry of a value that is there already."""
        entry = self._owned.get(id)
        return entry if entry is not None and entry.is_set else None

    def find(self, id: int, timeout: float | None) -> Any:
        """For another worker: the value, once it was created."""
        with self._lock:
            entry = self._find_locked(id)
            waiter = self._wait_for(entry)
        if waiter is not None:
            self._sleep(entry, waiter, timeout)
        return entry.result()

    def fetch(self, id: int, of_given: Callable[[Any], Any] | None = None) -> Any:
        """For another worker: the value, or its future while it is not there. Raises what was raised instead.
        `of_given` is applied to a value of RRef(value)."""
        with self._lock:
            entry = self._find_locked(id)
            if not entry.is_set:
                future = Future(lambda call, timeout: None, logger.debug)  # its waiters sleep until it is set
                entry.waiting.append(partial(entry.complete, future))
                return future
        return of_given(entry.value) if of_given is not None and entry.given else entry.result()

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
                    entry.take_credits(peer, count)
                    dead += self._unused_locked(entry)
                else:
                    refused.append((id, count, has))
        for id, count, has in refused:
            log_by(
                self.host.submit, logging.WARNING,
                "worker %r (id %d) gives back %d credits for the value %d of worker %r, of which it has %d: ignored",
                self.host.name_of(peer), peer, count, id, self._name, has,
            )  # fmt: skip
        # Not on a thread that reads: the end of a value may run users' code.
        return dead.clear if dead else None

    def _close_values(self) -> None:
        """Tells the threads that wait for a value that it will not be created."""
        with self._lock:
            owned = list(self._owned.values())
            self._owned.clear()
        for entry in owned:
            if not entry.is_set:
                text = f"worker {self._name!r} was shut down before the value was created"
                entry.error = partial(PeerLostError, text)
                entry.is_set = True
                for task in entry.waiting:
                    task()
