"""`telegrad bench`: the built-in comparison, and the way to the repository's benchmarks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from telegrad.cli import bench, comparison
from telegrad.cli.app import app
from telegrad.cli.comparison import FIGURES


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure from two calls: what is printed matters here, not what it says."""
    monkeypatch.setattr(comparison, "FIGURES", tuple(figure._replace(calls=2, warmup=1) for figure in FIGURES))
    monkeypatch.setattr(comparison, "ROUNDS", 1)


# In a process of its own, since processes that are spawned leave a tracker with whoever has spawned them.
FEW = """
if __name__ == "__main__":
    from telegrad.cli import comparison, main
    comparison.FIGURES = tuple(figure._replace(calls=2, warmup=1) for figure in comparison.FIGURES)
    comparison.ROUNDS = 1
    main()
"""


def test_the_comparison_with_torch(tmp_path):
    script = tmp_path / "few.py"
    script.write_text(FEW)
    command = [sys.executable, str(script), "bench", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
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


def test_arguments_are_for_the_repositorys_benchmarks():
    result = CliRunner().invoke(app, ["bench", "--short", "calls", "--quick"])
    assert result.exit_code == 2
    assert "'calls --quick' is for the repository's benchmarks" in result.stderr


def checkout(place: Path, text: str) -> Path:
    (place / "benchmarks").mkdir(parents=True)
    (place / "src" / "telegrad").mkdir(parents=True)
    (place / "benchmarks" / "__init__.py").write_text("")
    (place / "benchmarks" / "__main__.py").write_text(text)
    return place


def test_in_a_checkout_its_benchmarks_are_run(tmp_path, monkeypatch, capfd):
    checkout(tmp_path, "import sys; print(sys.argv[1:]); sys.exit(5)")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "calls", "--quick", "--only", "empty"])
    assert result.exit_code == 5
    assert capfd.readouterr().out == "['calls', '--quick', '--only', 'empty']\n"


def test_where_there_is_no_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "lib" / "telegrad" / "cli" / "bench.py"))
    assert bench._repository() is None
