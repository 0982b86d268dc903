"""Runs of the demo as processes, for test_demo.py: to read along, to interrupt, and to see what is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = (sys.executable, str(ROOT / "scripts" / "_demo.py"))
PATIENCE = 90.0


class Run:
    """One run. All of its processes are known by a mark in their environment."""

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = DEMO,
        columns: int | None = None,
    ) -> None:
        self.mark = f"run-{uuid.uuid4().hex}"
        self.said = ""  # so far
        environment = {**os.environ, "DEMO_RUN": self.mark}
        if columns is None:
            self._reading, writing = os.pipe()
        else:
            environment["TERM"] = "xterm-256color"
            environment.pop("COLUMNS", None)
            self._reading, writing = pty.openpty()
            fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=writing,
            stderr=writing,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            start_new_session=True,  # so that a signal to its group is one to it alone
        )
        os.close(writing)

    def wait_until(self, condition: Callable[[Run], bool]) -> None:
        """Reads what it says until the condition holds."""
        while not condition(self):
            assert self._read(), f"it ended before that, and said: {self.said}"

    def press_ctrl_c(self) -> None:
        """As a terminal does it: the signal goes to all processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        """Waits for its end; its exit code. Whatever it had started must have ended before it."""
        while self._read():
            pass
        code = self.process.wait(PATIENCE)
        left = self.processes()
        assert not left, f"left behind: {left}"
        return code

    def processes(self) -> dict[int, str]:
        """Returns the processes of this run that are there now."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def close(self) -> None:
        """Ends it in any case."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        os.close(self._reading)

    def _read(self) -> bool:
        try:
            piece = os.read(self._reading, 65536)
        except OSError:  # how a pseudo-terminal says that the other end is closed
            return False
        self.said += piece.decode("utf-8", "replace")
        return bool(piece)
