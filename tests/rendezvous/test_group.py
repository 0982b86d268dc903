"""Group over a store that others write to, too: swapped names and ids, rubbish, texts for terminals; files."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from torch.distributed import FileStore, HashStore, PrefixStore
from torch.distributed.rpc import TensorPipeRpcBackendOptions

import telegrad
from telegrad import errors, rpc
from telegrad.cli.observer import ObservedGroup
from telegrad.compat.agent import start_with
from telegrad.messages import WIRE_VERSION, Hello, Member
from telegrad.primitives.text import clean
from telegrad.rendezvous.address import open_store
from telegrad.rendezvous.file import check_file_store, temporary_directory
from telegrad.rendezvous.group import Group, this_host
from telegrad.transport.listening import GREETING, GREETING_MAGIC
from telegrad.worker import Worker

PATIENCE = 20.0
ESCAPE = "\x1b]0;title\x07"
OPTIONS = telegrad.Options(connect_timeout=PATIENCE)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@contextlib.contextmanager
def members(store: HashStore, *names: str, options: telegrad.Options = OPTIONS) -> Iterator[list[Worker]]:
    started: list[Worker] = []
    try:
        for name in names:
            started.append(Worker.start(name, Group(store, None, PATIENCE), options))
        yield started
    finally:
        for worker in started:
            worker.close(graceful=False)


def keys(store: HashStore) -> PrefixStore:
    """The store, as someone else who knows its keys has it."""
    return PrefixStore("telegrad/", store)


def swap(store: HashStore, one: str, other: str) -> None:
    at = keys(store)
    first, second = at.get(one), at.get(other)
    at.set(one, second)
    at.set(other, first)


# -- names and ids --------------------------------------------------------------------------------------


def test_names_that_were_swapped_are_noticed(store):
    with members(store, "a", "b", "driver") as (_, b, driver):
        swap(store, "name/a", "name/b")
        with pytest.raises(errors.RendezvousError, match=r"name/a .*the worker with that id is 'b'"):
            driver.call("a", abs, (-1,))
        assert driver.call(b.id, abs, (-1,)) == 1, "an id is what it was"
        with pytest.raises(errors.RendezvousError, match="name/a"):
            Worker.start("a", Group(store, None, PATIENCE), OPTIONS)
        swap(store, "name/a", "name/b")
        assert driver.call("a", os.getpid) == os.getpid()


@pytest.mark.parametrize("is_connected", [False, True], ids=["first call", "connected"])
@pytest.mark.parametrize("by", ["name", "id"])
def test_the_worker_itself_tells_its_name(store, by, is_connected):
    """Names and entries were swapped, so that the store is consistent, and wrong."""
    with members(store, "a", "b", "driver") as (a, b, driver):
        if is_connected:
            assert b.call("driver", abs, (-1,)) == 1
        swap(store, "name/a", "name/b")
        for worker, name in ((a, "b"), (b, "a")):
            renamed = msgspec.structs.replace(worker.member, name=name)
            keys(store).set(f"member/{worker.id}", msgspec.msgpack.encode(renamed))
        with pytest.raises(errors.RendezvousError, match=r"member/1 .*worker 'a', but the worker with that id is 'b'"):
            driver.call("a" if by == "name" else b.id, abs, (-1,))
        for worker in (a, b):
            keys(store).set(f"member/{worker.id}", msgspec.msgpack.encode(worker.member))
        swap(store, "name/a", "name/b")
        assert driver.call("b", abs, (-1,)) == 1, "what was wrong is forgotten"


def test_an_entry_under_the_key_of_another_id(store):
    with members(store, "a", "b", "driver") as (_, b, driver):
        keys(store).set("member/0", msgspec.msgpack.encode(b.member))
        with pytest.raises(errors.RendezvousError, match="member/0"):
            driver.call("a", abs, (-1,))


def test_an_id_that_is_given_out_twice_is_refused(store):
    with members(store, "a", "b", "driver") as (_, b, driver):
        assert driver.call("b", abs, (-1,)) == 1
        keys(store).add("ids", -2)
        with pytest.raises(errors.RendezvousError, match=r"member/1 .*id 1 was given out twice; this worker is 'late'"):
            Worker.start("late", Group(store, None, PATIENCE), OPTIONS)
        assert driver.group.find("b") == b.member, "the newcomer has not removed the entry of the other"
        assert driver.group.find("late") is None


# -- rubbish --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rubbish", [b"\x93rubbish\xff", b"\xff", b"", b"\x80", ESCAPE.encode()])
@pytest.mark.parametrize("key", ["member/1", "name/b"])
def test_rubbish_in_the_store_is_an_error_that_names_the_key(store, key, rubbish):
    with members(store, "a", "b", "driver") as (_, _, driver):
        keys(store).set(key, rubbish)
        expected = errors.UnknownWorkerError if (key, rubbish) == ("name/b", b"") else errors.RendezvousError
        with pytest.raises(expected) as caught:
            driver.call("b", abs, (-1,))
        assert expected is errors.UnknownWorkerError or key in str(caught.value)
        assert "\x1b" not in str(caught.value)
        assert driver.call("a", abs, (-1,)) == 1


@pytest.mark.parametrize("key", ["group", "size", "ids", "name/late"])
def test_rubbish_is_an_error_for_a_newcomer(store, key):
    keys(store).set(key, b"\xff" + ESCAPE.encode())
    with pytest.raises(errors.RendezvousError, match=f"key {key} of the group's store makes no sense") as caught:
        Worker.start("late", Group(store, None, PATIENCE), OPTIONS)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("key", ["group", "size", "ids"])
def test_rubbish_is_an_error_for_an_observer(store, key):
    Group(store, None, PATIENCE)
    keys(store).set(key, b"\xff")
    with pytest.raises(errors.RendezvousError, match=f"key {key} "):
        ObservedGroup(store, PATIENCE).members()


def test_another_size_with_an_escape_sequence(store):
    keys(store).set("size", f"2 workers{ESCAPE}")
    with pytest.raises(errors.RendezvousError, match=re.escape(clean(ESCAPE))):
        Group(store, 3, PATIENCE)


@pytest.mark.parametrize("field", [{"name": "a" + ESCAPE}, {"addresses": ("unix:///x" + ESCAPE,)}, {"host": ESCAPE}])
def test_texts_of_an_entry_can_be_shown(store, field):
    with members(store, "a", "driver") as (a, driver):
        keys(store).set("member/0", msgspec.msgpack.encode(msgspec.structs.replace(a.member, **field)))
        with pytest.raises(errors.RendezvousError, match="member/0") as caught:
            driver.call("a", abs, (-1,))
        assert "\x1b" not in str(caught.value)


def test_the_reason_of_a_rank_that_failed_can_be_shown(store):
    keys(store).set("failed/1", ("sorry " + ESCAPE).encode() + b" \xff" + b"x" * 10_000)
    for ask in (lambda g: g.wait_for_all(), lambda g: g.exchange("devices", Member(0, "w", (), "", 0), b"x")):
        with pytest.raises(errors.RendezvousError, match=r"rank 1 could not join the group: sorry \\x1b") as caught:
            ask(Group(store, 2, PATIENCE))
        assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 3000


@pytest.mark.parametrize("said", [b"\xff", msgspec.msgpack.encode(("w1", 0, {}, ("cuda:x" + ESCAPE,)))])
def test_device_maps_that_make_no_sense(store, said):
    at = keys(store)
    at.set("rank/1", "1")
    at.set("member/1", msgspec.msgpack.encode(Member(1, "w1", (), "", 1, True)))
    at.set("devices/1", said)
    with pytest.raises(errors.RendezvousError, match="devices/1") as caught:
        Worker.start("w0", Group(store, 2, PATIENCE), OPTIONS, rank=0)
    assert "\x1b" not in str(caught.value)


# -- strangers that are connected to, or that connect -----------------------------------------------------


def greeting(message: object) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return GREETING.pack(GREETING_MAGIC, WIRE_VERSION, len(payload)) + payload


@pytest.mark.parametrize("answer", [("sorry" + ESCAPE, False), Hello("", 0, "a" + ESCAPE)], ids=["refusal", "hello"])
def test_what_a_stranger_answers_can_be_shown(store, answer):
    options = telegrad.Options(connect_timeout=PATIENCE, transports=("tcp",))
    with (
        members(store, "a", "driver", options=options) as (a, driver),
        socket.create_server(("127.0.0.1", 0)) as stranger,
    ):
        place = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        keys(store).set("member/0", msgspec.msgpack.encode(msgspec.structs.replace(a.member, addresses=(place,))))
        future = threading.Thread(target=answer_once, args=(stranger, greeting(answer)))
        future.start()
        with pytest.raises(errors.PeerLostError) as caught:
            driver.call("a", abs, (-1,))
        future.join(PATIENCE)
        assert "\x1b" not in str(caught.value)


def answer_once(listener: socket.socket, data: bytes) -> None:
    listener.settimeout(PATIENCE)
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(PATIENCE)
        sock.recv(1 << 16)
        sock.sendall(data)
        with contextlib.suppress(OSError):
            sock.recv(1)


def test_the_name_of_a_stranger_that_connects_is_checked(store, caplog):
    options = telegrad.Options(connect_timeout=PATIENCE, transports=("tcp",))
    with members(store, "a", options=options) as (a,):
        host, _, port = a.member.addresses[0].removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as sock:
            sock.sendall(greeting(Hello(a.group.name, 9, "x" + ESCAPE, to=a.id)))
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b"", "it hangs up"
    assert "cannot be printed" in caplog.text and "\x1b" not in caplog.text


# -- files ------------------------------------------------------------------------------------------------

STRANGER = 20002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


def refusal(path: Path) -> str:
    with pytest.raises(errors.RendezvousError) as caught:
        rpc.init_rpc("w", init_method=f"file://{path}", options=telegrad.Options(init_timeout=5.0))
    return str(caught.value)


def test_a_symbolic_link_is_refused(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "meet").symlink_to(tmp_path / "target")
    assert "no symbolic link" in refusal(tmp_path / "meet")
    assert (tmp_path / "target").read_bytes() == b""


@pytest.mark.parametrize("kind", ["fifo", "directory", "second name"])
def test_what_is_no_file_of_its_own_is_refused(tmp_path, kind):
    path = tmp_path / "meet"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        (tmp_path / "precious").touch()
        path.hardlink_to(tmp_path / "precious")
    assert ("cannot be opened" if kind == "directory" else "no regular file") in refusal(path)


def test_a_file_that_others_can_write_to_is_refused(tmp_path):
    path = tmp_path / "meet"
    path.touch()
    path.chmod(0o666)
    assert "can be written to by other users" in refusal(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(("mode", "is_fine"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path, mode, is_fine):
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    folder.chmod(mode)
    for path in (folder / "meet", folder / "inner" / "meet"):
        if is_fine:
            open_store(f"file://{path}", -1, None, PATIENCE)
            assert path.stat().st_mode & 0o777 == 0o600
        else:
            assert "who could replace the file" in refusal(path)


@needs_root
@pytest.mark.parametrize("owned", ["file", "folder"])
def test_what_belongs_to_another_user_is_refused(tmp_path, owned):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "meet"
    path.touch()
    os.chown(path if owned == "file" else folder, STRANGER, -1)
    assert f"belongs to user {STRANGER}" in refusal(path)


@needs_root
def test_a_group_that_may_write_has_no_other_members(tmp_path):
    path = tmp_path / "meet"
    path.touch()
    path.chmod(0o660)
    check_file_store(FileStore(str(path), -1))  # root's own group
    os.chown(path, -1, STRANGER)
    assert f"group {STRANGER}" in refusal(path)


def test_what_is_roots_has_no_number_in_a_user_namespace(tmp_path, monkeypatch):
    """Directories of root's belong to 65534 there, and so does '/': in many sandboxes."""

    def owner_in_namespace(path):
        found = list(look(path))
        found[4] = 65534 if not str(path).startswith(str(tmp_path)) else found[4]  # st_uid
        return os.stat_result(found)

    look = os.stat
    monkeypatch.setattr("os.stat", owner_in_namespace)
    open_store(f"file://{tmp_path}/meet", -1, None, PATIENCE)


