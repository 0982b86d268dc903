"""Device memory at the end that reads: the peer's places, opened once, and copied out of.

    DeviceMappings.arrived(placed) -> [Arrived]    while reading: nothing is opened, and nothing waits
    Arrived.take(...) -> tensor                    on the thread that decodes

The host looks at the event, and no stream ever waits for it: an event of a process that has died is never done, and a
stream that waits for it would never end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ..errors import ConnectionClosedError, DecodeError, OutOfMemoryError, ProtocolError
from ..events import logger
from ..messages import Fresh, Placed
from ..primitives import clock
from ..primitives.interrupts import blocking, critical, finaliser
from .cuda import HANDLE_BYTES, Cuda, CudaError
from .device_board import (
    ARRIVED,
    CLOSED,
    COPY,
    DROPPED,
    FAILED,
    FIRST_PLACE,
    FREE,
    NAMED,
    PLACES_END,
    QUEUED,
    READ,
    READER_CLOSED,
    TAKEN,
    Board,
)
from .device_pool import GIVE_UP

_SPIN = 300e-6  # seconds
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3
_LARGEST = 1 << 48  # bytes of a segment
_UNTAKEN = 5.0  # seconds for which what has arrived can be taken after the connection's end; the peer waits for longer


@dataclass(eq=False, slots=True)
class _Mapping:
    """A segment of the peer's."""

    device: int  # ours
    fresh: Fresh  # by which it became known
    pointer: int = 0  # once it is opened
    users: int = 0  # threads that take from it
    is_closed: bool = False
    places: list[_Place] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Place:
    id: int
    mapping: _Mapping
    fresh: Fresh
    event: int = 0  # once it is opened
    is_ours: bool = False  # the event was recorded last by us


class Arrived:
    """A tensor's memory in a place of the peer's. It is taken once; the place goes back with it, or when it dies."""

    __slots__ = ("_mappings", "_board", "_place", "_held", "nbytes")

    def __init__(self, mappings: DeviceMappings, board: Board, place: _Place, nbytes: int) -> None:
        self._mappings = mappings
        self._board = board
        self._place = place
        self.nbytes = nbytes
        self._held = place.id  # 0: it was taken, or went back
        board.bytes[place.id] = ARRIVED

    def take(self, device: torch.device, deadline: float | None, is_alive: Callable[[], bool]) -> torch.Tensor:
        """The bytes, flat, on a device, in the order of its current stream. Waits until the peer's copy is done;
        `is_alive` says whether the connection still is. If the copy is done, they can be taken after its end, too, for
        a moment.

        Raises:
            TimeoutError: the deadline has passed.
            ConnectionClosedError: the connection ended before the copy did.
            OutOfMemoryError: there is no memory on the device.
            DecodeError: CUDA failed, or the stream is captured.
        """
        with critical():  # it may be called from users' code, by a pickle
            if not self._held:
                raise DecodeError("a tensor in device memory was taken already")
            try:
                tensor, at = self._mappings.take(self, self._place, deadline, is_alive)
            except BaseException:
                self.give_back()
                raise
        if device.type == "cuda" and device.index == at:
            return tensor
        return self._mappings.cuda.moved(tensor, device)

    def hold(self) -> None:
        """From here on the place does not go back by itself."""
        self._held = 0

    def give_back(self) -> None:
        """Gives the place back untaken. Any number of times."""
        if self._held:
            self._board.bytes[self._held] = FREE
            self._held = 0

    @finaliser
    def __del__(self) -> None:
        if self._held:
            self._board.bytes[self._held] = FREE


