"""What travels: whatever requires grad and wherever it is in a message, its gradient comes back. And the caller's
modes hold on the callee."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from named_leaves import assert_same, check, expected, gradients, here, leaf, there
from torch import nn

from telegrad import autograd, errors
from telegrad.gradients.plain import untracked

pytestmark = pytest.mark.usefixtures("module_cluster")

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    features: torch.Tensor
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slotted:
    features: torch.Tensor


class Bag:
    """An object with an attribute, and one in its state alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.hidden = [tensor * 1]

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Marked(torch.Tensor):
    """A subclass of Tensor with no way of its own to be saved."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a value, wherever they are, in a fixed order."""
    match value:
        case torch.Tensor():
            return [value]
        case dict():
            return [t for key in sorted(value) for t in tensors_in(value[key])]
        case list() | tuple():
            return [t for item in value for t in tensors_in(item)]
        case nn.Module():
            return list(value.parameters())
        case Batch():
            return [*tensors_in(value.features), *tensors_in(value.more)]
        case Slotted():
            return tensors_in(value.features)
        case Bag():
            return [value.tensor, *value.hidden]
    return []


def combine(value: Any, factor: float = 1.0) -> torch.Tensor:
    """A number made of all tensors of a value, in which each counts differently."""
    tensors = tensors_in(value)
    assert tensors and all(t.requires_grad for t in tensors)
    return sum((t.square().sum() * (n + factor) for n, t in enumerate(tensors, 1)), start=torch.zeros(()))


def identity(value: Any) -> Any:
    return value


def make(build: str) -> Any:
    """Builds a value of two leaves of worker a, there."""
    return VALUES[build](leaf("a.u"), leaf("a.v"))


VALUES: dict[str, Any] = {
    "tensor": lambda u, v: u,
    "list": lambda u, v: [u, v, 3],
    "tuple of the same twice": lambda u, v: (u, u),
    "dict of lists": lambda u, v: {"x": [u, {"y": v}], "z": (None, "text", u)},
    "named tuple": lambda u, v: Pair(u, [v]),
    "dataclass": lambda u, v: Batch(u, {"k": [v]}),
    "frozen dataclass with slots": lambda u, v: Slotted(u),
    "object": lambda u, v: Bag(u),
    "intermediates": lambda u, v: [u * v, u + v, (u - v).t()],
    "view and its base": lambda u, v: (lambda h: [h, h[1:], h.view(-1)])(u * 2),
    "0-dim": lambda u, v: [u.sum(), v.max()],
    "empty": lambda u, v: [u[:0], v],
    "expanded": lambda u, v: u.sum().expand(2, 3),
    "strided": lambda u, v: [u[::2], torch.stack([u, v]).t()],
    "deque": lambda u, v: list(collections.deque([u, v])),
    "subclass": lambda u, v: [(u * 1).as_subclass(Marked), v],
    "leaf subclass": lambda u, v: [u, torch.stack([v, v]).as_subclass(Marked)],
}


# -- where a tensor is does not matter ---------------------------------------------------------------------


@pytest.mark.parametrize("build", VALUES)
def test_as_arguments(build):
    #      driver: u, v ──▶ value ───────▶ a: combine(value) ───────▶ driver: loss
    check(
        lambda call: call("a", combine, VALUES[build](leaf("driver.u"), leaf("driver.v"))),
        ["driver.u", "driver.v"],
    )


@pytest.mark.parametrize("build", VALUES)
def test_as_keyword_arguments(build):
    check(
        lambda call: call("a", combine, value=VALUES[build](leaf("driver.u"), leaf("driver.v")), factor=2),
        ["driver.u", "driver.v"],
    )


@pytest.mark.parametrize("build", VALUES)
def test_as_results(build):
    #      driver: loss = combine(value) ◀─────── a: a.u, a.v ──▶ value
    check(lambda call: combine(call("a", make, build)), ["a.u", "a.v"])


