"""The demo: a transformer over four processes, trained for a minute, and a page that shows what happened.

    model.py, training.py   a program with telegrad; begin here
    text.py                 what the model reads
    run.py                  the demo from start to end (progress.py: the live figures)
    check.py                one step's gradients, beside those of one process
    usage.py, pictures.py   calls and bytes of each worker; loss, timeline and graph
    report.py, page.html    the page

Workers import this package too, for the model: what only the driver needs is imported when it is needed.
"""

from __future__ import annotations

import os

__all__ = ["main"]


def main(
    *,
    steps: int | None = None,
    seconds: float = 60.0,
    out: str | os.PathLike[str] = "telegrad-demo",
    seed: int = 0,
    open_report: bool = False,
) -> int:
    """Runs the demo and prints what happens. Returns an exit code.

    Args:
        steps: how many steps of training, however long they take; without it as many as there is time for.
        seconds: how long the training goes on.
        out: the folder for the report and the other files.
        seed: of all random numbers.
        open_report: shows the report in a browser at the end.

    Returns:
        0: all is well. 1: something failed, or the gradients differ by more than 1e-10. 2: an argument is not what is
        needed. 130: Ctrl-C. No process is left in any case.
    """
    from .run import run_demo

    return run_demo(steps, seconds, os.fspath(out), seed, open_report)
