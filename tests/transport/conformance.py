"""The contract of a transport as checks, for its authors and for tests against one. Nothing here needs pytest.

    check_transport(make)   holds a transport to the contract in transport/base.py
    connected(name)         two connected ends of one of telegrad's own transports

A check gets the two ends of a fresh connection, and runs once in each direction, for the end that connected
and the end that accepted are often not alike. Nothing here sleeps to let something happen: threads are put in
order with events, and a wait that takes too long prints all stacks and fails.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from telegrad.errors import ConnectionClosedError, TooLargeError
from telegrad.messages import Hello
from telegrad.options import Options
from telegrad.runtime.threads import Threads
from telegrad.transport.base import Buffer, Connection, Frames, Transport
from telegrad.transport.inproc import Hub
from telegrad.transport.lease import ReadLease
from telegrad.transport.poller import Poller
from telegrad.transport.registry import TRANSPORTS, make_transports

KIB, MIB = 1 << 10, 1 << 20
WAIT = 20.0  # seconds that anything which should happen may take
QUIET = 0.05  # seconds in which something that should not happen did not
OPTIONS = Options(max_message_bytes=32 * MIB, peer_byte_limit=4 * MIB)

Pair = tuple[Connection, Connection]
MakePair = Callable[[Options], AbstractContextManager[Pair]]
Check = Callable[[Connection, Connection], None]


def check_transport(make: MakePair, checks: Sequence[Check] | None = None) -> None:
    """Holds a transport to its contract: order, sizes, privacy, waiting, waking, back-pressure, endings.

    `make(options)` is a context manager that gives the two ends of one connection, made with these options, each with
    a read lease of its own, and open. While it lasts it polls for both leases on threads of its own; at its end it
    disposes of both ends, which may have been disposed of before. `checks` are all of them, or some.

    Raises:
        AssertionError: what the transport does not keep to. Whatever else a check runs into goes through.
    """
    for check in ALL_CHECKS if checks is None else checks:
        options = Options(max_message_bytes=1000) if check is refuses_what_is_too_large else OPTIONS
        for order in (1, -1):
            with make(options) as ends:
                one, other = ends[::order]
                try:
                    check(one, other)
                except BaseException as error:
                    which = "the first end to the second" if order == 1 else "the second end to the first"
                    error.add_note(f"in {check.__name__}(), from {which}")
                    raise


class _Side:
    """What one end of a connection needs of a worker: a lease, and threads that poll for it."""

    def __init__(self, name: str) -> None:
        self.poller = Poller()
        self.lease = ReadLease(self.poller, OPTIONS.spin)
        self.lease.try_take()  # until a check has threads read: see _serve
        self.threads = Threads(name, self.poller, idle_timeout=60.0, on_start=lambda: None)
        self.threads.start()

    def transport(self, name: str, hub: Hub, options: Options) -> Transport:
        only = replace(options, transports=(name,)) if name in TRANSPORTS else options
        (made,) = make_transports(hub if name == "inproc" else None, self.poller, self.lease, only)
        return made

    def close(self) -> None:
        if not self.threads.close(timeout=WAIT):
            raise AssertionError("a thread that was woken to read never came back")
        self.lease.try_take()  # unless it is held still
        self.lease.release()
        self.lease.close()
        self.poller.close()


@contextmanager
def connected(transport: str, options: Options = OPTIONS) -> Iterator[Pair]:
    """Two connected ends of "inproc", "unix" or "tcp", each with a lease and threads of its own. The lease is held, by
    the check, which reads for itself, or lets the threads read."""
    sides = [_Side("near"), _Side("far")]
    hub = Hub()
    accepted: list[Connection] = []
    arrived = threading.Event()

    def on_connection(connection: Connection) -> None:
        accepted.append(connection)
        arrived.set()

    far = sides[1].transport(transport, hub, options)
    listener = far.listen(lambda hello: Hello("testing", 2, "far"), on_connection)
    ends: list[Connection] = []
    try:
        near = sides[0].transport(transport, hub, options)
        ends.append(near.connect(listener.address, Hello("testing", 1, "near", to=2), timeout=WAIT))
        _wait_for(arrived, "the connection was not accepted")
        for end in (*ends, *accepted):
            end.open()
        yield ends[0], accepted[0]
    finally:
        listener.close()
        for end in (*ends, *accepted):
            end.dispose()
        for side in sides:
            side.close()


def read(end: Connection, timeout: float | None) -> list[Frames]:
    """The messages that have arrived at an end; waits for the first so long. The caller holds the lease.

    Raises:
        ConnectionClosedError, ProtocolError: as Connection.receive.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        found = end.receive()
        left = None if deadline is None else deadline - time.monotonic()
        if found or (left is not None and left <= 0):
            return found
        end.lease.wait(left)


