"""What holds of every trace, whatever was profiled."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from telegrad.profiler import Trace

TELEGRADS = {"run", "program", "handle", "serialise", "wire", "wait", "profiler"}
ROUNDING = 0.002  # microseconds: a trace has nanoseconds


def check_trace(trace: Trace) -> None:
    """Every message has both ends, none goes back in time, each end lies in a slice, and slices nest."""
    slices = slices_by_thread(trace)
    starts, ends = arrows(trace)
    assert Counter(starts.keys()) == Counter(ends.keys())
    assert len(starts) == trace.about["messages"]
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"], f"{start['name']} goes back in time"
        assert start["args"] == end["args"]
        assert trace.processes[start["pid"]] == start["args"]["from"]
        assert trace.processes[end["pid"]] == start["args"]["to"]
        assert any(s["cat"] == "wire" for s in around(start, slices)), f"{start['name']} is sent by nobody"
        assert around(end, slices), f"{start['name']} is read by nobody"
    assert trace.about["contradicting"] == 0
    for found in slices.values():
        check_nesting(found)


def check_nesting(slices: list[dict[str, Any]]) -> None:
    stack: list[dict[str, Any]] = []
    for slice_ in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
        while stack and end_of(stack[-1]) <= slice_["ts"] + ROUNDING:
            stack.pop()
        if stack:
            assert end_of(slice_) <= end_of(stack[-1]) + ROUNDING, f"{slice_} reaches over {stack[-1]}"
        stack.append(slice_)


def end_of(slice_: dict[str, Any]) -> float:
    return slice_["ts"] + slice_["dur"]


def slices_by_thread(trace: Trace) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in trace.events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def around(event: dict[str, Any], slices: dict[tuple[int, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    own = slices.get((event["pid"], event["tid"]), [])
    return [s for s in own if s["ts"] - ROUNDING <= event["ts"] <= end_of(s) + ROUNDING]


def arrows(trace: Trace) -> tuple[dict[Any, dict[str, Any]], dict[Any, dict[str, Any]]]:
    """The two ends of each message, by number."""
    found = [e for e in trace.events if e.get("cat") == "message"]
    starts, ends = ([e for e in found if e["ph"] == phase] for phase in "sf")
    assert len(starts) == len({e["id"] for e in starts})
    assert len(ends) == len({e["id"] for e in ends})
    return {e["id"]: e for e in starts}, {e["id"]: e for e in ends}


def names(trace: Trace, worker: str, category: str) -> list[str]:
    """The slices of a worker, in the order of their beginnings."""
    pid = next(pid for pid, name in trace.processes.items() if name == worker)
    found = [e for e in trace.events if e["ph"] == "X" and e["pid"] == pid and e["cat"] == category]
    return [e["name"] for e in sorted(found, key=lambda e: e["ts"])]
