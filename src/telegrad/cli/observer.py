"""Observes a running group without joining it, for `telegrad top`.

    Observer.look  ->  members in the store  ->  a call of `report` on each  ->  what each does

An observer is a worker that only reads the store, listens nowhere, refuses calls, and has a negative id of its own
choice. So it takes no member's place, name or rank; no member can call it or waits for it, and the group does not
notice its end.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..errors import AddressError, PeerLostError, RendezvousError, TelegradError
from ..events import Event
from ..messages import MIN_OBSERVER_ID, PROBE_ID, Member
from ..options import Options
from ..primitives import clock
from ..primitives.current import current_worker
from ..primitives.torch_threads import begin_thread
from ..rendezvous.address import connect_store
from ..rendezvous.file import open_file_store
from ..rendezvous.group import Group
from ..worker import Statistics, Worker

_MOST_SAMPLES = 10_000
_MOST_AT_ONCE = 32  # workers that are asked at the same time


@dataclass(frozen=True)
class Latency:
    """The seconds that calls took on the worker that serves them, from when each was read to when its answer was
    written. A call that still ran counts with the time that it had taken so far."""

    calls: int
    median: float
    p99: float


@dataclass(frozen=True)
class Report:
    """The figures of a worker, as it gives them. Calls of observers are not counted."""

    statistics: Statistics
    at: float  # seconds on its own clock
    pid: int
    latency: Latency | None  # None: no call was sampled


@dataclass(frozen=True)
class Seen:
    """A member of the group; with no report, `problem` says why."""

    member: Member
    report: Report | None
    round_trip: float  # seconds, of the call for the report
    problem: str = ""
    lost: bool = False  # it has ended, or cannot be reached


@dataclass(frozen=True)
class Look:
    """All members of the group, by id."""

    world_size: int | None
    workers: tuple[Seen, ...]


class Observer:
    """Looks at the group that meets at an address: HOST:PORT, tcp://HOST:PORT, file:///PATH or env://.

    Members are reached over `transport`: "unix", those of this host and user; or "tcp", those that were told to listen
    there. INSECURE, as all TCP is: a program that pretends to be a member can run code as this user.

    Raises:
        AddressError: the address makes no sense.
        RendezvousError: no store is served there, or no group has met at it.
    """

    def __init__(self, address: str, *, timeout: float = 5.0, transport: str = "unix") -> None:
        self._timeout = timeout
        self._group = _find_group(address, timeout)
        options = Options(
            connect_timeout=timeout, rpc_timeout=timeout, init_timeout=timeout, spin=0,
            transports=(transport,), insecure_listen_beyond_loopback=transport == "tcp",
        )  # fmt: skip
        self._worker = Worker.start("observer", self._group, options, listen=False)

    def look(self, *, sample: float = 0.0) -> Look:
        """Asks every member for a report. For `sample` seconds from now they time the calls that they serve; the
        next look has what came of it.

        Raises:
            RendezvousError: the store is gone, and with it most likely the group.
        """
        members = self._group.members(self._timeout)
        newest = {member.name: member for member in members}  # of each name: ids only grow
        with ThreadPoolExecutor(min(len(newest), _MOST_AT_ONCE) or 1, initializer=begin_thread) as threads:
            seen = threads.map(lambda member: self._ask(member, sample), newest.values())
            return Look(self._group.world_size, tuple(seen))

    def _ask(self, member: Member, sample: float) -> Seen:
        began = time.perf_counter()
        try:
            found: Report = self._worker.call(member.id, report, (sample,))
        except TelegradError as error:
            return Seen(member, None, 0.0, str(error), lost=isinstance(error, PeerLostError))
        return Seen(member, found, time.perf_counter() - began)

    def close(self) -> None:
        self._worker.close(graceful=False)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- the group, only read --------------------------------------------------------------------------------


class _NoGroupError(RendezvousError):
    """The store answers, and no group has met at it."""


class ObservedGroup(Group):
    """A group seen from outside. What a worker would write into the store is left out."""

    def __init__(self, store: Any, timeout: float) -> None:
        self._members: dict[str | int, Member] = {}  # replaced as a whole by members()
        super().__init__(store, None, timeout)

    def _agree(self) -> str:
        until = self._until(None)
        name, size = self._get("group", until), self._get("size", until)
        if name is None or size is None:
            raise _NoGroupError("no group has met there yet; was init_rpc() called with this address?")
        first = size.partition(b" ")[0]
        self.world_size = None if first == b"no" else self._number("size", first)
        return self._text("group", name)

    def new_id(self, rank: int) -> int:
        return random.SystemRandom().randrange(MIN_OBSERVER_ID, PROBE_ID)

    def claim(self, name: str, id: int, is_alive: Callable[[Member], bool]) -> None:
        pass

    def publish(self, member: Member) -> None:
        pass

    def fail(self, rank: int, reason: str) -> None:
        pass

    def wait_for_all(self) -> list[Member]:
        return []

    def leave(self, member: Member, *, tell: bool) -> None:
        super().leave(member, tell=False)

    def members(self, timeout: float | None = None) -> list[Member]:
        found = super().members(timeout)
        self._members = {key: member for member in found for key in (member.name, member.id)}
        return found

    def find(self, to: str | int, timeout: float | None = None) -> Member | None:
        """From the last look: a call must not wait for a store that hangs."""
        return self._members.get(to)


def _find_group(address: str, timeout: float) -> ObservedGroup:
    store = _open_existing(address, timeout)
    try:
        return ObservedGroup(store, timeout)
    except _NoGroupError:
        # Under torchrun, whose agent serves the store, each restart has a part of it (see open_store).
        found = None
        with contextlib.suppress(_NoGroupError):
            for restart in range(1000):
                found = ObservedGroup(PrefixStore(f"telegrad/{restart}", store), timeout)
        if found is None:
            raise
        return found


def _open_existing(given: str, timeout: float) -> Any:
    address = given if "://" in given else f"tcp://{given}"
    if address == "env://":
        address = f"tcp://{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise AddressError(f"{address!r} is not an address: {error}") from error
    if url.scheme == "file":
        path = url.netloc + url.path
        if not os.path.isfile(path):
            raise RendezvousError(f"there is no file {path!r}; a group that meets at file:// makes it")
        return open_file_store(path, create=False)
    if url.scheme != "tcp" or not host or not port:
        raise AddressError(f"{given!r} is not an address; write HOST:PORT, tcp://HOST:PORT, file:///PATH or env://")
    return connect_store(host, port, timeout, wait=False)


# -- on the worker that is looked at ---------------------------------------------------------------------


def report(sample: float) -> Report:
    """Called by observers. Only a fraction of a worker's time is sampled: events are not free."""
    worker = current_worker()
    sampler = _samplers.setdefault(worker, Sampler())
    return sampler.report(worker, sample)


