"""Gradients of gradients across workers, against local autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from named_leaves import PATIENCE, assert_same, expected, gradients, here, leaf, there

from telegrad import autograd

pytestmark = pytest.mark.usefixtures("module_cluster")

Grad = Callable[..., tuple[torch.Tensor, ...]]


def weighted(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x * leaf(name))


def cubed(x: torch.Tensor, name: str) -> torch.Tensor:
    return x**3 * leaf(name)


def nested(call, x: torch.Tensor) -> torch.Tensor:
    """On a: through b, and back through a."""
    h = torch.sin(x * leaf("a.w"))
    return call("b", nested_again, call, h) * h


def nested_again(call, h: torch.Tensor) -> torch.Tensor:
    return call("a", cubed, h * leaf("b.w"), "a.v") + h


#      x ──▶ a: tanh(x * a.w) ──▶ b: h³ * b.w ──▶ sum
def chain(call) -> torch.Tensor:
    h = call("a", weighted, leaf("driver.x"), "a.w")
    return call("b", cubed, h, "b.w").sum()


#      x ──┬──▶ a: tanh(x * a.w) ──┬──▶ b: h³ * b.w ──┬──▶ sum
#          ╰───────────────────────┴──────────────────╯
def skip(call) -> torch.Tensor:
    x = leaf("driver.x")
    h = call("a", weighted, x, "a.w")
    y = call("b", cubed, h + x, "b.w")
    return (y * h * x).sum()


#      x ──▶ a: h = sin(x * a.w) ──▶ b: (h * b.w) ──▶ a: (...)³ * a.v
#      sum ◀── * h ◀──────────────── + h ◀──────────────────╯
def nest(call) -> torch.Tensor:
    return call("a", nested, call, leaf("driver.x")).sum()


#      x ──▶ driver: tanh(x * driver.w) ──▶ a: ──▶ a: h³ * a.v ──▶ sum         each calls itself
def oneself(call) -> torch.Tensor:
    h = call("driver", weighted, leaf("driver.x"), "driver.w")
    return (call("a", call_oneself, call, h) * h).sum()


def call_oneself(call, x: torch.Tensor) -> torch.Tensor:
    return call("a", cubed, x, "a.v") * x


#      x, v ──▶ a: (tanh(x * a.w), x * v, v³) ──▶ sum of the first and the third       one message, used in part
def in_part(call) -> torch.Tensor:
    first, _, third = call("a", three, leaf("driver.x"), leaf("driver.v"))
    return (first * third).sum()


def three(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return weighted(x, "a.w"), x * v, v**3


NAMES = ["driver.x", "driver.w", "driver.v", "a.w", "a.v", "b.w"]
FORWARDS = [chain, skip, nest, oneself, in_part]


def local_grad(outputs: Any, inputs: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, **options)


def grad_in(context_id: int) -> Grad:
    def grad(outputs: Any, inputs: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        return autograd.grad(context_id, outputs, inputs, timeout=PATIENCE, **options)

    return grad


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_grad_of_grad(forward):
    """Second and third derivatives with respect to x, and then the gradients of all leaves of the third."""

    def run(call, grad: Grad) -> list[torch.Tensor]:
        x, found, last = leaf("driver.x"), [], forward(call)
        for _ in range(2):
            (gradient,) = grad(last, x, create_graph=True)
            found.append(gradient)
            last = (gradient * torch.arange(1.0, 4.0)).sum()
        return [*found, last]

    *wanted, wanted_last = run(here, local_grad)
    wanted_leaves = expected(wanted_last, NAMES)
    with autograd.context() as context_id:
        *found, last = run(there, grad_in(context_id))
        torch.testing.assert_close(found, wanted)
        autograd.backward(context_id, [last], timeout=PATIENCE)
        assert_same(gradients(context_id, NAMES), wanted_leaves)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_backward_with_create_graph_and_then_backward_of_its_gradients(forward):
    """First gradients of all leaves go to the context; those of the driver's are differentiated again, and add up."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [forward(there)], create_graph=True, timeout=PATIENCE)
        first = autograd.get_gradients(context_id)[leaf("driver.x")]
        penalty = first.square().sum()
        autograd.backward(context_id, [penalty], timeout=PATIENCE)
        found = gradients(context_id, NAMES)
    loss = forward(here)
    (first,) = torch.autograd.grad(loss, leaf("driver.x"), create_graph=True)
    once, twice = expected(loss, NAMES, retain_graph=True), expected(first.square().sum(), NAMES)
    wanted = {
        name: None if once[name] is None else once[name] + (0 if twice[name] is None else twice[name]) for name in NAMES
    }
    assert_same(found, wanted)


