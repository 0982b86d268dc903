"""The bytes of a message on a stream, as `unix` and `tcp` send them. docs/wire-format.md has the details.

    prefix   magic, type, lane, number of buffers, length of the header, bytes that follow the header
    table    the length of each buffer (8 bytes each); in the shared lane also which segment they lie in
    header   the envelope
    body     the buffers one after the other, in the inline lane; nothing in the shared lane

Nothing here touches a socket. What a peer announces is checked before anything is allocated for it, and
memory grows only as fast as bytes come in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from ..errors import ProtocolError
from ..options import SHARED_MEMORY_FROM
from ..primitives.memory import describe_failure, describe_lost_descriptor, is_out_of_descriptors, is_out_of_memory
from .base import Buffer, Frames
from .shared_memory import SegmentPool, aligned

PREFIX = struct.Struct("<2sBBIIQ")
SHARED_PLACE = struct.Struct("<QQB")  # segment id, its capacity, whether its descriptor comes along
MAGIC = b"tg"
MESSAGE, FORGET = 0, 1  # types
INLINE, SHARED = 0, 1  # lanes

MAX_HEADER = 16 << 20
MAX_BUFFERS = 1 << 20
INBOX = 256 << 10

LENGTH = struct.Struct("<Q")
_WASTE = memoryview(bytearray(INBOX))  # takes the bytes of messages that there is no memory for; never read
_PREFIX_SIZE = PREFIX.size


# -- writing -----------------------------------------------------------------------------------------------


def in_pieces(header: bytes, buffers: Sequence[Buffer], nbytes: int) -> list[Buffer]:
    """A large message in the inline lane: what is large is not copied, what is small is joined."""
    count = len(buffers)
    pieces: list[Buffer] = []
    small: list[Buffer] = [
        PREFIX.pack(MAGIC, MESSAGE, INLINE, count, len(header), nbytes),
        struct.pack(f"<{count}Q", *map(len, buffers)),
        header,
    ]
    for buffer in buffers:
        if len(buffer) < SHARED_MEMORY_FROM:
            small.append(buffer)
            continue
        if small:
            pieces.append(b"".join(small))
            small = []
        pieces.append(buffer)
    if small:
        pieces.append(b"".join(small))
    return pieces


def in_segment(header: bytes, buffers: Sequence[Buffer], id: int, capacity: int, *, fresh: bool) -> bytes:
    """A message whose buffers lie in a shared segment. `fresh`: its descriptor comes along."""
    count = len(buffers)
    head = PREFIX.pack(MAGIC, MESSAGE, SHARED, count, len(header), 0)
    table = struct.pack(f"<{count}Q", *map(len, buffers))
    return b"".join((head, table, SHARED_PLACE.pack(id, capacity, fresh), header))


def forget_frame(ids: list[int]) -> bytes:
    """A FORGET: the peer may unmap these segments. A negative one is the peer's own, whose descriptor was lost."""
    header = msgspec.msgpack.encode(ids)
    return PREFIX.pack(MAGIC, FORGET, INLINE, 0, len(header), 0) + header


# -- reading -----------------------------------------------------------------------------------------------


def _no_segments(place: tuple[int, int, int], lengths: Sequence[int]) -> list[Buffer]:
    raise ProtocolError("a message in shared memory over a transport without it")


def _any_time(nbytes: int) -> None:
    pass


def _no_forgetting(ids: list[int]) -> None:
    raise ProtocolError("a FORGET frame over a transport without shared memory")


