"""`telegrad top`: its figures and columns, and the live view in a terminal of 100 and of 40 columns."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from terminals import Terminal
from typer.testing import CliRunner

import telegrad
from telegrad.cli import top as top_command
from telegrad.cli.app import app
from telegrad.cli.observer import Latency, Look, Report, Seen
from telegrad.cli.output import duration, number, show, size
from telegrad.cli.views import COLUMNS, Row, View, fitting, rows, table
from telegrad.messages import Member
from telegrad.transport.base import ConnectionStatistics
from telegrad.worker import Statistics

PATIENCE = 30.0


# -- figures ---------------------------------------------------------------------------------------------


def report(at: float, served: int, nbytes: int, *, latency: Latency | None = None) -> Report:
    connection = ConnectionStatistics("unix", 1, 1, nbytes, 2 * nbytes, 1024, 512)
    statistics = Statistics("w", 0, 1, served, 2, 0, 3, 4, 5, {"other": 7}, {"other#0": connection})
    return Report(statistics, at, 42, latency)


def look(*seen: Seen) -> Look:
    return Look(None, seen)


MEMBER = Member(0, "w", (), "host")


def test_rates_are_differences_between_two_looks():
    before = look(Seen(MEMBER, report(10.0, 100, 1000), 0.0))
    now = look(Seen(MEMBER, report(12.0, 150, 3000, latency=Latency(9, 0.1, 0.2)), 0.001))
    (row,) = rows(now, before)
    assert (row.calls_per_second, row.bytes_out_per_second, row.bytes_in_per_second) == (25.0, 1000.0, 2000.0)
    assert (row.latency_median, row.latency_p99, row.latency_calls, row.round_trip) == (0.1, 0.2, 9, 0.001)
    assert (row.calls_served, row.calls_being_served, row.calls_pending) == (150, 2, 1)
    assert (row.contexts, row.passes, row.pool_bytes, row.bytes_in_flight) == (4, 5, 1024, 7)


def test_there_are_no_rates_after_one_look_and_none_is_negative():
    (row,) = rows(look(Seen(MEMBER, report(1.0, 5, 5), 0.0)), None)
    assert (row.calls_per_second, row.bytes_in_per_second) == (None, None)
    lost_a_connection = look(Seen(MEMBER, report(2.0, 5, 0), 0.0))
    (row,) = rows(lost_a_connection, look(Seen(MEMBER, report(1.0, 5, 1000), 0.0)))
    assert row.bytes_in_per_second == 0.0


def test_a_worker_with_no_answer_has_a_row_without_figures():
    silent, gone = rows(look(Seen(MEMBER, None, 0.0, "too late"), Seen(MEMBER, None, 0.0, "ended", lost=True)), None)
    assert (silent.state, silent.problem, silent.calls_served) == ("no answer", "too late", None)
    assert gone.state == "gone"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (number(None), "-"), (number(0.0), "0"), (number(0.44), "0.4"), (number(1234.4), "1,234"),
        (size(0), "0 B"), (size(1023), "1023 B"), (size(1024), "1.0 KiB"), (size(5 << 40), "5120 GiB"),
        (size(300 << 20), "300 MiB"), (duration(12.4e-6), "12 µs"), (duration(1.24e-3), "1.2 ms"),
        (duration(0.5), "500 ms"), (duration(0.9999), "1.0 s"), (duration(None), "-"),
    ],
)  # fmt: skip
def test_figures_in_words(text, wanted):
    assert text == wanted


# -- the table -------------------------------------------------------------------------------------------

BUSY = Row(
    "worker0", 0, 0, "answers", pid=12345, calls_per_second=12345.0, bytes_in_per_second=3e8,
    bytes_out_per_second=3e8, latency_median=1e-4, latency_p99=2e-3, round_trip=5e-4, calls_being_served=3,
    calls_pending=4, contexts=1, passes=1, pool_bytes=1 << 28, threads=12,
)  # fmt: skip


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 100, 140, 200])
def test_no_line_is_wider_than_the_terminal(width):
    lost = Row("worker1", 1, 1, "gone", "worker 'worker1' cannot be reached")
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(View("127.0.0.1:29500", 2, [BUSY, lost]))
    lines = console.file.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    assert not re.search(r"\d…", "\n".join(lines)), "a figure is shown whole or not at all"
    assert any(line.startswith("worker0") for line in lines)


def test_the_least_important_columns_go_first():
    widths = {width: [column.title for column, _ in fitting([BUSY], width)] for width in (10, 40, 100, 200)}
    assert widths[10] == ["worker"]
    assert widths[40] == ["worker", "calls/s", "in/s", "out/s"]
    assert {"served in", "passes", "contexts", "pool"} < set(widths[100])
    assert widths[200] == [column.title for column in COLUMNS]


def test_a_long_name_leaves_room_for_the_rest():
    long = replace(BUSY, name="parameter-server-of-the-second-stage")
    (_, names), *rest = fitting([long], 40)
    assert names == ["parameter-se…"]
    assert [column.title for column, _ in rest] == ["calls/s", "in/s", "out/s"]


def test_a_plain_table_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=40)
    show(console, table([BUSY], 1000))
    header, row = console.file.getvalue().splitlines()
    assert header.split()[:3] == ["worker", "calls/s", "in/s"]
    assert row.split()[:2] == ["worker0", "12,345"]


def test_a_group_that_is_longer_than_the_screen():
    console = Console(file=io.StringIO(), width=100, height=12, force_terminal=True, color_system=None)
    console.print(View("here", None, [BUSY] * 30))
    assert "and 26 more that do not fit here" in console.file.getvalue()


# -- against a group -------------------------------------------------------------------------------------


@pytest.fixture
def busy(server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    """A group in which "worker0" is called a few hundred times a second."""
    end = threading.Event()
    with telegrad.LocalCluster(["worker0", "worker1"], server=server) as cluster:

        def call() -> None:
            while not end.wait(0.002):
                cluster.worker.call("worker0", torch.add, (torch.ones(1000), 1))

        caller = threading.Thread(target=call)
        caller.start()
        try:
            yield cluster
        finally:
            end.set()
            caller.join()


def test_once(busy):
    result = CliRunner().invoke(app, ["top", busy.address, "--once", "-i", "0.3"])
    assert result.exit_code == 0, result.output
    assert "3 of 3 workers answer, an open group\n" in result.stdout
    assert "\x1b" not in result.stdout
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert lines["worker"][:3] == ["worker", "calls/s", "in/s"]
    assert float(lines["worker0"][1].replace(",", "")) > 10
    assert lines["worker1"][1] == "0"


def test_json(busy):
    deadline = time.monotonic() + PATIENCE
    while True:
        result = CliRunner().invoke(app, ["top", busy.address, "--json", "-i", "0.3"])
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        if all(worker["latency_median"] for worker in told["workers"] if worker["name"] == "worker0"):
            break
        assert time.monotonic() < deadline  # on a busy machine it may not have had an answer in this time
    assert (told["address"], told["world_size"]) == (busy.address, None)
    workers = {worker["name"]: worker for worker in told["workers"]}
    assert workers["worker0"]["pid"] == busy.pids["worker0"]
    assert workers["worker0"]["calls_per_second"] > 10
    assert workers["worker0"]["bytes_in_per_second"] > 10 * 4000
    assert 0 < workers["worker0"]["latency_median"] <= workers["worker0"]["latency_p99"]


def test_a_worker_that_is_gone_is_wrong(busy):
    worker = os.pidfd_open(busy.pids["worker1"])
    signal.pidfd_send_signal(worker, signal.SIGKILL)
    assert select.select([worker], [], [], PATIENCE)[0], "it did not end"
    os.close(worker)
    result = CliRunner().invoke(app, ["top", busy.address, "--once", "-i", "0.1"])
    assert result.exit_code == 1
    assert re.search(r"^worker1 +gone$", result.stdout, re.M)
    # Ids follow the order in which the workers joined, which is not the order of their names.
    assert re.search(r"worker1: worker 'worker1' \(id [12]\) cannot be reached", result.stdout)


@contextmanager
def top(address: str, columns: int) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "telegrad", "top", address, "-i", "0.2"]
    with Terminal(command, columns=columns, env=dict(os.environ)) as terminal:
        yield terminal


def test_live_in_100_columns_until_q(busy):
    with top(busy.address, 100) as terminal:
        screen = terminal.until(r"worker0 +[1-9]\d+ ", PATIENCE)
        assert "3 of 3 workers answer" in screen
        header = next(line for line in screen.splitlines() if line.startswith("worker "))
        assert {"calls/s", "in/s", "out/s", "p99", "contexts", "passes", "pool"} < set(header.split())
        assert "…" not in screen
        terminal.press("q")
        assert terminal.end(PATIENCE) == 0
    assert terminal.raw.count("\x1b[?1049h") == terminal.raw.count("\x1b[?1049l") == 1, "the screen is given back"
    assert terminal.raw.endswith("\x1b[?1049l")


def test_live_in_40_columns_until_ctrl_c(busy):
    with top(busy.address, 40) as terminal:
        screen = terminal.until(r"worker0 +[1-9]\d+ ", PATIENCE)
        lines = [line.rstrip() for line in screen.splitlines()]
        assert max(map(len, lines)) <= 40
        assert lines[4].split() == ["worker", "calls/s", "in/s", "out/s"]
        terminal.press("\x03")
        assert terminal.end(PATIENCE) == 130
    assert "Traceback" not in terminal.text()


def test_a_group_that_ends_ends_it(server, monkeypatch):
    """In this process, with a console that takes itself for a terminal's."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(top_command, "console", lambda: console)
    with telegrad.LocalCluster(["worker0"], server=server) as cluster:
        address = cluster.address

        def end_when_seen() -> None:
            while "q: quit · every" not in console.file.getvalue():
                time.sleep(0.01)
            os.kill(cluster.pids["worker0"], 9)
            cluster.worker.close(graceful=False)

        ending = threading.Thread(target=end_when_seen)
        ending.start()
        assert top_command.watch(address, interval=0.1, once=False, as_json=False, timeout=1.0) == 0
        ending.join()
    last = console.file.getvalue().rpartition("the group at ")[2]
    assert last.startswith(f"{address} has ended (")
    assert re.search(r"^worker0 ", last, re.M)


# -- where no group is ------------------------------------------------------------------------------------


def invoke(*arguments: str):
    began = time.monotonic()
    result = CliRunner().invoke(app, ["top", *arguments])
    assert time.monotonic() - began < 5.0
    return result


def test_no_group_answers():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = invoke(address, "--timeout", "0.3")
    assert result.exit_code == 3
    assert f"telegrad top: no group answers at {address}: no store is served" in result.stderr


def test_another_server_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = invoke(f"127.0.0.1:{server.getsockname()[1]}", "--timeout", "0.5")
    assert result.exit_code == 3
    assert "no group answers" in result.stderr


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:x", "udp://127.0.0.1:5"])
def test_an_address_that_makes_no_sense(address):
    result = invoke(address)
    assert result.exit_code == 2
    assert "is not an address" in result.stderr
