"""`telegrad trace`: a profile that telegrad.profiler has written, summed up and merged, and files that are none."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import telegrad
from telegrad import profiler, rpc
from telegrad.cli import trace
from telegrad.cli.app import app


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two profiles of the same group, one after the other."""
    paths = []
    with telegrad.LocalCluster(["helper"], transport="inproc"):
        for number in range(2):
            with profiler.profile() as profile:
                rpc.rpc_sync("helper", torch.mul, (torch.ones(50, 50), 2))
            paths.append(tmp_path_factory.mktemp("traces") / f"step{number}.json")
            profile.export_chrome_trace(str(paths[-1]))
    return paths


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_a_summary(traces):
    result = invoke(traces[0])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert result.stdout == str(profiler.load(traces[0]).summary()).rstrip("\n") + "\n"
    assert "driver" in result.stdout
    assert "helper" in result.stdout


def test_a_summary_in_40_columns(traces, monkeypatch):
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(trace, "console", lambda: console)
    assert trace.run_trace([traces[0]], None, as_json=False) == 0
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert {"driver", "helper"} <= {line.partition(",")[0] for line in lines}
    assert sum(line.endswith("%  compute") for line in lines) == 2


def test_a_summary_as_json(traces):
    result = invoke(traces[0], "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(json.dumps(profiler.load(traces[0]).summary().to_dict()))


def test_several_become_one(traces, tmp_path):
    merged = tmp_path / "merged.json"
    result = invoke(*traces, "-o", merged)
    assert result.exit_code == 0, result.output
    assert f"written: {merged}" in result.stdout
    assert len(profiler.load(merged).events) == len(profiler.merge(traces).events)
    assert len(profiler.load(merged).events) > len(profiler.load(traces[0]).events)


@pytest.fixture
def bad(traces, tmp_path) -> Path:
    path = tmp_path / "cut.json"
    path.write_bytes(traces[0].read_bytes()[:500])
    return path


def test_a_trace_that_is_cut_short(bad):
    result = invoke(bad)
    assert result.exit_code == 1
    assert str(bad) in result.stderr
    assert "Traceback" not in result.output


def test_what_is_good_is_still_written(traces, bad, tmp_path):
    merged = tmp_path / "merged.json"
    result = invoke(traces[0], bad, traces[1], "-o", merged)
    assert result.exit_code == 1
    assert str(bad) in result.stderr
    assert len(profiler.load(merged).events) == len(profiler.merge(traces).events)


def test_what_is_no_trace(tmp_path):
    for text in ("", "no json", '{"name": "other"}'):
        path = tmp_path / "other.json"
        path.write_text(text)
        result = invoke(path)
        assert result.exit_code == 1, text
        assert str(path) in result.stderr


def test_wrong_usage(traces, tmp_path):
    assert invoke(tmp_path / "nothing.json").exit_code == 2
    assert invoke(traces[0], "-o", traces[0]).exit_code == 2
    assert invoke().exit_code == 2
    result = invoke(traces[0], "-o", tmp_path / "no" / "folder" / "merged.json")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr
