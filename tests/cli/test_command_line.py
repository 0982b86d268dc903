"""The command line as a whole: its help, its version, its errors, and what it does not import."""

from __future__ import annotations

import re
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
heavy = {"torch", "typer", "rich", "matplotlib", "pygraphviz"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
HELP = """
import sys
from telegrad.cli import main
sys.argv = ["telegrad", "top", "--help"]
try:
    main()
finally:
    assert not {"torch", "matplotlib", "pygraphviz"} & set(sys.modules)
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


# -- without the extra `tools` -------------------------------------------------------------------------------

TOOLS = ("typer", "rich", "matplotlib", "pygments", "pygraphviz")
BARE = f"""
import sys
for name in {TOOLS}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
"""
LIBRARY = """
if __name__ == "__main__":
    import torch
    import telegrad, telegrad.compat
    from telegrad import autograd, nn, optim, profiler
    with telegrad.LocalCluster(["ps"]), profiler.profile() as profile, autograd.context() as context_id:
        layer = nn.RemoteModule("ps", torch.nn.Linear, (4, 1))
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)
        loss = layer(torch.ones(8, 4)).square().mean()
        graph = autograd.graph(context_id, [loss])
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    print(profile.summary(), graph, graph.dot(), graph._repr_html_())
    try:
        graph.svg()
    except telegrad.errors.DrawingError as error:
        assert "telegrad[tools]" in str(error)
    else:
        raise AssertionError("drawn without pygraphviz")
"""


def run_bare(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "bare.py"
    script.write_text(BARE + program)
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("command", [["--help"], *([name] for name in COMMANDS)], ids=lambda command: command[0])
def test_without_the_extra_a_command_names_it(tmp_path, command):
    done = run_bare(tmp_path, "from telegrad.cli import main\nmain()", *command)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"telegrad: .*pip install 'telegrad\[tools\]'\n", done.stderr), done.stderr


def test_a_command_that_lacks_one_package_names_it(tmp_path):
    program = "for name in ('typer', 'rich', 'pygments'): del sys.modules[name]\nfrom telegrad.cli import main\nmain()"
    done = run_bare(tmp_path, program, "demo", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.endswith("needs matplotlib, which is not installed: pip install 'telegrad[tools]'\n")
    assert len(done.stderr.splitlines()) == 1


def test_without_the_extra_all_that_is_no_tool_works(tmp_path):
    done = run_bare(tmp_path, LIBRARY)
    assert done.returncode == 0, done.stderr
    assert "worker 'ps'" in done.stdout


def test_the_core_needs_three_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split("[<>=]", line)[0] for line in project["dependencies"]}
    assert names == {"torch", "cloudpickle", "msgspec"}
    assert {re.split("[<>=]", line)[0] for line in project["optional-dependencies"]["tools"]} == set(TOOLS)
