"""A worker that has no memory for one message: what that message was for fails with its size, and nothing else does."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import OutOfMemoryError
from telegrad.gradients import plain
from telegrad.messages import MOST_ENDS, Envelope, Kind
from telegrad.primitives.current import current_worker
from telegrad.references import table
from telegrad.transport import shared_memory as shm

PATIENCE = 20.0
MIB = 1 << 20
NO_MEMORY = r"no memory for a message of \d{7,} bytes \(available on this machine: \d+ MiB"

_real_memory = shm.Memory


def fail_large_maps(least: int = MIB // 2) -> None:
    """Has this process fail to map new memory of so many bytes: for what it receives, and what it sends."""

    def memory(size: int, fd: int = -1) -> Any:
        if size >= least:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return _real_memory(size, fd)

    shm.Memory = memory  # type: ignore[assignment, misc]


def map_again() -> None:
    shm.Memory = _real_memory  # type: ignore[misc]


@contextmanager
def no_memory_on(worker: str) -> Iterator[None]:
    begin, end = fail_large_maps, map_again
    try:
        begin() if worker == "driver" else rpc.rpc_sync(worker, begin, timeout=PATIENCE)
        yield
    finally:
        end() if worker == "driver" else rpc.rpc_sync(worker, end, timeout=PATIENCE)


def numel(x: torch.Tensor) -> int:
    return x.numel()


def repeated(x: torch.Tensor, times: int = 4) -> torch.Tensor:
    return x.repeat(times)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


class OutOfMemory:
    """Its unpickling takes all memory there is."""

    def __reduce__(self) -> Any:
        return take_all_memory, ()


def take_all_memory() -> None:
    raise MemoryError


class BigError(Exception):
    pass


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise BigError(b"x" * MIB)


def failing(x: torch.Tensor) -> torch.Tensor:
    return Failing.apply(x)  # type: ignore[no-any-return]


def on_b(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = rpc.rpc_sync("b", torch.mul, args=(x, 3), timeout=PATIENCE)
    return found


class Lively:
    """The connections that there were at first are there still."""

    def __init__(self) -> None:
        for name in ("a", "b"):
            assert rpc.rpc_sync(name, abs, args=(-1,), timeout=PATIENCE) == 1
        self.connections = current_worker()._peers.connections()

    def check(self) -> None:
        for name in ("a", "b"):
            assert rpc.rpc_sync(name, numel, args=(torch.ones(3),), timeout=PATIENCE) == 3
        assert current_worker()._peers.connections() == self.connections
        assert not current_worker()._pending.calls
        x = torch.ones(2, requires_grad=True)
        rpc.rpc_sync("a", repeated, args=(x,), timeout=PATIENCE).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 4.0))


@pytest.fixture
def lively(cluster: telegrad.LocalCluster) -> Iterator[Lively]:
    lively = Lively()
    try:
        yield lively
    finally:
        map_again()
        lively.connections = []  # pytest keeps fixtures for longer than the leak check


def test_a_call_whose_callee_has_no_memory_fails_alone(lively, transport):
    large = torch.ones(MIB // 4)
    way = r"was not sent: " if transport == "inproc" else r"worker 'a' could not read a call, which was not run: "
    with no_memory_on("a"):
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match=way + f".*{NO_MEMORY}"):
                rpc.rpc_sync("a", numel, args=(large,), timeout=PATIENCE)
            lively.check()
        if transport != "inproc":
            future = rpc.rpc_async("a", numel, args=(large,), timeout=PATIENCE)
            with pytest.raises(OutOfMemoryError, match="could not read a call"):
                future.wait()
            rref = rpc.remote("a", numel, args=(large,), timeout=PATIENCE)
            with pytest.raises(OutOfMemoryError, match="could not read a call"):
                rref.to_here()
    assert rpc.rpc_sync("a", numel, args=(large,), timeout=PATIENCE) == MIB // 4
    lively.check()


def test_an_answer_that_its_caller_has_no_memory_for_fails_that_call(lively, transport):
    args = (torch.ones(1000), 1000)
    # In one process the callee copies the answer, and so it is the callee who fails.
    way = NO_MEMORY if transport == "inproc" else f"the answer of worker 'a' to the call of repeated could.*{NO_MEMORY}"
    with no_memory_on("driver"):
        with pytest.raises(MemoryError, match=way):
            rpc.rpc_sync("a", repeated, args=args, timeout=PATIENCE)
        future = rpc.rpc_async("a", repeated, args=args, timeout=PATIENCE)
        with pytest.raises(MemoryError, match=way):
            future.wait()
        lively.check()
    assert rpc.rpc_sync("a", repeated, args=args, timeout=PATIENCE).numel() == 1_000_000
    lively.check()


@pytest.mark.parametrize("where", ["a", "driver"])
def test_gradients_that_a_worker_has_no_memory_for_fail_the_pass(lively, where):
    x = torch.ones(MIB // 4 if where == "driver" else MIB // 16, requires_grad=True)
    for plain_pass in (True, False):
        with nullcontext() if plain_pass else autograd.context() as context_id:
            loss = forward(x, where)
            with no_memory_on(where), pytest.raises(Exception, match=NO_MEMORY) as raised:
                loss.backward() if plain_pass else autograd.backward(context_id, [loss])
            assert isinstance(raised.value, (telegrad.errors.BackwardError, MemoryError))
            assert x.grad is None
        lively.check()


def forward(x: torch.Tensor, where: str) -> torch.Tensor:
    """Its gradients are large where `where` reads them, and nothing that goes there before is."""
    if where == "driver":
        return rpc.rpc_sync("a", sum_of_squares, args=(x,), timeout=PATIENCE)  # type: ignore[no-any-return]
    return sum_of_squares(rpc.rpc_sync("a", repeated, args=(x,), timeout=PATIENCE))


def test_a_body_whose_decoding_takes_all_memory_fails_its_call(lively):
    with pytest.raises(OutOfMemoryError, match=r"could not read a call, .*: no memory for a message of \d+ bytes"):
        rpc.rpc_sync("a", print, args=(OutOfMemory(),), timeout=PATIENCE)
    with pytest.raises(
        OutOfMemoryError, match=r"the answer of worker 'a' to the call of OutOfMemory could not be read"
    ):
        rpc.rpc_sync("a", OutOfMemory, timeout=PATIENCE)
    lively.check()


# -- messages between workers ----------------------------------------------------------------------------


def test_a_large_report_that_the_root_has_no_memory_for_fails_the_pass(lively, transport):
    """The error of a participant carries data of its own."""
    x = torch.ones(3, requires_grad=True)
    y = rpc.rpc_sync("a", failing, args=(x,), timeout=PATIENCE)
    with (
        no_memory_on("driver"),
        pytest.raises(telegrad.errors.BackwardError, match=r"on Node \d+: .*\(worker 'a'") as raised,
    ):
        y.sum().backward()
    if transport == "inproc":
        assert "BigError" in str(raised.value)  # without its data
    else:
        assert "its part has failed, and the report could not be read: no memory for a" in str(raised.value)
        assert isinstance(raised.value.__cause__, OutOfMemoryError)
    lively.check()


def test_a_begin_that_a_worker_has_no_memory_for_fails_the_pass(monkeypatch):
    with telegrad.LocalCluster(["a", "b"], transport="inproc") as cluster:
        lively = Lively()
        (b,) = (worker for worker in cluster._in_process if worker.name == "b")
        take, seen = b.engine.on_message, []

        def unread(peer: int, envelope: Envelope, frames: Any) -> Callable[[], Any] | None:
            if envelope.kind == Kind.BEGIN:
                frames.buffers, frames.missing = (), "no memory for a message of 5000000 bytes"
                seen.append(envelope)
            return take(peer, envelope, frames)

        x = torch.ones(3, requires_grad=True)
        y = rpc.rpc_sync("a", on_b, args=(x,), timeout=PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(b.engine, "on_message", unread)
            with pytest.raises(
                telegrad.errors.BackwardError, match="no memory for a message of 5000000 bytes"
            ) as raised:
                y.sum().backward()
        assert raised.value.worker == "b"
        assert isinstance(raised.value.__cause__, OutOfMemoryError)
        assert seen
        assert not b.engine.busy
        lively.check()


def test_many_ends_go_in_small_messages(monkeypatch):
    """Forget and Drop are read while there may be no memory for large messages, and none of them may be lost."""
    with telegrad.LocalCluster(["a", "b"], transport="inproc"):
        worker = current_worker()
        told: list[int] = []
        monkeypatch.setattr(plain, "tell", lambda host, to, kind, body: told.append(len(body.ids)))
        monkeypatch.setattr(worker.references, "_tell", lambda to, kind, body: told.append(len(body.credits)))
        worker.contexts.plain.to_forget[99] = list(range(2 * MOST_ENDS + 1))
        assert worker.contexts.plain.outgoing(99) == ()
        worker.contexts.plain._clear(worker)
        assert told == [MOST_ENDS, MOST_ENDS, 1]
        told.clear()
        worker.references.to_go_back[99] = [(n, 1) for n in range(2 * MOST_ENDS + 1)]
        envelope = Envelope(Kind.CALL, 1)
        worker.references.outgoing(envelope, (), 99)
        assert envelope.dropped == ()
        worker.references._clear()
        assert told == [MOST_ENDS, MOST_ENDS, 1]
        worker.references.to_go_back[99] = [(1, 1)]
        worker.references.outgoing(envelope, (), 99)
        assert envelope.dropped == ((1, 1),)
        monkeypatch.undo()
    assert table.MOST_ENDS == MOST_ENDS


# -- a process with a limit ------------------------------------------------------------------------------


def limit_address_space(mib: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * MIB,) * 2)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_process_with_a_limited_address_space(server, transport):
    with telegrad.LocalCluster(["a", "b"], transport=transport, server=server):
        lively = Lively()
        rpc.rpc_sync("a", limit_address_space, args=(100,), timeout=PATIENCE)
        # A thread that begins meanwhile maps 128 MiB for its allocator and gives at least half of them back, so up to
        # that much more than the 100 may be left.
        with pytest.raises(
            OutOfMemoryError, match=rf"{NO_MEMORY}; left of this process's address space \(ulimit -v\): "
        ):
            rpc.rpc_sync("a", numel, args=(torch.ones(64 * MIB),), timeout=PATIENCE)
        lively.check()
        x = torch.ones(16 * MIB, requires_grad=True)
        with pytest.raises((RuntimeError, MemoryError)):
            # Not the peer's loss: torch has no memory for the result, or telegrad none for the argument.
            rpc.rpc_sync("a", repeated, args=(x,), timeout=PATIENCE)
        lively.check()


# -- descriptors -----------------------------------------------------------------------------------------


def limit_descriptors() -> tuple[int, int]:
    """Has this process open nothing more; returns the limits that it had."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    return before


