"""Tests that fail today. pytest does not collect this file by itself; run it by its name."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch
from named_leaves import assert_same, expected, gradients, here, leaf, there
from test_autograd import blocked, let_go
from test_bad_input import assert_works, forward
from test_calls_in_graphs import run_in_threads, weighted
from test_leaves import Gives, capture_backward
from test_tracked_values import Owned, embed_here, identity, multiply

from telegrad import autograd, errors, rpc
from telegrad.current import current_worker
from telegrad.gradients.attach import Attach
from telegrad.gradients.backward_pass import Commit, Part, State
from telegrad.gradients.contexts import Context, Contexts
from telegrad.gradients.leaves import GradientTable
from telegrad.messages import Autograd, Entry, Envelope, Gradients, Kind

# -- leaves: a gradient that Python code holds is kept without a copy, and changes when the next one is added ----


def test_a_gradient_that_somebody_holds_is_copied():
    held = []

    def make(gradient):
        held.append(torch.full((1000,), 3.0))
        return held[-1]

    weight = torch.ones(1000, requires_grad=True)
    table = capture_backward(Gives.apply(weight, make).sum(), [weight])
    held[0].zero_()
    assert torch.equal(table.get(weight), torch.full((1000,), 3.0))


def test_a_gradient_that_a_hook_has_kept_is_copied():
    kept = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(kept.append)
    table = capture_backward((weight * 2).sum(), [weight])
    kept[0].zero_()
    assert torch.equal(table.get(weight), torch.full((3,), 2.0))


def test_adding_changes_nobody_elses_memory():
    kept = []
    weight = torch.ones(3, requires_grad=True)
    table = GradientTable()
    for _ in range(3):
        loss = Gives.apply(weight, lambda gradient: kept.append(gradient.clone()) or kept[-1]).sum()
        table.take_over(capture_backward(loss, [weight]))
    assert torch.equal(table.get(weight), torch.full((3,), 3.0))
    assert all(torch.equal(gradient, torch.ones(3)) for gradient in kept)


def test_a_sparse_gradient_that_somebody_holds_is_copied():
    held = []

    def make(gradient):
        held.append(torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True))
        return held[-1]

    weight = torch.ones(3, requires_grad=True)
    table = capture_backward(Gives.apply(weight, make).sum(), [weight])
    held[0]._values().zero_()
    assert table.get(weight).to_dense().tolist() == [0, 2, 0]


# -- roots: the gradient of a leaf that is a root itself goes to its `.grad` -------------------------------------


def test_a_root_that_is_a_leaf_or_was_just_received(module_cluster):
    x = torch.tensor(3.0, requires_grad=True)
    with autograd.context() as context_id:
        received = there("a", torch.sum, leaf("driver.x"))
        autograd.backward(context_id, [x, received])
        assert autograd.get_gradients(context_id)[x].item() == 1
        assert_same(gradients(context_id, ["driver.x"]), expected(leaf("driver.x").sum(), ["driver.x"]))


# -- a leaf that is frozen after it was sent: 'NoneType' object has no attribute 'variable' -----------------------


def test_a_leaf_that_is_frozen_after_it_was_sent_gets_no_gradient(module_cluster):
    #      driver: u, v ───────▶ a: u * v ───────▶ driver: sum      and u.requires_grad_(False) before backward
    def forward(call, u: torch.Tensor) -> torch.Tensor:
        loss = call("a", multiply, u, leaf("driver.v")).sum()
        u.requires_grad_(False)
        return loss

    frozen = torch.ones(3, dtype=torch.float64, requires_grad=True)
    forward(here, frozen).backward(inputs=[leaf("driver.v")])
    wanted, leaf("driver.v").grad = leaf("driver.v").grad, None
    with autograd.context() as context_id:
        autograd.backward(context_id, [forward(there, frozen.requires_grad_())])
        found = autograd.get_gradients(context_id)
        assert list(found) == [leaf("driver.v")]
        torch.testing.assert_close(found[leaf("driver.v")], wanted)


# -- sparse gradients that are not the last ones for the root: "nbytes is not defined for sparse tensors" ---------


def embed_at_b(call, weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return call("b", embed_here, weight, indices) * 2


def test_a_sparse_gradient_travels_through_several_workers(module_cluster):
    #      driver: table ──▶ a ──▶ b: embedding(table, sparse) ──▶ a: * 2 ──▶ driver: sum
    table, indices = leaf("driver.table", 10, 3), torch.tensor([0, 9, 9])
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", embed_at_b, there, table, indices).sum()])
        found = autograd.get_gradients(context_id)[table]
    (wanted,) = torch.autograd.grad(embed_at_b(here, table, indices).sum(), table)
    torch.testing.assert_close(found.to_dense(), wanted.to_dense())


# -- grad() with no inputs gives (), where torch raises ----------------------------------------------------------


def test_grad_with_no_inputs(module_cluster):
    with autograd.context() as context_id:
        with pytest.raises(ValueError, match="`inputs` argument to `grad\\(\\)` cannot be empty"):
            autograd.grad(context_id, forward(there), [])
        assert_works(context_id)


# -- a context that is left on another thread than it was entered on is never released ---------------------------


def test_a_context_that_is_left_on_another_thread_has_ended(module_cluster):
    context = autograd.context()
    entered: list[int] = []
    run_in_threads(lambda: entered.append(context.__enter__()))
    with contextlib.suppress(ValueError):  # it is not this thread's
        context.__exit__(None, None, None)
    assert not autograd._is_valid_context(entered[0])


# -- large gradients that cannot be sent, where the part has already said that it is done: nobody hears of it, and the
#    pass waits for its deadline ---------------------------------------------------------------------------------


def send_no_gradients() -> None:
    """From now on, this worker fails to send gradients: after it has told the root that its part is done."""
    engine = current_worker().engine
    post = engine.host.post

    def failing(to, envelope, body, *rest) -> None:
        if not isinstance(body, Gradients):
            return post(to, envelope, body, *rest)
        deadline = time.monotonic() + 1
        part = engine._passes[envelope.autograd.during].part
        while part.state is not State.REPORTED and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        raise errors.EncodeError("made up")

    engine.host.post = failing


def send_gradients_again() -> None:
    del current_worker().engine.host.post


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def by_way_of_b(x: torch.Tensor) -> torch.Tensor:
    return there("b", tripled, x * 2) * 1


def test_large_gradients_that_cannot_be_sent(module_cluster):
    #      driver: x ──▶ a: x * 2 ──▶ b: * 3 ──▶ a ──▶ driver: sum
    x = torch.ones(20_000, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        loss = there("a", by_way_of_b, x).sum()
        there("b", send_no_gradients)
        try:
            with pytest.raises(errors.BackwardError, match="made up.*worker 'b'"):
                autograd.backward(context_id, [loss], timeout=5.0)
        finally:
            there("b", send_gradients_again)


# -- a deadline says neither how long it was nor which worker is late ---------------------------------------------


def test_a_timeout_names_the_workers_that_are_late(module_cluster):
    with autograd.context() as context_id:
        loss = there("a", blocked, leaf("driver.x")).sum()
        with pytest.raises(errors.BackwardError, match=r"more than set timeout \(200 ms\).*'a'"):
            autograd.backward(context_id, [loss], timeout=0.2)
        there("a", let_go)


# -- an argument that cannot be tracked: the error blames the function --------------------------------------------


def test_what_cannot_be_tracked_is_named(module_cluster):
    odd = torch.ones(3).as_subclass(Owned).requires_grad_()
    with autograd.context(), pytest.raises(errors.EncodeError, match="an argument, a list, of the call of"):
        there("a", identity, [odd])


# -- create_graph: torch warns, once in a process, of a cycle in `.grad` that there is not ------------------------

PROGRAM = """
import torch, telegrad
from telegrad import autograd
with telegrad.LocalCluster(["a"], transport="inproc") as cluster, autograd.context() as context_id:
    x = torch.ones(3, requires_grad=True)
    autograd.backward(context_id, [cluster.call("a", torch.sin, x).sum()], create_graph=True)