# -- order, sizes, privacy -------------------------------------------------------------------------------


def keeps_the_order(one: Connection, other: Connection) -> None:
    sizes = [n * 1009 % (100 * KIB) for n in range(100)]
    writing = _Task(lambda: [one.write(_message(n, size)) for n, size in enumerate(sizes)])
    for n, frames in enumerate(_read(other, len(sizes))):
        _expect_message(frames, n, sizes[n])
    _expect(writing.result() == sizes, "write() returns the size of the buffers")


def carries_any_size(one: Connection, other: Connection) -> None:
    several: list[list[Buffer]] = [
        [],
        [b""],
        [b"", b"x", b""],
        [_pattern(1, 70 * KIB), b"", bytearray(_pattern(2, 5)), memoryview(_pattern(3, 64 * KIB)), b""],
        [_pattern(n, n % 7) for n in range(3000)],
        [_pattern(n, 100) for n in range(3000)],
        [_pattern(n, n * KIB) for n in range(100)],
    ]
    for size in (0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 300 * KIB, 5 * MIB):
        several.append([_pattern(size, size)])
        several.append([memoryview(bytearray(_pattern(size, size)))])
    for header in (b"", b"h", _pattern(1, 100 * KIB)):
        for buffers in several:
            writing = _Task(one.write, Frames(header, buffers))
            (frames,) = _read(other, 1)
            writing.result()
            _expect(frames.header == header, f"the header of {len(header)} bytes came as another one")
            _expect([len(b) for b in frames.buffers] == [len(b) for b in buffers], "buffers have other lengths")
            _expect(all(map(_same, frames.buffers, buffers)), "buffers came with other bytes")


def goes_both_ways_at_once(one: Connection, other: Connection) -> None:
    sizes = [100, 300 * KIB, 64 * KIB, 0, 3 * MIB] * 8

    def write(end: Connection) -> None:
        for n, size in enumerate(sizes):
            end.write(_message(n, size))

    tasks = [_Task(write, end) for end in (one, other)]
    readers = [_Task(_read, end, len(sizes)) for end in (one, other)]
    for task in tasks:
        task.result()
    for reader in readers:
        for n, frames in enumerate(reader.result()):
            _expect_message(frames, n, sizes[n])


def keeps_buffers_private(one: Connection, other: Connection) -> None:
    for size in (100, 64 * KIB, 256 * KIB):  # which a transport takes in though its peer does not read yet
        source = bytearray(_pattern(1, size))
        for _ in range(3):
            one.write(Frames(b"", [source, source]), WAIT)
            source[:] = bytes(size)
            (frames,) = _read(other, 1)
            first, second = frames.buffers
            _expect(_same(first, _pattern(1, size)), "what the sender wrote after write() shows at the receiver")
            _expect(not memoryview(first).readonly, "a received buffer is read-only")
            first[:] = _pattern(2, size)  # type: ignore[index]
            _expect(_same(second, _pattern(1, size)), "two received buffers share memory")
            _expect(source == bytes(size), "what the receiver writes shows at the sender")
            one.write(Frames(b"", [source]), WAIT)
            _read(other, 1)
            _expect(_same(first, _pattern(2, size)), "a buffer that is still held was used for another message")
            source[:] = _pattern(1, size)


def leaves_buffers_to_their_receiver(one: Connection, other: Connection) -> None:
    held = []
    for n, size in enumerate((100, 64 * KIB, 2 * MIB)):
        writing = _Task(one.write, _message(n, size))
        held.extend(_read(other, 1))
        writing.result()
    one.tick()
    other.tick()
    one.dispose()
    other.dispose()
    for n, frames in enumerate(held):
        _expect_message(frames, n, len(frames.buffers[0]))
        frames.buffers[0][:] = bytes(len(frames.buffers[0]))  # type: ignore[index]


def uses_memory_again(one: Connection, other: Connection) -> None:
    size, count, warm_up = 2 * MIB, 200, 20
    message = _message(0, size)
    resident = 0
    for n in range(count):
        writing = _Task(one.write, message)
        _read(other, 1)
        writing.result()
        if n == warm_up:
            resident = _resident_bytes()
    grown = _resident_bytes() - resident
    _expect(grown < 8 * size, f"{count - warm_up} messages of {size} bytes left {grown} bytes behind")
    shared = one.statistics().shared_bytes
    _expect(shared <= 4 * size, f"the sender holds {shared} bytes of shared memory for messages of {size} bytes")


