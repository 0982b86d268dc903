"""One host: a unix socket between processes of one user, large messages in pooled shared memory.

The socket is bound in a private directory and unlinked at once; peers reach it through the listener's
descriptor in /proc, which only the same user may follow. So nothing is ever left in the file system, also
after kill -9. Both sides check each other's user id.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..config import SHARED_MEMORY_FROM, Options
from ..errors import AddressError, ConnectError, ProtocolError
from ..messages import Hello
from .base import Buffer, Connection, ConnectionStatistics, Frames, Listener, Transport
from .poller import Poller
from .shm import Mappings, Segment, SegmentPool, aligned, copy_into
from .streams import (
    FORGET,
    INLINE,
    MAGIC,
    MESSAGE,
    PREFIX,
    SHARED,
    SHARED_PLACE,
    StreamConnection,
    StreamListener,
    connect_socket,
    greet,
    inline_parts,
    split_address,
    welcome,
)

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_DESCRIPTORS = socket.CMSG_SPACE(16 * 4)


class UnixConnection(StreamConnection):
    transport = "unix"

    def __init__(self, sock: socket.socket, peer: Hello, poller: Poller, options: Options) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        super().__init__(sock, peer, poller, options)
        self._pool = SegmentPool(options.pool_bytes, shared=True)
        self._mappings = Mappings()  # guarded by `reading`
        self._descriptors: list[int] = []  # received, not yet claimed by a message; guarded by `reading`

    def _fill_lane(self, frames: Frames, nbytes: int) -> Segment | None:
        if nbytes < SHARED_MEMORY_FROM:
            return None
        segment = self._pool.take(sum(aligned(len(b)) for b in frames.buffers))
        try:
            target = memoryview(segment.memory)
            for buffer in frames.buffers:
                copy_into(target, buffer)
                target = target[aligned(len(buffer)) :]
        except BaseException:
            segment.mark_free()
            raise
        return segment

    def _give_back_lane(self, lane: Segment | None) -> None:
        if lane is not None:
            lane.mark_free()

    def _compose(self, frames: Frames, nbytes: int, lane: Segment | None) -> tuple[list[Buffer], list[Any]]:
        forget = self._compose_forget()
        if lane is None:
            return forget + inline_parts(frames, nbytes), []
        ancillary: list[Any] = []
        if not lane.passed_on:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lane.fd]))]
        count = len(frames.buffers)
        head = PREFIX.pack(MAGIC, MESSAGE, SHARED, count, len(frames.header), 0)
        table = struct.pack(f"<{count}Q", *map(len, frames.buffers))
        place = SHARED_PLACE.pack(lane.id, lane.capacity, not lane.passed_on)
        lane.passed_on = True
        return [b"".join((*forget, head, table, place, frames.header))], ancillary

    def _compose_forget(self) -> list[Buffer]:
        dropped = self._pool.take_dropped()
        if not dropped:
            return []
        ids = msgspec.msgpack.encode(dropped)
        return [PREFIX.pack(MAGIC, FORGET, INLINE, 0, len(ids), 0) + ids]

    def _receive(self, target: memoryview) -> int:
        count, ancillary, _, _ = self._sock.recvmsg_into([target], _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        for level, type_, data in ancillary:
            if level == socket.SOL_SOCKET and type_ == socket.SCM_RIGHTS:
                self._descriptors.extend(array.array("i", data[: len(data) - len(data) % 4]))
        return count

    def _shared_buffers(self, place: tuple[int, int, int], lengths: Sequence[int]) -> list[Buffer]:
        id, capacity, fresh = place
        if sum(map(aligned, lengths)) > capacity:
            raise ProtocolError(f"a message of {sum(lengths)} bytes does not fit its segment of {capacity}")
        if fresh:
            if not self._descriptors:
                raise ProtocolError(f"shared segment {id} was announced, but its descriptor did not come")
            self._mappings.adopt(id, capacity, self._descriptors.pop(0))
        memory = self._mappings.lend(id, capacity)
        self._bytes_in += sum(lengths)
        buffers: list[Buffer] = []
        at = 0
        for length in lengths:
            buffers.append(memory[at : at + length])
            at += aligned(length)
        return buffers

    def _on_forget(self, header: bytes) -> None:
        try:
            self._mappings.forget(msgspec.msgpack.decode(header, type=list[int]))
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a word about shared memory that makes no sense: {error}") from error

    def _dispose_lane(self) -> None:
        self._pool.close()
        self._mappings.close()
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    def statistics(self) -> ConnectionStatistics:
        total, free = self._pool.sizes()
        return replace(super().statistics(), shared_bytes=total, shared_bytes_free=free)


class UnixTransport(Transport):
    name = "unix"

    def __init__(self, poller: Poller, options: Options) -> None:
        self._poller = poller
        self._options = options

    def listen(
        self, answer: Callable[[Hello], Hello], on_connection: Callable[[Connection], None]
    ) -> Listener:
        def accept(sock: socket.socket) -> None:
            _check_user(sock)
            peer = welcome(sock, answer)
            on_connection(UnixConnection(sock, peer, self._poller, self._options))

        try:
            sock, path_fd = _bind_unseen()
        except OSError as error:
            raise AddressError(f"cannot listen on a unix socket: {error}") from error
        address = f"unix:///proc/{os.getpid()}/fd/{path_fd}"
        return _UnixListener(sock, address, self._poller, self._options, accept, path_fd)

    def connect(self, address: str, hello: Hello, timeout: float) -> Connection:
        path = split_address(address, "unix")
        sock = connect_socket(socket.AF_UNIX, path, address, timeout)
        try:
            _check_user(sock)
            peer = greet(sock, hello, address)
            return UnixConnection(sock, peer, self._poller, self._options)
        except BaseException:
            sock.close()
            raise


class _UnixListener(StreamListener):
    def __init__(self, *args: Any) -> None:
        *rest, self._path_fd = args
        super().__init__(*rest)

    def close(self) -> None:
        super().close()
        if self._path_fd >= 0:
            os.close(self._path_fd)
            self._path_fd = -1


def _bind_unseen() -> tuple[socket.socket, int]:
    """A listening socket with no name in the file system, and a descriptor of its place."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = tempfile.mkdtemp(prefix="telegrad-")
    path = os.path.join(directory, "socket")
    try:
        sock.bind(path)
        sock.listen(1024)
        return sock, os.open(path, os.O_PATH | os.O_CLOEXEC)
    except BaseException:
        sock.close()
        raise
    finally:
        if os.path.exists(path):
            os.unlink(path)
        os.rmdir(directory)


def _check_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in (os.getuid(), 0):
        raise ConnectError(f"the process at the other end belongs to user {uid}, not to {os.getuid()}")
