"""RemoteModule: what an nn.Module does, on another worker, with the same numbers as here."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # as an optimizer does when it is first made: that takes long on a busy machine
from torch import nn

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.optim import owner as owner_side
from telegrad.primitives import clock, current
from telegrad.primitives.current import current_worker
from telegrad.rpc import RRef

PATIENCE = 30.0


@pytest.fixture(scope="module", params=["inproc", "unix"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a", "b"], transport=request.param, server=server, options=options) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks(cluster: telegrad.LocalCluster) -> Iterator[None]:
    """After every test no worker keeps or refers to anything: no module, no parameter, no context."""
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        found = {name: rpc.rpc_sync(name, left_behind) for name in ("driver", "a", "b")}
        if not any(found.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {found}"
        threading.Event().wait(0.01)


def left_behind() -> int:
    gc.collect()  # an exception and its frames refer to each other
    worker = current_worker()
    return sum(worker.references.statistics().values()) + len(worker.contexts)


def seeded(module: nn.Module, seed: int) -> Any:
    """With a generator of its own: workers of one process share torch's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.uniform_(-0.5, 0.5, generator=generator)
    return module


class Net(nn.Module):
    """Parameters, buffers, dropout, and arguments of several kinds."""

    def __init__(self, size: int = 4, *, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.scale = nn.Parameter(torch.ones(size))
        self.dropout = nn.Dropout(0.5)
        seeded(self, seed)

    def forward(self, x: torch.Tensor, power: int = 1, *, extra: dict[str, Any] | None = None) -> torch.Tensor:
        y = self.norm(self.first(x)) * self.scale**power
        if extra is not None:
            y = y + extra["shift"]
        return self.dropout(y)


def x(requires_grad: bool = True) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_(requires_grad)


def pair(to: str = "a", **kwargs: Any) -> tuple[Net, RemoteModule]:
    """The same module here and there."""
    return Net(**kwargs).eval(), RemoteModule(to, Net, kwargs=kwargs).eval()


def look(rref: RRef[Any], what: str) -> Any:
    found = rref.local_value()
    for name in what.split("."):
        found = getattr(found, name)
    return found


def ask(module: RemoteModule, what: str) -> Any:
    return rpc.rpc_sync(module.module_rref.owner(), look, args=(module.module_rref, what))


def gradients(context_id: int, rrefs: list[RRef[Any]]) -> list[torch.Tensor | None]:
    return [rpc.rpc_sync(r.owner(), gradient_of, args=(context_id, r)) for r in rrefs]


def gradient_of(context_id: int, rref: RRef[Any]) -> torch.Tensor | None:
    return autograd.get_gradients(context_id).get(rref.local_value())


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- calls -------------------------------------------------------------------------------------------------


def test_forward_and_its_gradients():
    here, there = pair()
    mine, theirs = x(), x()
    shift = torch.ones(4, requires_grad=True)
    expected = here(mine, 2, extra={"shift": shift}).square().sum()
    expected.backward()
    with autograd.context() as context_id:
        other_shift = torch.ones(4, requires_grad=True)
        found = there(theirs, 2, extra={"shift": other_shift}).square().sum()
        autograd.backward(context_id, [found])
        assert_equal(found.detach(), expected.detach())
        mine_here = autograd.get_gradients(context_id)
        assert_equal(mine_here[theirs], mine.grad)
        assert_equal(mine_here[other_shift], shift.grad)
        for gradient, param in zip(gradients(context_id, there.remote_parameters()), here.parameters(), strict=True):
            assert_equal(gradient, param.grad)


def test_forward_async():
    here, there = pair()
    future = there.forward_async(x(False), power=3)
    assert_equal(future.wait(), here(x(False), power=3))
    assert_equal(there.forward(x(False)), here(x(False)))
    with autograd.context() as context_id:
        theirs = x()
        autograd.backward(context_id, [there.forward_async(theirs).wait().sum()])
        assert theirs in autograd.get_gradients(context_id)


def test_what_it_says_of_itself():
    there = RemoteModule("a/cpu", nn.Linear, (4, 2))
    assert isinstance(there, nn.Module)
    assert (there.on, there.device) == ("a", "cpu")
    assert there.get_module_rref() is there.module_rref
    assert there.module_rref.owner_name() == "a"
    assert repr(there) == "RemoteModule(Linear, on='a', device='cpu')"
    other = RemoteModule.init_from_module_rref("a", there.module_rref)
    assert repr(other) == "RemoteModule(on='a', device='cpu')"
    assert ask(there, "out_features") == 2


def test_arguments_of_the_class_are_a_tuple_and_a_dict():
    for wrong in (4, 0, torch.zeros(1), {"in_features": 4}):
        with pytest.raises(TypeError, match=r"args is a tuple, not a \w+; did you mean"):
            RemoteModule("a", nn.Linear, wrong)
    with pytest.raises(TypeError, match="kwargs is a dict, not a list"):
        RemoteModule("a", nn.Linear, (4, 2), [])
    assert ask(RemoteModule("a", nn.Linear, [4, 2]), "out_features") == 2


def test_a_worker_by_its_number():
    number = rpc.get_worker_info("b").id
    there = RemoteModule(f"rank:{number}/cpu", nn.Linear, (4, 2))
    assert there.on == number
    assert there.module_rref.owner_name() == "b"
    assert there(x(False)).shape == (3, 2)


def test_a_module_of_ones_own_worker():
    for where in ("driver", "cpu", "driver/cpu"):
        there = RemoteModule(where, nn.Linear, (4, 2))
        assert there.on == "driver"
        assert there(x(False)).shape == (3, 2)


def test_a_function_that_makes_it():
    there = RemoteModule("a", lambda size: nn.Sequential(nn.Linear(4, size), nn.Tanh()), args=[2])
    assert there(x(False)).shape == (3, 2)
    assert there.module_rref._get_type() is nn.Sequential


def scripted(size: int) -> torch.jit.ScriptModule:
    return torch.jit.script(nn.Linear(size, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module():
    there = RemoteModule("a", scripted, (4,))
    assert there(x(False)).shape == (3, 2)
    with pytest.raises(NotImplementedError, match="TorchScript code makes no remote calls"):
        RemoteModule("a", nn.Linear, (4, 2), None, object)


class Modes(nn.Module):
    def forward(self) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def test_modes_travel():
    there = RemoteModule("a", Modes)
    assert there() == (True, False)
    with torch.no_grad(), torch.autocast("cpu"):
        assert there() == (False, True)


# -- parameters --------------------------------------------------------------------------------------------


def test_parameters_stand_for_those_of_the_module():
    here, there = pair()
    for found, expected in [
        (there.named_parameters(), here.named_parameters()),
        (there.named_parameters("p", recurse=False), here.named_parameters("p", recurse=False)),
        (there.named_buffers(), here.named_buffers()),
        (there.named_buffers("b", recurse=False), here.named_buffers("b", recurse=False)),
    ]:
        found, expected = dict(found), dict(expected)
        assert list(found) == list(expected)
        for name, tensor in found.items():
            assert tensor.rref.owner_name() == "a"
            assert isinstance(tensor, nn.Parameter) is isinstance(expected[name], nn.Parameter)
            assert (tensor.shape, tensor.dtype, tensor.device) == (
                expected[name].shape,
                expected[name].dtype,
                torch.device("cpu"),
            )
            assert tensor.requires_grad == expected[name].requires_grad
            assert_equal(tensor.to_here().detach(), expected[name].detach())
    assert len(there.remote_parameters(recurse=False)) == 1
    assert len(list(there.buffers())) == 3
    handles = there.remote_parameters()
    assert all(isinstance(rref, RRef) and rref.owner_name() == "a" for rref in handles)
    assert isinstance(handles[0].to_here(), nn.Parameter)
    assert sum(p.numel() for p in there.parameters()) == sum(p.numel() for p in here.parameters())
    assert repr(next(there.parameters())) == "RemoteParameter((4,), dtype=torch.float32, on='a')"
    assert "scale" not in dir(there)
    with pytest.raises(AttributeError):
        _ = there.scale


def test_parameters_in_the_modes_of_torch():
    there = RemoteModule("a", nn.Linear, (4, 2))
    with torch.inference_mode(), torch.device("meta"):
        weight = next(there.parameters())
    assert weight.device == torch.device("cpu") and weight.requires_grad
    there.double().requires_grad_(False)
    with torch.inference_mode():
        assert next(there.parameters()) is weight
    assert weight.dtype == torch.float64 and not weight.requires_grad
    there.requires_grad_()
    assert next(there.parameters()).requires_grad


def test_a_parameter_is_one_object():
    """Programs compare the ids of parameters, and put them into sets."""
    there = RemoteModule("a", Net)
    before = list(map(id, there.parameters()))
    there.double().requires_grad_(False)
    assert list(map(id, there.parameters())) == before
    assert all(p.dtype == torch.float64 and not p.requires_grad for p in there.parameters())
    same = RemoteModule.init_from_module_rref("a", there.module_rref)
    assert list(map(id, same.parameters())) == before
    both = nn.ModuleList([there, same])
    assert len(list(both.parameters())) == 5
    assert len(list(both.named_parameters(remove_duplicate=False))) == 10
    there.load_state_dict(Net().state_dict(), assign=True)
    assert not {*before} & {*map(id, there.parameters())}, "those that were replaced"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight


def test_tied_and_lazy_parameters():
    there = RemoteModule("a", Tied)
    assert [name for name, _ in there.named_parameters()] == ["first.weight", "first.bias", "second.bias"]
    named = dict(there.named_parameters(remove_duplicate=False))
    assert named["first.weight"] is named["second.weight"]
    lazy = RemoteModule("b", nn.LazyLinear, (2,))
    weight = next(lazy.parameters())
    assert weight.shape == (0,)
    with pytest.raises(errors.OptimizerError, match="'b': ValueError: a lazy parameter .* call its module once"):
        DistributedOptimizer(torch.optim.SGD, lazy.parameters())
    lazy(x(False))
    assert next(lazy.parameters()) is weight
    assert weight.shape == (2, 4)


class Around(nn.Module):
    """A module that has a RemoteModule among its parts, and is remote itself."""

    def __init__(self, inner: RemoteModule) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.own(x))


def test_a_remote_module_in_a_remote_module():
    inner = RemoteModule("b", nn.Linear, (4, 2))
    outer = RemoteModule("a", Around, (inner,))
    named = dict(outer.named_parameters())
    assert {name: p.rref.owner_name() for name, p in named.items()} == {
        "own.weight": "a",
        "own.bias": "a",
        "inner.weight": "b",
        "inner.bias": "b",
    }
    assert named["inner.weight"] is next(inner.parameters())
    assert len(list(nn.ModuleList([outer, inner]).parameters())) == 4
    outer.requires_grad_(False)
    assert not ask(inner, "weight.requires_grad")
    back = RemoteModule("a", Around, (RemoteModule("driver", nn.Linear, (4, 2)),))
    assert type(dict(back.named_parameters())["inner.weight"]) is nn.Parameter, "it is here"


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_what_parameters_refuse():
    there = RemoteModule("a", nn.Linear, (4, 2))
    there(x(False)).sum().backward()
    weight, bias = there.parameters()
    gradient = weight.grad
    assert repr(gradient) == "RemoteGradient((2, 4), dtype=torch.float32, on='a')"
    assert_equal(gradient.to_here(), ask(there, "weight.grad"))
    for refused in (
        lambda: torch.optim.AdamW(there.parameters()),
        lambda: nn.utils.clip_grad_norm_(there.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(there.parameters(), 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in there.parameters()]),
        lambda: nn.utils.parameters_to_vector(there.parameters()),
        lambda: nn.init.zeros_(weight),
        lambda: weight.data,
        lambda: weight.detach(),
        lambda: weight.as_subclass(torch.Tensor),
        lambda: torch.tensor(weight),
        lambda: torch.tensor([weight, weight]),
        lambda: torch.asarray(weight, copy=True),
        lambda: weight.mul_(2),
        lambda: weight + 1,
        lambda: weight[0],
        lambda: torch.ones(2, 4).copy_(weight),
        lambda: torch.nn.functional.linear(x(False), weight, bias),
        lambda: torch.autograd.grad(there(x(False)).sum(), [weight]),
        lambda: setattr(weight, "grad", torch.ones(2, 4)),
        lambda: setattr(weight, "data", torch.ones(2, 4)),
        lambda: weight.register_post_accumulate_grad_hook(print),
        lambda: weight.__cuda_array_interface__,
        lambda: copy.deepcopy(weight),
        lambda: pickle.dumps(weight),
        lambda: torch.save(weight, io.BytesIO()),
        lambda: gradient.mul_(2),
        lambda: gradient.requires_grad_(),
        lambda: gradient.norm(),
        lambda: torch._foreach_mul_([torch.ones(2), gradient], 0.5),
    ):
        with pytest.raises(RuntimeError, match="refused for Remote.* on='a'.*telegrad.nn.utils.clip_grad_norm_"):
            refused()
    with pytest.raises(errors.EncodeError, match="refused for RemoteGradient"):
        rpc.rpc_sync("b", type, args=(gradient,))
    assert rpc.rpc_sync("b", type, args=(weight,)) is RRef
    assert rpc.rpc_sync("b", weights_sum, args=(weight, {"also": [weight]})) == ask(there, "weight").sum().item()
    weight.grad = None
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="has no gradient any more"):
        gradient.to_here()


def weights_sum(rref: RRef[Any], others: dict[str, Any]) -> float:
    assert str(others["also"][0]) == str(rref)
    return rref.to_here().sum().item()


def test_the_values_of_a_parameter_are_differentiable():
    there = RemoteModule("a", nn.Linear, (4, 2))
    sum(p.to_here().square().sum() for p in there.parameters()).backward()
    assert_equal(ask(there, "weight.grad"), 2 * ask(there, "weight").detach())


def test_it_is_trained():
    here, there = pair()
    mine = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)
    theirs = DistributedOptimizer(torch.optim.SGD, there.named_parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        mine.zero_grad()
        here(x()).square().sum().backward()
        mine.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [there(x()).square().sum()])
            theirs.step(context_id)
    for param, rref in zip(here.parameters(), there.parameters(), strict=True):
        assert_equal(rref.to_here().detach(), param.detach())


