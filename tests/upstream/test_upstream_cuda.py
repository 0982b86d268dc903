"""PyTorch's own suites for CUDA tensors, unedited, on telegrad. Started by scripts/test-cuda, several at a time: nearly
all of their time goes into importing torch, in each rank of each test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from suites import CUDA_DIFFERENT, CUDA_SUITES, devices_for

RUNNER = Path(__file__).with_name("cuda_runner.py")
NEEDED = {f"{suite}.{test}": count for suite in CUDA_SUITES for test, count in devices_for(suite).items()}
LIMIT = 80  # seconds for one test
HERE = torch.cuda.device_count()


def outcome(test: str) -> dict[str, str]:
    runner = subprocess.Popen(
        [sys.executable, RUNNER, test, str(LIMIT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        answer, log = runner.communicate(timeout=LIMIT + 30)
    finally:
        if runner.poll() is None:
            os.killpg(runner.pid, signal.SIGKILL)
            runner.communicate()
    return json.loads(answer) if answer else {"outcome": "failed", "detail": log[-5000:]}


def _marked(test: str) -> object:
    marks = []
    if NEEDED[test] > HERE:
        marks.append(pytest.mark.skip(reason=f"needs {NEEDED[test]} CUDA devices"))
    elif test in CUDA_DIFFERENT:
        marks.append(pytest.mark.xfail(reason=CUDA_DIFFERENT[test], strict=True))
    return pytest.param(test, marks=marks)


@pytest.mark.parametrize("test", [_marked(test) for test in NEEDED])
def test_upstream_on_cuda(test: str) -> None:
    answer = outcome(test)
    if answer["outcome"] == "skipped":
        pytest.skip(answer["detail"])
    assert answer["outcome"] == "passed", answer["detail"]


def test_the_suites_are_whole() -> None:
    assert set(CUDA_DIFFERENT) <= set(NEEDED)
    assert len([test for test, count in NEEDED.items() if count <= 1]) == 42  # one of them needs none
