"""Memory that is used again: shared segments for sending on one host, private ones for receiving from others.

A fresh segment for each message would be six times slower: all the time goes into page faults. So segments are pooled,
and lent to one message at a time. A lent segment is free again when the last tensor on it has died, and its holder says
so by changing one byte in the segment itself: no message, no lock, no system call, which is all that a finaliser may do
(it runs on any thread, under any lock).

    sender    SegmentPool.take() -> Segment, filled, named in a message (its descriptor goes along once)
    receiver  Mappings.lend(id) -> memoryview; the byte changes when nothing refers to it any more
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from ..errors import ConnectionClosedError, ProtocolError
from ..primitives import clock
from ..primitives.interrupts import finaliser
from ..primitives.memory import is_out_of_memory
from .base import Buffer

PAGE = mmap.PAGESIZE
ALIGNMENT = 64
# What the byte behind a segment's capacity says. Its sender makes FILLED of FREE, its receiver the others.
FREE, FILLED, LENT, RETIRED = range(4)
# A receiver that keeps more than this many messages gets copies of the further ones: the system allows a
# process only so many mappings, and a sender looks through its segments on each send. But it is the thread that
# reads which copies, 0.3 ms for each MiB, and all messages wait for it. So large ones are lent all the same: few
# machines have memory for so many of these.
MAX_LENT, MAX_LARGE_LENT = 512, 16384
LARGE = 4 << 20
IDLE = 30.0  # seconds after which a free segment that was not used goes back to the system

_WORTH_WAITING_FOR = 8 << 20  # bytes; see SegmentPool._await_free_one
_SHORT_WAIT = 1e-3
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)  # lets go of the interpreter lock: large mappings take their time
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


def aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def room_for(lengths: Iterable[int]) -> int:
    """The bytes that buffers of these lengths take, one after the other."""
    return sum([(length + ALIGNMENT - 1) & -ALIGNMENT for length in lengths])


def capacity_for(nbytes: int) -> int:
    """Powers of two, so that segments fit again. Only pages that were touched take memory."""
    return 1 << max(16, (nbytes - 1).bit_length())


class Memory:
    """A mapping: of a descriptor, shared with all processes that map it; without one private, so that a fork of the
    process has its own copy.

    Not `mmap.mmap`: that keeps a descriptor open for each mapping (until Python 3.13 it cannot be told not to), and a
    thousand received tensors would take a thousand of them.
    """

    def __init__(self, size: int, fd: int = -1) -> None:
        self.size = 0  # until it is mapped
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == _MAP_FAILED:
            raise _last_error()
        self.address: int = address
        self.size = size

    @finaliser
    def __del__(self, _munmap: Callable[[int, int], int] = _munmap) -> None:
        if self.size:
            _munmap(self.address, self.size)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# Note [forks and lent memory]
# A fork of a process that holds a shared segment holds it too, and neither knows when the other lets go. So a
# segment that was lent at a fork is never filled again: it comes back RETIRED from the one that lets go first, its
# sender drops it, and the system keeps the memory as long as a process maps it. Parent and child share what they write
# to it, as they do with any tensor in shared memory. Private memory is the child's own, as ever.
_forks = 0


@finaliser
def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


class Lending:
    """A mapped segment whose memory is lent to one holder at a time. `lent` has it for so long."""

    def __init__(self, memory: Memory, capacity: int, lent: set[Lending] | None = None) -> None:
        self.memory = memory
        self._lent = lent
        self.capacity = capacity
        self.byte = ctypes.c_ubyte.from_address(memory.address + capacity)  # its state
        self._array_type = ctypes.c_char * capacity
        self._holder: weakref.ref[object] | None = None
        self._forks = 0  # how many there had been when it was lent

    @property
    def state(self) -> int:
        return self.byte.value

    def mark(self, state: int) -> None:
        self.byte.value = state

    @property
    def is_held(self) -> bool:
        """Whether this process still holds what was lent."""
        return self._holder is not None and self._holder() is not None

    def view(self) -> memoryview:
        """All of it. It stays mapped while anything refers to the view."""
        return memoryview(self._array()).cast("B")

    def lend(self) -> memoryview:
        """All of it, until nothing refers to the view (nor to a tensor on it) any more."""
        array = self._array()
        self._holder = weakref.ref(array, self._on_returned)
        self._forks = _forks
        if self._lent is not None:
            self._lent.add(self)
        self.byte.value = LENT
        return memoryview(array).cast("B")

    def _array(self) -> ctypes.Array[ctypes.c_char]:
        array = self._array_type.from_address(self.memory.address)
        array.memory = self.memory  # type: ignore[attr-defined]  # keeps it mapped
        return array

    @finaliser
    def _on_returned(self, _: object) -> None:
        # A finaliser: nothing but this, each in one step. In a fork too; see the note above.
        if self._lent is not None:
            self._lent.discard(self)
        self.byte.value = FREE if self._forks == _forks else RETIRED


class Segment(Lending):
    """A segment at the side that fills it. `fd` is -1 for private memory, and once the peer has mapped it.

    Raises:
        OSError: there are no more descriptors, or there is no more memory.
    """

    def __init__(self, id: int, capacity: int, *, shared: bool) -> None:
        self.id = id
        self.fd = -1
        self.passed_on = False  # whether the peer has the descriptor; guarded by the connection's write lock
        self.used_at = 0.0
        self.populated = 0  # bytes whose pages are there
        try:
            if shared:
                self.fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self.fd, capacity + PAGE)
                # The receiver maps it: it must never shrink under its feet.
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(Memory(capacity + PAGE, self.fd), capacity)
        except BaseException:
            self.close()
            raise
        self.mark(FILLED)

    def populate(self, nbytes: int) -> None:
        """Makes the system find the pages now: it may say no here, and would say SIGBUS at a write."""
        start = self.populated - self.populated % PAGE
        if _madvise(self.memory.address + start, nbytes - start, _MADV_POPULATE_WRITE):
            error = _last_error()
            if error.errno != errno.EINVAL:  # what an older kernel says; it has to do without
                raise error
        self.populated = nbytes

    def close(self) -> None:
        """Closes the descriptor. The mapping goes with its last user."""
        fd, self.fd = self.fd, -1  # first: the thread that passes it on and one that trims the pool may both come here
        if fd >= 0:
            os.close(fd)


class SegmentPool:
    """The segments that one end of a connection fills. At most `keep_bytes` of free ones are kept."""

    def __init__(self, keep_bytes: int, *, shared: bool) -> None:
        self._lock = threading.Lock()  # guards all below
        self._keep_bytes = keep_bytes
        self._shared = shared
        self._ids = itertools.count(1)
        self._segments: dict[int, list[Segment]] = {}  # by capacity, the one used last at the end
        self._unread: dict[Segment, int] = {}  # bytes that the peer had not read when they were counted last
        self._unread_bytes = 0
        self.dropped: list[int] = []  # ids of dropped segments that the peer still has mapped
        self._closed = False

    def take(self, nbytes: int) -> Segment:
        """A shared segment with room for `nbytes`, marked FILLED.

        Raises:
            OSError: there are no more descriptors, or there is no more memory.
            ConnectionClosedError: the pool was closed.
        """
        capacity = capacity_for(nbytes)
        if capacity >= _WORTH_WAITING_FOR:
            self._await_free_one(capacity)
        with self._lock:
            segment = self._free_one_locked(capacity) or self._new_one_locked(capacity)
            self._unread_bytes += nbytes - self._unread.get(segment, 0)
            self._unread[segment] = nbytes
        if nbytes > segment.populated:
            try:
                segment.populate(nbytes)
            except BaseException:
                segment.mark(FREE)
                raise
        return segment

    def _await_free_one(self, capacity: int) -> None:
        """Waits a moment for a large segment that is about to come back: it is in the cache, another is not.

        The callee lets go of an argument just after its answer has left, and the next call may come sooner than that.
        """
        same = self._segments.get(capacity)
        deadline = clock.now() + _SHORT_WAIT
        while same and all(segment.byte.value != FREE for segment in list(same)) and clock.now() <= deadline:
            time.sleep(2e-5)

    def _free_one_locked(self, capacity: int) -> Segment | None:
        same = self._segments.get(capacity, ())
        for index in range(len(same) - 1, -1, -1):  # the one used last first: it may be in the cache
            segment = same[index]
            if segment.byte.value == FREE:
                segment.byte.value = FILLED
                segment.used_at = clock.now()
                if index != len(same) - 1:
                    same.append(same.pop(index))  # type: ignore[union-attr]
                return segment
        return None

    def _new_one_locked(self, capacity: int) -> Segment:
        if self._closed:
            raise ConnectionClosedError("the connection was closed")
        segment = Segment(next(self._ids), capacity, shared=self._shared)
        segment.used_at = clock.now()
        self._segments.setdefault(capacity, []).append(segment)
        self._trim_locked(IDLE)
        return segment

    def lend(self, nbytes: int) -> memoryview:
        """Memory of `nbytes` or more, private to its holder, that comes back when nothing refers to it.

        Raises:
            OSError: there is no more memory.
        """
        capacity = capacity_for(nbytes)
        with self._lock:
            segment = self._free_one_locked(capacity)
            if segment is None and sum(map(len, self._segments.values())) < MAX_LENT:
                segment = self._new_one_locked(capacity)
        if segment is None:  # a receiver that keeps that much gets memory that is not pooled
            segment = Segment(0, capacity, shared=False)
        return segment.lend()

    def has_room(self, nbytes: int, limit: int) -> bool:
        """Whether the peer will have at most `limit` bytes to read with these. One message always fits."""
        with self._lock:
            if self._unread_bytes + nbytes <= limit:
                return True
            self._unread = {s: n for s, n in self._unread.items() if s.state == FILLED}
            self._unread_bytes = sum(self._unread.values())
            return not self._unread or self._unread_bytes + nbytes <= limit

    def tick(self, idle: float = IDLE) -> None:
        """Gives back free memory beyond `keep_bytes`, and what was not used for `idle` seconds."""
        with self._lock:
            self._trim_locked(idle)

    def _trim_locked(self, idle: float) -> None:
        unused = sorted((s for s in self._all_locked() if s.state in (FREE, RETIRED)), key=lambda s: s.used_at)
        excess = sum(s.capacity for s in unused) - self._keep_bytes
        before = clock.now() - idle
        for segment in unused:
            if excess > 0 or segment.used_at <= before or segment.state == RETIRED:
                excess -= segment.capacity
                self._segments[segment.capacity].remove(segment)
                self._unread_bytes -= self._unread.pop(segment, 0)
                if segment.passed_on:
                    self.dropped.append(segment.id)
                segment.close()

    def _all_locked(self) -> list[Segment]:
        return [segment for same in self._segments.values() for segment in same]

    def take_dropped(self) -> list[int]:
        """Takes the ids of dropped segments, to tell the peer."""
        if not self.dropped:
            return []
        with self._lock:
            dropped, self.dropped = self.dropped, []
            return dropped

    def put_back_dropped(self, dropped: list[int]) -> None:
        """The peer is still to be told of these."""
        with self._lock:
            self.dropped += dropped

    def retire(self, ids: set[int]) -> None:
        """The peer cannot map these, which a message each lies in: their descriptors did not get through to it."""
        with self._lock:
            for segment in self._all_locked():
                if segment.id in ids and segment.state == FILLED:
                    segment.mark(RETIRED)

    def sizes(self) -> tuple[int, int]:
        """Bytes in all segments, and in the free ones."""
        with self._lock:
            every = self._all_locked()
        return sum(s.capacity for s in every), sum(s.capacity for s in every if s.state == FREE)

    def close(self) -> None:
        """Gives everything back. Memory that is still held stays its holder's, and is never used again."""
        with self._lock:
            self._closed = True
            for segment in self._all_locked():
                segment.close()
            self._segments.clear()
            self._unread.clear()
            self._unread_bytes = 0

    def abandon(self) -> None:
        """In a fork: the thread that held the lock is not here, and our copies of the descriptors go."""
        self._lock = threading.Lock()
        self.close()


