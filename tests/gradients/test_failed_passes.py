"""A thousand failed passes leave nothing behind."""

from __future__ import annotations

import gc
import itertools
import threading
import tracemalloc
from collections.abc import Iterator

import fault_programs as programs
import pytest
import torch
from fault_programs import PATIENCE, PLACES, Fault, at, check_nothing_is_left, check_works, forward, on_b

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.gradients import nodes
from telegrad.primitives import current

WAYS = ("function", "hook", "leaf hook", "post hook")


@pytest.fixture(autouse=True)
def trio() -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["b", "c"], transport="inproc") as cluster:
        yield cluster


def end_the_context(place: str) -> None:
    current.current_worker().release_context(current.context_id.get())


def fail_in_backward(place: str, way: str) -> None:
    with autograd.context() as context_id:
        into = "grad" if way == "hook" else "context"
        with pytest.raises(errors.BackwardError, match=f"boom at {place}"):
            autograd.backward(context_id, [forward(Fault(place, way))], into=into, timeout=PATIENCE)


def fail_in_grad(place: str, way: str) -> None:
    with autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        faults = (Fault(place),)
        loss = at("root", rpc.rpc_sync("b", on_b, args=(at("first", x, faults), faults)), faults).sum()
        with pytest.raises(errors.BackwardError, match=f"boom at {place}"):
            autograd.grad(context_id, loss, x, create_graph=True, timeout=PATIENCE)


def fail_in_forward(place: str, way: str) -> None:
    with autograd.context(), pytest.raises(programs.BoomError):
        forward(Fault(place, "call"))


def fail_by_release(place: str, way: str) -> None:
    with autograd.context() as context_id:
        loss = forward(Fault("root", action=end_the_context))
        with pytest.raises(errors.BackwardError, match="ended while its backward pass ran"):
            autograd.backward(context_id, [loss], timeout=PATIENCE)


KINDS = (fail_in_backward, fail_in_backward, fail_in_grad, fail_in_forward, fail_by_release)


def fail_often(count: int) -> None:
    every = itertools.product(KINDS, PLACES, WAYS)
    for kind, place, way in itertools.islice(itertools.cycle(every), count):
        kind(place, way)


def counts() -> tuple[int, int, int]:
    """Objects, tensors and traced bytes, once whatever is on its way has come to its end."""
    check_nothing_is_left()
    gc.collect()
    objects = gc.get_objects()
    return (
        len(objects),
        sum(issubclass(type(o), torch.Tensor) for o in objects),
        tracemalloc.get_traced_memory()[0],
    )


def test_nothing_is_left_after_a_thousand_failed_passes():
    fail_often(500)
    threads = threading.active_count()
    tracemalloc.start()
    try:
        objects, tensors, memory = counts()
        fail_often(500)
        later_objects, later_tensors, later_memory = counts()
    finally:
        tracemalloc.stop()
    assert threading.active_count() <= threads + 3  # a worker may have started one more meanwhile
    assert not nodes._running
    assert later_objects - objects < 200
    assert later_tensors - tensors < 10
    # What stays for a while are the numbers of passes and contexts that are over, on each of the three workers.
    assert later_memory - memory < 500 * 3 * 500
    check_works()
    check_nothing_is_left()


class UnspeakableError(SystemExit):
    def __str__(self) -> str:
        raise ValueError("no text")


def exit_without_a_word(place: str) -> None:
    raise UnspeakableError


def test_an_exception_whose_text_cannot_be_had():
    with autograd.context() as context_id, programs.soon():
        with pytest.raises(errors.BackwardError, match="UnspeakableError"):
            autograd.backward(context_id, [forward(Fault("last", action=exit_without_a_word))], timeout=PATIENCE)
    check_nothing_is_left()
