"""Where the time went, on traces that are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad.profiler import Trace
from telegrad.profiler.critical_path import Link

DRIVER, A = 1, 2


def slice_(pid: int, category: str, name: str, start: float, end: float, message: int = 0) -> dict[str, Any]:
    args = {"message": str(message)} if message else {}
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": pid, "ts": start, "dur": end - start, "args": args
    }  # fmt: skip


def arrow(id: int, name: str, sent: tuple[int, float], read: tuple[int, float], reply_to: int = 0) -> list[Any]:
    args = {"bytes": 100, "message": str(id)} | ({"reply_to": str(reply_to)} if reply_to else {})
    both = {"cat": "message", "name": name, "id": id, "args": args}
    return [
        {"ph": "s", "pid": sent[0], "tid": sent[0], "ts": sent[1], **both},
        {"ph": "f", "pid": read[0], "tid": read[0], "ts": read[1], **both},
    ]


def one_call() -> Trace:
    """
    driver  program 0─10  encode─12 write─14 | wait ───────────────────────────────────── 60 | decode─62  program─70
    a                                  read 20   handle 22: decode─25 run f ─ 50 encode─53 write─55
                                                                                      reply: sent 53, read 58
    """
    events = [
        slice_(DRIVER, "program", "program", 0, 70),
        slice_(DRIVER, "serialise", "encode call", 10, 12, 11),
        slice_(DRIVER, "wire", "write call", 12, 14, 11),
        slice_(DRIVER, "wait", "wait for f", 14, 60, 11),
        slice_(DRIVER, "serialise", "decode reply", 60, 62, 12),
        slice_(A, "wire", "read call", 20, 21, 11),
        slice_(A, "handle", "handle call", 22, 56, 11),
        slice_(A, "serialise", "decode call", 22, 25, 11),
        slice_(A, "run", "f", 25, 50, 11),
        slice_(A, "serialise", "encode reply", 50, 53, 12),
        slice_(A, "wire", "write reply", 53, 55, 12),
        *arrow(11, "call f", (DRIVER, 12), (A, 20)),
        *arrow(12, "reply f", (A, 53), (DRIVER, 58), reply_to=11),
    ]
    workers = {"driver": {"pid": DRIVER, "id": 0}, "a": {"pid": A, "id": 1}}
    about = {"format": 1, "root": "driver", "window": [0, 70], "workers": workers, "missing": {}}
    return Trace(events, about)


def test_each_moment_is_one_of_five() -> None:
    driver, a = one_call().summary().workers
    # While it waits, the call is on its way until 20 and the reply from 53 to 58.
    assert driver.time == {"compute": 18, "serialise": 4, "wire": 2 + 6 + 5, "wait": 46 - 11, "idle": 0}
    assert a.time == {
        "compute": 25,
        "serialise": 3 + 3 + 1,
        "wire": 8 + 1 + 2 + 2,
        "wait": 0,
        "idle": 12 + 1 + 12,
    }


def test_the_path_goes_through_the_callee() -> None:
    assert one_call().summary().path == [
        Link("driver", "compute", "program", 0, 12),
        Link("driver", "wire", "call f to a", 12, 20),
        Link("a", "wait", "for a thread", 20, 22),
        Link("a", "compute", "telegrad", 22, 25),
        Link("a", "compute", "f", 25, 50),
        Link("a", "compute", "telegrad", 50, 53),
        Link("a", "wire", "reply f to driver", 53, 58),
        Link("driver", "wait", "waking up", 58, 60),
        Link("driver", "compute", "program", 60, 70),
    ]


def test_a_function_that_waits_in_between_keeps_its_name() -> None:
    """What it does after its wait is its own, too."""
    trace = one_call()
    trace.events.append(slice_(A, "wait", "wait for g", 30, 40, 13))
    links = [link for link in trace.summary().path if link.worker == "a"]
    assert links == [
        Link("a", "wait", "for a thread", 20, 22),
        Link("a", "compute", "telegrad", 22, 25),
        Link("a", "compute", "f", 25, 30),
        Link("a", "wait", "wait for g", 30, 40),
        Link("a", "compute", "f", 40, 50),
        Link("a", "compute", "telegrad", 50, 53),
        Link("a", "wire", "reply f to driver", 53, 58),
    ]


def test_steps_count_where_the_program_counts_them() -> None:
    trace = one_call()
    trace.events.append(slice_(DRIVER, "user_annotation", "ProfilerStep#3", 0, 40))
    trace.events.append(slice_(DRIVER, "user_annotation", "ProfilerStep#4", 40, 65))
    summary = trace.summary()
    assert (summary.steps, summary.length) == (2, 65)
    assert sum(summary.workers[0].time.values()) == 65
    assert str(summary).startswith("2 steps, 32 us each")
    assert sum(link.duration for link in summary.path) == pytest.approx(65)


def test_a_trace_without_anything() -> None:
    summary = Trace([]).summary()
    assert (summary.length, list(summary.workers), list(summary.path)) == (0, [], [])
    assert str(summary).startswith("everything, 0 us")