def raise_limit(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_message_that_a_worker_has_no_descriptor_for_fails_alone(server):
    """It comes in shared memory, whose descriptor is lost. Its peer is not."""
    no_descriptor = r"no file descriptor for a message of \d+ bytes in shared memory: .* \(ulimit -n\), or close some$"
    large = torch.ones(MIB // 4)
    with telegrad.LocalCluster(["a", "b"], transport="unix", server=server):
        lively = Lively()
        lively.check()  # where the others are is asked of the group's store once, which takes a descriptor
        limits = rpc.rpc_sync("a", limit_descriptors, timeout=PATIENCE)
        for _ in range(3):
            with pytest.raises(OutOfMemoryError, match=f"worker 'a' could not read a call, .*: {no_descriptor}"):
                rpc.rpc_sync("a", numel, args=(large,), timeout=PATIENCE)
            lively.check()
        rpc.rpc_sync("a", raise_limit, args=(limits,), timeout=PATIENCE)
        assert rpc.rpc_sync("a", numel, args=(large,), timeout=PATIENCE) == MIB // 4
        mine = limit_descriptors()
        try:
            with pytest.raises(OutOfMemoryError, match=f"call of repeated could not be read here: {no_descriptor}"):
                rpc.rpc_sync("a", repeated, args=(torch.ones(1000), 1000), timeout=PATIENCE)
        finally:
            raise_limit(mine)
        assert rpc.rpc_sync("a", repeated, args=(torch.ones(1000), 1000), timeout=PATIENCE).numel() == 1_000_000
        lively.check()
        lively.connections = []
