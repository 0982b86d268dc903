"""Fixtures of the tests of gradients: one cluster per module and transport, and nothing left on it by any test."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import autograd

PATIENCE = 30.0  # seconds

# The first checkpoint of a process imports half of torch. It comes before any look for leaks, and what it
# brought is not looked at again.
checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
gc.collect()
gc.freeze()


@pytest.fixture(scope="module", params=["inproc", "unix", "tcp"])
def module_cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    """Workers "a" and "b" and the caller's own "driver", on each transport, for all tests of a module."""
    options = telegrad.Options(rpc_timeout=30.0)
    with telegrad.LocalCluster(["a", "b"], transport=request.param, server=server, options=options) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """As for all tests; but on a cluster that others use too, threads come and go, and it is looked at what its
    workers keep for gradients."""
    if "module_cluster" not in request.fixturenames:
        request.getfixturevalue("no_leaks")
        yield
        return
    cluster = request.getfixturevalue("module_cluster")
    before = kept_by(cluster)
    yield
    deadline = time.monotonic() + PATIENCE
    while left := {what: n for what, n in kept_by(cluster).items() if n > before[what]}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        threading.Event().wait(0.005)


def kept_by(cluster: telegrad.LocalCluster) -> dict[str, int]:
    """What the workers of a cluster keep for gradients."""
    found = dict(cluster.worker.engine.statistics())
    for name in cluster.names:
        for what, count in cluster.call(name, autograd.debug_info).items():
            found[what] += count
    return found
