"""Tensors with a history beside the values of a message. Those in exceptions are followed. What comes in a pickle that
carries values only arrives with its values, and a backward pass that reaches it fails with the reason: as a leaf it
would take the gradient, silently."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import telegrad
from telegrad import autograd, rpc
from telegrad.errors import EncodeError, GradientError
from telegrad.nn import RemoteModule
from telegrad.primitives import current
from telegrad.primitives.current import current_worker

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
PATIENCE = 30.0
OPTIONS = telegrad.Options(rpc_timeout=PATIENCE, backward_timeout=PATIENCE)


@pytest.fixture(params=["inproc", "unix"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a"], transport=request.param, server=server, options=OPTIONS) as cluster:
        yield cluster


class CarryError(Exception):
    """Carries tensors in its arguments and attributes."""


SCALE = nn.Parameter(torch.tensor([2.0, 2.0]))


def fail_with(kind: str, x: torch.Tensor) -> None:
    result = x * 2
    error: Exception = CarryError(result)
    if kind == "attribute":
        error = CarryError("text")
        error.found = {"best": [result]}
    elif kind == "leaf":
        error = CarryError(SCALE)
    elif kind == "group":
        error = ExceptionGroup("two", [ValueError(1), CarryError(result)])
    raise error


def tensor_of(error: Any) -> torch.Tensor:
    if isinstance(error, ExceptionGroup):
        error = error.exceptions[1]
    return error.found["best"][0] if hasattr(error, "found") else error.args[0]


def stored(kind: str, x: torch.Tensor) -> None:
    rpc.remote("a", fail_with, args=(kind, x)).to_here()


WAYS: dict[str, Any] = {
    "rpc_sync": lambda kind, x: rpc.rpc_sync("a", fail_with, args=(kind, x)),
    "rpc_async": lambda kind, x: rpc.rpc_async("a", fail_with, args=(kind, x)).wait(),
    "to_here": stored,
    "nested": lambda kind, x: rpc.rpc_sync("a", passed_on, args=(kind, x)),
}


def passed_on(kind: str, x: torch.Tensor) -> None:
    rpc.rpc_sync("driver", fail_with, args=(kind, x))


@pytest.mark.parametrize("kind", ["argument", "attribute", "group"])
def test_tensors_in_exceptions_are_followed(cluster, kind):
    for way in WAYS.values():
        x = torch.ones(2, requires_grad=True)
        with pytest.raises((CarryError, ExceptionGroup)) as caught:
            way(kind, x)
        found = tensor_of(caught.value)
        assert found.tolist() == [2.0, 2.0]
        (found * x).sum().backward()
        assert x.grad.tolist() == [4.0, 4.0]
    if kind == "argument":
        for way in WAYS.values():
            with autograd.context() as context_id:
                with pytest.raises(CarryError) as caught:
                    way(kind, x)
                autograd.backward(context_id, [(tensor_of(caught.value) * x).sum()])
                assert autograd.get_gradients(context_id)[x].tolist() == [4.0, 4.0]


def test_a_leaf_in_an_exception_is_followed(cluster):
    rpc.rpc_sync("a", clear_scale)
    with pytest.raises(CarryError) as caught:
        rpc.rpc_sync("a", fail_with, args=("leaf", torch.ones(2)))
    found = caught.value.args[0]
    assert isinstance(found, nn.Parameter)
    found.sum().backward()
    assert rpc.rpc_sync("a", clear_scale).tolist() == [1.0, 1.0]


def clear_scale() -> torch.Tensor | None:
    gradient, SCALE.grad = SCALE.grad, None
    return gradient


def test_an_exception_whose_context_has_ended_arrives_severed(cluster):
    x = torch.ones(2, requires_grad=True)
    with autograd.context():
        future = rpc.rpc_async("a", fail_when_it_has_ended, args=(x,))
    with pytest.raises(CarryError) as caught:
        future.wait()
    found = caught.value.args[0]
    assert found.tolist() == [2.0, 2.0]
    assert not found.is_leaf
    with pytest.raises(GradientError, match=r"shape \(2,\) that came in an exception.*detach"):
        found.sum().backward()


def fail_when_it_has_ended(x: torch.Tensor) -> None:
    deadline = time.monotonic() + PATIENCE
    contexts, context_id = current_worker().contexts, current.current_context_id()
    while contexts.find(context_id) is not None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
    raise CarryError(x * 2)


def fail_with_module(x: torch.Tensor) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("shift", x * 2)
    raise CarryError(module)


def test_a_module_in_an_exception_goes_by_value(cluster):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CarryError) as caught:
        rpc.rpc_sync("a", fail_with_module, args=(x,))
    module = caught.value.args[0]
    module(torch.ones(2)).sum().backward()  # a copy of this worker
    assert module.weight.is_leaf
    assert module.weight.grad.tolist() == [[1.0, 1.0]] * 2
    with pytest.raises(GradientError, match="came in an exception"):
        module.shift.sum().backward()
    with autograd.context() as context_id:  # there modules are followed
        with pytest.raises(CarryError) as caught:
            rpc.rpc_sync("a", fail_with_module, args=(x,))
        autograd.backward(context_id, [caught.value.args[0].shift.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


class SavesItself(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


def fail_with_subclass() -> None:
    raise CarryError("of its own", torch.ones(2, requires_grad=True).as_subclass(SavesItself))


def test_a_tensor_that_saves_itself_is_not_carried(cluster):
    with pytest.raises(telegrad.errors.RemoteError, match="of its own"):
        rpc.rpc_sync("a", fail_with_subclass)


# -- functions and modules that go by value ----------------------------------------------------------------


SCRIPT = """
    weight = torch.ones(2, requires_grad=True)
    doubled = weight * 2

    def of_global(x):
        return (doubled * x).sum()

    def of_default(x, factor=doubled):
        return (factor * x).sum()

    class Model:
        factor = doubled

        def of_attribute(x):
            return (Model.factor * x).sum()

    def of_scripted(x):
        return (scripted.shift * x).sum()

    def of_leaf(x):
        (weight * x).sum().backward()
        return weight.grad
