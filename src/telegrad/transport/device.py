"""The device lane: CUDA tensors between two processes that share a GPU, by one copy at each end and none on the host.

    sender    lane.reserve(tensor, placed)   a place in memory of ours; Envelope.placed
              lane.fill(placed)              once the message is written: a copy into it, on the current stream
    receiver  lane.arrived(placed)           while reading
              Arrived.take(device, ...)      when the event is done: a copy out of it, on the current stream
    both      lane.to_say(), lane.heard()    Envelope.lane: an Offer, and the Answer to it

The first tensor to a peer goes through the host, with an Offer beside it. The peer tries the offer out, and answers
that it accepts it, or why not: then all tensors go through the host. Each direction and each device is offered by
itself.

Rules: a copy is made in the order of the current stream of its end, and no end ever waits for it on the host, but for
the receiver, which looks at the sender's event; no stream ever waits for an event of another process; memory is given
back on the janitor's thread (device_board.py), since that may wait for the device.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import ConnectionClosedError, EncodeError, ProtocolError, text_of
from ..events import logger
from ..messages import Answer, Offer, Placed
from ..primitives import clock
from ..primitives.interrupts import critical
from .cuda import Cuda, CudaError
from .device_board import COPY, FAILED, QUEUED, READER_CLOSED, Board, janitor, of_this_process
from .device_mappings import Arrived, DeviceMappings
from .device_pool import DevicePool, Place, Places

MAGIC_BYTES = 32

_PATIENCE = 10.0  # seconds for the copy of a magic to be done, and for a peer to read what came before the end
_MOST_DEVICES = 64  # of one host


@dataclass(frozen=True)
class DeviceStatistics:
    """Counts of one end of a device lane."""

    puts: int
    bytes_put: int
    takes: int
    bytes_taken: int
    waits: int  # takes that found the peer's copy not done
    wait_seconds: float
    segments: int  # that this end holds for its sends
    segment_bytes: int
    mappings: int  # segments of the peer's that this end has opened
    refusal: str  # why tensors go through the host; empty: they do not


class DeviceLane:
    """Both directions of one connection. All methods may be called on any thread."""

    def __init__(self, cuda: Cuda, peer: str, peer_pid: int, limit: int) -> None:
        """`limit` is in bytes, for each device."""
        self._cuda = cuda
        self._peer = peer
        self._peer_pid = peer_pid
        self._limit = limit
        self._lock = threading.Lock()  # guards what is offered, and the counts
        self._places: Places | None = None  # ours, on our board
        self._offered: set[int] = set()  # our devices
        self._pools: dict[int, DevicePool] = {}  # by our device
        self._accepted: dict[int, DevicePool] = {}  # those of them that the peer has accepted
        self._refused: set[int] = set()
        self._refusal = ""  # why, the first time
        self._mappings = DeviceMappings(cuda, peer)
        self._heard_of: set[int] = set()  # devices that the peer has offered; guarded by the read lease
        self._offers: list[tuple[Offer, float]] = []  # heard, to be tried out until then; single operations are atomic
        self._says: list[Offer | Answer] = []  # its single operations are atomic
        self._closed_at: float | None = None
        self._gave_up = False
        self._puts = self._bytes_put = 0
        of_this_process.add(self)

    # -- the end that fills ----------------------------------------------------------------------------

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether the peer takes tensors of this one's device by the lane."""
        return self._cuda.device_of(tensor) in self._accepted

    def reserve(self, tensor: torch.Tensor, into: list[Placed]) -> bool:
        """Takes a place in device memory that the peer can open, for a tensor's elements in their order, and appends it
        to `into`. False: the tensor must go through the host.

        The place is appended, not returned: with an interrupt between the two it would be lost. The caller writes the
        message and has it filled, by fill(), or gives the place back, by take_back().

        Raises:
            EncodeError: CUDA failed, or the stream is captured into a graph.
            ConnectionClosedError: the lane was closed.
        """
        with critical():  # it may be called from users' code, by a pickler
            if self._closed_at is not None:
                raise ConnectionClosedError(f"the connection with worker {self._peer!r} was closed")
            device = self._cuda.device_of(tensor)
            try:
                pool = self._accepted.get(device)
                if pool is None and device not in self._refused:
                    self._cuda.load()
                    with self._cuda.on(device):
                        if not self._cuda.is_capturing():
                            self._offer(device)
                            return False
                elif pool is not None:
                    with self._cuda.on(device):
                        if not self._cuda.is_capturing():
                            return self._take_place(pool, tensor, into)
                elif not self._cuda.is_capturing():
                    return False
            except CudaError as error:
                if device not in self._accepted:
                    self._refuse(device, str(error))
                    return False
                raise EncodeError(
                    f"a tensor on cuda:{device} cannot be sent to worker {self._peer!r}: {error}"
                ) from error
            raise EncodeError(
                f"a tensor on cuda:{device} cannot be sent to worker {self._peer!r} while a CUDA graph is captured; "
                "send it before or after the capture"
            )

    def _take_place(self, pool: DevicePool, tensor: torch.Tensor, into: list[Placed]) -> bool:
        place = pool.take(tensor.nbytes)
        if place is None:
            return False
        try:
            place.source = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        except BaseException:  # no memory
            pool.give_back(place)
            raise
        fresh = None if place.announced else place.introduce(pool.device)
        place.announced = True
        into.append(Placed(place.id, tensor.nbytes, fresh))
        return True

    def after_write(self, placed: Sequence[Placed], said: Sequence[Offer | Answer], *, written: bool) -> None:
        """A message was written, and its tensors are copied; or it was not, and they will not be."""
        if not written:
            self.take_back(placed, said)
        elif placed:
            self.fill(placed)

    def fill(self, placed: Sequence[Placed]) -> None:
        """Copies into the places of a message that was written, in the order of the current streams. Called by the
        thread that has encoded it, in the same critical section. If CUDA fails now, the peer hears of it: the message
        cannot be called back."""
        left = list(placed)
        try:
            while left:
                pool, place = self._found(left[0])
                try:
                    self._copy_in(pool, place, left[0].nbytes)
                except Exception as error:
                    self._fail(pool, place)
                    text = "a tensor on cuda:%d did not get to worker %r: %s"
                    janitor.submit(partial(_log, text, pool.device, self._peer, text_of(error)))
                left.pop(0)
        except BaseException:  # of a handler of a signal's: the peer must not wait for what does not come
            for one in left:
                self._fail(*self._found(one))
            raise

    def _found(self, one: Placed) -> tuple[DevicePool, Place]:
        """A place of ours, which is there for as long as it is being filled."""
        assert self._places is not None
        found = self._places.get(one.place)
        assert found is not None
        return found

    def _copy_in(self, pool: DevicePool, place: Place, nbytes: int) -> None:
        cuda, device, tensor = self._cuda, pool.device, place.source
        assert tensor is not None
        with cuda.at(device):
            if cuda.is_capturing():  # another thread has begun to capture this stream since reserve()
                raise CudaError("a CUDA graph is captured")
            stream = cuda.stream(device)
            if nbytes:
                place.is_unsettled = True
                cuda.copy(place.pointer, tensor.data_ptr(), nbytes, stream)
                cuda.keep_for_stream(tensor, device, stream)
            cuda.record(place.event, stream)
            place.is_unsettled = False
        self._places.board.bytes[COPY + place.id] = QUEUED  # type: ignore[union-attr]
        place.source = None
        pool.filled(place)
        with self._lock:
            self._puts += 1
            self._bytes_put += nbytes

    def _fail(self, pool: DevicePool, place: Place) -> None:
        """Tells the peer that it will not be filled."""
        self._places.board.bytes[COPY + place.id] = FAILED  # type: ignore[union-attr]
        if place.is_unsettled:
            pool.retire(place)
        place.source = None
        pool.filled(place)

    def _offer(self, device: int) -> None:
        """Offers a device to the peer, once. Called inside of `cuda.on(device)`."""
        with self._lock:
            if device in self._offered or self._closed_at is not None:
                return
            self._offered.add(device)
            try:
                places = self._places = self._places or Places(Board.make())
            except OSError as error:
                raise CudaError(f"no shared memory: {error}") from error
            pool = self._pools.get(device) or DevicePool(self._cuda, device, self._limit, places)
            self._pools[device] = pool
        uuid = self._cuda.uuid(device)
        place = pool.take(MAGIC_BYTES)
        if place is None:  # no memory: the next tensor tries again
            self._offered.discard(device)
            return
        try:
            magic = secrets.token_bytes(MAGIC_BYTES)
            stream = self._cuda.side_stream(device)
            self._cuda.write(place.pointer, magic, stream)
            self._cuda.record(place.event, stream)
        except BaseException:
            pool.give_back(place)
            raise
        place.announced = True
        placed = Placed(place.id, MAGIC_BYTES, place.introduce(device))
        board = places.board
        self._says.append(Offer(device, uuid, board.fd, board.token, magic, placed))
        pool.filled(place)

    def _refuse(self, device: int, reason: str) -> None:
        """A device's tensors go through the host from here on."""
        self._refused.add(device)
        with self._lock:
            pool = self._pools.get(device)
            self._accepted.pop(device, None)
            before, self._refusal = self._refusal, self._refusal or reason
        if pool is not None:
            pool.refuse()
            janitor.submit(self._tidy)
        if not before:
            text = "tensors on cuda:%d go to worker %r through host memory, which is slower: %s"
            janitor.submit(partial(_log, text, device, self._peer, reason))

    def take_back(self, placed: Sequence[Placed], said: Sequence[Offer | Answer] = ()) -> None:
        """These were reserved, or were to be said, for a message that was not written."""
        for one in placed:
            found = self._places.get(one.place) if self._places is not None else None
            if found is not None:  # else the lane was closed
                pool, place = found
                if one.fresh is not None:
                    place.announced = False
                pool.give_back(place)
        self._says.extend(said)

    # -- the end that reads ----------------------------------------------------------------------------

    def arrived(self, placed: Sequence[Placed]) -> list[Arrived]:
        """The tensors of a message, to be taken. Called while reading: never blocks.

        Raises:
            ProtocolError: there is no message in one of these places.
        """
        return self._mappings.arrived(placed)

    # -- negotiation -----------------------------------------------------------------------------------

    def to_say(self) -> tuple[Offer | Answer, ...]:
        """Takes what the peer is to be told with the next message: see take_back(). Tries out what the peer has
        offered, which may take a moment, if this process uses CUDA by now. Called in a critical section."""
        if self._offers and self._cuda.is_ready():
            self._try_offers()
        if not self._says:
            return ()
        said = []
        while self._says:
            try:
                said.append(self._says.pop(0))
            except IndexError:
                break
        return tuple(said)

    def heard(self, said: Sequence[Offer | Answer]) -> None:
        """Takes what the peer says. Called while reading: never blocks.

        Raises:
            ProtocolError: it makes no sense.
        """
        for one in said:
            if isinstance(one, Answer):
                self._on_answer(one)
            elif one.device in self._heard_of or not 0 <= one.device < _MOST_DEVICES:
                raise ProtocolError(f"an offer of device {one.device}, which was offered before or cannot be")
            else:
                self._heard_of.add(one.device)
                self._offers.append((one, clock.now() + _PATIENCE))

    def _on_answer(self, answer: Answer) -> None:
        pool = self._pools.get(answer.device)
        if pool is None or answer.device in self._accepted:
            raise ProtocolError(f"an answer to an offer of device {answer.device}, which was not made")
        if answer.device in self._refused:
            return  # CUDA has failed here since
        if answer.refusal:
            self._refuse(answer.device, answer.refusal)
        else:
            self._accepted[answer.device] = pool

    def _try_offers(self) -> None:
        for _ in range(len(self._offers)):
            try:
                offer, until = self._offers.pop(0)
            except IndexError:
                return
            try:
                if not self._try(offer):
                    if clock.now() <= until:
                        self._offers.append((offer, until))
                        continue
                    raise ValueError("the copy into the offered memory is not done after a while")
            except ConnectionClosedError:
                return
            except Exception as error:
                self._says.append(Answer(offer.device, text_of(error)))
                try:
                    self._mappings.forget(offer.device)
                except CudaError as failed:
                    logger.warning("what worker %r has offered was not closed: %s", self._peer, str(failed))
            else:
                self._says.append(Answer(offer.device))

    def _try(self, offer: Offer) -> bool:
        fresh = offer.placed.fresh
        if fresh is None or fresh.device != offer.device or len(offer.magic) > fresh.capacity:
            raise ValueError("the offer makes no sense")
        self._cuda.load()
        device = self._cuda.device_with(offer.uuid)
        if device is None:
            raise ValueError(f"the GPU {offer.uuid} is not visible to the worker")
        board = self._mappings.board or Board.open(self._peer_pid, offer.board, offer.token)
        return self._mappings.try_out(offer.placed.place, fresh, device, offer.magic, board)

    # -- life ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Has memory that was not used for a while given back. Called every few seconds; never blocks."""
        if self._mappings.is_due() or any(pool.is_due() for pool in list(self._pools.values())):
            janitor.submit(self._tidy)

    def _tidy(self) -> bool:
        """Gives memory back, on the janitor's thread; returns whether that is done for now."""
        try:
            done = [pool.tidy(self._is_peer_gone, self._opens_no_more) for pool in list(self._pools.values())]
            done.append(self._mappings.tidy())
            return all(done)
        except CudaError as error:  # which no call recovers from; the memory goes with the process
            if not self._gave_up:
                self._gave_up = True
                why = str(error)  # the error itself would keep this frame
                logger.warning("device memory that worker %r shares is not given back: %s", self._peer, why)
            return True

    def _is_peer_gone(self) -> bool:
        """Whether the peer has closed all that it had opened of ours, or has ended."""
        places = self._places
        if places is not None and places.board.bytes[READER_CLOSED]:
            return True
        return self._closed_at is not None and not os.path.exists(f"/proc/{self._peer_pid}")

    def _opens_no_more(self) -> bool:
        """Whether the peer opens nothing of ours any more."""
        return self._is_peer_gone() or (self._closed_at is not None and clock.now() > self._closed_at + _PATIENCE)

    def close(self) -> None:
        """Ends the lane with its connection: what is not taken is lost. Memory goes back as soon as our own copies are
        done. Any number of times; never blocks for long."""
        with self._lock:
            if self._closed_at is not None:
                return
            self._closed_at = clock.now()
            if self._places is not None:
                self._places.board.close()
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        self._mappings.close()
        janitor.submit(self._tidy)

    def statistics(self) -> DeviceStatistics:
        """Counts so far. Never blocks."""
        sizes = [pool.sizes() for pool in list(self._pools.values())]
        mappings = self._mappings
        return DeviceStatistics(
            puts=self._puts,
            bytes_put=self._bytes_put,
            takes=mappings.takes,
            bytes_taken=mappings.bytes_taken,
            waits=mappings.waits,
            wait_seconds=mappings.wait_seconds,
            segments=sum(count for count, _ in sizes),
            segment_bytes=sum(nbytes for _, nbytes in sizes),
            mappings=mappings.count(),
            refusal=self._refusal,
        )

    def abandon(self) -> None:
        """In a fork: the lane has ended here, and the parent's goes on."""
        self._lock = threading.Lock()
        self._closed_at = clock.now()
        self._accepted.clear()
        self._offers.clear()
        self._says.clear()
        for pool in self._pools.values():
            pool.abandon()
        self._mappings.abandon()


def _log(text: str, *args: object) -> bool:
    """Logs a text, as a job of the janitor's: threads that may be reading must not, as handlers are users' code."""
    logger.warning(text, *args)
    return True