"""


def test_create_graph_does_not_warn():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- the pure state: what has failed here, and was dropped, is never said to count --------------------------------


def test_a_part_that_has_failed_is_never_committed():
    part = Part()
    part.on_begin([10])
    part.on_gradients(10)
    part.on_local_end(ValueError("broken"))
    assert Commit() not in part.on_end("")
    assert part.state is State.ABORTED


# -- a context that ends while a message of it is sent or read: what the message says stays in the log for ever, and the
#    receiver is never told of the end ---------------------------------------------------------------------------


class Worker:
    """As much of a worker as messages need: what becomes of a context when they meet its end."""

    def __init__(self) -> None:
        self.new_id = itertools.count(1 << 48).__next__
        self.contexts = Contexts(1, self.new_id)
        self.attach = Attach(1, self.contexts, self.new_id)

    def end_before(self, what: str, context: Context) -> None:
        """Another thread ends the context just before the log takes something over."""
        function = getattr(self.contexts.log, what)

        def late(*args):
            self.contexts.take_out(context.id)
            return function(*args)

        setattr(self.contexts.log, what, late)


def test_a_context_that_ends_before_its_message_is_attached():
    worker = Worker()
    context = worker.contexts.new()
    worker.contexts.take_out(context.id)
    envelope = Envelope(Kind.CALL, worker.new_id())
    sent = worker.attach.outgoing(context, envelope, [torch.ones(3, requires_grad=True)], "wire", 2)
    assert sent.autograd is None, "its receiver would make a context of which nobody tells it the end"
    assert len(worker.contexts.log) == 0


def test_a_context_that_ends_while_its_message_is_attached():
    worker = Worker()
    context = worker.contexts.new()
    worker.end_before("merge", context)
    envelope = Envelope(Kind.CALL, worker.new_id())
    sent = worker.attach.outgoing(context, envelope, [torch.ones(3, requires_grad=True) * 2], "wire", 2)
    assert sent.autograd is None
    assert len(worker.contexts.log) == 0


def test_a_context_that_ends_while_its_message_is_read():
    worker = Worker()
    context = worker.contexts.new()
    worker.end_before("merge", context)
    message = (2 << 48) + 1
    said = Autograd(context.id, (Entry(message, context.id, ()),))
    worker.attach.merge(Envelope(Kind.REPLY, message, autograd=said), "wire")
    assert len(worker.contexts.log) == 0


def test_a_context_that_ends_while_a_call_is_on_its_way(module_cluster):
    """Its function runs, and nothing is left of the context. Fails seldom: the same thing as above."""
    for _ in range(20):
        with autograd.context() as context_id:
            future = rpc.rpc_async("a", weighted, args=(leaf("driver.x"), "a.w"))
        future.wait()
        assert not autograd._is_valid_context(context_id)