def test_a_cluster_meets_where_no_other_can_replace_its_file(tmp_path, monkeypatch):
    """Also where the directory for temporary files is a group's."""
    tmp_path.chmod(0o777)
    usual = tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert temporary_directory() in ("/tmp", "/var/tmp", "/dev/shm")
    tmp_path.chmod(0o1777)
    assert temporary_directory() == str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", usual)
    assert temporary_directory() == usual


def test_the_last_worker_to_leave_removes_the_file(tmp_path):
    address = f"file://{tmp_path}/meet"
    first, second = (Worker.start(n, Group(open_store(address, -1, None, 5.0)[0], None, 5.0), OPTIONS) for n in "ab")
    first.close(graceful=False)
    assert (tmp_path / "meet").exists()
    assert second.group.find("a") is None
    second.close()
    assert not (tmp_path / "meet").exists()


def test_a_run_after_a_clean_shutdown_works_on_the_same_file(tmp_path):
    for _ in range(2):
        worker = rpc.init_rpc("w", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
        assert worker.id == 0
        rpc.shutdown()
        assert not list(tmp_path.iterdir())


def start_here(rank, path):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, init_method=f"file://{path}")


def start_as_torch_does(rank, path):
    """As the drop-in starts a worker: with a store that torch has opened, and put a prefix before."""
    store = PrefixStore("rpc_prefix_0", FileStore(str(path), 2))
    start_with(OPTIONS)(store, f"w{rank}", rank, 2, TensorPipeRpcBackendOptions())


