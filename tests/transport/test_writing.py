"""Writes that do not go at one go: in pieces, too late, interrupted, without memory or descriptors."""

from __future__ import annotations

import ctypes
import errno
import socket
import threading

import pytest
from conformance import read
from raw_peers import WAIT, no_more_descriptors, read_all, trickle

from telegrad.errors import ConnectionClosedError, HandedOverError, TooLargeError
from telegrad.options import Options
from telegrad.transport import shared_memory as shm
from telegrad.transport import stream, wire
from telegrad.transport.base import Frames

STREAMS = ("unix", "tcp")
KIB, MIB = 1 << 10, 1 << 20

SMALL = Frames(b"header", [b"skeleton", b"", b"more"])
LARGE = Frames(b"header", [b"skeleton", bytes(range(256)) * 400, b"between", b"x" * 70_000])


def plain(frames: Frames) -> tuple[bytes, list[bytes]]:
    return frames.header, [bytes(b) for b in frames.buffers]


def expect(connection, *messages: Frames) -> None:
    assert list(map(plain, read_all(connection, len(messages)))) == list(map(plain, messages))


@pytest.fixture
def slow_ends(ends):
    """Two ends; the first writes through a socket that takes a few bytes at a time."""
    return lambda transport, options=None: ends(transport, options, wrap=trickle)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_small_message_goes_in_pieces_of_any_size(slow_ends, transport):
    one, other = slow_ends(transport)
    for one._sock.at_once in range(1, 60):
        one.write(SMALL, WAIT)
        expect(other, SMALL)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("at_once", [1, 7, 24, 55, 56, 57, 60, 61, 90, 150, 4099, 102_460, 102_461, 150_000])