class FrameReader:
    """Makes messages of bytes. The reader thread puts bytes into `target` and tells `received` how many.

    All state is here, so a thread can leave a message half read to the next one.
    """

    def __init__(
        self,
        limit: int,
        pool: SegmentPool,
        on_shared: Callable[[tuple[int, int, int], Sequence[int]], list[Buffer]] = _no_segments,
        on_forget: Callable[[list[int]], None] = _no_forgetting,
        read_from: Callable[[int], None] = _any_time,
    ) -> None:
        self._limit = limit
        self._pool = pool
        self._on_shared = on_shared
        self._on_forget = on_forget
        self._read_from = read_from  # told how many bytes come for certain before there is anything to do with them
        self._inbox = bytearray(INBOX)
        self._view = memoryview(self._inbox)
        self._start = self._end = 0  # what of the inbox was received and not yet parsed
        self._partial: _Partial | None = None
        self._direct = False  # whether `target` is memory of the partial message, not of the inbox
        self.target = self._view
        self.messages = self.nbytes = 0

    @property
    def in_the_middle(self) -> bool:
        """Whether part of a message has come, and not the rest."""
        return self._partial is not None or self._start != self._end

    def received(self, count: int, frames: list[Frames]) -> None:
        """Takes in `count` bytes that were put into `target`; appends the messages that are whole now.

        Raises:
            ProtocolError: the bytes make no sense. Messages before them were appended.
            MemoryError: there is not even memory for an envelope.
        """
        if self._partial is None:
            self._end += count
        elif not self._fill_partial(self._partial, count, frames):
            return
        inbox = self._inbox
        while self._end - (start := self._start) >= _PREFIX_SIZE:
            magic, type_, lane, count, header_length, body_length = PREFIX.unpack_from(inbox, start)
            if (
                magic != MAGIC
                or type_ > FORGET
                or lane > SHARED
                or header_length > MAX_HEADER
                or count > MAX_BUFFERS
                or body_length > self._limit
            ):
                raise _bad_prefix(magic, type_, lane, count, header_length, body_length, self._limit)
            head = _PREFIX_SIZE + 8 * count + header_length
            if lane == SHARED:
                head += SHARED_PLACE.size
            if self._end - start < head:
                break
            at = start + _PREFIX_SIZE
            lengths = LENGTH.unpack_from(inbox, at) if count == 1 else struct.unpack_from(f"<{count}Q", inbox, at)
            at += 8 * count
            if lane == SHARED or type_ == FORGET:
                self._start = start + head
                self._parse_special(type_, lane, lengths, at, body_length, frames)
                continue
            header = bytes(inbox[at : at + header_length])
            at += header_length
            if sum(lengths) != body_length:
                raise ProtocolError(f"the buffers of a message add up to {sum(lengths)} bytes, not {body_length}")
            if self._end - at < body_length:
                self._begin_partial(header, lengths, at)
                return
            buffers: list[Buffer] = []
            self._start = at + body_length
            try:
                for length in lengths:
                    buffers.append(inbox[at : at + length])
                    at += length
                frames.append(Frames(header, buffers))
            except MemoryError:
                frames.append(Frames(header, (), missing=describe_failure(body_length)))
            self.messages += 1
            self.nbytes += header_length + body_length
        if self._start != self._end:
            self._make_room()
            return
        self._start = self._end = 0
        if len(inbox) > INBOX:
            with suppress(MemoryError):  # then it stays as large as it is
                self._replace_inbox(INBOX)
        self.target = self._view

    def _begin_partial(self, header: bytes, lengths: Sequence[int], at: int) -> None:
        """Begins a message whose body is not all here."""
        partial = _Partial(header, lengths, self._pool)
        partial.take(self._view[at : self._end])
        self._partial = partial
        self._aim(partial)

    def _fill_partial(self, partial: _Partial, count: int, frames: list[Frames]) -> bool:
        """Returns whether the message is whole now; what came behind it is then in the inbox."""
        if self._direct:
            partial.filled(count)
        else:
            self._start, self._end = partial.take(self._view[:count]), count
        if not partial.complete:
            self._aim(partial)
            return False
        frames.append(Frames(partial.header, partial.buffers, missing=partial.missing))
        self._partial = None
        self._read_from(1)
        self.messages += 1
        self.nbytes += partial.nbytes
        return True

    def _aim(self, partial: _Partial) -> None:
        """Points `target` to where the next bytes will stay or, where that is small, to the inbox."""
        self._start = self._end = 0
        rest = partial.rest
        self._direct = len(rest) >= SHARED_MEMORY_FROM
        self.target = rest if self._direct else self._view
        self._read_from(len(rest))

    def _make_room(self) -> None:
        """Makes room behind half a message. Grows the inbox only when half of it is full of what has really come."""
        if self._end == len(self._inbox):
            left = self._inbox[self._start :]
            if len(left) > len(self._inbox) // 2:
                self._replace_inbox(2 * len(self._inbox))
            self._inbox[: len(left)] = left
            self._start, self._end = 0, len(left)
        self.target = self._view[self._end :]

    def _replace_inbox(self, size: int) -> None:
        self._inbox = bytearray(size)
        self._view = memoryview(self._inbox)

    def _parse_special(
        self, type_: int, lane: int, lengths: Sequence[int], at: int, body_length: int, frames: list[Frames]
    ) -> None:
        """Takes a message in the shared lane, or a FORGET. All of it is in the inbox."""
        if body_length or (type_ == FORGET and (lane == SHARED or lengths)):
            raise ProtocolError(f"a frame of type {type_} in lane {lane} with {body_length} bytes behind it")
        if type_ == FORGET:
            try:
                ids = msgspec.msgpack.decode(self._view[at : self._start], type=list[int])
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"a FORGET frame that makes no sense: {error}") from error
            self._on_forget(ids)
            return
        nbytes = sum(lengths)
        if nbytes > self._limit:
            raise ProtocolError(f"a message of {nbytes} bytes; the limit is {self._limit}")
        place = SHARED_PLACE.unpack_from(self._inbox, at)
        header = bytes(self._inbox[at + SHARED_PLACE.size : self._start])
        try:
            frames.append(Frames(header, self._on_shared(place, lengths)))
        except (OSError, MemoryError) as error:
            if is_out_of_descriptors(error):
                missing = describe_lost_descriptor(nbytes)
            elif is_out_of_memory(error):
                missing = describe_failure(nbytes)
            else:
                raise
            frames.append(Frames(header, (), missing=missing))
        self.messages += 1
        self.nbytes += len(header) + nbytes

    def close(self) -> None:
        """Lets go of memory. Nothing is received any more."""
        self._partial = None
        self._replace_inbox(0)
        self.target = self._view


