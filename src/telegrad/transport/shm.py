"""Memory that is used again: shared segments for sending on one host, private ones for receiving from others.

A fresh segment for each message would be six times slower: all the time goes into page faults. So segments
are pooled, and lent to one message at a time. A lent segment is free again when the last tensor on it has
died, and its holder says so by clearing one byte in the segment itself: no message, no lock, no system
call, which is all that a finaliser may do (it runs on any thread, under any lock).

    sender    SegmentPool.take() -> Segment, filled, named in a message (its descriptor goes along once)
    receiver  Mappings.lend(id) -> memoryview; the byte is cleared when nothing refers to it any more
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import threading
import weakref

from ..errors import ProtocolError

PAGE = mmap.PAGESIZE
ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def capacity_for(nbytes: int) -> int:
    """Powers of two, so that segments fit again. Only pages that were touched take memory."""
    return 1 << max(16, (nbytes - 1).bit_length())


class Lending:
    """A mapped segment whose memory is lent to one holder at a time.

    The byte behind its capacity is 1 while somebody holds it. It is set by the side that fills the segment,
    and cleared by the one that reads it.
    """

    def __init__(self, memory: mmap.mmap, capacity: int) -> None:
        self.memory = memory
        self.capacity = capacity
        self._array_type = ctypes.c_char * capacity
        self._holder: weakref.ref[object] | None = None
        self._pid = os.getpid()

    @property
    def busy(self) -> bool:
        return self.memory[self.capacity] != 0

    def mark_busy(self) -> None:
        self.memory[self.capacity] = 1

    def mark_free(self) -> None:
        self.memory[self.capacity] = 0

    def lend(self) -> memoryview:
        """The memory, until nothing refers to it (nor to a tensor on it) any more."""
        array = self._array_type.from_buffer(self.memory)
        self._holder = weakref.ref(array, self._on_returned)
        return memoryview(array).cast("B")

    def _on_returned(self, _: object) -> None:
        # A finaliser: one store and nothing else. In a forked child the parent still holds the tensor.
        if os.getpid() == self._pid:
            self.memory[self.capacity] = 0


class Segment(Lending):
    """A segment at the side that fills it. `fd` is -1 for private memory, which is never passed on."""

    def __init__(self, id: int, capacity: int, *, shared: bool) -> None:
        self.id = id
        self.fd = -1
        self.passed_on = False  # whether the peer has the descriptor; guarded by the connection's write lock
        if shared:
            self.fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, capacity + PAGE)
            # The receiver maps it: it must never shrink under its feet.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        super().__init__(mmap.mmap(self.fd, capacity + PAGE), capacity)
        self.mark_busy()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        # The mapping goes with its last user.


class SegmentPool:
    """The segments that one end of a connection fills. At most `keep_bytes` of free ones are kept."""

    def __init__(self, keep_bytes: int, *, shared: bool) -> None:
        self._lock = threading.Lock()  # guards all below
        self._keep_bytes = keep_bytes
        self._shared = shared
        self._ids = itertools.count(1)
        self._segments: dict[int, list[Segment]] = {}  # by capacity, the one used last at the end
        self._dropped: list[int] = []
        self._closed = False

    def take(self, nbytes: int) -> Segment:
        """A segment with room for `nbytes`, marked busy."""
        capacity = capacity_for(nbytes)
        with self._lock:
            same = self._segments.setdefault(capacity, [])
            for index in range(len(same) - 1, -1, -1):
                if not same[index].busy:
                    segment = same.pop(index)
                    segment.mark_busy()
                    same.append(segment)
                    return segment
            segment = Segment(next(self._ids), capacity, shared=self._shared)
            same.append(segment)
            self._trim_locked()
            return segment

    def trim(self) -> None:
        with self._lock:
            self._trim_locked()

    def _trim_locked(self) -> None:
        free = [s for same in self._segments.values() for s in same if not s.busy]
        excess = sum(s.capacity for s in free) - self._keep_bytes
        for segment in free:
            if excess <= 0:
                break
            excess -= segment.capacity
            self._segments[segment.capacity].remove(segment)
            if segment.passed_on:
                self._dropped.append(segment.id)
            segment.close()

    def take_dropped(self) -> list[int]:
        """The ids of dropped segments that the peer still has mapped, each once."""
        if not self._dropped:
            return self._dropped
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def sizes(self) -> tuple[int, int]:
        """Bytes in all segments, and in the free ones."""
        with self._lock:
            every = [s for same in self._segments.values() for s in same]
            return sum(s.capacity for s in every), sum(s.capacity for s in every if not s.busy)

    def close(self) -> None:
        """Gives everything back. Memory that somebody still holds stays theirs, and is never used again."""
        with self._lock:
            for same in self._segments.values():
                for segment in same:
                    segment.close()
            self._segments.clear()


class Mappings:
    """The peer's segments at the receiving side. Used by the thread that reads, so there is no lock."""

    def __init__(self) -> None:
        self._mappings: dict[int, Lending] = {}

    def adopt(self, id: int, capacity: int, fd: int) -> None:
        """Maps a segment that was just passed on, and closes the descriptor.

        Raises:
            ProtocolError: it is not what the sender says.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(fd).st_size != capacity + PAGE:
                raise ProtocolError(f"shared segment {id} is not a sealed one of {capacity} bytes")
            self._mappings[id] = Lending(mmap.mmap(fd, capacity + PAGE), capacity)
        except OSError as error:
            raise ProtocolError(f"shared segment {id} cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def lend(self, id: int, capacity: int) -> memoryview:
        mapping = self._mappings.get(id)
        if mapping is None or mapping.capacity != capacity:
            raise ProtocolError(f"a message lies in shared segment {id}, which was never passed on")
        return mapping.lend()

    def forget(self, ids: list[int]) -> None:
        for id in ids:
            self._mappings.pop(id, None)

    def close(self) -> None:
        self._mappings.clear()


def address_of(buffer: bytes | bytearray | memoryview) -> tuple[int, object]:
    """Where the buffer's memory starts, and what to keep alive while it is used."""
    if isinstance(buffer, bytes):
        pointer = ctypes.c_char_p(buffer)
        return ctypes.cast(pointer, ctypes.c_void_p).value or 0, (pointer, buffer)
    view = memoryview(buffer)
    if view.readonly:
        return address_of(bytes(view))
    start = ctypes.c_char.from_buffer(view) if view.nbytes else ctypes.c_char()
    return ctypes.addressof(start), (start, view)


def copy_into(target: memoryview, buffer: bytes | bytearray | memoryview) -> None:
    """Copies a whole buffer to the start of `target`; large ones without holding the interpreter lock."""
    nbytes = memoryview(buffer).nbytes
    if nbytes < 1 << 16:
        target[:nbytes] = memoryview(buffer).cast("B")
        return
    source, keep = address_of(buffer)
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), source, nbytes)
    del keep
