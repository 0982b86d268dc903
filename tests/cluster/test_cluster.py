"""LocalCluster as processes: what it leaves behind, and what happens when processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import telegrad
from telegrad import errors, functions, rpc

PATIENCE = 30.0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        threading.Event().wait(0.005)


def hold() -> None:
    threading.Event().wait(PATIENCE)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cpu_seconds() -> float:
    return time.process_time()


def large(size: int) -> torch.Tensor:
    return torch.ones(size)


def start_script(tmp_path: Path, text: str) -> subprocess.Popen:
    """Runs it with a folder of its own for temporary files: others of this machine have theirs in /tmp."""
    script = tmp_path / "script.py"
    script.write_text(text)
    (tmp_path / "t").mkdir()
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "t")},
    )


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_killed_peer_fails_everything_pending_on_it_at_once(server, transport):
    with telegrad.LocalCluster(["a", "b"], transport=transport, server=server) as cluster:
        rpc.rpc_sync("a", large, args=(1 << 20,))
        futures = [rpc.rpc_async("a", hold) for _ in range(5)]
        rpc.rpc_sync("a", abs, args=(1,))
        began = time.monotonic()
        os.kill(cluster.pids["a"], signal.SIGKILL)
        for future in futures:
            with pytest.raises(errors.PeerLostError, match=r"worker 'a' is gone, with the call of hold unanswered"):
                future.wait()
        assert time.monotonic() - began < 1
        with pytest.raises(errors.PeerLostError, match="worker 'a'"):
            rpc.rpc_sync("a", abs, args=(1,))
        assert rpc.rpc_sync("b", abs, args=(-2,)) == 2


def test_a_worker_that_kills_itself_in_a_call(server):
    with telegrad.LocalCluster(["a", "b"], server=server):
        with pytest.raises(errors.PeerLostError, match="worker 'a' is gone, with the call of die"):
            rpc.rpc_sync("a", die)
        with pytest.raises(errors.PeerLostError, match="worker 'a'"):
            rpc.rpc_sync("b", rpc.rpc_sync, args=("a", abs, (1,)))


def test_tensors_outlive_the_process_that_sent_them(server):
    with telegrad.LocalCluster(["a"], server=server) as cluster:
        x = rpc.rpc_sync("a", large, args=(1 << 20,))
        os.kill(cluster.pids["a"], signal.SIGKILL)
        wait_until(lambda: not is_running(cluster.pids["a"]), "the end of 'a'")
        assert bool((x == 1).all())
        x.add_(1)
        assert bool((x == 2).all())


def test_nothing_is_left_after_an_exception_inside(server):
    with pytest.raises(ZeroDivisionError), telegrad.LocalCluster(["a", "b"], server=server) as cluster:
        pids = list(cluster.pids.values())
        rpc.rpc_async("a", hold)
        raise ZeroDivisionError
    assert not any(map(is_running, pids))


def test_a_cluster_of_its_own_server_leaves_nothing():
    with telegrad.LocalCluster(["a"]) as cluster:
        pids = list(cluster.pids.values())
        assert cluster.call("a", abs, -1) == 1
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("os._exit(5)", 5),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 2)", 130),
    ],
)
def test_children_end_with_their_owner_however_it_ends(tmp_path, ending, status):
    text = f"""
import os, telegrad
with telegrad.LocalCluster(["a", "b"]) as cluster:
    print(*cluster.pids.values(), cluster.call("a", os.getppid), flush=True)
    {ending}
"""
    process = start_script(tmp_path, text)
    out, err = process.communicate(timeout=PATIENCE)
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 3, err
    assert process.returncode in (status, -2 if status == 130 else status), err
    wait_until(lambda: not any(map(is_running, pids)), "the end of all processes")
    assert not list((tmp_path / "t").iterdir())


def test_ctrl_c_prints_one_traceback_and_no_noise_from_children(tmp_path):
    text = """
import os, signal, threading, telegrad
with telegrad.LocalCluster(["a", "b"]) as cluster:
    cluster.call_async("a", threading.Event().wait if False else abs, -1).wait()
    os.killpg(os.getpgrp(), signal.SIGINT)
    threading.Event().wait(20)
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    process = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        start_new_session=True,
        check=False,
    )
    assert process.stderr.count("Traceback") == 1, process.stderr
    assert "KeyboardInterrupt" in process.stderr