"""


@pytest.fixture
def script() -> Iterator[Any]:
    made = types.ModuleType("a_script_with_tensors")
    made.torch = torch
    exec("\n".join(line[4:] for line in SCRIPT.splitlines()), vars(made))
    made.scripted = torch.jit.script(Shifted(made.doubled))
    sys.modules[made.__name__] = made
    cloudpickle.register_pickle_by_value(made)
    yield made
    cloudpickle.unregister_pickle_by_value(made)
    del sys.modules[made.__name__]


def test_tensors_of_functions_that_go_by_value(server, script):
    x = torch.ones(2, requires_grad=True)
    with telegrad.LocalCluster(["a"], server=server, options=OPTIONS):
        for function in (script.of_global, script.of_default, script.Model.of_attribute, script.of_scripted):
            loss = rpc.rpc_sync("a", function, args=(x,))
            assert loss.item() == 4.0
            with pytest.raises(GradientError, match=r"shape \(2,\) that came in the globals, defaults or attributes"):
                loss.backward()
        assert x.grad is None
        # A leaf is a copy of the callee's own, which it may train.
        assert rpc.rpc_sync("a", script.of_leaf, args=(torch.ones(2),)).tolist() == [1.0, 1.0]
        # What a closure brings is followed, as an argument is.
        weight = torch.ones(2, requires_grad=True)
        doubled = weight * 2
        rpc.rpc_sync("a", lambda y: (doubled * y).sum(), args=(torch.ones(2),)).backward()
        assert weight.grad.tolist() == [2.0, 2.0]


class Shifted(nn.Linear):
    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__(2, 2)
        self.register_buffer("shift", shift)


def shift_of(module: nn.Module) -> torch.Tensor:
    return module.shift.sum()


def shift_there(module: rpc.RRef) -> torch.Tensor:
    return shift_of(module.local_value())


def make(module: nn.Module) -> nn.Module:
    return module


@pytest.mark.parametrize("scripted", [False, True])
def test_what_a_module_by_value_has_computed(cluster, scripted):
    x = torch.ones(2, requires_grad=True)
    module = torch.jit.script(Shifted(x * 2)) if scripted else Shifted(x * 2)
    loss = rpc.rpc_sync("a", shift_of, args=(module,))
    assert loss.item() == 4.0
    with pytest.raises(GradientError, match="came in a module or its state"):
        loss.backward()
    with autograd.context() as context_id:  # there modules are followed
        autograd.backward(context_id, [rpc.rpc_sync("a", shift_of, args=(module,))], retain_graph=True)
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]
    there = RemoteModule.from_module("a", module)
    loss = rpc.rpc_sync("a", shift_there, args=(there.module_rref,))
    with pytest.raises(GradientError, match="came in a module or its state"):
        loss.backward()
    there(torch.ones(2)).sum().backward()  # its parameters are leaves there
    assert next(there.parameters()).grad.to_here().tolist() == [[1.0, 1.0]] * 2


def square(module: nn.Module) -> None:
    module.weight.pow(3).sum().backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_history(cluster):
    there = RemoteModule("a", nn.Linear, (1, 1))
    weight = next(there.parameters())
    rpc.rpc_sync("a", differentiate_twice, args=(there.module_rref,))
    gradient = weight.grad.to_here()
    assert gradient.requires_grad
    with pytest.raises(GradientError, match="came in `.grad` of a parameter of another worker"):
        gradient.sum().backward()
    there.zero_grad()


def differentiate_twice(rref: rpc.RRef) -> None:
    square(rref.local_value())


def test_a_worker_that_follows_nothing_has_torchs_rule(server):
    options = telegrad.Options(plain=False, rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a"], transport="inproc", options=options):
        x = torch.ones(2, requires_grad=True) * 2
        assert rpc.rpc_sync("a", is_leaf, args=([x],))
        with pytest.raises(CarryError) as caught:
            rpc.rpc_sync("a", fail_with, args=("argument", x))
        assert not tensor_of(caught.value).is_leaf


def is_leaf(tensors: list[torch.Tensor]) -> bool:
    return tensors[0].is_leaf


def test_errors_of_a_backward_pass_carry_none(cluster):
    x = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("a", with_failing_hook, args=(x,)).sum()
    with pytest.raises(telegrad.errors.BackwardError) as caught:
        loss.backward()
    error = caught.value.__cause__
    assert isinstance(error, CarryError)  # it came in a message between workers
    with pytest.raises(GradientError, match="came in an exception"):
        error.args[0].sum().backward()


def with_failing_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2

    def fail(gradient: torch.Tensor) -> None:
        raise CarryError(SCALE)

    y.register_hook(fail)
    return y


def test_a_subclass_with_a_history_that_cannot_be_severed(cluster):
    module = nn.Linear(2, 2)
    module.register_buffer("shift", (torch.ones(2, requires_grad=True) * 2).as_subclass(SavesItself))
    with pytest.raises(EncodeError, match="a SavesItself that requires grad cannot be sent in a module"):
        rpc.rpc_sync("a", shift_of, args=(module,))
    assert current_worker().call("a", abs, (-1,)) == 1
