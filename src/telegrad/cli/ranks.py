"""One process of `telegrad run`: how it is started, and what becomes of each line that it writes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from functools import partial
from typing import BinaryIO

from .keeper import die_with

COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # of the terminal, one rank after the other
_LONGEST_LINE = 1 << 16
_KEPT_LINES = 400
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


class Stream:
    """One of the two outputs of a process, taken line by line."""

    def __init__(self, source: BinaryIO, sink: BinaryIO, prefix: bytes, kept: deque[bytes]) -> None:
        self.source = source
        self._sink = sink
        self._prefix = prefix
        self._kept = kept
        self._rest = b""

    def pump(self) -> bool:
        """Passes on what has come; False at the end."""
        data = os.read(self.source.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._write(line)
        if lines:
            self._sink.flush()
        return bool(data)

    def _write(self, line: bytes) -> None:
        # Of a line that was written over and over, as progress bars are, a terminal would show the last.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        self._kept.append(shown)
        self._sink.write(self._prefix + shown + b"\n")


class Rank:
    """A running process. It has a session and so a process group of its own: Ctrl-C reaches the launcher alone."""

    def __init__(
        self,
        number: int,
        command: list[str],
        env: dict[str, str],
        sinks: tuple[BinaryIO, BinaryIO],
        prefix: bytes,
    ) -> None:
        self.number = number
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # the launcher has one thread
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        self._kept: deque[bytes] = deque(maxlen=_KEPT_LINES)
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        self.streams = [
            Stream(out, sinks[0], prefix, deque(maxlen=_KEPT_LINES)),  # type: ignore[arg-type]
            Stream(err, sinks[1], prefix, self._kept),  # type: ignore[arg-type]
        ]

    def signal(self, number: int) -> None:
        """To it and all that it has started. Only before `reap`: its number is its own until then."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def reap(self) -> int:
        """Its exit code, when it has ended; 128 + n for signal n."""
        os.close(self.pidfd)
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def last_words(self) -> str:
        """Its last traceback, with those that led to it; else the last lines that it wrote to stderr."""
        lines = [line.decode(errors="replace") for line in self._kept]
        return "\n".join(lines[_start_of_traceback(lines) :])


def _start_of_traceback(lines: list[str]) -> int:
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return max(0, len(lines) - 20)
    at = starts.pop()
    while starts and any(line in _CHAINED for line in lines[at - 3 : at]):
        at = starts.pop()
    return at


def how_it_ended(code: int) -> str:
    """In words: `exit code 3`, `SIGKILL (exit code 137)`."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    hint = ": was it out of memory?" if name == "SIGKILL" else ""
    return f"{name} (exit code {code}){hint}"
