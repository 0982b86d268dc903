"""The contract of a transport. It moves frames and knows nothing of what is in them.

    worker.send  -> Connection.write(frames)  ~~>  Connection.receive() -> frames  -> worker.receive

To add a transport, write a Connection, a Listener and a Transport, made as `Transport(poller, lease, options)`. Over
stream sockets StreamConnection and StreamTransport do most of it, and tcp.py is the shortest example. Then name it in
registry.py, in Options.transports, in LocalCluster, and in runtime/routes.py, which says which peers are dialled by it.
`tests/transport/conformance.py` holds every transport to this contract.

Reading is shared: one thread at a time reads the connections of a worker, the one that has the read lease (lease.py).
Under it only bytes are read; users' code runs after it was released. A connection is made with the lease of its
worker, and is read from `open` on.

A connection belongs to the process that made it. In a fork of that process it has ended, and the parent notices nothing
of what the fork does with it.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import AddressError, ConnectError, TooLargeError
from ..messages import Hello
from ..primitives import clock
from ..primitives.waiter import Waiter
from .lease import ReadLease

if TYPE_CHECKING:
    from .device import DeviceLane

Buffer = bytes | bytearray | memoryview
BeforeWaiting = Callable[[], None] | None
Answer = Callable[[Hello], Hello]
OnConnection = Callable[["Connection"], None]
OnFailed = Callable[[Hello], None]

FORKED = "the connection belongs to the process that this one is a fork of"


class CrossingError(ConnectError):
    """The peer refuses a connection since it has one with this worker already, or is making one: use that."""


def ignore(_: object) -> None:
    """Does nothing: the default of `on_failed`."""


class Frames(msgspec.Struct, eq=False):
    """A message as bytes. A buffer that is a memoryview is flat, and of bytes.

    Written: `keep` holds what must stay alive while the buffers are read from. After `write` returned or raised the
    buffers may change, and the receiver never sees it.
    Read: each buffer is writable and belongs to the receiver alone, until nothing refers to it, also after the
    connection's end.
    """

    header: bytes
    buffers: Sequence[Buffer]
    keep: Any = None
    # Read: why the buffers could not be received, since there was no memory or no descriptor for them
    missing: str = ""
    # Read: tensors in device memory, and by when they must be there; see device.py
    arrived: Sequence[Any] = ()
    deadline: float | None = None

    @property
    def nbytes(self) -> int:
        """The size of header and buffers, as connections count it."""
        return len(self.header) + sum(map(len, self.buffers))


@dataclass(frozen=True)
class ConnectionStatistics:
    """Counts of one end, in bytes of headers and buffers. The other end counts the same in, once it has read it."""

    transport: str
    messages_out: int
    messages_in: int
    bytes_out: int
    bytes_in: int
    shared_bytes: int = 0  # shared memory that this end holds for its sends, free or in use
    shared_bytes_free: int = 0
    # Tensors by the device lane, which are in none of the above:
    device_bytes_out: int = 0
    device_bytes_in: int = 0
    device_waits: int = 0  # for the peer's copy of a tensor
    device_pool_bytes: int = 0  # device memory that this end holds for its sends, free or in use
    device_refusal: str = ""  # why tensors on devices go through the host


class Connection(ABC):
    """One connection with one peer, after the handshake. Both ends read and write at once."""

    transport: str
    peer: Hello
    fd = -1  # its descriptor, for a connection that the lease polls; the others ring the lease's bell
    device_lane: DeviceLane | None = None  # once there was something to do for it

    def __init__(self, peer: Hello, lease: ReadLease) -> None:
        self.peer = peer
        self.lease = lease
        self._writers: list[Waiter] = []  # threads that wait for their turn; its single operations are atomic
        _ours.add(self)

    @abstractmethod
    def open(self) -> None:
        """Has the holder of the lease read this connection from here on, what has arrived already included."""

    @abstractmethod
    def write(self, frames: Frames, timeout: float | None = None, before_waiting: BeforeWaiting = None) -> int:
        """Sends one message; returns the size of its buffers in bytes. May be called on any thread.

        Waits while the peer does not read; that is the back-pressure. `before_waiting` is called before it does,
        perhaps more than once: a caller that holds the lease must release it then, or two workers that write to each
        other would wait for ever.

        Raises:
            HandedOverError: the time is over, or an interrupt came, in the middle of the message. It will arrive,
                whole, or the connection ends.
            TimeoutError: the peer did not take it in time. Nothing was sent.
            ConnectionClosedError: the connection has ended. Whether the message arrived is not known.
            TooLargeError: the message is over the limit. Nothing was sent.
            MemoryError: there is no memory to send it. Nothing was sent.
        """

    @abstractmethod
    def receive(self) -> list[Frames]:
        """The messages that have arrived, in the order of their sending; empty if none is whole yet. Never blocks.
        The caller holds the lease. As long as more has arrived, the lease finds the connection again.

        Raises:
            ConnectionClosedError: the connection has ended. If the peer ended it, all that had arrived was
                returned before.
            ProtocolError: the bytes make no sense. The connection has ended.

        A message for whose buffers there is no memory, or no descriptor, is returned without them (`Frames.missing`).
        """

    @abstractmethod
    def abort(self, reason: str = "closed") -> None:
        """Ends the connection at once. From any thread, any number of times; never blocks.

        Reads and writes raise ConnectionClosedError from then on: here at once, at the other end when it has read what
        was sent, and at the latest when this end was disposed of. What was written before and not yet read may arrive
        or may not.
        """

    @abstractmethod
    def dispose(self) -> None:
        """Aborts and gives back all that the system lent: at once, or as soon as the thread that reads has come
        round. Any number of times. The caller holds no lock; a thread that reads or writes meanwhile gets
        ConnectionClosedError."""

    def abandon(self) -> None:  # noqa: B027
        """Called in a fork of the process, where no other thread is: ends this copy of the connection, with new locks,
        and lets go of the fork's copies of descriptors. The parent's goes on."""

    def tick(self) -> None:  # noqa: B027
        """Gives back memory that is kept for reuse and was not used for a while. Called every few seconds, on any
        thread; never blocks. A transport that keeps nothing has nothing to do."""

    def open_device_lane(self) -> DeviceLane | None:
        """The lane for tensors on CUDA devices; None for a transport that has none."""
        return None

    @abstractmethod
    def statistics(self) -> ConnectionStatistics:
        """Counts so far. Never blocks."""

    # -- shared by implementations ---------------------------------------------------------------------

    def _wait_until(self, try_it: Callable[[], bool], deadline: float | None, before_waiting: BeforeWaiting) -> None:
        """Waits until `try_it()` has succeeded. It is tried again after each `_wake_writers()`."""
        if before_waiting is not None:
            before_waiting()
        while not try_it():
            waiter = Waiter()
            self._writers.append(waiter)
            if try_it():
                return  # what was waited for came before the waiter could be seen
            left = left_until(deadline)
            if left is not None and left <= 0:
                raise self._too_slow()
            waiter.sleep(left)

    def _wake_writers(self) -> None:
        """Wakes all threads that wait: one that has given up must not be the only one."""
        while self._writers:
            try:
                self._writers.pop().set_done()
            except IndexError:
                return

    def _too_slow(self) -> TimeoutError:
        return TimeoutError(f"worker {self.peer.name!r} did not take the message in time")

    def _check_size(self, nbytes: int, limit: int) -> None:
        if nbytes > limit:
            raise TooLargeError(
                f"a message of {nbytes} bytes to worker {self.peer.name!r} is over the limit of {limit}; "
                "send it in parts, or raise Options.max_message_bytes on both workers"
            )


class Listener(ABC):
    address: str

    def __init__(self) -> None:
        _ours.add(self)

    @abstractmethod
    def close(self) -> None:
        """Accepts no peer any more and leaves nothing behind. Any number of times."""

    def abandon(self) -> None:  # noqa: B027
        """Called in a fork of the process: lets go of the fork's copies of descriptors. The parent's goes on."""


class Transport(ABC):
    """A way to listen and to connect, for one worker."""

    name: str

    @abstractmethod
    def listen(self, answer: Answer, on_connection: OnConnection, on_failed: OnFailed = ignore) -> Listener:
        """Accepts peers: `answer` gets a peer's Hello and returns ours, or raises to refuse it with that text. For each
        Hello that was not refused, `on_connection` gets the connection, not open yet, when the peer has confirmed
        it; or `on_failed` gets the Hello. All are called on threads of the worker's.

        Raises:
            AddressError: it cannot listen there, and why.
        """

    @abstractmethod
    def connect(self, address: str, hello: Hello, timeout: float) -> Connection:
        """Connects to a listener's address; the connection is not open yet.

        Raises:
            ConnectError: no worker answers, the peer refused us, or the time is over.
            CrossingError: the peer refused us since it has a connection with us, or is making one.
            VersionError: the peer speaks another wire version.
        """


def split_address(address: str, scheme: str) -> str:
    """The part of an address behind its scheme."""
    if not address.startswith(f"{scheme}://"):
        raise AddressError(f"{address!r} is not an address of the {scheme} transport")
    return address.removeprefix(f"{scheme}://")


def deadline_of(timeout: float | None) -> float | None:
    return None if timeout is None else clock.now() + timeout


def left_until(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - clock.now()


_ours: weakref.WeakSet[Connection | Listener] = weakref.WeakSet()


def _in_child() -> None:
    for connection_or_listener in list(_ours):
        connection_or_listener.abandon()


os.register_at_fork(after_in_child=_in_child)
