"""How two ends of a socket meet: each says which wire version it speaks and who it is.

    connecting side   greet(hello)     ->  GREETING, Hello
    accepting side    welcome(answer)  <-  GREETING, Hello or Refusal
    connecting side                    ->  GREETING, nothing: it takes the connection

The connection exists from the third on. Whoever gives up before it has lost no connection: the other side must not
take that for a death (see Note [fencing] in peers.py).
The first ten bytes of a greeting are the same in every version, so that two versions can tell.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import msgspec

from ..errors import ConnectError, ProtocolError, TelegradError, TransportError, VersionError
from ..messages import WIRE_VERSION, Hello, Refusal
from ..primitives import clock
from ..primitives.interrupts import interruptible
from .base import CrossingError

GREETING = struct.Struct("<4sHI")  # magic, wire version, length of what follows
GREETING_MAGIC = b"TGRD"
MAX_GREETING = 64 << 10


def greet(sock: socket.socket, hello: Hello, address: str, timeout: float) -> Hello:
    """The connecting side's handshake; returns the peer's Hello.

    Raises:
        ConnectError: refused, or no answer in time.
        CrossingError: refused, since there is a connection already, or the peer is making one.
        VersionError: the peer speaks another wire version.
    """
    deadline = clock.now() + timeout
    try:
        _send(sock, msgspec.msgpack.encode(hello), deadline)
        answer = msgspec.msgpack.decode(interruptible(_receive, sock, deadline), type=Hello | Refusal)
        if isinstance(answer, tuple):
            reason, is_crossing = answer
            kind = CrossingError if is_crossing else ConnectError
            raise kind(f"the worker at {address} refuses the connection: {reason}")
        if answer.id != hello.to and hello.to >= 0:
            raise ConnectError(f"worker {answer.name!r} with id {answer.id} answers at {address}, not id {hello.to}")
        _send(sock, b"", deadline)
    except (VersionError, ConnectError):
        raise
    except (OSError, msgspec.MsgspecError) as error:
        raise ConnectError(f"no telegrad worker answers at {address}: {error}") from error
    return answer


def welcome(sock: socket.socket, answer: Callable[[Hello], Hello], timeout: float) -> Hello:
    """The accepting side's handshake; returns the peer's Hello.

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
            _refuse(sock, (f"only wire version {WIRE_VERSION} is spoken here", False), deadline)
            raise
        try:
            ours = answer(peer)
        except TelegradError as error:
            _refuse(sock, (str(error), isinstance(error, CrossingError)), deadline)
            raise
        _send(sock, msgspec.msgpack.encode(ours), deadline)
        _receive(sock, clock.now() + timeout)
    except TransportError:
        raise
    except (OSError, msgspec.MsgspecError) as error:
        raise ConnectError(f"a handshake failed: {error}") from error
    return peer


def _refuse(sock: socket.socket, refusal: Refusal, deadline: float) -> None:
    _send(sock, msgspec.msgpack.encode(refusal), deadline)


def _send(sock: socket.socket, payload: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(GREETING.pack(GREETING_MAGIC, WIRE_VERSION, len(payload)) + payload)


def _receive(sock: socket.socket, deadline: float) -> bytes:
    magic, version, length = GREETING.unpack(_receive_exactly(sock, GREETING.size, deadline))
    if magic != GREETING_MAGIC or length > MAX_GREETING:
        raise ProtocolError(f"a connection starts with {magic!r}, not with {GREETING_MAGIC!r}")
    payload = _receive_exactly(sock, length, deadline)  # of another version too: who closes unread bytes resets
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
