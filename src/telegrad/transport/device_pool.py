"""Device memory at the end that fills it: places in segments, lent to one message at a time.

    DevicePool.take(nbytes) -> Place      named in a message, then filled by DeviceLane.fill
    DevicePool.tidy()                     on the janitor's thread: gives memory back that was not used for a while

A place is used again when its byte on the board says that the peer is done with it *and* its event, which the peer has
recorded behind its copy, is done: the byte speaks of the peer's host, the event of its device.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ..errors import ConnectionClosedError
from ..events import logger
from ..messages import Fresh
from ..options import KIB, MIB
from ..primitives import clock
from .cuda import Cuda, CudaError
from .device_board import CLOSED, COPY, DROPPED, FIRST_PLACE, FREE, NAMED, NOT_YET, PLACES_END, READ, TAKEN, Board

SLOT = 64 * KIB  # the place of a small tensor
SLAB = 4 * MIB  # the segment of such places
SMALLEST = 2 * MIB  # smaller allocations share their memory with others, and so would their handles
IDLE = 30.0  # seconds after which a segment that was not used goes back to the system
_SHORT_IDLE = 1.0  # ... if others have no room
GIVE_UP = 60.0  # seconds for copies of our own to end after the connection has; then their memory is left alone

_LOOKS = 16  # places that one message looks at for one that has come back
_NO_MEMORY_PAUSE = 1.0  # seconds: to ask for memory that is not there costs torch its cache
_EVICTION_PAUSE = 0.05  # seconds between two looks at all places for some that could go


@dataclass(eq=False, slots=True)
class Segment:
    """An allocation."""

    id: int
    size: int
    pointer: int
    handle: bytes
    places: list[Place] = field(default_factory=list)  # made so far
    used_at: float = 0.0


@dataclass(eq=False, slots=True)
class Place:
    """A piece of a segment, for one message at a time."""

    id: int
    segment: Segment
    offset: int
    capacity: int
    event: int
    event_handle: bytes
    announced: bool = False  # whether the peer knows it
    source: torch.Tensor | None = None  # what is to be copied into it, once its message is written
    is_unsettled: bool = False  # a copy into it may have begun, and no event says when it ends

    @property
    def pointer(self) -> int:
        return self.segment.pointer + self.offset

    def introduce(self, device: int) -> Fresh:
        segment = self.segment
        return Fresh(
            device, segment.id, segment.size, segment.handle, self.offset, self.capacity, self.event_handle
        )  # fmt: skip


class Places:
    """The places of one board, by number. Its single operations are atomic."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._next = iter(range(FIRST_PLACE, PLACES_END))
        self._returned: list[int] = []  # numbers of places that are gone
        self._places: dict[int, tuple[DevicePool, Place]] = {}

    def new_number(self) -> int | None:
        try:
            return self._returned.pop()
        except IndexError:
            return next(self._next, None)

    def add(self, pool: DevicePool, place: Place) -> None:
        self._places[place.id] = pool, place

    def get(self, number: int) -> tuple[DevicePool, Place] | None:
        return self._places.get(number)

    def remove(self, place: Place) -> None:
        del self._places[place.id]
        self.board.bytes[place.id] = FREE
        self.give_back(place.id)

    def give_back(self, number: int) -> None:
        self._returned.append(number)


