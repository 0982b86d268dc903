"""A floor for training steps: the three transformer layers on three workers, written by hand for this one model.

Each worker has a socket to the driver, its layer and an AdamW of its own. The driver tells it to go forward, to go
backward or to step, by one byte and the bytes of one tensor, and waits for the answer. There are no calls, no names and
no threads, nothing is recorded, and no fault is handled. What is left beside torch's own work is what waking processes
and moving bytes cost.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.figures import Session
from benchmarks.sampling import timed
from benchmarks.step_models import BATCH, LENGTH, WIDTH, make_layer
from benchmarks.trainers import EPS, LR

SHAPE = (BATCH, LENGTH, WIDTH)
LAYERS = 3
FORWARD, BACKWARD, STEP = b"fbs"


def time_by_hand(session: Session) -> list[float]:
    """One sample: a step."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        workers = [_start(number, stack) for number in range(LAYERS)]
        torch.manual_seed(100)
        inputs, target = torch.randn(SHAPE), torch.randn(SHAPE)
        step = partial(_step, workers, inputs, target)
        _check(step, inputs, target)
        return timed(step, session.repeats)


def _step(workers: list[socket.socket], inputs: Tensor, target: Tensor) -> float:
    hidden = inputs
    for worker in workers:
        _send(worker, FORWARD, hidden)
        hidden = _receive(worker)
    hidden.requires_grad_()
    loss = F.mse_loss(hidden, target)
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = hidden.grad
    assert gradient is not None
    for worker in reversed(workers):
        _send(worker, BACKWARD, gradient)
        gradient = _receive(worker)
    for worker in workers:
        worker.sendall(bytes((STEP,)))
    for worker in workers:
        worker.recv(1)
    return loss.item()


def _check(step: Callable[[], float], inputs: Tensor, target: Tensor) -> None:
    """Its losses must be those of one process."""
    layers = nn.Sequential(*map(make_layer, range(LAYERS)))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=LR, eps=EPS)
    for _ in range(3):
        loss = F.mse_loss(layers(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(), loss.item(), rtol=1e-4, atol=1e-6)


def _start(number: int, stack: ExitStack) -> socket.socket:
    mine, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(number, theirs), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.join)
    return stack.enter_context(mine)


def _work(number: int, driver: socket.socket) -> None:
    """Does as it is told, until the driver closes the socket."""
    torch.set_num_threads(1)
    layer = make_layer(number)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=LR, eps=EPS)
    given = made = torch.empty(0)
    with suppress(EOFError, ConnectionError):
        while True:
            (what,) = _exactly(driver, 1)
            if what == FORWARD:
                given = _receive(driver).requires_grad_()
                made = layer(given)
                _answer(driver, made)
            elif what == BACKWARD:
                made.backward(_receive(driver))  # type: ignore[no-untyped-call]
                assert given.grad is not None
                _answer(driver, given.grad)
            else:
                optimizer.step()
                optimizer.zero_grad()
                driver.sendall(b"d")


def _send(sock: socket.socket, what: int, tensor: Tensor) -> None:
    sock.sendall(bytes((what,)) + _bytes_of(tensor))


def _answer(sock: socket.socket, tensor: Tensor) -> None:
    sock.sendall(_bytes_of(tensor))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def _receive(sock: socket.socket) -> Tensor:
    return torch.frombuffer(_exactly(sock, 4 * BATCH * LENGTH * WIDTH), dtype=torch.float32).view(SHAPE)


def _exactly(sock: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        received = sock.recv_into(rest)
        if not received:
            raise EOFError
        rest = rest[received:]
    return found
