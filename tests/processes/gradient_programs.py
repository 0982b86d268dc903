"""Programs whose gradients cross workers. They run the same by workers and, as the reference, in one thread.

Every function gets `call` first: `call(worker, function, *args)` runs it there, or (in the reference) here. Leaves are
kept by name, each on its worker; `leaf(call, name)` is the one of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from telegrad import autograd, errors, rpc

PATIENCE = 30.0
NAMES = ("a", "b", "c")


# -- how functions are called, and what they keep ---------------------------------------------------------


class Far:
    """Calls other workers."""

    def __call__(self, to: str, function: Callable[..., Any], *args: Any) -> Any:
        return rpc.rpc_sync(to, function, args=(self, *args), timeout=PATIENCE)


class Near:
    """Calls functions, for the reference."""

    def __call__(self, to: str, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)


Call = Far | Near
_kept: dict[tuple[type, str], Any] = {}  # in-process workers share it, and so does the reference


def leaf(call: Call, name: str, size: int = 3) -> Tensor:
    """The leaf of that name, which is a Parameter of a worker's own."""
    if (type(call), name) not in _kept:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        values = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
        _kept[type(call), name] = nn.Parameter(values)
    return _kept[type(call), name]


def keep(call: Call, name: str, value: Tensor) -> None:
    _kept[type(call), name] = value


def take(call: Call, name: str) -> Tensor:
    return _kept[type(call), name]


def gradients_there(call: Call, context_id: int) -> dict[str, Tensor]:
    """By name, on the worker where this runs."""
    names = {id(value): name for (kind, name), value in _kept.items() if kind is type(call)}
    try:
        found = autograd.get_gradients(context_id)
    except errors.UnknownContextError:
        return {}
    return {names[id(leaf)]: gradient for leaf, gradient in found.items()}


def expected_gradients() -> dict[str, Tensor]:
    return {
        name: value.grad
        for (kind, name), value in _kept.items()
        if kind is Near and value.is_leaf and value.grad is not None
    }


# -- programs: each gives its roots -----------------------------------------------------------------------


def times(call: Call, x: Tensor, name: str) -> Tensor:
    return x * leaf(call, name, x.numel())


def chain(call: Call) -> list[Tensor]:
    """
    x ──▶ a ──▶ b ──▶ c ──▶ loss
    """
    x = leaf(call, "x").sin()
    for worker in NAMES:
        x = call(worker, times, x, f"of {worker}")
    return [x.sum()]


def there_and_back(call: Call) -> list[Tensor]:
    """
    x ──▶ a ──▶ b ──▶ a ──▶ b ──▶ … ──▶ loss, with one leaf at each
    """
    x = leaf(call, "x") * 1
    for number in range(10):
        worker = "ab"[number % 2]
        x = call(worker, times, x, f"of {worker}").sin()
    return [x.sum()]


def skips(call: Call) -> list[Tensor]:
    """
    x ─┬─▶ a ─▶ y ─┬─▶ b ─▶ + ─▶ z ─▶ c ─▶ * ─▶ loss
       │           └──────────────────────▶┤
       └────────────────────▶┘             │
    """
    x = leaf(call, "x").exp()
    y = call("a", times, x, "of a")
    z = call("b", times, y, "of b") + x
    return [(call("c", times, z, "of c") * y * x).sum()]


def on_each(call: Call, x: Tensor, *further: str) -> Tensor:
    """Multiplies by a leaf here, and has the further workers do the same, each called by the one before."""
    here = x * leaf(call, f"behind {further}")
    if not further:
        return here
    there = call(further[0], on_each, here, *further[1:])
    return there * here + x


def nested(call: Call) -> list[Tensor]:
    """
    driver ──▶ a ──▶ b ──▶ c ──▶ a ──▶ driver, and the results all the way back
    """
    return [call("a", on_each, leaf(call, "x").cos(), "b", "c", "a", "driver").sum()]