@pytest.mark.parametrize("build", ["dict of lists", "dataclass", "intermediates"])
def test_there_and_back(build):
    check(
        lambda call: combine(call("a", identity, VALUES[build](leaf("driver.u"), leaf("driver.v")))),
        ["driver.u", "driver.v"],
    )


def same_and_leaf(value: list[torch.Tensor]) -> tuple[bool, bool, bool]:
    return value[0] is value[1]["x"], value[0].is_leaf, value[0].requires_grad


def test_a_tensor_that_is_there_twice_arrives_as_one_and_is_no_leaf():
    u = leaf("driver.u")
    with autograd.context():
        assert there("a", same_and_leaf, [u, {"x": u}]) == (True, False, True)
    assert there("a", same_and_leaf, [u, {"x": u}]) == (True, False, True)
    with untracked():
        assert there("a", same_and_leaf, [u, {"x": u}]) == (True, True, True)


def test_a_message_of_many_tensors_of_which_some_require_grad():
    #      of 40 tensors, every third requires grad, and every fifth of those is the same one
    def forward(call) -> torch.Tensor:
        u = leaf("driver.u")
        tensors = [u * n if n % 3 else torch.full((3,), n, dtype=torch.float64) for n in range(40)]
        return call("a", weighted_total, tensors, keep=u)

    check(forward, ["driver.u"])


def weighted_total(tensors: list[torch.Tensor], keep: torch.Tensor) -> torch.Tensor:
    return (torch.stack(tensors) * torch.arange(40.0).view(-1, 1)).sum() + keep.sum()


GROUP = [f"driver.g{n}" for n in range(30)]


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0) * leaf("a.u")


def windows(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(tensors[n : n + 12]).sum(0) * leaf("a.u") for n in range(0, 18, 3)]


def middle(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors[1:3]).prod(0) * leaf("b.u")


def all_at_once(call) -> torch.Tensor:
    #      driver: 30 leaves ──▶ a: their sum * a.u ──▶ h ──▶ b: h * h ──▶ driver: sum
    h = call("a", stacked, [leaf(name) * 1 for name in GROUP])
    return (call("b", torch.mul, h, h) * h).sum()


def overlapping(call) -> torch.Tensor:
    #      driver: 30 leaves ──▶ a: sums of 12 each, which overlap ──▶ b: of two of them ──▶ driver: sum
    sums = call("a", windows, [leaf(name) * 1 for name in GROUP])
    return (call("b", middle, sums) * sums[0]).sum()


@pytest.mark.parametrize("forward", [all_at_once, overlapping])
def test_tensors_that_depend_on_many_others(forward):
    check(forward, [*GROUP, "a.u", "b.u"])


@pytest.mark.parametrize("forward", [all_at_once, overlapping])
def test_grad_of_a_few_of_many(forward):
    inputs = [leaf(GROUP[n]) for n in (3, 8, 29)]
    with autograd.context() as context_id:
        found = autograd.grad(context_id, forward(there), inputs, allow_unused=True)
    wanted = torch.autograd.grad(forward(here), inputs, allow_unused=True)
    assert [g is None for g in found] == [g is None for g in wanted]
    torch.testing.assert_close([g for g in found if g is not None], [g for g in wanted if g is not None])


# -- parameters and modules --------------------------------------------------------------------------------


