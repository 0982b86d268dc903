"""How the training goes, live: a bar in a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ..cluster.local import LocalCluster
from ..errors import TelegradError
from ..primitives import clock
from .accounts import accounts

LOOK_EVERY = 0.02  # seconds; at the driver's own worker, which costs no call
ASK_EVERY = 1.0  # the others, by a call to each
LINE_EVERY = 5.0


class Meter:
    """Watches the workers from a thread of its own: the bytes that they send, and the driver's calls in flight."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="demo-meter", daemon=True)
        self.bytes_per_second = 0.0
        self.calls_in_flight = 0  # the most in the last second

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        worker = self._cluster.worker
        with contextlib.suppress(TelegradError):  # a worker that is lost: the training says so
            began, before, most = clock.now(), self._sent(), 0
            while not self._end.wait(LOOK_EVERY):
                most = max(most, worker.statistics().calls_pending)
                elapsed = clock.now() - began
                if elapsed >= ASK_EVERY:
                    sent = self._sent()
                    self.bytes_per_second = (sent - before) / elapsed
                    self.calls_in_flight = most
                    began, before, most = clock.now(), sent, 0

    def _sent(self) -> int:
        return sum(sum(account.bytes_to.values()) for account in accounts(self._cluster))


class Gauge:
    """Shows how far the training is, with its figures. Made anew for each training."""

    def __init__(self, console: Console, meter: Meter, *, steps: int | None, seconds: float) -> None:
        self._console = console
        self._meter = meter
        self._steps = steps
        self._seconds = seconds
        self._recent: deque[float] = deque(maxlen=50)  # when the last steps ended
        self._loss = 0.0
        self._count = 0
        self._said = clock.now()
        self._said_of = 0  # steps
        self._bar = _Bar(console, self) if console.is_terminal else None

    def __enter__(self) -> Gauge:
        self._began = clock.now()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self._count > self._said_of:
            self._say()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return clock.now() - self._began

    @property
    def is_over(self) -> bool:
        """Whether that was enough: so many steps if their number was given, else so many seconds."""
        return self._count >= self._steps if self._steps is not None else self.elapsed >= self._seconds

    @property
    def part_done(self) -> float:
        """From 0 to 1."""
        return min(1.0, self._count / self._steps if self._steps else self.elapsed / self._seconds)

    def on_step(self, loss: float) -> None:
        """Called after each step."""
        self._count += 1
        self._loss = loss if self._count == 1 else 0.95 * self._loss + 0.05 * loss
        self._recent.append(clock.now())
        if self._bar is not None:
            self._bar.show(self.part_done)
        elif clock.now() - self._said >= LINE_EVERY:
            self._say()

    def figures(self) -> str:
        """As one line."""
        recent = self._recent
        per_second = (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 1 else 0.0
        return (
            f"step {self._count:,}  loss {self._loss:.2f}  {per_second:.1f} steps/s  "
            f"{size(self._meter.bytes_per_second)}/s  {self._meter.calls_in_flight} calls in flight"
        )

    def _say(self) -> None:
        self._said, self._said_of = clock.now(), self._count
        self._console.print(f"{self.elapsed:5.0f} s  {self.figures()}", soft_wrap=True)


class _Bar(Progress):
    """The bar, and the figures below it, which wrap where the terminal is narrow."""

    def __init__(self, console: Console, gauge: Gauge) -> None:
        self._gauge = gauge
        super().__init__(
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            console=console,
            expand=True,
        )
        self._task = self.add_task("", total=1.0)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self._gauge.figures(), style="dim")

    def show(self, part_done: float) -> None:
        self.update(self._task, completed=part_done)


def size(nbytes: float) -> str:
    """As people read it."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if nbytes >= 10 or unit == "B" else f"{nbytes:.1f} {unit}"
