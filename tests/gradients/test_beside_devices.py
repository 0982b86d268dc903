"""Passes beside a device, whose nodes torch runs on a thread of their own: without a GPU, on the device of twin.py, in
processes that have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import random_graphs

HERE = Path(__file__).parent
GRAPHS = 1_000

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the device has to be compiled, by g++")


def run(*command: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TELEGRAD_TEST_DEVICE": "twin"}
    ran = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, cwd=HERE.parents[1]
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("mode", [(), ("--plain",)], ids=["contexts", "plain"])
def test_random_graphs_equal_local_autograd(mode: tuple[str, ...]) -> None:
    """Leaves and operations on the CPU and on the device."""
    said = run(random_graphs.__file__, str(GRAPHS), *mode, "--devices", "cpu,twin", "--streams", "--processes", "1")
    assert f"{GRAPHS:,} graphs" in said


@pytest.mark.parametrize("tests", ["test_cuda_gradients.py", "test_plain_on_devices.py"])
def test_situations(tests: str) -> None:
    said = run("-m", "pytest", "-p", "twin", HERE.parent / "cuda" / tests)
    assert " passed" in said
    assert " skipped" not in said
