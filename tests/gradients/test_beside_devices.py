"""Passes beside a device, whose nodes torch runs on a thread of their own: without a GPU, on the device of twin.py, in
processes that have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import random_graphs

HERE = Path(__file__).parent
GRAPHS = 1_000
MODES = {"contexts": (), "plain": ("--plain",)}
LIMIT = 300  # seconds for a process

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the device has to be compiled, by g++")


def start(output: Path, *command: str | Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TELEGRAD_TEST_DEVICE": "twin"}
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=HERE.parents[1]
        )


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """Processes that compare random graphs, which wait for the device most of the time: side by side."""
    folder = tmp_path_factory.mktemp("graphs")
    command = [random_graphs.__file__, str(GRAPHS), "--devices", "cpu,twin", "--streams", "--processes", "1"]
    started = {mode: (start(folder / mode, *command, *more), folder / mode) for mode, more in MODES.items()}
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("tests", ["test_cuda_gradients.py", "test_plain_on_devices.py"])
def test_situations(tests: str, tmp_path: Path, graphs: object) -> None:
    process = start(tmp_path / "output", "-m", "pytest", "-p", "twin", HERE.parent / "cuda" / tests)
    try:
        code = process.wait(LIMIT)
    finally:
        process.kill()
    said = (tmp_path / "output").read_text()
    assert code == 0, said
    assert " passed" in said


@pytest.mark.parametrize("mode", MODES)
def test_random_graphs_equal_local_autograd(mode: str, graphs: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    """Leaves and operations on the CPU and on the device, on streams of their own."""
    process, output = graphs[mode]
    code = process.wait(LIMIT)
    said = output.read_text()
    assert code == 0, said
    assert f"{GRAPHS:,} graphs" in said
