"""Users' code inside a backward pass: hooks of every kind, custom functions, checkpoints. It runs as often, with the
same gradients and in the same surroundings as it does locally; and the pass's context is current in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from named_leaves import PATIENCE, assert_same, check, expected, gradients, here, leaf, there
from torch import nn
from torch.utils.checkpoint import checkpoint

from telegrad import autograd, rpc

SEEN: list[tuple[str, Any]] = []  # what hooks have seen, in this process


def take_seen() -> list[tuple[str, Any]]:
    found = SEEN.copy()
    SEEN.clear()
    return found


def all_seen() -> list[tuple[str, Any]]:
    """What hooks have seen, on all workers."""
    return sorted([one for name in ("a", "b") for one in there(name, take_seen)] + take_seen())


@pytest.fixture(autouse=True)
def nothing_seen_yet(module_cluster) -> None:
    all_seen()


def see(name: str) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor) -> None:
        SEEN.append((name, tuple(round(v, 9) for v in gradient.flatten().tolist())))

    return hook


def weighted(x: torch.Tensor, name: str) -> torch.Tensor:
    return x * leaf(name)


def compare_seen(forward: Callable[[Any], torch.Tensor], *names: str, count: int) -> None:
    """Hooks have seen the same as locally, as many times; and the leaves have the same gradients."""
    check(forward, names)  # which runs it across workers, and then locally
    seen = Counter(all_seen())
    assert seen.total() == 2 * count, f"each hook once, in each of two runs: {seen}"
    assert all(times % 2 == 0 for times in seen.values()), f"the same in both runs: {seen}"


# -- on intermediate tensors -------------------------------------------------------------------------------


def seen_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.register_hook(see("argument"))
    h = x * leaf("a.w")
    h.register_hook(see("h"))
    return h * 2, h * 3


def test_a_hook_on_an_intermediate_sees_the_whole_gradient_once():
    #      driver                      a
    #      k = x * 1 ─┬────────▶ h = k * a.w ─┬─▶ h * 2 ──▶ y
    #      (hook: k)  │         (hooks: k, h) ╰─▶ h * 3 ──▶ z
    #                 ├──────────────────────────▶ b: k * b.w ──▶ v
    #                 ╰─▶ (y * z * v * k).sum()
    def forward(call) -> torch.Tensor:
        k = leaf("driver.x") * 1
        k.register_hook(see("k"))
        y, z = call("a", seen_twice, k * 1 if call is here else k)
        v = call("b", weighted, k, "b.w")
        return (y * z * v * k).sum()

    compare_seen(forward, "driver.x", "a.w", "b.w", count=3)


def test_a_hook_on_something_received():
    def forward(call) -> torch.Tensor:
        y = call("a", weighted, leaf("driver.x"), "a.w")
        y.register_hook(see("y"))
        return (y * y).sum() + y.sum()

    compare_seen(forward, "driver.x", "a.w", count=1)


def test_a_hook_that_changes_the_gradient():
    def forward(call) -> torch.Tensor:
        y = call("a", with_changing_hook, leaf("driver.x"))
        y.register_hook(lambda gradient: gradient + 1)
        return (y * y).sum()

    check(forward, ["driver.x", "a.w"])


def with_changing_hook(x: torch.Tensor) -> torch.Tensor:
    h = x * leaf("a.w")
    h.register_hook(lambda gradient: gradient * 10)
    return h * 2


_kept: dict[str, torch.Tensor] = {}


def retained(x: torch.Tensor) -> torch.Tensor:
    h = _kept["h"] = x * leaf("a.w")
    h.retain_grad()
    return h * h


def kept_grad() -> torch.Tensor | None:
    return _kept.pop("h").grad


def test_retain_grad():
    with autograd.context() as context_id:
        y = there("a", retained, leaf("driver.x"))
        y.retain_grad()
        autograd.backward(context_id, [(y * y).sum()])
        found = y.grad, there("a", kept_grad)
    y = retained(leaf("driver.x"))
    y.retain_grad()
    torch.autograd.backward([(y * y).sum()], inputs=[leaf("driver.x"), _kept["h"], y])
    leaf("driver.x").grad = None
    torch.testing.assert_close(found, (y.grad, kept_grad()))


# -- on leaves ---------------------------------------------------------------------------------------------

_handles: list[Any] = []


def hook_leaf(name: str) -> None:
    weight = leaf(name)
    _handles.append(weight.register_hook(see(f"hook of {name}")))
    after = see(f"post hook of {name}")
    _handles.append(weight.register_post_accumulate_grad_hook(lambda w: after(w.grad)))


def unhook() -> None:
    while _handles:
        _handles.pop().remove()


def test_hooks_on_a_leaf_see_the_whole_gradient_of_a_pass_once():
    #      driver                  a
    #      x ──┬───────▶ x * a.hooked ─┬──▶ y
    #          ╰───────▶ x * a.hooked ─┴──▶ z        two messages, each with a Send
    #      (y * z).sum() + y.sum()
    def forward(call) -> torch.Tensor:
        x = leaf("driver.hooked")
        y, z = call("a", weighted, x, "a.hooked"), call("a", weighted, x, "a.hooked")
        return (y * z).sum() + y.sum()

    names = ["driver.hooked", "a.hooked"]
    wanted = expected(forward(here), names)
    hook_leaf("driver.hooked")
    there("a", hook_leaf, "a.hooked")
    try:
        with autograd.context() as context_id:
            loss = forward(there)
            for times in (1, 2):
                autograd.backward(context_id, [loss], retain_graph=True)
                assert_same(gradients(context_id, names), wanted, times=times)
                values = {name: tuple(round(v, 9) for v in wanted[name].tolist()) for name in names}
                kinds = ("hook of", "post hook of")
                assert all_seen() == sorted((f"{kind} {n}", values[n]) for n in names for kind in kinds)
        assert leaf("driver.hooked").grad is None
    finally:
        unhook()
        there("a", unhook)


def module_with_hooks(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    module[0].register_full_backward_hook(lambda m, gi, go: see("full backward hook")(go[0]))
    module[2].register_full_backward_pre_hook(lambda m, go: see("full backward pre hook")(go[0]))
    return module(x)


def test_hooks_on_modules():
    def forward(call) -> torch.Tensor:
        x = leaf("driver.x")
        return (call("a", module_with_hooks, x) * module_with_hooks(x)).sum()

    compare_seen(forward, "driver.x", count=4)


def multi_hooked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    u, v = x * 2, x * leaf("a.w")
    torch.autograd.graph.register_multi_grad_hook(
        (u, v), lambda found: [see("multi")(gradient) for gradient in found if gradient is not None]
    )
    return u, v


def test_multi_grad_hooks():
    def forward(call) -> torch.Tensor:
        u, v = call("a", multi_hooked, leaf("driver.x"))
        return (u * v).sum()

    compare_seen(forward, "driver.x", "a.w", count=2)


# -- where hooks run ---------------------------------------------------------------------------------------


def see_surroundings(gradient: torch.Tensor) -> None:
    context = autograd._current_context()._context_id()
    SEEN.append((rpc.get_worker_info().name, (context, torch.is_grad_enabled())))


def with_surroundings(x: torch.Tensor) -> torch.Tensor:
    h = x * leaf("a.w")
    h.register_hook(see_surroundings)
    return h * 1


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_passs_context_and_worker_are_current_in_hooks(create_graph):
    with autograd.context() as context_id:
        y = there("a", with_surroundings, leaf("driver.x"))
        y.register_hook(see_surroundings)
        with autograd.context():  # which is not the pass's
            autograd.backward(context_id, [y.sum()], create_graph=create_graph)
    assert all_seen() == [("a", (context_id, create_graph)), ("driver", (context_id, create_graph))]


def call_in_hook(gradient: torch.Tensor) -> torch.Tensor:
    """Asks b to change the gradient."""
    return there("b", halved, gradient)


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def with_calling_hook(x: torch.Tensor) -> torch.Tensor:
    h = x * leaf("a.w")
    h.register_hook(call_in_hook)
    return h * 1


def test_calls_work_inside_hooks():
    #      driver             a                          b
    #      x ───────▶ h = x * a.w  (hook: asks b)
    #      y = h ◀──  (hook: asks b)
    with autograd.context() as context_id:
        y = there("a", with_calling_hook, leaf("driver.x"))
        y.register_hook(call_in_hook)
        autograd.backward(context_id, [(y * y).sum()])
        found = gradients(context_id, ["driver.x", "a.w"])
    local = weighted(leaf("driver.x"), "a.w").square().sum() / 4
    assert_same(found, expected(local, ["driver.x", "a.w"]))


def call_root_in_hook(gradient: torch.Tensor) -> torch.Tensor:
    """Calls the worker that has called backward(), and waits for it."""
    return there("driver", halved, gradient)


def with_hook_that_calls_the_root(x: torch.Tensor) -> torch.Tensor:
    h = x * leaf("a.w")
    h.register_hook(call_root_in_hook)
    return h * 1


def test_a_hook_may_call_the_root():
    with autograd.context() as context_id:
        y = there("a", with_hook_that_calls_the_root, leaf("driver.x"))
        autograd.backward(context_id, [y.sum()])
        found = gradients(context_id, ["driver.x"])
    assert_same(found, expected(weighted(leaf("driver.x"), "a.w").sum() / 2, ["driver.x"]))


def ask_gradients_in_hook(gradient: torch.Tensor) -> None:
    context_id = autograd._current_context()._context_id()
    SEEN.append(("gradients", len(autograd.get_gradients(context_id))))
    SEEN.append(("gradients there", there("b", count_gradients, context_id)))


def count_gradients(context_id: int) -> int:
    return len(autograd.get_gradients(context_id))


def with_asking_hook(x: torch.Tensor) -> torch.Tensor:
    h = x * leaf("a.w")
    h.register_hook(ask_gradients_in_hook)
    return there("b", weighted, h, "b.w")


def test_inside_hooks_the_gradients_of_passes_that_are_done_can_be_asked_for():
    with autograd.context() as context_id:
        y = there("a", with_asking_hook, leaf("driver.x"))
        for count in (0, 1):
            autograd.backward(context_id, [y.sum()], retain_graph=True, timeout=PATIENCE)
            assert all_seen() == [("gradients", count), ("gradients there", count)]


def test_grad_inside_a_hook():
    #      the hook of h asks for a gradient that runs through b, in a pass of its own
    with autograd.context() as context_id:
        h = there("a", weighted, leaf("driver.x"), "a.w")

        def change(gradient: torch.Tensor) -> torch.Tensor:
            z = gradient.detach().requires_grad_()
            with torch.enable_grad():
                y = there("b", weighted, z * z, "b.w").sum()
            return autograd.grad(context_id, y, z, timeout=PATIENCE)[0]

        h.register_hook(change)
        autograd.backward(context_id, [h.sum()], timeout=PATIENCE)
        found = gradients(context_id, ["driver.x", "a.w", "b.w"])
    # The hook turns ones into 2 * b.w.
    local = (weighted(leaf("driver.x"), "a.w") * 2 * leaf("b.w").detach()).sum()
    assert_same(found, expected(local, ["driver.x", "a.w", "b.w"]))


# -- custom functions --------------------------------------------------------------------------------------


class NoGradient(torch.autograd.Function):
    """Its backward gives nothing for its first input."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * 2


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    return NoGradient.apply(x * 3, leaf("a.w"))


