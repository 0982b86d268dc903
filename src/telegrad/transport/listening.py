"""How two ends of a stream socket meet: listening, connecting and the handshake, for `unix` and `tcp`.

    connecting side   greet(hello)     ->  GREETING, Hello
    accepting side    welcome(answer)  <-  GREETING, Hello or Refusal
    connecting side                    ->  GREETING, nothing: it takes the connection

Each side says which wire version it speaks and which worker it is. The connection exists from the third greeting on.
If a side gives up earlier, there was no connection, and the other side must not take that for a death (see Note
[fencing] in peers.py). The first ten bytes of a greeting are the same in every version, so that two versions can tell.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import ConnectError, ProtocolError, TelegradError, TransportError, VersionError
from ..events import logger
from ..messages import WIRE_VERSION, Hello, Refusal
from ..options import Options
from ..primitives import clock
from ..primitives.interrupts import interruptible
from ..primitives.text import check_name, clean
from .base import Answer, Connection, CrossingError, Listener, OnConnection, OnFailed, Transport, ignore
from .lease import ReadLease
from .poller import ARMED, Poller
from .stream import StreamConnection

GREETING = struct.Struct("<4sHI")  # magic, wire version, length of what follows
GREETING_MAGIC = b"TGRD"
MAX_GREETING = 64 << 10


class StreamTransport(Transport):
    """Listens and connects on stream sockets. A subclass says where, and which class its connections have."""

    connection: type[StreamConnection]

    def __init__(self, poller: Poller, lease: ReadLease, options: Options) -> None:
        self.poller = poller
        self._lease = lease
        self._options = options

    def listen(self, answer: Answer, on_connection: OnConnection, on_failed: OnFailed = ignore) -> Listener:
        return StreamListener(self, *self._bind(), answer, on_connection, on_failed)

    def connect(self, address: str, hello: Hello, timeout: float) -> Connection:
        deadline = clock.now() + timeout
        sock = connect_socket(*self._target(address), address, timeout)
        try:
            self._check_peer(sock)
            peer = greet(sock, hello, address, deadline - clock.now())
            return self.connection(sock, peer, self._lease, self._options)
        except BaseException:
            sock.close()
            raise

    def accept(self, sock: socket.socket, answer: Answer) -> Connection:
        """Makes a connection of a socket that a listener has accepted."""
        self._check_peer(sock)
        peer = welcome(sock, answer, self._options.connect_timeout)
        return self.connection(sock, peer, self._lease, self._options)

    @abstractmethod
    def _bind(self) -> tuple[socket.socket, str, Sequence[int]]:
        """A listening socket, its address, and descriptors to be closed with it.

        Raises:
            AddressError: it cannot listen there, and why.
        """

    @abstractmethod
    def _target(self, address: str) -> tuple[int, Any]:
        """The family of sockets that an address belongs to, and where it is for connect().

        Raises:
            AddressError: it is not an address of this transport.
            ConnectError: this worker cannot connect to it, or does not do so.
        """

    def _check_peer(self, sock: socket.socket) -> None:
        """Raises a ConnectError if the process at the other end must not be spoken to."""


class StreamListener(Listener):
    """Accepts connections on threads of the worker's, and hands each on after its handshake."""

    def __init__(
        self,
        transport: StreamTransport,
        sock: socket.socket,
        address: str,
        more_descriptors: Sequence[int],
        answer: Answer,
        on_connection: OnConnection,
        on_failed: OnFailed,
    ) -> None:
        self.address = address
        self._accept = transport.accept
        self._poller = transport.poller
        self._sock = sock
        self._more_descriptors = more_descriptors
        self._answer = answer
        self._on_connection = on_connection
        self._on_failed = on_failed
        # Guards all below, and the socket's closing against an accept under way. Reentrant: a finaliser may run in it.
        self._lock = threading.RLock()
        self._greeting: set[socket.socket] = set()  # whose handshake is under way
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)  # see _turn_away_locked
        self._closed = False
        sock.setblocking(False)
        self._poller.register(sock.fileno(), self._on_event)
        self._poller.watch(sock.fileno(), ARMED)
        super().__init__()

    def _on_event(self) -> None:
        with self._lock:
            if self._closed:
                return
            sock = self._accept_locked()
            if sock is not None:
                self._greeting.add(sock)
            self._poller.watch(self._sock.fileno(), ARMED)
        if sock is not None:
            connection = self._shake_hands(sock)
            if connection is not None:
                try:
                    self._on_connection(connection)
                except BaseException:
                    connection.dispose()
                    raise

    def _shake_hands(self, sock: socket.socket) -> Connection | None:
        answered: list[Hello] = []

        def answer(hello: Hello) -> Hello:
            ours = self._answer(hello)
            answered.append(hello)
            return ours

        try:
            return self._accept(sock, answer)
        except BaseException as error:
            sock.close()
            for hello in answered:
                self._on_failed(hello)
            if not isinstance(error, TelegradError):
                raise
            # That two workers dial each other at once is nothing to warn of.
            level = logging.DEBUG if isinstance(error, CrossingError) else logging.WARNING
            logger.log(level, "refused a connection at %s: %s", self.address, str(error))
            return None
        finally:
            with self._lock:
                self._greeting.discard(sock)

    def _accept_locked(self) -> socket.socket | None:
        try:
            return self._sock.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            logger.warning("accepting a connection at %s failed: %s", self.address, str(error))
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away_locked()
            return None

    def _turn_away_locked(self) -> None:
        """Accepts a peer with the descriptor kept for this, and hangs up on it. The process is out of descriptors, and
        the poller would announce that peer again and again."""
        os.close(self._spare)
        try:
            self._sock.accept()[0].close()
        except OSError:
            pass
        finally:
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._poller.unregister(self._sock.fileno())
            self._close_descriptors()
            for sock in self._greeting:  # the threads that wait for a peer's greeting need not wait any longer
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _close_descriptors(self) -> None:
        self._closed = True
        self._sock.close()
        for fd in (self._spare, *self._more_descriptors):
            os.close(fd)

    def abandon(self) -> None:
        self._lock = threading.RLock()
        if not self._closed:
            self._close_descriptors()
        for sock in self._greeting:
            sock.close()


