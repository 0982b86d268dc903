"""Tests that need a CUDA device. Without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import telegrad

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """CUDA opens files and starts threads as it likes."""


@pytest.fixture(scope="module", params=["inproc", "unix", "tcp"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=60.0)
    with telegrad.LocalCluster(["a", "b"], transport=request.param, server=server, options=options) as cluster:
        yield cluster