def test_a_large_message_goes_in_pieces_of_any_size(slow_ends, transport, at_once):
    one, other = slow_ends(transport)
    one._sock.at_once = at_once
    frames = LARGE if at_once > 1000 or transport == "unix" else Frames(b"header", [b"x" * 64 * KIB, b"yz"])
    writing = threading.Thread(target=one.write, args=(frames, WAIT))
    writing.start()
    expect(other, frames)
    writing.join()
    one.write(SMALL, WAIT)
    expect(other, SMALL)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("frames", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("reason", ["time", "Ctrl-C"])
def test_a_message_of_which_nothing_was_sent_is_withdrawn(slow_ends, transport, frames, reason):
    """Its segment is free again, its descriptor goes with the next message, and it does not count."""
    one, other = slow_ends(transport)
    one._sock.full, one._sock.at_once = True, 1 << 20
    for _ in range(2):
        if reason == "time":
            with pytest.raises(TimeoutError, match="worker 'peer' did not take the message in time") as raised:
                one.write(frames, 0.02)
            assert not isinstance(raised.value, HandedOverError)
        else:
            with pytest.raises(KeyboardInterrupt):
                one.write(frames, WAIT, interrupt)
    statistics = one.statistics()
    assert statistics.messages_out == 0
    assert statistics.shared_bytes == statistics.shared_bytes_free
    one._sock.full = False
    one.write(LARGE, WAIT)
    one.write(SMALL, WAIT)
    expect(other, LARGE, SMALL)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("frames", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("reason", ["time", "Ctrl-C"])
def test_the_rest_of_a_message_that_has_begun_is_written_by_another_thread(slow_ends, transport, frames, reason):
    one, other = slow_ends(transport)
    one._sock.at_once, one._sock.full_after = 3, 1
    mutable = Frames(frames.header, [bytearray(b) for b in frames.buffers])

    def press_keys() -> None:
        if reason == "Ctrl-C" and one._sock.full and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    wait = one._wait_until_writable
    one._wait_until_writable = lambda timeout, _: wait(timeout, press_keys)
    with pytest.raises(HandedOverError, match="the rest of it follows") as raised:
        one.write(mutable, 0.02 if reason == "time" else WAIT)
    assert isinstance(raised.value.interrupt, KeyboardInterrupt if reason == "Ctrl-C" else type(None))
    del one._wait_until_writable
    for buffer in mutable.buffers:
        buffer[:] = bytes(len(buffer))  # the caller's own again
    with pytest.raises(TimeoutError):
        one.write(SMALL, 0.02)  # it has to wait for the other one, and nothing of it is sent
    with pytest.raises(TimeoutError):
        one.write(LARGE, 0.02)
    statistics = one.statistics()
    assert statistics.messages_out == 1
    in_use = statistics.shared_bytes - statistics.shared_bytes_free
    assert in_use == (256 * KIB if transport == "unix" and frames is LARGE else 0)
    one._sock.full, one._sock.full_after, one._sock.at_once = False, -1, 1 << 20
    expect(other, frames)
    one.write(LARGE, WAIT)
    expect(other, LARGE)


class Shortage:
    """Has a late writer find no memory for a copy, or no thread. When it has tried three times the peer takes what
    there is; then there is `enough`, or not."""

    def __init__(self, monkeypatch, what: str, sock, *, enough: bool = False, relents: bool = True) -> None:
        self.tried, self._sock, self._enough, self._relents = 0, sock, enough, relents
        if what == "thread":
            self._error, self._original = RuntimeError("can't start new thread"), threading.Thread.start
            monkeypatch.setattr(threading.Thread, "start", lambda thread: self._try(thread))
        else:
            self._error, self._original = MemoryError(), bytes
            monkeypatch.setattr(stream, "bytes", self._try, raising=False)

    def _try(self, of: object) -> object:
        self.tried += 1
        if self.tried > 3 and self._enough:
            return self._original(of)
        if self.tried == 3 and self._relents:
            self._sock.full, self._sock.full_after, self._sock.at_once = False, -1, 1 << 20
        raise self._error


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("what", ["memory", "thread"])
def test_who_cannot_hand_over_the_rest_of_a_message_writes_it(slow_ends, transport, what, monkeypatch):
    one, other = slow_ends(transport)
    one._sock.at_once, one._sock.full_after = 3, 1
    with monkeypatch.context() as patch:
        Shortage(patch, what, one._sock)
        with pytest.raises(HandedOverError):
            one.write(SMALL, 0.02)
    assert not one._write_lock.locked()
    expect(other, SMALL)
    one.write(LARGE, WAIT)
    expect(other, LARGE)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("what", ["memory", "thread"])
def test_who_could_not_hand_over_the_rest_of_a_message_tries_again(slow_ends, transport, what, monkeypatch):
    one, other = slow_ends(transport)
    one._sock.at_once, one._sock.full_after = 3, 1
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, what, one._sock, enough=True)
        with pytest.raises(HandedOverError):
            one.write(LARGE, 0.02)
        assert shortage.tried >= 3
    expect(other, LARGE)
    one.write(SMALL, WAIT)
    expect(other, SMALL)


@pytest.mark.parametrize("what", ["memory", "thread"])
def test_who_cannot_hand_over_the_rest_of_a_message_does_not_write_for_ever(slow_ends, what, monkeypatch):
    monkeypatch.setattr(stream, "_LONGEST_LATE", 0.05)
    one, other = slow_ends("tcp")
    one._sock.at_once, one._sock.full_after = 3, 1
    with monkeypatch.context() as patch:
        Shortage(patch, what, one._sock, relents=False)
        with pytest.raises(ConnectionClosedError, match=f"interrupted in the middle: .*no {what} .*within 0.05 s more"):
            one.write(LARGE, 0.02)
    with pytest.raises(ConnectionClosedError):
        read(other, WAIT)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM], ids=["ENOBUFS", "ENOMEM"])
def test_a_receiver_whose_system_has_no_buffers_tries_again(ends, transport, number, monkeypatch):
    class Starved(socket.socket):
        times = 3

        def recvmsg_into(self, *args):
            if self.times:
                self.times -= 1
                raise OSError(number, "no memory in the kernel")
            return super().recvmsg_into(*args)

    other, one = ends(transport, wrap=lambda sock: Starved(fileno=sock.detach()))
    for _ in range(2):
        one.write(SMALL, WAIT)
        for other._sock.times in (3, 2, 1):
            assert other.receive() == []
        expect(other, SMALL)
    one.write(SMALL, WAIT)
    other._sock.times = 1_000_000
    monkeypatch.setattr(stream, "_LONGEST_CROWDED", 0.05)
    with pytest.raises(ConnectionClosedError, match="no memory in the kernel"):
        read(other, WAIT)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("end_it", ["abort", "dispose", "the peer's abort"])
