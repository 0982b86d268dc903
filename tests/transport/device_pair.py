"""Two ends of a device lane in this process, over a simulated machine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import torch
from simulated_cuda import Machine, SimulatedCuda

from telegrad.messages import Envelope, Placed
from telegrad.primitives import clock
from telegrad.transport import device_board
from telegrad.transport.device import DeviceLane
from telegrad.transport.device_mappings import Arrived

MIB = 1 << 20
GPU = torch.device("cuda", 0)
PATIENCE = 20.0  # seconds


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def alive() -> bool:
    return True


def over_the_wire(placed: list[Placed], lane: DeviceLane) -> Envelope:
    envelope = Envelope(1, 1, placed=tuple(placed), lane=lane.to_say())
    return msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=Envelope)


def put(lane: DeviceLane, tensor: torch.Tensor, placed: list[Placed]) -> bool:
    """As if a message with this tensor alone had been written."""
    into: list[Placed] = []
    if not lane.reserve(tensor, into):
        return False
    lane.fill(into)
    placed += into
    return True


def bytes_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Pair:
    """Lanes `a` and `b`. Messages go by `put`, `deliver` and `take`."""

    def __init__(self, machine: Machine, limit: int = 64 * MIB, *, at_b: tuple[str, ...] = ("GPU-0",)) -> None:
        self.machine = machine
        self.cuda: SimulatedCuda = machine.process("GPU-0", "GPU-1")
        self.cuda_b: SimulatedCuda = machine.process(*at_b)
        self.a = DeviceLane(self.cuda, "b", os.getpid(), limit)
        self.b = DeviceLane(self.cuda_b, "a", os.getpid(), limit)

    def negotiate(self) -> Pair:
        assert not put(self.a, bytes_of(8), [])
        for _ in range(2000):
            self.b.heard(over_the_wire([], self.a).lane)
            self.a.heard(over_the_wire([], self.b).lane)
            if self.a._accepted or self.a._refused:
                break
            time.sleep(1e-3)
        return self

    def put(self, tensor: torch.Tensor) -> Placed:
        placed: list[Placed] = []
        assert put(self.a, tensor, placed)
        return placed[0]

    def deliver(self, *placed: Placed) -> list[Arrived]:
        return self.b.arrived(over_the_wire(list(placed), self.a).placed)

    def take(self, arrived: Arrived, timeout: float = PATIENCE) -> torch.Tensor:
        return arrived.take(GPU, clock.now() + timeout, alive)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of it. What comes out is valid after `cuda_b.synchronize()`."""
        (arrived,) = self.deliver(self.put(tensor))
        return self.take(arrived)

    def settle(self) -> None:
        """What was put and taken has happened on the devices, too."""
        for cuda in (self.cuda, self.cuda_b):
            if not cuda.killed:
                cuda.synchronize()

    def state(self, placed: Placed) -> int:
        return self.a._places.board.bytes[placed.place]


def janitor_is_idle() -> bool:
    return device_board.janitor._thread is None and not device_board.janitor._jobs


@contextlib.contextmanager
def pairs(slowest: float = 0.0, seed: int = 0) -> Iterator[Callable[..., Pair]]:
    """Makes pairs. At the end all is closed, and nothing may be left, but what a killed process had."""
    machine = Machine(seed, slowest)
    made: list[Pair] = []

    def make(limit: int = 64 * MIB, *, at_b: tuple[str, ...] = ("GPU-0",)) -> Pair:
        made.append(Pair(machine, limit, at_b=at_b))
        return made[-1]

    try:
        yield make
    finally:
        for pair in made:
            for lane, cuda in ((pair.a, pair.cuda), (pair.b, pair.cuda_b)):
                if cuda.killed:
                    lane.abandon()
                    if lane._places is not None:
                        lane._places.board.abandon()
                for stream in cuda.streams.values():
                    stream.running.set()
                lane.close()
        try:
            eventually(janitor_is_idle)
        finally:
            processes = list(machine.processes)
            machine.close()
            for pair in made:
                vars(pair).clear()  # pytest holds on to fixtures for longer than the leak check
            del lane
    assert machine.violations == [], machine.violations
    for process in processes:
        if not (process.killed or process.sticky):
            left = process.allocated, process.opened, process.events
            assert left == ({}, {}, {}), left


class Thread(threading.Thread):
    """A thread whose result, or exception, join() gives."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.result: object = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error

    def outcome(self) -> object:
        self.join(PATIENCE)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result
