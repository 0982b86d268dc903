"""Workers of one process: queues instead of sockets. The reference for what a transport must do.

It carries the same frames through the same codec, so a received tensor is a copy here too. Workers find each
other in a Hub that they were given; there is no list of them in the process.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import ConnectError, ConnectionClosedError, TelegradError
from ..messages import Hello
from ..options import SHARED_MEMORY_FROM, Options
from ..primitives.memory import describe_failure, is_out_of_memory
from .base import (
    FORKED,
    Answer,
    BeforeWaiting,
    Buffer,
    Connection,
    ConnectionStatistics,
    CrossingError,
    Frames,
    Listener,
    OnConnection,
    OnFailed,
    Transport,
    deadline_of,
    ignore,
    split_address,
)
from .copying import copy_all
from .lease import ReadLease
from .shared_memory import SegmentPool, aligned

_OVERHEAD = 256  # counted for each message in a queue beside its bytes: a million tiny ones are not free


class Hub:
    """The place where in-process workers listen and connect."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.listeners: dict[str, InprocListener] = {}  # its single operations are atomic


class InprocConnection(Connection):
    """One end of a pair. What is written here is queued at the other end."""

    transport = "inproc"

    def __init__(self, peer: Hello, lease: ReadLease, options: Options) -> None:
        super().__init__(peer, lease)
        self._limit = options.max_message_bytes
        self._queue_limit = options.peer_byte_limit
        self._pool = SegmentPool(options.pool_bytes, shared=False)
        self._other: InprocConnection = self
        # Guards all below, of this end. Nothing is run under it, and no thread that holds it takes the other end's.
        self._lock = threading.Lock()
        self._queue: deque[Frames] = deque()
        self._queue_cost = 0
        self._is_open = False  # read by the holder of the lease
        self._closed_because = ""
        self._messages_put = self._messages_in = self._bytes_put = self._bytes_in = 0

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            has_something = bool(self._queue or self._closed_because)
        if has_something:
            self.lease.ring(self)

    def join(self, other: InprocConnection) -> None:
        self._other, other._other = other, self

    def write(self, frames: Frames, timeout: float | None = None, before_waiting: BeforeWaiting = None) -> int:
        nbytes = sum(map(len, frames.buffers))
        self._check_size(nbytes, self._limit)
        if self._closed_because:
            raise ConnectionClosedError(self._closed_because)
        copy = Frames(frames.header, self._copies(frames.buffers, nbytes))
        put = partial(self._put, copy, nbytes + len(frames.header))
        if not put():
            self._wait_until(put, deadline_of(timeout), before_waiting)
        return nbytes

    def _copies(self, buffers: Sequence[Buffer], nbytes: int) -> list[Buffer]:
        if nbytes < SHARED_MEMORY_FROM:
            return [bytearray(b) for b in buffers]
        try:
            memory = self._pool.lend(sum(aligned(len(b)) for b in buffers))
        except OSError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(describe_failure(nbytes)) from error
        return copy_all(buffers, memory)

    def _put(self, frames: Frames, nbytes: int) -> bool:
        """Queues a message at the other end; False if there is no room. One message always fits."""
        other = self._other
        with other._lock:
            if reason := self._closed_because or other._closed_because:
                raise ConnectionClosedError(reason)
            if other._queue and other._queue_cost >= other._queue_limit:
                return False
            other._queue.append(frames)
            other._queue_cost += nbytes + _OVERHEAD
            other._messages_put += 1
            other._bytes_put += nbytes
            is_open = other._is_open
        if is_open:
            other.lease.ring(other)
        return True

    def receive(self) -> list[Frames]:
        with self._lock:
            if not self._queue and self._closed_because:
                raise ConnectionClosedError(self._closed_because)
            frames = list(self._queue)
            self._queue.clear()
            self._queue_cost = 0
            self._messages_in, self._bytes_in = self._messages_put, self._bytes_put
        self._other._wake_writers()
        if self._closed_because:
            self.lease.ring(self)  # and the next time it says so
        return frames

    def abort(self, reason: str = "closed") -> None:
        self._end(reason)
        self._other._end(f"worker {self._other.peer.name!r} closed the connection")

    def _end(self, reason: str) -> None:
        with self._lock:
            self._closed_because = self._closed_because or reason
            is_open = self._is_open
        self._wake_writers()
        if is_open:
            self.lease.ring(self)

    def dispose(self) -> None:
        self.abort()
        with self._lock:
            self._queue.clear()
            self._is_open = False
        self._pool.close()

    def abandon(self) -> None:
        self._lock = threading.Lock()
        self._closed_because = self._closed_because or FORKED
        self._queue.clear()
        self._pool.abandon()

    def tick(self) -> None:
        self._pool.tick()

    def statistics(self) -> ConnectionStatistics:
        out = self._other
        return ConnectionStatistics(
            self.transport, out._messages_put, self._messages_in, out._bytes_put, self._bytes_in
        )


class InprocListener(Listener):
    def __init__(self, hub: Hub, accept: Callable[[Hello, InprocConnection], None]) -> None:
        super().__init__()
        self.address = f"inproc://{next(hub.ids)}"
        self.accept = accept
        self._hub = hub
        hub.listeners[self.address] = self

    def close(self) -> None:
        self._hub.listeners.pop(self.address, None)


class InprocTransport(Transport):
    """Workers of this process that were given the same Hub."""

    name = "inproc"

    def __init__(self, hub: Hub, lease: ReadLease, options: Options) -> None:
        self._hub = hub
        self._lease = lease
        self._options = options

    def listen(self, answer: Answer, on_connection: OnConnection, on_failed: OnFailed = ignore) -> Listener:
        def accept(hello: Hello, theirs: InprocConnection) -> None:
            theirs.peer = answer(hello)
            try:
                ours = InprocConnection(hello, self._lease, self._options)
                ours.join(theirs)
                on_connection(ours)
            except BaseException:
                on_failed(hello)
                raise

        return InprocListener(self._hub, accept)

    def connect(self, address: str, hello: Hello, timeout: float) -> Connection:
        split_address(address, "inproc")
        listener = self._hub.listeners.get(address)
        if listener is None:
            raise ConnectError(f"no worker answers at {address}")
        connection = InprocConnection(hello, self._lease, self._options)
        try:
            listener.accept(hello, connection)
        except TelegradError as error:
            kind = CrossingError if isinstance(error, CrossingError) else ConnectError
            raise kind(f"the worker at {address} refuses the connection: {error}") from error
        return connection


def loopback(hello: Hello, lease: ReadLease, options: Options) -> tuple[InprocConnection, InprocConnection]:
    """A worker's connection with itself."""
    near = InprocConnection(hello, lease, options)
    far = InprocConnection(hello, lease, options)
    near.join(far)
    return near, far
