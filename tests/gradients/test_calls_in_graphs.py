"""Graphs that cross workers in every way that calls can: nested, to oneself, async, with state kept between them, by
many threads; backward from any of the workers; and what becomes of their contexts."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from named_leaves import (
    PATIENCE,
    assert_same,
    check,
    expected,
    gradients,
    here,
    leaf,
    own_gradient,
    own_gradient_count,
    there,
)

from telegrad import autograd, errors, rpc

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


def all_runs() -> list[str]:
    """What ran in backward passes, on all workers."""
    return sorted([run for name in ("a", "b") for run in there(name, take_runs)] + take_runs())


@pytest.fixture(autouse=True)
def nothing_ran_yet(module_cluster) -> None:
    all_runs()


def weighted(x: torch.Tensor, name: str) -> torch.Tensor:
    return x * leaf(name)


def run_in_threads(*functions: Callable[[], object]) -> None:
    """Runs them at once, and raises what they raise."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


# -- calls of calls ----------------------------------------------------------------------------------------


def bounce(call, x: torch.Tensor, route: list[str]) -> torch.Tensor:
    """Multiplies by a leaf of each worker on the route, on the way there and on the way back."""
    if not route:
        return x
    name = f"{route[0]}.w"
    y = x * leaf(name)
    if len(route) > 1:
        y = call(route[1], bounce, call, y, route[1:]) + y
    return y * leaf(name)


@pytest.mark.parametrize(
    "route",
    [
        ["a", "b"],
        ["a", "b", "a"],
        ["a", "b", "a", "b", "driver"],
        ["a", "driver", "a"],
        ["a", "a"],
        ["driver", "a"],
    ],
    ids="→".join,
)
def test_nested_calls(route):
    #      driver: x ──▶ first: * w ──▶ second: * w ──▶ ...       each adds a skip connection,
    #      driver: sum ◀── * w, + ◀──── * w, + ◀─────── ...       and multiplies again on the way back
    names = ["driver.x", *sorted({f"{worker}.w" for worker in route})]
    check(lambda call: call(route[0], bounce, call, leaf("driver.x"), route).sum(), names)


def test_calls_to_oneself():
    #      driver: x ──▶ driver: x * w ──▶ driver: sum
    check(lambda call: call("driver", weighted, leaf("driver.x"), "driver.w").sum(), ["driver.x", "driver.w"])


def call_oneself(call, x: torch.Tensor) -> torch.Tensor:
    return call("a", weighted, x, "a.w") + x


def test_a_worker_that_calls_itself_in_a_call():
    check(lambda call: call("a", call_oneself, call, leaf("driver.x")).sum(), ["driver.x", "a.w"])


def test_a_skip_connection_around_two_calls():
    #      driver           a             b
    #      x ──┬────▶ x * a.w ─┬─▶ (driver)
    #          │               ╰──────────────▶ h * b.w ──▶ y
    #          ╰──▶ (x + h) * y
    def forward(call) -> torch.Tensor:
        x = leaf("driver.x")
        h = call("a", weighted, x, "a.w")
        y = call("b", weighted, h, "b.w")
        return ((x + h) * y).sum()

    check(forward, ["driver.x", "a.w", "b.w"])


def test_one_leaf_that_is_sent_many_times_and_used_here():
    def forward(call) -> torch.Tensor:
        x = leaf("driver.x")
        parts = [call(name, weighted, x, f"{name}.w") for name in ("a", "b", "a", "driver")]
        return (torch.stack(parts).sum(0) * x).sum()

    check(forward, ["driver.x", "a.w", "b.w", "driver.w"])


def test_a_long_chain_behind_skip_connections():
    #      h ──▶ a ──▶ + ──▶ b ──▶ + ──▶ a ──▶ + ...      each + also takes what was there before the call
    def forward(call) -> torch.Tensor:
        h = leaf("driver.x")
        for n in range(40):
            name = "ab"[n % 2]
            h = torch.tanh(call(name, weighted, h, f"{name}.w")) + h
        return h.sum()

    check(forward, ["driver.x", "a.w", "b.w"])


# -- async calls -------------------------------------------------------------------------------------------


def test_many_async_calls_that_join():
    names = ["driver.x", "a.w", "b.w"]
    with autograd.context() as context_id:
        x = leaf("driver.x")
        futures = [rpc.rpc_async(name, weighted, args=(x * n, f"{name}.w")) for n in range(8) for name in ("a", "b")]
        loss = torch.stack([future.wait() for future in futures]).square().sum()
        autograd.backward(context_id, [loss])
        found = gradients(context_id, names)
    x = leaf("driver.x")
    parts = [weighted(x * n, f"{name}.w") for n in range(8) for name in ("a", "b")]
    assert_same(found, expected(torch.stack(parts).square().sum(), names))


