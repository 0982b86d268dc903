"""Large messages over TCP are read in large pieces, and nothing waits for bytes that do not come."""

from __future__ import annotations

import random
import socket

import pytest
from raw_peers import read_all

from telegrad.errors import ConnectionClosedError
from telegrad.transport import wire
from telegrad.transport.base import Frames

KIB, MIB = 1 << 10, 1 << 20
SMALL = Frames(b"small", [b"after it"])


def bytes_of(frames: Frames) -> bytes:
    return b"".join(wire.in_pieces(frames.header, frames.buffers, sum(map(len, frames.buffers))))


def low_water(connection) -> int:
    return connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def received(connection) -> int:
    """How many bytes of the message under way have been read."""
    partial = connection._reader._partial
    return sum(map(len, partial.buffers)) - len(partial.rest)


def test_a_thread_is_not_woken_for_a_few_bytes_of_many(facing):
    connection, raw = facing("tcp")
    large = Frames(b"large", [random.Random(1).randbytes(3 * MIB)])
    data = bytes_of(large)
    raw.send(data[:1000])
    assert connection.lease.wait(5) == [connection]
    assert not connection.receive()
    assert low_water(connection) == 256 * KIB
    raw.send(data[1000:101_000])
    assert not connection.lease.wait(0.05)
    raw.send(data[101_000 : 1000 + 600 * KIB])
    assert connection.lease.wait(5) == [connection]
    while received(connection) < 600 * KIB:
        connection.lease.wait(0.01)  # the last of it need not wake a thread
        assert not connection.receive()
    raw.send(data[1000 + 600 * KIB :] + bytes_of(SMALL) * 2)
    found = read_all(connection, 3)
    assert bytes(found[0].buffers[0]) == large.buffers[0]
    assert bytes(found[1].buffers[0]) == SMALL.buffers[0]
    assert low_water(connection) == 1
    raw.send(bytes_of(SMALL))
    assert len(read_all(connection, 1)) == 1


@pytest.mark.parametrize("nbytes", [64 * KIB, 64 * KIB + 1, 511 * KIB, MIB, MIB + 1])
def test_the_last_bytes_are_few(facing, nbytes):
    connection, raw = facing("tcp")
    large = Frames(b"large", [b"x" * 10, random.Random(nbytes).randbytes(nbytes), b"y" * 10, b"", b"z" * 70_000])
    data = bytes_of(large)
    for tail in (1, 11, 70_000, 70_001, 70_011):
        raw.send(data[:-tail])
        while connection.lease.wait(0.05):
            assert not connection.receive()
        raw.send(data[-tail:])
        (found,) = read_all(connection, 1)
        assert [bytes(b) for b in found.buffers] == [bytes(b) for b in large.buffers]
        assert low_water(connection) == 1


@pytest.mark.parametrize("reset", [False, True])
def test_the_end_in_the_middle_is_noticed_at_once(facing, reset):
    connection, raw = facing("tcp")
    raw.send(bytes_of(Frames(b"large", [b"x" * (3 * MIB)]))[:100_000])
    while connection.lease.wait(0.05):
        assert not connection.receive()
    if reset:
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raw.close()
    assert connection.lease.wait(5) == [connection]
    with pytest.raises(ConnectionClosedError, match="in the middle of a message|reset"):
        while True:
            connection.receive()


def test_a_tick_has_what_is_there_read(facing):
    connection, raw = facing("tcp")
    large = Frames(b"large", [b"x" * MIB])
    data = bytes_of(large)
    raw.send(data[:1000])
    assert connection.lease.wait(5) == [connection]
    assert not connection.receive()
    raw.send(data[1000:3000])
    assert not connection.lease.wait(0.05)
    connection.tick()
    assert connection.lease.wait(5) == [connection]
    assert not connection.receive()
    raw.send(data[3000:])
    assert bytes(read_all(connection, 1)[0].buffers[0]) == large.buffers[0]
    assert low_water(connection) == 1
    connection.dispose()
    connection.tick()


def test_a_system_without_low_water_marks_is_only_slower(ends, monkeypatch):
    class Sock(socket.socket):
        def setsockopt(self, level, option, *value):
            if option == socket.SO_RCVLOWAT:
                raise OSError("no such thing")
            super().setsockopt(level, option, *value)

    reader, writer = ends("tcp", wrap=lambda sock: Sock(fileno=sock.detach()))
    for _ in range(3):
        writer.write(Frames(b"", [b"x" * (300 * KIB)]))
        assert bytes(read_all(reader, 1)[0].buffers[0]) == b"x" * (300 * KIB)