# -- state -------------------------------------------------------------------------------------------------


def test_state_dict_is_that_of_the_module():
    here, there = pair(seed=3)
    found, expected = there.state_dict(), here.state_dict()
    assert list(found) == list(expected)
    assert found._metadata == expected._metadata
    for name, value in found.items():
        assert_equal(value, expected[name])
        assert not value.requires_grad
    saved = io.BytesIO()
    torch.save(found, saved)
    saved.seek(0)
    other = Net(seed=4)
    other.load_state_dict(torch.load(saved))
    assert_equal(other.eval()(x(False)), here(x(False)))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("in_context", [False, True])
def test_load_state_dict(assign, in_context):
    here, there = Net(seed=3).eval(), RemoteModule("a", Net).eval()
    state = here.state_dict(keep_vars=True)
    if in_context:
        with autograd.context():
            result = there.load_state_dict(state, assign=assign)
    else:
        result = there.load_state_dict(state, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_equal(there(x(False)), here(x(False)).detach())
    assert rpc.rpc_sync("a", are_leaves, args=(there.module_rref,))


def are_leaves(rref: RRef[nn.Module]) -> bool:
    params = list(rref.local_value().parameters())
    return all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in params)


def test_a_state_that_does_not_fit():
    there = RemoteModule("a", Net)
    state = there.state_dict()
    del state["scale"]
    state["more"] = torch.ones(1)
    with pytest.raises(RuntimeError, match='(?s)Missing key.*"scale".*|Unexpected key.*"more"'):
        there.load_state_dict(state)
    result = there.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["scale"], ["more"])
    state["scale"] = torch.ones(7)
    with pytest.raises(RuntimeError, match="(?s)on worker 'a'.*size mismatch for scale"):
        there.load_state_dict(state, strict=False)


