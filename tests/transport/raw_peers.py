"""What the tests of one end of a connection put at the other: a plain socket, or a process."""

from __future__ import annotations

import array
import os
import pickle
import resource
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from conformance import read

from telegrad.messages import Hello
from telegrad.options import Options
from telegrad.transport.base import Frames
from telegrad.transport.lease import ReadLease
from telegrad.transport.poller import Poller
from telegrad.transport.stream import StreamConnection
from telegrad.transport.tcp import TcpConnection
from telegrad.transport.unix import UnixConnection

WAIT = 20.0
KINDS = {"unix": UnixConnection, "tcp": TcpConnection}


def socket_pair(transport: str) -> tuple[socket.socket, socket.socket]:
    if transport == "unix":
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def connection_over(sock: socket.socket, lease: ReadLease, options: Options | None = None) -> StreamConnection:
    kind = UnixConnection if sock.family == socket.AF_UNIX else TcpConnection
    connection = kind(sock, Hello("test", 2, "peer"), lease, options or Options())
    connection.open()
    return connection


@contextmanager
def polling() -> Iterator[tuple[Poller, ReadLease]]:
    """A poller that no thread polls, and a lease that the test holds."""
    poller = Poller()
    lease = ReadLease(poller)
    lease.try_take()
    try:
        yield poller, lease
    finally:
        lease.release()
        lease.close()
        poller.close()


class Raw:
    """The other end of a connection: a socket, and the test decides what goes over it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(WAIT)

    def send(self, data: bytes, descriptors: list[int] | None = None) -> None:
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            assert self.sock.sendmsg([data], [rights]) == len(data)
        else:
            self.sock.sendall(data)

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            assert piece, f"the connection ended after {len(data)} of {count} bytes"
            data += piece
        return data

    def close(self) -> None:
        self.sock.close()

    def is_closed_by_peer(self) -> bool:
        """After what is still to be read."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


class Trickle(socket.socket):
    """A socket that takes only so many bytes at once, or none, as one does whose buffer is nearly full."""

    at_once = 1
    full = False
    full_after = -1  # sends; -1: never
    broken: BaseException | None = None
    _turn = False

    def _bytes_now(self) -> int:
        if self.broken is not None:
            raise self.broken
        if self.full_after == 0:
            self.full = True
        self._turn = not self._turn
        if self.full or self._turn:  # full every other time in any case
            raise BlockingIOError
        self.full_after -= 1
        return self.at_once

    def send(self, data: Any, *args: Any) -> int:
        return super().send(memoryview(data)[: self._bytes_now()], *args)

    def sendmsg(self, buffers: Any, ancillary: Any = (), *args: Any) -> int:
        return super().sendmsg([b"".join(buffers)[: self._bytes_now()]], ancillary, *args)


def trickle(sock: socket.socket) -> Trickle:
    return Trickle(fileno=sock.detach())


def read_all(connection: StreamConnection, count: int) -> list[Frames]:
    found: list[Frames] = []
    while len(found) < count:
        found += read(connection, WAIT)
    assert len(found) == count
    return found


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """The process can open nothing more."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Child:
    """A fork that runs a function, given a pipe in each direction, and ends without pytest's noticing."""

    def __init__(self, function: Callable[[Child], Any]) -> None:
        into, ours = os.pipe()
        theirs, out = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, since Python 3.12
            self.pid = os.fork()
        if self.pid == 0:
            os.close(ours), os.close(theirs)
            self._in, self._out = into, out
            self._run(function)
        os.close(into), os.close(out)
        self._in, self._out = theirs, ours

    def _run(self, function: Callable[[Child], Any]) -> None:
        try:
            self.tell(("returned", function(self)))
        except BaseException:
            self.tell(("failed", traceback.format_exc()))
        finally:
            os._exit(0)

    def tell(self, value: Any) -> None:
        data = pickle.dumps(value)
        os.write(self._out, len(data).to_bytes(4, "little") + data)

    def hear(self) -> Any:
        """The next thing that the other side told; EOFError if it is gone."""
        head = os.read(self._in, 4)
        if not head:
            raise EOFError
        data = b""
        length = int.from_bytes(head, "little")
        while len(data) < length:
            data += os.read(self._in, length - len(data))
        return pickle.loads(data)

    def result(self) -> Any:
        """What the function returned."""
        how, value = self.hear()
        assert how == "returned", value
        return value

    def end(self, kill: bool = True) -> int:
        """Kills it, unless it is to end by itself; its exit status."""
        if self.pid < 0:
            return 0
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.pid = -1
        os.close(self._in), os.close(self._out)
        return status


@contextmanager
def forked(function: Callable[[Child], Any]) -> Iterator[Child]:
    child = Child(function)
    try:
        yield child
    finally:
        child.end()
