"""The demo from start to end: workers, training, check, pictures, report."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import textwrap
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from ..cluster.local import LocalCluster
from ..errors import TelegradError
from ..primitives import clock
from .check import LIMIT, differences, in_words
from .model import WORKERS, Transformer
from .pictures import draw_graph, draw_timeline, plot_loss, smoothed
from .progress import Progress
from .report import Results, write_report
from .text import encode, standard_library
from .training import Training, write_on
from .usage import Usage, all_usages

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
REPEATS = 1.0  # seconds in which further Ctrl-C are the same one
PROMPT = "    def "
WRITTEN = 60, 200  # characters before the training, and after it
FILES = {
    "report.html": "all of it on one page, to open in a browser and to pass on",
    "loss.png": "how the loss fell",
    "trace.json": "the timeline of all workers, for ui.perfetto.dev",
    "step.png": "one step of it as a picture",
    "graph.svg": "the autograd graph of one step, over all workers",
}


def run_demo(steps: int | None, seconds: float, out: str, seed: int, open_report: bool) -> int:
    """Does what main() says."""
    console, complaints = Console(highlight=False), Console(highlight=False, stderr=True)
    folder = Path(out)
    try:
        _check(steps, seconds)
        _prepare(folder)
    except (ValueError, OSError) as error:
        _say(complaints, f"error: {error}")
        return 2
    try:
        with _interrupts():
            results = _train_and_look(console, folder, steps, seconds, seed)
            write_report(results, folder / "report.html")
    except KeyboardInterrupt:
        console.show_cursor(True)
        _say(complaints, "stopped; no process is left behind")
        return INTERRUPTED
    except (TelegradError, OSError) as error:
        _say(complaints, f"error: {error}", style="red")
        return 1
    _say_what_next(console, folder)
    if open_report:
        webbrowser.open((folder / "report.html").resolve().as_uri())
    if not all(difference.is_small for difference in results.differences):
        _say(complaints, f"error: the gradients differ by more than {LIMIT:g}; the report says where")
        return 1
    return 0


def _check(steps: int | None, seconds: float) -> None:
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}; at least one is needed")
    if steps is None and not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}; choose how long to train, such as 60")


def _prepare(folder: Path) -> None:
    """Makes the folder, and removes what an earlier run has left there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        raise OSError(f"the folder for the files cannot be used: {error}") from error


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Lets one Ctrl-C raise KeyboardInterrupt, and not those that follow while the workers are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -REPEATS

    def interrupt(*_: object) -> None:
        nonlocal last
        if clock.now() - last >= REPEATS:
            last = clock.now()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train_and_look(console: Console, folder: Path, steps: int | None, seconds: float, seed: int) -> Results:
    torch.set_num_threads(1)  # as the workers do: they share the cores
    torch.manual_seed(seed)
    began = clock.now()
    _say(console, "A transformer learns to write Python, on four workers: this process and three more.")
    text = encode(standard_library())
    with LocalCluster(WORKERS) as cluster:
        processes = ", ".join(f"{name} {pid}" for name, pid in cluster.pids.items())
        _say(console, f"started    {processes} in {clock.now() - began:.1f} s")
        model = Transformer()
        training = Training(model, text)
        untrained = write_on(model, PROMPT, WRITTEN[0])
        _say(console, f"it writes  {untrained[:60]!r}")
        losses, usages = _train(training, cluster, console, steps, seconds)
        with console.status("looking at what came of it"):
            trained = write_on(model, PROMPT, WRITTEN[1])
            _say(console, "now it writes:")
            _say(console, textwrap.indent(trained, "  | ", lambda line: True), style="cyan")
            found = differences(model, training.batch())
            worst = max(found, key=lambda difference: difference.largest)
            compared = (
                f"one step's gradients of {sum(d.elements for d in found):,} parameters, on four workers and in one"
            )
            _say(console, f"checked    {compared} process: they differ by {in_words(worst.largest)} at most (float64)")
            timeline = draw_timeline(training, folder)
            summary = timeline.summary
            per_step = summary.length / summary.steps / 1000
            _say(console, f"profiled   {summary.steps} steps on all workers, {per_step:.0f} ms each")
            graph = draw_graph(training, folder)
    return Results(
        losses=losses,
        loss_picture=plot_loss(losses, folder / "loss.png"),
        prompt=PROMPT,
        untrained=untrained,
        trained=trained,
        usages=usages,
        differences=found,
        timeline=timeline,
        graph=graph,
    )


def _train(
    training: Training, cluster: LocalCluster, console: Console, steps: int | None, seconds: float
) -> tuple[list[tuple[float, float]], list[Usage]]:
    """Returns the time and loss of each step, and what each worker used meanwhile."""
    losses = []
    before = all_usages(cluster)
    with Progress(console, cluster, steps=steps, seconds=seconds) as progress:
        while progress.part_done < 1.0:
            loss = training.step()
            losses.append((progress.elapsed, loss))
            progress.on_step(loss)
    usages = [now.since(then) for now, then in zip(all_usages(cluster), before, strict=True)]
    values = [loss for _, loss in losses]
    fell = f"the loss was {values[0]:.2f}, and is {smoothed(values)[-1]:.2f} now"
    _say(console, f"trained    {len(losses):,} steps in {losses[-1][0]:.0f} s: {fell}")
    return losses, usages


def _say_what_next(console: Console, folder: Path) -> None:
    program = "telegrad" if shutil.which("telegrad") else _from_here(Path(sys.executable).with_name("telegrad"))
    ideas = {
        f"{program} trace {folder / 'trace.json'}": "where the time of a step went, in the terminal",
        f"{program} demo --seconds 300": "a longer training, after which it writes better Python",
        _from_here(Path(__file__).with_name("model.py")): "the model that you have just trained; begin here",
        "README.md": "programs of 20 lines to start from, and more examples",
    }
    _say(console, f"\nThe files are in {folder}:")
    for name, what in FILES.items():
        if (folder / name).exists():
            _say(console, f"  {name:12} {what}")
    _say(console, "\nTo try next:")
    for command, what in ideas.items():
        _say(console, f"  {command}", style="bold")
        _say(console, f"      {what}")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)


def _from_here(path: Path) -> str:
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short
