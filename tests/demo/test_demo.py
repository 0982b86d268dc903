"""The demo as a user runs it: to its end, interrupted at any moment, and where things go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from demo_page import Page
from demo_runs import ROOT, Run

import telegrad.demo
from telegrad import profiler

Start = Callable[..., Run]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]\d+)?)"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts runs; ends what is left of them."""
    with contextlib.ExitStack() as runs:

        def started(*arguments: str, **options: object) -> Run:
            run = Run(*arguments, **options)
            runs.callback(run.close)
            return run

        yield started


# -- to its end ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with few steps; `said` is what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    run = Run("--steps", "40", "--out", str(folder))
    try:
        assert run.end() == 0, run.said
    finally:
        run.close()
    (folder / "said").write_text(run.said, encoding="utf-8")
    return folder


def test_it_says_what_happens_in_plain_lines(out: Path) -> None:
    said = (out / "said").read_text(encoding="utf-8")
    assert "\x1b" not in said, "colours where there is no terminal"
    assert re.search(r"started +stage1 \d+, stage2 \d+, server \d+ in \d+\.\d s\n", said)
    assert re.search(r"step 40  loss \S+  \S+ steps/s  \S+ [kM]?B/s  \d+ calls/s\n", said)
    assert said.count("  step 40  ") == 1, "a line is said twice"
    found = re.search(rf"40 steps in \d+ s: the loss was {NUMBER}, and is {NUMBER} now\n", said)
    assert found, said
    first, last = map(float, found.groups())
    assert last < 0.75 * first, "the loss did not fall"
    assert "To try next:" in said


def test_the_gradients_are_those_of_one_process(out: Path) -> None:
    said = (out / "said").read_text(encoding="utf-8")
    found = re.search(rf"they differ by {NUMBER} at most \(float64\)\n", said)
    assert found, said
    assert float(found[1]) <= 1e-10


def test_it_leaves_the_files_that_it_names(out: Path) -> None:
    said = (out / "said").read_text(encoding="utf-8")
    named = re.search(rf"The files are in {re.escape(str(out))}:\n((?:  .+\n)+)", said)
    assert named, said
    names = {line.split()[0] for line in named[1].splitlines()}
    assert names == {"report.html", "loss.png", "trace.json", "step.png", "graph.svg"}
    for name in names:
        head = (out / name).read_bytes()[:8]
        assert head.startswith(b"\x89PNG") == name.endswith(".png")
    assert ElementTree.parse(out / "graph.svg").getroot().tag.endswith("svg")
    assert json.loads((out / "trace.json").read_text(encoding="utf-8"))
    trace = profiler.load(out / "trace.json")
    assert set(trace.workers) >= {"driver", "stage1", "stage2", "server"}


def test_the_report_is_one_page_with_everything_in_it(out: Path) -> None:
    page = Page.read(out / "report.html")
    assert page.unclosed == []
    assert page.loaded_from_elsewhere() == []
    assert page.headings == [
        "It learns", "What it writes", "Who did what", "One step, on all workers", "The graph behind it",
        "The gradients are those of one process", "The program",
    ]  # fmt: skip
    assert page.sections_without_content() == []
    for worker in ("driver", "stage1", "stage2", "server"):
        assert worker in page.text
    assert "loss.backward()" in page.text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine, to open the report with")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_opens_the_report(out: Path, tmp_path: Path, width: int) -> None:
    """Without the network, without complaints, and without a part that is wider than the window."""
    assert CHROMIUM is not None
    probe = "<script>document.title = `is ${document.documentElement.scrollWidth} in ${innerWidth}`</script>"
    page = tmp_path / "page.html"
    page.write_text((out / "report.html").read_text(encoding="utf-8") + probe, encoding="utf-8")
    opened = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},900", "--enable-logging=stderr",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert opened.returncode == 0, opened.stderr
    assert not re.findall(r".*CONSOLE.*", opened.stderr)
    found = re.search(r"<title>is (\d+) in (\d+)</title>", opened.stdout)
    assert found, opened.stdout[:2000]
    assert int(found[1]) <= int(found[2])


