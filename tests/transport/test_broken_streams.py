"""Bytes in pieces, cut short, or such as no telegrad worker would send."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import tempfile
import threading
import weakref
from pathlib import Path

import msgspec
import pytest
from conformance import read
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_peers import no_more_descriptors, read_all

from telegrad.errors import ConnectionClosedError, ProtocolError
from telegrad.options import Options
from telegrad.transport import wire
from telegrad.transport.base import Frames
from telegrad.transport.shared_memory import PAGE, Segment, SegmentPool
from telegrad.transport.wire import FrameReader

STREAMS = ("unix", "tcp")
KIB, MIB = 1 << 10, 1 << 20


def bytes_of(frames: Frames) -> bytes:
    return b"".join(wire.in_pieces(frames.header, frames.buffers, sum(map(len, frames.buffers))))


def plain(frames: Frames) -> tuple[bytes, list[bytes]]:
    return frames.header, [bytes(b) for b in frames.buffers]


SMALL = [
    Frames(b"header", [b"skeleton"]),
    Frames(b"", []),
    Frames(b"h", [b"", b"x", b"yz", b""]),
]


@pytest.mark.parametrize("transport", STREAMS)
def test_a_message_may_come_in_two_pieces_cut_anywhere(facing, transport):
    connection, raw = facing(transport)
    for frames in SMALL:
        data = bytes_of(frames)
        for cut in range(1, len(data)):
            raw.send(data[:cut])
            assert read(connection, 0.01) == []
            raw.send(data[cut:])
            assert plain(read_all(connection, 1)[0]) == plain(frames)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_message_cut_short_anywhere_ends_the_connection_and_says_so(facing, transport):
    for frames in SMALL:
        data = bytes_of(frames)
        for cut in range(len(data)):
            connection, raw = facing(transport)
            raw.send(bytes_of(SMALL[0]) + data[:cut])
            raw.close()
            assert plain(read_all(connection, 1)[0]) == plain(SMALL[0])  # what came before it is whole
            where = "closed the connection in the middle of a message" if cut else "closed the connection$"
            for _ in range(2):
                with pytest.raises(ConnectionClosedError, match=f"worker 'peer' {where}"):
                    read(connection, None)
            connection.dispose()


def test_a_large_message_cut_short_ends_the_connection_and_leaves_no_memory(facing):
    connection, raw = facing("tcp")
    data = bytes_of(Frames(b"header", [b"s" * 100, b"x" * MIB]))
    raw.send(data[: MIB // 2])
    raw.close()
    with pytest.raises(ConnectionClosedError, match="in the middle of a message"):
        read(connection, None)
    connection.dispose()
    connection.lease.wait(0)  # the holder comes round
    assert connection._reader.target.nbytes == 0


buffers_of_any_size = st.lists(st.integers(0, 300) | st.integers(60 * KIB, 70 * KIB) | st.just(300 * KIB), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(buffers_of_any_size, min_size=1, max_size=4), st.lists(st.integers(1, 200 * KIB), min_size=1))
def test_any_messages_in_any_pieces(sizes, cuts):
    messages = [
        Frames(b"header %d" % n, [bytes([n + k]) * size for k, size in enumerate(of_one)])
        for n, of_one in enumerate(sizes)
    ]
    reader = FrameReader(16 * MIB, SegmentPool(MIB, shared=False))
    data = memoryview(b"".join(map(bytes_of, messages)))
    found: list[Frames] = []
    turn = 0
    while data:
        cut = cuts[turn] if turn < len(cuts) else len(data)
        count = min(cut, len(data), len(reader.target))
        reader.target[:count] = data[:count]
        reader.received(count, found)
        data = data[count:]
        turn += 1
    assert list(map(plain, found)) == list(map(plain, messages))
    assert not reader.in_the_middle
    assert reader.messages == len(messages)
    assert reader.nbytes == sum(len(f.header) + sum(map(len, f.buffers)) for f in messages)
    assert len(reader.target) == wire.INBOX


def test_the_inbox_grows_with_what_comes_and_shrinks_again():
    reader = FrameReader(16 * MIB, SegmentPool(MIB, shared=False))
    header = b"h" * (3 * MIB)
    data = memoryview(bytes_of(Frames(header, [b"x"])))
    found: list[Frames] = []
    largest = 0
    while data:
        count = min(len(data), len(reader.target))
        reader.target[:count] = data[:count]
        reader.received(count, found)
        data = data[count:]
        largest = max(largest, len(reader.target.obj))
    assert found[0].header == header
    assert 3 * MIB < largest <= 8 * MIB
    assert len(reader.target.obj) == wire.INBOX


# -- bytes that no telegrad worker would send ------------------------------------------------------------


def prefix(magic=wire.MAGIC, type_=0, lane=0, count=0, header=0, body=0) -> bytes:
    return wire.PREFIX.pack(magic, type_, lane, count, header, body)


def place(id=1, capacity=64 * KIB, fresh=0) -> bytes:
    return wire.SHARED_PLACE.pack(id, capacity, fresh)


def forget(header: bytes) -> bytes:
    return prefix(type_=wire.FORGET, header=len(header)) + header


NONSENSE = {
    "another magic": (prefix(magic=b"no"), "starts with b'no'"),
    "another type": (prefix(type_=2), "type 2"),
    "another lane": (prefix(lane=7), "lane 7"),
    "too long a header": (prefix(header=wire.MAX_HEADER + 1), "a header of 16777217 bytes"),
    "too many buffers": (prefix(count=wire.MAX_BUFFERS + 1), "1048577 buffers"),
    "too large a body": (prefix(count=1, body=1 << 63), "9223372036854775808 bytes"),
    "lengths that do not add up": (
        prefix(count=2, body=3) + struct.pack("<2Q", 1, 1),
        "add up to 2 bytes, not 3",
    ),
    "lengths that overflow": (
        prefix(count=2, body=2) + struct.pack("<2Q", 3, (1 << 64) - 1),
        "add up to 18446744073709551618",
    ),
    "a body behind a message in shared memory": (prefix(lane=1, body=5) + place(), "with 5 bytes behind it"),
    "a segment that was never passed on": (
        prefix(lane=1, count=1) + struct.pack("<Q", 10) + place(id=9),
        "segment 9, which was never passed on|a transport without it",
    ),
    "a segment whose descriptor does not come": (
        prefix(lane=1, count=1) + struct.pack("<Q", 10) + place(fresh=1),
        "its descriptor did not come|a transport without it",
    ),
    "a message that does not fit its segment": (
        prefix(lane=1, count=2) + struct.pack("<2Q", 40 * KIB, 40 * KIB) + place(),
        "does not fit its segment|a transport without it",
    ),
    "a message in shared memory over the limit": (
        prefix(lane=1, count=1) + struct.pack("<Q", 1 << 50) + place(capacity=1 << 51),
        "the limit is",
    ),
    "a FORGET in another lane": (prefix(type_=1, lane=1) + place(), "type 1 in lane 1"),
    "a FORGET with buffers": (prefix(type_=1, count=1) + bytes(8), "type 1 in lane 0"),
    "a FORGET that is none": (forget(b"\xc1garbage"), "makes no sense"),
    "a FORGET that are no numbers": (forget(msgspec.msgpack.encode(["x"])), "makes no sense"),
}


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_the_connection_with_a_reason(facing, transport, what):
    data, reason = NONSENSE[what]
    connection, raw = facing(transport)
    good = bytes_of(SMALL[0])
    raw.send(good + data + good)
    assert plain(read_all(connection, 1)[0]) == plain(SMALL[0])  # what came before it counts
    for _ in range(2):
        with pytest.raises(ProtocolError, match=reason):
            read(connection, None)
    with pytest.raises(ConnectionClosedError, match=reason):
        connection.write(SMALL[0])
    assert raw.is_closed_by_peer()


@pytest.mark.parametrize("transport", STREAMS)
def test_what_is_only_announced_takes_no_memory(facing, transport):
    """A million buffers of 16 KiB, 16 GiB in all; one of 16 GiB; a header of 16 MiB. Each but for the last byte."""
    many = 1 << 20
    announced = [
        prefix(count=many, body=many * 16 * KIB) + struct.pack(f"<{many}Q", *[16 * KIB] * many),
        prefix(count=1, body=16 << 30) + struct.pack("<Q", 16 << 30),
        prefix(count=1, header=wire.MAX_HEADER, body=5) + struct.pack("<Q", 5),
    ]
    for data in announced:
        connection, raw = facing(transport)
        before = resident_bytes()
        sending = threading.Thread(target=raw.send, args=(data,))
        sending.start()
        while sending.is_alive() or read(connection, 0):
            read(connection, 0.01)
        assert read(connection, 0.05) == []
        sending.join()
        assert resident_bytes() - before < 120 * MIB  # the first one's table is 8 MiB, and as numbers 40
        connection.dispose()


def resident_bytes() -> int:
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmRSS")]
    return int(line.split()[1]) * KIB


# -- segments that are not what they seem ----------------------------------------------------------------


def announce(id: int, capacity: int, nbytes: int, fresh: bool = True) -> bytes:
    return wire.in_segment(b"header", [bytes(nbytes)], id, capacity, fresh=fresh)


def expect_protocol_error(connection, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        read(connection, None)


def descriptor_of(what: str) -> int:
    if what == "a file":
        with tempfile.TemporaryFile() as file:
            file.truncate(64 * KIB + PAGE)
            return os.dup(file.fileno())
    if what == "a pipe":
        read_end, write_end = os.pipe()
        os.close(write_end)
        return read_end
    fd = os.memfd_create("telegrad-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 64 * KIB + PAGE)
    return fd


@pytest.mark.parametrize("what", ["a file", "a pipe", "memory that can shrink"])
def test_only_sealed_memory_is_mapped(facing, what):
    connection, raw = facing("unix")
    fd = descriptor_of(what)
    raw.send(announce(1, 64 * KIB, 10), [fd])
    os.close(fd)
    expect_protocol_error(connection, "segment 1 is not a sealed one")


def test_a_segment_of_another_size_is_refused(facing):
    connection, raw = facing("unix")
    segment = Segment(1, 64 * KIB, shared=True)
    raw.send(announce(1, 128 * KIB, 10), [segment.fd])
    segment.close()
    expect_protocol_error(connection, "segment 1 is not a sealed one of 131072 bytes")


def test_a_segment_cannot_be_sent_again_while_it_is_held(facing):
    connection, raw = facing("unix")
    segment = Segment(1, 64 * KIB, shared=True)
    raw.send(announce(1, 64 * KIB, 10), [segment.fd])
    (held,) = read_all(connection, 1)
    raw.send(announce(1, 64 * KIB, 10, fresh=False))
    expect_protocol_error(connection, "segment 1, which is in use")
    segment.close()
    assert len(held.buffers[0]) == 10


def test_a_segment_cannot_be_passed_on_twice(facing):
    connection, raw = facing("unix")
    segment = Segment(1, 64 * KIB, shared=True)
    raw.send(announce(1, 64 * KIB, 10), [segment.fd])
    read_all(connection, 1)
    raw.send(announce(1, 64 * KIB, 10), [segment.fd])
    segment.close()
    expect_protocol_error(connection, "segment 1 was passed on twice")


def test_descriptors_that_no_frame_announced_are_closed(facing):
    connection, raw = facing("unix")
    segment = Segment(1, 64 * KIB, shared=True)
    raw.send(bytes_of(SMALL[0]), [segment.fd] * 3)
    read_all(connection, 1)
    raw.send(b"t", [segment.fd] * 20)
    segment.close()
    expect_protocol_error(connection, "more descriptors came")


def test_a_lost_descriptor_of_a_segment_that_cannot_be(facing):
    connection, raw = facing("unix")
    segment = Segment(1, 64 * KIB, shared=True)
    raw.send(announce((1 << 64) - 1, 64 * KIB, 10), [segment.fd])
    segment.close()
    with no_more_descriptors():
        expect_protocol_error(connection, "segment 18446744073709551615 was announced")


def test_a_segment_that_may_not_be_mapped_ends_the_connection(facing):
    """Its sender has sealed it against writing. Without memory to map it, only that message is lost: see
    test_messages_dropped.py."""
    connection, raw = facing("unix")
    fd = os.memfd_create("telegrad-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 64 * KIB + PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    raw.send(announce(1, 64 * KIB, 10), [fd])
    os.close(fd)
    with pytest.raises(ConnectionClosedError, match="Operation not permitted"):
        read(connection, None)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_receiver_with_a_smaller_limit_refuses(ends, transport):
    one, other = ends(transport, Options(max_message_bytes=MIB))
    one._limit = 2 * MIB
    writing = threading.Thread(target=write_to_the_end, args=(one,))
    writing.start()
    expect_protocol_error(other, "limit")
    other.dispose()
    writing.join()


def write_to_the_end(connection) -> None:
    with pytest.raises(ConnectionClosedError):
        while True:
            connection.write(Frames(b"", [bytes(2 * MIB)]))


def test_a_message_that_is_cut_off_leaves_its_memory_at_once():
    """Also while the garbage collector does not run: it may be gigabytes."""
    reader = FrameReader(16 * MIB, SegmentPool(0, shared=False))
    data = bytes_of(Frames(b"header", [bytes(MIB), bytes(10), bytes(MIB)]))[: 100 * KIB]
    reader.target[: len(data)] = data
    reader.received(len(data), [])
    partial = weakref.ref(reader._partial)
    gc.disable()
    try:
        reader.close()
        assert partial() is None
    finally:
        gc.enable()