class DeviceMappings:
    """The peer's segments, as far as they are known. They are opened by the first thread that takes from them."""

    def __init__(self, cuda: Cuda, peer: str) -> None:
        self.cuda = cuda
        self._peer = peer
        self._lock = threading.Lock()  # guards all below; held for moments
        self._opening = threading.Lock()  # held while something is opened; taken before the other one
        self.board: Board | None = None
        self.devices: dict[int, int] = {}  # the peer's number -> ours, of the devices that were accepted
        self._mappings: dict[tuple[int, int], _Mapping] = {}  # by the peer's device, and the segment
        self._places: dict[int, _Place] = {}
        self._closed_at: float | None = None
        self.takes = self.bytes_taken = self.waits = 0
        self.wait_seconds = 0.0

    # -- while reading ---------------------------------------------------------------------------------

    def arrived(self, placed: Iterable[Placed]) -> list[Arrived]:
        """
        Raises:
            ProtocolError: there is no message in one of these places.
        """
        found = []
        with self._lock:
            board = self.board
            if board is None:
                raise ProtocolError("a message lies in device memory, of which no offer was accepted")
            for one in placed:
                if one.fresh is not None:
                    self._learn_locked(one.place, one.fresh)
                place = self._places.get(one.place)
                if place is None or not 0 <= one.nbytes <= place.fresh.capacity:
                    raise ProtocolError(f"a message lies in place {one.place} of device memory, which is not known")
                if board.bytes[one.place] != NAMED:
                    raise ProtocolError(f"a message lies in place {one.place} of device memory, which is in use")
                place.is_ours = False
                found.append(Arrived(self, board, place, one.nbytes))
        return found

    def _learn_locked(self, number: int, fresh: Fresh) -> None:
        device = self.devices.get(fresh.device)
        if (
            device is None
            or not FIRST_PLACE <= number < PLACES_END
            or number in self._places
            or len(fresh.memory) != HANDLE_BYTES
            or len(fresh.event) != HANDLE_BYTES
            or not 0 < fresh.capacity <= fresh.size <= _LARGEST
            or not 0 <= fresh.offset <= fresh.size - fresh.capacity
        ):
            raise ProtocolError(f"place {number} of device memory makes no sense: {fresh}")
        key = fresh.device, fresh.segment
        mapping = self._mappings.get(key)
        if mapping is None:
            mapping = self._mappings[key] = _Mapping(device, fresh)
        elif (mapping.fresh.size, mapping.fresh.memory) != (fresh.size, fresh.memory):
            raise ProtocolError(f"segment {fresh.segment} of device memory is another one than before")
        self._places[number] = place = _Place(number, mapping, fresh)
        mapping.places.append(place)

    # -- taking ----------------------------------------------------------------------------------------

    def take(
        self, arrived: Arrived, place: _Place, deadline: float | None, is_alive: Callable[[], bool]
    ) -> tuple[torch.Tensor, int]:
        """The bytes, and the device that they are on: the one that the place is on, too."""
        mapping = place.mapping
        with self._lock:
            if mapping.is_closed:
                raise self._ended()
            mapping.users += 1
        try:
            with self.cuda.on(mapping.device):
                if self.cuda.is_capturing():
                    raise DecodeError(
                        f"a tensor from worker {self._peer!r} cannot be received while a CUDA graph is captured on "
                        f"cuda:{mapping.device}; call it before or after the capture"
                    )
                self._open(place)
                tensor = self.cuda.empty(arrived.nbytes, mapping.device)  # while the peer copies
                self._await(place, arrived._board, deadline, is_alive)
                self._copy_out(arrived, place, tensor)
                return tensor, mapping.device
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"no memory on cuda:{mapping.device} for {arrived.nbytes} bytes from worker {self._peer!r}: {error}"
            ) from error
        except CudaError as error:
            if self._closed_at is not None:  # the peer may have died, and its handles with it
                raise self._ended() from error
            raise DecodeError(
                f"a tensor from worker {self._peer!r} cannot be copied to cuda:{mapping.device}: {error}"
            ) from error
        finally:
            with self._lock:
                mapping.users -= 1

    def _check_open(self) -> None:
        if self._closed_at is not None:
            raise self._ended()

    def _ended(self) -> ConnectionClosedError:
        return ConnectionClosedError(f"the connection with worker {self._peer!r} ended before its tensor was copied")

    def _open(self, place: _Place) -> None:
        if place.event:
            return
        with self._opening:
            mapping = place.mapping
            if not mapping.pointer:
                mapping.pointer = self.cuda.open_memory(mapping.fresh.memory)
            if not place.event:
                place.event = self.cuda.open_event(place.fresh.event)

    def _await(self, place: _Place, board: Board, deadline: float | None, is_alive: Callable[[], bool]) -> None:
        """Waits until the peer has queued its copy, and then until that is done."""
        event, copy, states, is_done = place.event, COPY + place.id, board.bytes, self.cuda.is_done
        if states[copy] == QUEUED and is_done(event):
            return
        began = time.perf_counter()
        pause = _SHORTEST_PAUSE
        try:
            while not (states[copy] == QUEUED and is_done(event)):
                self._check_open()
                if states[copy] == FAILED:
                    raise DecodeError(
                        f"worker {self._peer!r} could not copy its tensor from cuda:{place.fresh.device}: CUDA failed "
                        "there, and its log has CUDA's words"
                    )
                if not is_alive():
                    raise self._ended()
                if deadline is not None and clock.now() >= deadline:
                    raise TimeoutError(f"worker {self._peer!r} did not finish copying its tensor in time")
                if time.perf_counter() - began > _SPIN:
                    blocking(time.sleep, pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                else:
                    os.sched_yield()  # and let go of the interpreter lock
        finally:
            with self._lock:
                self.waits += 1
                self.wait_seconds += time.perf_counter() - began

    def _copy_out(self, arrived: Arrived, place: _Place, tensor: torch.Tensor) -> None:
        device, nbytes = place.mapping.device, arrived.nbytes
        stream = self.cuda.stream(device)
        # Should CUDA fail half way, the place stays TAKEN for good: a copy may still read it.
        arrived.hold()
        states = arrived._board.bytes
        states[place.id] = TAKEN
        if nbytes:
            self.cuda.copy(tensor.data_ptr(), place.mapping.pointer + place.fresh.offset, nbytes, stream)
        self.cuda.record(place.event, stream)
        place.is_ours = True
        states[place.id] = READ
        with self._lock:
            self.takes += 1
            self.bytes_taken += nbytes

    # -- negotiation -----------------------------------------------------------------------------------

    def try_out(self, number: int, fresh: Fresh, device: int, magic: bytes, board: Board) -> bool:
        """Opens a place that the peer offers, and looks whether what it has put there is seen here. False: its copy is
        not done yet.

        Raises:
            CudaError: it cannot be opened.
            ProtocolError: it makes no sense.
            ValueError: there is something else.
        """
        with self._lock:
            self._check_open()
            self.board = board
            self.devices[fresh.device] = device
            if number not in self._places:
                self._learn_locked(number, fresh)
            place = self._places[number]
            place.mapping.users += 1
        try:
            with self.cuda.on(device):
                self._open(place)
                if not self.cuda.is_done(place.event):
                    return False
                pointer = place.mapping.pointer + fresh.offset
                seen = self.cuda.read(pointer, len(magic), self.cuda.side_stream(device))
            if seen != magic:
                raise ValueError("the opened memory shows something else than the worker has put there")
            board.bytes[number] = READ
            return True
        finally:
            with self._lock:
                place.mapping.users -= 1

    # -- giving back -----------------------------------------------------------------------------------

    def forget(self, device: int) -> None:
        """Forgets a device of the peer's that was not accepted, and closes what was opened of it."""
        with self._lock:
            self.devices.pop(device, None)
            found = [key for key in self._mappings if key[0] == device]
            mappings = [self._mappings.pop(key) for key in found]
            self._places = {n: place for n, place in self._places.items() if place.fresh.device != device}
        for mapping in mappings:
            with self.cuda.on(mapping.device):
                self._close(mapping)

    def is_due(self) -> bool:
        """Whether tidy() may have something to do. Cheap."""
        board = self.board
        return board is not None and any(
            board.bytes[m.places[0].id] == DROPPED for m in list(self._mappings.values()) if m.places
        )

    def tidy(self) -> bool:
        """Closes what the peer has dropped, and of closed mappings everything. On a thread that may wait. Returns
        whether it need not be called again soon."""
        board = self.board
        if board is None:
            return True
        with self._lock:
            closed_at = self._closed_at
            every = list(self._mappings.items())
        for key, mapping in every:
            with self.cuda.on(mapping.device):
                if not self._is_unused(mapping, board, closed_at):
                    continue
                with self._lock:
                    if mapping.users:
                        continue
                    mapping.is_closed = True
                    del self._mappings[key]
                    for place in mapping.places:
                        del self._places[place.id]
                self._close(mapping)
            for place in mapping.places:
                board.bytes[place.id] = CLOSED
        if closed_at is None:
            return True
        if self._mappings and clock.now() <= closed_at + GIVE_UP:
            return False
        if self._mappings:
            logger.warning("device memory of worker %r stays open: a copy out of it never ended", self._peer)
        else:
            board.bytes[READER_CLOSED] = 1
        return True

    def _is_unused(self, mapping: _Mapping, board: Board, closed_at: float | None) -> bool:
        states = {board.bytes[place.id] for place in mapping.places}
        if closed_at is None:
            unused = states == {DROPPED}
        else:
            unused = ARRIVED not in states or clock.now() > closed_at + _UNTAKEN
        return unused and all(self.cuda.is_done(place.event) for place in mapping.places if place.is_ours)

    def _close(self, mapping: _Mapping) -> None:
        for place in mapping.places:
            if place.event:
                self.cuda.destroy(place.event)
        if mapping.pointer:
            self.cuda.close_memory(mapping.pointer)

    def count(self) -> int:
        return sum(1 for mapping in list(self._mappings.values()) if mapping.pointer)

    def close(self) -> None:
        """Nothing arrives any more; tidy() closes everything. Never blocks for long."""
        with self._lock:
            if self._closed_at is None:
                self._closed_at = clock.now()

    def abandon(self) -> None:
        """In a fork: everything is the parent's, and CUDA cannot be called."""
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._closed_at = clock.now()
        for mapping in self._mappings.values():
            mapping.is_closed = True
        self._mappings, self._places = {}, {}