@pytest.mark.parametrize(("start", "prefix"), [(start_here, ""), (start_as_torch_does, "rpc_prefix_0")])
def test_a_file_that_a_dead_group_left_behind_is_named(tmp_path, start, prefix):
    """All workers of a run of fixed size were killed; the next run must not take its entries for workers."""
    path = tmp_path / "meet"
    for rank in range(2):  # as two workers leave it that are killed
        store = FileStore(str(path), -1)
        dead = Group(PrefixStore(prefix, store) if prefix else store, 2, 5.0)
        assert dead.new_id(rank) == rank
        dead.claim(f"w{rank}", rank, lambda _: False)
        dead.publish(Member(rank, f"w{rank}", ("unix:///proc/0/fd/0",), this_host(), rank))
        dead._client.close()
    path.chmod(0o600)
    for rank in range(2):
        with pytest.raises(errors.RendezvousError, match=rf"'{path}' was left behind .* none lives .* remove it"):
            start(rank, path)


def test_a_file_that_torch_has_opened_is_torchs_to_remove(tmp_path):
    """A program may use it for more than this group: for a process group, and for the next group with a prefix."""
    path = tmp_path / "meet"
    store = FileStore(str(path), 2)
    for number in range(2):
        group = Group(PrefixStore(f"rpc_prefix_{number}", store), 1, 5.0, removes_file=False)
        worker = Worker.start("w", group, OPTIONS, rank=0)
        assert worker.id == 0
        worker.close()
        assert path.exists()
    path.unlink()
    with pytest.raises(errors.RendezvousError, match="is gone; has the group ended"):
        Group(PrefixStore("rpc_prefix_2", store), 1, 5.0, removes_file=False)
    assert not path.exists()


def test_a_worker_that_comes_as_the_last_one_leaves_is_told(tmp_path):
    store = FileStore(str(tmp_path / "meet"), -1)
    keys(store).set("present", "ended x")
    with pytest.raises(errors.RendezvousError, match="has just ended; start again"):
        Group(store, None, 5.0)


def test_a_look_at_a_file_whose_group_has_ended_does_not_make_it_again(tmp_path):
    worker = Worker.start("w", Group(FileStore(str(tmp_path / "meet"), -1), None, 5.0), OPTIONS)
    observed = ObservedGroup(FileStore(str(tmp_path / "meet"), -1), 5.0)
    assert [m.name for m in observed.members()] == ["w"]
    worker.close()
    with pytest.raises(errors.RendezvousError, match="is gone; has the group ended"):
        observed.members()
    observed.let_go()
    assert not list(tmp_path.iterdir())
