"""Fixtures of the tests of faults: workers that run the programs of fault_programs.py, and what holds them up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import fault_programs as programs
import pytest
import torch
from fault_programs import PATIENCE, Fault
from torch import Tensor

import telegrad
from telegrad import rpc
from telegrad.events import Event
from telegrad.worker import Worker


@pytest.fixture
def trio(transport: str, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    """Workers "b" and "c", and the driver, on each transport."""
    with telegrad.LocalCluster(["b", "c"], transport=transport, server=server) as cluster:
        yield cluster
    programs.forget_gates()


@pytest.fixture
def workers() -> Iterator[dict[str, Worker]]:
    """The same in this process."""
    with telegrad.LocalCluster(["b", "c"], transport="inproc") as cluster:
        found = {worker.name: worker for worker in cluster._in_process}
        for name in found:
            rpc.rpc_sync(name, rpc.rpc_sync, args=("driver", abs, (1,)))  # all have met, and have threads
        yield found
        found.clear()  # pytest keeps it for longer
    programs.forget_gates()


def info(name: str) -> telegrad.WorkerInfo:
    return rpc.get_worker_info(name)


@contextlib.contextmanager
def watching(worker: Worker, see: Callable[[Event], None]) -> Iterator[None]:
    end = worker.events.subscribe(see)
    try:
        yield
    finally:
        end()


def is_event(event: Event, *expected: str) -> bool:
    return (event.stage, event.phase, event.kind) == expected


@pytest.fixture
def held_messages() -> Iterator[Callable[..., tuple[threading.Event, threading.Event]]]:
    """Holds messages of a kind up as they are sent. Gives two events: one is being held; let them go."""
    with contextlib.ExitStack() as undo:

        def hold(worker: Worker, kind: str, *, to: str = "") -> tuple[threading.Event, threading.Event]:
            held, release = threading.Event(), threading.Event()

            def see(event: Event) -> None:
                if is_event(event, "send", "started", kind) and to in ("", event.peer):
                    held.set()
                    assert release.wait(PATIENCE)

            undo.callback(worker.events.subscribe(see))
            undo.callback(release.set)
            return held, release

        yield hold


def fan(faults_of_b: tuple[Fault, ...], faults_of_c: tuple[Fault, ...]) -> Tensor:
    """
         ┌▶ b ─┐
    x ───┤     ├─▶ loss
         └▶ c ─┘
    """
    x = torch.ones(3, requires_grad=True)
    one = rpc.rpc_async("b", programs.on_c, args=(x, faults_of_b))
    other = rpc.rpc_async("c", programs.on_c, args=(x, faults_of_c))
    return (one.wait() + other.wait()).sum()