def apply(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def describe(parameter: torch.Tensor) -> tuple[bool, bool]:
    return isinstance(parameter, nn.Parameter), parameter.requires_grad


def times_itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter * parameter


def test_a_parameter_as_an_argument():
    parameter = nn.Parameter(torch.linspace(-1, 1, 3))
    with autograd.context() as context_id:
        assert there("a", describe, parameter) == (True, True)
        autograd.backward(context_id, [there("a", times_itself, parameter).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[parameter], 2 * parameter.detach())
    assert parameter.grad is None


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.ModuleDict({"last": nn.Linear(4, 2)})["last"]).double()


def assert_gradients_of_module(module: nn.Module, found: dict, wanted: tuple) -> None:
    parameters = dict(module.named_parameters())
    for (name, parameter), gradient in zip(parameters.items(), wanted, strict=True):
        assert parameter in found, f"{name} has no gradient"
        torch.testing.assert_close(found[parameter], gradient)


def test_a_whole_module_as_an_argument():
    #      driver: module(W, b, ...), x ───────▶ a: module(x) ───────▶ driver: sum
    module, x = small_network(), leaf("driver.x")
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", apply, module, x).sum()])
        found = autograd.get_gradients(context_id)
    wanted = torch.autograd.grad(module(x).sum(), [*module.parameters(), x])
    assert_gradients_of_module(module, found, wanted[:-1])
    torch.testing.assert_close(found[x], wanted[-1])


def rnn_output(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)[0]


@pytest.mark.parametrize(
    ("build", "run"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(5)), apply),
        (lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True), rnn_output),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), apply),
        (lambda: nn.Conv1d(5, 2, 3), apply),
    ],
    ids=["batch norm", "LSTM", "transformer", "convolution"],
)
def test_modules_of_many_kinds_as_arguments(build, run):
    module, x = build().double(), leaf("driver.sequence", 2, 5, 4)
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", run, module, x).square().sum()])
        found = autograd.get_gradients(context_id)
    wanted = torch.autograd.grad(run(module, x).square().sum(), list(module.parameters()))
    assert_gradients_of_module(module, found, wanted)


def test_a_module_with_shared_parameters_as_an_argument():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    module[1].weight = module[0].weight
    x = leaf("driver.x")
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", apply, module, x).sum()])
        found = autograd.get_gradients(context_id)
    assert_gradients_of_module(module, found, torch.autograd.grad(module(x).sum(), list(module.parameters())))


def test_a_method_of_a_module_as_the_function():
    module, x = small_network(), leaf("driver.x")
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", module.forward, x).sum()])
        found = autograd.get_gradients(context_id)
    assert_gradients_of_module(module, found, torch.autograd.grad(module(x).sum(), list(module.parameters())))


_modules: dict[str, nn.Module] = {}


def own_module() -> nn.Module:
    """The same object each time, in one process."""
    return _modules.setdefault("own", small_network())


def own_module_gradients(context_id: int) -> list[torch.Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[parameter] for parameter in own_module().parameters()]


def test_a_module_as_a_result():
    #      driver: module(x) ◀─────── a: module
    x = leaf("driver.x")
    with autograd.context() as context_id:
        module = there("a", own_module)
        autograd.backward(context_id, [module(x).sum()])
        found = there("a", own_module_gradients, context_id)
    wanted = torch.autograd.grad(own_module()(x).sum(), list(own_module().parameters()))
    torch.testing.assert_close(found, list(wanted))


# -- functions that hold tensors ---------------------------------------------------------------------------


