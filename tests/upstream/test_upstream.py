"""PyTorch's own suites for RPC and distributed autograd, unedited, on telegrad."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from suites import DIFFERENT, HANG, SUITES, TORCH_DEADLOCKS, names_in

HERE = Path(__file__).parent
TESTS = [f"{suite}.{test}" for suite in SUITES for test in names_in(suite)]
LIMIT = 60  # seconds for one test
SHORT_LIMIT = 15  # where to wait longer is of no use


class Runner:
    """The process that forks the ranks of all tests."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w+")
        self._process = subprocess.Popen(
            [sys.executable, HERE / "runner.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer()

    def run(self, test: str, limit: float) -> dict[str, str]:
        assert self._process.stdin is not None
        print(json.dumps({"test": test, "limit": limit}), file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            pytest.fail(f"the runner has ended:\n{self._log.read()[-5000:]}")
        return line

    def close(self) -> None:
        self._process.communicate(timeout=10)  # which closes its stdin
        self._log.close()


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("upstream") / "log")
    yield runner
    runner.close()


def _marked(test: str) -> object:
    marks = [pytest.mark.xfail(reason=DIFFERENT[test], strict=True)] if test in DIFFERENT else []
    return pytest.param(test, marks=marks)


@pytest.mark.parametrize("test", [_marked(test) for test in TESTS])
def test_upstream(runner: Runner, test: str) -> None:
    answer = runner.run(test, SHORT_LIMIT if test in HANG | TORCH_DEADLOCKS else LIMIT)
    for _ in range(2):
        if test in TORCH_DEADLOCKS and "timed out" in answer["detail"]:
            answer = runner.run(test, SHORT_LIMIT)
    if answer["outcome"] == "skipped":
        pytest.skip(answer["detail"])  # by the suite itself, with its reason
    assert answer["outcome"] == "passed", answer["detail"]


def test_the_suites_are_whole() -> None:
    counts = {suite: len(names_in(suite)) for suite in SUITES}
    gradients = ("DistAutogradTest", "TensorPipeAgentDistAutogradTest", "DistOptimizerTest")
    assert sum(counts[suite] for suite in gradients) == 98
    assert sum(counts.values()) == 98 + 280
    assert set(DIFFERENT) <= set(TESTS)
    assert len([test for test in DIFFERENT if test.partition(".")[0] in gradients]) == 3


def test_the_document_lists_each_that_differs() -> None:
    document = (HERE.parents[1] / "docs" / "migrating.md").read_text()
    missing = [test for test in DIFFERENT if f"`{test.partition('.')[2]}`" not in document]
    assert not missing