def test_the_end_of_a_connection_frees_the_thread_that_writes_a_late_message(slow_ends, transport, end_it):
    one, other = slow_ends(transport)
    one._sock.full_after, one._sock.at_once = 1, 3
    with pytest.raises(HandedOverError):
        one.write(LARGE, 0.02)
    (other if "peer" in end_it else one).abort() if "abort" in end_it else one.dispose()
    if "peer" in end_it:
        one._sock.full, one._sock.full_after = False, -1
    assert one._write_lock.acquire(timeout=WAIT)
    one._write_lock.release()
    with pytest.raises(ConnectionClosedError):
        one.write(SMALL)
    one.dispose()
    # The leak check sees that the thread has gone.


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize(
    ("broken", "raised"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (lambda: OSError(errno.EIO, "Input/output error"), ConnectionClosedError),
        (lambda: MemoryError(), ConnectionClosedError),
    ],
    ids=["Ctrl-C", "input/output error", "no memory"],
)
def test_a_writer_that_is_interrupted_while_it_sends_ends_the_connection(slow_ends, transport, broken, raised):
    """It is not known how much went out, and half a message would make nonsense of all that follow."""
    one, other = slow_ends(transport)
    one._sock.broken = broken()
    with pytest.raises(raised):
        one.write(SMALL)
    with pytest.raises(ConnectionClosedError, match="interrupted in the middle"):
        one.write(SMALL)
    with pytest.raises(ConnectionClosedError):
        read(other, WAIT)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("frames", [SMALL, LARGE], ids=["small", "large"])
def test_a_message_that_cannot_be_put_together_fails_alone(ends, transport, frames):
    """The write lock and the segment are free again."""
    one, other = ends(transport)
    wrong = Frames("not bytes", frames.buffers)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        one.write(wrong)
    with pytest.raises(TypeError):
        one.write(Frames(b"", [*frames.buffers, None]))  # type: ignore[list-item]
    statistics = one.statistics()
    assert statistics.shared_bytes == statistics.shared_bytes_free
    assert statistics.messages_out == 0
    one.write(frames)
    expect(other, frames)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_peer_that_is_gone_can_be_read_to_its_end(ends, transport):
    one, other = ends(transport)
    for _ in range(3):
        other.write(SMALL)
    other.abort()
    with pytest.raises(ConnectionClosedError):
        while True:
            one.write(SMALL)
    expect(one, SMALL, SMALL, SMALL)
    with pytest.raises(ConnectionClosedError):
        read(one, None)


@pytest.mark.parametrize("transport", STREAMS)
def test_what_the_receiver_would_refuse_is_not_sent(ends, transport):
    one, other = ends(transport)
    with pytest.raises(TooLargeError, match="a header of 16777217 bytes"):
        one.write(Frames(bytes(wire.MAX_HEADER + 1), []))
    with pytest.raises(TooLargeError, match="1048577 buffers"):
        one.write(Frames(b"", [b""] * (wire.MAX_BUFFERS + 1)))
    one.write(SMALL)
    expect(other, SMALL)


# -- without descriptors, without memory -----------------------------------------------------------------


def test_a_sender_out_of_descriptors_goes_without_shared_memory(ends, caplog):
    one, other = ends("unix")
    with no_more_descriptors():
        for _ in range(2):
            writing = threading.Thread(target=one.write, args=(LARGE, WAIT))
            writing.start()
            expect(other, LARGE)
            writing.join()
    assert one.statistics().shared_bytes == 0
    assert [r.getMessage() for r in caplog.records] == [
        "no shared memory for worker 'peer', large messages are slower: [Errno 24] Too many open files"
    ]
    one.write(LARGE)
    expect(other, LARGE)
    assert one.statistics().shared_bytes == 256 * KIB


def test_a_sender_out_of_memory_goes_without_shared_memory(ends, monkeypatch, caplog):
    one, other = ends("unix")

    def no_memory(*args):
        ctypes.set_errno(errno.ENOSPC)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(shm, "_madvise", no_memory)
        one.write(LARGE)
    expect(other, LARGE)
    assert "No space left" in caplog.text
    statistics = one.statistics()
    assert statistics.shared_bytes == statistics.shared_bytes_free
    one.write(LARGE)
    expect(other, LARGE)


def test_a_sender_with_too_many_descriptors_on_their_way_waits(ends):
    """The system counts them per user; a root user's are not counted, so a socket stands in that says so."""

    class Counted(socket.socket):
        too_many = 3

        def sendmsg(self, buffers, ancillary=(), *args):
            if ancillary and self.too_many:
                self.too_many -= 1
                raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
            return super().sendmsg(buffers, ancillary, *args)

    one, other = ends("unix", wrap=lambda sock: Counted(fileno=sock.detach()))
    one.write(LARGE, WAIT)
    expect(other, LARGE)
    assert one._sock.too_many == 0


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize("frames", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM], ids=["ENOBUFS", "ENOMEM"])
def test_a_sender_whose_system_has_no_buffers_waits(ends, transport, frames, number):
    class Starved(socket.socket):
        times = 3

        def _starve(self):
            if self.times:
                self.times -= 1
                raise OSError(number, "no memory in the kernel")

        def send(self, *args):
            self._starve()
            return super().send(*args)

        def sendmsg(self, *args):
            self._starve()
            return super().sendmsg(*args)

    one, other = ends(transport, wrap=lambda sock: Starved(fileno=sock.detach()))
    one._sock.times = 1_000_000
    with pytest.raises(TimeoutError, match="did not take the message in time"):
        one.write(frames, 0.02)
    one._sock.times = 3
    one.write(frames, WAIT)
    assert one._sock.times == 0
    expect(other, frames)


