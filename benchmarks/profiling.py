"""The section "Where the time goes": the calling thread under cProfile, and what both processes use per call.

cProfile sees one thread, and adds its own cost to every function call in it; so it is set beside the same calls
without it, and beside the processor time and the waits of both processes, which it does not disturb.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.callee import Usage, echo, empty, tensor_of, usage
from benchmarks.figures import PAIR, Repeats, Section, Session, Setting
from benchmarks.sampling import timed
from benchmarks.tables import Grid

Call = Callable[[], Any]

ROWS = 15
MICRO = 1e6

EXPLANATION = """\
cProfile counts the driver's calling thread only. Time that the thread spends waiting (for the peer, or for
another thread of its own process) shows as own time of the function it waits in. cProfile adds its own cost to
each function call, so the profiled call is slower than the plain one and functions that call many small ones
look larger than they are: read the rows as an order, and the plain median as the time. "waits" are voluntary
context switches: how often a process gave up its core to wait."""


@dataclass(frozen=True)
class Line:
    calls: float
    own: float
    total: float
    where: str


@dataclass(frozen=True)
class CallProfile:
    """All figures are for one call; times in seconds."""

    title: str
    calls: int
    plain: float
    profiled: float
    driver: Usage
    peer: Usage
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Profiles:
    backend: str
    calls: tuple[CallProfile, ...]


def measure_profiles(session: Session, *, calls: Callable[[Session], dict[str, Call]]) -> Profiles:
    profiles = tuple(_profile(title, call, session) for title, call in calls(session).items())
    return Profiles(session.backend.name, profiles)


def plain_calls(session: Session) -> dict[str, Call]:
    rpc_sync, peer = session.backend.rpc.rpc_sync, session.peer
    return {
        "Empty call": partial(rpc_sync, peer, empty),
        "Echo 64 B": partial(rpc_sync, peer, echo, (tensor_of(64),)),
    }


def _profile(title: str, call: Call, session: Session) -> CallProfile:
    count = session.repeats.count
    peer_usage = partial(session.backend.rpc.rpc_sync, session.peer, usage)
    driver_before, peer_before = Usage.here(), peer_usage()
    plain = timed(call, session.repeats)
    driver, peer = Usage.here(), peer_usage()
    made = count + session.repeats.warmup
    profiler = cProfile.Profile()
    profiler.enable()
    profiled = timed(call, Repeats(count, warmup=0))
    profiler.disable()
    return CallProfile(
        title=title,
        calls=count,
        plain=statistics.median(plain),
        profiled=statistics.median(profiled),
        driver=driver.per_call(driver_before, made),
        peer=peer.per_call(peer_before, made),
        lines=_lines(profiler, count),
    )


def _lines(profiler: cProfile.Profile, count: int) -> tuple[Line, ...]:
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    lines = [
        Line(calls / count, own / count, total / count, _where(*place))
        for place, (_, calls, own, total, _) in stats.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.own)[:ROWS])


def _where(file: str, line: int, function: str) -> str:
    """Paths from the package on: where this machine keeps its packages is of no use to a reader."""
    if file == "~":
        return function
    parts = Path(file).parts
    package = next((i + 1 for i, part in enumerate(parts) if part in ("site-packages", "src")), len(parts) - 2)
    return f"{'/'.join(parts[max(package, 0) :])}:{line}({function})"


def render_profiles(profiles: Profiles) -> str:
    parts = [_render(profile) for profile in profiles.calls]
    return "\n\n".join([f"{profiles.backend}. {EXPLANATION}", *parts])


def _render(profile: CallProfile) -> str:
    used = Grid(
        ("per call", "user µs", "system µs", "waits", "preempted"),
        [_usage_row("driver", profile.driver), _usage_row("peer", profile.peer)],
    )
    text = [f"{'calls':>7} {'own µs':>8} {'total µs':>9}  function"]
    text += [
        f"{line.calls:7.2f} {line.own * MICRO:8.2f} {line.total * MICRO:9.2f}  {line.where}" for line in profile.lines
    ]
    return (
        f"### {profile.title}\n\n{profile.calls} calls; median {profile.plain * MICRO:.1f} µs plain, "
        f"{profile.profiled * MICRO:.1f} µs under cProfile.\n\n{used.markdown()}\n\n"
        f"The calling thread, per call, by own time:\n\n```\n" + "\n".join(text) + "\n```"
    )


def _usage_row(who: str, used: Usage) -> tuple[str, ...]:
    return (
        who,
        f"{used.user * MICRO:.1f}",
        f"{used.system * MICRO:.1f}",
        f"{used.waits:.2f}",
        f"{used.preempted:.2f}",
    )


def section(calls: Callable[[Session], dict[str, Call]], repeats: Repeats, setting: Setting = PAIR) -> Section:
    """The section for these calls, by title."""
    return Section(
        name="profile",
        title="Where the time goes",
        measure=partial(measure_profiles, calls=calls),
        render=render_profiles,
        repeats=repeats,
        setting=setting,
    )


SECTION = section(plain_calls, Repeats(count=5000, warmup=200))
