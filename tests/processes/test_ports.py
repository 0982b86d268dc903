"""Which sockets workers listen on and dial: TCP only where it was asked for."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from torch.distributed import HashStore

import telegrad
from telegrad import errors, rpc
from telegrad.cli.observer import Observer
from telegrad.messages import Hello, Member
from telegrad.primitives import clock
from telegrad.rendezvous.address import connect_store, serve_store
from telegrad.rendezvous.group import Group
from telegrad.runtime.routes import addresses_to_dial, dial, why_none
from telegrad.transport import listening
from telegrad.worker import Worker

PATIENCE = 30.0
LISTENS = "0A"  # in /proc/net/tcp
ACCEPTS = 1 << 16  # flag of a listening socket in /proc/net/unix


def own_sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = os.readlink(entry)
        except OSError:
            continue
        if link.startswith("socket:["):
            found.add(link.removeprefix("socket:[").removesuffix("]"))
    return found


def tcp_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    own = own_sockets()
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def unix_listeners() -> int:
    """How many unix sockets this process listens on."""
    own = own_sockets()
    lines = Path("/proc/self/net/unix").read_text().splitlines()[1:]
    return sum(int(line.split()[3], 16) & ACCEPTS != 0 and line.split()[6] in own for line in lines)


def test_a_cluster_opens_no_tcp_port(server):
    before = tcp_ports()
    with telegrad.LocalCluster(["a"], server=server) as cluster:
        assert tcp_ports() == before
        assert stat.S_IMODE(os.stat(os.path.dirname(cluster.address.removeprefix("file://"))).st_mode) == 0o700
        assert cluster.call("a", tcp_ports) == set()
        assert cluster.call("a", unix_listeners) == 1
        assert {a.partition(":")[0] for m in cluster.worker.group.members() for a in m.addresses} == {"unix"}


def test_a_cluster_over_tcp_opens_one_port_for_each_worker(server):
    before = tcp_ports()
    with telegrad.LocalCluster(["a"], transport="tcp", server=server) as cluster:
        assert len(tcp_ports() - before) == 1, "the worker's own; the group meets in a file"
        assert len(cluster.call("a", tcp_ports)) == 1
        assert cluster.call("a", unix_listeners) == 0


def test_init_rpc_opens_no_tcp_port(tmp_path):
    before = tcp_ports()
    rpc.init_rpc("w", init_method=f"file://{tmp_path}/s")
    try:
        assert tcp_ports() == before
        assert unix_listeners() == 1
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("options", [{"tcp_host": "127.0.0.1"}, {"transports": ("unix", "tcp")}])
def test_init_rpc_opens_a_tcp_port_if_told_to(tmp_path, options):
    before = tcp_ports()
    worker = rpc.init_rpc("w", init_method=f"file://{tmp_path}/s", options=telegrad.Options(**options))
    try:
        assert len(tcp_ports() - before) == 1
        assert [a.partition(":")[0] for a in worker.member.addresses] == ["unix", "tcp"]
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_an_observer_listens_nowhere(server, transport):
    with telegrad.LocalCluster(["a"], transport=transport, server=server) as cluster:
        before = tcp_ports(), unix_listeners()
        with Observer(cluster.address, transport=transport) as observer:
            assert all(seen.report for seen in observer.look().workers)
            assert (tcp_ports(), unix_listeners()) == before


ran: list[int] = []  # in the process of both


def note() -> None:
    ran.append(1)


def test_a_member_cannot_call_an_observer():
    store = serve_store("127.0.0.1", 0, PATIENCE)
    member = Worker.start("m", Group(store, None, PATIENCE))
    with Observer(f"127.0.0.1:{store.port}") as observer:
        assert all(seen.report for seen in observer.look().workers)
        (connection,) = [c for c in member._peers.connections() if c.peer.is_observer]
        peer = member._peers._know(Member(connection.peer.id, "observer", (), ""), by_name=False)
        peer.connection = connection
        with pytest.raises(errors.PeerLostError, match="'observer' is gone"):
            member.call(connection.peer.id, note, timeout=PATIENCE)
        assert observer._worker.statistics().calls_served == 0
    assert not ran
    member.close(graceful=False)


# -- addresses that a stranger has written into the store -------------------------------------------------


@contextmanager
def poisoned(worker: Worker, host: str, address: str) -> Iterator[None]:
    """The entry of a member 'late' that says where a stranger wants to be dialled."""
    member = Member(77, "late", (address,), host)
    worker.group._client.ask(
        lambda store: (store.set("name/late", "77"), store.set("member/77", msgspec.msgpack.encode(member))),
        worker.group._until(None),
    )
    yield


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("transports", [("unix",), ("unix", "tcp")])
def test_a_poisoned_entry_is_not_dialled(near, transports, monkeypatch):
    monkeypatch.setattr(listening, "connect_socket", lambda *_: pytest.fail("a stranger was dialled"))
    worker = Worker.start("w", Group(HashStore(), None, PATIENCE), telegrad.Options(transports=transports))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        if "tcp" in transports and not near:
            address = "tcp://192.0.2.1:9"  # an address for documentation, which no host has
        host = worker.member.host if near else "elsewhere"
        with poisoned(worker, host, address):
            with pytest.raises(errors.PeerLostError) as raised:
                worker.call("late", abs, (1,))
            assert isinstance(raised.value.__cause__, errors.NoRouteError)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
    worker.close(graceful=False)


def test_a_worker_that_cannot_be_asked_keeps_its_name():
    store = HashStore()
    first = Worker.start("w", Group(store, None, PATIENCE))
    elsewhere = msgspec.structs.replace(first.member, host="elsewhere")
    first.group.publish(elsewhere)
    with pytest.raises(errors.NameTakenError):
        Worker.start("w", Group(store, None, PATIENCE))
    first.close()


NEAR = Member(1, "m", ("unix:///a", "tcp://127.0.0.1:1"), "here")
FAR = msgspec.structs.replace(NEAR, host="there")


@pytest.mark.parametrize(
    ("member", "transports", "dialled"),
    [
        (NEAR, {"unix"}, ["unix:///a"]),
        (NEAR, {"unix", "tcp"}, ["unix:///a"]),
        (NEAR, {"tcp"}, ["tcp://127.0.0.1:1"]),
        (FAR, {"unix"}, []),
        (FAR, {"unix", "tcp"}, ["tcp://127.0.0.1:1"]),
        (FAR, {"tcp"}, ["tcp://127.0.0.1:1"]),
    ],
)
def test_which_addresses_are_dialled(member, transports, dialled):
    assert addresses_to_dial(member, "here", transports) == dialled


def test_all_addresses_of_a_peer_share_one_time_limit(jumping_clock):
    """None of them answers, and each has its part of the time."""

    class Silent:
        given: ClassVar[list[float]] = []

        def connect(self, address: str, hello: Hello, timeout: float) -> None:
            self.given.append(timeout)
            jumping_clock.jump(timeout)
            raise errors.ConnectError("no answer") from TimeoutError()

    jumping_clock.stop()
    began = clock.now()
    many = msgspec.structs.replace(FAR, addresses=tuple(f"tcp://127.0.0.1:{port}" for port in range(1, 5)))
    with pytest.raises(errors.ConnectError, match="no answer; no answer; no answer; no answer"):
        dial(many, Hello("g", 0, "me"), "here", {"tcp": Silent()}, 8.0)
    assert clock.now() == began + 8.0
    assert Silent.given == [2.0] * 4


def test_the_text_says_what_to_set_on_which_worker():
    no_tcp = msgspec.structs.replace(FAR, addresses=("unix:///a",))
    assert "set Options(tcp_host=ADDRESS, insecure_listen_beyond_loopback=True) on this worker," in why_none(
        FAR, "here", {"unix"}
    )
    assert "worker 'm' did not ask for TCP" in why_none(no_tcp, "here", {"unix", "tcp"})
    assert "on worker 'm' and this worker," in why_none(no_tcp, "here", {"unix"})
    assert "listens nowhere" in why_none(msgspec.structs.replace(FAR, addresses=()), "here", {"unix"})


def test_options_that_ask_for_tcp():
    assert telegrad.Options().transports == ("unix",)
    assert telegrad.Options(tcp_host="127.0.0.1").transports == ("unix", "tcp")
    assert replace(telegrad.Options(tcp_host="127.0.0.1"), spin=0.0).transports == ("unix", "tcp")


def test_a_store_at_an_absent_address_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(errors.RendezvousError, match="no store is served"):
        connect_store("127.0.0.1", port, timeout=PATIENCE, wait=False)
