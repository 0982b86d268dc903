"""init_rpc and shutdown: how processes find each other, join, leave and come back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
import torch.distributed.rpc as torch_rpc
from torch.distributed import HashStore

import telegrad
from telegrad import errors, rpc
from telegrad.cluster.seeding import seed_of
from telegrad.primitives import current
from telegrad.rendezvous.address import open_store
from telegrad.rendezvous.group import Group
from telegrad.worker import Worker

PATIENCE = 60.0
QUICK = telegrad.Options(init_timeout=0.3)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_ranks(scripts: list[str], **env: str) -> list[str]:
    """Runs one Python process per script, all at once; what each printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env, "RANK": str(rank)},
        )
        for rank, script in enumerate(scripts)
    ]
    outs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
            assert "Traceback" not in err, err
            outs.append(out)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outs


RING = """
    import os, telegrad.rpc as rpc
    rank, size = int(os.environ["RANK"]), 3
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, init_method=os.environ.get("INIT"))
    print(rpc.get_worker_info().id, rpc.rpc_sync(f"w{(rank + 1) % size}", os.getpid) != os.getpid())
    rpc.shutdown()
"""


@pytest.mark.parametrize("method", ["env", "tcp", "file"])
def test_three_processes_meet(method, tmp_path):
    port = str(free_port())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "INIT": "env://"}
    if method == "tcp":
        env["INIT"] = f"tcp://127.0.0.1:{port}"
    elif method == "file":
        env["INIT"] = f"file://{tmp_path}/store"
    assert run_ranks([RING] * 3, **env) == ["0 True\n", "1 True\n", "2 True\n"]


SEEDED = """
    import os, torch, telegrad
    from telegrad import rpc
    rank = int(os.environ["RANK"])
    torch.manual_seed(7 + rank)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, init_method=os.environ["INIT"])
    if rank == 0:
        print(torch.initial_seed(), rpc.rpc_sync("w1", torch.initial_seed))
        telegrad.manual_seed(3)
        print(torch.initial_seed(), rpc.rpc_sync("w1", torch.initial_seed))
    rpc.shutdown()
"""


def test_each_process_seeds_itself_or_one_seeds_all(tmp_path):
    out, _ = run_ranks([SEEDED, SEEDED], INIT=f"file://{tmp_path}/meet")
    assert out.splitlines() == ["7 8", f"3 {seed_of('w1', 3)}"]


