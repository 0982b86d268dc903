"""How the training goes, live: a bar in a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from ..cluster.local import LocalCluster
from ..graph.text import bytes_of
from ..primitives import clock
from .usage import all_usages

ASK_EVERY = 1.0  # seconds between two questions to the workers for their calls and bytes
LINE_EVERY = 5.0


class Progress:
    """Shows how far the training is, with its figures."""

    def __init__(self, console: Console, cluster: LocalCluster, *, steps: int | None, seconds: float) -> None:
        self._console = console
        self._cluster = cluster
        self._steps = steps
        self._seconds = seconds
        self._ended: deque[float] = deque(maxlen=50)  # when the last steps ended
        self._loss = 0.0
        self._count = self._said_of = 0  # steps
        self._rates = "0 B/s  0 calls/s"
        self._began = self._asked = self._said = clock.now()
        self._totals = self._ask()
        self._live = Live(console=console, get_renderable=self._render) if console.is_terminal else None

    def __enter__(self) -> Progress:
        self._began = clock.now()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif kind is None and self._count > self._said_of:
            self._say()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return clock.now() - self._began

    @property
    def part_done(self) -> float:
        """From 0 to 1: of the steps if their number was given, else of the seconds."""
        return min(1.0, self._count / self._steps if self._steps else self.elapsed / self._seconds)

    def on_step(self, loss: float) -> None:
        """Called after each step."""
        now = clock.now()
        self._count += 1
        self._loss = loss if self._count == 1 else 0.95 * self._loss + 0.05 * loss
        self._ended.append(now)
        if now - self._asked >= ASK_EVERY:
            totals, passed = self._ask(), now - self._asked
            sent, calls = ((new - old) / passed for new, old in zip(totals, self._totals, strict=True))
            self._rates, self._totals, self._asked = f"{bytes_of(int(sent))}/s  {calls:.0f} calls/s", totals, now
        if self._live is None and now - self._said >= LINE_EVERY:
            self._say()

    def _ask(self) -> tuple[int, int]:
        """Bytes sent and calls served, of all workers."""
        usages = all_usages(self._cluster)
        return sum(usage.sent for usage in usages), sum(usage.calls for usage in usages)

    def _figures(self) -> str:
        ended = self._ended
        per_second = (len(ended) - 1) / (ended[-1] - ended[0]) if len(ended) > 1 else 0.0
        return f"step {self._count:,}  loss {self._loss:.2f}  {per_second:.1f} steps/s  {self._rates}"

    def _say(self) -> None:
        self._said, self._said_of = clock.now(), self._count
        self._console.print(f"{self.elapsed:5.0f} s  {self._figures()}", soft_wrap=True)

    def _render(self) -> Group:
        bar = Padding(ProgressBar(total=1.0, completed=self.part_done), 0)  # which ends its line
        return Group(Text(f"training {self.part_done:4.0%}"), bar, Text(self._figures(), style="dim"))