def test_no_process_imports_from_the_current_directory(tmp_path):
    """But what the driver's own path leads to is found by the workers, also beside the script."""
    for name in ("telegrad", "msgspec", "torch", "importlib", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)\n")
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("VALUE = 7\n")
    text = """
        import telegrad

        def look():
            import os, sys, beside
            return beside.VALUE, "" in sys.path or os.getcwd() in sys.path

        with telegrad.LocalCluster(["a"]) as cluster:
            print(cluster.call("a", look))
    """
    (folder / "script.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("(7, False)\n", "", 0)


def test_starting_with_threads_around(server):
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait, args=(PATIENCE,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    try:
        with telegrad.LocalCluster(["a"], server=server) as cluster:
            assert cluster.call("a", abs, -1) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_names_must_differ():
    with pytest.raises(ValueError, match=r"repeated: \['a'\]"):
        telegrad.LocalCluster(["a", "a"])
    with pytest.raises(ValueError, match="driver"):
        telegrad.LocalCluster(["driver"])
    with pytest.raises(ValueError, match="transport is 'carrier pigeon'"):
        telegrad.LocalCluster(["a"], transport="carrier pigeon")


@pytest.mark.parametrize("nothing", [{}, 0, ""])
def test_options_that_are_none_are_refused(nothing):
    with pytest.raises(TypeError, match=r"options is a \w+; expected telegrad.Options"):
        telegrad.LocalCluster(["a"], options=nothing)


def test_use_outside_the_with():
    cluster = telegrad.LocalCluster(["a"], transport="inproc")
    with pytest.raises(errors.ClusterError, match="not running"):
        cluster.call("a", abs, -1)
    with cluster:
        assert cluster.call("a", abs, -1) == 1
    with pytest.raises(errors.NotStartedError, match="init_rpc"):
        rpc.rpc_sync("a", abs, args=(1,))


def test_two_clusters_at_once(server):
    with (
        telegrad.LocalCluster(["a"], server=server) as one,
        telegrad.LocalCluster(["a"], transport="inproc", driver="other") as two,
    ):
        assert one.call("a", os.getpid) != two.call("a", os.getpid) == os.getpid()
        assert two.call("a", rpc.get_worker_info).name == "a"


def test_a_hundred_workers_in_one_process():
    names = [f"w{n}" for n in range(100)]
    with telegrad.LocalCluster(names, transport="inproc") as cluster:
        futures = [cluster.call_async(name, rpc.get_worker_info) for name in names]
        assert [info.name for info in torch.futures.wait_all(futures)] == names


def test_an_idle_worker_uses_under_one_percent_of_a_core(server):
    with telegrad.LocalCluster(["a"], server=server):
        for _ in range(100):
            rpc.rpc_sync("a", abs, args=(-1,))
        there, here = rpc.rpc_sync("a", cpu_seconds), time.process_time()
        threading.Event().wait(2.0)
        assert time.process_time() - here < 0.02
        assert rpc.rpc_sync("a", cpu_seconds) - there < 0.02


def test_a_forked_process_cannot_use_its_parents_worker(server):
    with telegrad.LocalCluster(["a"], server=server):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                rpc.rpc_sync("a", abs, args=(1,))
            except errors.NotStartedError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        message = os.read(read, 4096).decode()
        os.close(read)
        assert "fork" in message
        assert rpc.rpc_sync("a", abs, args=(-1,)) == 1


def test_a_fork_server_that_is_gone(server):
    own = telegrad.ForkServer()
    own.close()
    cluster = telegrad.LocalCluster(["a"], server=own)
    with pytest.raises(errors.ClusterError, match="process that forks workers"), cluster:
        pass


def test_a_fork_server_with_modules(capfd):
    with telegrad.ForkServer(preload=["this", "xml.dom.minidom"]) as own:
        for name in ("a", "b"):
            with telegrad.LocalCluster([name], server=own):
                assert rpc.rpc_sync(name, has_imported, args=("xml.dom.minidom",))
    assert capfd.readouterr().out.count("The Zen of Python") == 1, "it is imported once"
    with telegrad.ForkServer(preload=["not_there"]) as own:
        cluster = telegrad.LocalCluster(["a"], server=own)
        with pytest.raises(errors.ClusterError, match="ended; its output says why"), cluster:
            pass
    assert "No module named 'not_there'" in capfd.readouterr().err


def has_imported(name: str) -> bool:
    return name in sys.modules


def test_a_process_number_that_is_used_again_has_not_ended(server):
    """The server remembers how children ended; a new one may get the number of an old one."""
    newest = int(Path("/proc/loadavg").read_text().split()[4])
    old = dict.fromkeys(range(newest, newest + 2000), 0)
    server._ended.update(old)
    try:
        with telegrad.LocalCluster(["a"], server=server):
            assert rpc.rpc_sync("a", abs, args=(-1,)) == 1
    finally:
        for pid in old:
            server._ended.pop(pid, None)


def test_a_fork_that_leaves_the_with_block_leaves_the_cluster_alone():
    """As one that ends by sys.exit() or an exception does."""
    with telegrad.LocalCluster(["a"]) as cluster:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with pytest.raises(errors.ClusterError, match="of which this one is a fork"):
                    cluster._server.spawn([], 1.0)
                cluster.__exit__(None, None, None)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert rpc.rpc_sync("a", abs, args=(-1,)) == 1
        with telegrad.LocalCluster(["b"], server=cluster._server, driver="other") as second:
            assert second.call("b", abs, -2) == 2


def fork_and(ending: str) -> tuple[int, str]:
    """Forks, and tells the exit code of the child, and what it has written to stderr."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        with open(read) as shown:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.read()
    os.dup2(write, 2)
    if ending == "raises":
        raise ValueError("in the child")
    if ending == "exits":
        sys.exit(5)
    if ending == "exits with a text":
        sys.exit("that is all")
    return -1, ""


def train_in_a_fork() -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        with telegrad.LocalCluster(["a"], transport="inproc"):
            x = torch.ones(1, requires_grad=True)
            rpc.rpc_sync("a", torch.mul, (x, 2)).sum().backward()
            status = 4 if x.grad == 2 else 2
    finally:
        os._exit(status)


def test_a_fork_of_a_worker_may_start_workers_of_its_own(server):
    with telegrad.LocalCluster(["a"], server=server, options=telegrad.Options(rpc_timeout=PATIENCE)) as cluster:
        assert cluster.call("a", train_in_a_fork) == 4


def scaled_with_hook(x: torch.Tensor, ending: str) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: FORKED.append(fork_and(ending)))
    return y


FORKED: list[tuple[int, str]] = []


def forked() -> tuple[int, str]:
    return FORKED.pop()


@pytest.mark.parametrize(("ending", "code"), [("exits", 5), ("exits with a text", 1), ("raises", 1), ("returns", 0)])
def test_a_fork_of_a_worker_does_not_go_on_serving(server, ending, code):
    """The child ends where it leaves the user's function or hook: it answers nothing and runs no other call."""
    with telegrad.LocalCluster(["a", "b"], server=server, options=telegrad.Options(rpc_timeout=PATIENCE)) as cluster:
        texts = {"exits with a text": "that is all\n", "raises": "ValueError: in the child\n"}
        for ended, shown in (
            cluster.call("a", fork_and, ending),
            cluster.call("a", rpc.rpc_sync, "b", fork_and, (ending,)),
        ):
            assert ended == code
            assert shown.endswith(texts.get(ending, "")) and bool(shown) == (ending in texts)
        x = torch.ones(1, requires_grad=True)
        cluster.call("a", scaled_with_hook, x, ending).sum().backward()
        if ending != "returns":  # else torch's engine goes on in the child, to where it would send something
            ended, shown = cluster.call("a", forked)
            assert ended == code and shown.endswith(texts.get(ending, ""))
        assert x.grad == 2
        assert [cluster.call(name, abs, -1) for name in "ab"] == [1, 1]


class ForksWhenPickled:
    """Arrives as what fork_and() has told."""

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return tuple, (fork_and("exits"),)


class ForksWhenUnpickled:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return fork_and, ("exits",)


def echo(x: object) -> object:
    return x


def send_from_here(to: str, kind: type) -> object:
    return rpc.rpc_sync(to, echo, args=(kind(),))


@functions.async_execution
def call_back(to: str, way: str) -> torch.futures.Future:
    answer = rpc.rpc_async(to, echo, args=(1,))
    if way == "then":
        return answer.then(lambda _: fork_and("exits"))
    found = torch.futures.Future()
    answer.add_done_callback(lambda _: found.set_result(fork_and("exits")))
    return found


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (echo, (ForksWhenUnpickled(),)),
        (ForksWhenPickled, ()),
        (send_from_here, ("b", ForksWhenPickled)),
        (send_from_here, ("b", ForksWhenUnpickled)),
        (call_back, ("b", "then")),
        (call_back, ("b", "add_done_callback")),
    ],
)
def test_a_fork_ends_with_its_exit_code_wherever_users_code_makes_it(server, function, args):
    """Though others would make an error of it: pickle's caller, and torch, which runs callbacks."""
    with telegrad.LocalCluster(["a", "b"], server=server, options=telegrad.Options(rpc_timeout=PATIENCE)) as cluster:
        assert tuple(cluster.call("a", function, *args)) == (5, "")
        assert [cluster.call(name, abs, -1) for name in "ab"] == [1, 1]
