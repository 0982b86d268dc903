"""Many steps of training without contexts, and what they leave on the workers: nothing.

    python tests/gradients/plain_leaks.py 10000

The collector of garbage is off everywhere. After the first tenth memory grows by a few hundred bytes a step at most,
and the Sends, Recvs and Pasts that are left at the end are none.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from typing import Any

import torch

import telegrad
from telegrad import autograd, rpc

WORKERS = ("a", "b")
SIZE = 2_000
PATIENCE = 30.0  # seconds

_weight = torch.full((SIZE,), 0.5, requires_grad=True)
_state: dict[str, torch.Tensor] = {}


def collector_off() -> None:
    gc.disable()


def weighted(x: torch.Tensor) -> torch.Tensor:
    return (x * _weight).tanh()


def twice(x: torch.Tensor, to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, weighted, args=(x * _weight,)) + x


def carried(x: torch.Tensor) -> torch.Tensor:
    """State over the calls of a step."""
    _state["h"] = (_state.get("h", torch.zeros(SIZE)) + x * _weight).tanh()
    return _state["h"] * 1.0


def cut() -> None:
    if "h" in _state:
        _state["h"] = _state["h"].detach()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise KeyError("on purpose")


def fails(x: torch.Tensor) -> torch.Tensor:
    return Failing.apply(x * _weight)  # type: ignore[no-any-return]


def zero() -> None:
    _weight.grad = None


def grad() -> torch.Tensor | None:
    return _weight.grad


def counts() -> dict[str, int]:
    """What this process has for gradients, and its memory in bytes."""
    found = autograd.debug_info()
    names = [type(thing).__name__ for thing in gc.get_objects()]
    found |= {name: names.count(name) for name in ("Past", "Sent", "Graph", "LocalPass", "EngineCall", "Undecoded")}
    return {**found, "memory": resident()}


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def step(number: int, kept: list[torch.Tensor]) -> None:
    x = torch.full((SIZE,), 0.1, requires_grad=True)
    h = rpc.rpc_sync("a", weighted, args=(x,))
    loss = (rpc.rpc_sync("b", twice, args=(h, "a")) * h).sum()
    for _ in range(3):
        loss = loss + rpc.rpc_sync("b", carried, args=(h,)).sum()
    rpc.rpc_sync("b", cut)
    match number % 8:
        case 0:  # dropped without a backward pass
            pass
        case 1:  # the loss is kept for a while, and its graph with it
            loss.backward(retain_graph=True)
            kept.append(loss)
            del kept[:-4]
        case 2:
            torch.autograd.grad(loss, x)
        case 3:
            try:
                rpc.rpc_sync("a", fails, args=(loss,)).sum().backward()
            except RuntimeError:
                pass
        case _:
            loss.backward()
    if number % 4 == 0:
        for name in WORKERS:
            rpc.rpc_sync(name, zero)


def run(steps: int, transport: str, server: Any = None) -> dict[str, list[dict[str, int]]]:
    """Returns by worker what there is after the first tenth, and after the last step when all is dropped."""
    found: dict[str, list[dict[str, int]]] = {name: [] for name in ("driver", *WORKERS)}
    was_on = gc.isenabled()
    with telegrad.LocalCluster(WORKERS, transport=transport, server=server):
        for name in found:
            rpc.rpc_sync(name, collector_off)
        kept: list[torch.Tensor] = []
        try:
            for number in range(steps):
                step(number, kept)
                if number == steps // 10:
                    for name in found:
                        found[name].append(rpc.rpc_sync(name, counts))
            kept.clear()
            rpc.rpc_sync("b", cut)
            deadline = time.monotonic() + PATIENCE
            while any(rpc.rpc_sync(n, counts)[what] for n in found for what in ("sends", "received", "Past", "Sent")):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            for name in found:
                found[name].append(rpc.rpc_sync(name, counts))
        finally:
            if was_on:
                gc.enable()
    return found


if __name__ == "__main__":
    for worker, (early, late) in run(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "unix").items():
        print(worker, "early", early)
        print(worker, "late ", late)
