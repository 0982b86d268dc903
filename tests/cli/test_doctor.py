"""`telegrad doctor`: what it finds here, what it would find elsewhere, and what it tells scripts."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import tempfile
from collections import namedtuple

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from telegrad.cli import checks, doctor, selftest
from telegrad.cli.app import app
from telegrad.cli.checks import OK, SLOW, WRONG, Finding
from telegrad.errors import ClusterError


def test_telegrad_works_here():
    """The whole examination, with two workers and a pass."""
    result = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(result.stdout)
    assert result.exit_code == 0, told
    assert told["wrong"] == 0
    texts = {finding["topic"]: finding["text"] for finding in told["findings"]}
    assert {"system", "packages", "torch", "memfd", "descriptors", "unix sockets", "loopback", "clock"} < set(texts)
    assert torch.__version__ in texts["torch"]
    tests = [finding["text"] for finding in told["findings"] if finding["topic"] == "self-test"]
    assert "over unix and shared memory" in tests[1]
    assert tests[2] == "gradients through both differ from local autograd's by 0 at most"


def test_plain_lines_where_there_is_no_terminal():
    result = CliRunner().invoke(app, ["doctor", "--no-test"])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok system        CPython 3.")
    assert lines[-1].startswith("nothing is wrong (no workers were started to try it)")


def found(check, topic: str) -> Finding:
    """Returns the finding of a check about a topic; the worst, if there are several."""
    return max((f for f in check() if f.topic == topic), key=lambda f: [OK, SLOW, WRONG].index(f.status))


@pytest.mark.parametrize(("allowed", "status"), [(100, WRONG), (512, SLOW), (4096, OK)])
def test_few_descriptors(monkeypatch, allowed, status):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (allowed, 65536))
    finding = found(checks.limits, "descriptors")
    assert finding.status == status
    assert (finding.remedy == "ulimit -n 65536") == (status != OK)


def test_no_memfd(monkeypatch):
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = found(checks.shared_memory, "memfd")
    assert finding.status == SLOW
    assert "seccomp" in finding.remedy


def test_a_small_dev_shm(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 26, 1 << 25, 1 << 25))
    finding = found(checks.shared_memory, "/dev/shm")
    assert finding.status == SLOW
    assert "--shm-size" in finding.remedy


def test_a_temporary_directory_that_cannot_be_written_to(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = found(checks.unix_sockets, "unix sockets")
    assert finding.status == WRONG
    assert finding.remedy == "set TMPDIR to one that can"


def test_no_loopback(monkeypatch):
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    finding = found(checks.loopback, "loopback")
    assert finding.status == WRONG
    assert "ip link set lo up" in finding.remedy


def test_a_clock_that_goes_back(monkeypatch):
    reads = iter([*map(float, range(100)), 50.0, *map(float, range(100, 60_000))])
    monkeypatch.setattr(checks.time, "perf_counter", lambda: next(reads))
    finding = found(checks.clock, "clock")
    assert finding.status == WRONG
    assert "went back by 49.0 s" in finding.text


def test_one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert found(checks.cores, "cores").status == SLOW


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MASTER_ADDR", "host", "only one of MASTER_ADDR and MASTER_PORT"),
        ("RANK", "0", "waits for the other ranks"),
        ("PYTHONDEVMODE", "1", "calls are slower"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "slows torch down"),
    ],
)
def test_settings_that_slow_or_stop_it(monkeypatch, name, value, words):
    for other in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(other, raising=False)
    assert not [finding for finding in checks.settings() if words in finding.text]
    monkeypatch.setenv(name, value)
    (finding,) = (finding for finding in checks.settings() if words in finding.text)
    assert finding.status == SLOW
    assert "unset" in finding.remedy or "set both" in finding.remedy


def test_a_package_that_is_missing_or_old(monkeypatch):
    monkeypatch.setattr(checks, "requires", lambda name: ["absent>=1", "msgspec>=99", "pytest; extra == 'dev'"])
    texts = [finding.text for finding in checks.versions() if finding.status == WRONG]
    assert texts[0] == "absent is not installed"
    assert texts[1].endswith(" is older than 99")
    assert len(texts) == 2


def test_a_check_that_cannot_look_does_not_end_it(monkeypatch):
    def broken():
        raise FileNotFoundError(2, "No such file", "/proc/meminfo")
        yield

    monkeypatch.setattr(checks, "CHECKS", (broken, checks.settings))
    first, *_ = checks.findings()
    assert (first.status, first.topic) == (SLOW, "broken")
    assert "could not be checked: FileNotFoundError" in first.text


def test_what_is_wrong_is_told_with_its_remedy(monkeypatch):
    trouble = [Finding("clock", WRONG, "went back", "mend it"), Finding("load", SLOW, "high", "wait")]
    monkeypatch.setattr(doctor, "findings", lambda: iter(trouble))
    result = CliRunner().invoke(app, ["doctor", "--no-test"])
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "X  clock         went back",
        "                 -> mend it",
        "!  load          high",
        "                 -> wait",
        "1 wrong: telegrad will fail here until this is mended",
    ]


def test_workers_that_do_not_start_are_a_finding(monkeypatch):
    def refuse(*_: object, **__: object) -> object:
        raise ClusterError("workers ['first'] did not join within 60 s")

    monkeypatch.setattr(selftest, "LocalCluster", refuse)
    (finding,) = selftest.self_test()
    assert finding.status == WRONG
    assert finding.text == "ClusterError: workers ['first'] did not join within 60 s"


def test_gradients_that_differ_are_wrong(monkeypatch):
    """If a pass gave other gradients than autograd does, the test would see it."""
    calls = iter([selftest.layer, lambda x, weight: (x @ weight).sin()])
    monkeypatch.setattr(selftest.rpc, "rpc_sync", lambda to, function, args: next(calls)(*args))
    monkeypatch.setattr(
        selftest.autograd,
        "backward",
        lambda context_id, roots: torch.autograd.backward(roots, retain_graph=True),
    )

    class Context:
        def __enter__(self) -> int:
            return 0

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(selftest.autograd, "context", Context)
    leaves: list[torch.Tensor] = []
    original = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: leaves.append(original(*a, **k)) or leaves[-1])
    monkeypatch.setattr(
        selftest.autograd,
        "get_gradients",
        lambda context_id: {t: t.grad for t in leaves if t.grad is not None},
    )
    finding = selftest._gradients()
    assert finding.status == WRONG


def test_long_lines_hang_under_their_first(capsys):
    console = Console(width=40, force_terminal=True, color_system=None, highlight=False)
    doctor._tell(console, Finding("clock", SLOW, "word " * 12, "do this"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("!  clock: word")
    assert all(len(line.rstrip()) <= 40 for line in lines)
    assert all(line.startswith("   ") for line in lines[1:])
