"""The other end of a device lane, in a process of its own: it does what it is told through a pipe."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import torch

from telegrad.messages import Envelope, Placed
from telegrad.transport.cuda import CUDA
from telegrad.transport.device import DeviceLane
from telegrad.transport.device_board import janitor

MIB = 1 << 20
GPU = torch.device("cuda", 0)
LIMIT = 1 << 30


def encoded(lane: DeviceLane, placed: list[Placed]) -> bytes:
    return msgspec.msgpack.encode(Envelope(1, 1, placed=tuple(placed), lane=lane.to_say()))


def decoded(data: bytes) -> Envelope:
    return msgspec.msgpack.decode(data, type=Envelope)


def alive() -> bool:
    return True


def busy(milliseconds: float) -> None:
    """Keeps the current stream busy for about as long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def make_blind() -> None:
    """A mutation: this process takes every event for done."""
    CUDA.is_done = lambda event: True  # type: ignore[method-assign]


def janitor_is_idle() -> bool:
    return janitor._thread is None and not janitor._jobs


def put(lane: DeviceLane, tensor: torch.Tensor, placed: list[Placed]) -> bool:
    """As if a message with this tensor alone had been written."""
    into: list[Placed] = []
    if not lane.reserve(tensor, into):
        return False
    lane.fill(into)
    placed += into
    return True


class Peer:
    """Its methods are the commands; each returns what goes back through the pipe."""

    def __init__(self, parent: int) -> None:
        self.lane = DeviceLane(CUDA, "test", parent, LIMIT)
        self.kept: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def use_cuda(self) -> None:
        torch.ones(1, device=GPU)

    def talk(self, data: bytes) -> bytes:
        self.lane.heard(decoded(data).lane)
        return encoded(self.lane, [])

    def offer(self) -> bytes:
        assert not put(self.lane, torch.ones(1, device=GPU), [])
        return encoded(self.lane, [])

    def echo(self, data: bytes, busy_for: float = 0.0, side: bool = False) -> bytes:
        """Takes all tensors and puts what it got, plus one, back; `busy_for` milliseconds before and after the take."""
        with torch.cuda.stream(torch.cuda.Stream() if side else None):
            return self._echo(data, busy_for)

    def _echo(self, data: bytes, busy_for: float) -> bytes:
        placed: list[Placed] = []
        for arrived in self.lane.arrived(decoded(data).placed):
            if busy_for:
                busy(busy_for)
            tensor = arrived.take(GPU, time.monotonic() + 30, alive)
            if busy_for:
                busy(busy_for)
            tensor += 1
            while not put(self.lane, tensor, placed):
                time.sleep(1e-3)
        return encoded(self.lane, placed)

    def take_and_sum(self, data: bytes, busy_for: float = 0.0) -> list[int]:
        if busy_for:
            busy(busy_for)
        taken = [a.take(GPU, time.monotonic() + 30, alive) for a in self.lane.arrived(decoded(data).placed)]
        return [int(tensor.sum(dtype=torch.int64)) for tensor in taken]

    def take_later(self, data: bytes, busy_for: float) -> None:
        """Takes behind a busy stream, and does not wait for it."""
        busy(busy_for)
        self.kept += [a.take(GPU, time.monotonic() + 30, alive) for a in self.lane.arrived(decoded(data).placed)]

    def sums(self) -> list[int]:
        found = [int(tensor.sum(dtype=torch.int64)) for tensor in self.kept]
        self.kept.clear()
        return found

    def drop(self, data: bytes) -> None:
        self.lane.arrived(decoded(data).placed)

    def put_behind(self, busy_for: float, value: int, count: int) -> bytes:
        tensor = torch.zeros(count, dtype=torch.uint8, device=GPU)
        torch.cuda.synchronize()
        busy(busy_for)
        tensor.fill_(value)
        placed: list[Placed] = []
        assert put(self.lane, tensor, placed)
        tensor.zero_()
        return encoded(self.lane, placed)

    def be_blind(self) -> None:
        make_blind()

    def statistics(self) -> Any:
        return self.lane.statistics()

    def close(self) -> None:
        self.lane.close()
        while not janitor_is_idle():
            time.sleep(1e-3)


def main(pipe: Any, parent: int) -> None:
    peer = Peer(parent)
    while (command := pipe.recv()) is not None:
        name, args = command
        try:
            pipe.send((True, getattr(peer, name)(*args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
