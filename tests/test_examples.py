"""The examples run, print what they should, and end."""

from __future__ import annotations

import io
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import telegrad

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RING = EXAMPLES / "ring.py"
PATIENCE = 60.0
NUMBER = r"(\d+\.\d+)"

Run = Callable[..., str]


def run_alone(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_ring(transport: str) -> None:
    done = run_alone("ring.py", "3", "--transport", transport, "--no-torch")
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
    done = run_alone("ring.py", "0")
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


# -- the others: in this process, with workers from the warm fork server -------------------------------------


@pytest.fixture
def run(server: telegrad.ForkServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as `python examples/NAME ARGUMENTS` would; what it printed. It must have learned something."""

    def run_as_main(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(telegrad, "LocalCluster", partial(telegrad.LocalCluster, server=server))
        with torch.random.fork_rng():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed = capsys.readouterr()
        assert printed.err == ""
        assert "100%" in printed.out, "no progress was shown"
        return printed.out

    return run_as_main


def numbers(pattern: str, out: str) -> list[float]:
    found = re.search(pattern, out)
    assert found, out
    return [float(group) for group in found.groups()]


def test_training_loop(run: Run) -> None:
    out = run("training_loop.py", "--steps", "20")
    assert "(0): RemoteModule(Encoder, on='a', device='cpu')" in out
    assert "parameters after 20 steps: the same bits as in one process\n" in out


def test_parameter_server(run: Run) -> None:
    out = run("parameter_server.py", "--steps", "40")
    before, after = numbers(rf"loss on the whole wave: {NUMBER} before training, {NUMBER} after it\n", out)
    assert after < 0.7 * before
    assert all(f"trainer{number} " in out for number in range(3))


@pytest.fixture(scope="module")
def fonts() -> None:
    """matplotlib keeps the files of its fonts open: that is not a leak."""
    figure = Figure()
    figure.text(0, 0, "all fonts")
    figure.savefig(io.BytesIO(), format="png")


@pytest.mark.usefixtures("fonts")
def test_pipeline(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "overlap.png"
    out = run("pipeline.py", "--steps", "8", "--out", str(picture))
    first, last, alone = numbers(rf"loss: {NUMBER} at first, {NUMBER} at last; in one process: {NUMBER}\n", out)
    assert last < first
    assert last == pytest.approx(alone, abs=1e-3)
    (busy,) = numbers(rf"with {NUMBER} of 3 stages busy", out)
    assert busy > 1.0, "the stages took turns"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_gpu_pipeline(run: Run) -> None:
    out = run("gpu_pipeline.py", "--steps", "8")
    first, last, alone = numbers(rf"loss: {NUMBER} at first, {NUMBER} at last; in one process: {NUMBER}\n", out)
    assert last < first
    assert last == pytest.approx(alone, abs=1e-3)
    assert re.search(r"front on (cpu|cuda:\d), back on (cpu|cuda:\d); the data on", out)


def test_rnn(run: Run) -> None:
    out = run("rnn.py", "--steps", "30")
    first, last = numbers(rf"loss: {NUMBER} at first, {NUMBER} at last\n", out)
    assert last < 0.7 * first
    assert "it writes: she " in out


def test_experts(run: Run) -> None:
    out = run("experts.py", "--steps", "40")
    first, last = numbers(rf"loss: {NUMBER} at first, {NUMBER} at last\n", out)
    assert last < 0.8 * first
    passes = re.findall(r"expert on (?:left|right) +(\d+) times forward, (\d+) backward\n", out)
    assert len(passes) == 4, out
    assert sum(int(forward) - int(backward) for forward, backward in passes) <= 40
    assert all(int(backward) < int(forward) for forward, backward in passes), "a late answer was not left out"


def test_split_learning(run: Run) -> None:
    out = run("split_learning.py", "--steps", "250")
    before, after = numbers(r"diagnoses that are right: (\d+)% before training, (\d+)% after it\n", out)
    assert before < 60
    assert after >= 90
    kinds = set(re.findall(r"clinic [<>] lab +(\w+)", out))
    assert kinds <= {"call", "reply", "begin", "gradients", "done", "end", "forget"}, "something else has crossed"
    assert "clinic < lab  gradients" in out and "clinic > lab  gradients" not in out


def test_reinforce(run: Run) -> None:
    out = run("reinforce.py", "--steps", "40")
    before, after = numbers(r"balls caught: (\d+)% in the first round, (\d+)% in the last five\n", out)
    assert after >= before + 20


def test_maml(run: Run) -> None:
    out = run("maml.py", "--steps", "20")
    (difference,) = numbers(r"meta-gradients across workers and in one process differ by (\S+) at most\n", out)
    assert difference < 1e-5
    before, after = numbers(rf"{NUMBER} before meta-training, {NUMBER} after it\n", out)
    assert after < 0.8 * before


def test_examples_are_short_and_say_what_one_learns() -> None:
    for example in EXAMPLES.glob("*.py"):
        if example.name == "timeline.py":
            continue  # a part of pipeline.py
        text = example.read_text(encoding="utf-8")
        assert "What you learn here: " in text.split('"""')[1], example.name
        assert len(text.splitlines()) < 100, example.name