def connect_socket(family: int, target: Any, address: str, timeout: float) -> socket.socket:
    """A connected socket; a ConnectError if nothing listens there."""
    deadline = clock.now() + timeout
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.0, timeout))
        while True:
            try:
                interruptible(sock.connect, target)
                return sock
            except BlockingIOError:  # a unix listener with a long queue; it does not let us wait for our turn
                if clock.now() >= deadline or family != socket.AF_UNIX:
                    raise
                interruptible(time.sleep, 1e-3)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise ConnectError(f"no worker answers at {address}: {error}") from error
        raise


# -- the handshake -----------------------------------------------------------------------------------------


def greet(sock: socket.socket, hello: Hello, address: str, timeout: float) -> Hello:
    """Does the connecting side's handshake; returns the peer's Hello.

    Raises:
        ConnectError: refused, or no answer in time.
        CrossingError: refused, since there is a connection already, or the peer is making one.
        VersionError: the peer speaks another wire version.
    """
    deadline = clock.now() + timeout
    try:
        _send(sock, hello, deadline)
        answer = msgspec.msgpack.decode(interruptible(_receive, sock, deadline), type=Hello | Refusal)
        if isinstance(answer, tuple):
            reason, is_crossing = answer
            kind = CrossingError if is_crossing else ConnectError
            raise kind(f"the worker at {address} refuses the connection: {clean(reason)}")
        check_name(answer.name)
        if answer.id != hello.to and hello.to >= 0:
            raise ConnectError(f"worker {answer.name!r} with id {answer.id} answers at {address}, not id {hello.to}")
        _send(sock, None, deadline)
    except (VersionError, ConnectError):
        raise
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors
        raise ConnectError(f"no telegrad worker answers at {address}: {clean(str(error))}") from error
    return answer


def welcome(sock: socket.socket, answer: Answer, timeout: float) -> Hello:
    """Does the accepting side's handshake; returns the peer's Hello.

    Raises:
        TransportError: not a telegrad worker, another wire version, or too slow.
        TelegradError: what `answer` refused it with.
    """
    deadline = clock.now() + timeout
    try:
        try:
            peer = msgspec.msgpack.decode(_receive(sock, deadline), type=Hello)
        except VersionError:
            # Our version stands in the greeting, and says it all; the text is for versions to come.
            _send(sock, (f"only wire version {WIRE_VERSION} is spoken here", False), deadline)
            raise
        check_name(peer.name)
        try:
            ours = answer(peer)
        except TelegradError as error:
            _send(sock, (str(error), isinstance(error, CrossingError)), deadline)
            raise
        _send(sock, ours, deadline)
        _receive(sock, clock.now() + timeout)
    except TransportError:
        raise
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors
        raise ConnectError(f"a handshake failed: {clean(str(error))}") from error
    return peer


def _send(sock: socket.socket, message: Hello | Refusal | None, deadline: float) -> None:
    payload = b"" if message is None else msgspec.msgpack.encode(message)
    sock.settimeout(_left(deadline))
    sock.sendall(GREETING.pack(GREETING_MAGIC, WIRE_VERSION, len(payload)) + payload)


def _receive(sock: socket.socket, deadline: float) -> bytes:
    magic, version, length = GREETING.unpack(_receive_exactly(sock, GREETING.size, deadline))
    if magic != GREETING_MAGIC or length > MAX_GREETING:
        raise ProtocolError(f"a connection starts with {magic!r}, not with {GREETING_MAGIC!r}")
    payload = _receive_exactly(sock, length, deadline)  # of another version too: closing over unread bytes resets
    if version != WIRE_VERSION:
        raise VersionError(
            f"the peer speaks wire version {version}, this worker version {WIRE_VERSION}: "
            "install the same version of telegrad everywhere"
        )
    return payload


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(_left(deadline))  # for all of it: a byte now and then must not hold a thread for long
        piece = sock.recv(count - len(data))
        if not piece:
            raise ProtocolError("the connection ended during the handshake")
        data += piece
    return data


def _left(deadline: float) -> float:
    left = deadline - clock.now()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left
