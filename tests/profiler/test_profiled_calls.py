"""torch's own profilers: what a callee's operators cost stands in the profile of the caller."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy

import telegrad
from telegrad import autograd, compat, profiler, rpc
from telegrad.runtime import profiled_calls

CPU = [torch.profiler.ProfilerActivity.CPU]
PROFILES: dict[str, Callable[[], Any]] = {
    "torch.profiler": lambda: torch.profiler.profile(activities=CPU),
    "autograd.profiler": torch.autograd.profiler.profile,
    "profiler_legacy": profiler_legacy.profile,
}


@pytest.fixture(scope="module", autouse=True)
def torch_profiles_have_calls_in_them() -> None:
    """And torch has printed what it prints: its first profile imports much, and keeps a file open."""
    compat.follow_profiles()
    with torch.profiler.profile(activities=CPU):
        pass


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return PROFILES[request.param]


@pytest.fixture
def workers() -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["w1", "w2"], driver="w0", transport="inproc") as cluster:
        yield cluster


def events_of(profile: Any) -> list[Any]:
    return list(profile.events() if hasattr(profile, "events") else profile.function_events)


def remote_names(profile: Any) -> list[str]:
    return [event.name for event in events_of(profile) if event.is_remote]


def multiply(x: torch.Tensor) -> torch.Tensor:
    return x * 2


MAY_GO_ON = threading.Event()


def wait_for_it() -> None:
    MAY_GO_ON.wait(20)


def relay(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("w2", multiply, args=(x - 1,))


@rpc.functions.async_execution
def relay_async(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return rpc.rpc_async("w2", multiply, args=(x,))


def test_the_callees_operators_come_under_the_calls_key(
    workers: telegrad.LocalCluster, profile: Callable[[], Any]
) -> None:
    with profile() as prof:
        assert rpc.rpc_sync("w1", multiply, args=(torch.ones(3),)).tolist() == [2, 2, 2]
    key = "rpc_sync#multiply(w0 -> w1)"
    assert key + "#remote_op: aten::mul" in remote_names(prof)
    (span,) = [event for event in events_of(prof) if event.name == key]
    (remote,) = [event for event in events_of(prof) if event.name == key + "#remote_op: aten::mul"]
    assert remote.node_id == 1
    assert span.time_range.start <= remote.time_range.start
    assert remote.time_range.end <= span.time_range.end
    assert "aten::mul" not in [event.name for event in events_of(prof)]


def test_calls_of_callees_are_in_it_too(workers: telegrad.LocalCluster, profile: Callable[[], Any]) -> None:
    with profile() as prof:
        rpc.rpc_sync("w1", relay, args=(torch.ones(3),))
    outer = "rpc_sync#relay(w0 -> w1)#remote_op: "
    inner = outer + "rpc_sync#multiply(w1 -> w2)"
    assert {outer + "aten::sub", inner, inner + "#remote_op: aten::mul"} <= set(remote_names(prof))


def test_every_kind_of_call(workers: telegrad.LocalCluster, profile: Callable[[], Any]) -> None:
    with profile() as prof:
        rpc.rpc_async("w1", multiply, args=(torch.ones(3),)).wait()
        value = rpc.remote("w1", multiply, args=(torch.ones(3),))
        value.to_here()
        profiled_calls.thread.active.calls[1].is_answered.wait()  # the creation's answer comes after the value
        assert rpc.rpc_async("w1", relay_async, args=(torch.ones(3),)).wait().tolist() == [2, 2, 2]
    found = set(remote_names(prof))
    assert "rpc_async#multiply(w0 -> w1)#remote_op: aten::mul" in found
    assert "rpc_remote#multiply(w0 -> w1)#remote_op: aten::mul" in found
    nested = "rpc_async#relay_async(w0 -> w1)#remote_op: rpc_async#multiply(w1 -> w2)"
    assert {nested, nested + "#remote_op: aten::mul"} <= found


def test_a_call_lasts_until_its_answer(workers: telegrad.LocalCluster, profile: Callable[[], Any]) -> None:
    MAY_GO_ON.clear()
    with profile() as prof:
        future = rpc.rpc_async("w1", wait_for_it)
        torch.ones(300, 300) @ torch.ones(300, 300)
        MAY_GO_ON.set()
        future.wait()
    (span,) = [e for e in events_of(prof) if e.name.startswith("rpc_async#") and not e.is_remote]
    work = next(e for e in events_of(prof) if e.name == "aten::matmul")
    assert span.time_range.start <= work.time_range.start
    assert span.time_range.elapsed_us() >= work.time_range.elapsed_us()


def test_threads_do_not_see_each_others_calls(workers: telegrad.LocalCluster) -> None:
    """Each thread has a legacy profile of its own; one has none."""
    together = threading.Barrier(3)
    found: dict[str, list[str]] = {}

    def run(to: str) -> None:
        together.wait(20)
        with profiler_legacy.profile() as prof:
            for _ in range(30):
                rpc.rpc_sync(to, multiply, args=(torch.ones(3),))
        found[to] = remote_names(prof)

    def run_plain() -> None:
        together.wait(20)
        for _ in range(30):
            rpc.rpc_sync("w1", relay, args=(torch.ones(3),))

    threads = [threading.Thread(target=run, args=(to,)) for to in ("w1", "w2")]
    threads.append(threading.Thread(target=run_plain))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for to in ("w1", "w2"):
        key = f"rpc_sync#multiply(w0 -> {to})#remote_op: "
        assert all(name.startswith(key) for name in found[to])
        assert found[to].count(key + "aten::mul") == 30


def test_it_can_be_switched_off_for_a_call(workers: telegrad.LocalCluster, profile: Callable[[], Any]) -> None:
    with profile() as prof:
        with profiler.local_only():
            rpc.rpc_sync("w1", multiply, args=(torch.ones(3),))
        rpc.rpc_sync("w2", multiply, args=(torch.ones(3),))
    assert remote_names(prof)
    assert all("(w0 -> w2)" in name for name in remote_names(prof))


def test_nothing_is_left_after_a_profile(workers: telegrad.LocalCluster, profile: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="on purpose"), profile():
        rpc.rpc_sync("w1", multiply, args=(torch.ones(3),))
        raise ValueError("on purpose")
    assert profiled_calls.running == 0
    with profile() as prof, pytest.raises(TypeError):
        rpc.rpc_sync("w1", multiply, args=(1, 2))
    assert profiled_calls.running == 0
    assert [e.name for e in events_of(prof) if e.name == "rpc_sync#multiply(w0 -> w1)"]


def test_a_backward_pass_has_a_span(workers: telegrad.LocalCluster, profile: Callable[[], Any]) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", multiply, args=(torch.ones(3, requires_grad=True),)).sum()
        with profile() as prof:
            autograd.backward(context_id, [loss])
    found = [event.name for event in events_of(prof)]
    assert "torch::distributed::autograd::backward" in found
    assert any("SendRpcBackward" in name for name in found)
    assert any("RecvRpcBackward" in name for name in found)


def test_shapes_come_back(workers: telegrad.LocalCluster) -> None:
    with torch.profiler.profile(activities=CPU, record_shapes=True) as prof:
        rpc.rpc_sync("w1", multiply, args=(torch.ones(3, 5),))
    (remote,) = [event for event in prof.events() if event.name.endswith("#remote_op: aten::mul")]
    assert remote.input_shapes[0] == [3, 5]


def test_the_chrome_trace_of_torchs_profiler_has_them(workers: telegrad.LocalCluster, tmp_path: Path) -> None:
    with torch.profiler.profile(activities=CPU) as prof:
        rpc.rpc_sync("w1", multiply, args=(torch.ones(3),))
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (call,) = [e for e in events if e.get("name") == "rpc_sync#multiply(w0 -> w1)"]
    (remote,) = [e for e in events if e.get("name", "").endswith("#remote_op: aten::mul")]
    assert call["ts"] <= remote["ts"] <= remote["ts"] + remote["dur"] <= call["ts"] + call["dur"]


def test_a_call_that_a_profiled_worker_makes_by_itself(workers: telegrad.LocalCluster) -> None:
    """A worker that is called by a profiled caller, and has a profile of its own around what it serves."""

    def own_profile(x: torch.Tensor) -> list[str]:
        with profiler_legacy.profile() as prof:
            rpc.rpc_sync("w2", multiply, args=(x,))
        return remote_names(prof)

    assert "rpc_sync#multiply(w1 -> w2)#remote_op: aten::mul" in rpc.rpc_sync("w1", own_profile, args=(torch.ones(3),))


def test_the_drop_in_leaves_torchs_newer_profiler_alone(
    workers: telegrad.LocalCluster, request: pytest.FixtureRequest
) -> None:
    """PyTorch's own suite wants it so; install(torch_profiler=True) has it otherwise."""
    compat.follow_profiles(newer=False)
    request.addfinalizer(compat.follow_profiles)
    for make, is_asked in ((PROFILES["torch.profiler"], False), (profiler_legacy.profile, True)):
        with make() as prof:
            rpc.rpc_sync("w1", multiply, args=(torch.ones(3),))
        assert bool(remote_names(prof)) == is_asked