def penalty_there(context_id: int, name: str) -> torch.Tensor:
    """On the worker of a leaf: a number made of the gradient that it has got there."""
    return autograd.get_gradients(context_id)[leaf(name)].square().sum()


def test_a_penalty_on_gradients_of_leaves_of_other_workers():
    #      first:  loss ──▶ gradients of a.w on a, of b.w on b         (with a graph)
    #      then:   |∇a.w|² (on a) + |∇b.w|² (on b) ──▶ driver ──▶ backward, through all of it again
    with autograd.context() as context_id:
        loss = skip(there)
        autograd.backward(context_id, [loss], create_graph=True, timeout=PATIENCE)
        before = gradients(context_id, NAMES)
        penalty = there("a", penalty_there, context_id, "a.w") + there("b", penalty_there, context_id, "b.w")
        autograd.backward(context_id, [penalty], timeout=PATIENCE)
        after = gradients(context_id, NAMES)
    names = ["driver.x", "a.w", "b.w"]
    first = torch.autograd.grad(skip(here), [leaf("a.w"), leaf("b.w")], create_graph=True)
    wanted = expected(sum(g.square().sum() for g in first), names)
    assert_same({name: after[name] - before[name] for name in names}, wanted)


def test_the_gradient_penalty_of_a_critic_on_another_worker():
    #      driver: x ──▶ a: critic ──▶ score        penalty = (|∂score/∂x| - 1)²
    def run(call, grad: Grad) -> torch.Tensor:
        x = leaf("driver.batch", 4, 3)
        score = call("a", critic, x)
        (slope,) = grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    names = ["driver.batch", "a.first", "a.second"]
    wanted = run(here, local_grad)
    with autograd.context() as context_id:
        loss = run(there, grad_in(context_id))
        torch.testing.assert_close(loss, wanted)
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        found = gradients(context_id, names)
    assert_same(found, expected(wanted, names))


def critic(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ leaf("a.first", 3, 5)) @ leaf("a.second", 5)


# -- MAML --------------------------------------------------------------------------------------------------

# A model in three parts, on a, on b and on the driver. The learner holds the fast weights: they are made of each part's
# own parameters, and each step makes new ones out of the gradient of the inner loss, which runs through all workers.


def start(name: str, *shape: int) -> torch.Tensor:
    """The parameter of a part, as the first fast weight."""
    return leaf(name, *shape) * 1


