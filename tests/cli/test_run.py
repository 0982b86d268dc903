"""`telegrad run`: programs that succeed, fail, hang and are interrupted, and that nothing is left of any of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminals import Terminal

from telegrad.cli.ranks import how_it_ended

COMMAND = [sys.executable, "-m", "telegrad", "run"]
PATIENCE = 30.0
SOON = 10.0  # seconds in which what was killed must be gone


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
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1


def test_output_is_taken_line_by_line(program):
    """Both streams, lines that are cut in pieces, bars that are written over, a last line with no end, bad bytes."""
    done = run(
        "-q", "-n", "1",
        program(r"""
            sys.stdout.buffer.write(b"whole\nhal"); sys.stdout.flush(); time.sleep(0.05)
            sys.stdout.buffer.write(b"f\n\xff\n"); sys.stdout.flush()
            sys.stderr.write("\r10%\r50%\r100%\n"); sys.stderr.write("no end")
        """),
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["[rank 0] whole", "[rank 0] half", "[rank 0] \ufffd"]
    assert done.stderr.splitlines() == ["[rank 0] 100%", "[rank 0] no end"]


def test_without_prefix(program):
    assert run("--no-prefix", "-n", "1", program("print('as it is')")).stdout == "as it is\n"


def test_a_module_is_run(tmp_path, program):
    program("print(__name__, sys.argv[1:])")
    done = subprocess.run(
        [*COMMAND, "-n", "1", "-m", "program", "a"], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert done.stdout == "[rank 0] __main__ ['a']\n"


def test_one_failure_ends_all_and_its_traceback_is_last(tmp_path, program):
    began = time.monotonic()
    done = run(
        "-n", "3",
        program("""
            note(f"rank{rank}")
            if rank == 1:
                while not all((here / f"rank{r}").exists() for r in range(3)): time.sleep(0.01)
                try:
                    {}["cause"]
                except KeyError as error:
                    raise ValueError("broken here") from error
            time.sleep(600)
        """),
    )  # fmt: skip
    assert done.returncode == 1
    assert time.monotonic() - began < 5.0, "SIGTERM is enough for who does not hold it up"
    own = done.stderr.partition("telegrad run: rank 1 failed with exit code 1; the others were ended\n")[2]
    assert own.startswith("Traceback (most recent call last):\n")
    assert "KeyError: 'cause'\n\nThe above exception was the direct cause" in own
    assert own.endswith("ValueError: broken here\n")
    for rank in range(3):
        assert is_gone(pid_in(tmp_path / f"rank{rank}"))


def test_only_the_last_traceback_is_shown_again(program):
    done = run(
        "-q", "-n", "1",
        program("""
            import traceback
            try:
                1 / 0
            except ZeroDivisionError:
                traceback.print_exc()
            sys.stderr.write("that was caught\\n")
            raise ValueError("this was not")
        """),
    )  # fmt: skip
    again = done.stderr.partition("telegrad run: rank 0 failed with exit code 1\n")[2]
    assert again.count("Traceback") == 1
    assert again.endswith("ValueError: this was not\n")


def test_exit_codes_are_those_of_the_first_failure(program):
    text = program("""
        if rank == 0:
            sys.stderr.write("out of luck\\n")
            sys.exit(7)
        time.sleep(600)
    """)
    done = run("-q", "-n", "2", text)
    assert done.returncode == 7
    assert done.stderr.endswith("failed with exit code 7; the others were ended\nout of luck\n")


def test_a_signal_counts_as_128_more(program):
    done = run("-q", "-n", "2", program("rank or os.kill(os.getpid(), signal.SIGKILL); time.sleep(600)"))
    assert done.returncode == 137
    assert "rank 0 failed with SIGKILL (exit code 137)" in done.stderr
    assert "It wrote nothing to stderr." in done.stderr


def test_who_does_not_end_is_killed(tmp_path, program):
    text = program("""
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("deaf")
            time.sleep(600)
        while not (here / "deaf").exists(): time.sleep(0.01)
        sys.exit(3)
    """)
    done = run("-q", "-n", "2", "--grace", "0.3", text)
    assert done.returncode == 3
    assert is_gone(pid_in(tmp_path / "deaf"))


# What is left behind by a rank: a child of its own, and one that has left its process group.
WITH_CHILDREN = """
    sleeper = "import time; time.sleep(600)"
    note(f"child{rank}", subprocess.Popen([sys.executable, "-c", sleeper]).pid)
    note(f"escaped{rank}", subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True).pid)
"""


def test_nothing_is_left_of_a_run_that_succeeds(tmp_path, program):
    done = run("-q", "-n", "2", program(WITH_CHILDREN))
    assert done.returncode == 0
    for name in ("child0", "child1", "escaped0", "escaped1"):
        assert is_gone(pid_in(tmp_path / name)), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_in_order(tmp_path, program, number):
    text = program(f"""
        def end(*_):
            note(f"ended{{rank}}")
            sys.exit(0)
        signal.signal({int(number)}, end)
        note(f"rank{{rank}}")
        time.sleep(600)
    """)
    with started("-q", "-n", "2", text) as launcher:
        pids = [pid_in(tmp_path / f"rank{rank}") for rank in range(2)]
        launcher.send_signal(number)
        _, complaints = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + number
    assert "all processes have ended" in complaints
    assert [pid_in(tmp_path / f"ended{rank}") for rank in range(2)] == pids, "each had its moment"
    assert all(map(is_gone, pids))


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


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, program):
    text = program(WITH_CHILDREN + "    note(f'rank{rank}')\n    time.sleep(600)")
    with started("-q", "-n", "2", text) as launcher:
        pids = [pid_in(tmp_path / f"{name}{rank}") for rank in range(2) for name in ("child", "rank")]
        escaped = [pid_in(tmp_path / f"escaped{rank}") for rank in range(2)]
        launcher.kill()
        launcher.wait()
        wait_until(lambda: all(map(is_gone, pids)), "processes outlive the launcher")
    for pid in escaped:  # what has left its group on purpose is beyond the reach of a launcher that is dead
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_colours_at_a_terminal(program):
    command = [*COMMAND, "-n", "2", program("print('hello', sys.stdout.isatty())")]
    with Terminal(command, columns=80, env=dict(os.environ)) as terminal:
        assert terminal.end(PATIENCE) == 0
    assert "\x1b[36m[rank 0]\x1b[0m hello False" in terminal.raw
    assert "\x1b[33m[rank 1]\x1b[0m hello False" in terminal.raw
    assert "2 processes that meet at 127.0.0.1:" in terminal.text()


def test_a_reader_that_leaves_ends_it(tmp_path, program):
    text = program("note('rank')\nwhile True: print('again', flush=True)")
    with started("-q", "-n", "1", text) as launcher:
        pid = pid_in(tmp_path / "rank")
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(PATIENCE) == 128 + signal.SIGPIPE
        assert launcher.stderr.read() == ""
    assert is_gone(pid)


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


def test_how_it_ended():
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(143) == "SIGTERM (exit code 143)"
    assert how_it_ended(255) == "exit code 255"


GROUP = """
    from telegrad import rpc
    rpc.init_rpc(f"worker{rank}")
    print(rpc.rpc_sync(f"worker{1 - rank}", os.getpid) != os.getpid())
    rpc.shutdown()
"""


def test_a_group_meets_at_the_port_that_is_held_for_it(program):
    done = run("-q", "-n", "2", program(GROUP))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] True", "[rank 1] True"]
