"""What users see torch get wrong, and telegrad gets right: a test for each row of this table.

an RPC output not used in the loss          test_an_output_that_is_not_used_in_the_loss
an unused call on a used result             test_an_unused_call_on_a_used_result
`nn.Parameter` as an argument               test_a_parameter_as_an_argument
modes around a call                         test_modes_around_a_call
gradients of gradients                      test_gradients_of_gradients
non-scalar roots, grad()                    test_non_scalar_roots_and_grad
nested contexts                             test_nested_contexts
post-accumulate hooks                       test_post_accumulate_hooks
remote exception                            test_a_remote_exception
peer killed, owner of a context dies        test_deaths.py
"""

from __future__ import annotations

import time

import pytest
import torch
from named_leaves import PATIENCE, assert_same, check, expected, gradients, here, leaf, there
from torch import nn

from telegrad import autograd, errors

pytestmark = pytest.mark.usefixtures("module_cluster")

AT_ONCE = 5.0  # seconds; where torch waits for a timeout or for ever


def weighted(x: torch.Tensor, name: str = "a.w") -> torch.Tensor:
    return x * leaf(name)


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * leaf("a.w"), x * leaf("a.v")


def test_an_output_that_is_not_used_in_the_loss():
    #      driver            a
    #      x ─────────▶ x * a.w ──▶ used
    #                   x * a.v ──▶ unused
    #      and a whole call whose result is dropped:  x ──▶ b: x * b.w
    def forward(call) -> torch.Tensor:
        x = leaf("driver.x")
        used, _unused = call("a", both, x)
        call("b", weighted, x, "b.w")
        return used.sum()

    began = time.monotonic()
    check(forward, ["driver.x", "a.w", "a.v", "b.w"])
    assert time.monotonic() - began < AT_ONCE


def test_an_unused_call_on_a_used_result():
    #      driver            a                 b
    #      x ─────────▶ x * a.w ──▶ h
    #      h ─────────────────────────▶ h * b.w     (dropped)
    #      loss = h.sum()
    def forward(call) -> torch.Tensor:
        h = call("a", weighted, leaf("driver.x"))
        call("b", weighted, h, "b.w")
        return h.sum()

    began = time.monotonic()
    check(forward, ["driver.x", "a.w", "b.w"])
    assert time.monotonic() - began < AT_ONCE


def test_a_parameter_as_an_argument():
    #      driver: parameter ───────▶ a: * a.w ───────▶ driver: sum
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    linear = nn.Linear(3, 2).double()
    with autograd.context() as context_id:
        loss = there("a", weighted, parameter).sum() + there("a", linear, leaf("driver.x")).sum()
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
    torch.testing.assert_close(found[parameter], leaf("a.w").detach())
    wanted = torch.autograd.grad(linear(leaf("driver.x")).sum(), [linear.weight, linear.bias])
    torch.testing.assert_close([found[linear.weight], found[linear.bias]], list(wanted))


def modes_there() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T


def test_modes_around_a_call():
    x = torch.ones(2, 2, requires_grad=True)
    with autograd.context():
        with torch.no_grad():
            assert there("a", modes_there) == (False, False, False)
            assert not there("a", product, x).requires_grad
        with torch.inference_mode():
            assert there("a", modes_there) == (False, True, False)
            assert not there("a", product, x).requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert there("a", modes_there) == (True, False, True)
            y = there("a", product, x)
            assert y.dtype is torch.bfloat16 and y.requires_grad
        assert there("a", modes_there) == (True, False, False)


def cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3 * leaf("a.w")


