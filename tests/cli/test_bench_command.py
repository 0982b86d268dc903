"""`telegrad bench`: calls and a pass, beside torch's."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from telegrad.cli import bench
from telegrad.cli.app import app
from telegrad.cli.bench import FIGURES


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure from two calls: what is printed matters here, not what it says."""
    monkeypatch.setattr(bench, "FIGURES", tuple(figure._replace(calls=2, warmup=1) for figure in FIGURES))
    monkeypatch.setattr(bench, "ROUNDS", 1)


# In a process of its own, since a process that spawns others is left with a tracker of them.
FEW = """
if __name__ == "__main__":
    from telegrad.cli import bench, main
    bench.FIGURES = tuple(figure._replace(calls=2, warmup=1) for figure in bench.FIGURES)
    bench.ROUNDS = 1
    main()
"""


def test_the_comparison_with_torch(tmp_path):
    script = tmp_path / "few.py"
    script.write_text(FEW)
    folder = tmp_path / "elsewhere"  # no process imports anything from the current directory
    folder.mkdir()
    (folder / "multiprocessing.py").write_text("raise SystemExit(9)")
    command = [sys.executable, str(script), "bench", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for title in ("empty call", "echo of 64 bytes", "echo of 1 MiB", "call and backward"):
        figure = r"[\d.]+ (?:µs|ms|s)"
        assert re.search(rf"^{title} +{figure} +{figure} +[\d.]+$", done.stdout, re.M), done.stdout


def test_telegrad_alone_as_json(few):
    result = CliRunner().invoke(app, ["bench", "--no-torch", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)["figures"]
    assert [figure["call"] for figure in figures] == [figure.title for figure in FIGURES]
    assert all(0 < figure["telegrad_seconds"] < 10 and figure["torch_seconds"] is None for figure in figures)


def test_torch_that_does_not_answer(monkeypatch):
    class Silent:
        def get(self, timeout):
            raise multiprocessing.TimeoutError

    with pytest.raises(RuntimeError, match="torch.distributed.rpc did not answer within 120 s"):
        bench._answer(Silent())
