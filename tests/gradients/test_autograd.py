"""telegrad.autograd as users call it, on every transport, against plain local autograd."""

from __future__ import annotations

import threading

import pytest
import torch
from named_leaves import (
    PATIENCE,
    assert_same,
    check,
    expected,
    gradients,
    grads,
    here,
    leaf,
    own_gradient,
    own_gradient_count,
    there,
)

from telegrad import autograd, errors, rpc

pytestmark = pytest.mark.usefixtures("module_cluster")

RUNS: list[str] = []  # what ran in a backward pass, in this process


def note(x: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor, which says so when its gradient comes."""
    x = x * 1
    x.register_hook(lambda _: RUNS.append(name))
    return x


def take_runs() -> list[str]:
    found = RUNS.copy()
    RUNS.clear()
    return found


def weighted(x: torch.Tensor, name: str = "a.w") -> torch.Tensor:
    return x * leaf(name)


def made() -> torch.Tensor:
    return leaf("a.w") * 2


def constant() -> torch.Tensor:
    return torch.ones(3, dtype=torch.float64)


def context_here() -> int:
    return autograd._current_context()._context_id()


def context_at(name: str) -> int:
    return there(name, context_here)


def is_known_here(context_id: int) -> bool:
    return autograd._is_valid_context(context_id)


def ask_for_gradients(context_id: int) -> dict:
    return autograd.get_gradients(context_id)


def clear_grads(*names: str) -> None:
    for name in names:
        leaf(name).grad = None


#      driver                a                 b
#
#      x ───────────▶ x * a.w ──▶ h
#      │                          │
#      │   h ◀────────────────────╯
#      │   ╰────────────────────────────▶ h * b.w ──▶ y
#      ╰──────▶ y * x ◀───────────────────────────────╯
#                 ╰──▶ sum
def two_stages(call) -> torch.Tensor:
    x = leaf("driver.x")
    h = call("a", weighted, x)
    y = call("b", weighted, h, "b.w")
    return (y * x).sum()


NAMES = ["driver.x", "a.w", "b.w"]


# -- contexts ----------------------------------------------------------------------------------------------


def test_the_smallest_example():
    #      driver             a
    #      x ──────────▶ x * a.w ──▶ h
    #      sum ◀─────────────────────╯
    check(lambda call: call("a", weighted, leaf("driver.x")).sum(), ["driver.x", "a.w"])


def test_a_call_that_sends_nothing_with_a_gradient_and_gets_something():
    #      driver             a
    #             ──────▶ a.w * 2 ──▶ h
    #      sum ◀──────────────────────╯
    check(lambda call: call("a", made).sum(), ["a.w"])


def test_two_stages_and_a_skip_connection():
    check(two_stages, NAMES)


def test_a_context_has_an_id_of_its_worker_and_is_current_inside():
    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context. Please wrap"):
        autograd._current_context()
    with autograd.context() as context_id:
        assert context_here() == context_id
        assert context_id >> 48 == rpc.get_worker_info().id
    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context"):
        autograd._current_context()


def test_contexts_nest():
    with autograd.context() as outer:
        with autograd.context() as inner:
            assert inner != outer
            assert context_here() == context_at("a") == inner
            loss = there("a", weighted, leaf("driver.x")).sum()
            autograd.backward(inner, [loss])
            assert gradients(inner, ["a.w"])["a.w"] is not None
        assert context_here() == context_at("a") == outer
        assert not autograd._is_valid_context(inner)
        assert gradients(outer, ["a.w", "driver.x"]) == {"a.w": None, "driver.x": None}
        autograd.backward(outer, [there("a", weighted, leaf("driver.x")).sum()])
        assert gradients(outer, ["a.w"])["a.w"] is not None


def test_an_exception_inside_leaves_the_outer_context_current():
    with autograd.context() as outer:
        with pytest.raises(ZeroDivisionError), autograd.context() as inner:
            raise ZeroDivisionError
        assert context_here() == outer
        assert not autograd._is_valid_context(inner)


def test_the_current_context_is_the_threads_own():
    entered, leave = threading.Event(), threading.Event()
    found: dict[str, object] = {}

    def run() -> None:
        try:
            autograd._current_context()
        except errors.GradientError:
            found["at first"] = None
        with autograd.context() as found["own"]:
            found["current"] = context_here()
            found["at a"] = context_at("a")
            entered.set()
            assert leave.wait(PATIENCE)

    with autograd.context() as context_id:
        thread = threading.Thread(target=run)
        thread.start()
        assert entered.wait(PATIENCE)
        try:
            assert context_here() == context_at("a") == context_id
            assert found["at first"] is None
            assert found["own"] == found["current"] == found["at a"] != context_id
        finally:
            leave.set()
            thread.join(PATIENCE)
        assert context_here() == context_id


def test_the_context_travels_through_calls_of_calls():
    with autograd.context() as context_id:
        assert there("a", context_at, "b") == context_id
        assert there("a", context_at, "driver") == context_id
        assert rpc.rpc_async("a", context_at, args=("b",)).wait() == context_id
    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context"):
        there("a", context_here)


# -- backward ----------------------------------------------------------------------------------------------


def test_retain_graph_and_several_passes_that_add_up():
    wanted = expected(two_stages(here), NAMES)
    with autograd.context() as context_id:
        loss = two_stages(there)
        for times in (1, 2):
            autograd.backward(context_id, [loss], retain_graph=True)
            assert_same(gradients(context_id, NAMES), wanted, times=times)
        autograd.backward(context_id, [loss])
        assert_same(gradients(context_id, NAMES), wanted, times=3)


def test_passes_over_different_graphs_of_one_context_add_up():
    other = ["a.w", "driver.x"]
    first = expected(two_stages(here), NAMES)
    second = expected(weighted(leaf("driver.x")).square().sum(), other)
    with autograd.context() as context_id:
        autograd.backward(context_id, [two_stages(there)])
        autograd.backward(context_id, [there("a", weighted, leaf("driver.x")).square().sum()])
        found = gradients(context_id, NAMES)
    assert_same(found, {name: first[name] + second.get(name, 0) for name in NAMES})


def test_roots_that_are_no_scalars_with_their_gradients():
    given = torch.linspace(1, 2, 3, dtype=torch.float64)
    wanted = expected(weighted(leaf("driver.x")), ["driver.x", "a.w"], grad_outputs=[given])
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", weighted, leaf("driver.x"))], grad_tensors=[given])
        assert_same(gradients(context_id, ["driver.x", "a.w"]), wanted)


def test_several_roots_some_with_a_gradient_and_some_without():
    #      driver                   a
    #      x ──┬────────────▶ x * a.w ──▶ h
    #      root 1: h ◀────────────────────╯  (its gradient is given)
    #      root 2: sum of x²                 (a scalar, local)
    #      root 3: sum of h                  (a scalar)
    given = torch.linspace(1, 2, 3, dtype=torch.float64)

    def roots(call) -> list[torch.Tensor]:
        x = leaf("driver.x")
        h = call("a", weighted, x)
        return [h, x.square().sum(), h.sum()]

    names = ["driver.x", "a.w"]
    with autograd.context() as context_id:
        autograd.backward(context_id, roots(there), grad_tensors=[given, None, None])
        found = gradients(context_id, names)
    assert_same(found, expected(roots(here), names, grad_outputs=[given, None, None]))


def test_a_root_that_is_a_leaf_or_was_just_received():
    x = torch.tensor(3.0, requires_grad=True)
    with autograd.context() as context_id:
        received = there("a", torch.sum, leaf("driver.x"))
        autograd.backward(context_id, [x, received])
        assert autograd.get_gradients(context_id)[x].item() == 1
        assert_same(gradients(context_id, ["driver.x"]), expected(leaf("driver.x").sum(), ["driver.x"]))


def test_one_root_twice():
    names = ["driver.x", "a.w"]
    with autograd.context() as context_id:
        loss = there("a", weighted, leaf("driver.x")).square().sum()
        autograd.backward(context_id, [loss, loss])
        found = gradients(context_id, names)
    assert_same(found, expected(weighted(leaf("driver.x")).square().sum(), names), times=2)


def test_a_pass_in_which_no_other_worker_takes_part():
    with autograd.context() as context_id:
        autograd.backward(context_id, [leaf("driver.x").square().sum()])
        found = gradients(context_id, ["driver.x"])
    assert_same(found, expected(leaf("driver.x").square().sum(), ["driver.x"]))


def test_create_graph_gives_gradients_that_can_be_differentiated():
    with autograd.context() as context_id:
        autograd.backward(context_id, [two_stages(there)], create_graph=True)
        found = autograd.get_gradients(context_id)[leaf("driver.x")]
        assert found.requires_grad
        assert there("a", requires_grad_of_gradient, context_id, "a.w")
    assert_same({"driver.x": found}, expected(two_stages(here), ["driver.x"]))


def requires_grad_of_gradient(context_id: int, name: str) -> bool:
    return autograd.get_gradients(context_id)[leaf(name)].requires_grad


def test_into_grad_adds_to_grad_on_the_worker_that_has_the_leaf():
    wanted = expected(two_stages(here), NAMES)
    try:
        with autograd.context() as context_id:
            loss = two_stages(there)
            autograd.backward(context_id, [loss], retain_graph=True, into="grad")
            assert_same(grads(NAMES), wanted)
            autograd.backward(context_id, [loss], into="grad")
            assert_same(grads(NAMES), wanted, times=2)
            assert gradients(context_id, NAMES) == dict.fromkeys(NAMES)
    finally:
        clear_grads("driver.x")
        there("a", clear_grads, "a.w")
        there("b", clear_grads, "b.w")


def test_grad_is_left_alone_otherwise():
    check(two_stages, NAMES)
    assert grads(NAMES) == dict.fromkeys(NAMES)


def test_into_has_two_values():
    with autograd.context() as context_id, pytest.raises(ValueError, match="choose 'context' or 'grad'"):
        autograd.backward(context_id, [leaf("driver.x").sum()], into="nowhere")


class Blocks(torch.autograd.Function):
    """The identity; its backward waits until it is let go."""

    let_go = threading.Event()
    gone = threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Blocks.let_go.wait(PATIENCE)
        return gradient


def blocked(x: torch.Tensor) -> torch.Tensor:
    Blocks.let_go.clear()
    return Blocks.apply(x)


def let_go() -> None:
    Blocks.let_go.set()


def test_a_pass_that_takes_longer_than_its_timeout():
    with autograd.context() as context_id:
        loss = there("a", blocked, leaf("driver.x")).sum()
        with pytest.raises(errors.BackwardError, match=r"more than set timeout \(200 ms\).*'a'") as caught:
            autograd.backward(context_id, [loss], timeout=0.2)
        assert isinstance(caught.value.__cause__, TimeoutError)
        there("a", let_go)
        assert gradients(context_id, ["driver.x"]) == {"driver.x": None}
        # The context is as usable as before.
        autograd.backward(context_id, [two_stages(there)])
        assert_same(gradients(context_id, NAMES), expected(two_stages(here), NAMES))


def test_a_timeout_of_0_is_no_limit():
    with autograd.context() as context_id:
        autograd.backward(context_id, [two_stages(there)], timeout=0)
        assert_same(gradients(context_id, NAMES), expected(two_stages(here), NAMES))


# -- get_gradients and update_gradient ---------------------------------------------------------------------


def test_gradients_are_found_by_identity():
    #      two leaves of equal value, of which one is used
    twins = [torch.ones(3, requires_grad=True) for _ in range(2)]
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", torch.sum, twins[0] * 2)])
        found = autograd.get_gradients(context_id)
        assert [twin in found for twin in twins] == [True, False]
        assert next(iter(found)) is twins[0]
        found.clear()  # it is the caller's own
        assert torch.equal(autograd.get_gradients(context_id)[twins[0]], torch.full((3,), 2.0))


def test_gradients_come_with_a_call():
    """The leaves that are their keys come as new tensors, so this is for looking at them only."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [two_stages(there)])
        found = there("a", ask_for_gradients, context_id)
        ((key, gradient),) = found.items()
        assert torch.equal(key.detach(), leaf("a.w").detach())
        assert_same({"a.w": gradient}, expected(two_stages(here), ["a.w"]))


def test_a_context_with_no_gradients():
    with autograd.context() as context_id:
        there("a", constant)
        assert autograd.get_gradients(context_id) == {}
        assert there("a", own_gradient_count, context_id) == 0


def test_update_gradient():
    x = leaf("driver.x")
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", weighted, x).sum()])
        before = autograd.get_gradients(context_id)[x].clone()
        calls = []

        def look(gradient: torch.Tensor) -> None:
            # It runs outside of any lock.
            assert autograd.get_gradients(context_id)[x] is gradient
            calls.append(gradient.clone())

        autograd.update_gradient(context_id, x, look)
        assert torch.equal(autograd.get_gradients(context_id)[x], before)
        autograd.update_gradient(context_id, x, lambda gradient: gradient * 2)
        assert torch.equal(autograd.get_gradients(context_id)[x], before * 2)
        assert torch.equal(calls[0], before)
        with pytest.raises(ZeroDivisionError):
            autograd.update_gradient(context_id, x, lambda gradient: 1 / 0)
        assert torch.equal(autograd.get_gradients(context_id)[x], before * 2)


def test_update_gradient_of_a_leaf_that_has_none():
    with autograd.context() as context_id:
        with pytest.raises(RuntimeError, match="The grad for the variable should exist in dist_autograd context."):
            autograd.update_gradient(context_id, leaf("driver.x"), lambda gradient: gradient)


# -- grad() ------------------------------------------------------------------------------------------------


def test_grad_is_torchs_grad_across_workers_and_stores_nothing():
    x = leaf("driver.x")
    (wanted,) = torch.autograd.grad(two_stages(here), x)
    with autograd.context() as context_id:
        (found,) = autograd.grad(context_id, two_stages(there), x)
        torch.testing.assert_close(found, wanted)
        assert autograd.get_gradients(context_id) == {}
        for name in ("a", "b"):
            assert there(name, own_gradient_count, context_id) == 0
    assert grads(NAMES) == dict.fromkeys(NAMES)


def test_grad_of_several_outputs_and_inputs_of_any_kind():
    #      driver               a
    #      x ──▶ h = x² ──▶ h * a.w ──▶ y
    #      y, y + h ◀───────────────────╯
    given = torch.linspace(1, 2, 3, dtype=torch.float64)

    def run(call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        x, z = leaf("driver.x"), leaf("driver.z")
        h = x.square()
        y = call("a", weighted, h)
        return [y, (y + h * z).sum()], [h, x, z, y]

    with autograd.context() as context_id:
        outputs, inputs = run(there)
        found = autograd.grad(context_id, outputs, inputs, grad_outputs=[given, None])
    outputs, inputs = run(here)
    for gradient, wanted in zip(found, torch.autograd.grad(outputs, inputs, grad_outputs=[given, None]), strict=True):
        torch.testing.assert_close(gradient, wanted)


def noted(x: torch.Tensor, name: str) -> torch.Tensor:
    return note(x, name) * 2


def test_grad_runs_only_what_leads_to_its_inputs():
    #      driver              a                     b
    #      x ────────▶ [on the way] ──▶ h
    #      z ───────────────────────────────▶ [beside] ──▶ k      k has nothing to do with x
    #      loss = (h * k).sum()
    with autograd.context() as context_id:
        h = there("a", noted, leaf("driver.x"), "on the way")
        k = there("b", noted, leaf("driver.z"), "beside")
        loss = (note(h, "here") * note(k, "here, beside")).sum()
        (found,) = autograd.grad(context_id, [loss], [leaf("driver.x")])
        runs = RUNS.copy()
        RUNS.clear()
        for name in ("a", "b"):
            runs += there(name, take_runs)
        assert sorted(runs) == ["here", "on the way"]
        torch.testing.assert_close(found, 4 * leaf("driver.z").detach())


def test_grad_through_one_of_several_sends_of_a_worker():
    #      driver                        a
    #      x ──────────────▶ x * a.w ──▶ h (kept)
    #      z ──────────────▶ z * a.w ──▶ k
    #      (h, k) ──▶ (h * k).sum()            grad with respect to z alone, then to both
    with autograd.context() as context_id:
        x, z = leaf("driver.x"), leaf("driver.z")
        h, k = there("a", weighted, x), there("a", weighted, z)
        loss = (h * k).sum()
        (of_z,) = autograd.grad(context_id, loss, z, retain_graph=True)
        of_both = autograd.grad(context_id, loss, [x, z])
    wanted = torch.autograd.grad((weighted(x) * weighted(z)).sum(), [x, z])
    torch.testing.assert_close(of_z, wanted[1])
    torch.testing.assert_close(list(of_both), list(wanted))


def test_grad_of_one_input_twice_and_of_an_output_itself():
    x = leaf("driver.x")
    with autograd.context() as context_id:
        loss = there("a", weighted, x).sum()
        found = autograd.grad(context_id, loss, [x, loss, x])
    loss = weighted(x).sum()
    torch.testing.assert_close(found, torch.autograd.grad(loss, [x, loss, x]))


def test_grad_with_an_unused_input():
    unused = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = there("a", weighted, leaf("driver.x")).sum()
        found = autograd.grad(context_id, loss, [unused, leaf("driver.x")], allow_unused=True)
    assert found[0] is None
    torch.testing.assert_close(found[1], leaf("a.w").detach())


def test_grad_with_respect_to_something_received_asks_nobody():
    with autograd.context() as context_id:
        h = there("a", noted, leaf("driver.x"), "upstream")
        (found,) = autograd.grad(context_id, h.square().sum(), h)
        torch.testing.assert_close(found, 2 * h.detach())
        assert there("a", take_runs) == []


def test_grad_keeps_the_graph_only_when_told_to():
    with autograd.context() as context_id:
        loss = two_stages(there)
        autograd.grad(context_id, loss, leaf("driver.x"), retain_graph=True)
        autograd.backward(context_id, [loss])
        assert_same(gradients(context_id, NAMES), expected(two_stages(here), NAMES))


# -- what is kept, and torch's private names ---------------------------------------------------------------


def test_debug_info_counts_what_is_kept():
    with autograd.context() as context_id:
        before = autograd.debug_info()
        assert before["contexts"] == 1
        loss = two_stages(there)
        during = autograd.debug_info()
        assert during["sends"] == 2 and during["received"] == 2
        assert during["log_entries"] > 0 and during["passes"] == 0
        autograd.backward(context_id, [loss])
        after = autograd.debug_info()
        assert after["gradients"] == 1 and after["passes"] == 0
        assert there("a", autograd.debug_info)["gradients"] == 1
    assert not any(autograd.debug_info().values())


def test_torchs_debug_info_has_exactly_its_two_keys():
    assert autograd._get_debug_info() == {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
    with autograd.context():
        assert autograd._get_debug_info()["num_autograd_contexts"] == 1
        assert there("a", autograd._get_debug_info)["num_autograd_contexts"] == 1


def test_torchs_private_names():
    assert autograd.is_available()
    autograd._init(0)
    context = autograd._new_context()
    assert isinstance(context, autograd.DistAutogradContext)
    context_id = context._context_id()
    try:
        assert autograd._is_valid_context(context_id)
        assert autograd._current_context()._context_id() == context_id
        assert autograd._retrieve_context(context_id)._context_id() == context_id
        assert context_id <= autograd._get_max_id()
        assert context._known_worker_ids() == set()
        assert context._send_functions() == context._recv_functions() == {}
    finally:
        autograd._release_context(context_id)
    assert not autograd._is_valid_context(context_id)
    for function in (autograd._retrieve_context, autograd._release_context):
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
            function(context_id)


def test_known_workers_are_recorded_even_when_nothing_requires_grad():
    with autograd.context() as context_id:
        there("a", constant)
        assert autograd._current_context()._known_worker_ids() == {rpc.get_worker_info("a").id}
        assert there("a", is_known_here, context_id)
        assert not autograd._current_context()._send_functions()
        there("b", weighted, leaf("driver.x"), "b.w")
        assert len(autograd._current_context()._known_worker_ids()) == 2
    # None of the workers above is asked without a context.
    assert not there("a", is_known_here, context_id)


def test_send_and_recv_functions_look_like_torchs():
    #      driver: x, z ───▶ a: torch.add ───▶ driver
    x, z = leaf("driver.x"), leaf("driver.z")
    with autograd.context():
        result = there("a", torch.add, x, z)
        context = autograd._current_context()
        ((message, send),) = context._send_functions().items()
        assert message >> 48 == rpc.get_worker_info().id
        assert send.name() == "torch::distributed::autograd::SendRpcBackward"
        assert [edge[0].variable for edge in send.next_functions] == [x, z]
        ((_, recv),) = context._recv_functions().items()
        assert result.grad_fn is recv
        there_sends, there_receives = there("a", count_functions)
        assert (there_sends, there_receives) == (1, 1)


def count_functions() -> tuple[int, int]:
    context = autograd._current_context()
    return len(context._send_functions()), len(context._recv_functions())


def test_own_gradient_is_none_without_a_pass():
    with autograd.context() as context_id:
        two_stages(there)
        assert there("a", own_gradient, context_id, "a.w") is None
