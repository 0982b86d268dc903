"""`python -m telegrad.demo`, which is what scripts/demo runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from .interrupts import INTERRUPTED
from .story import tell


def run() -> int:
    # Before tell() looks after Ctrl-C itself, and when it has ended, there is nothing to tidy up.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    parser = argparse.ArgumentParser(
        prog="telegrad.demo", description="Trains a transformer over four processes, and shows what happened."
    )
    parser.add_argument("--steps", type=int, help="how many steps of training (default: as many as there is time for)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train (default: 60)")
    parser.add_argument("--out", default="telegrad-demo", help="folder for the files (default: telegrad-demo)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    parser.add_argument("--open", action="store_true", help="show the report in a browser at the end")
    options = parser.parse_args()
    return tell(
        steps=options.steps,
        seconds=options.seconds,
        out=options.out,
        seed=options.seed,
        open_report=options.open,
    )


if __name__ == "__main__":
    code = run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: nothing may change the exit code any more
    sys.exit(code)