class _Partial:
    """A message whose body is still coming. Large buffers are received where they will stay. Where there is no memory
    for one, the bytes of the message are read and dropped: the next message begins behind them."""

    def __init__(self, header: bytes, lengths: Sequence[int], pool: SegmentPool) -> None:
        self.header = header
        self.buffers: list[Buffer] = []
        self._left = sum(lengths)  # bytes of the body that have not come
        self.nbytes = len(header) + self._left
        self._lengths = iter(lengths)
        self._memory = memoryview(b"")  # for large buffers: what of it is not given to them yet
        self.missing = ""
        self.complete = False
        large = sum(aligned(n) for n in lengths if n >= SHARED_MEMORY_FROM)
        try:
            if large:
                self._memory = pool.lend(large)
        except (OSError, MemoryError) as error:
            self._give_up(error)
        self._go_on()

    def _go_on(self) -> None:
        """Makes room for the next buffer, or is complete. Small ones are made one by one, as their bytes come in: a
        peer that only announces a million of them makes us allocate nothing."""
        try:
            for length in self._lengths:
                if length >= SHARED_MEMORY_FROM:
                    memory: Buffer = self._memory[:length]
                    self._memory = self._memory[aligned(length) :]
                else:
                    memory = bytearray(length)
                self.buffers.append(memory)
                if length:
                    self.rest = memoryview(memory)  # of the buffer that is being filled
                    return
        except MemoryError as error:
            self._give_up(error)
        self.rest = _WASTE[: self._left]
        self.complete = not self._left

    def _give_up(self, error: Exception) -> None:
        if not is_out_of_memory(error):
            raise error
        self.missing = describe_failure(self.nbytes)
        self.buffers, self._lengths, self._memory = [], iter(()), memoryview(b"")

    def filled(self, count: int) -> None:
        """Notes that `count` bytes were put into `rest`."""
        self._left -= count
        self.rest = self.rest[count:]
        if not self.rest:
            self._go_on()

    def take(self, data: memoryview) -> int:
        """Copies what belongs to this message; returns how much that was."""
        at = 0
        while at < len(data) and not self.complete:
            count = min(len(self.rest), len(data) - at)
            self.rest[:count] = data[at : at + count]
            at += count
            self.filled(count)
        return at


def _bad_prefix(magic: bytes, type_: int, lane: int, count: int, header: int, body: int, limit: int) -> ProtocolError:
    if magic != MAGIC or type_ > FORGET or lane > SHARED:
        return ProtocolError(f"a frame starts with {magic!r}, type {type_}, lane {lane}; not one of ours")
    return ProtocolError(
        f"a frame announces a header of {header} bytes, {count} buffers and {body} bytes; "
        f"the limits are {MAX_HEADER}, {MAX_BUFFERS} and {limit} (Options.max_message_bytes)"
    )
