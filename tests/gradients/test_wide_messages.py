"""Messages of several small tensors, which share a Recv: used in part.

      x ──▶ six functions of six weights ──▶ a message ──▶ a loss of some of the six

"results": the functions are another worker's. "arguments": the loss is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.gradients import in_process

PATIENCE = 30.0  # seconds
COUNT = 6
SIZES = {"small": (4,) * COUNT, "larger among them": (4, 4, 600, 4, 600, 4)}  # float64: 4096 bytes are small

Seen = list[tuple[str, torch.Tensor | None]]
SEEN: Seen = []
LEAVES: list[torch.Tensor] = []  # x, and the weights
KEPT: list[torch.Tensor] = []  # what was received
Call = Callable[..., Any]

ALL, EVEN, ODD, ONE, BUT_ONE = range(COUNT), (0, 2, 4), (1, 3, 5), (2,), (0, 1, 2, 3, 4)


def see(name: str) -> Callable[[torch.Tensor | None], None]:
    return lambda gradient: SEEN.append((name, None if gradient is None else gradient.detach().clone()))


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        see(ctx.name)(gradient)
        return gradient, None


def make(x: torch.Tensor, hooks: bool) -> tuple[torch.Tensor, ...]:
    made = [x * weight for weight in LEAVES[1:]]
    if hooks:
        made = [Noted.apply(y, f"function {i}") for i, y in enumerate(made)]
        for i, y in enumerate(made):
            y.register_hook(see(f"sent {i}"))
    return tuple(made)


def lose(parts: Sequence[Sequence[int]], hooks: bool, change: bool, *received: torch.Tensor) -> list[torch.Tensor]:
    """One loss for each part."""
    KEPT[:] = received
    for i, y in enumerate(received):
        if hooks:
            y.register_hook(see(f"received {i}"))
            y.retain_grad()
        if change:
            y.mul_(0.5)
    return [torch.stack([(received[i].sin() * (i + 1)).sum() for i in part]).sum() for part in parts]


def forward(
    call: Call, way: str, *parts: Sequence[int], hooks: bool = True, change: bool = False
) -> list[torch.Tensor]:
    if way == "results":
        return lose(parts, hooks, change, *call(make, LEAVES[0], hooks))
    made = make(LEAVES[0], hooks)
    losses: list[torch.Tensor] = call(lose, parts, hooks, change, *made)
    return losses


def there(function: Call, *args: Any) -> Any:
    return rpc.rpc_sync("a", function, args=args, timeout=PATIENCE)


def here(function: Call, *args: Any) -> Any:
    return function(*args)


def take(context_id: int) -> list[torch.Tensor | None]:
    """The gradients of all leaves since the last time."""
    found: dict[torch.Tensor, torch.Tensor | None] = {leaf: leaf.grad for leaf in LEAVES}
    if context_id:
        for engine in in_process.engines:
            found.update(engine.get_gradients(context_id))
    for leaf in LEAVES:
        leaf.grad = None
    return [None if (gradient := found[leaf]) is None else gradient.clone() for leaf in LEAVES]


def take_seen() -> dict[str, list[torch.Tensor | None]]:
    """What has run, by name: what it saw each time."""
    found: dict[str, list[torch.Tensor | None]] = {}
    for name, gradient in SEEN:
        found.setdefault(name, []).append(gradient)
    SEEN.clear()
    return found


def is_same(one: Any, other: Any) -> bool:
    """Bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one is other is None


@pytest.fixture(params=SIZES, autouse=True)
def _leaves(request: pytest.FixtureRequest) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(), *((size,) for size in SIZES[request.param])]
    LEAVES[:] = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    SEEN.clear()
    with telegrad.LocalCluster(["a"], transport="inproc"):
        yield
    for kept in (LEAVES, SEEN, KEPT):
        kept.clear()


plain_too = pytest.mark.parametrize("plain", [False, True], ids=["context", "plain"])
both_ways = pytest.mark.parametrize("way", ["results", "arguments"])


def context(plain: bool) -> Any:
    return nullcontext(0) if plain else autograd.context()


def backward(context_id: int, loss: torch.Tensor, **options: bool) -> None:
    if context_id:
        autograd.backward(context_id, [loss], timeout=PATIENCE, **options)
    else:
        loss.backward(**options)


@plain_too
@both_ways
@pytest.mark.parametrize("part", [ALL, EVEN, ONE, BUT_ONE], ids=["all", "even", "one", "but one"])
def test_what_was_not_used_does_not_run(part, way, plain):
    """Neither its hooks at the receiver, nor what it was made of, and hooks there; also not with None."""
    with context(plain) as context_id:
        (loss,) = forward(there, way, part)
        backward(context_id, loss)
        found, seen, retained = take(context_id), take_seen(), [y.grad for y in KEPT]
    (loss,) = forward(here, way, part)
    loss.backward()
    assert sorted(seen) == sorted(f"{what} {i}" for what in ("function", "received", "sent") for i in part)
    assert is_same(seen, take_seen())
    assert is_same(found, take(0))
    assert [i for i, gradient in enumerate(retained) if gradient is not None] == list(part)
    assert is_same(retained, [y.grad for y in KEPT])


