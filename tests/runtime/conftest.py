from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import telegrad
from telegrad import rpc

PATIENCE = 20.0


@contextmanager
def warm_cluster(names: list[str], server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    """A cluster that has all connections and as many threads as will be needed: the leak check looks at them, too."""
    options = telegrad.Options(idle_thread_timeout=600.0)
    with telegrad.LocalCluster(names, server=server, options=options) as cluster:
        gate = threading.Event()
        for _ in range(8):
            cluster.worker._threads.submit(lambda: gate.wait(PATIENCE))
        deadline = time.monotonic() + PATIENCE
        while cluster.worker._threads.count < 8:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        gate.set()
        for name in names:
            rpc.rpc_sync(name, abs, args=(1,))
        yield cluster


@pytest.fixture(scope="module")
def module_cluster(server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with warm_cluster(["a", "b"], server) as cluster:
        yield cluster
