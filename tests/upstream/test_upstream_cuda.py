"""PyTorch's own suites for CUDA tensors, unedited, on telegrad. Started by scripts/test-cuda, several at a time."""

from __future__ import annotations

import pytest
import torch
from running import Runner
from suites import CUDA_DIFFERENT, CUDA_SUITES, devices_for

NEEDED = {f"{suite}.{test}": count for suite in CUDA_SUITES for test, count in devices_for(suite).items()}
LIMIT = 80  # seconds for one test
HERE = torch.cuda.device_count()


def _marked(test: str) -> object:
    marks = []
    if NEEDED[test] > HERE:
        marks.append(pytest.mark.skip(reason=f"needs {NEEDED[test]} CUDA devices"))
    elif test in CUDA_DIFFERENT:
        marks.append(pytest.mark.xfail(reason=CUDA_DIFFERENT[test], strict=True))
    return pytest.param(test, marks=marks)


@pytest.mark.parametrize("test", [_marked(test) for test in NEEDED])
def test_upstream_on_cuda(runner: Runner, test: str) -> None:
    answer = runner.run(test, LIMIT)
    if answer["outcome"] == "skipped":
        pytest.skip(answer["detail"])
    assert answer["outcome"] == "passed", answer["detail"]


def test_the_suites_are_whole() -> None:
    assert set(CUDA_DIFFERENT) <= set(NEEDED)
    assert len([test for test, count in NEEDED.items() if count <= 1]) == 42  # one of them needs none