def test_segments_take_no_descriptors_once_they_were_passed_on(ends):
    one, other = ends("unix")
    held = []
    for _ in range(50):
        one.write(Frames(b"", [bytes(64 * KIB)]))
        held += read_all(other, 1)
    assert one.statistics().shared_bytes == 50 * 64 * KIB
    assert all(s.fd == -1 for same in one._pool._segments.values() for s in same)
    assert other._descriptors == []


# -- the byte limit of a peer ----------------------------------------------------------------------------


def test_shared_memory_that_the_peer_has_not_read_is_limited(ends):
    one, other = ends("unix", Options(peer_byte_limit=MIB))
    frames = Frames(b"", [bytes(300 * KIB)])
    for _ in range(3):
        one.write(frames, 0.02)
    waited = threading.Event()
    with pytest.raises(TimeoutError):
        one.write(frames, 0.02, waited.set)
    assert waited.is_set()
    with pytest.raises(TimeoutError):
        one.write(Frames(b"", [bytes(10 * MIB)]), 0.02)
    one.write(SMALL, 0.02)  # which takes nothing of it
    assert len(read_all(other, 4)) == 4
    one.write(Frames(b"", [bytes(10 * MIB)]), WAIT)  # alone it always fits
    (held,) = read_all(other, 1)
    one.write(frames, WAIT)  # and what the peer holds it has read
    read_all(other, 1)
    assert held.buffers[0][:5] == bytes(5)


def test_who_waits_for_room_hears_of_the_end(ends):
    for end_it in ("here", "there"):
        one, other = ends("unix", Options(peer_byte_limit=MIB))
        one.write(Frames(b"", [bytes(MIB)]))
        ending = (one if end_it == "here" else other).abort
        with pytest.raises(ConnectionClosedError):
            one.write(Frames(b"", [bytes(MIB)]), WAIT, ending)


# -- memory that is not used -----------------------------------------------------------------------------


def test_tick_gives_memory_back_at_both_ends(ends):
    one, other = ends("unix", Options(pool_bytes=MIB))
    one.write(Frames(b"", [bytes(4 * MIB)]))
    (held,) = read_all(other, 1)
    one.tick()
    assert one.statistics().shared_bytes == 4 * MIB  # it is held
    del held
    one.tick()
    assert one.statistics().shared_bytes == 0
    assert read(other, 0) == []
    assert not other._mappings._mappings
    one.write(LARGE)
    expect(other, LARGE)


def test_a_small_message_may_follow_a_word_about_segments(ends):
    one, other = ends("unix", Options(pool_bytes=0))
    for _ in range(3):
        one.write(LARGE)
        expect(other, LARGE)
        one.tick()
        one.write(SMALL)
        expect(other, SMALL)
    assert not other._mappings._mappings


def test_tick_does_not_wait_for_a_writer(slow_ends):
    one, other = slow_ends("unix", Options(pool_bytes=0))
    one._sock.at_once = 1 << 20
    one.write(LARGE, WAIT)
    expect(other, LARGE)
    one._sock.at_once, one._sock.full_after = 3, 1
    with pytest.raises(HandedOverError):
        one.write(SMALL, 0.02)
    one.tick()  # the lock is taken: the word waits
    one._sock.at_once, one._sock.full, one._sock.full_after = 1 << 20, False, -1
    expect(other, SMALL)
    while one._pool.dropped:
        one.tick()
    one.write(SMALL, WAIT)
    expect(other, SMALL)
    assert not other._mappings._mappings


def test_tick_says_a_word_that_does_not_go_at_once_the_next_time(slow_ends):
    one, other = slow_ends("unix", Options(pool_bytes=0))
    one._sock.at_once = 1 << 20
    one.write(LARGE, WAIT)
    expect(other, LARGE)
    one._sock.full = True
    one.tick()
    assert one._pool.dropped
    one._sock.full = False
    while one._pool.dropped:
        one.tick()
    one.write(SMALL, WAIT)
    expect(other, SMALL)
    assert not other._mappings._mappings
