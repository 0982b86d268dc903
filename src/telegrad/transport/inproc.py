"""Workers of one process: queues instead of sockets. The reference for what a transport must do.

It carries the same frames through the same codec, so a received tensor is a copy here too. Workers find each
other in a Hub that they were given; there is no list of them in the process.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from ..config import SHARED_MEMORY_FROM, Options
from ..errors import AddressError, ConnectError, ConnectionClosedError, TelegradError, TooLargeError
from ..messages import Hello
from .base import Buffer, Connection, ConnectionStatistics, Frames, Listener, Transport
from .shm import SegmentPool, aligned, copy_into
from .streams import split_address

Submit = Callable[[Callable[[], None]], None]


class Hub:
    """Where in-process workers listen and connect."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.listeners: dict[str, InprocListener] = {}

    def new_address(self) -> str:
        return f"inproc://{next(self._ids)}"


class InprocConnection(Connection):
    """One end of a pair. What is written here is queued at the other end."""

    transport = "inproc"

    def __init__(self, peer: Hello, submit: Submit, options: Options) -> None:
        super().__init__(peer)
        self._submit = submit
        self._limit = options.max_message_bytes
        self._pending_limit = options.peer_byte_limit
        self._pool = SegmentPool(options.pool_bytes, shared=False)
        self._other: InprocConnection = self
        self._changed = threading.Condition()  # guards all below, of this end
        self._queue: deque[tuple[Frames, int]] = deque()
        self._queued_bytes = 0
        self._armed = False
        self._closed_because = ""
        self._messages_out = self._messages_in = self._bytes_out = self._bytes_in = 0

    def join(self, other: InprocConnection) -> None:
        self._other, other._other = other, self

    def write(
        self, frames: Frames, timeout: float | None = None, before_waiting: Callable[[], None] | None = None
    ) -> int:
        nbytes = sum(len(b) for b in frames.buffers)
        if nbytes > self._limit:
            raise TooLargeError(
                f"a message of {nbytes} bytes to worker {self.peer.name!r} is over the limit of {self._limit}; "
                "send it in parts, or raise Options.max_message_bytes on both workers"
            )
        if self._closed_because:
            raise ConnectionClosedError(self._closed_because)
        copy = Frames(frames.header, self._copies(frames.buffers, nbytes))
        self._other._put(copy, nbytes, timeout, before_waiting)
        self._messages_out += 1
        self._bytes_out += nbytes + len(frames.header)
        return nbytes

    def _copies(self, buffers: tuple[Buffer, ...] | list[Buffer] | object, nbytes: int) -> list[Buffer]:
        if nbytes < SHARED_MEMORY_FROM:
            return [bytearray(b) for b in buffers]  # type: ignore[attr-defined]
        memory = self._pool.take(sum(aligned(len(b)) for b in buffers)).lend()  # type: ignore[attr-defined]
        copies: list[Buffer] = []
        for buffer in buffers:  # type: ignore[attr-defined]
            copy_into(memory, buffer)
            copies.append(memory[: len(buffer)])
            memory = memory[aligned(len(buffer)) :]
        return copies

    def _put(
        self, frames: Frames, nbytes: int, timeout: float | None, before_waiting: Callable[[], None] | None
    ) -> None:
        if before_waiting is not None and self._queued_bytes >= self._pending_limit:
            before_waiting()
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._closed_because or not self._queue or self._queued_bytes < self._pending_limit,
                timeout,
            )
            if self._closed_because:
                raise ConnectionClosedError(self._closed_because)
            if not room:
                raise TimeoutError(f"worker {self._other.peer.name!r} takes no messages")
            self._queue.append((frames, nbytes))
            self._queued_bytes += nbytes
            self._changed.notify_all()
            self._announce_locked()

    def _announce_locked(self) -> None:
        if self._armed and (self._queue or self._closed_because):
            self._armed = False
            self._submit(lambda: self.on_readable(self))

    def read(self, timeout: float | None) -> list[Frames]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed_because, timeout)
            if not self._queue and self._closed_because:
                raise ConnectionClosedError(self._closed_because)
            frames = [f for f, _ in self._queue]
            self._messages_in += len(frames)
            self._bytes_in += self._queued_bytes
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
            return frames

    def arm(self) -> None:
        with self._changed:
            self._armed = True
            self._announce_locked()

    def disarm(self) -> None:
        with self._changed:
            self._armed = False

    def abort(self, reason: str = "closed") -> None:
        for end in (self, self._other):
            with end._changed:
                if not end._closed_because:
                    end._closed_because = reason
                end._changed.notify_all()
                end._announce_locked()

    def dispose(self) -> None:
        self.abort(f"worker {self.peer.name!r} closed the connection" if self._closed_because else "closed")
        self._pool.close()

    def statistics(self) -> ConnectionStatistics:
        return ConnectionStatistics(
            self.transport, self._messages_out, self._messages_in, self._bytes_out, self._bytes_in
        )


class InprocListener(Listener):
    def __init__(self, hub: Hub, accept: Callable[[Hello, InprocConnection], InprocConnection]) -> None:
        self.address = hub.new_address()
        self.accept = accept
        self._hub = hub
        hub.listeners[self.address] = self

    def close(self) -> None:
        self._hub.listeners.pop(self.address, None)


class InprocTransport(Transport):
    """`submit` runs a function on a thread of the worker that this end belongs to."""

    name = "inproc"

    def __init__(self, hub: Hub, submit: Submit, options: Options) -> None:
        self._hub = hub
        self._submit = submit
        self._options = options

    def listen(
        self, answer: Callable[[Hello], Hello], on_connection: Callable[[Connection], None]
    ) -> Listener:
        def accept(hello: Hello, theirs: InprocConnection) -> InprocConnection:
            theirs.peer = answer(hello)
            ours = InprocConnection(hello, self._submit, self._options)
            ours.join(theirs)
            on_connection(ours)
            return ours

        return InprocListener(self._hub, accept)

    def connect(self, address: str, hello: Hello, timeout: float) -> Connection:
        split_address(address, "inproc")
        listener = self._hub.listeners.get(address)
        if listener is None:
            raise ConnectError(f"nobody answers at {address}")
        connection = InprocConnection(hello, self._submit, self._options)
        try:
            listener.accept(hello, connection)
        except AddressError:
            raise
        except TelegradError as error:
            raise ConnectError(f"the worker at {address} refuses the connection: {error}") from error
        return connection


def loopback(hello: Hello, submit: Submit, options: Options) -> tuple[InprocConnection, InprocConnection]:
    """A worker's connection with itself."""
    near = InprocConnection(hello, submit, options)
    far = InprocConnection(hello, submit, options)
    near.join(far)
    return near, far