@plain_too
@both_ways
def test_each_pass_uses_another_half(way, plain):
    with context(plain) as context_id:
        losses = forward(there, way, EVEN, ODD)
        all_seen = []
        for i, loss in enumerate(losses):
            backward(context_id, loss, retain_graph=i == 0)
            all_seen.append(take_seen())
        found, retained = take(context_id), [y.grad for y in KEPT]
    losses = forward(here, way, EVEN, ODD)
    for i, (loss, seen, part) in enumerate(zip(losses, all_seen, (EVEN, ODD), strict=True)):
        loss.backward(retain_graph=i == 0)
        assert sorted(seen) == sorted(f"{what} {i}" for what in ("function", "received", "sent") for i in part)
        assert is_same(seen, take_seen())
    assert is_same(found, take(0))
    assert is_same(retained, [y.grad for y in KEPT])


def repeat(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * number for number in range(30)]


@plain_too
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (3, 1, 2)], ids=str)
def test_each_that_was_received_has_memory_of_its_own(shape, plain):
    x = torch.ones(shape, requires_grad=True)
    with context(plain) as context_id:
        found = there(repeat, x)
        assert {y.untyped_storage().nbytes() for y in found} == {x.nbytes}
        assert len({y.untyped_storage().data_ptr() for y in found}) == 30
        assert [y.stride() for y in found] == [x.stride()] * 30
        found[3].mul_(2)
        backward(context_id, torch.stack(found).sum())
    assert [y.flatten()[0].item() for y in found[:6]] == [0, 1, 2, 6, 4, 5]


@plain_too
@both_ways
def test_changes_in_place(way, plain):
    """Of what was received: its hooks see the gradient of what it was before. What was sent stays as it was."""
    with context(plain) as context_id:
        (loss,) = forward(there, way, EVEN, change=True)
        backward(context_id, loss)
        found, seen = take(context_id), take_seen()
    (loss,) = forward(here, way, EVEN, change=True)
    loss.backward()
    assert is_same(seen, take_seen())
    assert is_same(found, take(0))


def sent_and_changed() -> torch.Tensor:
    made = make(LEAVES[0], False)
    (loss,) = there(lose, (EVEN,), False, False, *made)
    for y in made:
        y.mul_(7.0)
    return loss + 0 * torch.cat(made).sum()


@plain_too
def test_what_was_sent_is_changed_after_that(plain):
    with context(plain) as context_id:
        backward(context_id, sent_and_changed())
        found = take(context_id)
    (loss,) = forward(here, "arguments", EVEN, hooks=False)
    (loss + 0 * torch.cat(make(LEAVES[0], False)).sum()).backward()
    for one, other in zip(found, take(0), strict=True):
        torch.testing.assert_close(one, other)


@plain_too
@both_ways
@pytest.mark.parametrize("part", [EVEN, ONE], ids=["even", "one"])
def test_gradients_of_gradients(part, way, plain):
    x = LEAVES[0]
    with context(plain) as context_id:
        (loss,) = forward(there, way, part)
        if plain:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        else:
            (slope,) = autograd.grad(context_id, loss, x, create_graph=True, timeout=PATIENCE)
        backward(context_id, slope.square() + loss)
        found = take(context_id)
    (loss,) = forward(here, way, part)
    (wanted,) = torch.autograd.grad(loss, x, create_graph=True)
    (wanted.square() + loss).backward()
    assert torch.equal(slope, wanted)
    for one, other in zip(found, take(0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@plain_too
@both_ways
def test_create_graph_in_backward(way, plain):
    x = LEAVES[0]
    with context(plain) as context_id:
        (loss,) = forward(there, way, EVEN)
        backward(context_id, loss, create_graph=True)
        first = autograd.get_gradients(context_id)[x] if context_id else x.grad
        take(0)
        backward(context_id, first)
        second = take(context_id)
    (loss,) = forward(here, way, EVEN)
    loss.backward(create_graph=True)
    right = x.grad
    once = take(0)
    right.backward()
    twice = take(0)
    assert torch.equal(first, right)
    for found, one, other in zip(second, once, twice, strict=True):
        if not plain:  # a context adds up its passes
            other = one if other is None else one + other if one is not None else other
        torch.testing.assert_close(found, other, rtol=1e-12, atol=0)


def some_of_x(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three that depend on x, and three that do not."""
    return tuple(x * weight if i in EVEN else weight * 2 for i, weight in enumerate(LEAVES[1:]))


@plain_too
@pytest.mark.parametrize("_leaves", ["small"], indirect=True)
@pytest.mark.xfail(strict=True, reason="small tensors of a message have one Recv, and grad() runs all that leads to it")
def test_grad_runs_only_what_leads_to_its_inputs(plain):
    x = LEAVES[0]
    with context(plain) as context_id:
        received = there(some_of_x, x)
        for i, y in enumerate(received):
            y.register_hook(see(f"received {i}"))
        loss = torch.stack([y.sum() for y in received]).sum()
        if plain:
            torch.autograd.grad(loss, x)
        else:
            autograd.grad(context_id, loss, x, timeout=PATIENCE)
    assert sorted(take_seen()) == [f"received {i}" for i in EVEN]
