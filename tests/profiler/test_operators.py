"""torch's export in a timeline, on recordings that are made by hand."""

from __future__ import annotations

import json
import zlib
from typing import Any

from telegrad.events import Event
from telegrad.profiler.clocks import Clock
from telegrad.profiler.timeline import TOLERANCE, make_trace
from telegrad.runtime.recording import Part, Row

BEGAN, SECOND = 100.0, 1_000_000.0  # the profile's begin in seconds; a second in microseconds
THREAD = 5


def exported(events: list[dict[str, Any]]) -> bytes:
    """Times are microseconds since the profile began."""
    moved = [{**event, "ts": event["ts"] + BEGAN * SECOND} for event in events]
    return zlib.compress(json.dumps({"traceEvents": moved, "baseTimeNanoseconds": 0}).encode())


def operator(category: str, name: str, start: float, end: float, thread: Any = THREAD) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 77, "tid": thread, "ts": start, "dur": end - start}


def traced(events: list[dict[str, Any]], rows: list[Row] | None = None) -> tuple[dict[str, dict[str, Any]], Any]:
    """The events by name, and what the trace says of itself."""
    part = Part("w", 3, "host/1", BEGAN, THREAD, BEGAN + 1, rows or [], operators=exported(events))
    found, about = make_trace([part], {"w": Clock()}, "w", BEGAN, BEGAN + 1, {})
    return {event["name"]: event for event in found if event["ph"] != "M"}, about


def test_streams_of_a_device_have_lanes_of_their_own() -> None:
    found, _ = traced(
        [
            operator("cpu_op", "aten::mul", 10, 20),
            operator("kernel", "multiply", 12, 18, thread=THREAD),
            operator("gpu_user_annotation", "step", 12, 18, thread=7),
            operator("gpu_memcpy", "copy", 30, 40, thread="stream 9"),
            operator("overhead", "left out", 30, 40),
        ]
    )
    lanes = {name: event["tid"] for name, event in found.items()}
    assert lanes["aten::mul"] == lanes["program"] == THREAD
    assert "left out" not in lanes
    assert len({lanes[name] for name in ("aten::mul", "multiply", "step", "copy")}) == 4
    assert {event["pid"] for event in found.values()} == {4}


def test_what_a_warm_up_recorded_is_left_out() -> None:
    flow = {"ph": "s", "cat": "ac2g", "pid": 77, "tid": THREAD, "id": 1}
    found, _ = traced(
        [
            operator("cpu_op", "before", -30, -20),
            operator("cpu_op", "across", -5, 15),
            {**flow, "name": "early", "ts": -3},
            {**flow, "name": "late", "ts": 3},
        ]
    )
    assert set(found) == {"across", "late", "program"}
    assert (found["across"]["ts"], found["across"]["dur"]) == (0, 15)
    assert found["late"]["id"] == "w/1"


def test_an_operator_is_fitted_into_the_span_around_it() -> None:
    """As far as two clocks may differ; one that reaches further is counted."""

    def at(microseconds: float) -> float:
        return BEGAN + microseconds / SECOND

    rows = [
        Row(Event("run", phase, "call", 9, "caller", 0, "f", 0, at(time)), 0.0, THREAD)
        for phase, time in (("started", 1000.0), ("complete", 2000.0))
    ]
    inside = operator("cpu_op", "inside", 1990, 2000 + TOLERANCE / 20)
    found, about = traced([inside], rows)
    assert found["inside"]["ts"] + found["inside"]["dur"] == found["f"]["ts"] + found["f"]["dur"]
    assert about["crossing"] == 0
    _, about = traced([operator("cpu_op", "far", 1500, 2000 + 2 * TOLERANCE)], rows)
    assert about["crossing"] == 1
