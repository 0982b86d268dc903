"""A receiver that has no memory, or no descriptor, for one message: the message comes without its buffers, and the
stream goes on."""

from __future__ import annotations

import errno
import re
import threading

import pytest
from conformance import read
from raw_peers import WAIT, no_more_descriptors, read_all
from test_broken_streams import bytes_of, plain

from telegrad.errors import ConnectionClosedError
from telegrad.options import Options
from telegrad.transport import shared_memory as shm
from telegrad.transport import wire
from telegrad.transport.base import Frames
from telegrad.transport.shared_memory import FILLED, RETIRED, SegmentPool
from telegrad.transport.wire import FrameReader

KIB, MIB = 1 << 10, 1 << 20
SMALL = Frames(b"small", [b"skeleton"])


def no_memory(*args: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def no_bytearray(*args: object) -> None:
    raise MemoryError


def expect_missing(frames: Frames, header: bytes, nbytes: int) -> None:
    assert frames.header == header
    assert not frames.buffers
    assert f"no memory for a message of {nbytes} bytes (available on this machine: " in frames.missing


@pytest.fixture
def no_maps(monkeypatch):
    """Fails all new mappings, from the time that it is called."""
    return lambda patch=monkeypatch: patch.setattr(shm, "Memory", no_memory)


@pytest.mark.parametrize("cut", [1000, 70 * KIB, 10 * MIB])
def test_a_message_in_pieces_is_read_and_dropped(no_maps, cut):
    reader = FrameReader(16 * MIB, SegmentPool(MIB, shared=False))
    large = Frames(b"large", [b"s" * 100, b"x" * MIB, b"y" * 100_000, b""])
    data = memoryview(b"".join(map(bytes_of, (SMALL, large, SMALL, large, SMALL))))
    no_maps()
    found: list[Frames] = []
    while data:
        count = min(cut, len(data), len(reader.target))
        reader.target[:count] = data[:count]
        reader.received(count, found)
        data = data[count:]
    assert not reader.in_the_middle
    assert [frames.header for frames in found] == [b"small", b"large", b"small", b"large", b"small"]
    assert [plain(frames) for frames in found[::2]] == [plain(SMALL)] * 3
    for frames in found[1::2]:
        expect_missing(frames, b"large", MIB + 100_105)
    assert reader.nbytes == sum(len(f.header) + sum(map(len, f.buffers)) for f in (SMALL, large, SMALL, large, SMALL))


def test_memory_may_be_gone_in_the_middle_of_a_message(monkeypatch):
    """Small buffers are made one by one, as their bytes come."""
    reader = FrameReader(16 * MIB, SegmentPool(MIB, shared=False))
    many = Frames(b"many", [b"x" * 50_000] * 20)
    data = memoryview(bytes_of(many) + bytes_of(SMALL))
    found: list[Frames] = []
    while data:
        if len(data) < MIB // 2:
            monkeypatch.setattr(wire, "bytearray", no_bytearray, raising=False)
        count = min(len(data), len(reader.target))
        reader.target[:count] = data[:count]
        reader.received(count, found)
        data = data[count:]
    expect_missing(found[0], b"many", 1_000_004)
    assert list(map(plain, found[1:])) == [plain(SMALL)]


def test_a_small_message_that_there_is_no_memory_for(monkeypatch):
    class Inbox(bytearray):
        full = False

        def __getitem__(self, place):
            if isinstance(place, slice) and place.stop - place.start == 30_000 and Inbox.full:
                raise MemoryError
            return super().__getitem__(place)

    reader = FrameReader(16 * MIB, SegmentPool(MIB, shared=False))
    reader._inbox = Inbox(wire.INBOX)
    reader._view = reader.target = memoryview(reader._inbox)
    data = bytes_of(SMALL) + bytes_of(Frames(b"other", [b"x", b"y" * 30_000])) + bytes_of(SMALL)
    for Inbox.full in (True, False):
        found: list[Frames] = []
        reader.target[: len(data)] = data
        reader.received(len(data), found)
        assert [frames.header for frames in found] == [b"small", b"other", b"small"]
        if Inbox.full:
            expect_missing(found[1], b"other", 30_001)
        else:
            assert not found[1].missing


def test_the_connection_goes_on_over_tcp(ends, no_maps, monkeypatch):
    one, other = ends("tcp")
    for _ in range(2):
        writing = threading.Thread(target=one.write, args=(Frames(b"large", [bytes(MIB)]), WAIT))
        writing.start()
        with monkeypatch.context() as patch:
            no_maps(patch)
            expect_missing(read_all(other, 1)[0], b"large", MIB + 5)
        writing.join()
    writing = threading.Thread(target=one.write, args=(Frames(b"large", [b"x" * MIB]), WAIT))
    writing.start()
    assert plain(read_all(other, 1)[0]) == (b"large", [b"x" * MIB])
    writing.join()


def test_a_segment_that_cannot_be_mapped_goes_back_to_its_sender(ends, no_maps, monkeypatch):
    one, other = ends("unix")
    for _ in range(3):
        one.write(Frames(b"large", [b"x" * MIB]))
        (segment,) = one._pool._segments[MIB]
        with monkeypatch.context() as patch:
            no_maps(patch)
            expect_missing(read_all(other, 1)[0], b"large", MIB)
        assert segment.state == RETIRED
        assert not other._mappings._mappings
    one.write(Frames(b"large", [b"y" * MIB]))  # in a new segment, which takes the place of the other one
    assert plain(read_all(other, 1)[0]) == (b"large", [b"y" * MIB])
    assert one.statistics().shared_bytes == MIB
    assert not other._descriptors


def test_a_message_that_cannot_be_copied_leaves_its_segment(ends, monkeypatch):
    """A receiver that keeps many messages gets copies of further ones."""
    monkeypatch.setattr(shm, "MAX_LENT", 0)
    one, other = ends("unix")
    with monkeypatch.context() as patch:
        patch.setattr(shm, "bytearray", no_bytearray, raising=False)
        one.write(Frames(b"large", [bytes(MIB)]))
        expect_missing(read_all(other, 1)[0], b"large", MIB)
    assert one.statistics().shared_bytes_free == MIB
    one.write(Frames(b"large", [b"y" * MIB]))
    assert plain(read_all(other, 1)[0]) == (b"large", [b"y" * MIB])


# -- without descriptors ---------------------------------------------------------------------------------


LARGE = Frames(b"large", [b"x" * MIB])
NO_DESCRIPTOR = r"no file descriptor for a message of 1048576 bytes .*raise that limit \(ulimit -n\), or close some"


def lose(other) -> None:
    """Reads a message without its descriptor."""
    with no_more_descriptors():
        (lost,) = other.receive()
    assert lost.header == b"large"
    assert not lost.buffers
    assert re.match(NO_DESCRIPTOR, lost.missing)


def test_a_message_whose_descriptor_is_lost_fails_alone(ends):
    one, other = ends("unix")
    held = []  # or segments would be used again, which need no descriptor
    for _ in range(3):
        for frames in (LARGE, SMALL, LARGE, SMALL):
            one.write(frames, WAIT)
        lose(other)
        held += read_all(other, 3)
        assert list(map(plain, held[-3:])) == [plain(SMALL), plain(LARGE), plain(SMALL)]
        assert not other._descriptors


@pytest.mark.parametrize("frames", [SMALL, LARGE], ids=["small", "large"])
def test_the_sender_of_a_lost_descriptor_drops_its_segment(ends, frames):
    """With the next message that goes there, of any size. Until then it waits for the segment to be read."""
    one, other = ends("unix", Options(peer_byte_limit=MIB))
    one.write(LARGE, WAIT)
    (segment,) = one._pool._segments[MIB]
    lose(other)
    assert segment.state == FILLED
    with pytest.raises(TimeoutError):
        one.write(LARGE, 0.0)
    other.write(frames, WAIT)
    assert plain(read_all(one, 1)[0]) == plain(frames)
    assert segment.state == RETIRED
    one.write(LARGE, WAIT)
    assert plain(read_all(other, 1)[0]) == plain(LARGE)
    assert one.statistics().shared_bytes == MIB
    other.write(SMALL)  # which goes as small ones do again
    assert plain(read_all(one, 1)[0]) == plain(SMALL)
    assert other._small == one._small > 0


def test_the_sender_of_a_lost_descriptor_hears_of_it_without_a_message(ends):
    one, other = ends("unix")
    one.write(LARGE, WAIT)
    (segment,) = one._pool._segments[MIB]
    lose(other)
    other.tick()
    assert read(one, 0) == []
    assert segment.state == RETIRED


def test_without_memory_for_an_envelope_the_connection_ends_and_says_why(facing, monkeypatch):
    """What the envelope says of gradients and references must be known before the next message is read."""
    connection, raw = facing("tcp")
    raw.send(bytes_of(SMALL) + bytes_of(Frames(b"h" * MIB, [b"x"]))[: 300 * KIB])
    assert list(map(plain, read_all(connection, 1))) == [plain(SMALL)]
    monkeypatch.setattr(wire, "bytearray", no_bytearray, raising=False)
    with pytest.raises(ConnectionClosedError, match="no memory for the envelope of a message"):
        while True:
            read(connection, WAIT)
