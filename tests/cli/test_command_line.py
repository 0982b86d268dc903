"""The command line as a whole: its help, its version, its errors, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from telegrad import demo
from telegrad.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("run", "top", "doctor", "trace", "bench", "demo")


def test_the_entry_point_is_there():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["telegrad"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_all_commands_are_listed():
    result = CliRunner().invoke(app, [])
    assert all(f" {name} " in result.output for name in COMMANDS)
    assert "Exit codes: 0 fine" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert f"telegrad {command}" in result.output.partition("Examples")[2]
    assert "Exit code: 0" in result.output
    assert "\x1b" not in result.output


def test_version():
    from importlib.metadata import version

    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"telegrad {version('telegrad')}\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["top"], ["run", "--nonsense", "x"], ["demo", "--steps", "0"]])
def test_wrong_usage_has_no_traceback(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "Try 'telegrad" in result.output or "Usage" in result.output


def test_the_demo_gets_its_options(monkeypatch):
    seen: list[dict] = []
    monkeypatch.setattr(demo, "main", lambda **options: seen.append(options) or 7)
    result = CliRunner().invoke(app, ["demo", "--steps", "5", "--out", "here", "--seed", "3", "--open"])
    assert result.exit_code == 7
    assert seen == [{"steps": 5, "seconds": 60.0, "out": "here", "seed": 3, "open_report": True}]


# What importing the package, or asking for help, must not import. Each takes seconds or is for few.
LAZY = """
import sys
import telegrad
heavy = {"torch", "typer", "rich", "matplotlib", "graphviz"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
HELP = """
import sys
from telegrad.cli import main
sys.argv = ["telegrad", "top", "--help"]
try:
    main()
finally:
    assert not {"torch", "matplotlib", "graphviz"} & set(sys.modules)
"""


@pytest.mark.parametrize("program", [LAZY, HELP])
def test_imports_are_lazy(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m_is_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("telegrad ")