# -- waiting ---------------------------------------------------------------------------------------------


def waits_as_long_as_it_is_told(one: Connection, other: Connection) -> None:
    for timeout in (0, 0.0, 1e-4, 0.02):
        began = time.monotonic()
        _expect(read(other, timeout) == [], "receive() found a message that was not sent")
        _expect(time.monotonic() - began < timeout + WAIT / 4, f"wait({timeout}) did not come back in time")
    for limit in (None, WAIT):
        about_to_read = threading.Event()

        def read_one(limit: float | None, about_to_read: threading.Event) -> list[Frames]:
            about_to_read.set()
            return _read(other, 1, limit)

        reading = _Task(read_one, limit, about_to_read)
        _wait_for(about_to_read, "the reader did not start")
        one.write(_message(1, 100))
        _expect_message(reading.result()[0], 1, 100)
    one.write(_message(2, 100))
    one.write(_message(3, 100))
    for n, frames in enumerate(_read(other, 2, timeout=0), start=2):
        _expect_message(frames, n, 100)


def wakes_a_thread_when_the_lease_is_free(one: Connection, other: Connection) -> None:
    called = threading.Event()
    lease = other.lease

    def on_readable() -> None:
        lease.wait(0)  # which answers the bell, as a thread that reads does
        called.set()  # and keeps the lease

    def expect_call(why: str) -> None:
        _wait_for(called, f"no thread was woken {why}")
        called.clear()

    def expect_none(why: str) -> None:
        _expect(not called.wait(QUIET), f"a thread was woken {why}")

    lease.on_readable = on_readable
    one.write(_message(0, 10))
    expect_none("though the lease was held")
    lease.release()
    expect_call("when there was something already")
    one.write(_message(1, 10))
    expect_none("though the lease was held")
    _read(other, 2)
    lease.wait(0)
    lease.release()
    expect_none("though everything was read")
    one.write(_message(2, 10))
    expect_call("when a message came")
    _read(other, 1)
    lease.release()
    one.abort()
    expect_call("when the peer ended the connection")


def passes_the_lease_on(one: Connection, other: Connection) -> None:
    """Threads take turns, in the middle of messages too; then the threads that are woken do."""
    count, size = 30, 700 * KIB
    found: list[Frames] = []
    other.lease.on_readable = other.lease.release
    other.lease.release()

    def read_in_turns() -> None:
        while len(found) < count:
            if other.lease.try_take():
                found.extend(read(other, 1e-3))
                other.lease.release()
            else:
                time.sleep(1e-4)

    readers = [_Task(read_in_turns) for _ in range(3)]
    for n in range(count):
        one.write(_message(n, size), timeout=WAIT)
    for reader in readers:
        reader.result()
    for n, frames in enumerate(found):
        _expect_message(frames, n, size)
    _take(other)
    _serve(other, lambda end, found: [end.write(frames, WAIT) for frames in found])
    for n in range(100):
        one.write(_message(n, n * KIB), timeout=WAIT)
        (frames,) = _read(one, 1)
        _expect_message(frames, n, n * KIB)


# -- back-pressure ---------------------------------------------------------------------------------------


def stops_a_writer_whose_peer_does_not_read(one: Connection, other: Connection) -> None:
    for size in (16 * KIB, 256 * KIB):
        waited = threading.Event()
        taken = _fill(one, size, waited)
        _expect(waited.is_set(), "before_waiting was not called before a write waited")
        writing = _Task(one.write, Frames(b"the last", []), WAIT)
        came = _read_until(other, b"the last")
        writing.result()
        # All that were taken, and perhaps the one that was too late: whole, and in its place.
        _expect(len(came) in (taken, taken + 1), f"{taken} messages were taken, and {len(came)} came")
        for n, frames in enumerate(came):
            _expect_message(frames, n, size)


def lets_both_ends_write_while_they_wait(one: Connection, other: Connection) -> None:
    """Both hold their lease and write more than the other takes at once: before_waiting releases it."""
    size, count = 256 * KIB, 200
    got: dict[Connection, list[Frames]] = {one: [], other: []}
    done = {one: threading.Event(), other: threading.Event()}

    def on_messages(connection: Connection, found: list[Frames]) -> None:
        got[connection].extend(found)
        if len(got[connection]) == count:
            done[connection].set()

    def write(connection: Connection) -> None:
        for n in range(count):
            held = [None] if connection.lease.try_take() else []

            def let_go(held: list[None] = held) -> None:
                if held:
                    held.pop()
                    connection.lease.release()

            connection.write(_message(n, size), timeout=WAIT, before_waiting=let_go)
            let_go()

    for end in (one, other):
        _serve(end, on_messages)
    writers = [_Task(write, end) for end in (one, other)]
    for writer in writers:
        writer.result()
    for end in (one, other):
        _wait_for(done[end], "not all messages came")
        # The threads that read them took them up in whatever order.
        for n, frames in enumerate(sorted(got[end], key=lambda frames: int(frames.header.split()[1]))):
            _expect_message(frames, n, size)