@rpc.functions.async_execution
def by_way_of_b(x: torch.Tensor) -> torch.futures.Future:
    future = rpc.rpc_async("b", weighted, args=(x * leaf("a.w"), "b.w"))
    return future.then(lambda done: done.wait() * leaf("a.v"))


def test_async_execution():
    #      driver: x ──▶ a: x * a.w ──▶ b: * b.w ──▶ a: * a.v ──▶ driver: sum       no thread of a waits for b
    names = ["driver.x", "a.w", "b.w", "a.v"]
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", by_way_of_b, leaf("driver.x")).sum()])
        found = gradients(context_id, names)
    local = weighted(leaf("driver.x") * leaf("a.w"), "b.w") * leaf("a.v")
    assert_same(found, expected(local.sum(), names))


def test_results_that_are_taken_in_another_thread():
    """The future is waited for where no context is current."""
    results: list[torch.Tensor] = []
    with autograd.context() as context_id:
        future = rpc.rpc_async("a", weighted, args=(leaf("driver.x"), "a.w"))
        run_in_threads(lambda: results.append(future.wait()))
        autograd.backward(context_id, [results[0].sum()])
        found = gradients(context_id, ["driver.x", "a.w"])
    assert_same(found, expected(weighted(leaf("driver.x"), "a.w").sum(), ["driver.x", "a.w"]))


# -- what is not used --------------------------------------------------------------------------------------


def used_and_unused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shared = note(x * leaf("a.w"), "shared")
    return note(shared, "used"), note(shared * leaf("a.v"), "unused")


def test_of_a_message_used_in_part_only_that_part_runs():
    #      driver            a
    #      x ─────▶ shared = x * a.w ──┬──▶ used
    #                                  ╰──▶ unused = shared * a.v      (nothing leads there from the loss)
    #      loss = used.sum()
    with autograd.context() as context_id:
        used, _unused = there("a", used_and_unused, leaf("driver.x"))
        autograd.backward(context_id, [used.sum()])
        assert all_runs() == ["shared", "used"]
        found = gradients(context_id, ["driver.x", "a.w", "a.v"])
    assert_same(found, expected(used_and_unused(leaf("driver.x"))[0].sum(), ["driver.x", "a.w", "a.v"]))


def take_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * leaf("a.w")


def test_an_argument_that_the_callee_does_not_use():
    #      driver: x, note(y) ───────▶ a: x * a.w       y gets no gradient, and what is behind it does not run
    def forward(call) -> torch.Tensor:
        return call("a", take_first, leaf("driver.x"), note(leaf("driver.y"), "behind y")).sum()

    check(forward, ["driver.x", "driver.y", "a.w"])
    assert all_runs() == []


def test_a_call_whose_result_is_not_used():
    #      driver            a                       b
    #      x ──────▶ note(x * a.w) ──▶ h ──────▶ note(h * b.w)      (its result is dropped)
    #      loss = h.sum()
    with autograd.context() as context_id:
        h = there("a", noted, leaf("driver.x"), "a.w")
        there("b", noted, h, "b.w")
        autograd.backward(context_id, [h.sum()])
        assert all_runs() == ["a.w"]
        found = gradients(context_id, ["driver.x", "a.w", "b.w"])
    wanted = expected(weighted(leaf("driver.x"), "a.w").sum(), ["driver.x", "a.w", "b.w"])
    assert wanted["b.w"] is None
    assert_same(found, wanted)


def noted(x: torch.Tensor, name: str) -> torch.Tensor:
    return note(x * leaf(name), name)


def test_two_passes_over_different_parts_of_one_message():
    with autograd.context() as context_id:
        used, other = there("a", used_and_unused, leaf("driver.x"))
        autograd.backward(context_id, [used.sum()], retain_graph=True)
        assert all_runs() == ["shared", "used"]
        autograd.backward(context_id, [other.sum()])
        assert all_runs() == ["shared", "unused"]
        found = gradients(context_id, ["driver.x", "a.w", "a.v"])
    wanted = expected(list(map(torch.sum, used_and_unused(leaf("driver.x")))), ["driver.x", "a.w", "a.v"])
    assert_same(found, wanted)


# -- state that a worker keeps between calls ---------------------------------------------------------------

_kept: dict[str, torch.Tensor] = {}


def keep(name: str, x: torch.Tensor) -> None:
    _kept[name] = x * leaf("a.w")


def use_kept(name: str, x: torch.Tensor) -> torch.Tensor:
    return _kept[name] * x


