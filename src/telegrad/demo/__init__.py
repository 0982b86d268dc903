"""The demo: a transformer over four processes, trained for a minute, and a page that shows what happened.

    model.py, training.py  what a program with telegrad looks like; begin here
    text.py                what the model reads
    check.py               the gradients, beside those of one process
    story.py               all of it, from start to end; interrupts.py, progress.py: while it goes on
    sights.py, accounts.py, pictures.py, report.py, page.html  what is shown of it

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
    from .story import tell

    return tell(steps=steps, seconds=seconds, out=out, seed=seed, open_report=open_report)
