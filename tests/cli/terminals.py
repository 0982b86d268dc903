"""A program in a pseudo-terminal: what it shows, keys for it, its exit code."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Terminal:
    """Runs a command with a terminal of so many columns as its stdin, stdout and stderr."""

    def __init__(self, command: list[str], *, columns: int, lines: int = 24, env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {**env, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.raw = ""

    def until(self, pattern: str, seconds: float) -> str:
        """The screen, once the pattern is on it."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.screen()):
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not come; the terminal shows:\n{self.screen()}")
        return self.screen()

    def _read(self, timeout: float) -> bool:
        if timeout <= 0 or not select.select([self._ours], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

    def screen(self) -> str:
        """The last whole picture, as text."""
        frames = [frame for frame in re.split(r"\x1b\[H", self.raw) if frame.strip()]
        return _ESCAPES.sub("", frames[-1]).replace("\r", "") if frames else ""

    def text(self) -> str:
        """All that was written, without colours and movements."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self, seconds: float) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + seconds
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