def test_a_function_that_returns_none_leaves_nobody_waiting():
    #      driver: x ───────▶ a: NoGradient(x * 3, a.w)         no gradient comes to x, and its worker is told so
    def forward(call) -> torch.Tensor:
        x = leaf("driver.x")
        return (call("a", without_gradient, call("b", weighted, x, "b.w")) * 2).sum()

    check(forward, ["a.w"])
    with autograd.context() as context_id:
        autograd.backward(context_id, [forward(there)], timeout=PATIENCE)
        found = gradients(context_id, ["driver.x", "b.w"])
    forward(here).backward(inputs=[leaf("driver.x"), leaf("b.w")])
    for name, gradient in found.items():
        local, leaf(name).grad = leaf(name).grad, None
        assert (gradient is None or not gradient.any()) and (local is None or not local.any())


class TwoOutputs(torch.autograd.Function):
    """Tells which of its outputs got a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        SEEN.append(("got", (first is not None, second is not None)))
        total = torch.zeros(3, dtype=torch.float64)
        if first is not None:
            total = total + 2 * first
        if second is not None:
            total = total + 3 * second
        return total


def two_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return TwoOutputs.apply(x)


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_a_custom_function_sees_none_where_an_output_was_not_used(used):
    def forward(call) -> torch.Tensor:
        outputs = call("a", two_outputs, leaf("driver.x"))
        return sum(output.sum() for output, is_used in zip(outputs, used, strict=True) if is_used)

    check(forward, ["driver.x"])
    assert all_seen() == [("got", used)] * 2


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        see(ctx.name)(gradient)
        return gradient, None


def counted(x: torch.Tensor) -> torch.Tensor:
    return Counted.apply(x * leaf("a.w"), "counted")


def test_side_effects_of_custom_functions_happen_once_a_pass():
    def forward(call) -> torch.Tensor:
        y = call("a", counted, leaf("driver.x"))
        return (call("b", weighted, y, "b.w") * y).sum()

    compare_seen(forward, "driver.x", "a.w", "b.w", count=1)


class SineThere(torch.autograd.Function):
    """Its forward and its backward are calls."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return there("a", torch.sin, x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * there("a", torch.cos, x)