def test_state_of_an_older_version():
    """BatchNorm once had no num_batches_tracked: its version says whether that is missing."""
    there = RemoteModule("a", nn.BatchNorm1d, (4,))
    old = nn.BatchNorm1d(4).state_dict()
    del old["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        there.load_state_dict(old)
    old._metadata[""]["version"] = 1
    there.load_state_dict(old)


# -- next to local layers ----------------------------------------------------------------------------------


def chain(remote: bool) -> nn.Sequential:
    #   driver       a        driver       b
    #   Linear ──▶  Net  ──▶   Tanh  ──▶  Net
    first = seeded(nn.Linear(4, 4), 7)
    middle = [RemoteModule("a", Net, (4,)), RemoteModule("b", Net, (4,))] if remote else [Net(4), Net(4)]
    return nn.Sequential(first, middle[0], nn.Tanh(), middle[1])


def test_in_a_sequential():
    here, there = chain(False).eval(), chain(True).eval()
    assert not ask(there[1], "training")
    mine, theirs = x(), x()
    here(mine).square().sum().backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [there(theirs).square().sum()])
        found = autograd.get_gradients(context_id)
        assert_equal(found[theirs], mine.grad)
        for param, expected in zip(there[0].parameters(), here[0].parameters(), strict=True):
            assert_equal(found[param], expected.grad)
        for place in (1, 3):
            its = gradients(context_id, there[place].remote_parameters())
            for gradient, expected in zip(its, here[place].parameters(), strict=True):
                assert_equal(gradient, expected.grad)


