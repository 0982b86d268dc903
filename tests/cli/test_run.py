"""`telegrad run`: programs that succeed, fail, hang and are interrupted under torchrun, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "telegrad", "run"]
PATIENCE = 120.0  # seconds; on a busy machine a process takes long to import torch
SOON = 60.0  # seconds; on a busy machine a process takes many to import torch


@pytest.fixture
def program(tmp_path: Path):
    """Writes a program, after some words: `rank`, `here` for files, and `note(name)`, which leaves its pid."""

    def write(text: str) -> str:
        before = f"""
            import os, pathlib, signal, subprocess, sys, time
            rank, here = int(os.environ["RANK"]), pathlib.Path({str(tmp_path)!r})
            def note(name, pid=None):
                (here / f"{{name}}.new").write_text(str(pid or os.getpid()))
                (here / f"{{name}}.new").rename(here / name)
        """
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(before) + textwrap.dedent(text))
        return str(path)

    return write


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
        check=False,
    )


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    launcher = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def pid_in(path: Path) -> int:
    """The process id that a program has left there; waits for it."""
    wait_until(path.exists, f"{path.name} was not written")
    return int(path.read_text())


def wait_until(condition, complaint: str) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_each_process_has_torchruns_variables_and_its_arguments(program):
    done = run(
        "-q", "-n", "3", program("import json; print(json.dumps([dict(os.environ), sys.argv[1:]]))"), "-n", "7", "--x"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = sorted(line.split("] ", 1) for line in done.stdout.splitlines())
    assert [label for label, _ in told] == ["[rank 0", "[rank 1", "[rank 2"]
    ports = set()
    for rank, (_, text) in enumerate(told):
        env, arguments = json.loads(text)
        assert arguments == ["-n", "7", "--x"]
        assert (env["RANK"], env["LOCAL_RANK"], env["ROLE_RANK"]) == (str(rank),) * 3
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (env["GROUP_RANK"], env["MASTER_ADDR"]) == ("0", "127.0.0.1")
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True", "torchrun serves the store"
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1


def test_both_streams_have_the_rank_in_front(program):
    """Also lines that are cut in pieces, bars that are written over, and a last line with no end."""
    done = run(
        "-q", "-n", "1",
        program(r"""
            sys.stdout.write("whole\nhal"); sys.stdout.flush()
            sys.stdout.write("f\n"); sys.stderr.write("10%\r100%\n"); sys.stderr.write("no end")
        """),
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["[rank 0] whole", "[rank 0] half"]
    assert done.stderr.splitlines() == ["[rank 0] 10%", "[rank 0] 100%", "[rank 0] no end"]


def test_without_prefix(program):
    assert run("--no-prefix", "-n", "1", program("print('as it is')")).stdout == "as it is\n"


def test_a_module_is_run(tmp_path, program):
    program("print(__name__, sys.argv[1:])")
    done = subprocess.run(
        [*COMMAND, "-n", "1", "-m", "program", "a"], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert done.stdout == "[rank 0] __main__ ['a']\n"


def test_torchrun_imports_nothing_from_the_current_directory(tmp_path, program):
    """And the program has its own folder on its path, as with python alone."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("torch", "msgspec", "typer", "logging", "encodings"):
        (folder / f"{name}.py").write_text("import os; os._exit(9)\n")
    command = [str(Path(sys.executable).with_name("telegrad")), "run", "-q", "-n", "1"]
    script = program("print(sys.path[0] == str(here), sys.flags.safe_path)")
    done = subprocess.run(
        [*command, script], capture_output=True, text=True, timeout=PATIENCE, cwd=folder, check=False
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("[rank 0] True False\n", "", 0)


def test_one_failure_ends_all_and_its_traceback_is_last(tmp_path, program):
    done = run(
        "-n", "3", "--grace", "600",
        program("""
            note(f"rank{rank}")
            if rank == 1:
                while not all((here / f"rank{r}").exists() for r in range(3)): time.sleep(0.01)
                raise ValueError("broken here")
            time.sleep(600)
        """),
    )  # fmt: skip
    assert done.returncode == 1
    own = done.stderr.partition("telegrad run: rank 1 failed with exit code 1; the others were ended\n")[2]
    assert own.startswith("Traceback (most recent call last):\n")
    assert own.endswith("ValueError: broken here\n")
    for rank in range(3):
        assert is_gone(pid_in(tmp_path / f"rank{rank}"))


def test_exit_codes_are_those_of_the_first_failure(program):
    text = program("""
        if rank == 0:
            sys.stderr.write("out of luck\\n")
            sys.exit(7)
        time.sleep(600)
    """)
    done = run("-q", "-n", "2", text)
    assert done.returncode == 7
    assert done.stderr.endswith("rank 0 failed with exit code 7; the others were ended\nout of luck\n")


def test_a_signal_counts_as_128_more(program):
    done = run("-q", "-n", "2", program("rank or os.kill(os.getpid(), signal.SIGKILL); time.sleep(600)"))
    assert done.returncode == 137
    assert "rank 0 failed with SIGKILL (exit code 137)" in done.stderr


def test_who_does_not_end_is_killed(tmp_path, program):
    text = program("signal.signal(signal.SIGTERM, signal.SIG_IGN); note('deaf'); time.sleep(600)")
    with started("-q", "-n", "1", "--grace", "1", text) as launcher:
        pid = pid_in(tmp_path / "deaf")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(PATIENCE) == 128 + signal.SIGTERM
    assert is_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_in_order(tmp_path, program, number):
    text = program(f"""
        def end(*_):
            note(f"ended{{rank}}")
            sys.exit(0)
        signal.signal({int(number)}, end)
        note(f"child{{rank}}", subprocess.Popen(["sleep", "600"]).pid)
        note(f"rank{{rank}}")
        time.sleep(600)
    """)
    with started("-q", "-n", "2", "--grace", "30", text) as launcher:  # however busy the machine is
        pids = [pid_in(tmp_path / f"rank{rank}") for rank in range(2)]
        launcher.send_signal(number)
        _, complaints = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + number
    assert "all processes have ended" in complaints
    assert [pid_in(tmp_path / f"ended{rank}") for rank in range(2)] == pids, "each had its moment"
    assert all(map(is_gone, pids))
    children = [pid_in(tmp_path / f"child{rank}") for rank in range(2)]
    wait_until(lambda: all(map(is_gone, children)), "the signal is for all that the processes have started")


def test_asked_twice_it_has_no_patience(tmp_path, program):
    text = program("signal.signal(signal.SIGINT, lambda *_: note('asked')); note('deaf')\nwhile True: time.sleep(1)")
    with started("-q", "-n", "1", "--grace", "600", text) as launcher:
        pid = pid_in(tmp_path / "deaf")
        launcher.send_signal(signal.SIGINT)
        pid_in(tmp_path / "asked")
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130
    assert is_gone(pid)


@pytest.mark.parametrize("grace", ["10", "0"])
def test_asked_while_it_starts_the_processes(tmp_path, program, grace):
    """The first process runs long before the last one is started, and torchrun does not know of it. A process that is
    only starting may lose a signal, in an import that ignores errors, and is killed after the grace."""
    text = program("""
        signal.signal(signal.SIGINT, lambda *_: sys.exit(note(f"asked {rank}")))
        if rank == 0:
            note("runs")
        time.sleep(600)
    """)
    with started("-q", "-n", "32", "--grace", grace, text) as launcher:
        pid = pid_in(tmp_path / "runs")
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130, said
    # A process that was only starting may have written how it was interrupted.
    assert said.endswith("telegrad run: Ctrl-C; all processes have ended\n")
    wait_until(lambda: is_gone(pid), "it is still there")
    if grace != "0":
        assert (tmp_path / "asked 0").exists()


def test_nothing_is_left_in_the_temporary_folder(tmp_path, program, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert run("-n", "1", program("sys.exit(3)")).returncode == 3
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py"], "there is no program 'nowhere.py' in "),
        (["nowhere"], "(a module is run with -m)"),
        (["-m", "nowhere.train"], "there is no module 'nowhere.train'"),
        (["-n", "0", "x.py"], "Invalid value for '-n'"),
        (["-n", "few", "x.py"], "Invalid value for '-n'"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage(arguments, complaint):
    done = run(*arguments)
    assert done.returncode == 2
    assert complaint in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said(program):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run("--port", str(port), program(""))
    assert done.returncode == 1
    assert f"cannot use port {port}: Address already in use" in done.stderr


GROUP = """
    from telegrad import rpc
    rpc.init_rpc(f"worker{rank}")
    print(rpc.rpc_sync(f"worker{1 - rank}", os.getpid) != os.getpid())
    while not (here / "seen").exists(): time.sleep(0.01)
    rpc.shutdown()
"""


def test_a_group_meets_and_can_be_looked_at(program):
    """The address that is printed is one for `telegrad top`."""
    text = program(GROUP)
    with started("-n", "2", text) as launcher:
        address = re.search(r"2 processes that meet at (\S+);", launcher.stderr.readline())[1]
        lines = {launcher.stdout.readline() for _ in range(2)}
        look = [sys.executable, "-m", "telegrad", "top", address, "--once", "-i", "0.1"]
        seen = subprocess.run(look, capture_output=True, text=True, timeout=PATIENCE, check=False)
        sockets = map(str.split, (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines())
        port = f":{int(address.partition(':')[2]):04X}"
        listening = [place.removesuffix(port) for _, place, _, state, *_ in sockets if state == "0A" and port in place]
        (Path(text).parent / "seen").touch()
        _, complaints = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, complaints
    assert lines == {"[rank 0] True\n", "[rank 1] True\n"}
    assert "2 of 2 workers answer, a group of 2" in seen.stdout, seen.stderr
    assert listening == ["0100007F"], "on the loopback, and nowhere else"
