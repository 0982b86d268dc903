"""What torch has around backward(), over parts that live on other workers: scalers, checkpoints, torch.compile."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import named_leaves
import pytest
import torch
from named_leaves import assert_same, expected, grads, here, leaf, there
from torch.utils.checkpoint import checkpoint

NAMES = ["driver.x", "a.w", "b.w"]


def clear_grads() -> None:
    for each in named_leaves._leaves.values():
        each.grad = None


@pytest.fixture
def no_grads(module_cluster: Any) -> Iterator[None]:
    """All leaves begin without a `.grad`."""
    for name in ("a", "b"):
        there(name, clear_grads)
    clear_grads()
    yield
    gc.collect()


on_a_cluster = pytest.mark.usefixtures("module_cluster", "no_grads")


def weighted(x: torch.Tensor, name: str = "a.w") -> torch.Tensor:
    return x * leaf(name)


# -- loss scaling ------------------------------------------------------------------------------------------


@on_a_cluster
def test_a_grad_scaler():
    """The loss is scaled, so are all gradients; the local optimizer's are unscaled before its step."""
    x = leaf("driver.x").detach().clone().requires_grad_()
    before = x.detach().clone()
    optimizer = torch.optim.SGD([x], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = there("b", weighted, there("a", weighted, x), "b.w").sum()
    scaler.scale(loss).backward()
    wanted = expected(weighted(weighted(leaf("driver.x")), "b.w").sum(), NAMES)
    assert_same(grads(["a.w", "b.w"]), {name: wanted[name] for name in ("a.w", "b.w")}, times=1024)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(x.detach(), before - 0.1 * wanted["driver.x"])


@on_a_cluster
def test_autocast():
    def forward(call: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call("a", product, leaf("driver.m", 3, 3, dtype=torch.float32)).float().sum()

    forward(there).backward()
    names = ["driver.m", "a.m"]
    assert_same(grads(names), expected(forward(here), names))


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ leaf("a.m", 3, 3, dtype=torch.float32)


# -- checkpoints -------------------------------------------------------------------------------------------


def calls_in_checkpoint(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(calls_b, x * 1, use_reentrant=reentrant)


def calls_b(x: torch.Tensor) -> torch.Tensor:
    return there("b", weighted, x * leaf("a.w"), "b.w").sin()


@on_a_cluster
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_in_a_checkpoint_on_another_worker(reentrant):
    there("a", calls_in_checkpoint, leaf("driver.x"), reentrant).sum().backward()
    wanted = weighted(weighted(leaf("driver.x")), "b.w").sin()
    assert_same(grads(NAMES), expected(wanted.sum(), NAMES))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise KeyError("on purpose")


@on_a_cluster
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_fails_behind_a_checkpoint(reentrant):
    """A reentrant checkpoint runs a backward pass of its own, which is done by then."""
    with pytest.raises(KeyError, match="on purpose"):
        there("a", calls_in_checkpoint, Failing.apply(leaf("driver.x") * 1), reentrant).sum().backward()
    gc.collect()  # pytest keeps the error in a circle
    names = ["a.w", "b.w"]
    wanted = weighted(weighted(leaf("driver.x")), "b.w").sin()
    assert_same(grads(names), expected(wanted.sum(), names) if reentrant else dict.fromkeys(names))


# -- torch.compile -----------------------------------------------------------------------------------------

COMPILED = """
    import torch
    import telegrad
    from telegrad import rpc

    weight = torch.linspace(0.5, 1.5, 3, requires_grad=True)

    def scaled(x, weight):
        return (x * weight).tanh()

    def local(function, *args):
        return function(*args)

    def there(function, *args):
        return rpc.rpc_sync("a", function, args=args)

    def later(function, *args):
        return rpc.rpc_async("a", function, args=args).wait()

    def created(function, *args):
        return rpc.remote("a", function, args=args).to_here()

    def forward(call, x):
        hidden = (x * 2).sin()
        hidden = call(scaled, hidden, weight).cos() * hidden
        return call(scaled, hidden, weight).square().sum()

    def step(call, x):
        loss = forward(call, x)
        loss.backward()
        return loss.detach()

    def gradients(function, call):
        x = torch.linspace(-1.0, 1.0, 3, requires_grad=True)
        weight.grad = None
        loss = function(call, x)
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), x.grad, weight.grad

    def beside(call, x):
        return part(call(scaled, part(x), weight)).square().sum()

    with telegrad.LocalCluster(["a"], transport="inproc"):
        for backend in ("eager", "aot_eager"):
            for call in (there, later, created):
                for function in (forward, step):
                    torch.compiler.reset()
                    compiled = torch.compile(function, backend=backend)
                    for _ in range(2):
                        torch.testing.assert_close(gradients(compiled, call), gradients(function, local))
            part = torch.compile(lambda x: (x.sin() * 3).cos(), backend=backend)
            found = gradients(beside, there)
            part = lambda x: (x.sin() * 3).cos()
            torch.testing.assert_close(found, gradients(beside, local))
        assert telegrad.autograd.debug_info()["passes"] == 0
    print("done")
"""


def test_torch_compile_around_and_beside_calls():
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(COMPILED)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n"
