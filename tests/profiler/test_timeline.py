"""telegrad.profiler.profile on workers of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_checks import arrows, check_trace, names

import telegrad
from telegrad import autograd, profiler, rpc
from telegrad.errors import NotStartedError

WEIGHT = torch.randn(8, 8, requires_grad=True)


@pytest.fixture
def workers() -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a", "b"], transport="inproc") as cluster:
        yield cluster


def multiply(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT


def relay(x: torch.Tensor, to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, multiply, args=(torch.tanh(x),))


def step() -> None:
    with autograd.context() as context_id:
        x = torch.randn(4, 8, requires_grad=True)
        y = rpc.rpc_sync("a", relay, args=(x, "b"))
        autograd.backward(context_id, [torch.sigmoid(y).sum()])


def test_nested_calls_and_a_backward_pass(workers: telegrad.LocalCluster, tmp_path: Path) -> None:
    """driver ── relay ──> a ── multiply ──> b, and the gradients back."""
    with profiler.profile() as prof:
        step()
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    trace = profiler.load(path)
    assert trace.workers == ("driver", "a", "b")
    check_trace(trace)
    assert names(trace, "a", "run") == ["relay", "backward"]
    assert names(trace, "b", "run") == ["multiply", "backward"]
    assert names(trace, "driver", "run") == ["backward"]
    # Each operator stands under the worker that ran it.
    for worker, operator in (("driver", "aten::sigmoid"), ("a", "aten::tanh"), ("b", "aten::mm")):
        for other in trace.workers:
            found = names(trace, other, "cpu_op")
            assert (operator in found) == (other == worker), f"{operator} on {other}"
    sent = {(e["args"]["from"], e["args"]["to"], e["name"].split()[0]) for e in arrows(trace)[0].values()}
    assert {
        ("driver", "a", "call"),
        ("a", "b", "call"),
        ("b", "a", "reply"),
        ("a", "driver", "reply"),
    } <= sent
    assert {("driver", "a", "gradients"), ("a", "b", "gradients"), ("b", "a", "gradients")} <= sent
    assert all(e["args"]["bytes"] > 0 for e in arrows(trace)[0].values())
    assert {"encode call", "encode gradients"} <= set(names(trace, "driver", "serialise"))
    assert {"decode call", "decode gradients"} <= set(names(trace, "b", "serialise"))
    assert {"wait for relay", "wait for gradients"} <= set(names(trace, "driver", "wait"))


def test_sums_agree_with_the_statistics(workers: telegrad.LocalCluster) -> None:
    def count() -> dict[str, tuple[int, int]]:
        found = {}
        for worker in workers._in_process:
            connections = worker.statistics().connections.values()
            found[worker.name] = (
                sum(c.messages_out for c in connections),
                sum(c.bytes_out for c in connections),
            )
        return found

    before: dict[str, tuple[int, int]] = {}
    after: dict[str, tuple[int, int]] = {}
    schedule = profiler.schedule(wait=0, warmup=1, active=1, repeat=2)
    with profiler.profile(schedule=schedule) as prof:
        for number in range(4):
            # From the second cycle on everybody takes part from the beginning.
            before = count() if number == 3 else before
            for size in (1, 100, 100_000):
                with torch.no_grad():  # else messages tell of results that have died, 20 ms later
                    rpc.rpc_sync("a", relay, args=(torch.ones(size, 8), "b"))
                    rpc.rpc_async("b", multiply, args=(torch.ones(size, 8),)).wait()
            after = count() if number == 3 else after
            prof.step()
    trace = prof.trace
    assert trace is not None
    check_trace(trace)
    found: dict[str, tuple[int, int]] = {}
    for start in arrows(trace)[0].values():
        messages, size = found.get(start["args"]["from"], (0, 0))
        found[start["args"]["from"]] = messages + 1, size + start["args"]["bytes"]
    assert trace.about["one_ended"] == 0
    assert found == {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}
    told = prof.summary().to_dict()["workers"]
    assert {name: (t["messages_out"], t["bytes_out"]) for name, t in told.items()} == found


def test_a_schedule_with_several_cycles(workers: telegrad.LocalCluster) -> None:
    traces = []

    def on_ready(prof: profiler.profile) -> None:
        assert prof.trace is not None
        traces.append((prof.step_num, prof.trace, prof.summary()))

    schedule = profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with profiler.profile(schedule=schedule, on_trace_ready=on_ready) as prof:
        for _ in range(9):
            step()
            prof.step()
    assert [number for number, _, _ in traces] == [4, 8]
    for _, trace, summary in traces:
        check_trace(trace)
        assert names(trace, "a", "run").count("relay") == 2
        assert summary.steps == 2
        assert not names(trace, "a", "profiler"), "workers join in the warm-up"


def test_a_worker_takes_part_only_if_it_is_reached(workers: telegrad.LocalCluster) -> None:
    with profiler.profile() as prof:
        rpc.rpc_sync("a", multiply, args=(torch.ones(2, 8),))
        with profiler.local_only():
            rpc.rpc_sync("b", multiply, args=(torch.ones(2, 8),))
    assert prof.trace is not None
    assert prof.trace.workers == ("driver", "a")
    assert all(worker.recorder.session is None for worker in workers._in_process)
    assert not any(worker.events.subscribers for worker in workers._in_process)


def test_averages_over_all_workers(workers: telegrad.LocalCluster) -> None:
    with profiler.profile(record_shapes=True) as prof:
        torch.mm(torch.ones(2, 8), WEIGHT)
        for to in ("a", "b", "b"):
            rpc.rpc_sync(to, multiply, args=(torch.ones(2, 8),))
    counts = {average.key: average.count for average in prof.key_averages()}
    assert counts["aten::mm"] == 4
    by_worker = {
        average.node_id: average.count
        for average in prof.key_averages(group_by_worker=True)
        if average.key == "aten::mm"
    }
    assert by_worker == {0: 1, 1: 1, 2: 2}
    shapes = prof.key_averages(group_by_input_shape=True)
    assert [[2, 8], [8, 8]] in [a.input_shapes for a in shapes if a.key == "aten::mm"]
    assert "aten::mm" in prof.key_averages().table(row_limit=50)


def test_where_the_time_went(workers: telegrad.LocalCluster) -> None:
    with profiler.profile() as prof:
        step()
    summary = prof.summary()
    for worker in summary.workers:
        assert sum(worker.time.values()) == pytest.approx(summary.length)
        assert all(time >= 0 for time in worker.time.values())
    by_name = {worker.name: worker.time for worker in summary.workers}
    assert by_name["driver"]["idle"] == pytest.approx(0, abs=1)  # it is the program's own
    assert by_name["driver"]["wait"] > 0
    assert by_name["b"]["compute"] > 0
    # The links follow each other without a gap, from the end back to the beginning.
    assert sum(link.duration for link in summary.path) == pytest.approx(summary.length, abs=1)
    for one, next_ in zip(summary.path, summary.path[1:], strict=False):
        assert one.end == pytest.approx(next_.start, abs=0.01)
    assert {link.worker for link in summary.path} == {"driver", "a", "b"}
    text = str(summary)
    assert "critical path" in text
    assert all(name in text for name in ("driver", "on the wire", "serialising"))


def test_a_profile_of_the_user_is_not_broken(workers: telegrad.LocalCluster) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        torch.ones(2) * 2
        with profiler.profile() as prof:
            rpc.rpc_sync("a", multiply, args=(torch.ones(2, 8),))
        torch.ones(2) - 2
    assert {"aten::mul", "aten::sub"} <= {event.name for event in theirs.events()}
    assert prof.trace is not None
    check_trace(prof.trace)
    assert names(prof.trace, "a", "run") == ["multiply"]
    assert "another profiler runs" in str(prof.summary())


def test_a_profile_inside_of_another_is_refused(workers: telegrad.LocalCluster) -> None:
    with profiler.profile(), pytest.raises(RuntimeError, match="takes part in another profile"):
        profiler.profile().__enter__()


def test_two_threads_call_while_one_profiles(workers: telegrad.LocalCluster) -> None:
    def call() -> None:
        for _ in range(20):
            rpc.rpc_sync("b", multiply, args=(torch.ones(2, 8),))

    with profiler.profile() as prof:
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert prof.trace is not None
    check_trace(prof.trace)
    assert names(prof.trace, "b", "run") == ["multiply"] * 40


def test_what_is_asked_too_early() -> None:
    with pytest.raises(NotStartedError):
        profiler.profile().__enter__()
    with pytest.raises(RuntimeError, match="nothing was recorded yet"):
        profiler.profile().summary()


def test_a_failing_function_is_in_the_trace(workers: telegrad.LocalCluster) -> None:
    def fails() -> Any:
        raise ValueError("on purpose")

    with profiler.profile() as prof, pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("a", fails)
    assert prof.trace is not None
    check_trace(prof.trace)
    assert names(prof.trace, "a", "run") == ["test_a_failing_function_is_in_the_trace.<locals>.fails"]