def test_torchrun_is_a_launcher(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import os, telegrad.rpc as rpc
        def whoami(): return rpc.get_worker_info().name  # of __main__, which all run: by reference
        rpc.init_rpc(f"w{os.environ['RANK']}")
        if os.environ["RANK"] == "0":
            print("heard", rpc.rpc_sync("w1", whoami), flush=True)
        rpc.shutdown()
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "heard w1" in done.stdout


def test_shutdown_waits_for_calls_in_flight_everywhere():
    """w1 comes to shutdown at once, but w0 still calls it, and it calls w0 from within."""
    late = """
        import os, time, telegrad.rpc as rpc
        rpc.init_rpc("w0", rank=0, world_size=2)
        time.sleep(0.3)
        future = rpc.rpc_async("w1", rpc.rpc_sync, args=("w0", abs, (-5,)))
        rpc.shutdown()
        print(future.wait())
    """
    early = """
        import telegrad.rpc as rpc
        rpc.init_rpc("w1", rank=1, world_size=2)
        rpc.shutdown()
        print("done")
    """
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run_ranks([late, early], **env) == ["5\n", "done\n"]


def test_shutdown_does_not_wait_for_the_dead():
    killed = """
        import os, signal, telegrad.rpc as rpc
        rpc.init_rpc("w1", rank=1, world_size=2)
        rpc.rpc_sync("w0", abs, args=(1,))
        os._exit(0)
    """
    survivor = """
        import telegrad.rpc as rpc, threading, time
        worker = rpc.init_rpc("w0", rank=0, world_size=2)
        while not worker.statistics().calls_served:
            time.sleep(0.001)
        began = time.monotonic()
        rpc.shutdown()
        print(time.monotonic() - began < 5)
    """
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run_ranks([survivor, killed], **env) == ["True\n", ""]


# -- groups that workers join and leave ------------------------------------------------------------------


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def join(name: str, address: str, store=None, **kwargs) -> Worker:
    store = store or open_store(address, -1, None, 10)[0]
    return Worker.start(name, Group(store, None, 10), **kwargs)


def test_workers_join_and_leave_a_running_group(address):
    a = join("a", address)
    b = join("b", address)
    try:
        assert a.call("b", abs, (-1,)) == 1
        c = join("c", address)
        assert c.call("a", rpc.get_worker_info).name == "a"
        assert [info.name for info in a.infos()] == ["a", "b", "c"]
        c.close()
        assert [info.name for info in a.infos()] == ["a", "b"]
        with pytest.raises(errors.TelegradError, match="'c'"):
            a.call("c", abs, (1,))
        with pytest.raises(errors.UnknownWorkerError, match=r"known: \['a', 'b'\]"):
            a.call("c", abs, (1,))
        again = join("c", address)
        assert again.id > c.id
        assert a.call("c", rpc.get_worker_info).id == again.id
        again.close()
    finally:
        b.close()
        a.close()


def test_a_name_is_unique_among_the_living(address):
    a = join("a", address)
    try:
        with pytest.raises(
            errors.NameTakenError, match="worker name 'a' is not unique: a live worker with id 0 has it"
        ):
            join("a", address)
        assert a.call("a", abs, (-1,)) == 1
    finally:
        a.close()


def test_the_name_of_a_dead_worker_can_be_taken(address):
    a = join("a", address)
    script = f"""
import os, telegrad
from telegrad.rendezvous.address import open_store
from telegrad.rendezvous.group import Group
worker = telegrad.Worker.start("b", Group(open_store({address!r}, -1, None, 10)[0], None, 10))
print(worker.id, flush=True)
os.kill(os.getpid(), 9)
"""
    dead = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    try:
        assert dead.returncode == -signal.SIGKILL, dead.stderr
        with pytest.raises(errors.PeerLostError, match="worker 'b'"):
            a.call("b", abs, (1,))
        b = join("b", address)
        assert b.id > int(dead.stdout)
        assert a.call("b", abs, (-1,)) == 1
        b.close()
    finally:
        a.close()


def test_peers_on_one_host_take_the_unix_socket(address):
    both = telegrad.Options(transports=("unix", "tcp"))
    a = join("a", address)
    b = join("b", address, options=both)
    c = join("c", address, options=telegrad.Options(transports=("tcp",)))
    try:
        a.call("b", abs, (1,))
        c.call("b", abs, (1,))
        used = {n.partition("#")[0]: s.transport for n, s in b.statistics().connections.items()}
        assert used == {"a": "unix", "c": "tcp"}
        with pytest.raises(errors.PeerLostError, match=r"'c' is on this host and has no unix socket .*set Options"):
            a.call("c", abs, (1,))
        with pytest.raises(errors.PeerLostError, match=r"this worker has TCP only, and worker 'a' .*set Options"):
            c.call("a", abs, (1,))
    finally:
        for worker in (c, b, a):
            worker.close()


# -- bad input -------------------------------------------------------------------------------------------


@pytest.fixture
def started(address):
    rpc.init_rpc("solo", rank=0, world_size=1, init_method=address)
    yield
    if current.default_worker() is not None:
        rpc.shutdown()


def test_init_rpc_twice(started, address):
    with pytest.raises(errors.AlreadyStartedError, match="already initialized in this process, as worker 'solo'"):
        rpc.init_rpc("other", rank=0, world_size=1, init_method=address)
    assert rpc.rpc_sync("solo", abs, args=(-1,)) == 1


def test_calls_before_init_rpc_and_after_shutdown(started):
    worker = current.current_worker()
    rpc.shutdown()
    for call in (
        lambda: rpc.rpc_sync("solo", abs, args=(1,)),
        lambda: rpc.rpc_async("solo", abs, args=(1,)),
        lambda: rpc.get_worker_info(),
        lambda: rpc.shutdown(),
    ):
        with pytest.raises(errors.NotStartedError, match=r"init_rpc\(\) first"):
            call()
    with pytest.raises(errors.NotStartedError, match="worker 'solo' has shut down"):
        worker.call("solo", abs, (1,))


def test_torchs_options_are_understood(address):
    options = torch_rpc.TensorPipeRpcBackendOptions(rpc_timeout=7, init_method=address)
    worker = rpc.init_rpc("w", torch_rpc.BackendType.TENSORPIPE, 0, 1, options)
    try:
        assert worker.options.rpc_timeout == 7
    finally:
        rpc.shutdown()


def test_own_options_count_under_torchs_name_too(address):
    worker = rpc.init_rpc("w", rank=0, world_size=1, init_method=address, rpc_backend_options=QUICK)
    try:
        assert worker.options is QUICK
    finally:
        rpc.shutdown()


def test_options_that_would_be_dropped_are_refused(address):
    own, torchs = telegrad.Options(), torch_rpc.TensorPipeRpcBackendOptions()
    for kwargs, message in (
        ({"options": own, "rpc_backend_options": torchs}, "options or rpc_backend_options, not both"),
        ({"options": torchs}, r"options is a TensorPipeRpcBackendOptions; expected telegrad\.Options$"),
        ({"rpc_backend_options": {"spin": 0}}, "rpc_backend_options is a dict; expected telegrad.Options or torch's"),
        ({"backend": own}, r"pass it by name: init_rpc\(\.\.\., options="),
    ):
        with pytest.raises(TypeError, match=message):
            rpc.init_rpc("w", rank=0, world_size=1, init_method=address, **kwargs)
        assert current.default_worker() is None


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.RendezvousError, match="rank 0 cannot serve the store at .*in use"):
            rpc.init_rpc("w", rank=0, world_size=1, init_method=address, options=QUICK)


