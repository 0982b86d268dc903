"""Trace files: what they say, what is merged, and what is no trace."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_checks import check_trace

import telegrad
from telegrad import profiler, rpc
from telegrad.errors import TelegradError, TraceError


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def profiled(calls: int) -> profiler.Trace:
    with profiler.profile() as prof:
        for _ in range(calls):
            rpc.rpc_sync("a", double, args=(torch.ones(4),))
    assert prof.trace is not None
    return prof.trace


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.json", tmp_path / "two.json.gz"]
    with telegrad.LocalCluster(["a"], transport="inproc"):
        for path in paths:
            profiled(3).save(path)
    return paths


def test_a_trace_is_the_same_after_a_file(two: list[Path], tmp_path: Path) -> None:
    trace = profiler.load(two[0])
    trace.save(tmp_path / "again.json.gz")
    again = profiler.load(tmp_path / "again.json.gz")
    assert (again.events, again.about, again.base_ns) == (trace.events, trace.about, trace.base_ns)
    assert str(again.summary()) == str(trace.summary())
    assert "3 messages" not in repr(trace)
    assert "workers=['driver', 'a']" in repr(trace)


def test_merged_traces_follow_each_other(two: list[Path]) -> None:
    first, second = map(profiler.load, two)
    merged = profiler.merge(two)
    check_trace(merged)
    assert merged.workers == ("driver", "a")
    assert merged.about["messages"] == first.about["messages"] + second.about["messages"]
    summary = merged.summary()
    lengths = [trace.summary().length for trace in (first, second)]
    assert summary.length == pytest.approx(sum(lengths), rel=1e-6)  # and not the time between them
    programs = sorted(e["ts"] for e in merged.events if e.get("cat") == "program")
    assert programs[1] >= programs[0] + lengths[0]


def test_a_trace_of_torchs_profiler(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mul",
            "pid": 7,
            "tid": 7,
            "ts": 10.0,
            "dur": 30.0,
            "args": {},
        },
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::add",
            "pid": 7,
            "tid": 7,
            "ts": 80.0,
            "dur": 20.0,
            "args": {},
        },
    ]
    path = tmp_path / "torch.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = profiler.load(path)
    assert trace.workers == ("python 7",)
    (worker,) = trace.summary().workers
    assert worker.time["compute"] == pytest.approx(50)
    assert worker.time["idle"] == pytest.approx(40)
    merged = profiler.merge([path, path])
    assert len(merged.workers) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"   \n", "is empty"),
        (b'{"traceEvents": [{"ph": "X", "name": "a', "is cut short"),
        (b"\x89PNG\r\n", "is not a trace"),
        (b"hello", "is not a trace"),
        (b'{"a": 1}', "not a trace: it has no list of events"),
        (b"[1, 2]", "not a trace: it has no list of events"),
        (b"17", "not a trace: it has no list of events"),
        (b'{"traceEvents": [], "telegrad": {"format": 99}}', "has format 99"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "is cut short or damaged"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    for read in (profiler.load, lambda p: profiler.merge([p])):
        with pytest.raises(TraceError, match=said) as raised:
            read(path)
        assert str(path) in str(raised.value)
    assert issubclass(TraceError, TelegradError)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        profiler.load(tmp_path / "nothing.json")
    with pytest.raises(TraceError, match="nothing to merge"):
        profiler.merge([])


def test_a_picture(two: list[Path], fonts_are_open: None, tmp_path: Path) -> None:
    trace = profiler.load(two[0])
    profiler.draw(trace, tmp_path / "trace.svg")
    assert b"<svg" in (tmp_path / "trace.svg").read_bytes()
    file = io.BytesIO()
    profiler.draw(trace, file, first=0, last=trace.about["window"][1] / 2)
    assert file.getvalue().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="before the last"):
        profiler.draw(trace, file, first=5, last=5)
    with pytest.raises(TraceError, match="nothing to draw"):
        profiler.draw(profiler.Trace([]), file)


def test_a_summary_as_a_table_and_as_data(two: list[Path]) -> None:
    from rich.console import Console

    summary = profiler.load(two[0]).summary()
    console = Console(width=160, file=io.StringIO())
    console.print(summary)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(text in printed for text in ("driver", "on the wire", "critical path"))
    data = json.loads(json.dumps(summary.to_dict()))
    assert data["workers"]["a"]["messages_out"] == 3
    assert sum(share["time"] for share in data["critical_path"]) == pytest.approx(data["length"], abs=1)
