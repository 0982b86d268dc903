"""The process that runs PyTorch's own tests (runner.py), seen from the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


class Runner:
    """The process that forks the ranks of all tests."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w+")
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("runner.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer()

    def run(self, test: str, limit: float) -> dict[str, str]:
        assert self._process.stdin is not None
        print(json.dumps({"test": test, "limit": limit}), file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            pytest.fail(f"the runner has ended:\n{self._log.read()[-5000:]}")
        return line

    def close(self) -> None:
        self._process.communicate(timeout=10)  # which closes its stdin
        self._log.close()