def three(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * leaf(call, "one"), x + leaf(call, "two"), x.exp()


def unused(call: Call) -> list[Tensor]:
    """
    Two of three results are not used, and neither is a call on the third.
    """
    one, two, _ = call("a", three, leaf(call, "x") * 2)
    call("b", times, one, "never used")
    call("c", times, call("b", times, two, "never used either"), "nor this")
    return [one.sum()]


def shared(call: Call) -> list[Tensor]:
    """
    One leaf goes to three workers and is used here, and one there takes part in several calls.
    """
    x = leaf(call, "x")
    total = x * x
    for worker in (*NAMES, *NAMES):
        total = total + call(worker, times, x, f"of {worker}")
    return [total.sum()]


def several_roots(call: Call) -> list[Tensor]:
    """
    The roots share much of their graphs.
    """
    y = call("a", times, leaf(call, "x").sin(), "of a")
    z = call("b", times, y, "of b")
    return [y.sum(), (z * y).sum(), z.exp().sum(), leaf(call, "x").sum()]


def keep_product(call: Call, x: Tensor) -> None:
    keep(call, "product", x * leaf(call, "of a"))


def use_product(call: Call, x: Tensor) -> Tensor:
    return take(call, "product") * x


def kept_for_later(call: Call) -> list[Tensor]:
    """
    A call keeps something on its worker, and calls of two others join on it.
    """
    x = leaf(call, "x").sin()
    call("a", keep_product, x)
    y = call("b", times, x, "of b")
    return [(call("a", use_product, y) + call("a", use_product, x)).sum()]


def to_oneself(call: Call) -> list[Tensor]:
    """
    A worker calls itself, at the root and elsewhere.
    """
    x = call("driver", times, leaf(call, "x").sin(), "of driver")
    return [call("a", on_each, x, "a", "a").sum()]


def large(call: Call) -> list[Tensor]:
    """
    Tensors that go through shared memory.
    """
    x = leaf(call, "large x", 1 << 16).sin()
    y = call("a", times, x, "large of a")
    return [(call("b", times, y, "large of b") * x).sum()]


def many_tensors(call: Call, xs: list[Tensor]) -> list[Tensor]:
    return [x * leaf(call, "of a") for x in xs]


def lists(call: Call) -> list[Tensor]:
    """
    Many tensors in one message, of which some are used.
    """
    xs = [leaf(call, f"x{number}") * number for number in range(20)]
    return [y.sum() for y in call("a", many_tensors, xs)[::3]]


PROGRAMS = (
    chain, there_and_back, skips, nested, unused, shared, several_roots, kept_for_later, to_oneself, large, lists,
)  # fmt: skip


# -- training ---------------------------------------------------------------------------------------------

WIDTHS = {"a": (4, 8), "b": (8, 8), "c": (8, 1)}


class Momentum:
    """An optimizer. The first of torch's own imports for seconds in every process."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._speeds = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, speed in zip(self._parameters, self._speeds, strict=True):
            speed.mul_(0.9).add_(parameter.grad)
            parameter.sub_(speed, alpha=0.1)
            parameter.grad = None


_models: dict[tuple[type, str], tuple[nn.Module, Momentum]] = {}


def model(call: Call, worker: str) -> tuple[nn.Module, Momentum]:
    """The worker's layer, with an optimizer of its own."""
    if (type(call), worker) not in _models:
        torch.manual_seed(ord(worker))
        made = nn.Linear(*WIDTHS[worker], dtype=torch.float64)
        _models[type(call), worker] = made, Momentum(list(made.parameters()))
    return _models[type(call), worker]


def apply_model(call: Call, worker: str, x: Tensor) -> Tensor:
    return model(call, worker)[0](x).tanh()


def step_with_context(call: Call, worker: str, context_id: int) -> None:
    """An optimizer that reads its gradients from the context."""
    layer, optimizer = model(call, worker)
    gradients = autograd.get_gradients(context_id)
    assert len(gradients) == 2
    for parameter in layer.parameters():
        parameter.grad = gradients[parameter]
    optimizer.step()


def step_with_grad(call: Call, worker: str) -> None:
    layer, optimizer = model(call, worker)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    optimizer.step()


def parameters_of(call: Call, worker: str) -> list[Tensor]:
    return [parameter.detach() for parameter in model(call, worker)[0].parameters()]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(16, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(call: Call, number: int) -> Tensor:
    x, y = batch(number)
    for worker in NAMES:
        x = call(worker, apply_model, worker, x)
    return (x - y).square().mean()


def forget() -> None:
    _kept.clear()
    _models.clear()
