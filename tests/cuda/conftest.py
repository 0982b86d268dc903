"""Tests that need a CUDA device. Without one they are skipped, but for those that run on the device of
tests/gradients/twin.py, too: tests/gradients/test_beside_devices.py starts these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device import DEVICE

import telegrad

if DEVICE == "cuda" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """CUDA opens files and starts threads as it likes."""


@pytest.fixture(scope="session")
def server(server: telegrad.ForkServer) -> Iterator[telegrad.ForkServer]:
    """Forks workers that have the device."""
    if DEVICE == "cuda":
        yield server
        return
    with telegrad.ForkServer(preload=[DEVICE]) as own:
        yield own


@pytest.fixture(scope="module", params=["inproc", "unix", "tcp"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=60.0)
    with telegrad.LocalCluster(["a", "b"], transport=request.param, server=server, options=options) as cluster:
        yield cluster
