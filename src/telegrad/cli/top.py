"""`telegrad top`: looks at a running group again and again, and shows what has changed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn

from rich.console import Console
from rich.live import Live

from ..errors import AddressError, RendezvousError, TelegradError
from ..primitives import clock
from ..primitives.text import clean
from .observer import Look, Observer
from .output import Code, Stopped, console, show
from .views import ANSWERS, View, rows, summary, table

_SAMPLED = 0.1  # of each interval: for so long workers time the calls that they serve
_TICK = 0.2  # seconds between two looks at the keyboard, and at the terminal's size


def watch(address: str, *, interval: float, once: bool, as_json: bool, timeout: float, transport: str = "unix") -> int:
    """Shows the group until it ends or the user quits. Returns the exit code.

    Raises:
        Stopped: the address makes no sense, or no group answers there.
    """
    target = console()
    try:
        with Observer(address, timeout=timeout, transport=transport) as observer:
            first = _first_look(observer, interval)
            if as_json or once or not target.is_terminal:
                return _print_once(target, observer, first, address, interval, as_json=as_json)
            return _keep_showing(target, observer, first, address, interval)
    except KeyboardInterrupt:
        return Code.INTERRUPTED
    except AddressError as error:
        raise Stopped(str(error), Code.USAGE) from error
    except RendezvousError as error:
        raise Stopped(f"no group answers at {address}: {error}", Code.SILENT) from error


def _first_look(observer: Observer, interval: float) -> Look:
    look = observer.look(sample=interval * _SAMPLED)
    if any(seen.report for seen in look.workers):
        return look
    if not look.workers:
        raise RendezvousError("the group has no workers now")
    count, first = len(look.workers), look.workers[0]
    raise RendezvousError(f"none of its workers ({count}) answers; of {first.member.name!r}: {first.problem}")


def _print_once(
    target: Console, observer: Observer, first: Look, address: str, interval: float, *, as_json: bool
) -> int:
    time.sleep(interval)
    look = observer.look()
    found = rows(look, first)
    if as_json:
        told: dict[str, Any] = {"address": address, "world_size": look.world_size, "interval": interval}
        told["workers"] = [asdict(row) for row in found]
        print(json.dumps(told, indent=2))
    else:
        for line in summary(found, look.world_size):
            target.print(line, markup=False)
        width = target.width if target.is_terminal else 10_000
        show(target, table(found, width))
        for row in found:
            if row.problem:
                target.print(clean(f"{row.name}: {row.problem}"), markup=False, soft_wrap=True)
    return Code.FINE if all(row.state == ANSWERS for row in found) else Code.WRONG


def _keep_showing(target: Console, observer: Observer, look: Look, address: str, interval: float) -> int:
    view = View(address, look.world_size, rows(look, None), "q: quit · rates come with the second look")
    note = f"q: quit · every {interval:g} s · latencies: served calls of {_SAMPLED:.0%} of the time"
    ended = ""
    live = Live(view, console=target, screen=True, auto_refresh=False)
    with _keyboard() as pressed, _ends_in_order(), live:
        while not ended:
            if _wait(live, pressed, interval):
                return Code.FINE
            before = look
            try:
                look = observer.look(sample=interval * _SAMPLED)
            except TelegradError as error:
                ended = str(error)
                break
            view.rows, view.note = rows(look, before), note
            if not any(row.state == ANSWERS for row in view.rows) and all(s.lost for s in look.workers):
                ended = "its workers are gone"
            live.refresh()
    told = clean(f"the group at {address} has ended ({ended}); last seen:")
    target.print(told, markup=False, soft_wrap=True)
    known = {row.id: row for row in rows(before, None)}
    last = [row if row.state == ANSWERS else known.get(row.id, row) for row in view.rows]
    show(target, table(last, target.width))
    return Code.FINE


def _wait(live: Live, pressed: Callable[[float], bytes], seconds: float) -> bool:
    """Waits. Returns True if the user wants to quit."""
    until = clock.now() + seconds
    while (left := until - clock.now()) > 0:
        live.refresh()
        if pressed(min(left, _TICK)) in (b"q", b"Q", b"\x1b"):
            return True
    return False


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], bytes]]:
    """Yields a function that waits so many seconds for a key; b"" if none was pressed."""
    fds = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
    before = {fd: termios.tcgetattr(fd) for fd in fds}
    try:
        for fd in fds:
            tty.setcbreak(fd)
        yield lambda seconds: os.read(fds[0], 1) if select.select(fds, [], [], seconds)[0] else b""
    finally:
        for fd in fds:
            termios.tcsetattr(fd, termios.TCSADRAIN, before[fd])


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an exception, so that the terminal is given back as it was."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