class Mappings:
    """The peer's segments at the receiving side. Used by the thread that reads, so there is no lock."""

    def __init__(self) -> None:
        self._mappings: dict[int, Lending] = {}
        self._lent: set[Lending] = set()

    def adopt(self, id: int, capacity: int, fd: int) -> None:
        """Maps a segment that was just passed on, and closes the descriptor.

        Raises:
            ProtocolError: it is not what the sender says.
            OSError, MemoryError: it cannot be mapped. Where there is no memory for it, it is RETIRED: the sender drops
                it, and passes another one on.
        """
        try:
            if id in self._mappings:
                raise ProtocolError(f"shared segment {id} was passed on twice")
            try:
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError:  # no memory at all, but a file, a socket ...
                sealed = False
            if not sealed or os.fstat(fd).st_size != capacity + PAGE:
                raise ProtocolError(f"shared segment {id} is not a sealed one of {capacity} bytes")
            try:
                self._mappings[id] = Lending(Memory(capacity + PAGE, fd), capacity, self._lent)
            except (OSError, MemoryError) as error:
                if is_out_of_memory(error):
                    os.pwrite(fd, bytes([RETIRED]), capacity)
                raise
        finally:
            os.close(fd)

    def lend(self, id: int, capacity: int, nbytes: int) -> memoryview:
        """The memory of a message in a segment: the segment's own, or a copy for a receiver that keeps too many. While
        reading.

        Raises:
            ProtocolError: there is no message in it.
            MemoryError: there is no memory for the copy; the segment is free again.
        """
        mapping = self._mappings.get(id)
        if mapping is None or mapping.capacity != capacity or nbytes > capacity:
            raise ProtocolError(f"a message lies in shared segment {id}, which was never passed on")
        if mapping.byte.value != FILLED or mapping.is_held:
            raise ProtocolError(f"a message lies in shared segment {id}, which is in use")
        if len(self._lent) < (MAX_LARGE_LENT if nbytes >= LARGE else MAX_LENT):
            return mapping.lend()
        try:
            return memoryview(bytearray(mapping.view()[:nbytes]))
        finally:
            mapping.mark(FREE)

    def forget(self, ids: list[int]) -> None:
        for id in ids:
            self._mappings.pop(id, None)

    def close(self) -> None:
        self._mappings.clear()


def parts(memory: memoryview, lengths: Iterable[int]) -> list[Buffer]:
    """The places of buffers that lie one after the other, each at a multiple of ALIGNMENT."""
    found: list[Buffer] = []
    at = 0
    for length in lengths:
        found.append(memory[at : at + length])
        at += (length + ALIGNMENT - 1) & -ALIGNMENT
    return found
