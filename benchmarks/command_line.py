"""The command line: which suite, which part of it, how often."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.backends import TELEGRAD, TORCH
from benchmarks.figures import Suite
from benchmarks.machine import Machine
from benchmarks.report import print_report, write_report
from benchmarks.runner import Plan, run_suite

BACKENDS = {"telegrad": (TELEGRAD,), "torch": (TORCH,), "both": (TELEGRAD, TORCH)}
RESULTS = Path(__file__).parent / "results"
FULL_ROUNDS = 3


@dataclass(frozen=True)
class Wanted:
    suite: Suite
    plan: Plan
    directory: Path
    partial: bool
    """Less than the whole suite, in three rounds, on both sides: nothing to be quoted."""


def main(arguments: list[str] | None = None) -> int:
    """Run a suite, print and write what came of it. 0: every task gave a result (goals do not count)."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        wanted = _parse(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results = run_suite(wanted.suite, wanted.plan)
    machine = Machine.here()
    print_report(wanted.suite, results, machine)
    written = write_report(
        wanted.suite, wanted.plan, results, machine, directory=wanted.directory, partial=wanted.partial
    )
    print("written: " + ", ".join(os.path.relpath(path) for path in written))
    return 1 if results.failures else 0


def _parse(arguments: list[str] | None) -> Wanted:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="telegrad beside torch.distributed.rpc"
    )
    parser.add_argument(
        "suite", nargs="?", default="calls", help="a module of benchmarks/ with a SUITE (calls)"
    )
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="rounds (3; 1 with --quick)")
    parser.add_argument("--only", default="", metavar="NAME[,NAME]", help="only these figures and sections")
    parser.add_argument("--quick", action="store_true", help="few samples: a smoke test")
    parser.add_argument("--backend", choices=BACKENDS, default="both")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for one job (300)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="where the results file goes"
    )
    chosen = parser.parse_args(arguments)
    suite: Suite = _suite(chosen.suite)
    rounds = chosen.rounds or (1 if chosen.quick else FULL_ROUNDS)
    plan = Plan(BACKENDS[chosen.backend], rounds=rounds, quick=chosen.quick, limit_s=chosen.limit)
    partial = bool(chosen.only) or chosen.quick or chosen.backend != "both" or rounds < FULL_ROUNDS
    if chosen.only:
        suite = suite.only(frozenset(chosen.only.split(",")))
    return Wanted(suite, plan, chosen.out, partial)


def _suite(name: str) -> Suite:
    try:
        return import_module(f"benchmarks.{name}").SUITE  # type: ignore[no-any-return]
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"no suite {name!r}: benchmarks/{name}.py with a SUITE was expected ({error})"
        ) from error


def _stop(signum: int, frame: object) -> None:
    """SIGTERM ends the run as Ctrl-C does, by an exception, so that the processes of the job are ended too."""
    raise SystemExit(128 + signum)
