"""`telegrad run`: one program as several processes on this machine, with the variables that torchrun sets.

One thread, which waits for whatever comes first: a line of some process, the end of one, a signal, a deadline. The
first process that fails ends all others; nothing that they have started is left behind, also when the launcher
itself is killed (keeper.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..primitives import clock
from .keeper import Keeper, adopt_orphans, children
from .output import Code, error_console
from .ranks import COLORS, Rank, Stream, how_it_ended

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DRAIN = 0.3  # seconds in which what was written last comes, once all have ended
_SWEEP = 1.0  # seconds for what the processes have left behind to end by itself


@dataclass(frozen=True)
class Job:
    """What to run: `command` is Python's own arguments, such as ["script.py", "--steps", "3"]."""

    command: list[str]
    count: int
    port: int = 0  # 0: any that is free
    grace: float = 5.0  # seconds between asking a process to end and killing it
    quiet: bool = False
    prefixed: bool = True


def launch(job: Job) -> int:
    """Runs the processes and returns the exit code: of the first that failed, or 128 + n after signal n.

    Raises:
        OSError: the port cannot be had, or a process cannot be started.
    """
    keeper = Keeper()
    others = set(children())
    adopt_orphans()
    try:
        with _held_port(job.port) as port, _signals() as wake:
            run = _Run(job, port, wake, keeper)
            try:
                return run.to_end()
            finally:
                run.kill()
                _sweep(others)
    finally:
        keeper.dismiss()


class _Run:
    def __init__(self, job: Job, port: int, wake: int, keeper: Keeper) -> None:
        self._job = job
        self._port = port
        self._wake = wake
        self._keeper = keeper
        self._console = error_console()
        self._running: dict[int, Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ, self._on_signal)
        self._streams = 0
        self._failed: tuple[Rank, int] | None = None
        self._stopped_by = 0  # a signal
        self._kill_at: float | None = None

    def to_end(self) -> int:
        if not self._job.quiet:
            where = f"127.0.0.1:{self._port}"
            processes = "1 process" if self._job.count == 1 else f"{self._job.count} processes"
            self._console.print(f"[dim]{processes} that meet at {where}; to look at them: telegrad top {where}[/]")
        try:
            self._start()
            while self._running:
                self._wait(None if self._kill_at is None else self._kill_at - clock.now())
                if self._kill_at is not None and clock.now() >= self._kill_at:
                    self.kill()
            self._drain()
        except BrokenPipeError:  # whoever read our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        finally:
            self._selector.close()
        return self._verdict()

    def _start(self) -> None:
        colored = self._console.color_system is not None and sys.stdout.isatty()
        sinks = (sys.stdout.buffer, sys.stderr.buffer)
        sys.stdout.flush()
        for number in range(self._job.count):
            env = environment(number, self._job.count, self._port)
            prefix = _prefix(number, self._job.count, colored=colored) if self._job.prefixed else b""
            rank = Rank(number, [sys.executable, *self._job.command], env, sinks, prefix)
            self._running[number] = rank
            self._keeper.add(rank.process.pid)
            self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            for stream in rank.streams:
                self._selector.register(stream.source, selectors.EVENT_READ, stream)
                self._streams += 1

    def _wait(self, timeout: float | None) -> None:
        ready = [key.data for key, _ in self._selector.select(None if timeout is None else max(0.0, timeout))]
        # What a process wrote before it ended is shown before anything is said of its end.
        for thing in sorted(ready, key=lambda data: isinstance(data, Rank)):
            if isinstance(thing, Stream):
                if not thing.pump():
                    self._selector.unregister(thing.source)
                    thing.source.close()
                    self._streams -= 1
            elif isinstance(thing, Rank):
                self._on_end(thing)
            else:
                thing()

    def _on_end(self, rank: Rank) -> None:
        self._selector.unregister(rank.pidfd)
        del self._running[rank.number]
        code = rank.reap()
        if code and self._failed is None and not self._stopped_by:
            self._failed = rank, code
            self._ask_to_end(signal.SIGTERM)

    def _on_signal(self) -> None:
        for number in os.read(self._wake, 64):
            if number not in _ENDING:
                continue
            if self._stopped_by or self._failed is not None:
                self.kill()  # no patience
            else:
                self._stopped_by = number
                self._ask_to_end(number)

    def _ask_to_end(self, number: int) -> None:
        for rank in self._running.values():
            rank.signal(number)
        self._kill_at = clock.now() + self._job.grace

    def kill(self) -> None:
        self._kill_at = None
        for rank in self._running.values():
            rank.signal(signal.SIGKILL)

    def _drain(self) -> None:
        until = clock.now() + _DRAIN
        while self._streams and (left := until - clock.now()) > 0:
            self._wait(left)

    def _verdict(self) -> int:
        if self._stopped_by:
            name = "Ctrl-C" if self._stopped_by == signal.SIGINT else signal.Signals(self._stopped_by).name
            self._console.print(f"[bold]telegrad run:[/] {name}; all processes have ended")
            return 128 + self._stopped_by
        if self._failed is None:
            return Code.FINE
        rank, code = self._failed
        others = "" if self._job.count == 1 else "; the others were ended"
        self._console.print(f"[bold red]telegrad run: rank {rank.number} failed with {how_it_ended(code)}{others}[/]")
        self._console.print(rank.last_words() or "It wrote nothing to stderr.", markup=False)
        return code


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun sets, for one process of one machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    cores = len(os.sched_getaffinity(0))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    env.setdefault("PYTHONUNBUFFERED", "1")  # a line is shown when it is written
    env.update(
        RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count),
        GROUP_RANK="0", GROUP_WORLD_SIZE="1", ROLE_NAME="default", ROLE_RANK=str(rank), ROLE_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=f"telegrad-{port}", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
    )  # fmt: skip
    return env


def _prefix(rank: int, count: int, *, colored: bool) -> bytes:
    label = f"[rank {rank:>{len(str(count - 1))}}]"
    return (f"\x1b[{COLORS[rank % len(COLORS)]}m{label}\x1b[0m " if colored else f"{label} ").encode()


@contextlib.contextmanager
def _held_port(wanted: int) -> Iterator[int]:
    """A port for rank 0 to serve its store at. It stays bound here, so the system gives it to nobody else, and it
    does not listen, so rank 0 can."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", wanted))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor from which the numbers of signals can be read, as they come."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in _ENDING}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _sweep(others: set[int]) -> None:
    """Ends what the processes have started and not ended: by now these are orphans, and so our children. `others`
    are not ours to end."""
    until = clock.now() + _SWEEP
    asked: set[int] = set()
    while left := [pid for pid in children() if pid not in others]:
        late = clock.now() > until
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if late:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
            asked.add(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
