"""Handshakes, refusals, and what listening leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from conformance import read
from raw_peers import WAIT, Raw, forked, no_more_descriptors, polling
from torch.distributed import HashStore

from telegrad.errors import AddressError, ConnectError, ConnectionClosedError, VersionError
from telegrad.messages import WIRE_VERSION, Hello
from telegrad.options import Options
from telegrad.rendezvous.group import Group
from telegrad.runtime.threads import Threads
from telegrad.transport.base import CrossingError
from telegrad.transport.lease import ReadLease
from telegrad.transport.listening import GREETING, GREETING_MAGIC, MAX_GREETING
from telegrad.transport.poller import Poller
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.unix import UnixTransport
from telegrad.worker import Worker

STREAMS = ("unix", "tcp")
NEAR, FAR = Hello("test", 1, "near", to=2), Hello("test", 2, "far")
WAYS = {"unix": UnixTransport, "tcp": TcpTransport}


class Host:
    """Something that listens as a worker does, and something to connect with."""

    def __init__(self, transport: str, options: Options, answer) -> None:
        self.poller = Poller()
        self.threads = Threads("host", self.poller, 60.0, lambda: None)
        self.threads.start()
        self.accepted: list = []
        self.arrived = threading.Event()
        self.lease = ReadLease(self.poller)
        self.lease.try_take()  # these tests read for themselves
        self.way = WAYS[transport](self.poller, self.lease, options)
        try:
            self.listener = self.way.listen(answer, self.on_connection)
        except BaseException:
            self.end()
            raise
        self.address = self.listener.address

    def on_connection(self, connection) -> None:
        self.accepted.append(connection)
        self.arrived.set()

    def knock(self) -> Raw:
        """A plain socket at the door."""
        target = self.address.partition("://")[2]
        if self.address.startswith("unix"):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(target)
        else:
            host, _, port = target.rpartition(":")
            sock = socket.create_connection((host, int(port)))
        return Raw(sock)

    def close(self) -> None:
        self.listener.close()
        self.listener.close()
        self.end()

    def end(self) -> None:
        assert self.threads.close(timeout=WAIT)
        while self.accepted:  # some only while the threads ended
            self.accepted.pop().dispose()
        self.lease.try_take()  # unless it is held
        self.lease.release()
        self.lease.close()
        self.poller.close()


@contextmanager
def hosting(transport: str, options: Options | None = None, answer=lambda hello: FAR):
    host = Host(transport, options or Options(), answer)
    try:
        yield host
    finally:
        host.close()


def greeting(payload: bytes, version: int = WIRE_VERSION, magic: bytes = GREETING_MAGIC) -> bytes:
    return GREETING.pack(magic, version, len(payload)) + payload


def read_greeting(raw: Raw) -> tuple[int, object]:
    magic, version, length = GREETING.unpack(raw.receive(GREETING.size))
    assert magic == GREETING_MAGIC
    return version, msgspec.msgpack.decode(raw.receive(length))


# -- handshakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", STREAMS)
def test_both_sides_learn_who_the_other_is(transport):
    with hosting(transport) as host:
        connection = host.way.connect(host.address, NEAR, WAIT)
        assert host.arrived.wait(WAIT)
        assert (connection.peer, host.accepted[0].peer) == (FAR, NEAR)
        connection.dispose()


@pytest.mark.parametrize("transport", STREAMS)
def test_a_peer_of_another_version_is_told_ours(transport, caplog):
    with hosting(transport) as host:
        raw = host.knock()
        raw.send(greeting(b"whatever a later version says", version=WIRE_VERSION + 1))
        version, reason = read_greeting(raw)
        assert version == WIRE_VERSION
        assert reason == [f"only wire version {WIRE_VERSION} is spoken here", False]
        assert raw.is_closed_by_peer()
        raw.close()
        good = host.way.connect(host.address, NEAR, WAIT)
        good.dispose()
    assert f"the peer speaks wire version {WIRE_VERSION + 1}" in caplog.text


def _answer(server: socket.socket, address: str, say: bytes):
    def serve() -> None:
        sock, _ = server.accept()
        raw = Raw(sock)
        read_greeting(raw)
        raw.send(say)
        raw.is_closed_by_peer()
        raw.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield address
    thread.join(WAIT)
    assert not thread.is_alive()


def connect_to_impostor(say: bytes) -> None:
    with polling() as (poller, lease), socket.create_server(("127.0.0.1", 0)) as server:
        answers = _answer(server, f"tcp://127.0.0.1:{server.getsockname()[1]}", say)
        address = next(answers)
        try:
            TcpTransport(poller, lease, Options()).connect(address, NEAR, WAIT).dispose()
        finally:
            list(answers)


def test_a_listener_of_another_version_is_a_version_error():
    with pytest.raises(VersionError, match=f"speaks wire version 99, this worker version {WIRE_VERSION}"):
        connect_to_impostor(greeting(b"later", version=99))


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (greeting(b"", magic=b"HTTP"), "starts with b'HTTP'"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "starts with b'HTTP'"),
        (GREETING.pack(GREETING_MAGIC, WIRE_VERSION, MAX_GREETING + 1), "no telegrad worker answers"),
        (greeting(b"\xc1"), "no telegrad worker answers"),
        (greeting(msgspec.msgpack.encode({"group": 1})), "no telegrad worker answers"),
        (greeting(msgspec.msgpack.encode(("go away", False))), "refuses the connection: go away"),
        (greeting(msgspec.msgpack.encode(NEAR)), "worker 'near' with id 1 answers at .*, not id 2"),
    ],
)
def test_a_listener_that_answers_something_else_is_a_connect_error(say, reason):
    with pytest.raises(ConnectError, match=reason):
        connect_to_impostor(say)


@pytest.mark.parametrize("transport", STREAMS)
@pytest.mark.parametrize(
    "say",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GREETING.pack(GREETING_MAGIC, WIRE_VERSION, 0xFFFFFFFF),
        greeting(b"\xc1"),
        greeting(msgspec.msgpack.encode(["test", 1])),
        bytes(1000),
    ],
)
def test_garbage_instead_of_a_greeting_is_refused(transport, say, caplog):
    with hosting(transport) as host:
        raw = host.knock()
        raw.send(say)
        assert raw.is_closed_by_peer()
        raw.close()
        host.way.connect(host.address, NEAR, WAIT).dispose()
    assert "refused a connection" in caplog.text


@pytest.mark.parametrize("transport", STREAMS)
def test_a_greeting_cut_short_anywhere_is_refused(transport):
    data = greeting(msgspec.msgpack.encode(NEAR))
    with hosting(transport) as host:
        for cut in range(len(data)):
            raw = host.knock()
            raw.send(data[:cut])
            raw.sock.shutdown(socket.SHUT_WR)
            assert raw.is_closed_by_peer()
            raw.close()
        assert not host.accepted


@pytest.mark.parametrize("transport", STREAMS)
def test_a_connection_exists_when_the_peer_has_confirmed_it(transport):
    """A peer that gives up before it has the answer, or before it says so, has made no connection."""
    answered, failed = [], threading.Event()

    def answer(hello: Hello) -> Hello:
        answered.append(hello)
        return FAR

    with hosting(transport, answer=answer) as host:
        host.listener._on_failed = lambda hello: failed.set() if hello is answered[0] else None
        raw = host.knock()
        raw.send(greeting(msgspec.msgpack.encode(NEAR)))
        read_greeting(raw)
        assert answered == [NEAR] and not host.accepted
        raw.close()
        assert failed.wait(WAIT)
        assert not host.accepted
        host.way.connect(host.address, NEAR, WAIT).dispose()
        assert host.arrived.wait(WAIT)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_refusal_of_a_crossing_is_told_from_others(transport):
    def answer(hello: Hello) -> Hello:
        raise CrossingError("mine is coming")

    with hosting(transport, answer=answer) as host:
        with pytest.raises(CrossingError, match="refuses the connection: mine is coming"):
            host.way.connect(host.address, NEAR, WAIT)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_peer_that_says_nothing_is_sent_away_in_time(transport, caplog):
    with hosting(transport, Options(connect_timeout=0.1)) as host:
        raw = host.knock()
        assert raw.is_closed_by_peer()
        raw.close()
    assert "refused a connection" in caplog.text


def test_a_peer_that_says_a_byte_now_and_then_is_sent_away_in_time():
    data = greeting(msgspec.msgpack.encode(NEAR))
    with hosting("unix", Options(connect_timeout=0.3)) as host:
        raw = host.knock()
        began = time.monotonic()
        pause = threading.Event()
        try:
            for n in range(len(data)):
                raw.send(data[n : n + 1])
                pause.wait(0.05)
        except OSError:
            pass
        assert time.monotonic() - began < 0.05 * len(data)
        raw.close()
        assert not host.accepted


@pytest.mark.parametrize("transport", STREAMS)
def test_closing_does_not_wait_for_a_peer_that_says_nothing(transport):
    with hosting(transport, Options(connect_timeout=60)) as host:
        raw = host.knock()
        raw.send(GREETING_MAGIC)
        host.way.connect(host.address, NEAR, WAIT).dispose()  # which stood behind it, so it was let in
        began = time.monotonic()
        host.close()
        assert time.monotonic() - began < 5
        raw.close()


@pytest.mark.parametrize("transport", STREAMS)
def test_a_listener_out_of_descriptors_turns_peers_away_and_goes_on(transport, caplog):
    with hosting(transport) as host:
        knocking = [socket.socket(socket.AF_UNIX if transport == "unix" else socket.AF_INET) for _ in range(3)]
        with no_more_descriptors():
            for sock in knocking:
                target = host.address.partition("://")[2]
                sock.connect(target if transport == "unix" else ("127.0.0.1", int(target.rpartition(":")[2])))
                assert Raw(sock).is_closed_by_peer()
        for sock in knocking:
            sock.close()
        assert "Too many open files" in caplog.text
        assert len(caplog.records) <= 2 * len(knocking)
        host.way.connect(host.address, NEAR, WAIT).dispose()


@pytest.mark.parametrize("transport", STREAMS)
def test_an_owner_that_cannot_take_a_connection_loses_it(transport, caplog):
    with hosting(transport) as host:

        def cannot(connection) -> None:
            raise RuntimeError("no room")

        host.listener._on_connection = cannot
        connection = host.way.connect(host.address, NEAR, WAIT)
        with pytest.raises(ConnectionClosedError, match="closed the connection"):
            read(connection, WAIT)
        connection.dispose()
    assert "no room" in caplog.text
    caplog.clear()


# -- refusals of a worker --------------------------------------------------------------------------------


@contextmanager
def closing_worker(worker: Worker):
    try:
        yield
    finally:
        worker.close(graceful=False)


@pytest.mark.parametrize("transport", STREAMS)
def test_a_worker_refuses_whom_it_does_not_expect(transport):
    worker = Worker.start("a", Group(HashStore(), None, WAIT), Options(transports=(transport,)))
    (address,) = worker.member.addresses
    ours = worker._peers._hello
    with polling() as (poller, lease), closing_worker(worker):
        way = WAYS[transport](poller, lease, Options())
        with pytest.raises(ConnectError, match="refuses the connection: worker 'a' belongs to another group"):
            way.connect(address, Hello("another group", 7, "b", to=worker.id), WAIT)
        with pytest.raises(ConnectError, match=rf"this is worker 'a' with id {worker.id}, not id 77"):
            way.connect(address, Hello(ours.group, 7, "b", to=77), WAIT)
        hello = Hello(ours.group, 7, "b", to=worker.id)
        connection = way.connect(address, hello, WAIT)
        assert connection.peer.name == "a"
        with pytest.raises(ConnectError, match=r"has a connection with worker 'b' \(id 7\) already"):
            way.connect(address, hello, WAIT)
        assert not worker._peers.is_lost(7), "the one that was refused was no connection"
        connection.dispose()
        connection.lease.wait(0)  # the holder comes round
        deadline = time.monotonic() + WAIT
        while not worker._peers.is_lost(7):
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)
        with pytest.raises(ConnectError, match=r"has lost its connection with worker 'b' \(id 7\)"):
            way.connect(address, hello, WAIT)


# -- addresses -------------------------------------------------------------------------------------------


def listen_for_tcp(**options) -> str:
    with hosting("tcp", Options(**options)) as host:
        return host.address


@pytest.mark.parametrize("host", ["10.1.2.3", "192.168.0.1", "example.com", "fe80::1"])
def test_listening_beyond_loopback_needs_the_insecure_option(host):
    with pytest.raises(AddressError, match=r"set Options\(insecure_listen_beyond_loopback=True\)"):
        listen_for_tcp(tcp_host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_listening_everywhere_is_refused_since_peers_need_an_address(host):
    with pytest.raises(AddressError, match="name the one that they are to connect to"):
        listen_for_tcp(tcp_host=host, insecure_listen_beyond_loopback=True)


def test_listening_where_one_cannot():
    with pytest.raises(AddressError, match="cannot listen for TCP at '203.0.113.1'"):
        listen_for_tcp(tcp_host="203.0.113.1", insecure_listen_beyond_loopback=True)
    with pytest.raises(AddressError, match="cannot listen for TCP at 'no.such.host.invalid'"):
        listen_for_tcp(tcp_host="no.such.host.invalid", insecure_listen_beyond_loopback=True)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.2",
        "localhost",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")),
    ],
)
def test_loopback_has_many_names(host):
    with hosting("tcp", Options(tcp_host=host)) as hosted:
        assert hosted.address.startswith(f"tcp://{host}:")
        connection = hosted.way.connect(hosted.address, NEAR, WAIT)
        assert connection.peer == FAR
        connection.dispose()


@pytest.mark.parametrize(
    ("transport", "address"),
    [
        ("tcp", "unix:///nowhere"),
        ("tcp", "tcp://127.0.0.1"),
        ("tcp", "tcp://127.0.0.1:http"),
        ("tcp", "tcp://:80"),
        ("unix", "tcp://127.0.0.1:80"),
        ("unix", "nonsense"),
    ],
)
def test_addresses_that_are_none(transport, address):
    with hosting(transport) as host, pytest.raises(AddressError, match="is not"):
        host.way.connect(address, NEAR, WAIT)


@pytest.mark.parametrize(
    ("transport", "address"),
    [
        ("tcp", "tcp://127.0.0.1:1"),
        ("tcp", "tcp://no.such.host.invalid:80"),
        ("unix", "unix:///proc/1/fd/99999"),
        ("unix", "unix:///dev/null"),
    ],
)
def test_nobody_answers(transport, address):
    with hosting(transport) as host, pytest.raises(ConnectError, match=f"no worker answers at {address}"):
        host.way.connect(address, NEAR, WAIT)


def test_a_unix_listener_with_a_long_queue_is_waited_for():
    with hosting("unix") as host:
        host.listener._sock.listen(0)
        with host.listener._lock:  # no peer is let in
            waiting = [host.knock() for _ in range(1)]
            connecting = threading.Thread(target=lambda: host.way.connect(host.address, NEAR, WAIT).dispose())
            connecting.start()
            with pytest.raises(ConnectError, match="no worker answers"):
                host.way.connect(host.address, NEAR, 0.05)
        connecting.join(WAIT)
        assert not connecting.is_alive()
        for raw in waiting:
            raw.close()


# -- what is left in the file system ---------------------------------------------------------------------


def files_of_ours(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_listening_leaves_nothing_in_the_file_system(tmp_path, monkeypatch):
    deep = tmp_path / ("long" * 50)  # far beyond what a socket's path may be
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with hosting("unix") as host:
        assert files_of_ours(deep) == []
        host.way.connect(host.address, NEAR, WAIT).dispose()
    with pytest.raises(AddressError, match="cannot listen on a unix socket"):
        monkeypatch.setattr("tempfile.tempdir", str(deep / "missing"))
        with hosting("unix"):
            pass


def test_a_killed_listener_leaves_nothing_in_the_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def listen(child) -> None:
        with hosting("unix") as host:
            child.tell(host.address)
            child.hear()

    with forked(listen) as child:
        address = child.hear()
        assert address.startswith("unix:///proc/")
        os.kill(child.pid, signal.SIGKILL)
    assert files_of_ours(tmp_path) == []


# -- other users -----------------------------------------------------------------------------------------

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def try_to_connect(path: str) -> str:
    with polling() as (poller, lease):
        try:
            UnixTransport(poller, lease, Options()).connect(path, NEAR, WAIT).dispose()
        except ConnectError as error:
            return str(error)
    return "connected"


@as_root
def test_another_user_cannot_even_reach_the_socket():
    with hosting("unix") as host:

        def connect(child) -> str:
            become_nobody()
            return try_to_connect(host.address)

        with forked(connect) as child:
            assert "Permission denied" in child.result()


@as_root
def test_another_user_who_reaches_the_socket_is_refused(caplog):
    with hosting("unix") as host:
        path = host.address.removeprefix("unix://")
        os.chmod(path, 0o777)
        # What only a careless parent would do: a descriptor of the socket's place, for a child of another user.
        place = os.open(path, os.O_PATH)

        def connect(child) -> str:
            become_nobody()
            return try_to_connect(f"unix:///proc/self/fd/{place}")

        with forked(connect) as child:
            assert "no telegrad worker answers" in child.result()
        os.close(place)
        assert not host.accepted
    assert f"belongs to user {NOBODY}, not to 0" in caplog.text


@as_root
def test_the_listener_of_another_user_is_refused():
    def listen(child) -> None:
        become_nobody()
        with hosting("unix") as host:
            child.tell(host.address)
            child.hear()

    with forked(listen) as child:
        assert try_to_connect(child.hear()) == f"the process at the other end belongs to user {NOBODY}, not to 0"
        child.tell("enough")
        child.result()