# -- Ctrl-C ----------------------------------------------------------------------------------------------------


def imports_torch(run: Run) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{run.process.pid}/maps").read_text()
    return False


MOMENTS = {
    "start": "A transformer",
    "report": "checked",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_everything(start: Start, tmp_path: Path, moment: str) -> None:
    steps = "1" if moment == "report" else "100000"
    run = start("--steps", steps, "--out", str(tmp_path))
    run.wait_until(lambda run: MOMENTS[moment] in run.said)
    run.press_ctrl_c()
    run.press_ctrl_c()
    assert run.end() == 130, run.said
    assert "Traceback" not in run.said and "error" not in run.said, run.said
    assert run.said.endswith("stopped; no process is left behind\n")


def test_ctrl_c_while_torch_is_imported(start: Start, tmp_path: Path) -> None:
    run = start("--out", str(tmp_path))
    while not imports_torch(run):
        assert run.process.poll() is None
    run.press_ctrl_c()
    assert run.end() == 130
    assert "Traceback" not in run.said


def test_a_narrow_terminal_shows_a_bar_and_gets_its_cursor_back(start: Start, tmp_path: Path) -> None:
    run = start("--steps", "100000", "--out", str(tmp_path), columns=40)
    run.wait_until(lambda run: re.search(r"loss \d", run.said) is not None)
    run.press_ctrl_c()
    assert run.end() == 130
    assert "training" in run.said and "━" in run.said
    assert run.said.rindex("\x1b[?25h") > run.said.rindex("\x1b[?25l"), "the cursor is still hidden"
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", run.said)
    assert all(len(line) <= 40 for line in re.split(r"[\r\n]+", drawn) if "━" in line or "loss" in line)


# -- what goes wrong -------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_named(start: Start, tmp_path: Path) -> None:
    run = start("--steps", "100000", "--out", str(tmp_path))
    run.wait_until(lambda run: "it writes" in run.said)
    found = re.search(r"stage2 (\d+)", run.said)
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    assert run.end() == 1
    assert "Traceback" not in run.said, run.said
    assert re.search(r"error: .*'stage2'.*gone", run.said), run.said


WRONG = """
import sys

sys.modules["pygraphviz"] = None

from torch.nn.modules.module import register_module_full_backward_hook

from telegrad.demo import main
from telegrad.demo.model import Stage


def spoil(module, inputs, outputs):
    # Of the stages, only those of the model in one process are called here.
    if isinstance(module, Stage):
        return inputs[0] * 1.000001, *inputs[1:]


register_module_full_backward_hook(spoil)
sys.exit(main(steps=2, out=sys.argv[1]))
"""


def test_wrong_gradients_fail_and_the_rest_is_written_without_pygraphviz(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG, encoding="utf-8")
    run = start(str(tmp_path / "out"), command=(sys.executable, str(script)))
    assert run.end() == 1, run.said
    assert "error: the gradients differ by more than 1e-10" in run.said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html", "loss.png", "trace.json", "step.png",
    }  # fmt: skip
    page = Page.read(tmp_path / "out" / "report.html")
    assert "Some gradients differ by more than 1e-10." in page.text
    assert "pygraphviz" in page.text and "worker 'stage1'" in page.text, "no outline in place of the picture"
    assert page.sections_without_content() == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--steps", "0"), "steps is 0; at least one is needed"),
        (("--seconds", "nan"), "seconds is nan; choose how long to train"),
        (("--out", str(ROOT / "README.md")), "the folder for the files cannot be used"),
    ],
)
def test_bad_arguments(arguments: tuple[str, str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, value = arguments[0].removeprefix("--"), arguments[1]
    given = {name: int(value) if name == "steps" else float(value) if name == "seconds" else value}
    assert telegrad.demo.main(**given) == 2
    assert complaint in capsys.readouterr().err
