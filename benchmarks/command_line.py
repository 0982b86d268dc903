"""The command line: which suites, which part of them, how often."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from benchmarks.backends import TELEGRAD, TORCH
from benchmarks.busy import busy_loops
from benchmarks.figures import Suite
from benchmarks.machine import Machine
from benchmarks.report import print_report, write_report
from benchmarks.runner import Plan, run_suite

BACKENDS = {"telegrad": (TELEGRAD,), "torch": (TORCH,), "both": (TELEGRAD, TORCH)}
RESULTS = Path(__file__).parent / "results"
FULL_ROUNDS = 3
SUITES = ("calls", "gradients", "training", "steps")


@dataclass(frozen=True)
class Wanted:
    suites: tuple[Suite, ...]
    plan: Plan
    directory: Path
    partial: bool
    """Less than whole suites, in three rounds, on both sides: nothing to be quoted."""


def main(arguments: list[str] | None = None) -> int:
    """Run suites, print and write what came of each. 0: every task gave a result (goals do not count)."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        wanted = _parse(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with busy_loops(wanted.plan.busy):
        return max(_run(suite, wanted) for suite in wanted.suites)


def _run(suite: Suite, wanted: Wanted) -> int:
    results = run_suite(suite, wanted.plan)
    machine = Machine.here()
    print_report(suite, results, machine)
    written = write_report(suite, wanted.plan, results, machine, directory=wanted.directory, partial=wanted.partial)
    print("written: " + ", ".join(os.path.relpath(path) for path in written))
    return 1 if results.failures else 0


def _parse(arguments: list[str] | None) -> Wanted:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="telegrad beside torch.distributed.rpc and autograd"
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        default=SUITES,
        help=f"modules of benchmarks/ with a SUITE ({' '.join(SUITES)})",
    )
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="rounds (3; 1 with --quick)")
    parser.add_argument("--only", default="", metavar="NAME[,NAME]", help="only these figures, growths and sections")
    parser.add_argument("--quick", action="store_true", help="few samples: a smoke test")
    parser.add_argument("--backend", choices=BACKENDS, default="both")
    parser.add_argument("--pinned", action="store_true", help="each worker on a core of its own (rank modulo cores)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="N busy loops beside the whole run")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for one job (300)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the results file goes")
    chosen = parser.parse_args(arguments)
    suites = tuple(_suite(name) for name in chosen.suites)
    rounds = chosen.rounds or (1 if chosen.quick else FULL_ROUNDS)
    plan = Plan(BACKENDS[chosen.backend], rounds=rounds, quick=chosen.quick, limit_s=chosen.limit)
    plan = replace(plan, pinned=chosen.pinned, busy=chosen.busy)
    if chosen.busy < 0:
        raise ValueError(f"--busy {chosen.busy}: a number of processes was expected, 0 for none")
    partial = bool(chosen.only) or chosen.quick or chosen.backend != "both" or rounds < FULL_ROUNDS
    if chosen.only:
        suites = _only(frozenset(chosen.only.split(",")), suites)
    if chosen.pinned:
        suites = tuple(suite.pinned() for suite in suites)
    return Wanted(suites, plan, chosen.out, partial)


def _only(names: frozenset[str], suites: tuple[Suite, ...]) -> tuple[Suite, ...]:
    """The parts of the suites with these names; a suite that has none of them is left out."""
    known = {suite.name: sorted(suite.names) for suite in suites}
    if unknown := names.difference(*known.values()):
        raise ValueError(f"there is no {sorted(unknown)}; there are {known}")
    return tuple(suite.only(names) for suite in suites if names & suite.names)


def _suite(name: str) -> Suite:
    try:
        return import_module(f"benchmarks.{name}").SUITE  # type: ignore[no-any-return]
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"no suite {name!r}: benchmarks/{name}.py with a SUITE was expected ({error})") from error


def _stop(signum: int, frame: object) -> None:
    """SIGTERM ends the run as Ctrl-C does, by an exception, so that the processes of the job are ended too."""
    raise SystemExit(128 + signum)