def forget_kept() -> None:
    _kept.clear()


def test_calls_that_join_on_kept_state():
    #      driver          a
    #      x ─────▶ kept = x * a.w       (the call returns nothing)
    #      y ─────▶ kept * y ──▶ z
    #      loss = z.sum()
    def forward(call) -> torch.Tensor:
        call("a", keep, "k", leaf("driver.x"))
        z = call("a", use_kept, "k", leaf("driver.y"))
        call("a", forget_kept)
        return z.sum()

    check(forward, ["driver.x", "driver.y", "a.w"])


# -- backward from other workers ---------------------------------------------------------------------------


def backward_here(context_id: int, x: torch.Tensor) -> float:
    loss = (there("b", weighted, x, "b.w") * leaf("a.w")).sum()
    autograd.backward(context_id, [loss], timeout=PATIENCE)
    return loss.item()


def test_backward_inside_a_call_by_a_worker_that_does_not_own_the_context():
    #      driver           a                       b
    #      x ───────▶ x ──────────────────▶ x * b.w
    #                 loss = (y * a.w).sum() ◀── y
    #                 backward(loss)                      the gradients of x go on to the driver
    names = ["driver.x", "a.w", "b.w"]
    with autograd.context() as context_id:
        value = there("a", backward_here, context_id, leaf("driver.x"))
        found = gradients(context_id, names)
    local = (weighted(leaf("driver.x"), "b.w") * leaf("a.w")).sum()
    assert value == pytest.approx(local.item())
    assert_same(found, expected(local, names))


def keep_loss(x: torch.Tensor) -> None:
    _kept["loss"] = (x * leaf("a.w")).square().sum()


def backward_from_kept(context_id: int) -> None:
    autograd.backward(context_id, [_kept.pop("loss")], timeout=PATIENCE)


def test_backward_by_another_worker_from_what_it_kept():
    names = ["driver.x", "a.w"]
    with autograd.context() as context_id:
        there("a", keep_loss, leaf("driver.x"))
        there("a", backward_from_kept, context_id)
        # And then by the owner.
        autograd.backward(context_id, [there("a", weighted, leaf("driver.x"), "a.w").sum()])
        found = gradients(context_id, names)
    x = leaf("driver.x")
    local = (x * leaf("a.w")).square().sum() + (x * leaf("a.w")).sum()
    assert_same(found, expected(local, names))


def grad_here(context_id: int, x: torch.Tensor) -> torch.Tensor:
    """With respect to something that was received."""
    loss = there("b", weighted, x * x, "b.w").sum()
    return autograd.grad(context_id, loss, x, timeout=PATIENCE)[0]


def test_grad_inside_a_call_by_a_worker_that_does_not_own_the_context():
    with autograd.context() as context_id:
        found = there("a", grad_here, context_id, leaf("driver.x"))
        assert gradients(context_id, ["driver.x", "b.w"]) == {"driver.x": None, "b.w": None}
    x = leaf("driver.x")
    torch.testing.assert_close(found, torch.autograd.grad(weighted(x * x, "b.w").sum(), x)[0])


