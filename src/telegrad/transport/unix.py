"""One host: a unix socket between processes of one user, large messages in pooled shared memory.

The socket is bound in a private directory and unlinked at once; peers reach it through the listener's
descriptor in /proc, which only the same user may follow. So nothing is ever left in the file system, also
after kill -9. Both sides check each other's user id.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

from ..errors import AddressError, ConnectError, ConnectionClosedError, ProtocolError
from ..events import logger
from ..messages import Hello
from ..options import SHARED_MEMORY_FROM, Options
from .base import BeforeWaiting, Buffer, ConnectionStatistics, Frames, left_until, split_address
from .copying import copy_all
from .cuda import CUDA
from .device import DeviceLane
from .lease import ReadLease
from .listening import StreamTransport
from .shared_memory import FREE, Mappings, Segment, SegmentPool, parts, room_for
from .stream import _NO_SIGNAL, _TRUNCATED, StreamConnection
from .wire import FrameReader, forget_frame, in_pieces, in_segment

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MOST_DESCRIPTORS = 16  # that may have come before the messages that they belong to
_LONGEST_PAUSE = 5e-3
_LOST = -1  # stands for a descriptor that this process had no room for


class UnixConnection(StreamConnection):
    transport = "unix"
    room_beside = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)

    def __init__(self, sock: socket.socket, peer: Hello, lease: ReadLease, options: Options) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        self._pool = SegmentPool(options.pool_bytes, shared=True)
        self._unread_limit = options.peer_byte_limit
        self._device_limit = options.pool_bytes
        self._warned = False
        self._mappings = Mappings()  # guarded by the lease
        self._descriptors: list[int] = []  # received, not yet claimed by a message; guarded by the lease
        self._forgotten: list[int] = []  # segments to be forgotten, in the message being written; under the write lock
        super().__init__(sock, peer, lease, options)
        self._usual_small = self._small

    def _make_reader(self) -> FrameReader:
        return FrameReader(self._limit, self._private_pool, self._shared_buffers, self._on_forget)

    # -- writing ---------------------------------------------------------------------------------------

    def _fill_lane(
        self, frames: Frames, nbytes: int, deadline: float | None, before_waiting: BeforeWaiting
    ) -> Segment | None:
        if nbytes < SHARED_MEMORY_FROM:
            return None
        needed = room_for(map(len, frames.buffers))
        if not self._pool.has_room(needed, self._unread_limit):
            self._wait_for_room(needed, deadline, before_waiting)
        try:
            segment = self._pool.take(needed)
        except ConnectionClosedError:
            raise
        except OSError as error:  # there is another way, only slower
            if not self._warned:
                self._warned = True
                why = str(error)
                logger.warning("no shared memory for worker %r, large messages are slower: %s", self.peer.name, why)
            return None
        try:
            copy_all(frames.buffers, segment.view())
        except BaseException:
            segment.mark(FREE)
            raise
        return segment

    def _wait_for_room(self, nbytes: int, deadline: float | None, before_waiting: BeforeWaiting) -> None:
        """Waits while the peer has too much to read: the socket alone holds thousands of messages whose bytes lie
        elsewhere. The peer says nothing when it reads, so this thread looks now and then."""
        if before_waiting is not None:
            before_waiting()
        pause = 1e-4
        while not self._pool.has_room(nbytes, self._unread_limit):
            left = left_until(deadline)
            if left is not None and left <= 0:
                raise self._too_slow()
            self._wait_for(0, pause if left is None else min(left, pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _compose(self, frames: Frames, nbytes: int, lane: Segment | None) -> list[Buffer]:
        if lane is None:
            pieces = in_pieces(frames.header, frames.buffers, nbytes)
        else:
            fresh = not lane.passed_on
            pieces = [in_segment(frames.header, frames.buffers, lane.id, lane.capacity, fresh=fresh)]
        self._small = self._usual_small  # before the next line: see _lose()
        self._forgotten = self._pool.take_dropped() if self._pool.dropped else []
        if self._forgotten:
            pieces.insert(0, forget_frame(self._forgotten))
        return pieces

    def _withdraw(self, lane: Segment | None) -> None:
        self._pool.put_back_dropped(self._forgotten)
        super()._withdraw(lane)

    def _send(self, pieces: list[Buffer], lane: Segment | None) -> int:
        if lane is None or lane.fd < 0:
            return super()._send(pieces, lane)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lane.fd]))
        try:
            sent = self._sock.sendmsg(pieces, [rights], _NO_SIGNAL)
        except OSError as error:
            self._wait_where_crowded(error)
            raise
        lane.passed_on = True
        lane.close()  # it is the peer's now; the mapping stays
        return sent

    # -- reading ---------------------------------------------------------------------------------------

    def _on_descriptors(self, beside: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, type_, data in beside:
            if level == socket.SOL_SOCKET and type_ == socket.SCM_RIGHTS:
                self._descriptors.extend(array.array("i", data[: len(data) - len(data) % 4]))
        if flags & _TRUNCATED:
            # With one read comes at most one descriptor of a peer's: this one stands in its place, in their order.
            self._descriptors.append(_LOST)
        if len(self._descriptors) > _MOST_DESCRIPTORS:
            raise ProtocolError("more descriptors came than there are messages that they belong to")

    def _shared_buffers(self, place: tuple[int, int, int], lengths: Sequence[int]) -> list[Buffer]:
        id, capacity, fresh = place
        nbytes = room_for(lengths)
        if nbytes > capacity:
            raise ProtocolError(f"a message of {sum(lengths)} bytes does not fit its segment of {capacity}")
        if fresh:
            if not self._descriptors:
                raise ProtocolError(f"shared segment {id} was announced, but its descriptor did not come")
            fd = self._descriptors.pop(0)
            if fd == _LOST:
                self._lose(id)
            self._mappings.adopt(id, capacity, fd)
        return parts(self._mappings.lend(id, capacity, nbytes), lengths)

    def _lose(self, id: int) -> NoReturn:
        """Has the peer told, with the next message whatever its size, that a segment of its cannot be mapped: it would
        wait for ever for what lies in it to be read.

        Raises:
            OSError: always, but for nonsense. It says why.
        """
        if id >> 63:
            raise ProtocolError(f"shared segment {id} was announced, a number that no sender comes to")
        self._pool.put_back_dropped([-id])
        self._small = 0  # after that: a thread that composes a message now may not have seen it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _on_forget(self, ids: list[int]) -> None:
        self._mappings.forget(ids)
        if lost := {-id for id in ids if id < 0}:
            self._pool.retire(lost)

    # -- tensors on devices ----------------------------------------------------------------------------

    def open_device_lane(self) -> DeviceLane | None:
        if self.device_lane is None and not self._aborted:
            # Two threads may come here at once: the first one's stays.
            lane = DeviceLane(CUDA, self.peer.name, self.peer.pid, self._device_limit)
            lane = self.__dict__.setdefault("device_lane", lane)
            self.lease.expect_devices()
            if self._aborted:  # meanwhile: abort() may not have seen it
                lane.close()
        return self.device_lane

    # -- life ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        if self.device_lane is not None:
            self.device_lane.tick()
        self._pool.tick()
        if not self._pool.dropped or not self._write_lock.acquire(blocking=False):
            return  # the thread that writes says it, or the next tick does
        try:
            self._forgotten = self._pool.take_dropped()
            frame = forget_frame(self._forgotten)
        except BaseException:
            self._unlock()
            raise
        try:
            self._write_pieces([frame], None, -1, 0.0, None)
        except (TimeoutError, ConnectionClosedError):
            pass  # it is said with the next message

    def _end_reading(self) -> None:
        super()._end_reading()
        self._mappings.close()
        for fd in self._descriptors:
            if fd != _LOST:
                os.close(fd)
        self._descriptors.clear()

    def abort(self, reason: str = "closed") -> None:
        super().abort(reason)
        if self.device_lane is not None:
            self.device_lane.close()

    def _end_writing(self) -> None:
        super()._end_writing()
        self._pool.close()

    def abandon(self) -> None:
        self._pool.abandon()
        super().abandon()
        self._end_reading()
        self._end_writing()

    def statistics(self) -> ConnectionStatistics:
        total, free = self._pool.sizes()
        found = replace(super().statistics(), shared_bytes=total, shared_bytes_free=free)
        if self.device_lane is None:
            return found
        lane = self.device_lane.statistics()
        return replace(
            found,
            device_bytes_out=lane.bytes_put,
            device_bytes_in=lane.bytes_taken,
            device_waits=lane.waits,
            device_pool_bytes=lane.segment_bytes,
            device_refusal=lane.refusal,
        )


class UnixTransport(StreamTransport):
    name = "unix"
    connection = UnixConnection

    def _bind(self) -> tuple[socket.socket, str, Sequence[int]]:
        try:
            sock, path_fd = bind_unseen()
        except OSError as error:
            raise AddressError(f"cannot listen on a unix socket: {error}") from error
        return sock, f"unix:///proc/{os.getpid()}/fd/{path_fd}", (path_fd,)

    def _target(self, address: str) -> tuple[int, str]:
        return socket.AF_UNIX, split_address(address, "unix")

    def _check_peer(self, sock: socket.socket) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in (os.geteuid(), 0):
            raise ConnectError(f"the process at the other end belongs to user {uid}, not to {os.geteuid()}")


def bind_unseen() -> tuple[socket.socket, int]:
    """A listening socket with no name in the file system, and a descriptor of its place."""
    with ExitStack() as undo:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.callback(sock.close)
        with tempfile.TemporaryDirectory(prefix="telegrad-") as directory:
            directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Short, wherever TMPDIR is: the path of a socket has at most 107 bytes.
                path = f"/proc/self/fd/{directory_fd}/socket"
                sock.bind(path)
                sock.listen(1024)
                path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.close(directory_fd)
        undo.pop_all()
        return sock, path_fd