def test_a_sequential_reaches_them():
    here, there = chain(False), chain(True)
    assert [name for name, _ in there.named_parameters()] == [name for name, _ in here.named_parameters()]
    assert [name for name, _ in there.named_buffers()] == [name for name, _ in here.named_buffers()]
    found, expected = there.state_dict(), here.state_dict()
    assert list(found) == list(expected)
    assert found._metadata == expected._metadata
    changed = {name: value + 1 for name, value in expected.items()}
    there.load_state_dict(changed)
    for name, value in there.state_dict().items():
        assert_equal(value, changed[name])
    del changed["1.scale"]
    with pytest.raises(RuntimeError, match='Missing key.*"1.scale"'):
        there.load_state_dict(changed)
    there.train()
    assert ask(there[3], "training") and there[3].training
    assert there.double() is there
    assert there(x(False).double()).dtype == torch.float64
    there.apply(fill)
    assert all(bool((v == 1).all()) for n, v in there.state_dict().items() if n.endswith("first.weight"))
    assert sum(isinstance(m, RemoteModule) for m in there.modules()) == 2
    there.float()
    there(x(False)).sum().backward()
    assert ask(there[1], "scale.grad") is not None and there[0].weight.grad is not None
    there.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in there[0].parameters())
    assert not ask(there[1], "scale.grad").any() and not ask(there[3], "scale.grad").any()
    there.zero_grad()
    assert all(p.grad is None for p in there.parameters())
    assert ask(there[3], "scale.grad") is None
    there.requires_grad_(False)
    assert not ask(there[1], "scale.requires_grad")
    for p in there[1].parameters():
        p.requires_grad = True
    assert ask(there[1], "scale.requires_grad") and not ask(there[3], "scale.requires_grad")
    assert repr(there).count("RemoteModule(Net, on=") == 2
    with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
        copy.deepcopy(there)


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