def test_a_store_that_nobody_serves(address):
    with pytest.raises(errors.RendezvousError, match=r"no store is served at 127\.0\.0\.1:\d+.*start rank 0 first"):
        rpc.init_rpc("w", rank=1, world_size=2, init_method=address, options=QUICK)


def test_ranks_that_do_not_come(address):
    with pytest.raises(errors.RendezvousError, match=r"ranks \[1, 2\] of 3 did not join"):
        rpc.init_rpc("w", rank=0, world_size=3, init_method=address, options=QUICK)
    assert current.default_worker() is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"init_method": "carrier://pigeon"}, "not understood; use env://"),
        ({"init_method": "tcp://nowhere"}, "lacks a host or port"),
        ({"init_method": "tcp://host:port"}, "not an address"),
        ({"init_method": "file:///no/such/directory/store"}, "directory does not exist"),
    ],
)
def test_addresses_that_make_no_sense(kwargs, message):
    with pytest.raises(errors.RendezvousError, match=message):
        rpc.init_rpc("w", rank=0, world_size=1, **kwargs)


def test_env_without_its_variables(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(errors.RendezvousError, match=r"\['MASTER_ADDR', 'MASTER_PORT'\].*torchrun"):
        rpc.init_rpc("w", rank=0, world_size=1)


def test_a_rank_beyond_the_world(address):
    with pytest.raises(errors.RendezvousError, match="rank 0 is not within world_size 0|rank -1 is not within"):
        rpc.init_rpc("w", world_size=2, init_method=address, options=QUICK)


def test_names_and_options_are_checked(address):
    with pytest.raises(ValueError, match="string that is not empty"):
        rpc.init_rpc("", rank=0, world_size=1, init_method=address)
    with pytest.raises(ValueError, match="rpc_timeout is -1"):
        telegrad.Options(rpc_timeout=-1)
    with pytest.raises(ValueError, match="transports"):
        telegrad.Options(transports=("smoke",))


def test_a_graceful_shutdown_that_takes_too_long(address):
    worker = rpc.init_rpc("solo", rank=0, world_size=1, init_method=address)
    release = threading.Event()
    waiting = rpc.rpc_async("solo", Release.wait, timeout=0)
    with pytest.raises(errors.RendezvousError, match="still waits for 1 answers"):
        rpc.shutdown(timeout=0.2)
    Release.event.set()
    with pytest.raises(errors.PeerLostError, match="shut down before the call was answered"):
        waiting.wait()
    release.set()
    assert worker is not None


class Release:
    event = threading.Event()

    @staticmethod
    def wait() -> None:
        Release.event.wait(PATIENCE)


def test_no_files_are_left():
    """But the directories of fork servers that run, which these have locked."""
    for place in Path(tempfile.gettempdir()).glob("telegrad-*"):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(place, os.O_RDONLY)
            try:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(fd)


def test_all_of_a_group_hear_that_a_name_was_given_twice(tmp_path):
    script = f"""
    import telegrad.rpc as rpc
    try:
        rpc.init_rpc("same", rank=int(__import__("os").environ["RANK"]), world_size=3, init_method="file://{tmp_path}/s")
    except RuntimeError as error:
        print("is not unique" in str(error))
    """
    assert run_ranks([script] * 3) == ["True\n"] * 3


def test_shutdown_does_not_wait_for_one_that_has_left(tmp_path):
    leaves = f"""
    import telegrad.rpc as rpc
    rpc.init_rpc("w0", rank=0, world_size=2, init_method="file://{tmp_path}/s")
    rpc.shutdown(graceful=False)
    """
    waits = f"""
    import telegrad.rpc as rpc
    rpc.init_rpc("w1", rank=1, world_size=2, init_method="file://{tmp_path}/s")
    rpc.shutdown()  # for up to 60 s
    print("ended")
    """
    assert run_ranks([leaves, waits]) == ["", "ended\n"]


def test_a_group_has_one_size(tmp_path):
    store, *_ = open_store(f"file://{tmp_path}/s", 0, None, 1.0)
    Group(store, 2, 1.0)
    with pytest.raises(errors.RendezvousError, match="it has 2 workers, and this worker is to join a group of 3"):
        Group(store, 3, 1.0)
    with pytest.raises(errors.RendezvousError, match="mixes statically and dynamically initialized members"):
        Group(store, None, 1.0)


@pytest.mark.parametrize("graceful", [True, False])
def test_a_fork_that_shuts_down_leaves_its_parents_place_alone(tmp_path, graceful):
    rpc.init_rpc("parent", init_method=f"file://{tmp_path}/s")
    try:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                rpc.shutdown(graceful=graceful)
                status = 0 if current.default_worker() is None else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        late = join("late", f"file://{tmp_path}/s")
        assert late.call("parent", os.getpid) == os.getpid()
        late.close()
    finally:
        rpc.shutdown()


def test_a_fork_that_shuts_down_leaves_the_store_that_its_parent_serves_alone(address):
    parent = join("parent", address)
    pid = os.fork()
    if pid == 0:
        try:
            parent.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    late = join("late", address)
    assert late.call("parent", os.getpid) == os.getpid()
    late.close()
    parent.close()


def test_a_fork_can_start_while_another_thread_starts_in_its_parent(tmp_path):
    with rpc._starting:  # as a thread in init_rpc() holds it
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            status = 1
            try:
                rpc.init_rpc("child", init_method=f"file://{tmp_path}/s")
                rpc.shutdown()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_group_hears_why_a_rank_could_not_join():
    store = HashStore()
    group = Group(store, 2, PATIENCE)
    with pytest.raises(errors.AddressError, match="stands for every address"):
        Worker.start("broken", Group(store, 2, PATIENCE), telegrad.Options(tcp_host="0.0.0.0"), rank=1)
    with pytest.raises(errors.RendezvousError, match=r"rank 1 could not join .*'broken': AddressError: .*0\.0\.0\.0"):
        Worker.start("waits", group, rank=0)
