"""Frames over a stream socket: what `unix` and `tcp` have in common.

On the wire a message is

    prefix   magic, type, lane, number of buffers, length of the header, bytes that follow the header
    table    the length of each buffer (8 bytes each); in the shared lane also which segment they lie in
    header   the envelope
    body     the buffers one after the other, in the inline lane; nothing in the shared lane

docs/wire-format.md has the details. The socket does not block; threads wait in poll(2), after a short spin.
Reading keeps its state in the connection, so a thread can leave a message half read to the next one.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..config import SHARED_MEMORY_FROM, Options
from ..errors import (
    AddressError,
    ConnectError,
    ConnectionClosedError,
    ProtocolError,
    TelegradError,
    TooLargeError,
    TransportError,
    VersionError,
)
from ..events import logger
from ..messages import WIRE_VERSION, Hello
from .base import Buffer, Connection, ConnectionStatistics, Frames, Listener
from .poller import ARMED, DISARMED, Poller
from .shm import SegmentPool, aligned

PREFIX = struct.Struct("<2sBBIIQ")
_PREFIX_OF_ONE = struct.Struct("<2sBBIIQQ")  # with the table of one buffer
_LENGTH = struct.Struct("<Q")
_PREFIX_SIZE = PREFIX.size
MAGIC = b"tg"
MESSAGE, FORGET = 0, 1  # frame types
INLINE, SHARED = 0, 1  # lanes
SHARED_PLACE = struct.Struct("<QQB")  # segment id, its capacity, whether its descriptor comes along

MAX_HEADER = 16 << 20
MAX_BUFFERS = 1 << 20
_INBOX = 256 << 10
_IOV_MAX = 1024
_LIVELY = 1e-3  # messages at most this many seconds apart count as close

GREETING = struct.Struct("<4sHI")  # magic, wire version, length of what follows
GREETING_MAGIC = b"TGRD"
MAX_GREETING = 64 << 10


class StreamConnection(Connection):
    """One socket, after the handshake."""

    def __init__(self, sock: socket.socket, peer: Hello, poller: Poller, options: Options) -> None:
        super().__init__(peer)
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._poller = poller
        self._limit = options.max_message_bytes
        self._closed_because = ""
        self._disposed = False
        # Guarded by `reading`:
        self._inbox = bytearray(_INBOX)
        self._inbox_view = memoryview(self._inbox)
        self._start = self._end = 0  # what of the inbox was received and not yet parsed
        self._partial: _Partial | None = None
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._max_spin = options.spin if (os.cpu_count() or 1) > 1 else 0.0
        self._lively = True  # whether the last message followed the one before it closely
        self._last_message = 0.0
        self._messages_in = self._bytes_in = 0
        self._private_pool = SegmentPool(options.pool_bytes, shared=False)
        # Guards the order of bytes on the socket, and the fields below. Held while a message is written;
        # taken over by a thread of its own when a writer's time is over in the middle of one.
        self._write_lock = threading.Lock()
        self._messages_out = self._bytes_out = 0
        poller.register(self._fd, self._on_event)
        self._watch = poller.watch

    # -- writing ---------------------------------------------------------------------------------------

    def write(
        self, frames: Frames, timeout: float | None = None, before_waiting: Callable[[], None] | None = None
    ) -> int:
        header, buffers = frames.header, frames.buffers
        nbytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        if nbytes < SHARED_MEMORY_FROM and self._write_lock.acquire(blocking=False):
            # Nearly all messages: small, and nobody else writes. In one piece, at one go.
            rest: list[Buffer] = [_in_one_piece(header, buffers, nbytes)]
            ancillary: list[Any] = []
        else:
            if nbytes > self._limit:
                raise TooLargeError(
                    f"a message of {nbytes} bytes to worker {self.peer.name!r} is over the limit of {self._limit}; "
                    "send it in parts, or raise Options.max_message_bytes on both workers"
                )
            lane = self._fill_lane(frames, nbytes)
            if not self._take_write_lock(timeout, before_waiting):
                self._give_back_lane(lane)
                raise TimeoutError(
                    f"worker {self.peer.name!r} takes no messages: {timeout:.1f} s were not enough"
                )
            rest, ancillary = self._compose(frames, nbytes, lane)
        done = True
        try:
            if self._closed_because:
                raise ConnectionClosedError(self._closed_because)
            done = self._write_parts(rest, ancillary, timeout, before_waiting)
            self._messages_out += 1
            self._bytes_out += nbytes + len(header)
        finally:
            if done:
                self._write_lock.release()
        if not done:  # a thread of its own has the lock and the rest of the message now
            raise TimeoutError(f"worker {self.peer.name!r} did not take a message of {nbytes} bytes in time")
        return nbytes

    def _fill_lane(self, frames: Frames, nbytes: int) -> Any:
        """Copies the buffers to where the peer finds them, outside the lock. None: they go inline."""
        return None

    def _give_back_lane(self, lane: Any) -> None:
        """Undoes _fill_lane for a message that is not sent."""

    def _compose(self, frames: Frames, nbytes: int, lane: Any) -> tuple[list[Buffer], list[Any]]:
        """The bytes of a message and the ancillary data beside them; the write lock is held."""
        return inline_parts(frames, nbytes), []

    def _take_write_lock(self, timeout: float | None, before_waiting: Callable[[], None] | None) -> bool:
        if self._write_lock.acquire(blocking=False):
            return True
        if before_waiting is not None:
            before_waiting()
        return self._write_lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))

    def _write_parts(
        self,
        parts: list[Buffer],
        ancillary: list[Any],
        timeout: float | None,
        before_waiting: Callable[[], None] | None,
    ) -> bool:
        """Writes everything; False if the time was over and another thread took the rest and the lock."""
        deadline = writable = None
        try:
            while True:
                try:
                    if len(parts) == 1 and not ancillary:
                        sent = self._sock.send(parts[0])
                        if sent == len(parts[0]):
                            return True
                    else:
                        sent = self._sock.sendmsg(parts[:_IOV_MAX], ancillary)
                except BlockingIOError:
                    if writable is None:
                        writable = select.poll()
                        writable.register(self._fd, select.POLLOUT)
                        deadline = None if timeout is None else time.monotonic() + timeout
                        if before_waiting is not None:
                            before_waiting()
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        self._leave_to_a_thread(parts, ancillary)
                        return False
                    writable.poll(None if left is None else math.ceil(left * 1000))
                    if self._closed_because:
                        raise ConnectionClosedError(self._closed_because) from None
                    continue
                ancillary = []
                parts = _behind(parts, sent)
                if not parts:
                    return True
        except OSError as error:
            if isinstance(error, TransportError):
                raise
            self.abort(f"the connection with worker {self.peer.name!r} broke: {error}")
            raise ConnectionClosedError(self._closed_because) from error

    def _leave_to_a_thread(self, parts: list[Buffer], ancillary: list[Any]) -> None:
        # Half a message is out, so the stream is of no use until the other half is; but the caller's time is
        # over and its tensors are its own again. So the rest is copied, and written by whoever has the time.
        rest: list[Buffer] = [bytes(part) for part in parts]

        def finish() -> None:
            try:
                self._write_parts(rest, ancillary, None, None)
            except ConnectionClosedError:
                pass
            finally:
                self._write_lock.release()

        threading.Thread(target=finish, name=f"telegrad-write-{self.peer.name}", daemon=True).start()

    # -- reading ---------------------------------------------------------------------------------------

    def read(self, timeout: float | None) -> list[Frames]:
        frames: list[Frames] = []
        began = spin_until = -1.0
        while True:
            if self._closed_because:
                raise ConnectionClosedError(self._closed_because)
            try:
                if self._receive_some():
                    self._parse(frames)
                    if frames:
                        self._on_messages(frames)
                        return frames
                    continue
            except BlockingIOError:
                if timeout == 0:
                    return frames
            now = time.monotonic()
            if began < 0:
                began = now
                spin_until = now + (self._max_spin if self._lively else 0.0)
            left = None if timeout is None else timeout - (now - began)
            if left is not None and left <= 0:
                return frames
            if now < spin_until:
                os.sched_yield()
            else:
                self._readable.poll(None if left is None else math.ceil(left * 1000))

    def _on_messages(self, frames: list[Frames]) -> None:
        self._messages_in += len(frames)
        now = time.monotonic()
        # Spinning pays where messages follow each other closely, and costs a core elsewhere.
        self._lively = now - self._last_message < _LIVELY
        self._last_message = now

    @property
    def linger(self) -> float:
        return self._max_spin if self._lively else 0.0

    def _receive(self, target: memoryview) -> int:
        return self._sock.recv_into(target)

    def _receive_some(self) -> bool:
        """Takes what the socket has, once. Raises BlockingIOError if there is nothing."""
        partial = self._partial
        if partial is not None:
            target = partial.target()
        elif self._end == 0:
            target = self._inbox_view
        else:
            if self._end == len(self._inbox):
                self._make_room(len(self._inbox) // 2)
            target = self._inbox_view[self._end :]
        try:
            count = self._receive(target)
        except BlockingIOError:
            raise
        except OSError as error:
            self.abort(f"the connection with worker {self.peer.name!r} broke: {error}")
            raise ConnectionClosedError(self._closed_because) from error
        if count == 0:
            cut = self._partial is not None or self._start != self._end
            where = " in the middle of a message" if cut else ""
            self.abort(f"worker {self.peer.name!r} closed the connection{where}")
            raise ConnectionClosedError(self._closed_because)
        self._bytes_in += count
        if partial is not None:
            partial.received(count)
        else:
            self._end += count
        return True

    def _make_room(self, at_least: int) -> None:
        """Moves what is left to the front, and grows the inbox if that does not make enough room behind it."""
        left = self._inbox[self._start : self._end]
        if len(self._inbox) - len(left) < at_least:
            self._inbox = bytearray(len(left) + at_least)
            self._inbox_view = memoryview(self._inbox)
        self._inbox[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _parse(self, frames: list[Frames]) -> None:
        """Takes whole messages out of what was received."""
        try:
            if self._partial is not None:
                if not self._partial.complete:
                    return
                frames.append(self._partial.frames())
                self._partial = None
            while self._end - self._start >= _PREFIX_SIZE and self._parse_one(frames):
                pass
        except ProtocolError as error:
            self.abort(f"closed the connection with worker {self.peer.name!r}: {error}")
            raise
        if self._start == self._end:
            self._start = self._end = 0

    def _parse_one(self, frames: list[Frames]) -> bool:
        inbox, start = self._inbox, self._start
        magic, type_, lane, count, header_length, body_length = PREFIX.unpack_from(inbox, start)
        if (
            magic != MAGIC
            or type_ > FORGET
            or header_length > MAX_HEADER
            or count > MAX_BUFFERS
            or body_length > self._limit
        ):
            raise _bad_prefix(magic, type_, count, header_length, body_length, self._limit)
        head = _PREFIX_SIZE + 8 * count + header_length
        if lane == SHARED:
            head += SHARED_PLACE.size
        if self._end - start < head:
            if start + head > len(inbox):
                self._make_room(head)
            return False
        at = start + _PREFIX_SIZE
        lengths = (
            _LENGTH.unpack_from(inbox, at) if count == 1 else struct.unpack_from(f"<{count}Q", inbox, at)
        )
        at += 8 * count
        if lane == SHARED:
            place = SHARED_PLACE.unpack_from(inbox, at)
            at += SHARED_PLACE.size
            header = bytes(inbox[at : at + header_length])
            self._start = at + header_length
            frames.append(Frames(header, self._shared_buffers(place, lengths)))
            return True
        header = bytes(inbox[at : at + header_length])
        at += header_length
        if type_ == FORGET:
            self._start = at
            self._on_forget(header)
            return True
        if sum(lengths) != body_length:
            raise ProtocolError(f"the buffers of a message add up to {sum(lengths)} bytes, not {body_length}")
        if self._end - at < body_length:
            self._partial = _Partial(header, lengths, self._private_pool)
            self._partial.take(memoryview(inbox)[at : self._end])
            self._start = self._end = 0
            return False
        if count == 1:
            self._start = at + body_length
            frames.append(Frames(header, [inbox[at : self._start]]))
            return True
        buffers: list[Buffer] = []
        for length in lengths:
            buffers.append(inbox[at : at + length])
            at += length
        self._start = at
        frames.append(Frames(header, buffers))
        return True

    def _shared_buffers(self, place: tuple[int, int, int], lengths: Sequence[int]) -> list[Buffer]:
        raise ProtocolError(f"a message in shared memory over {self.transport}")

    def _on_forget(self, header: bytes) -> None:
        raise ProtocolError(f"a word about shared memory over {self.transport}")

    # -- life ------------------------------------------------------------------------------------------

    def _on_event(self) -> None:
        self.on_readable(self)

    def arm(self) -> None:
        try:
            self._watch(self._fd, ARMED)
        except (OSError, ValueError):  # not watched any more
            if not self._closed_because:
                raise

    def disarm(self) -> None:
        try:
            self._watch(self._fd, DISARMED)
        except (OSError, ValueError):
            if not self._closed_because:
                raise

    def abort(self, reason: str = "closed") -> None:
        if not self._closed_because:
            self._closed_because = reason
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def dispose(self) -> None:
        self.abort()
        # The descriptor's number may be given to somebody else as soon as it is closed, so nobody may be
        # inside a read or a write. abort() has sent them all away.
        with self.reading, self._write_lock:
            if self._disposed:
                return
            self._disposed = True
            self._poller.unregister(self._fd)
            self._sock.close()
            self._private_pool.close()
            self._dispose_lane()

    def _dispose_lane(self) -> None:
        """Gives back what a lane holds."""

    def statistics(self) -> ConnectionStatistics:
        return ConnectionStatistics(
            self.transport, self._messages_out, self._messages_in, self._bytes_out, self._bytes_in
        )


class _Partial:
    """A message whose body is still coming: each buffer is received where it will stay."""

    def __init__(self, header: bytes, lengths: Sequence[int], pool: SegmentPool) -> None:
        self._header = header
        large = sum(aligned(n) for n in lengths if n >= SHARED_MEMORY_FROM)
        memory = pool.take(large).lend() if large else None
        self._buffers: list[Buffer] = []
        at = 0
        for length in lengths:
            if memory is not None and length >= SHARED_MEMORY_FROM:
                self._buffers.append(memory[at : at + length])
                at += aligned(length)
            else:
                self._buffers.append(bytearray(length))
        self._index = 0  # the buffer that is being filled, and how far
        self._filled = 0
        self._skip_full()

    def _skip_full(self) -> None:
        while self._index < len(self._buffers) and self._filled == len(self._buffers[self._index]):
            self._index += 1
            self._filled = 0

    @property
    def complete(self) -> bool:
        return self._index == len(self._buffers)

    def target(self) -> memoryview:
        return memoryview(self._buffers[self._index])[self._filled :]

    def received(self, count: int) -> None:
        self._filled += count
        self._skip_full()

    def take(self, data: memoryview) -> None:
        while data:
            target = self.target()
            count = min(len(target), len(data))
            target[:count] = data[:count]
            self.received(count)
            data = data[count:]

    def frames(self) -> Frames:
        return Frames(self._header, self._buffers)


def inline_parts(frames: Frames, nbytes: int) -> list[Buffer]:
    """A message in the inline lane: in one piece if it is small, else in pieces that are not copied."""
    header, buffers = frames.header, frames.buffers
    if nbytes < SHARED_MEMORY_FROM:
        return [_in_one_piece(header, buffers, nbytes)]
    count = len(buffers)
    head = PREFIX.pack(MAGIC, MESSAGE, INLINE, count, len(header), nbytes)
    table = struct.pack(f"<{count}Q", *map(len, buffers))
    return [head + table + header, *(b for b in buffers if len(b))]


def _in_one_piece(header: bytes, buffers: Sequence[Buffer], nbytes: int) -> bytes:
    if len(buffers) == 1:
        head = _PREFIX_OF_ONE.pack(MAGIC, MESSAGE, INLINE, 1, len(header), nbytes, nbytes)
        return b"".join((head, header, buffers[0]))
    count = len(buffers)
    head = PREFIX.pack(MAGIC, MESSAGE, INLINE, count, len(header), nbytes)
    return b"".join((head, struct.pack(f"<{count}Q", *map(len, buffers)), header, *buffers))


def _bad_prefix(magic: bytes, type_: int, count: int, header: int, body: int, limit: int) -> ProtocolError:
    """What is wrong with a prefix; it was looked at before anything was allocated."""
    if magic != MAGIC or type_ > FORGET:
        return ProtocolError(f"a frame starts with {magic!r} and type {type_}, not with {MAGIC!r}")
    return ProtocolError(
        f"a frame announces a header of {header} bytes, {count} buffers and {body} bytes; "
        f"the limits are {MAX_HEADER}, {MAX_BUFFERS} and {limit} (Options.max_message_bytes)"
    )


def _behind(parts: list[Buffer], sent: int) -> list[Buffer]:
    """What remains of the parts after the first `sent` bytes."""
    for index, part in enumerate(parts):
        if sent < len(part):
            rest = [memoryview(part)[sent:], *parts[index + 1 :]] if sent else parts[index:]
            return list(rest)
        sent -= len(part)
    return []


# -- the handshake ---------------------------------------------------------------------------------------


def greet(sock: socket.socket, hello: Hello, address: str) -> Hello:
    """The connecting side's handshake, on a socket with a timeout.

    Raises:
        ConnectError: refused, or no answer.
        VersionError: the peer speaks another wire version.
    """
    try:
        _send_greeting(sock, msgspec.msgpack.encode(hello))
        answer = msgspec.msgpack.decode(_receive_greeting(sock), type=Hello | str)
    except VersionError:
        raise
    except (OSError, msgspec.MsgspecError, ProtocolError) as error:
        raise ConnectError(f"no telegrad worker answers at {address}: {error}") from error
    if isinstance(answer, str):
        raise ConnectError(f"the worker at {address} refuses the connection: {answer}")
    return answer


def welcome(sock: socket.socket, answer: Callable[[Hello], Hello]) -> Hello:
    """The accepting side's handshake; returns the peer's Hello.

    Raises:
        TransportError: not a telegrad worker, another wire version, or one that `answer` refused.
    """
    try:
        try:
            peer = msgspec.msgpack.decode(_receive_greeting(sock), type=Hello)
        except VersionError:
            _send_greeting(sock, msgspec.msgpack.encode("another wire version"))
            raise
        try:
            ours = answer(peer)
        except TelegradError as error:
            _send_greeting(sock, msgspec.msgpack.encode(str(error)))
            raise
        _send_greeting(sock, msgspec.msgpack.encode(ours))
    except (OSError, msgspec.MsgspecError) as error:
        if isinstance(error, TransportError):
            raise
        raise ConnectError(f"a handshake failed: {error}") from error
    return peer


def _send_greeting(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(GREETING.pack(GREETING_MAGIC, WIRE_VERSION, len(payload)) + payload)


def _receive_greeting(sock: socket.socket) -> bytes:
    magic, version, length = GREETING.unpack(_receive_exactly(sock, GREETING.size))
    if magic != GREETING_MAGIC or length > MAX_GREETING:
        raise ProtocolError(f"a connection starts with {magic!r}, not with {GREETING_MAGIC!r}")
    if version != WIRE_VERSION:
        raise VersionError(
            f"the peer speaks wire version {version}, this worker version {WIRE_VERSION}: "
            "install the same version of telegrad everywhere"
        )
    return _receive_exactly(sock, length)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ProtocolError("the connection ended during the handshake")
        data += piece
    return data


# -- listening -------------------------------------------------------------------------------------------


class StreamListener(Listener):
    """Accepts connections on threads of the worker's, and hands each on after its handshake."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        poller: Poller,
        options: Options,
        accept: Callable[[socket.socket], None],
    ) -> None:
        self.address = address
        self._sock = sock
        self._poller = poller
        self._options = options
        self._accept = accept
        self._lock = threading.Lock()  # guards the closing of the socket against an accept under way
        self._closed = False
        sock.setblocking(False)
        poller.register(sock.fileno(), self._on_event)
        poller.watch(sock.fileno(), ARMED)

    def _on_event(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                sock = None
                if not isinstance(error, BlockingIOError):
                    logger.warning("accepting a connection at %s failed: %s", self.address, error)
            self._poller.watch(self._sock.fileno(), ARMED)
        if sock is None:
            return
        sock.settimeout(self._options.connect_timeout)
        try:
            self._accept(sock)
        except TelegradError as error:
            logger.warning("refused a connection at %s: %s", self.address, error)
            sock.close()
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._poller.unregister(self._sock.fileno())
            self._sock.close()


def connect_socket(family: int, target: Any, address: str, timeout: float) -> socket.socket:
    """A connected socket with that timeout set.

    Raises:
        ConnectError: nobody answers there.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(target)
    except OSError as error:
        sock.close()
        raise ConnectError(f"nobody answers at {address}: {error}") from error
    return sock


def split_address(address: str, scheme: str) -> str:
    if not address.startswith(f"{scheme}://"):
        raise AddressError(f"{address!r} is not an address of the {scheme} transport")
    return address.removeprefix(f"{scheme}://")
