"""What a pass leaves behind goes by reference counts alone, when its context ends: with the garbage collector switched
off, nothing of the graph is left on any worker."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import fault_programs as programs
import pytest
import torch
from fault_fixtures import workers  # noqa: F401
from fault_programs import PATIENCE, wait_until
from torch import Tensor

from telegrad import autograd, errors, rpc

_made: list[weakref.ref] = []  # tensors and nodes of the test, on any worker: they are of this process
_making = threading.Lock()


@pytest.fixture
def no_collector(workers) -> Iterator[None]:
    """The collector is off in the test, and has nothing left to do from before it."""
    warm_up()
    _made.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    _made.clear()


class Mark:
    """Lives as long as a node."""


def watch(tensor: Tensor) -> Tensor:
    with _making:
        _made.append(weakref.ref(tensor))
        if tensor.grad_fn is not None:  # most nodes have no weak references, but what they hold has
            mark = tensor.grad_fn.metadata["mark"] = Mark()
            _made.append(weakref.ref(mark))
    return tensor


def scaled(x: Tensor, to: str = "") -> Tensor:
    weight = watch(torch.full((3,), 2.0, requires_grad=True))
    y = watch(watch(x) * weight * weight)
    return watch(rpc.rpc_sync(to, scaled, args=(y,)) * 1) if to else y


def failing(x: Tensor, to: str = "") -> Tensor:
    if to:
        return watch(rpc.rpc_sync(to, failing, args=(watch(x) * 1,)) * 1)
    return watch(programs.Trip.apply(watch(x), programs.fail, "last"))


def warm_up() -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", scaled, args=(torch.ones(3, requires_grad=True), "c")).sum()])


def check_all_is_gone() -> None:
    assert len(_made) > 5
    wait_until(lambda: all(reference() is None for reference in _made), "the end of all tensors and nodes")


def loss_over(function=scaled, *args: str) -> tuple[Tensor, Tensor]:
    x = watch(torch.ones(3, requires_grad=True))
    y = watch(watch(x * 3) * x)
    return x, watch(watch(rpc.rpc_sync("b", function, args=(y, *args))).sum())


@pytest.mark.parametrize("to", ["", "c"])
@pytest.mark.parametrize("into", ["context", "grad"])
def test_after_a_backward(workers, no_collector, to, into):
    with autograd.context() as context_id:
        x, loss = loss_over(scaled, to)
        autograd.backward(context_id, [loss], into=into)
        del x, loss
    check_all_is_gone()


@pytest.mark.parametrize("to", ["", "c"])
def test_after_several_passes_over_one_graph(workers, no_collector, to):
    with autograd.context() as context_id:
        x, loss = loss_over(scaled, to)
        for _ in range(3):
            autograd.backward(context_id, [loss], retain_graph=True)
        watch(autograd.get_gradients(context_id)[x])
        del x, loss
    check_all_is_gone()


@pytest.mark.parametrize("to", ["", "c"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_after_grad(workers, no_collector, to, create_graph):
    with autograd.context() as context_id:
        x, loss = loss_over(scaled, to)
        (gradient,) = autograd.grad(context_id, loss, x, create_graph=create_graph)
        watch(gradient)
        if create_graph:
            autograd.backward(context_id, [watch(gradient.sum())])
        del x, loss, gradient
    check_all_is_gone()


@pytest.mark.parametrize("to", ["", "c"])
def test_after_a_backward_that_makes_a_graph(workers, no_collector, to):
    with autograd.context() as context_id:
        x, loss = loss_over(scaled, to)
        autograd.backward(context_id, [loss], create_graph=True)
        gradient = watch(autograd.get_gradients(context_id)[x])
        autograd.backward(context_id, [watch(gradient.sum())])
        del x, loss, gradient
    check_all_is_gone()


def test_with_hooks_after_accumulation(workers, no_collector):
    with autograd.context() as context_id:
        x, loss = loss_over()
        x.register_post_accumulate_grad_hook(lambda leaf: None)
        autograd.backward(context_id, [loss])
        del x, loss
    check_all_is_gone()


def test_without_a_pass(workers, no_collector):
    with autograd.context():
        loss_over(scaled, "c")
    check_all_is_gone()


def fails(context_id: int, loss: Tensor, kind: type[BaseException] = errors.BackwardError) -> bool:
    """On a thread that ends: torch's engine keeps what it had not come to in a queue of the thread, until its next
    call there."""
    raised = []

    def run() -> None:
        try:
            autograd.backward(context_id, [loss], timeout=PATIENCE)
        except kind:
            raised.append(kind)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    return bool(raised)


@pytest.mark.parametrize("where", ["here", "b", "c"])
def test_after_a_pass_that_failed(workers, no_collector, where):
    with autograd.context() as context_id:
        x, loss = loss_over(scaled if where == "here" else failing, "c" if where == "c" else "")
        if where == "here":
            loss = failing(loss)
        assert fails(context_id, loss)
        del x, loss
    check_all_is_gone()


def test_after_a_pass_that_was_interrupted(workers, no_collector):
    def interrupt(place: str) -> None:
        raise KeyboardInterrupt

    with autograd.context() as context_id:
        x, loss = loss_over()
        assert fails(context_id, watch(programs.Trip.apply(loss, interrupt, "root")), KeyboardInterrupt)
        del x, loss
    check_all_is_gone()
