"""The examples run, print what they should, and end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RING = Path(__file__).resolve().parents[1] / "examples" / "ring.py"
PATIENCE = 60.0


def run_ring(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RING), *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_ring(transport: str) -> None:
    done = run_ring("3", "--transport", transport, "--no-torch")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    out = done.stdout
    assert "\x1b" not in out, "colours where there is no terminal"
    assert re.search(rf"start-up +\d+\.\d\d s for 3 workers over {transport}\n", out)
    path = re.search(r"processes +(\d+) > (\d+) > (\d+)\n", out)
    assert path, out
    assert len(set(path.groups())) == 3
    assert re.search(r"other laps +\d+\.\d\d ms each: [\d,]+ hops per second", out)
    assert "the token   [200, 200, 200] after 200 laps" in out
    for figure in ("empty call", "echo of 64 bytes", "echo of 1 MiB", "echo of 16 MiB"):
        assert re.search(rf"{figure} +\d+(\.\d)? (µs|ms)", out), figure
    assert "To try next:" in out


def test_ring_refuses_no_workers() -> None:
    done = run_ring("0")
    assert done.returncode == 2
    assert "a ring has one worker or more" in done.stderr


def test_ctrl_c_ends_the_ring_and_its_workers() -> None:
    # A process started where Ctrl-C is ignored (in the background of a shell) would ignore it too.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ring = subprocess.Popen(
            [sys.executable, str(RING), "3", "--no-torch"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    with ring:
        try:
            assert ring.stdout is not None
            path = next(line for line in ring.stdout if line.startswith("processes"))
            ring.send_signal(signal.SIGINT)
            _, complaints = ring.communicate(timeout=PATIENCE)
        finally:
            ring.kill()
    assert complaints == "\nstopped; no process is left behind\n"
    assert ring.returncode == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in re.findall(r"\d+", path))