def test_gradients_of_gradients():
    #      driver: x ───────▶ a: x³ * a.w ───────▶ driver: ∂/∂x, and of that ∂/∂x and ∂/∂a.w
    with autograd.context() as context_id:
        (first,) = autograd.grad(context_id, there("a", cubed, leaf("driver.x")).sum(), leaf("driver.x"),
                                 create_graph=True)  # fmt: skip
        autograd.backward(context_id, [first.square().sum()])
        found = gradients(context_id, ["driver.x", "a.w"])
    (first,) = torch.autograd.grad(cubed(leaf("driver.x")).sum(), leaf("driver.x"), create_graph=True)
    assert_same(found, expected(first.square().sum(), ["driver.x", "a.w"]))


def test_non_scalar_roots_and_grad():
    given, unused = torch.tensor([1.0, 2, 3], dtype=torch.float64), torch.ones(1, requires_grad=True)
    x = leaf("driver.x")
    with autograd.context() as context_id:
        y = there("a", weighted, x)
        autograd.backward(context_id, [y], retain_graph=True, grad_tensors=[given])
        found = gradients(context_id, ["driver.x", "a.w"])
        of_x, of_unused = autograd.grad(context_id, y, [x, unused], [given], allow_unused=True)
    assert_same(found, expected(weighted(x), ["driver.x", "a.w"], grad_outputs=[given]))
    torch.testing.assert_close(of_x, given * leaf("a.w").detach())
    assert of_unused is None


def test_nested_contexts():
    with autograd.context() as outer:
        h = there("a", weighted, leaf("driver.x"))
        with autograd.context() as inner:
            autograd.backward(inner, [there("b", weighted, leaf("driver.x"), "b.w").sum()])
            of_inner = gradients(inner, ["driver.x", "b.w"])
        autograd.backward(outer, [h.sum()])
        of_outer = gradients(outer, ["driver.x", "a.w"])
    assert_same(of_inner, expected(weighted(leaf("driver.x"), "b.w").sum(), ["driver.x", "b.w"]))
    assert_same(of_outer, expected(weighted(leaf("driver.x")).sum(), ["driver.x", "a.w"]))


_seen: list[torch.Tensor] = []
_handles: list = []


def add_hook() -> None:
    def hook(weight: torch.Tensor) -> None:
        _seen.append(weight.grad.clone())

    _handles.append(leaf("a.hooked").register_post_accumulate_grad_hook(hook))


def take_seen() -> list[torch.Tensor]:
    found = _seen.copy()
    _seen.clear()
    while _handles:
        _handles.pop().remove()
    return found


def test_post_accumulate_hooks():
    #      driver            a
    #      x ─┬─────▶ x * a.hooked ──▶ y
    #         ╰─────▶ x * a.hooked ──▶ z        two ways to the leaf, one gradient
    def forward(call) -> torch.Tensor:
        x = leaf("driver.x")
        return (call("a", weighted, x, "a.hooked") * call("a", weighted, x, "a.hooked")).sum()

    there("a", add_hook)
    try:
        with autograd.context() as context_id:
            autograd.backward(context_id, [forward(there)])
            found = gradients(context_id, ["a.hooked"])
    finally:
        seen = there("a", take_seen)
    wanted = expected(forward(here), ["a.hooked"])
    assert len(seen) == 1
    assert_same({"a.hooked": seen[0]}, wanted)
    assert_same(found, wanted)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("missing in backward")


def failing_backward(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(x)


def failing() -> None:
    raise KeyError("missing in a call")


def test_a_remote_exception():
    with pytest.raises(KeyError, match="missing in a call") as caught:
        there("a", failing)
    assert "in failing" in str(caught.value.__cause__) and "on worker 'a'" in str(caught.value.__cause__)
    with autograd.context() as context_id:
        loss = there("a", failing_backward, leaf("driver.x")).sum()
        with pytest.raises(errors.BackwardError, match=r"Error on Node \d+: .*missing in backward") as failed:
            autograd.backward(context_id, [loss], timeout=PATIENCE)
        assert failed.value.worker == "a"
        assert isinstance(failed.value.__cause__, KeyError)
        assert "in backward" in str(failed.value.__cause__.__cause__)
