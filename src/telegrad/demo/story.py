"""The demo from start to end: workers, training, check, pictures, report."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import textwrap
import webbrowser
from pathlib import Path

import torch
from rich.console import Console

from ..cluster.forkserver import ForkServer
from ..cluster.local import LocalCluster
from ..primitives import clock
from . import interrupts, pictures, sights
from .accounts import Account, accounts
from .check import LIMIT, Difference, differences, in_words
from .model import WORKERS, Transformer
from .progress import Gauge, Meter
from .report import Results, write_report
from .text import encode, standard_library
from .training import Training, write_on

PROMPT = "    def "
WRITTEN = 60, 200  # characters before the training, and after it
FILES = {
    "report.html": "all of it on one page, to open in a browser and to pass on",
    "loss.png": "how the loss fell",
    "trace.json": "the timeline of all workers, for ui.perfetto.dev",
    "step.png": "one step of it as a picture",
    "graph.svg": "the autograd graph of one step, over all workers",
}


def tell(*, steps: int | None, seconds: float, out: str | os.PathLike[str], seed: int, open_report: bool) -> int:
    """What main() does."""
    console = Console(highlight=False)
    complaints = Console(highlight=False, stderr=True)
    if steps is not None and steps < 1:
        complaints.print(f"error: steps is {steps}; at least one is needed")
        return 2
    if steps is None and not 0 < seconds < math.inf:
        complaints.print(f"error: seconds is {seconds}; choose how long to train, such as 60")
        return 2
    folder = Path(out)
    try:
        _prepare(folder)
    except OSError as error:
        complaints.print(f"error: the folder for the files cannot be used: {error}", markup=False, soft_wrap=True)
        return 2

    def work(server: ForkServer) -> int:
        results = _train_and_look(server, console, folder, steps=steps, seconds=seconds, seed=seed)
        write_report(results, folder / "report.html")
        _say_what_next(console, folder)
        if open_report:
            webbrowser.open((folder / "report.html").resolve().as_uri())
        if not all(difference.is_small for difference in results.differences):
            complaints.print(f"error: the gradients differ by more than {LIMIT:g}; the report says where")
            return 1
        return 0

    return interrupts.run(work, complaints)


def _train_and_look(
    server: ForkServer, console: Console, folder: Path, *, steps: int | None, seconds: float, seed: int
) -> Results:
    torch.set_num_threads(1)  # as the workers do: they share the cores
    began = clock.now()
    console.print("A transformer learns to write Python, on four workers: this process and three more.", soft_wrap=True)
    with contextlib.ExitStack() as running:
        with console.status("starting the workers"):
            text = encode(standard_library())
            cluster = running.enter_context(LocalCluster(WORKERS, server=server))
        processes = ", ".join(f"{name} {pid}" for name, pid in cluster.pids.items())
        console.print(f"started    {processes} in {clock.now() - began:.1f} s", soft_wrap=True)
        with console.status("placing the model"):
            torch.manual_seed(seed)
            model = Transformer()
            training = Training(model, text)
            untrained = write_on(model, PROMPT, WRITTEN[0])
        console.print(f"it writes  {untrained[:60]!r}", markup=False, soft_wrap=True)
        losses, worked = _train(training, cluster, console, steps=steps, seconds=seconds)
        with console.status("looking at what came of it"):
            trained = write_on(model, PROMPT, WRITTEN[1])
            shown = textwrap.indent(trained, "  | ", lambda line: True)
            console.print("now it writes:")
            console.print(shown, style="cyan", markup=False, soft_wrap=True)
            found = differences(model, training.batch())
            _say_check(console, found)
            timeline = sights.profile(training, folder)
            per_step = timeline.summary.length / timeline.summary.steps / 1000
            console.print(f"profiled   {timeline.summary.steps} steps on all workers, {per_step:.0f} ms each")
            graph = sights.draw_graph(training, folder)
    figure = pictures.plot_loss(losses)
    pictures.save_png(figure, folder / "loss.png")
    return Results(
        losses=losses,
        prompt=PROMPT,
        untrained=untrained,
        trained=trained,
        loss_picture=pictures.inline_svg(figure),
        accounts=worked,
        differences=found,
        timeline=timeline,
        graph=graph,
    )


def _train(
    training: Training, cluster: LocalCluster, console: Console, *, steps: int | None, seconds: float
) -> tuple[list[tuple[float, float]], list[Account]]:
    """The loss of each step with the time of it, and what each worker did meanwhile."""
    losses = []
    before = accounts(cluster)
    with Meter(cluster) as meter, Gauge(console, meter, steps=steps, seconds=seconds) as gauge:
        while not gauge.is_over:
            loss = training.step()
            losses.append((gauge.elapsed, loss))
            gauge.on_step(loss)
    worked = [now.since(then) for now, then in zip(accounts(cluster), before, strict=True)]
    values = [loss for _, loss in losses]
    console.print(
        f"trained    {len(losses):,} steps in {losses[-1][0]:.0f} s: the loss was {values[0]:.2f}, and is "
        f"{pictures.smoothed(values)[-1]:.2f} now",
        soft_wrap=True,
    )
    return losses, worked


def _say_check(console: Console, found: list[Difference]) -> None:
    largest = max(found, key=lambda difference: difference.largest)
    console.print(
        f"checked    one step's gradients of {sum(d.elements for d in found):,} parameters, on four workers and in one "
        f"process: they differ by {in_words(largest.largest)} at most (float64)",
        soft_wrap=True,
    )


def _say_what_next(console: Console, folder: Path) -> None:
    console.print(f"\nThe files are in {folder}:", soft_wrap=True, markup=False)
    for name, what in FILES.items():
        if (folder / name).exists():
            console.print(f"  {name:12} {what}", soft_wrap=True)
    console.print("\nTo try next:")
    for command, what in _ideas(folder).items():
        console.print(f"  {command}", style="bold", markup=False, soft_wrap=True)
        console.print(f"      {what}", soft_wrap=True)


def _ideas(folder: Path) -> dict[str, str]:
    found = shutil.which("telegrad")
    program = "telegrad" if found else _from_here(Path(sys.executable).with_name("telegrad"))
    return {
        f"{program} trace {folder / 'trace.json'}": "where the time of a step went, in the terminal",
        f"{program} demo --seconds 300": "a longer training, after which it writes better Python",
        _from_here(Path(__file__).with_name("model.py")): "the model that you have just trained; begin here",
        "README.md": "programs of 20 lines to start from, and more examples",
    }


def _from_here(path: Path) -> str:
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


def _prepare(folder: Path) -> None:
    """Makes the folder, and takes away what an earlier run has left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")