def context_and_backward_here(x: torch.Tensor) -> torch.Tensor:
    """A context of this worker's own, inside of a call that belongs to another."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("b", weighted, x.detach() * leaf("a.w"), "b.w").sum()])
        return autograd.get_gradients(context_id)[leaf("a.w")]


def test_a_context_inside_of_a_call_of_another_context():
    with autograd.context() as outer:
        found = there("a", context_and_backward_here, leaf("driver.x"))
        assert gradients(outer, ["a.w", "b.w"]) == {"a.w": None, "b.w": None}
    local = weighted(leaf("driver.x").detach() * leaf("a.w"), "b.w").sum()
    assert_same({"a.w": found}, expected(local, ["a.w"]))


# -- several passes at once --------------------------------------------------------------------------------


def test_two_passes_at_once_in_one_context():
    names = ["driver.x", "a.w", "b.w"]

    def forward(call) -> torch.Tensor:
        h = call("a", weighted, leaf("driver.x"), "a.w")
        return (call("b", weighted, h, "b.w") * h).sum()

    rounds = 5
    with autograd.context() as context_id:
        loss = forward(there)
        start = threading.Barrier(2, timeout=PATIENCE)

        def run() -> None:
            for _ in range(rounds):
                start.wait()
                autograd.backward(context_id, [loss], retain_graph=True, timeout=PATIENCE)

        run_in_threads(run, run)
        found = gradients(context_id, names)
    assert_same(found, expected(forward(here), names), times=2 * rounds)


def test_passes_of_two_workers_at_once_in_one_context():
    names = ["driver.x", "a.w"]
    with autograd.context() as context_id:
        there("a", keep_loss, leaf("driver.x"))
        loss = there("a", weighted, leaf("driver.x"), "a.w").sum()
        run_in_threads(
            lambda: there("a", backward_from_kept, context_id),
            lambda: autograd.backward(context_id, [loss], timeout=PATIENCE),
        )
        found = gradients(context_id, names)
    x = leaf("driver.x")
    assert_same(found, expected((x * leaf("a.w")).square().sum() + (x * leaf("a.w")).sum(), names))


def test_eight_threads_with_a_context_each_see_only_their_own_gradients():
    #      each thread: x * n ──▶ a: * a.w ──▶ b: * b.w ──▶ sum        the same leaves for all
    names = ["driver.x", "a.w", "b.w"]
    base = {n: expected(eight(n, here), names) for n in range(8)}
    start = threading.Barrier(8, timeout=PATIENCE)

    def run(n: int) -> None:
        start.wait()
        for round in range(1, 4):
            with autograd.context() as context_id:
                loss = eight(n, there)
                for _ in range(round):
                    autograd.backward(context_id, [loss], retain_graph=True, timeout=PATIENCE)
                assert_same(gradients(context_id, names), base[n], times=round)

    run_in_threads(*(lambda n=n: run(n) for n in range(8)))


def eight(n: int, call) -> torch.Tensor:
    h = call("a", weighted, leaf("driver.x") * n, "a.w")
    return call("b", weighted, h, "b.w").sum()


def test_threads_that_share_a_context():
    #      four threads, each with calls of its own, in the context of the thread that started them
    names = ["driver.x", "a.w", "b.w"]

    def work(call, n: int) -> torch.Tensor:
        h = leaf("driver.x") * n
        for round in range(5):
            name = "ab"[(n + round) % 2]
            h = torch.tanh(call(name, weighted, h, f"{name}.w")) + h
        return h.sum()

    losses: dict[int, torch.Tensor] = {}
    with autograd.context() as context_id:

        def run(n: int) -> None:
            losses[n] = work(there, n)

        inside = [contextvars.copy_context() for _ in range(4)]
        run_in_threads(*(lambda n=n: inside[n].run(run, n) for n in range(4)))
        autograd.backward(context_id, [losses[n] for n in range(4)])
        found = gradients(context_id, names)
    assert_same(found, expected([work(here, n) for n in range(4)], names))


def gradient_by_way_of(name: str, context_id: int) -> torch.Tensor | None:
    return there(name, own_gradient, context_id, f"{name}.w")


def test_gradients_are_complete_for_whoever_asks_after_backward():
    """Also over another connection than the one on which the root says that the pass is done."""
    wanted = expected(weighted(leaf("driver.x"), "a.w").sum(), ["a.w"])
    for _ in range(30):
        with autograd.context() as context_id:
            there("b", is_known_here, context_id)
            autograd.backward(context_id, [there("a", weighted, leaf("driver.x"), "a.w").sum()])
            assert_same({"a.w": there("b", gradient_by_way_of, "a", context_id)}, wanted)


# -- several contexts --------------------------------------------------------------------------------------


def test_a_tensor_of_an_outer_context_used_in_an_inner_one():
    #      outer:  x ──▶ a: * a.w ──▶ h
    #      inner:                     h ──▶ b: * b.w ──▶ loss         backward in the inner one
    names = ["driver.x", "a.w", "b.w"]
    with autograd.context() as outer:
        h = there("a", weighted, leaf("driver.x"), "a.w")
        with autograd.context() as inner:
            loss = (there("b", weighted, h, "b.w") * h).sum()
            autograd.backward(inner, [loss])
            found = gradients(inner, names)
            assert autograd.get_gradients(outer) == {}
            assert there("a", own_gradient_count, outer) == 0
    local = weighted(leaf("driver.x"), "a.w")
    assert_same(found, expected((weighted(local, "b.w") * local).sum(), names))


def test_a_pass_in_the_outer_context_over_what_the_inner_one_made():
    names = ["driver.x", "a.w", "b.w"]
    with autograd.context() as outer:
        with autograd.context() as inner:
            h = there("a", weighted, leaf("driver.x"), "a.w")
            loss = there("b", weighted, h, "b.w").sum()
            autograd.backward(outer, [loss])
            found = gradients(outer, names)
            assert autograd.get_gradients(inner) == {}
    assert_same(found, expected(weighted(weighted(leaf("driver.x"), "a.w"), "b.w").sum(), names))


def test_tensors_of_two_contexts_side_by_side():
    names = ["driver.x", "a.w", "b.w"]
    with autograd.context():
        h = there("a", weighted, leaf("driver.x"), "a.w")
        with autograd.context():
            k = there("b", weighted, leaf("driver.x"), "b.w")
            with autograd.context() as third:
                autograd.backward(third, [there("a", torch.mul, h, k).sum()])
                found = gradients(third, names)
    x = leaf("driver.x")
    assert_same(found, expected((weighted(x, "a.w") * weighted(x, "b.w")).sum(), names))


# -- the end of a context ----------------------------------------------------------------------------------


def is_known_here(context_id: int) -> bool:
    return autograd._is_valid_context(context_id)


def reach_all() -> None:
    there("b", weighted, leaf("a.w"), "b.w")


def test_with_wait_a_context_has_ended_everywhere_when_it_is_left():
    #      the driver has sent to a alone, and a has sent to b
    for _ in range(10):
        with autograd.context(wait=True) as context_id:
            there("a", reach_all)
            assert there("b", is_known_here, context_id)
        assert not autograd._is_valid_context(context_id)
        assert not there("b", is_known_here, context_id)
        assert not there("a", is_known_here, context_id)


def test_with_wait_after_a_pass_and_after_an_exception():
    with autograd.context(wait=True) as context_id:
        autograd.backward(context_id, [there("a", weighted, leaf("driver.x"), "a.w").sum()])
    assert not there("a", is_known_here, context_id)
    with pytest.raises(ZeroDivisionError), autograd.context(wait=True) as context_id:
        there("a", reach_all)
        raise ZeroDivisionError
    assert not there("b", is_known_here, context_id)


class Gate:
    """Holds a call back, in one process, until it is let go."""

    entered = threading.Event()
    opened = threading.Event()


def close_gate() -> None:
    Gate.entered.clear()
    Gate.opened.clear()


def open_gate() -> None:
    Gate.opened.set()


def wait_until_entered() -> None:
    assert Gate.entered.wait(PATIENCE)


def held_back(x: torch.Tensor) -> torch.Tensor:
    """Goes on after the end of its context, with another call."""
    y = x * leaf("a.w")
    Gate.entered.set()
    assert Gate.opened.wait(PATIENCE)
    return there("b", weighted, y, "b.w")


def test_a_context_that_is_left_on_another_thread_has_ended():
    context = autograd.context()
    entered: list[int] = []
    run_in_threads(lambda: entered.append(context.__enter__()))
    with contextlib.suppress(ValueError):  # it is not this thread's
        context.__exit__(None, None, None)
    assert not autograd._is_valid_context(entered[0])


@pytest.mark.parametrize("create_graph", [False, True])
def test_nothing_is_held_after_the_end(create_graph):
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context(wait=True) as context_id:
        h = weight * 2
        y = there("a", weighted, h, "a.w")
        z = there("b", weighted, y, "b.w")
        autograd.backward(context_id, [z.sum()], create_graph=create_graph)
        gradient = autograd.get_gradients(context_id)[weight]
        held = [weakref.ref(tensor) for tensor in (weight, h, y, z, gradient)]
        del weight, h, y, z, gradient
    gc.collect()
    assert [reference() for reference in held] == [None] * 5


def test_a_late_message_never_brings_a_context_back():
    #      driver            a                         b
    #      x ───────▶ held back ...
    #      the context ends, everywhere
    #                 ... y ─ ─ ─ ─ ─ ─ ─ ─ ─▶                 in a context that has ended: an error, and no leaf
    #      (late) ◀────────╯
    there("a", close_gate)
    with autograd.context(wait=True) as context_id:
        future = rpc.rpc_async("a", held_back, args=(leaf("driver.x"),))
        there("a", wait_until_entered)
    there("a", open_gate)
    with pytest.raises(errors.UnknownContextError, match=f"context {context_id} .* has ended on this worker"):
        future.wait()
    assert not autograd._is_valid_context(context_id)
    for name in ("a", "b"):
        assert not there(name, is_known_here, context_id)


def by_way_of_a_and_b(x: torch.Tensor) -> torch.Tensor:
    return there("b", weighted, x * leaf("a.w"), "b.w")


def test_a_context_that_ends_while_calls_are_on_their_way():
    """Their answers have a history or are errors, and nothing is left of the context."""
    for _ in range(20):
        with autograd.context() as context_id:
            future = rpc.rpc_async("a", by_way_of_a_and_b, args=(leaf("driver.x"),))
        with contextlib.suppress(errors.GradientError):
            assert not future.wait().is_leaf
        assert not autograd._is_valid_context(context_id)