def test_a_custom_function_that_makes_calls():
    with autograd.context() as context_id:
        autograd.backward(context_id, [SineThere.apply(leaf("driver.x")).sum()])
        found = gradients(context_id, ["driver.x"])
    assert_same(found, expected(torch.sin(leaf("driver.x")).sum(), ["driver.x"]))


def packed(x: torch.Tensor) -> torch.Tensor:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        SEEN.append(("pack", 0))
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        SEEN.append(("unpack", 0))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return torch.sin(x) * leaf("a.w")


def test_saved_tensor_hooks():
    check(lambda call: call("a", packed, leaf("driver.x")).sum(), ["driver.x", "a.w"])
    seen = all_seen()
    assert seen.count(("pack", 0)) == seen.count(("unpack", 0)) == 6  # three tensors, in two runs


def test_anomaly_mode():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        check(lambda call: call("a", weighted, leaf("driver.x"), "a.w").sum(), ["driver.x", "a.w"])


# -- checkpoints -------------------------------------------------------------------------------------------


def block(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(("block", 0))
    return torch.tanh(x * leaf("a.w")) * leaf("a.v")


def checkpointed(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    y = checkpoint(block, x, use_reentrant=reentrant)
    return checkpoint(block, y * 2, use_reentrant=reentrant)


NAMES = ["driver.x", "a.w", "a.v"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_on_another_worker(reentrant):
    #      driver: x ───────▶ a: checkpoint, * 2, checkpoint ───────▶ driver
    def forward(call) -> torch.Tensor:
        return (call("a", checkpointed, leaf("driver.x"), reentrant) * leaf("driver.x")).sum()

    with autograd.context() as context_id:
        autograd.backward(context_id, [forward(there)])
        found = gradients(context_id, NAMES)
    assert len(all_seen()) == 4  # forward and again in backward, of two blocks
    local = block(block(leaf("driver.x")) * 2) * leaf("driver.x")
    assert_same(found, expected(local.sum(), NAMES))
    assert all(leaf(name).grad is None for name in NAMES)


def nested_blocks(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(block, x * leaf("a.v"), use_reentrant=reentrant) * leaf("a.w")


def nested_checkpoints(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(nested_blocks, x, reentrant, use_reentrant=reentrant) * leaf("a.w") + x * leaf("a.w")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of the inner one, in forward
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_of_checkpoints(reentrant):
    #      a leaf is used inside of both, between them and outside
    with autograd.context() as context_id:
        loss = (there("a", nested_checkpoints, leaf("driver.x"), reentrant) * leaf("driver.x")).sum()
        for _ in range(2):
            autograd.backward(context_id, [loss], retain_graph=True)
        found = gradients(context_id, NAMES)
    x, w, v = (leaf(name) for name in NAMES)
    local = (block(x * v) * w * w + x * w) * x
    assert_same(found, expected(local.sum(), NAMES), times=2)


def inner_leaves(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * leaf("a.v")


def one_leaf_each(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(inner_leaves, x * leaf("a.w"), use_reentrant=True)


def deep_checkpoints(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(one_leaf_each, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of the inner one, in forward
def test_a_leaf_that_only_an_inner_checkpoint_knows():
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", deep_checkpoints, leaf("driver.x")).sum()])
        found = gradients(context_id, NAMES)
    x, w, v = (leaf(name) for name in NAMES)
    assert_same(found, expected((torch.sin(x * w) * v).sum(), NAMES))
    assert all(leaf(name).grad is None for name in NAMES)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_what_was_received(reentrant):
    #      driver: x ───────▶ a: x * a.w ───────▶ driver: checkpoint ───────▶ b: * b.w ───────▶ driver: sum
    def forward(call) -> torch.Tensor:
        h = call("a", weighted, leaf("driver.x"), "a.w")
        h = checkpoint(local_block, h, use_reentrant=reentrant) if call is there else local_block(h)
        return (call("b", weighted, h, "b.w") * h).sum()

    names = ["driver.x", "a.w", "b.w", "driver.w"]
    check(forward, names)
    assert leaf("driver.w").grad is None


def local_block(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * leaf("driver.w")) + x


def block_with_call(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(("block", 0))
    return torch.tanh(there("a", weighted, x * leaf("driver.w"), "a.w"))


def test_a_checkpoint_around_a_call():
    #      driver: checkpoint(x * w ──▶ a: * a.w ──▶ tanh) ──▶ sum      the call is made again in the backward pass
    names = ["driver.x", "driver.w", "a.w"]
    with autograd.context() as context_id:
        loss = checkpoint(block_with_call, leaf("driver.x"), use_reentrant=False).sum()
        autograd.backward(context_id, [loss])
        found = gradients(context_id, names)
    assert len(all_seen()) == 2
    local = torch.tanh(weighted(leaf("driver.x") * leaf("driver.w"), "a.w")).sum()
    assert_same(found, expected(local, names))


def test_a_reentrant_checkpoint_around_a_call_is_an_error_that_says_so():
    """Its backward runs an engine call of its own, which belongs to no pass."""
    with autograd.context() as context_id:
        loss = checkpoint(block_with_call, leaf("driver.x"), use_reentrant=True).sum()
        with pytest.raises(RuntimeError, match="received from another worker"):
            autograd.backward(context_id, [loss])
        autograd.backward(context_id, [there("a", weighted, leaf("driver.x"), "a.w").sum()])


# -- local backward beside a pass --------------------------------------------------------------------------


class Gate:
    """Holds a backward pass, in one process, until it is let go."""

    entered = threading.Event()
    opened = threading.Event()


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Gate.entered.set()
        assert Gate.opened.wait(PATIENCE)
        return gradient


def gated(x: torch.Tensor) -> torch.Tensor:
    Gate.entered.clear()
    Gate.opened.clear()
    return Gated.apply(x * leaf("a.w"))


def local_backward_meanwhile() -> torch.Tensor:
    """A local backward through a leaf of a pass that is under way here."""
    assert Gate.entered.wait(PATIENCE)
    weight = leaf("a.w")
    (weight * 7).sum().backward()
    found, weight.grad = weight.grad, None
    Gate.opened.set()
    return found


def test_a_local_backward_through_the_same_leaf_beside_a_pass():
    with autograd.context() as context_id:
        loss = there("a", gated, leaf("driver.x")).sum()
        meanwhile = rpc.rpc_async("a", local_backward_meanwhile)
        autograd.backward(context_id, [loss], timeout=PATIENCE)
        assert torch.equal(meanwhile.wait(), torch.full((3,), 7.0, dtype=torch.float64))
        found = gradients(context_id, ["driver.x", "a.w"])
    local = weighted(leaf("driver.x"), "a.w").sum()
    assert_same(found, expected(local, ["driver.x", "a.w"]))


@torch.enable_grad()
def local_grad_in_hook(gradient: torch.Tensor) -> torch.Tensor:
    """torch's engine inside of a pass."""
    z = gradient.detach().requires_grad_()
    return torch.autograd.grad((z * z).sum(), z)[0]


def with_local_grad(x: torch.Tensor) -> torch.Tensor:
    h = x * leaf("a.w")
    h.register_hook(local_grad_in_hook)
    return h * 1


def test_local_grad_inside_a_hook():
    check(lambda call: call("a", with_local_grad, leaf("driver.x")).sum(), ["driver.x", "a.w"])