class Sampler:
    """Times the calls that a worker serves, for a while after each report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below, but not against events: their operations are single
        self._reports = 0
        self._until = 0.0  # on the clock of events
        self._open: dict[int, float] = {}  # when a call began, by its message
        self._took: list[float] = []
        self._last: Latency | None = None
        self._end: Callable[[], None] | None = None

    def report(self, worker: Worker, sample: float) -> Report:
        with self._lock:
            self._reports += 1
            if time.perf_counter() > self._until:  # else several observers share a sample
                self._finish_locked()
                if sample > 0:
                    self._until = time.perf_counter() + sample
                    self._end = worker.events.subscribe(self._on_event)
            now = worker.statistics()
            served, serving = now.calls_served - self._reports, now.calls_being_served - 1
            without = replace(now, calls_served=served, calls_being_served=serving)
            return Report(without, clock.now(), os.getpid(), self._last)

    def _finish_locked(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None
        now = time.perf_counter()
        took = sorted([*self._took, *(now - began for began in list(self._open.values()))])
        self._took, self._open = [], {}
        self._last = Latency(len(took), took[len(took) // 2], took[len(took) * 99 // 100]) if took else None

    def _on_event(self, event: Event) -> None:
        if event.kind != "call" or event.stage != "receive" or event.message_id < 0:  # an observer's are negative
            pass
        elif event.phase == "started":
            if event.at < self._until and len(self._took) < _MOST_SAMPLES:
                self._open[event.message_id] = event.at
        elif (began := self._open.pop(event.message_id, None)) is not None:
            self._took.append(event.at - began)
        end = self._end
        if event.at > self._until and not self._open and end is not None:
            end()


_samplers: WeakKeyDictionary[Worker, Sampler] = WeakKeyDictionary()

os.register_at_fork(after_in_child=_samplers.clear)  # their locks may be held by threads that are not in the fork
