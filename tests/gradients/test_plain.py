"""torch's own backward() and grad() over parts that live on other workers, without a context."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import named_leaves
import pytest
import torch
from named_leaves import assert_same, expected, grads, here, leaf, there
from torch import nn
from torch.utils.checkpoint import checkpoint

from telegrad import autograd, errors, rpc
from telegrad.gradients.plain import untracked
from telegrad.primitives import current
from telegrad.primitives.current import current_worker

pytestmark = pytest.mark.usefixtures("module_cluster", "no_grads")

NAMES = ["driver.x", "a.w", "b.w"]


def clear_grads() -> None:
    for each in named_leaves._leaves.values():
        each.grad = None


@pytest.fixture
def no_grads(module_cluster: Any) -> Iterator[None]:
    """All leaves begin without a `.grad`. The collector is off: nothing may be left to it."""
    for name in ("a", "b"):
        there(name, clear_grads)
    clear_grads()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def weighted(x: torch.Tensor, name: str = "a.w") -> torch.Tensor:
    return x * leaf(name)


def forward(call: Any) -> torch.Tensor:
    #      driver: x ───────▶ a: x * a.w ───────▶ b: * b.w ───────▶ driver: sum, and a skip connection
    hidden = call("a", weighted, leaf("driver.x"))
    return (call("b", weighted, hidden, "b.w") * hidden.sin()).sum()


def test_backward():
    forward(there).backward()
    assert_same(grads(NAMES), expected(forward(here), NAMES))


def require_grad(name: str, requires_grad: bool) -> None:
    leaf(name).requires_grad_(requires_grad)


@pytest.mark.parametrize("in_context", [False, True])
def test_a_leaf_on_another_worker_that_is_frozen_after_the_forward(in_context):
    with autograd.context() if in_context else contextlib.nullcontext(0) as context_id:
        loss = forward(there)
        there("a", require_grad, "a.w", False)
        try:
            if in_context:
                autograd.backward(context_id, [loss])
                assert not there("a", has_gradient, context_id, "a.w")
            else:
                loss.backward()
                found = grads(NAMES)
                assert found.pop("a.w", None) is None
        finally:
            there("a", require_grad, "a.w", True)


def has_gradient(context_id: int, name: str) -> bool:
    return leaf(name) in autograd.get_gradients(context_id)


def test_gradients_accumulate_over_passes():
    for _ in range(3):
        forward(there).backward()
    assert_same(grads(NAMES), expected(forward(here), NAMES), times=3)


def test_eight_forwards_then_eight_backwards():
    losses = [forward(there) for _ in range(8)]
    for loss in losses:
        loss.backward()
    assert_same(grads(NAMES), expected(forward(here), NAMES), times=8)


def test_a_graph_twice():
    loss = forward(there)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(grads(NAMES), expected(forward(here), NAMES), times=2)
    said: list[str] = []

    def once_more() -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            said.append(str(error))

    # torch keeps nodes of a pass that has failed, until its thread ends.
    thread = threading.Thread(target=once_more)
    thread.start()
    thread.join(60)
    assert "Trying to backward through the graph a second time" in said[0]


def test_a_graph_whose_remote_part_was_freed():
    received = there("a", weighted, leaf("driver.x"))
    (received + 1).sum().backward()  # nothing is kept for it here
    with pytest.raises(errors.BackwardError, match="Trying to backward through the graph a second time"):
        (received + 1).sum().backward()


def test_grad_of_a_leaf_and_of_something_received():
    hidden = there("a", weighted, leaf("driver.x"))
    loss = (there("b", weighted, hidden, "b.w") * hidden).sum()
    found = torch.autograd.grad(loss, [leaf("driver.x"), hidden])
    local = weighted(leaf("driver.x"))
    wanted = torch.autograd.grad((weighted(local, "b.w") * local).sum(), [leaf("driver.x"), local])
    torch.testing.assert_close(found, wanted)
    assert_same(grads(NAMES), dict.fromkeys(NAMES))


def test_grad_of_what_was_not_used():
    other = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(forward(there), [other])
    assert torch.autograd.grad(forward(there), [other], allow_unused=True) == (None,)


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        return gradients[0] + gradients[1] * 2


def test_hooks_of_a_root_that_leads_to_no_input():
    """torch runs them if it is the only root."""
    for received in (leaf("driver.x") * 1, there("a", weighted, leaf("driver.x"))):
        seen: list[Any] = []
        one, root = Two.apply(received)
        one.register_hook(seen.append)
        other = torch.ones(3, requires_grad=True)
        assert torch.autograd.grad([root.sum()], [other], allow_unused=True, retain_graph=True) == (None,)
        assert len(seen) == 0
        given = [torch.ones(3, dtype=torch.float64)]
        assert torch.autograd.grad([root], [other], given, allow_unused=True, retain_graph=True) == (None,)
        assert len(seen) == 1
        root.sum().backward()
        assert len(seen) == 2


def test_backward_of_some_inputs():
    y = leaf("driver.y")
    (forward(there) * y.sum()).backward(inputs=[leaf("driver.x")])
    wanted = expected(forward(here) * y.sum(), ["driver.x"])
    assert_same(grads(["driver.x", "driver.y", "a.w"]), {**wanted, "driver.y": None, "a.w": None})


def test_second_order():
    x = leaf("driver.x")
    (first,) = torch.autograd.grad(forward(there), x, create_graph=True)
    (first**2).sum().backward()
    (local,) = torch.autograd.grad(forward(here), x, create_graph=True)
    assert_same(grads(NAMES), expected((local**2).sum(), NAMES))


def test_batched_gradients_are_refused():
    received = there("a", weighted, leaf("driver.x"))
    with pytest.raises(errors.GradientError, match="is_grads_batched=True"):
        torch.autograd.grad(received * 2, leaf("driver.x"), torch.eye(3, dtype=torch.float64), is_grads_batched=True)


def test_two_losses_over_shared_parts():
    hidden = there("a", weighted, leaf("driver.x"))
    torch.autograd.backward([hidden.sum(), there("b", weighted, hidden, "b.w").sum()])
    local = weighted(leaf("driver.x"))
    assert_same(grads(NAMES), expected([local.sum(), weighted(local, "b.w").sum()], NAMES))


def back_to_the_driver(x: torch.Tensor) -> torch.Tensor:
    return there("driver", weighted, x * leaf("a.w"), "driver.y") * 2


def test_calls_back_to_the_root():
    there("a", back_to_the_driver, leaf("driver.x")).sum().backward()
    names = ["driver.x", "driver.y", "a.w"]
    wanted = weighted(leaf("driver.x") * leaf("a.w"), "driver.y") * 2
    assert_same(grads(names), expected(wanted.sum(), names))


def test_an_rref_that_is_fetched_twice():
    rref = rpc.remote("a", weighted, args=(leaf("driver.x"),))
    (rref.to_here() * rref.to_here()).sum().backward()
    local = weighted(leaf("driver.x"))
    names = ["driver.x", "a.w"]
    assert_same(grads(names), expected((local * local).sum(), names))


def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * leaf("a.w")


def test_what_is_not_tracked():
    assert not there("a", without_grad, leaf("driver.x")).requires_grad
    assert there("a", weighted, leaf("driver.x")).detach().is_leaf
    with torch.no_grad():
        assert not there("a", weighted, leaf("driver.x")).requires_grad
    with untracked():
        found = there("a", weighted, leaf("driver.x"))
    assert found.is_leaf and found.requires_grad
    assert autograd.debug_info()["received"] == 0


@pytest.mark.parametrize("count", [2, 4])
def test_threads_at_once(count):
    errors_found: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(5):
                forward(there).backward()
        except BaseException as error:
            errors_found.append(error)

    alive = leaf("driver.x").view_as(leaf("driver.x"))  # torch's node of the leaf is there before the threads are
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    del alive
    assert not errors_found
    names = ["a.w", "b.w"]
    assert_same(grads(names), expected(forward(here), names), times=5 * count)


def test_hooks_see_whole_gradients_once():
    seen: list[torch.Tensor] = []
    received = there("a", weighted, leaf("driver.x"))
    received.register_hook(seen.append)
    received.retain_grad()
    (received * 2 + received * received).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], (2 + 2 * received).detach())
    torch.testing.assert_close(received.grad, seen[0])


def test_a_backward_inside_of_a_hook():
    h, other = there("a", weighted, leaf("driver.x")), there("b", weighted, leaf("driver.y"), "b.w").sum()
    h.register_hook(lambda gradient: other.backward())
    h.sum().backward()
    names = ["driver.x", "driver.y", "a.w", "b.w"]
    wanted = weighted(leaf("driver.x")).sum() + weighted(leaf("driver.y"), "b.w").sum()
    assert_same(grads(names), expected(wanted, names))


def called_in_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * leaf("a.w")
    y.register_hook(lambda gradient: there("b", torch.mul, gradient, 2.0))
    return y


def test_a_hook_that_calls():
    there("a", called_in_hook, leaf("driver.x")).sum().backward()
    names = ["driver.x", "a.w"]
    assert_same(grads(names), expected(weighted(leaf("driver.x")).sum(), names), times=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_inside_of_a_checkpoint(reentrant):
    x = leaf("driver.x") * 1

    def run(value: torch.Tensor) -> torch.Tensor:
        return there("a", weighted, value).sin()

    checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    names = ["driver.x", "a.w"]
    assert_same(grads(names), expected(weighted(leaf("driver.x")).sin().sum(), names))


def checkpointed(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(weighted, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_on_another_worker(reentrant):
    there("a", checkpointed, leaf("driver.x") * 1, reentrant).sum().backward()
    names = ["driver.x", "a.w"]
    assert_same(grads(names), expected(weighted(leaf("driver.x")).sum(), names))


def test_anomaly_mode():
    with torch.autograd.set_detect_anomaly(True):
        forward(there).backward()
    assert_same(grads(NAMES), expected(forward(here), NAMES))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise KeyError("on purpose")


def fails(x: torch.Tensor) -> torch.Tensor:
    return Failing.apply(x * leaf("a.w"))


def test_a_participant_that_fails():
    h = there("b", weighted, leaf("driver.x"), "b.w")
    with pytest.raises(errors.BackwardError, match="worker 'a'") as caught:
        (there("a", fails, h) + h).sum().backward()
    assert isinstance(caught.value.__cause__, KeyError)
    del caught
    gc.collect()  # pytest keeps the error in a circle, and that has `h`
    assert_same(grads(["a.w", "b.w"]), {"a.w": None, "b.w": None})
    del h
    forward(there).backward()
    assert_same(grads(["a.w", "b.w"]), expected(forward(here), ["a.w", "b.w"]))


def test_a_root_that_fails():
    """The error comes as it is, and no other worker has a part of the sums."""
    with pytest.raises(KeyError, match="on purpose"):
        (Failing.apply(leaf("driver.y") * 1) * there("a", weighted, leaf("driver.x"))).sum().backward()
    assert_same(grads(["a.w"]), {"a.w": None})


def raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"after {x.shape}")


def test_dropped_without_backward_and_an_exception_in_forward():
    """The fixture sees that nothing is left."""
    forward(there)
    with pytest.raises(ValueError, match="after"):
        there("a", raises, leaf("driver.x"))
    rpc.rpc_async("b", weighted, args=(leaf("driver.x"), "b.w"))


# -- state -------------------------------------------------------------------------------------------------

_state: dict[str, Any] = {}


def step(x: torch.Tensor, keep: bool) -> torch.Tensor:
    _state["h"] = (_state.get("h", 0.0) + x * leaf("a.w")).tanh()
    return _state["h"] * 1.0 if keep else _state["h"].detach()


def last() -> torch.Tensor:
    return _state["h"]


def forget_state() -> None:
    _state.clear()


@pytest.mark.parametrize("keep", [True, False], ids=["answers kept", "answers detached"])
def test_state_that_depends_on_many_calls(keep):
    """More than a message carries of the log: the root asks for the rest."""
    count = 100
    kept = [there("a", step, leaf("driver.x") * (1 + i / 100), keep) for i in range(count)]
    there("a", last).sum().backward()
    there("a", forget_state)
    h: Any = 0.0
    for i in range(count):
        h = (h + leaf("driver.x") * (1 + i / 100) * leaf("a.w")).tanh()
    names = ["driver.x", "a.w"]
    assert_same(grads(names), expected(h.sum(), names))
    kept.clear()


@pytest.mark.parametrize("keep", [True, False], ids=["answers kept", "answers dropped"])
def test_state_kept_over_many_calls_is_linear(module_cluster, keep):
    """What a call walks and carries does not grow with the calls before it."""
    x, kept, seconds = leaf("driver.x"), [], []
    for _ in range(800):
        began = time.perf_counter()
        found = there("a", step, x, True)
        seconds.append(time.perf_counter() - began)
        if keep:
            kept.append(found)
        del found
    there("a", forget_state)
    kept.clear()
    early, late = min(seconds[100:300]), min(seconds[600:])  # the least disturbed: other programs run, too
    assert late < 3 * early


# -- with contexts -----------------------------------------------------------------------------------------


def test_a_context_over_something_received_before_it():
    hidden = there("a", weighted, leaf("driver.x"))
    with autograd.context() as context_id:
        loss = there("b", weighted, hidden, "b.w").sum()
        autograd.backward(context_id, [loss])
        found = named_leaves.gradients(context_id, NAMES)
    wanted = weighted(weighted(leaf("driver.x")), "b.w").sum()
    assert_same(found, expected(wanted, NAMES))
    assert_same(grads(NAMES), dict.fromkeys(NAMES))


def test_a_plain_backward_over_something_received_in_a_context():
    alive = there("a", weighted, leaf("driver.x"))
    with autograd.context():
        inside = there("a", weighted, leaf("driver.x"))
        with pytest.raises(errors.GradientError, match=r"Use telegrad.autograd.backward\(context_id"):
            inside.sum().backward()
        with pytest.raises(errors.GradientError, match=r"Use telegrad.autograd.backward\(context_id"):
            (inside * alive).sum().backward()
        kept = there("a", weighted, inside)
    with pytest.raises(errors.GradientError, match="which has ended"):
        (kept * alive).sum().backward()


def in_context(forward: Any) -> dict[str, Any]:
    """The gradients of a forward pass whose call of a is made by other threads of this worker."""
    with autograd.context() as context_id:
        loss = there("b", weighted, forward(context_id), "b.w").sum()
        autograd.backward(context_id, [loss])
        found = named_leaves.gradients(context_id, NAMES)
    assert_same(grads(NAMES), dict.fromkeys(NAMES))
    return found


@pytest.mark.parametrize("enters", [True, False])
def test_a_call_from_a_thread_pool_inside_of_a_context(enters):
    def work(context_id: int) -> torch.Tensor:
        if not enters:
            return there("a", weighted, leaf("driver.x"))
        with autograd.enter(context_id) as entered:
            found = there("a", weighted, leaf("driver.x"))
            assert found.grad_fn.context == entered == context_id
        return found

    def forward(context_id: int) -> torch.Tensor:
        with ThreadPoolExecutor() as pool:
            return pool.submit(work, context_id).result()

    assert_same(in_context(forward), expected(weighted(weighted(leaf("driver.x")), "b.w").sum(), NAMES))


def test_a_context_follows_callbacks():
    def forward(context_id: int) -> torch.Tensor:
        done = rpc.rpc_async("b", torch.ones, args=(3,)).then(lambda ones: there("a", weighted, leaf("driver.x")))
        found = done.wait()
        assert found.grad_fn.context == context_id
        return found

    assert_same(in_context(forward), expected(weighted(weighted(leaf("driver.x")), "b.w").sum(), NAMES))


def test_a_call_in_a_callback_of_a_callback():
    def forward(context_id: int) -> torch.Tensor:
        future = rpc.rpc_async("b", torch.ones, args=(3,)).then(lambda ones: ones.wait())
        return future.then(lambda ones: there("a", weighted, leaf("driver.x"))).wait()

    assert_same(in_context(forward), expected(weighted(weighted(leaf("driver.x")), "b.w").sum(), NAMES))


def test_a_context_that_cannot_be_entered():
    with autograd.context() as context_id:
        pass
    with pytest.raises(errors.UnknownContextError, match="it has ended"), autograd.enter(context_id):
        pass


_in_context: dict[str, torch.Tensor] = {}


def keep_in_context(x: torch.Tensor) -> None:
    _in_context["x"] = x


def kept_in_context() -> torch.Tensor:
    return _in_context["x"] * 2


def test_a_plain_backward_that_comes_to_a_context_elsewhere():
    """It is said where the pass is begun, and not found out by a missing gradient."""
    with autograd.context() as context_id:
        there("a", keep_in_context, leaf("driver.x"))
        token = current.context_id.set(0)  # as code that was begun before the context
        try:
            found = there("a", kept_in_context)
        finally:
            current.context_id.reset(token)
        with pytest.raises(errors.GradientError, match=f"in context {context_id}"):
            found.sum().backward()
    there("a", forget_in_context)


def forget_in_context() -> None:
    _in_context.clear()


# -- the seam ----------------------------------------------------------------------------------------------


def test_a_local_backward_is_torchs_own():
    alive = there("a", weighted, leaf("driver.x"))
    y = leaf("driver.y")
    (y * 2).sum().backward()
    torch.testing.assert_close(y.grad, torch.full_like(y, 2.0).detach())
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert alive.requires_grad


def test_a_call_with_nothing_that_requires_grad_says_nothing():
    sent: list[Any] = []
    worker = current_worker()
    original = worker.attach.outgoing
    worker.attach.outgoing = lambda *args: (sent.append(args), original(*args))  # type: ignore[method-assign]
    try:
        there("a", torch.neg, torch.ones(3))
        assert not sent
        there("a", weighted, leaf("driver.x"))
        assert sent
    finally:
        del worker.attach.outgoing


# -- training ----------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


_parts: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}


def run_part(name: str, seed: int, x: torch.Tensor) -> torch.Tensor:
    if name not in _parts:
        part = Part(seed)
        _parts[name] = part, torch.optim.Adam(part.parameters(), 0.01)
    found: torch.Tensor = _parts[name][0](x)
    return found


def step_part(name: str) -> torch.Tensor:
    part, optimizer = _parts[name]
    optimizer.step()
    optimizer.zero_grad()
    return part.linear.weight.detach().clone()


def test_ten_steps_of_adam_over_two_workers_equal_one_process():
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def train(call: Any, of: str) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for _ in range(10):
            loss = call("b", run_part, f"b {of}", 2, call("a", run_part, f"a {of}", 1, x)).square().mean()
            loss.backward()
            found = [loss.detach(), call("a", step_part, f"a {of}"), call("b", step_part, f"b {of}")]
        return found

    now = time.perf_counter()  # parts of their own for each run
    for one, other in zip(train(there, f"there {now}"), train(here, f"here {now}"), strict=True):
        assert torch.equal(one, other)