# -- what changes it ---------------------------------------------------------------------------------------


def test_train_and_eval():
    there = RemoteModule("a", Net)
    assert there.eval() is there
    assert not there.training and not ask(there, "dropout.training")
    assert there.train() is there
    assert there.training and ask(there, "dropout.training")
    with pytest.raises(ValueError, match="expected to be boolean"):
        there.train("yes")


def test_to():
    there = RemoteModule("a", Net)
    assert there.to(torch.float64) is there
    assert ask(there, "scale").dtype == torch.float64
    assert ask(there, "norm.num_batches_tracked").dtype == torch.int64
    assert there.half() is there
    assert ask(there, "first.weight").dtype == torch.float16
    there.bfloat16().float()
    assert ask(there, "first.weight").dtype == torch.float32
    there.type(torch.float64)
    assert ask(there, "first.weight").dtype == torch.float64
    there.to(device="cpu", dtype=torch.float32)
    there.cpu()
    assert there.device == "cpu"
    there.to("meta")
    assert there.device == "meta"
    assert ask(there, "scale.is_meta")
    there.to_empty(device="cpu")
    assert not ask(there, "scale.is_meta")
    assert are_leaves_there(there)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
            there.cuda()
        assert there.device == "cpu"
    with pytest.raises(TypeError, match="floating point"):
        there.to(torch.int32)


def are_leaves_there(there: RemoteModule) -> bool:
    return rpc.rpc_sync(there.module_rref.owner(), are_leaves, args=(there.module_rref,))


def test_tensors_on_the_modules_device():
    """The meta device stands for any that is not the CPU."""
    there = RemoteModule("a/meta", nn.Linear, (4, 2))
    result = there(x(False).to("meta"))
    assert result.is_meta and result.shape == (3, 2)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor"):
        there(x(False))  # taken there; but its result has nothing that could be brought back


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_module_on_a_gpu():
    here = Net().eval()
    there = RemoteModule("a/cuda:0", Net).eval()
    mine, theirs = x(), x()
    expected = here(mine)
    expected.square().sum().backward()
    with autograd.context() as context_id:
        found = there(theirs)
        assert found.is_cpu
        torch.testing.assert_close(found, expected)
        assert there(theirs.cuda()).is_cuda
        autograd.backward(context_id, [found.square().sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[theirs], mine.grad)
        del found
    assert there.cpu().device == "cpu"
    assert there.cuda().device == "cuda"


def test_requires_grad():
    there = RemoteModule("a", Net).eval()
    assert there.requires_grad_(False) is there
    assert not ask(there, "scale.requires_grad")
    with autograd.context() as context_id:
        theirs = x()
        autograd.backward(context_id, [there(theirs).sum()])
        assert theirs in autograd.get_gradients(context_id)
        assert gradients(context_id, there.remote_parameters()) == [None] * 5
    there.requires_grad_()
    assert ask(there, "scale.requires_grad")


def test_zero_grad():
    there = RemoteModule("a", Net).eval()
    with autograd.context() as context_id:
        autograd.backward(context_id, [there(x()).sum()], into="grad")
    assert ask(there, "scale.grad") is not None
    there.zero_grad(set_to_none=False)
    assert not ask(there, "scale.grad").any()
    there.zero_grad()
    assert ask(there, "scale.grad") is None


# -- hooks -------------------------------------------------------------------------------------------------


def test_hooks_of_the_object_here():
    here, there = pair()
    seen: dict[str, list[torch.Tensor]] = {"here": [], "there": []}
    for name, module in (("here", here), ("there", there)):

        def note(_: Any, grad_input: Any, grad_output: Any, name: str = name) -> Any:
            seen[name] += [*grad_input, *grad_output]
            return (grad_input[0] * 2,)

        module.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
        module.register_forward_hook(lambda _, args, result: result + args[0])
        module.register_full_backward_hook(note)
    mine, theirs = x(), x()
    here(mine).square().sum().backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [there(theirs).square().sum()])
        assert_equal(autograd.get_gradients(context_id)[theirs], mine.grad)
    assert len(seen["there"]) == 2
    for found, expected in zip(seen["there"], seen["here"], strict=True):
        assert_equal(found, expected)


