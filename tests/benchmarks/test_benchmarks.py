"""What the benchmarks do beside measuring: slopes, pinned processes, busy loops, the results file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.backends import TELEGRAD, TORCH
from benchmarks.command_line import main
from benchmarks.figures import ALONE, PAIR, Growth, Repeats, Samples, Section, Session, Setting, Suite
from benchmarks.growth_report import sections
from benchmarks.machine import Load, Machine
from benchmarks.report import write_report
from benchmarks.runner import FLOOR, Plan, Record, Results
from benchmarks.summary import Slope, growth_rows

ROOT = Path(__file__).resolve().parents[2]
FEW = Repeats(count=1, warmup=0)


def nothing(session: Session) -> Samples:
    return {}


LEAVES = Growth(
    name="leaves",
    title="backward",
    measure=nothing,
    local=nothing,
    repeats=FEW,
    unit="ms",
    of="leaves",
    base=1,
    goals={101: 0.5},
    slope_goal=2e-6,
)
QUIET = Load((0.0, 0.0, 0.0), 0.0)


def results(**of_sides: list[Samples]) -> Results:
    """Of the growth, for each side the samples of each round."""
    records = [
        Record(number, side, LEAVES.name, samples, None)
        for side, rounds in of_sides.items()
        for number, samples in enumerate(rounds, 1)
    ]
    return Results(tuple(records), (QUIET, QUIET))


# In ms: telegrad takes 1 more for 100 leaves than one process in the first round, and 3 more in the second.
MEASURED = results(
    telegrad=[{1: [0.001], 101: [0.004]}, {1: [0.001], 101: [0.006]}],
    torch=[{1: [0.002], 101: [0.006]}, {1: [0.002], 101: [0.006]}],
    **{FLOOR: [{1: [0.0], 101: [0.002]}, {1: [0.0], 101: [0.002]}]},
)


def test_slopes_are_taken_round_by_round():
    (row,) = growth_rows(MEASURED, (LEAVES,))
    slope = Slope.of(row.telegrad)
    assert slope.rounds == pytest.approx({1: 30e-6, 2: 50e-6})
    assert slope.beyond(Slope.of(row.local)).rounds == pytest.approx({1: 10e-6, 2: 30e-6})
    assert slope.median == pytest.approx(40e-6)
    assert Slope.of({}).median is None


def test_growth_is_reported_with_slopes_and_goals():
    text = "\n".join(sections(growth_rows(MEASURED, (LEAVES,)), picture=None))
    assert "| backward, of leaves |  40.0 µs | 20.0 µs |" in text
    assert "2.00 µs |  no |" in text
    (largest,) = [line for line in text.splitlines() if line.startswith("| 101 ")]
    assert largest.split("|")[-5:-1] == [" 0.833 ", "  0.67 1.00 ", " 0.50 ", "  no "]


def test_one_side_alone_is_reported():
    (row,) = growth_rows(results(torch=[{1: [0.002], 101: [0.006]}]), (LEAVES,))
    assert Slope.of(row.telegrad).beyond(Slope.of(row.local)).median is None
    text = "\n".join(sections([row], picture=None))
    (line,) = [line for line in text.splitlines() if line.startswith("| backward, of leaves |")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [*"–––", "40.0 µs", *"–––", "2.00 µs", "–"]


def test_a_suite_is_pinned_but_for_what_runs_alone():
    def section(name: str, setting: Setting) -> Section:
        return Section(name=name, title="", measure=nothing, render=str, repeats=FEW, setting=setting)

    suite = Suite(
        name="s", title="", figures=(), growths=(LEAVES,), sections=(section("a", PAIR), section("b", ALONE))
    ).pinned()
    assert suite.growths[0].setting == Setting(pinned=True)
    assert [one.setting.pinned for one in suite.sections] == [True, False]
    assert str(suite.growths[0].setting).endswith("pinned")


def test_the_results_file_says_what_ran_beside(tmp_path: Path):
    suite = Suite(name="none", title="None", figures=())
    plan = Plan((TELEGRAD, TORCH), pinned=True, busy=4)
    (written,) = write_report(suite, plan, results(), Machine.here(), directory=tmp_path, partial=False)
    assert written.name.startswith("none-pinned-beside-4-busy-loops_")
    text = written.read_text(encoding="utf-8")
    assert "With 4 busy loops beside the whole run" in text
    assert "pinned to one core" in text
    (written,) = write_report(suite, Plan(()), results(), Machine.here(), directory=tmp_path, partial=True)
    assert written.name.startswith("none-partial_")
    assert "busy loop" not in written.read_text(encoding="utf-8")


def test_a_number_of_busy_loops_is_needed(capsys: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["steps", "--busy", "-1"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "--busy -1" in capsys.readouterr().err


# In processes of their own, since a process that spawns others is left with a tracker of them.

LOOPS = """
if __name__ == "__main__":
    import sys
    from benchmarks.busy import busy_loops
    with busy_loops(2) as pids:
        print(*pids, flush=True)
        sys.stdin.read()
"""

PINNED = """
import json, os, sys
from benchmarks.backends import TELEGRAD
from benchmarks.figures import Repeats, Setting, Task
from benchmarks.processes import Job, run

def cores():
    return sorted(os.sched_getaffinity(0))

def measure(session):
    return [cores(), *(session.backend.rpc.rpc_sync(peer, cores) for peer in session.peers)]

if __name__ == "__main__":
    task = Task(name="cores", title="", measure=measure, repeats=Repeats(1, 0))
    (outcome,) = run(Job(TELEGRAD, Setting(workers=3, pinned=True), (task,), quick=True), 60)
    print(json.dumps([outcome.value, outcome.error]))
"""


def started(text: str, folder: Path) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(text)
    known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True, env=known)


@pytest.mark.parametrize("killed", [False, True])
def test_busy_loops_end_with_their_process(tmp_path: Path, killed: bool):
    with started(LOOPS, tmp_path) as process:
        assert process.stdout is not None
        loops = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
        assert len(loops) == 2 and all(loop.is_running() for loop in loops)
        if killed:
            process.kill()
        process.communicate(timeout=30)
    assert not psutil.wait_procs(loops, timeout=30)[1]


def test_pinned_workers_have_a_core_each(tmp_path: Path):
    with started(PINNED, tmp_path) as process:
        text, _ = process.communicate(timeout=90)
    found, error = json.loads(text.splitlines()[-1])
    assert error is None
    cores = sorted(os.sched_getaffinity(0))
    assert found == [[cores[rank % len(cores)]] for rank in range(3)]