def refuses_what_is_too_large(one: Connection, other: Connection) -> None:
    """With a limit of 1000 bytes."""
    for size in (1001, 64 * KIB, 10 * MIB):
        try:
            one.write(Frames(b"h", [bytes(size)]))
        except TooLargeError:
            continue
        _expect(False, f"a message of {size} bytes was taken, over the limit of 1000")
    one.write(_message(1, 1000))
    one.write(_message(2, 10))
    first, second = _read(other, 2)
    _expect_message(first, 1, 1000)
    _expect_message(second, 2, 10)


# -- endings ---------------------------------------------------------------------------------------------


def wakes_readers_when_it_ends(one: Connection, other: Connection) -> None:
    begun = threading.Barrier(3)

    def read_on(end: Connection) -> str:
        begun.wait(WAIT)
        try:
            while True:
                read(end, None)
        except ConnectionClosedError as error:
            return str(error)

    tasks = [_Task(read_on, end) for end in (one, other)]
    begun.wait(WAIT)
    one.abort("enough")
    near, far = (task.result() for task in tasks)
    _expect("enough" in near, f"the end that aborted says {near!r}, not its reason")
    _expect(one.peer.name not in far, f"the other end blames itself: {far!r}")
    one.abort("again")
    other.abort("again")
    _expect_closed(one)
    _expect_closed(other)


def wakes_writers_when_it_ends(one: Connection, other: Connection) -> None:
    waiting = {one: threading.Event(), other: threading.Event()}

    def write(end: Connection) -> None:
        try:
            while True:
                end.write(_message(0, 256 * KIB), None, waiting[end].set)
        except ConnectionClosedError:
            return

    tasks = [_Task(write, end) for end in (one, other)]
    for event in waiting.values():
        _wait_for(event, "a writer whose peer does not read never waited")
    one.abort()
    tasks[0].result()
    one.dispose()
    one.lease.wait(0)  # the holder of the lease comes round
    tasks[1].result()
    _expect_closed(one)
    _expect_closed(other)


def can_be_disposed_of_at_any_time(one: Connection, other: Connection) -> None:
    answering = threading.Event()
    for end in (one, other):
        end.lease.on_readable = end.lease.release
        end.lease.release()

    def keep_writing() -> None:
        try:
            while True:
                one.write(_message(0, 100 * KIB), timeout=WAIT)
        except ConnectionClosedError:
            return

    def keep_reading() -> None:
        try:
            while True:
                if other.lease.try_take():
                    try:
                        read(other, 0.01)
                    finally:
                        other.lease.release()
                answering.set()
        except ConnectionClosedError:
            return

    tasks = [_Task(keep_writing), _Task(keep_writing), _Task(keep_reading), _Task(keep_reading)]
    _wait_for(answering, "nothing was read")
    disposing = [_Task(end.dispose) for end in (one, other, one, other)]
    for task in (*disposing, *tasks):
        task.result()
    for end in (one, other):
        end.dispose()
        end.abort()
        end.open()
        end.tick()
        _expect(end.statistics().transport == end.transport, "statistics() of a connection that has ended")
        _take(end)
        _expect_closed(end)


def counts_what_it_does(one: Connection, other: Connection) -> None:
    sizes = [0, 10, 64 * KIB, 300 * KIB]
    for n, size in enumerate(sizes):
        writing = _Task(one.write, _message(n, size))
        _read(other, 1)
        writing.result()
    out, back = one.statistics(), other.statistics()
    expected = sum(sizes) + sum(len(_message(n, 0).header) for n in range(len(sizes)))
    _expect((out.messages_out, out.bytes_out) == (len(sizes), expected), f"the sender counted {out}")
    _expect((back.messages_in, back.bytes_in) == (len(sizes), expected), f"the receiver counted {back}")
    nothing = (out.messages_in, out.bytes_in, back.messages_out, back.bytes_out)
    _expect(nothing == (0, 0, 0, 0), "messages were counted that were never sent")
    _expect(out.shared_bytes_free <= out.shared_bytes, "more shared memory is free than there is")


