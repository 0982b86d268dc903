"""A seeded training run over several workers has the same bits in each run, on one core and on all, idle and busy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "same_bits.py"
RUNS = 3  # on all cores, on one, on all of them beside others


def test_each_run_has_the_same_bits() -> None:
    command = [sys.executable, str(PROGRAM), str(RUNS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(f": {RUNS} runs")
