"""What importing telegrad must not do."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
torch.autograd.backward = torch.autograd.grad = None
import telegrad
telegrad.Worker
"""


def test_importing_runs_no_backward() -> None:
    """torch's engine starts threads, and CUDA, when it is first used; the fork server imports telegrad and forks."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