class DevicePool:
    """The segments that one end of a connection fills on one of its devices: at most `limit` bytes."""

    def __init__(self, cuda: Cuda, device: int, limit: int, places: Places) -> None:
        self._lock = threading.Lock()  # guards all below
        self._cuda = cuda
        self.device = device
        self._limit = limit
        self._board = places.board
        self._places = places
        self._segment_ids = itertools.count(1)
        self._segments: list[Segment] = []
        self._unfinished: list[Segment] = []  # slabs that have room for more slots
        self._idle: dict[int, list[Place]] = {}  # by capacity; the one used last at the end
        self._out: dict[int, deque[Place]] = {}  # by capacity: lent, or not looked at since
        self._filling: set[Place] = set()  # between take() and filled(); its single operations are atomic
        self._dropped: list[Segment] = []  # until the peer has closed them
        self._held = 0  # bytes in all segments, dropped ones too
        self._no_memory_until = 0.0
        self._evict_at = 0.0
        self._closed_at: float | None = None
        self._gave_up = False

    # -- places ----------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Place | None:
        """A place with room for `nbytes`, marked NAMED; None: there is no room. Called inside of `cuda.on(device)`,
        and followed by filled() or give_back().

        Raises:
            ConnectionClosedError: the pool was closed.
            CudaError: CUDA is of no use any more.
        """
        capacity = SLOT if nbytes <= SLOT else max(SMALLEST, 1 << (nbytes - 1).bit_length())
        size = SLAB if capacity == SLOT else capacity
        with self._lock:
            if self._closed_at is not None:
                self._check_open_locked()
            place = self._free_one_locked(capacity)
            if place is not None:
                return place
            if not self._reserve_locked(size):
                return None
        segment = self._allocate(size)
        with self._lock:
            if segment is None:
                self._held -= size
                return None
            self._segments.append(segment)
            if capacity == SLOT:
                self._unfinished.append(segment)
            self._check_open_locked()
            return self._new_one_locked(segment, capacity)

    def _check_open_locked(self) -> None:
        if self._closed_at is not None:
            raise ConnectionClosedError("the connection was closed")

    def _free_one_locked(self, capacity: int) -> Place | None:
        idle = self._idle.setdefault(capacity, [])
        if not idle:
            self._reclaim_locked(capacity, _LOOKS)
        if idle:
            return self._lend_locked(idle.pop())
        if capacity == SLOT and self._unfinished:
            return self._new_one_locked(self._unfinished[-1], capacity)
        return None

    def _reclaim_locked(self, capacity: int, most: int) -> None:
        """Looks at places that were lent, the one lent first first."""
        out, idle = self._out.setdefault(capacity, deque()), self._idle.setdefault(capacity, [])
        states = self._board.bytes
        for _ in range(min(most, len(out))):
            place = out[0]
            if states[place.id] in (FREE, READ) and place not in self._filling and self._cuda.is_done(place.event):
                idle.append(out.popleft())
            else:
                out.rotate(-1)

    def _new_one_locked(self, segment: Segment, capacity: int) -> Place | None:
        number = self._places.new_number()
        if number is None:
            return None  # 65,000 places are out
        event = 0
        try:
            event = self._cuda.event()
            handle = self._cuda.export_event(event)
        except BaseException:
            self._places.give_back(number)
            if event:
                self._cuda.destroy(event)
            raise
        place = Place(number, segment, len(segment.places) * capacity, capacity, event, handle)
        self._places.add(self, place)
        segment.places.append(place)
        if (len(segment.places) + 1) * capacity > segment.size and segment in self._unfinished:
            self._unfinished.remove(segment)
        return self._lend_locked(place)

    def _lend_locked(self, place: Place) -> Place:
        place.segment.used_at = clock.now()
        self._board.bytes[COPY + place.id] = NOT_YET
        self._board.bytes[place.id] = NAMED
        self._filling.add(place)
        self._out.setdefault(place.capacity, deque()).append(place)
        return place

    def filled(self, place: Place) -> None:
        """The copy into it is on its way, and its event recorded."""
        self._filling.discard(place)

    def retire(self, place: Place) -> None:
        """It is never used again. Any number of times."""
        with self._lock, contextlib.suppress(ValueError):
            self._out[place.capacity].remove(place)

    def give_back(self, place: Place) -> None:
        """No message names it after all. It is used again when its event is done."""
        place.source = None
        self._board.bytes[place.id] = FREE
        self._filling.discard(place)

    # -- segments --------------------------------------------------------------------------------------

    def _reserve_locked(self, size: int) -> bool:
        now = clock.now()
        if now < self._no_memory_until:
            return False
        missing = self._held + size - self._limit
        if missing > 0:
            if size <= self._limit and now >= self._evict_at:
                self._evict_at = now + _EVICTION_PAUSE
                self._drop_locked(now - IDLE, missing, now - _SHORT_IDLE)  # there is room for a later message
            return False
        self._held += size
        return True

    def _allocate(self, size: int) -> Segment | None:
        for attempt in range(2):
            try:
                pointer = self._cuda.malloc(size)
                break
            except CudaError as error:
                if not error.is_no_memory:
                    self._unreserve(size)
                    raise
                if attempt == 0:
                    self._cuda.release_cache()
        else:
            self._no_memory_until = clock.now() + _NO_MEMORY_PAUSE
            return None
        try:
            return Segment(next(self._segment_ids), size, pointer, self._cuda.export_memory(pointer))
        except BaseException:
            self._cuda.free(pointer)
            self._unreserve(size)
            raise

    def _unreserve(self, size: int) -> None:
        with self._lock:
            self._held -= size

    def _drop_locked(self, before: float, wanted: int = 0, wanted_before: float = 0.0) -> None:
        """Drops segments that were not used since `before`; and until `wanted` bytes go, those that were not used since
        `wanted_before`, the one used first first."""
        for capacity in self._out:
            self._reclaim_locked(capacity, len(self._out[capacity]))
        wanted -= sum(segment.size for segment in self._dropped)
        unused = Counter(place.segment for idle in self._idle.values() for place in idle)
        for segment in sorted(unused, key=lambda s: s.used_at):
            if unused[segment] == len(segment.places) and (
                segment.used_at <= before or (wanted > 0 and segment.used_at <= wanted_before)
            ):
                wanted -= segment.size
                self._segments.remove(segment)
                if segment in self._unfinished:
                    self._unfinished.remove(segment)
                idle = self._idle[segment.places[0].capacity]
                idle[:] = [place for place in idle if place.segment is not segment]
                for place in segment.places:
                    self._board.bytes[place.id] = DROPPED
                self._dropped.append(segment)

    def is_due(self) -> bool:
        """Whether tidy() may have something to do. Cheap."""
        before = clock.now() - IDLE
        return bool(self._dropped) or any(segment.used_at <= before for segment in list(self._segments))

    def tidy(self, is_peer_gone: Callable[[], bool], opens_no_more: Callable[[], bool]) -> bool:
        """Drops what was not used for a while, and frees what was dropped, as soon as the peer has closed it; of a
        closed pool everything. On a thread that may wait. Returns whether it need not be called again soon."""
        with self._cuda.on(self.device):
            with self._lock:
                closed_at = self._closed_at
                if closed_at is None:
                    self._drop_locked(clock.now() - IDLE)
                else:
                    self._dropped += self._segments
                    self._segments.clear()
                dropped = list(self._dropped)
            for segment in dropped:
                if self._is_unused(segment.places, is_peer_gone, opens_no_more):
                    self._free(segment)
        if closed_at is None or not self._held:  # a thread that is about to allocate has reserved its bytes
            return True
        if clock.now() <= closed_at + GIVE_UP:
            return False
        if not self._gave_up:
            self._gave_up = True
            logger.warning("%d bytes of device memory stay allocated: a copy into them never ended", self._held)
        return True

    def _is_unused(
        self, places: Iterable[Place], is_peer_gone: Callable[[], bool], opens_no_more: Callable[[], bool]
    ) -> bool:
        states = self._board.bytes
        for place in places:
            state = states[place.id]
            if place in self._filling or (place.announced and state != CLOSED and not opens_no_more()):
                return False
            if state in (TAKEN, READ) and is_peer_gone():
                continue  # it has seen the end of our copy, and may have died before the end of its own
            # The event is ours, also of a place that the peer has closed; or, of one that it has READ, the peer's,
            # whose copy may be behind long work.
            if state == TAKEN or not self._cuda.is_done(place.event):
                return False
        return True

    def _free(self, segment: Segment) -> None:
        with self._lock:
            self._dropped.remove(segment)
            self._held -= segment.size
        for place in segment.places:
            self._cuda.destroy(place.event)
        self._cuda.free(segment.pointer)
        for place in segment.places:
            self._places.remove(place)

    def sizes(self) -> tuple[int, int]:
        """Segments and bytes, dropped ones too while they are there."""
        return len(self._segments) + len(self._dropped), self._held

    def close(self) -> None:
        """No place is given out any more; tidy() frees them all. Never blocks for long."""
        with self._lock:
            if self._closed_at is None:
                self._closed_at = clock.now()

    def refuse(self) -> None:
        """Closes the pool, of which the peer has opened nothing."""
        with self._lock:
            for segment in self._segments:
                for place in segment.places:
                    place.announced = False
        self.close()

    def abandon(self) -> None:
        """In a fork: everything is the parent's, and CUDA cannot be called."""
        self._lock = threading.Lock()
        self._closed_at = clock.now()
        for owned in (self._segments, self._dropped, self._unfinished, self._idle, self._out, self._filling):
            owned.clear()
