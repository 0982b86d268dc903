"""Connections between processes: what a kill -9 leaves, and what a fork of either end changes (nothing)."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from conformance import connected, read
from raw_peers import WAIT, connection_over, forked, read_all, socket_pair

from telegrad.errors import ConnectionClosedError
from telegrad.messages import Hello
from telegrad.options import Options
from telegrad.transport.base import Frames
from telegrad.transport.lease import ReadLease
from telegrad.transport.poller import ARMED, Poller
from telegrad.transport.unix import UnixTransport

STREAMS = ("unix", "tcp")
KIB, MIB = 1 << 10, 1 << 20


def shared_mappings() -> int:
    return sum("memfd:telegrad" in line for line in Path("/proc/self/maps").read_text().splitlines())


class Ours:
    """Our end of a connection with a fork that has the other. The fork lets go of the socket that is ours."""

    def __init__(self, transport: str, function, options: Options | None = None) -> None:
        one, other = socket_pair(transport)

        def child_side(child):
            one.close()
            return function(child, connection_over(other, ReadLease(Poller()), options))

        self._forked = forked(child_side)
        self.child = self._forked.__enter__()
        other.close()
        self.poller = Poller()
        self.lease = ReadLease(self.poller)
        self.lease.try_take()
        self.connection = connection_over(one, self.lease, options)

    def __enter__(self):
        return self.connection, self.child

    def __exit__(self, *_) -> None:
        self._forked.__exit__(None, None, None)
        self.connection.dispose()
        self.lease.release()
        self.lease.close()
        self.poller.close()


def expect_end(connection) -> None:
    with pytest.raises(ConnectionClosedError):
        while True:
            read(connection, WAIT)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_receiver_that_is_killed_leaves_nothing(transport):
    def keep_everything(child, connection) -> None:
        held = read_all(connection, 5)
        child.tell(len(held))
        child.hear()

    with Ours(transport, keep_everything) as (connection, child):
        for _ in range(5):
            connection.write(Frames(b"", [bytes(4 * MIB)]), WAIT)
        assert child.hear() == 5
        if transport == "unix":
            statistics = connection.statistics()
            assert statistics.shared_bytes == 5 * 4 * MIB
            assert statistics.shared_bytes_free == 0
            assert shared_mappings() == 5
        child.end(kill=True)
        expect_end(connection)
        with pytest.raises(ConnectionClosedError):
            connection.write(Frames(b"", [bytes(4 * MIB)]), WAIT)
        connection.dispose()
        assert shared_mappings() == 0


@pytest.mark.parametrize("transport", STREAMS)
def test_a_sender_that_is_killed_leaves_what_it_sent(transport):
    def send(child, connection) -> None:
        connection.write(Frames(b"header", [b"x" * MIB]), WAIT)
        child.hear()

    with Ours(transport, send) as (connection, child):
        (frames,) = read_all(connection, 1)
        child.end(kill=True)
        expect_end(connection)
        connection.dispose()
        connection.lease.wait(0)  # the holder comes round
        assert frames.buffers[0] == b"x" * MIB
        frames.buffers[0][:3] = b"yyy"
        del frames
        assert shared_mappings() == 0


@pytest.mark.parametrize("transport", STREAMS)
def test_a_sender_that_is_killed_in_the_middle_of_a_message(transport):
    def send(child, connection) -> None:
        child.tell("about to write")
        for _ in range(100):
            connection.write(Frames(b"header", [b"x" * MIB]), WAIT)

    with Ours(transport, send, Options(peer_byte_limit=2 * MIB)) as (connection, child):
        child.hear()
        read_all(connection, 1)
        child.end(kill=True)
        expect_end(connection)


# -- forks of one end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", *STREAMS])
def test_a_fork_can_end_its_copies_and_the_parent_goes_on(transport):
    with connected(transport) as (one, other):
        assert not other.lease.try_take()  # it is held, by a thread that the fork may not have

        def use_them(child) -> list[str]:
            said = []
            for end in (one, other):
                for action in (lambda: end.write(Frames(b"", [b"x"])), lambda: read(end, None)):  # noqa: B023
                    try:
                        action()
                    except ConnectionClosedError as error:
                        said.append(str(error))
                end.statistics()
                end.tick()
                end.open()
                end.lease.try_take()
                end.lease.release()
                end.abort("the fork's doing")
                end.dispose()
            return said

        one.write(Frames(b"before", [b"x" * MIB]))
        with forked(use_them) as child:
            assert child.result() == ["the connection belongs to the process that this one is a fork of"] * 4
        one.write(Frames(b"after", [b"y"]))
        assert [f.header for f in read_all(other, 2)] == [b"before", b"after"]
        readable = threading.Event()
        other.lease.on_readable = readable.set
        other.lease.release()
        one.write(Frames(b"last", []))
        assert readable.wait(WAIT)  # the parent's epoll was not touched


@pytest.mark.parametrize("transport", STREAMS)
def test_the_end_of_a_process_is_seen_though_a_fork_of_it_lives(transport):
    def fork_and_end(child, connection) -> None:
        pid = os.fork()
        if pid == 0:
            child.hear()
            os._exit(0)
        child.tell(pid)
        connection.write(Frames(b"", [bytes(MIB)]))

    with Ours(transport, fork_and_end) as (connection, child):
        fork = child.hear()
        child.result()
        expect_end(connection)
        assert Path(f"/proc/{fork}/stat").read_text().rpartition(")")[2].split()[0] in "SR"
        child.tell("enough")


def test_a_fork_keeps_what_was_received_though_the_parent_lets_go(ends):
    """The segment is never filled again; its sender drops it, and takes another one."""
    one, other = ends("unix")
    one.write(Frames(b"", [b"x" * MIB]))
    found = read_all(other, 1)

    def look(child) -> bytes:
        child.hear()
        return bytes(found[0].buffers[0])

    with forked(look) as child:
        found.clear()
        for _ in range(3):
            one.write(Frames(b"", [b"y" * MIB]))
            read_all(other, 1)
        child.tell("look now")
        assert child.result() == b"x" * MIB
    one.tick()
    assert one.statistics().shared_bytes == MIB  # one segment is used again and again
    read(other, 0)
    assert len(other._mappings._mappings) == 1


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_fork_has_its_own_copy_of_what_came_by_other_ways(transport):
    with connected(transport) as (one, other):
        writing = threading.Thread(target=one.write, args=(Frames(b"", [b"x" * MIB]),))
        writing.start()
        (frames,) = read_all(other, 1)
        writing.join()

        def change(child) -> None:
            frames.buffers[0][:5] = b"child"

        with forked(change) as child:
            child.result()
        assert frames.buffers[0][:5] == b"xxxxx"


def test_a_fork_that_drops_what_it_inherited_frees_nothing(ends):
    one, other = ends("unix")
    one.write(Frames(b"", [b"x" * MIB]))
    found = read_all(other, 1)
    with forked(lambda child: found.clear()) as child:
        child.result()
    one.write(Frames(b"", [b"y" * MIB]))
    read_all(other, 1)
    assert found[0].buffers[0] == b"x" * MIB


def test_a_fork_does_not_listen_for_its_parent():
    """Nor does it keep the door open: who connects after the parent's end is turned away at once."""

    def listen(child) -> None:
        poller = Poller()
        way = UnixTransport(poller, ReadLease(poller), Options())
        listener = way.listen(lambda hello: Hello("g", 1, "a"), lambda c: None)
        path = listener.address.removeprefix("unix://")
        pid = os.fork()
        if pid == 0:
            child.tell(sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]))
            os._exit(0)
        os.waitpid(pid, 0)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)  # the parent's own is as it was
        poller.poll(0)

    with forked(listen) as child:
        inherited = child.hear()
        assert not [name for name in inherited if name.startswith("socket") or "telegrad" in name]
        child.result()


def test_a_poller_in_a_fork_does_not_disarm_the_parents():
    poller = Poller()
    one, other = socket_pair("unix")
    try:
        heard = threading.Event()
        poller.register(one.fileno(), heard.set)
        poller.watch(one.fileno(), ARMED)

        def meddle(child) -> str:
            try:
                poller.watch(one.fileno(), 0)
            except ValueError as error:
                return str(error)
            return "it went through"

        with forked(meddle) as child:
            assert "closed epoll" in child.result()
        other.send(b"x")
        (callback,) = poller.poll(WAIT)
        callback()
        assert heard.is_set()
    finally:
        poller.unregister(one.fileno())
        one.close()
        other.close()
        poller.close()
