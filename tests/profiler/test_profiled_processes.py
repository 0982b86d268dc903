"""telegrad.profiler.profile over real processes: one step of a small training program, and a worker that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_checks import arrows, check_trace, names

import telegrad
from telegrad import autograd, profiler, rpc
from telegrad.errors import PeerLostError

MODULES: dict[str, torch.nn.Module] = {}


@pytest.fixture
def processes(server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["stage1", "stage2", "ps"], server=server) as cluster:
        yield cluster


def forward(x: torch.Tensor) -> torch.Tensor:
    if "linear" not in MODULES:
        MODULES["linear"] = torch.nn.Linear(16, 16)
    return torch.relu(MODULES["linear"](x))


def lookup(ids: torch.Tensor) -> torch.Tensor:
    if "table" not in MODULES:
        MODULES["table"] = torch.nn.Embedding(100, 16)
    return MODULES["table"](ids)


def step() -> None:
    with autograd.context() as context_id:
        x = rpc.rpc_sync("ps", lookup, args=(torch.arange(8),))
        for stage in ("stage1", "stage2"):
            x = rpc.rpc_sync(stage, forward, args=(x,))
        autograd.backward(context_id, [x.square().sum()])


def test_a_step_over_processes(processes: telegrad.LocalCluster, fonts_are_open: None, tmp_path: Path) -> None:
    schedule = profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    with profiler.profile(schedule=schedule) as prof:
        for _ in range(3):
            step()
            prof.step()
    prof.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    trace = profiler.load(tmp_path / "trace.json.gz")
    assert set(trace.workers) == {"driver", "stage1", "stage2", "ps"}
    assert trace.workers[0] == "driver"
    check_trace(trace)
    for worker, function in (("ps", "lookup"), ("stage1", "forward"), ("stage2", "forward")):
        assert names(trace, worker, "run") == [function, "backward"] * 2
    assert "aten::embedding" in names(trace, "ps", "cpu_op")
    assert "aten::addmm" in names(trace, "stage1", "cpu_op")
    assert "aten::addmm" not in names(trace, "driver", "cpu_op")
    assert len({said["process"] for said in trace.about["workers"].values()}) == 4
    # One machine has one such clock: what the exchanges say of it is known to be 0.
    for said in trace.about["workers"].values():
        assert abs(said["clock_moved"]) <= said["clock_uncertainty"] + 1
    gradients = [e for e in arrows(trace)[0].values() if e["name"].startswith("gradients")]
    assert len(gradients) == 2 * 5  # to each of the three, and back from the two that have got something
    summary = trace.summary()
    assert summary.steps == 2
    assert {w.name for w in summary.workers} == set(trace.workers)
    profiler.draw(trace, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_a_worker_that_is_killed_while_profiled(server: telegrad.ForkServer, tmp_path: Path) -> None:
    with telegrad.LocalCluster(["a", "b"], server=server) as cluster:
        with profiler.profile() as prof:
            for name in ("a", "b"):
                rpc.rpc_sync(name, forward, args=(torch.ones(2, 16),))
            os.kill(cluster.pids["b"], signal.SIGKILL)
            with pytest.raises(PeerLostError):
                for _ in range(1000):
                    rpc.rpc_sync("b", forward, args=(torch.ones(2, 16),))
            rpc.rpc_sync("a", forward, args=(torch.ones(2, 16),))
        prof.export_chrome_trace(str(tmp_path / "trace.json"))
        trace = profiler.load(tmp_path / "trace.json")
        assert trace.workers == ("driver", "a")
        assert list(trace.missing) == ["b"]
        check_trace(trace)
        assert names(trace, "a", "run") == ["forward", "forward"]
        assert "worker 'b' is missing" in str(prof.summary())
        shown = [e["args"]["name"] for e in trace.events if e["name"] == "process_name"]
        assert "b (missing)" in shown


def hold_on(session: Any) -> bool:
    from telegrad.primitives.current import current_worker

    return current_worker().recorder.session is not None


def test_a_root_that_is_gone_leaves_nobody_recording(server: telegrad.ForkServer) -> None:
    """The root is a worker of the cluster: it begins a profile, calls another, and dies."""

    def begin() -> bool:
        profiler.profile().__enter__()
        return rpc.rpc_sync("b", hold_on, args=(None,))

    with telegrad.LocalCluster(["a", "b"], server=server) as cluster:
        assert cluster.call("a", begin)
        assert cluster.call("b", hold_on, None)
        os.kill(cluster.pids["a"], signal.SIGKILL)
        assert telegrad.rendezvous.group.poll_until(lambda: not cluster.call("b", hold_on, None), 20)