def hidden(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def inner_loss(call, weights: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = call("a", hidden, x, weights[0])
    h = call("b", hidden, h, weights[1])
    return (h @ weights[2] - y).square().mean()


def maml(call, grad: Grad, steps: int = 2, rate: float = 0.1) -> torch.Tensor:
    #      a.maml ─▶ w₀ ──▶ inner loss ──▶ w₁ = w₀ - rate * ∇ ──▶ inner loss ──▶ w₂ ──▶ outer loss
    #      b.maml ─▶    ╱                                     ╱                     ╱
    #      driver.maml ╱
    x, y = leaf("driver.tasks", 6, 3).detach(), leaf("driver.targets", 6).detach()
    weights = [
        call("a", start, "a.maml", 3, 4),
        call("b", start, "b.maml", 4, 4),
        leaf("driver.maml", 4) * leaf("driver.scale", 1),
    ]
    for _ in range(steps):
        slopes = grad(inner_loss(call, weights, x[:3], y[:3]), weights, create_graph=True)
        weights = [weight - rate * slope for weight, slope in zip(weights, slopes, strict=True)]
    return inner_loss(call, weights, x[3:], y[3:])


def test_a_two_step_maml_inner_loop_over_three_workers():
    names = ["a.maml", "b.maml", "driver.maml", "driver.scale"]
    wanted = maml(here, local_grad)
    with autograd.context() as context_id:
        loss = maml(there, grad_in(context_id))
        torch.testing.assert_close(loss, wanted)
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        found = gradients(context_id, names)
    assert_same(found, expected(wanted, names))


# A part that keeps its own fast weights: the inner loop asks each worker to step by itself.

_fast: dict[str, torch.Tensor] = {}


def begin(name: str) -> None:
    _fast[name] = leaf(name, 3) * 1


def forward_fast(name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * _fast[name])


def step_fast(name: str, slope: torch.Tensor) -> None:
    _fast[name] = _fast[name] - 0.1 * slope


def test_fast_weights_that_stay_on_their_worker():
    #      each step: h = a: sin(x * w);  ∂loss/∂h on the driver goes back to a by a call, which changes w with it
    def run(call, grad: Grad) -> torch.Tensor:
        x = leaf("driver.x")
        call("a", begin, "a.fast")
        for _ in range(2):
            h = call("a", forward_fast, "a.fast", x)
            (slope,) = grad(h.square().sum(), h, create_graph=True)
            call("a", step_fast, "a.fast", slope * x)
        return call("a", forward_fast, "a.fast", x).square().sum()

    names = ["driver.x", "a.fast"]
    wanted = expected(run(here, local_grad), names)
    with autograd.context() as context_id:
        autograd.backward(context_id, [run(there, grad_in(context_id))], timeout=PATIENCE)
        found = gradients(context_id, names)
    assert_same(found, wanted)


# -- details -----------------------------------------------------------------------------------------------


def test_a_hessian_row_by_row():
    def rows(call, grad: Grad) -> list[torch.Tensor]:
        x = leaf("driver.x")
        (slope,) = grad(skip(call), x, create_graph=True)
        return [grad(slope[n], x, retain_graph=True)[0] for n in range(3)]

    with autograd.context() as context_id:
        found = torch.stack(rows(there, grad_in(context_id)))
    torch.testing.assert_close(found, torch.stack(rows(here, local_grad)))
    torch.testing.assert_close(found, found.T)


def test_gradients_given_to_the_roots_may_have_a_history_too():
    #      the product of a Jacobian with a vector that requires grad
    def run(call, grad: Grad) -> tuple[torch.Tensor, ...]:
        x, v = leaf("driver.x"), leaf("driver.v")
        y = call("a", cubed, x, "a.w")
        (product,) = grad(y, x, grad_outputs=v, create_graph=True)
        return grad(product.sum(), [x, v])

    with autograd.context() as context_id:
        found = run(there, grad_in(context_id))
    torch.testing.assert_close(found, run(here, local_grad))


def test_large_tensors():
    x = torch.linspace(-1, 1, 20_000, dtype=torch.float64, requires_grad=True)

    def run(call, grad: Grad) -> torch.Tensor:
        y = call("b", torch.exp, call("a", torch.sin, x) * x)
        (slope,) = grad(y.sum(), x, create_graph=True)
        return grad(slope.square().sum(), x)[0]

    with autograd.context() as context_id:
        found = run(there, grad_in(context_id))
    torch.testing.assert_close(found, run(here, local_grad))


def test_without_create_graph_gradients_have_no_history():
    with autograd.context() as context_id:
        (found,) = autograd.grad(context_id, chain(there), leaf("driver.x"))
        assert not found.requires_grad
