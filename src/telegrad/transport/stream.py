"""Frames over a stream socket: what `unix` and `tcp` have in common.

The socket does not block: readers wait in the lease's epoll, writers in poll(2). The bytes are wire.py's.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import threading
from functools import partial
from struct import pack

from ..errors import ConnectionClosedError, HandedOverError, ProtocolError, TooLargeError, TransportError
from ..events import logger
from ..messages import Hello
from ..options import SHARED_MEMORY_FROM, Options
from ..primitives import clock, current
from ..primitives.interrupts import blocking
from ..primitives.torch_threads import prepared
from .base import FORKED, BeforeWaiting, Buffer, Connection, ConnectionStatistics, Frames, deadline_of, left_until
from .lease import ReadLease
from .shared_memory import FREE, Segment, SegmentPool
from .wire import INLINE, LENGTH, MAGIC, MAX_BUFFERS, MAX_HEADER, MESSAGE, PREFIX, FrameReader, in_pieces

IOV_MAX = 1024
# As plain numbers: the flags of the socket module are enums, and slow.
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_LONGEST_WRITE = 2.0  # seconds that a write may go on after the connection was aborted
_CROWDED = frozenset((errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))  # a send that fails so may succeed later
_PAUSE = 5e-3  # seconds until it is tried again
_LONGEST_LATE = 5.0  # seconds that a caller whose time is over may have to write on
_LONGEST_CROWDED = 1.0  # seconds in which no read succeeds, until the connection ends
_MOMENT = 0.1  # seconds; reads that fail further apart have nothing to do with each other
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class StreamConnection(Connection):
    """One socket, after the handshake."""

    room_beside = 0  # bytes for descriptors that come beside the bytes of messages

    def __init__(self, sock: socket.socket, peer: Hello, lease: ReadLease, options: Options) -> None:
        super().__init__(peer, lease)
        sock.setblocking(False)
        self._sock = sock
        self.fd = sock.fileno()
        self._limit = options.max_message_bytes
        self._small = min(SHARED_MEMORY_FROM, self._limit + 1)
        # Set by the thread that is first, and never changed back. Why nothing can be written; and whether nothing can
        # be read either: a peer that has gone takes nothing, but what it sent can still be read.
        self._closed_because = ""
        self._aborted = False
        self._failed_with: type[TransportError] = ConnectionClosedError
        self._reading_ended = self._writing_ended = False
        # Guarded by the lease:
        self._private_pool = SegmentPool(options.pool_bytes, shared=False)
        self._reader = self._make_reader()
        self._crowded = (-_MOMENT, -_MOMENT)  # since when reads have failed for want of memory, and when one did last
        # Guards the order of bytes on the socket, and the fields below. Held while a message is written;
        # taken over by a thread of its own when a writer's time is over in the middle of one.
        self._write_lock = threading.Lock()
        self._messages_out = self._bytes_out = 0

    def open(self) -> None:
        if not self._aborted:
            self.lease.add(self)

    def _make_reader(self) -> FrameReader:
        return FrameReader(self._limit, self._private_pool)

    # -- writing ---------------------------------------------------------------------------------------

    def write(self, frames: Frames, timeout: float | None = None, before_waiting: BeforeWaiting = None) -> int:
        header, buffers = frames.header, frames.buffers
        count = len(buffers)
        nbytes = len(buffers[0]) if count == 1 else sum(map(len, buffers))
        if nbytes + len(header) + 8 * count >= self._small:
            self._write_large(frames, nbytes, timeout, before_waiting)
            return nbytes
        # Nearly all are small: composed in one piece, and taken by the socket at one go.
        prefix = PREFIX.pack(MAGIC, MESSAGE, INLINE, count, len(header), nbytes)
        table = LENGTH.pack(nbytes) if count == 1 else pack(f"<{count}Q", *map(len, buffers))
        piece = b"".join((prefix, table, header, *buffers))
        if not self._write_lock.acquire(blocking=False):
            timeout = self._wait_for_write_lock(timeout, before_waiting)
        rest: list[Buffer] = []
        try:
            if self._closed_because:
                raise ConnectionClosedError(self._closed_because)
            try:
                sent = self._sock.send(piece, _NO_SIGNAL)
                self._messages_out += 1
                self._bytes_out += nbytes + len(header)
                if sent != len(piece):
                    rest.append(memoryview(piece)[sent:])
            except OSError as error:
                if not isinstance(error, BlockingIOError) and error.errno not in _CROWDED:
                    raise
                sent = 0
                rest.append(piece)
        except BaseException as error:
            self._check_broken(error)
            raise
        finally:
            if not rest:
                self._write_lock.release()
                if self._writers:
                    self._wake_writers()
        if rest:
            self._write_pieces(rest, None, None if sent else nbytes + len(header), timeout, before_waiting)
        return nbytes

    def _write_large(self, frames: Frames, nbytes: int, timeout: float | None, before_waiting: BeforeWaiting) -> None:
        lane, locked = None, False
        try:
            self._check(frames, nbytes)
            deadline = deadline_of(timeout)
            lane = self._fill_lane(frames, nbytes, deadline, before_waiting)
            timeout = left_until(deadline)
            if not self._write_lock.acquire(blocking=False):
                timeout = self._wait_for_write_lock(timeout, before_waiting)
            locked = True
            if self._closed_because:
                raise ConnectionClosedError(self._closed_because)
            pieces = self._compose(frames, nbytes, lane)
        except BaseException:
            if lane is not None:
                lane.mark(FREE)
            if locked:
                self._unlock()
            raise
        self._write_pieces(pieces, lane, nbytes + len(frames.header), timeout, before_waiting)

    def _check(self, frames: Frames, nbytes: int) -> None:
        if nbytes > self._limit:
            self._check_size(nbytes, self._limit)
        if len(frames.header) > MAX_HEADER or len(frames.buffers) > MAX_BUFFERS:
            raise TooLargeError(
                f"a message to worker {self.peer.name!r} has a header of {len(frames.header)} bytes and "
                f"{len(frames.buffers)} buffers; the limits are {MAX_HEADER} and {MAX_BUFFERS}"
            )
        if self._closed_because:
            raise ConnectionClosedError(self._closed_because)

    def _fill_lane(
        self, frames: Frames, nbytes: int, deadline: float | None, before_waiting: BeforeWaiting
    ) -> Segment | None:
        """Copies the buffers to shared memory, where the peer finds them, outside the lock. None: they go inline."""
        return None

    def _compose(self, frames: Frames, nbytes: int, lane: Segment | None) -> list[Buffer]:
        """The bytes of a message; the write lock is held."""
        return in_pieces(frames.header, frames.buffers, nbytes)

    def _wait_for_write_lock(self, timeout: float | None, before_waiting: BeforeWaiting) -> float | None:
        """Takes the lock that another thread holds; returns what is left of the time then."""
        deadline = deadline_of(timeout)
        # The lock is taken without waiting: an interrupt that ends the wait must not find it taken.
        self._wait_until(partial(self._write_lock.acquire, blocking=False), deadline, before_waiting)
        return left_until(deadline)

    def _unlock(self) -> None:
        self._write_lock.release()
        if self._writers:
            self._wake_writers()

    def _write_pieces(
        self,
        pieces: list[Buffer],
        lane: Segment | None,
        nbytes: int | None,
        timeout: float | None,
        before_waiting: BeforeWaiting,
    ) -> None:
        """Writes a message of `nbytes` (-1: a frame that is none), or (None) the rest of one. The write lock is held,
        and released: by this thread, or by the one that takes over the rest when the time is over in the middle."""
        begun = nbytes is None
        is_whole = handed_over = waited = False  # the first: nothing of the message is out, or all of it
        deadline: float | None = None
        try:
            while True:
                try:
                    sent = self._send(pieces, lane)
                except BlockingIOError:
                    if not waited:
                        waited = True
                        deadline = deadline_of(timeout)
                    try:
                        self._wait_until_writable(left_until(deadline), before_waiting)
                    except ConnectionClosedError:
                        raise
                    except BaseException as error:  # the time is over, or a Ctrl-C came
                        if not begun:
                            is_whole = True
                            self._withdraw(lane)
                            raise
                        handed_over = self._hand_over(pieces)
                        is_whole = not handed_over
                        raise self._late(error) from error
                    before_waiting = None
                    continue
                if not begun:
                    begun, lane = True, None
                    if nbytes >= 0:  # type: ignore[operator]
                        self._messages_out += 1
                        self._bytes_out += nbytes  # type: ignore[operator]
                if len(pieces) == 1 and sent == len(pieces[0]):
                    return
                pieces = _behind(pieces, sent)
                if not pieces:
                    return
        except BaseException as error:
            if not is_whole and not handed_over:
                self._check_broken(error)
            raise
        finally:
            if not handed_over:
                self._unlock()

    def _check_broken(self, error: BaseException) -> None:
        """Ends the connection after an error of a write.

        Raises:
            ConnectionClosedError: the error says no more than that.
        """
        if isinstance(error, ConnectionClosedError):
            return
        if isinstance(error, ConnectionError):
            self._cannot_write(f"the connection with worker {self.peer.name!r} broke: {error}")
            raise ConnectionClosedError(self._closed_because) from error
        # Half a message may be out, and the rest cannot follow.
        self.abort(f"a message to worker {self.peer.name!r} was interrupted in the middle: {error!r}")
        if isinstance(error, OSError | MemoryError | RuntimeError):  # which one that cannot start a thread is
            raise ConnectionClosedError(self._closed_because) from error

    def _withdraw(self, lane: Segment | None) -> None:
        """Undoes _compose() and _fill_lane() for a message of which nothing was sent. The write lock is held."""
        if lane is not None:
            lane.mark(FREE)

    def _send(self, pieces: list[Buffer], lane: Segment | None) -> int:
        """Sends what goes at one go. `lane` is given as long as nothing has gone."""
        try:
            return self._sock.sendmsg(pieces[:IOV_MAX], (), _NO_SIGNAL)
        except OSError as error:
            self._wait_where_crowded(error)
            raise

    def _wait_where_crowded(self, error: OSError) -> None:
        """Waits a moment, and raises BlockingIOError, where a send failed since the system has no memory for it, or has
        too many descriptors of this user on their way. poll(2) does not know of either."""
        if error.errno in _CROWDED:
            self._wait_for(0, _PAUSE)
            raise BlockingIOError from error

    def _wait_until_writable(self, timeout: float | None, before_waiting: BeforeWaiting) -> None:
        if before_waiting is not None:
            before_waiting()
        if timeout is not None and timeout <= 0:
            raise self._too_slow()
        self._wait_for(select.POLLOUT, timeout)

    def _wait_for(self, events: int, timeout: float | None) -> None:
        """Waits for an event on the socket, or for the time to be over.

        Raises:
            ConnectionClosedError: this end or the other has ended the connection.
        """
        poll = select.poll()
        # RDHUP: a TCP peer that closed, and reads no more, would leave us here for ever.
        poll.register(self.fd, events | select.POLLRDHUP)
        # poll(2) takes no more than 24 days at once.
        milliseconds = None if timeout is None else math.ceil(min(max(timeout, 0.0), 1e6) * 1000)
        found = blocking(poll.poll, milliseconds)
        if found and found[0][1] & _HUNG_UP:
            self._cannot_write(f"worker {self.peer.name!r} closed the connection")
        if self._closed_because:
            raise ConnectionClosedError(self._closed_because)

    def _cannot_write(self, reason: str) -> None:
        """Notes that the peer takes nothing any more. What it has sent can be read still, up to the end."""
        if not self._closed_because:
            self._closed_because = reason

    def _hand_over(self, pieces: list[Buffer]) -> bool:
        """Has a thread of its own write the rest of a message. False: all of it is written."""
        # The stream is of no use until the other half is out; but the caller's time is over and its tensors are its own
        # again, so the rest is copied. With no memory for that, or no thread, the caller itself writes on for a while.
        give_up_at = clock.now() + _LONGEST_LATE
        while pieces:
            try:
                if self._begins_to_finish([bytes(piece) for piece in pieces]):
                    return True
                missing = "no thread to write the rest"
            except MemoryError:
                missing = "no memory for a copy of the rest"
            if clock.now() >= give_up_at:
                raise RuntimeError(f"{missing}, and the peer did not take it within {_LONGEST_LATE:g} s more")
            self._wait_for(select.POLLOUT, _PAUSE)
            try:
                while pieces:
                    pieces = _behind(pieces, self._send(pieces, None))
            except BlockingIOError:
                pass
        return False

    def _begins_to_finish(self, rest: list[Buffer]) -> bool:
        name = f"telegrad-write-{self.peer.name}"
        try:
            threading.Thread(target=prepared(partial(self._finish, rest)), name=name, daemon=True).start()
        except RuntimeError:  # the system has none to give
            return False
        return True

    def _finish(self, rest: list[Buffer]) -> None:
        current.thread.critical = 1
        try:
            self._write_pieces(rest, None, None, None, None)
        except ConnectionClosedError:
            pass

    def _late(self, error: BaseException) -> HandedOverError:
        late = HandedOverError(f"worker {self.peer.name!r} did not take the message in time; the rest of it follows")
        late.interrupt = None if isinstance(error, TimeoutError) else error
        return late

    # -- reading ---------------------------------------------------------------------------------------

    def receive(self) -> list[Frames]:
        if self._aborted:
            raise self._failed_with(self._closed_because)
        frames: list[Frames] = []
        reader = self._reader
        count = -1
        try:
            count, beside, flags, _ = self._sock.recvmsg_into([reader.target], self.room_beside, _CLOEXEC)
            if beside or flags & _TRUNCATED:
                self._on_descriptors(beside, flags)
            if not count:
                where = " in the middle of a message" if reader.in_the_middle else ""
                self.abort(f"worker {self.peer.name!r} closed the connection{where}")
                raise ConnectionClosedError(self._closed_because)
            reader.received(count, frames)
        except BlockingIOError:
            pass
        except ConnectionClosedError:
            raise
        except ProtocolError as error:
            self._failed_with = ProtocolError
            self.abort(f"closed the connection with worker {self.peer.name!r}: {error}")
            if not frames:  # else the messages before it come first, and the next read says this
                raise ProtocolError(self._closed_because) from error
        except (OSError, MemoryError) as error:
            if count < 0 and self._is_crowded(error):
                return frames
            # Which calls an envelope answers is not known where there is no memory to read it.
            why = "no memory for the envelope of a message" if isinstance(error, MemoryError) else str(error)
            self.abort(f"the connection with worker {self.peer.name!r} broke: {why}")
            if not frames:
                raise ConnectionClosedError(self._closed_because) from error
        except BaseException as error:  # what was received may not have been noted
            self.abort(f"reading from worker {self.peer.name!r} was interrupted: {error!r}")
            raise
        return frames

    def _is_crowded(self, error: OSError | MemoryError) -> bool:
        """Whether a read failed since the system has no memory for it, and is to be tried again: the lease finds what
        is there at once. Not for ever, or a thread would do nothing else."""
        if not isinstance(error, OSError) or error.errno not in _CROWDED:
            return False
        (since, last), now = self._crowded, clock.now()
        self._crowded = (now if now - last > _MOMENT else since), now
        os.sched_yield()
        return now - self._crowded[0] < _LONGEST_CROWDED

    def _on_descriptors(self, beside: list[tuple[int, int, bytes]], flags: int) -> None:
        """Takes what has come beside the bytes: nothing, but for a transport that has made `room_beside`."""

    # -- life ------------------------------------------------------------------------------------------

    def abort(self, reason: str = "closed") -> None:
        if not self._closed_because:
            self._closed_because = reason
        self._aborted = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def dispose(self) -> None:
        self.abort()
        self.lease.remove(self)
        # The descriptor's number may be given to another connection as soon as it is closed, so no thread may be
        # inside of a read or a write. The lease sees to the one, abort() has sent writers away; the second of the two
        # closes the descriptor.
        self.lease.run_unread(self._end_reading)
        if not self._write_lock.acquire(timeout=_LONGEST_WRITE):
            logger.error("a write to worker %r does not end; its socket stays open", self.peer.name)
            return
        try:
            self._end_writing()
        finally:
            self._unlock()

    def _end_reading(self) -> None:
        """Any number of times. The lease is held."""
        if not self._reading_ended:
            self._reading_ended = True
            self._reader.close()
            self._private_pool.close()
            if self._writing_ended:
                self._sock.close()

    def _end_writing(self) -> None:
        """Any number of times. The write lock is held."""
        if not self._writing_ended:
            self._writing_ended = True
            if self._reading_ended:
                self._sock.close()

    def abandon(self) -> None:
        # The copy of the socket must go, or the peer would not see the parent's end while the fork lives.
        self._closed_because = self._closed_because or FORKED
        self._aborted = self._reading_ended = self._writing_ended = True
        self._write_lock = threading.Lock()  # the thread that held it is not here
        self._sock.close()
        self._private_pool.abandon()

    def tick(self) -> None:
        self._private_pool.tick()

    def statistics(self) -> ConnectionStatistics:
        reader = self._reader
        return ConnectionStatistics(self.transport, self._messages_out, reader.messages, self._bytes_out, reader.nbytes)


def _behind(pieces: list[Buffer], sent: int) -> list[Buffer]:
    """The rest of the pieces after the first `sent` bytes."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return []