ALL_CHECKS: tuple[Check, ...] = (
    keeps_the_order,
    carries_any_size,
    goes_both_ways_at_once,
    keeps_buffers_private,
    leaves_buffers_to_their_receiver,
    uses_memory_again,
    waits_as_long_as_it_is_told,
    wakes_a_thread_when_the_lease_is_free,
    passes_the_lease_on,
    stops_a_writer_whose_peer_does_not_read,
    lets_both_ends_write_while_they_wait,
    refuses_what_is_too_large,
    wakes_readers_when_it_ends,
    wakes_writers_when_it_ends,
    can_be_disposed_of_at_any_time,
    counts_what_it_does,
)


# -- what the checks are made of -------------------------------------------------------------------------


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def _wait_for(event: threading.Event, otherwise: str) -> None:
    if not event.wait(WAIT):
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        raise AssertionError(f"{otherwise}, within {WAIT:.0f} s")


class _Task:
    """A function on a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = partial(function, *args)
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="telegrad-testing", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Any:
        """What the function returned, or raised."""
        _wait_for(self._ended, "a thread of the check did not end")
        if self._error is not None:
            raise self._error
        return self._value


def _pattern(seed: int, size: int) -> bytes:
    """Bytes that are not those of another seed, nor the same ones shifted."""
    row = bytes((seed * 31 + n * 7 + n // 256) % 251 for n in range(min(size, 1021)))
    return (row * (size // len(row) + 1))[:size] if size else b""


def _message(n: int, size: int) -> Frames:
    return Frames(f"message {n}".encode(), [_pattern(n, size)])


def _same(one: Buffer, other: Buffer) -> bool:
    return memoryview(one) == memoryview(other)


def _expect_message(frames: Frames, n: int, size: int) -> None:
    _expect(frames.header == f"message {n}".encode(), f"{bytes(frames.header)!r} came instead of message {n}")
    (buffer,) = frames.buffers
    _expect(len(buffer) == size, f"message {n} came with {len(buffer)} bytes, not {size}")
    _expect(_same(buffer, _pattern(n, size)), f"message {n} came with other bytes")


def _read(end: Connection, count: int, timeout: float | None = 0.1) -> list[Frames]:
    """So many messages, and not one more."""
    deadline = time.monotonic() + WAIT
    found: list[Frames] = []
    while len(found) < count:
        found += read(end, timeout)
        if len(found) < count and time.monotonic() > deadline:
            raise AssertionError(f"{len(found)} of {count} messages came within {WAIT:.0f} s")
    _expect(len(found) == count, "more messages came than were sent")
    return found


def _read_until(end: Connection, header: bytes) -> list[Frames]:
    """What comes before the message with that header."""
    found: list[Frames] = []
    deadline = time.monotonic() + WAIT
    while not found or found[-1].header != header:
        found += read(end, 0.1)
        _expect(time.monotonic() < deadline, f"{header!r} did not come within {WAIT:.0f} s")
    return found[:-1]


def _fill(end: Connection, size: int, waited: threading.Event) -> int:
    """Writes until the peer, who does not read, takes no more; how many it took."""
    for n in range(200 * MIB // size):
        try:
            end.write(_message(n, size), 0.1, waited.set)
        except TimeoutError:
            return n
    raise AssertionError(f"{200 * MIB} bytes were taken by a peer that does not read")


def _take(end: Connection) -> None:
    """Takes the lease of an end, which is free or about to be."""
    deadline = time.monotonic() + WAIT
    while not end.lease.try_take():
        _expect(time.monotonic() < deadline, "the lease was not released")
        time.sleep(1e-3)


def _serve(end: Connection, on_messages: Callable[[Connection, list[Frames]], object]) -> None:
    """Lets the threads that are woken take turns at an end, as those of a worker do. Releases the lease."""
    lease = end.lease

    def on_readable() -> None:
        try:
            found = [frames for connection in lease.wait(0) for frames in connection.receive()]
        except ConnectionClosedError:
            end.dispose()
            found = []
        lease.release()
        on_messages(end, found)

    lease.on_readable = on_readable
    lease.release()


def _expect_closed(end: Connection) -> None:
    """Neither end writes any more, and once all that came is read, neither reads."""
    for action in (lambda: end.write(_message(0, 10)), lambda: end.write(_message(0, MIB))):
        _expect_error(action)
    for _ in range(10_000):
        try:
            read(end, WAIT)
        except ConnectionClosedError:
            break
    else:
        raise AssertionError("receive() goes on after the connection's end")
    _expect_error(end.receive)


def _expect_error(action: Callable[[], object]) -> None:
    for _ in range(1000):  # the other end's write may not know at once
        try:
            action()
        except ConnectionClosedError:
            return
    raise AssertionError("the connection has ended, and a read or a write went through")


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * KIB
    return 0