def where_from(module: nn.Module, args: Any) -> Any:
    module.seen = current_worker().name
    return (args[0] * 3,)


def double(_: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return (grad_input[0] * 2,)


def triple(_: nn.Module, grad_output: Any) -> Any:
    return (grad_output[0] * 3,)


def add_one(_: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
    return result + kwargs["power"]


def test_hooks_there():
    here, there = pair()
    for hook in (
        here.register_forward_pre_hook(lambda _, args: (args[0] * 3,)),
        here.register_forward_hook(add_one, with_kwargs=True),
        here.register_full_backward_hook(double),
        here.register_full_backward_pre_hook(triple),
    ):
        assert hook is not None
    hooks = [
        there.register_remote_forward_pre_hook(where_from),
        there.register_remote_forward_hook(add_one, with_kwargs=True),
        there.register_remote_full_backward_hook(double),
        there.register_remote_full_backward_pre_hook(triple),
    ]
    mine, theirs = x(), x()
    expected = here(mine, power=2)
    expected.square().sum().backward()
    with autograd.context() as context_id:
        found = there(theirs, power=2)
        autograd.backward(context_id, [found.square().sum()])
        assert_equal(found.detach(), expected.detach())
        assert_equal(autograd.get_gradients(context_id)[theirs], mine.grad)
        del found
    assert ask(there, "seen") == "a"
    for hook in hooks:
        hook.remove()
        hook.remove()
    assert_equal(there(x(False), power=2), Net().eval()(x(False), power=2))
    with there.register_remote_forward_hook(lambda *_: 5):
        assert there(x(False)) == 5
    assert there(x(False)) is not None and there(x(False)).shape == (3, 4)


# -- it travels --------------------------------------------------------------------------------------------


def use(module: RemoteModule, value: torch.Tensor) -> tuple[str, str, Any]:
    assert isinstance(module, RemoteModule)
    return module.module_rref.owner_name(), f"{module.on}/{module.device}", module(value)


@pytest.mark.parametrize("to", ["driver", "a", "b"])
def test_it_can_be_sent(to):
    here, there = pair()
    there.note = "not sent"
    owner, where, result = rpc.rpc_sync(to, use, args=(there, x(False)))
    assert (owner, where) == ("a", "a/cpu")
    assert_equal(result, here(x(False)).detach())
    assert rpc.rpc_sync(to, has_no_note, args=([there],))
    back = rpc.rpc_sync(to, echo, args=(nn.Sequential(nn.Tanh(), there),))
    assert_equal(back(x(False)), here(x(False).tanh()))
    assert not back[1].training


def has_no_note(modules: list[RemoteModule]) -> bool:
    return not hasattr(modules[0], "note") and modules[0]._forward_hooks == {}


def echo(module: nn.Module) -> nn.Module:
    return module


def test_gradients_through_one_that_was_sent():
    here, there = pair()
    mine, theirs = x(), x()
    here(mine).square().sum().backward()
    with autograd.context() as context_id:
        *_, result = rpc.rpc_sync("b", use, args=(there, theirs))
        autograd.backward(context_id, [result.square().sum()])
        assert_equal(autograd.get_gradients(context_id)[theirs], mine.grad)
        del result


def test_plain_pickle():
    there = RemoteModule("a", Net)
    for save in (pickle.dumps, copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler.*when using RPC"):
            save(there)
    other = copy.copy(there.eval())
    assert other.module_rref is there.module_rref
    assert_equal(other(x(False)), there(x(False)))


def test_from_module():
    here = Net(seed=5).eval()
    with autograd.context() as context_id:
        there = RemoteModule.from_module("a", here)
        assert are_leaves_there(there)
        assert not there.training
        mine, theirs = x(), x()
        here(mine).square().sum().backward()
        result = there(theirs).square().sum()
        autograd.backward(context_id, [result])
        assert_equal(autograd.get_gradients(context_id)[theirs], mine.grad)
        for gradient, param in zip(gradients(context_id, there.remote_parameters()), here.parameters(), strict=True):
            assert_equal(gradient, param.grad)
        del result
    with torch.no_grad():
        here.scale.zero_()
    assert there(x(False)).any()
    for wrong in (there, Net, "Net"):
        with pytest.raises(TypeError, match="a module of this worker is needed"):
            RemoteModule.from_module("a", wrong)


def test_from_a_handle():
    here = Net(seed=5).eval()
    rref = rpc.remote("a", Net, kwargs={"seed": 5})
    there = RemoteModule.init_from_module_rref("a/cpu", rref).eval()
    assert_equal(there(x(False)), here(x(False)))
    again = RemoteModule.init_from_module_rref("b", there.get_module_rref())
    assert again.on == "a"  # where it is, whatever was said
    assert_equal(again(x(False)), here(x(False)))
    with pytest.raises(TypeError, match="an RRef to a module is needed, not a Net"):
        RemoteModule.init_from_module_rref("a", here)


# -- bad input ---------------------------------------------------------------------------------------------


def test_wrong_places():
    with pytest.raises(errors.UnknownWorkerError, match="'nobody'"):
        RemoteModule("nobody/cpu", nn.Linear, (4, 2))
    with pytest.raises(errors.UnknownWorkerError):
        RemoteModule("rank:999", nn.Linear, (4, 2))
    with pytest.raises(RuntimeError, match=r"device type at start of device string.*'a/foo'"):
        RemoteModule("a/foo", nn.Linear, (4, 2))
    with pytest.raises(RuntimeError, match="Device string must not be empty"):
        RemoteModule("a/", nn.Linear, (4, 2))
    for wrong in ("", "/", "/cpu", "a/cpu/cpu", "rank:x/cpu", "a:b"):
        with pytest.raises(ValueError, match=f"Could not parse remote_device: {wrong}. The valid format is"):
            RemoteModule(wrong, nn.Linear, (4, 2))
    with pytest.raises(TypeError, match="remote_device is a string"):
        RemoteModule(3, nn.Linear, (4, 2))
    if not torch.cuda.is_available():
        there = RemoteModule("a/cuda:0", nn.Linear, (4, 2))
        with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
            there(x(False))


def test_wrong_classes():
    with pytest.raises(TypeError, match="RemoteModule.from_module"):
        RemoteModule("a", nn.Linear(4, 2))
    with pytest.raises(TypeError, match="not 'Linear'"):
        RemoteModule("a", "Linear")
    there = RemoteModule("a", dict)
    with pytest.raises(ValueError, match=r"returns an instance of <class nn.Module>, .* of <class 'dict'>"):
        there.forward()
    there = RemoteModule("a", nn.Linear, (4,))
    for use_it in (there, there.state_dict, there.remote_parameters, there.train):
        with pytest.raises(TypeError, match="out_features"):
            use_it()
    assert there.training


def test_a_class_that_cannot_be_imported_there(cluster):
    if not cluster.pids:
        pytest.skip("workers of one process have the same modules")
    module = types.ModuleType("only_here")
    exec("import torch\nclass Layer(torch.nn.Module):\n    pass", vars(module))
    sys.modules["only_here"] = module
    try:
        there = RemoteModule("a", module.Layer)
        with pytest.raises(Exception, match="only_here"):
            there()
        other = RemoteModule.from_module("a", module.Layer())
        with pytest.raises(Exception, match="only_here"):
            other()
    finally:
        del sys.modules["only_here"]


def test_what_it_refuses():
    there = RemoteModule("a", nn.Linear, (4, 2))
    for refused in (
        lambda: there.register_buffer("name", torch.ones(1)),
        lambda: there.register_parameter("name", nn.Parameter(torch.ones(1))),
        lambda: there.add_module("name", nn.ReLU()),
        lambda: setattr(there, "name", nn.Parameter(torch.ones(1))),
        there.share_memory,
    ):
        with pytest.raises(ValueError, match="not supported for RemoteModule: the module is on worker 'a'"):
            refused()
    for swapped in ({"0.weight": torch.ones(2, 4)}, dict(nn.Sequential(there).named_parameters())):
        with pytest.raises(ValueError, match="'weight' of a RemoteModule cannot be replaced from here"):
            torch.func.functional_call(nn.Sequential(there), swapped, x(False))


def test_an_error_in_forward():
    there = RemoteModule("a", nn.Linear, (5, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        there(x(False))
    assert "on worker 'a'" in str(caught.value.__cause__)


def test_a_dead_owner(server):
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a", "b"], server=server, options=options, driver="boss") as cluster:
        there = RemoteModule("a", nn.Linear, (4, 2))
        there(x(False))
        server.stop([cluster.pids["a"]], 0.0)
        for use_it in (lambda: there(x(False)), there.state_dict, there.remote_parameters, there.train):
            with pytest.raises((errors.PeerLostError, errors.UnknownWorkerError), match="'a'"):
                use_it()
        with pytest.raises((errors.PeerLostError, errors.UnknownWorkerError), match="'a'"):
            RemoteModule("a", nn.Linear, (4, 2))(x(False))
        other = RemoteModule("b", nn.Linear, (4, 2))
        assert other(x(False)).shape == (3, 2)


# -- several trainers of one module ------------------------------------------------------------------------


class Deep(nn.Module):
    """Its backward needs its parameters, in several forms, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.rnn = nn.GRU(3, 3)
        seeded(self, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(torch.tanh(self.first(x)))) * self.scale**2
        return self.rnn(y[None])[0][0]


def step_of_another(module: RemoteModule) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, module.parameters(), lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(torch.ones(2, 3)).sum()])
        optimizer.step(context_id)


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.to_here() if hasattr(p.grad, "to_here") else p.grad for p in module.parameters()]


def test_a_snapshot_has_the_values_of_its_forward():
    here, there = Deep(), RemoteModule("a", Deep, snapshot=True)
    x = torch.rand(2, 3, requires_grad=True, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(here(x).sum(), [x, *here.parameters()])
    for in_context in (False, True):
        there.load_state_dict(here.state_dict())
        if not in_context:
            loss = there(x).sum()
            rpc.rpc_sync("b", step_of_another, args=(there,))
            loss.backward()
            found = [x.grad, *gradients_of(there)]
        else:
            with autograd.context() as context_id:
                loss = there(x).sum()
                rpc.rpc_sync("b", step_of_another, args=(there,))
                autograd.backward(context_id, [loss])
                found = [autograd.get_gradients(context_id)[x]]
                found += rpc.rpc_sync("a", gradients_there, args=(context_id, there.module_rref))
        for mine, theirs in zip(expected, found, strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.equal(there.state_dict()["scale"], here.scale)  # the others' steps have been made


def gradients_there(context_id: int, rref: RRef) -> list[torch.Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[p] for p in rref.local_value().parameters()]


def test_without_a_snapshot_the_error_says_what_has_happened():
    there = RemoteModule("a", Deep)
    for in_context in (False, True):
        x = torch.ones(2, 3, requires_grad=True)
        context = autograd.context() if in_context else contextlib.nullcontext(0)
        with context as context_id:
            loss = there(x).sum()
            rpc.rpc_sync("b", step_of_another, args=(there,))
            with pytest.raises(
                errors.BackwardError,
                match=r"modified by an inplace.*step of another.*RemoteModule\(..., snapshot=True\)",
            ):
                autograd.backward(context_id, [loss]) if in_context else loss.backward()


class Overwrites(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        y.add_(1)
        return y


def test_a_snapshot_refuses_what_else_was_changed_in_place():
    there = RemoteModule("a", Overwrites, snapshot=True)
    with pytest.raises(errors.BackwardError, match="modified by an inplace operation: a tensor of shape"):
        there(torch.ones(2, requires_grad=True)).sum().backward()


def train_shared(module: RemoteModule, steps: int) -> None:
    for _ in range(steps):
        step_of_another(module)


def test_four_trainers_of_one_module():
    there = RemoteModule("a", Deep, snapshot=True)
    futures = [rpc.rpc_async(to, train_shared, args=(there, 5)) for to in ("b", "b", "driver", "driver")]
    for future in futures:
        future.wait()
    sent = RemoteModule.init_from_module_rref("a", there.module_rref, snapshot=True)
    assert rpc.rpc_sync("b", is_snapshot, args=(sent,))
    assert not rpc.rpc_sync("b", is_snapshot, args=(RemoteModule("a", nn.Identity),))


def is_snapshot(module: RemoteModule) -> bool:
    return module._snapshot


class HoldsForward(nn.Module):
    inside, go_on = threading.Event(), threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, *, wait: bool = False) -> torch.Tensor:
        before = self.weight.detach().clone()
        if wait:
            self.inside.set()
            assert self.go_on.wait(PATIENCE)
        assert torch.equal(before, self.weight)
        return x * self.weight


def is_inside() -> bool:
    return HoldsForward.inside.wait(PATIENCE)


def let_it_go_on() -> None:
    HoldsForward.go_on.set()


def test_a_step_waits_for_the_forward_of_a_snapshot():
    there = RemoteModule("a", HoldsForward, snapshot=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, there.parameters(), lr=0.5)
    x = torch.ones(1)
    future = there.forward_async(x, wait=True)
    assert rpc.rpc_sync("a", is_inside)
    there(x).sum().backward()  # forwards do not wait for each other
    owner = optimizer._owners[0]
    with pytest.raises(errors.CallTimeoutError, match=r"timed out after .* waiting for the forward of a RemoteModule"):
        rpc.rpc_sync("a", step_within, args=(owner.handle, 0.2))
    rpc.rpc_sync("a", let_it_go_on)
    future.wait()
    optimizer.step()
    assert there.state_dict()["weight"].item() == 0.5


def step_within(handle: RRef, seconds: float) -> None:
    """As a call with so much time left; its caller waits for longer, and hears what has become of it."""
    token = current.serving.set(current.Serving("driver", 0, clock.now() + seconds, 1))
    try:
        owner_side.step(handle.entry.id, 0, None, None)
    finally:
        current.serving.reset(token)
