"""A timeline of work on a CUDA device: kernels and copies stand under the worker that has started them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

import telegrad
from telegrad import autograd, compat, profiler, rpc


def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()


def step() -> None:
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", product, args=(rpc.rpc_sync("a", product, args=(x,)),)).sum()
        autograd.backward(context_id, [loss])


def test_kernels_are_in_the_timeline(server: telegrad.ForkServer, tmp_path: Path) -> None:
    with telegrad.LocalCluster(["a", "b"], server=server):
        step()
        with profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
            step()
        profile.export_chrome_trace(tmp_path / "step.json")
        trace = profiler.load(tmp_path / "step.json")
        assert sorted(trace.workers) == ["a", "b", "driver"]
        assert not trace.missing
        found = Counter((trace.processes[e["pid"]], e["cat"]) for e in trace.events if e["ph"] == "X")
        for worker in trace.workers:
            assert found[worker, "kernel"], worker
            assert found[worker, "gpu_memcpy"], worker
        table = profile.key_averages().table(sort_by="self_cpu_time_total")
        assert "aten::mm" in table
        assert "CUDA total" in table
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        compat.follow_profiles()
        with torch.profiler.profile(activities=activities, acc_events=True) as theirs:  # else torch warns
            step()
        key = "rpc_sync#product(driver -> a)#remote_op: aten::mm"
        assert key in [average.key for average in theirs.key_averages()]