def multiply(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * x


def test_a_partial_function_that_holds_a_tensor():
    check(
        lambda call: call("a", functools.partial(multiply, leaf("driver.u")), leaf("driver.v")).sum(),
        ["driver.u", "driver.v"],
    )


class Scale:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_an_object_that_holds_a_tensor_and_is_called():
    names = ["driver.u", "driver.v"]
    check(lambda call: call("a", Scale(leaf("driver.u")), leaf("driver.v")).sum(), names)
    check(lambda call: call("a", Scale(leaf("driver.u")).method, leaf("driver.v")).sum(), names)


def test_a_closure_that_holds_a_tensor():
    def forward(call) -> torch.Tensor:
        weight = leaf("driver.u")
        return call("a", lambda x: weight * x, leaf("driver.v")).sum()

    check(forward, ["driver.u", "driver.v"])


class Owned(torch.Tensor):
    """A subclass that says itself how it is saved."""

    def __reduce_ex__(self, protocol: int) -> Any:
        return torch.ones, (3,)


def test_what_cannot_be_tracked_is_an_error_that_says_so():
    odd = torch.ones(3).as_subclass(Owned).requires_grad_()
    with autograd.context() as context_id:
        with pytest.raises(errors.EncodeError, match="an argument, a list, of the call of .*Owned that requires"):
            there("a", identity, [odd])
        # Detached it can be sent, and the context is as usable as before.
        there("a", identity, [odd.detach()])
        autograd.backward(context_id, [there("a", combine, [leaf("driver.u")])])
        assert autograd.debug_info()["sends"] == 1


# -- kinds of tensors --------------------------------------------------------------------------------------


def squares(x: torch.Tensor, name: str) -> torch.Tensor:
    return (x * leaf(name, dtype=x.dtype)).abs().square().sum()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_dtypes(dtype):
    names = [f"driver.{dtype}", f"a.{dtype}"]
    check(lambda call: call("a", squares, leaf(names[0], dtype=dtype) * 1, names[1]), names)


def conjugated(x: torch.Tensor) -> torch.Tensor:
    return (x.conj() * (1 + 2j)).imag


def test_conjugated_and_negated_views():
    def forward(call) -> torch.Tensor:
        x = torch.complex(leaf("driver.u"), leaf("driver.v"))
        return (call("a", conjugated, x.conj()) * x.imag).sum()

    check(forward, ["driver.u", "driver.v"])


def look_up(indices: torch.Tensor, sparse: bool) -> torch.Tensor:
    return nn.functional.embedding(indices, leaf("a.table", 10, 3), sparse=sparse)


@pytest.mark.parametrize("sparse", [True, False])
def test_embedding_gradients(sparse):
    indices = torch.tensor([1, 1, 7])
    factor = torch.arange(9, dtype=torch.float64).view(3, 3)
    with autograd.context() as context_id:
        for _ in range(2):
            autograd.backward(context_id, [(there("a", look_up, indices, sparse) * factor).sum()])
        (found,) = gradients(context_id, ["a.table"]).values()
    assert found.is_sparse == sparse
    wanted = expected((look_up(indices, False) * factor).sum(), ["a.table"])
    assert_same({"a.table": found.to_dense()}, wanted, times=2)


def test_sparse_and_dense_gradients_add_up():
    indices = torch.tensor([1, 1, 7])
    with autograd.context() as context_id:
        for sparse in (True, False, True):
            autograd.backward(context_id, [there("a", look_up, indices, sparse).sum()])
        found = gradients(context_id, ["a.table"])
    assert not found["a.table"].is_sparse
    assert_same(found, expected(look_up(indices, False).sum(), ["a.table"]), times=3)


def embed_here(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(indices, weight, sparse=True)


def test_a_sparse_gradient_travels_back_to_a_leaf_that_was_sent():
    #      driver: table ───────▶ a: embedding(table, sparse) ───────▶ driver: sum
    table, indices = leaf("driver.table", 10, 3), torch.tensor([0, 9, 9])
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", embed_here, table, indices).sum()])
        found = autograd.get_gradients(context_id)[table]
    (wanted,) = torch.autograd.grad(embed_here(table, indices).sum(), table)
    torch.testing.assert_close(found.to_dense(), wanted.to_dense())


def embed_at_b(call, weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return call("b", embed_here, weight, indices) * 2


def test_a_sparse_gradient_travels_through_several_workers():
    #      driver: table ──▶ a ──▶ b: embedding(table, sparse) ──▶ a: * 2 ──▶ driver: sum
    table, indices = leaf("driver.table", 10, 3), torch.tensor([0, 9, 9])
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", embed_at_b, there, table, indices).sum()])
        found = autograd.get_gradients(context_id)[table]
    (wanted,) = torch.autograd.grad(embed_at_b(here, table, indices).sum(), table)
    torch.testing.assert_close(found.to_dense(), wanted.to_dense())


def to_dense_total(x: torch.Tensor) -> torch.Tensor:
    return (x.to_dense() * torch.arange(9.0).view(3, 3)).sum()


def test_a_sparse_tensor_with_history():
    dense = torch.eye(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", to_dense_total, dense.to_sparse() * 2)])
        found = autograd.get_gradients(context_id)[dense]
    (wanted,) = torch.autograd.grad(to_dense_total(dense.to_sparse() * 2), dense)
    torch.testing.assert_close(found.to_dense(), wanted.to_dense())


@pytest.mark.parametrize("size", [10, 100_000])
def test_small_and_large_tensors(size):
    x = torch.linspace(-1, 1, size, requires_grad=True)
    with autograd.context() as context_id:
        h = there("a", torch.sin, x * 2)
        autograd.backward(context_id, [(h * h).sum()])
        found = autograd.get_gradients(context_id)[x]
    h = torch.sin(x * 2)
    torch.testing.assert_close(found, torch.autograd.grad((h * h).sum(), x)[0])


# -- in-place operations on what was received --------------------------------------------------------------


def change_all(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    x.mul_(leaf("a.u"))
    x[1] = leaf("a.v")[1]
    x[1:].add_(y[1:])
    y.view(-1).sin_()
    return [x, y]


def test_in_place_operations_on_arguments():
    def forward(call) -> torch.Tensor:
        # Not the leaves themselves: those must not be changed locally.
        x, y = call("a", change_all, leaf("driver.u") * 1, leaf("driver.v") * 1)
        return (x * y).sum()

    check(forward, ["driver.u", "driver.v", "a.u", "a.v"])


def test_in_place_operations_on_a_leaf_that_was_sent():
    """Locally it is an error. What arrives is another tensor, and no leaf."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [there("a", doubled_in_place, leaf("driver.u")).sum()])
        found = gradients(context_id, ["driver.u"])
    assert_same(found, expected((leaf("driver.u") * 2).sum(), ["driver.u"]))


def doubled_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def test_in_place_operations_on_results():
    def forward(call) -> torch.Tensor:
        x, y = call("a", pair_of, leaf("driver.u"))
        x.mul_(leaf("driver.v"))
        y[0].add_(x[0])
        y.unsqueeze_(0).clamp_(max=0.5)
        return (x * y).sum()

    check(forward, ["driver.u", "driver.v"])


def pair_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x * 3


def test_a_change_after_sending_does_not_count_there():
    #      driver: h = u * 2 ───────▶ a: sin(h) ───▶ y
    #              h *= v                            (after it was sent)
    #              (y * h).sum() ◀───────────────────╯
    def forward(call) -> torch.Tensor:
        h = leaf("driver.u") * 2
        y = call("a", torch.sin, h.clone() if call is here else h)
        h.mul_(leaf("driver.v"))
        return (y * h).sum()

    check(forward, ["driver.u", "driver.v"])


_kept: dict[str, torch.Tensor] = {}


def multiply_two(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[1] * tensors[2]


def give_and_keep(x: torch.Tensor) -> torch.Tensor:
    _kept["h"] = x * leaf("a.u")
    return _kept["h"]


def give_changed() -> torch.Tensor:
    return _kept.pop("h").mul_(leaf("a.v"))


def test_a_change_after_answering_does_not_count_there():
    #      driver              a
    #      u ────────▶ h = u * a.u ──▶ y
    #                  h *= a.v ─────▶ z        (the same tensor, after it was sent)
    #      (y * z).sum()
    def forward(call) -> torch.Tensor:
        y = call("a", give_and_keep, leaf("driver.u"))
        y = y.clone() if call is here else y
        return (y * call("a", give_changed)).sum()

    check(forward, ["driver.u", "a.u", "a.v"])


def test_detach_and_requires_grad_after_sending():
    #      a tensor that was sent is detached in place, and then made a leaf: what was sent has its old history
    with autograd.context() as context_id:
        h = leaf("driver.u") * 2
        y = there("a", torch.sin, h)
        h.detach_().requires_grad_()
        autograd.backward(context_id, [(y * h).sum()])
        found = gradients(context_id, ["driver.u"])
        assert torch.equal(autograd.get_gradients(context_id)[h], y.detach())
    second = (leaf("driver.u") * 2).detach()
    assert_same(found, expected((torch.sin(leaf("driver.u") * 2) * second).sum(), ["driver.u"]))


def refuse(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a tensor of the program's was saved")


@pytest.mark.parametrize(
    "hooks",
    [
        lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("disabled"),
    ],
)
def test_a_program_s_hooks_of_saved_tensors_see_nothing_of_what_is_sent(hooks):
    #      driver: five functions of u, changed after they were sent ───────▶ a: the product of two of them
    def forward(call, around=nullcontext) -> torch.Tensor:
        u = leaf("driver.u")
        sent = [u * 2, u.sin(), u.expand(3000, 3) * 3, u.cos(), u.exp()]
        with around():
            product = call("a", multiply_two, *(tensor.clone() if call is here else tensor for tensor in sent))
        for tensor in sent:
            tensor.detach().mul_(2)
            tensor.mul_(leaf("driver.v"))
        return product.sum() + sent[0].sum()

    def found(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        with autograd.context() as context_id:
            autograd.backward(context_id, [make()])
            return gradients(context_id, ["driver.u", "driver.v"])

    assert_same(found(lambda: forward(there, hooks)), expected(forward(here), ["driver.u", "driver.v"]))


def test_a_leaf_that_is_frozen_after_it_was_sent_gets_no_gradient():
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


# -- modes -------------------------------------------------------------------------------------------------


def modes_here() -> tuple[bool, bool, bool, str]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")),
    )


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ leaf("a.matrix", 3, 3, dtype=torch.float32)


def test_no_grad_holds_on_the_callee():
    with autograd.context() as context_id:
        with torch.no_grad():
            assert there("a", modes_here)[:2] == (False, False)
            y = there("a", product, leaf("driver.f", 2, 3, dtype=torch.float32))
        assert not y.requires_grad
        z = there("a", product, leaf("driver.f", 2, 3, dtype=torch.float32))
        autograd.backward(context_id, [(y * z).sum()])
        found = gradients(context_id, ["driver.f", "a.matrix"])
        assert there("a", modes_here)[:2] == (True, False)
    f = leaf("driver.f")
    assert_same(found, expected((product(f).detach() * product(f)).sum(), ["driver.f", "a.matrix"]))


def test_inference_mode_holds_on_the_callee():
    with autograd.context() as context_id:
        with torch.inference_mode():
            assert there("a", modes_here)[:2] == (False, True)
            y = there("a", product, leaf("driver.f", 2, 3, dtype=torch.float32))
        assert not y.requires_grad
        assert not y.is_inference(), "what was received may be used anywhere"
        z = there("a", product, leaf("driver.f"))
        autograd.backward(context_id, [(y * z).sum()])
        assert gradients(context_id, ["a.matrix"])["a.matrix"] is not None


def test_autocast_holds_on_the_callee():
    def forward(call) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call("a", product, leaf("driver.f", 2, 3, dtype=torch.float32))
            assert y.dtype is torch.bfloat16
            return (y * y).float().sum()

    check(forward, ["driver.f", "a.matrix"])
    with torch.autocast("cpu", dtype=torch.float16):
        assert there("a", modes_here)[2:] == (True, "torch.float16")
    assert not there("a", modes_here)[2]


def test_modes_hold_through_nested_calls():
    with autograd.context(), torch.no_grad():
        assert there("a", there, "b", modes_here)[:2] == (False, False)


def test_enable_grad_inside_no_grad():
    #      the call is in no_grad, the function turns it on again: as locally, its result has a history
    def forward(call) -> torch.Tensor:
        with torch.no_grad():
            y = call("a", with_grad, leaf("driver.u"))
        assert y.requires_grad
        return (y * y).sum()

    check(forward, ["driver.u", "a.u"])


@torch.enable_grad()
def with_grad(x: torch.Tensor) -> torch.Tensor:
    return x * leaf("a.u")


def test_backward_in_no_grad_runs_as_it_does_locally():
    def forward(call) -> torch.Tensor:
        return call("a", product, leaf("driver.f", 2, 3, dtype=torch.float32)).sum()

    with autograd.context() as context_id:
        loss = forward(there)
        with torch.no_grad():
            autograd.backward(context_id, [loss])
        found = gradients(context_id, ["driver.f", "a.matrix"])
    assert_same(found, expected(forward(here), ["driver.f", "a.matrix"]))
