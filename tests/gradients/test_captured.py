"""When the engine's own capture takes the gradients of leaves, and when it can't. What it takes: test_leaves.py."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

import telegrad
from telegrad import autograd, rpc
from telegrad._torch import run_backward
from telegrad.gradients import in_process, node_hooks
from telegrad.gradients.captured import Captured
from telegrad.gradients.leaves import Capture, GradientTable
from telegrad.gradients.local_pass import LocalPass
from telegrad.gradients.participant import Parts

PATIENCE = 30.0  # seconds


def node_of(leaf: torch.Tensor):
    return torch.autograd.graph.get_gradient_edge(leaf).node


def returned(loss: torch.Tensor, captured: Captured) -> tuple[torch.Tensor | None, ...]:
    return run_backward((loss,), (torch.ones_like(loss),), False, False, tuple(captured.inputs), True, False)


def capture(loss: torch.Tensor, leaves: list[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    found = Captured.of([node_of(leaf) for leaf in leaves])
    assert found is not None
    return found.gather(returned(loss, found)).copy()


# -- whose memory it is ----------------------------------------------------------------------------------------


SHARING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # Each has the gradient of the sum: itself, and a view of it.
    "view": lambda x, y: x + y.view(2, 3).view(-1),
    "part": lambda x, y: x + F.pad(y[1:-1], (1, 1)),
    "parts that overlap": lambda x, y: F.pad(x, (0, 1)) + F.pad(y, (1, 0)),
    "one tensor": lambda x, y: x + y,
}


@pytest.mark.parametrize("function", SHARING.values(), ids=SHARING)
def test_gradients_in_one_memory_are_copied(function):
    x, y = (torch.randn(6, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(function(x, y).square().sum(), [x, y])
    found = capture(function(x, y).square().sum(), [x, y])
    before = found[y].clone()
    found[x].fill_(7.0)
    assert torch.equal(found[y], before)
    assert torch.equal(found[y], expected[1])


def test_many_that_share_their_memory():
    leaves = [torch.randn(3, requires_grad=True) for _ in range(2000)]
    loss = torch.stack(leaves).sum(0).square().sum()
    found = capture(loss, leaves)
    memories = {gradient.untyped_storage().data_ptr() for gradient in found.values()}
    assert len(memories) == len(leaves)


def test_a_leaf_that_was_frozen_since_its_forward_has_no_gradient():
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    loss = (x * y).sum()
    nodes = [node_of(leaf) for leaf in (x, y)]
    found = Captured.of(nodes)
    y.requires_grad_(False)
    assert list(found.gather(returned(loss, found)).copy()) == [x]


def test_no_leaf_keeps_what_the_engine_began_with():
    leaf, starts = torch.randn(3, requires_grad=True), [torch.ones(3)]
    address, found = starts[0].data_ptr(), Captured.of([node_of(leaf)])
    gather = partial(
        found.gather, run_backward((leaf + 1,), (*starts,), False, False, (*found.inputs,), True, False), starts
    )
    del starts
    assert gather().get(leaf).data_ptr() != address


# -- gathering behind the report -------------------------------------------------------------------------------


def test_only_plain_tensors_on_the_cpu_can_wait():
    class Special(nn.Parameter):
        pass

    tensor, weight, special = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3)), Special(torch.ones(3))
    elsewhere = torch.empty(3, device="meta", requires_grad=True)

    def can_wait(leaves, *gradients):
        return Captured.of([node_of(leaf) for leaf in leaves]).can_wait(gradients)

    assert can_wait([tensor, weight], torch.ones(3), None)
    assert not can_wait([tensor, special], torch.ones(3), None)
    assert not can_wait([tensor, weight], torch.ones(3), torch.ones(3).as_subclass(Special))
    assert not can_wait([tensor, elsewhere], torch.ones(3), None)


def test_gathering_that_fails_is_tried_again():
    table, results = GradientTable(), iter([MemoryError("none left"), None])

    def gather():
        if (error := next(results)) is not None:
            raise error
        return table

    local = LocalPass(pass_id=1, gathering=gather)
    with pytest.raises(MemoryError):
        local.gather()
    assert local.gradients is None
    local.gather()
    local.gather()  # does nothing more
    assert local.gradients is table


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "context"])
def test_a_part_reports_before_it_gathers(plain, monkeypatch):
    module, x, order = nn.Linear(8, 8), torch.randn(3, 8), []
    monkeypatch.setattr(sys.modules[__name__], "_module", module)
    report, gather = Parts._report, Captured.gather

    def reports(self, local, error):
        if not local.is_root:
            order.append("report")
        report(self, local, error)

    def gathers(self, *args):
        order.append("gather")
        return gather(self, *args)

    monkeypatch.setattr(Parts, "_report", reports)
    monkeypatch.setattr(Captured, "gather", gathers)
    with nullcontext(0) if plain else autograd.context() as context_id:
        loss = rpc.rpc_sync("a", forward, args=(x,), timeout=PATIENCE).sum()
        loss.backward() if plain else autograd.backward(context_id, [loss])
        for engine in () if plain else in_process.engines:
            engine.get_gradients(context_id)  # waits for the end of the pass
    assert order == ["report", "gather"]


# -- hooks that capture would not run --------------------------------------------------------------------------


def test_it_is_remembered_of_leaves_that_nothing_looks_on():
    leaves = [torch.randn(3, requires_grad=True) for _ in range(5)]
    assert Captured.of([node_of(leaf) for leaf in leaves]) is not None
    before = RemovableHandle.next_id
    assert Captured.of([node_of(leaf) for leaf in leaves]) is not None
    assert RemovableHandle.next_id == before  # no node was asked
    # New ones are asked, and the old ones are not.
    assert Captured.of([node_of(leaf) for leaf in [*leaves, torch.randn(3, requires_grad=True)]]) is not None
    assert RemovableHandle.next_id == before + node_hooks._PER_LOOK
    addresses = [id(leaf) for leaf in leaves]
    assert all(address in node_hooks._without_hooks for address in addresses)
    del leaves
    gc.collect()
    assert not any(address in node_hooks._without_hooks for address in addresses)


REGISTER: dict[str, Callable[[torch.Tensor, object], object]] = {
    "prehook": lambda leaf, node: node.register_prehook(lambda gradients: None),  # type: ignore[attr-defined]
    "hook": lambda leaf, node: node.register_hook(lambda inputs, outputs: None),  # type: ignore[attr-defined]
    "post-accumulate": lambda leaf, node: leaf.register_post_accumulate_grad_hook(lambda leaf: None),
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
def test_a_hook_is_noticed_whenever_it_was_registered(register):
    other, leaf = (torch.randn(3, requires_grad=True) for _ in range(2))
    nodes = [node_of(other), node_of(leaf)]
    assert Captured.of(nodes) is not None
    handle = register(leaf, nodes[1])
    assert Captured.of(nodes) is None
    assert Captured.of(nodes) is None
    assert Captured.of(nodes[:1]) is not None
    assert Captured.of(nodes) is None
    handle.remove()
    assert Captured.of(nodes) is not None


def test_a_tensors_own_hooks_run_in_the_engine():
    leaf = torch.ones(3, requires_grad=True)
    seen = []
    leaf.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    (found,) = capture((leaf * 3 + leaf).sum(), [leaf]).values()
    assert torch.equal(found, torch.full((3,), 8.0))
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.full((3,), 4.0))


def test_a_hook_registered_by_another_thread_while_nodes_are_asked_is_not_forgotten(monkeypatch):
    first, second = (torch.randn(3, requires_grad=True) for _ in range(2))
    nodes = [node_of(first), node_of(second)]
    ask, handles = node_hooks._has_no_hooks, []

    def ask_slowly(node, leaf):
        found = ask(node, leaf)
        if node is nodes[0]:  # when it was asked already
            thread = threading.Thread(target=lambda: handles.append(node.register_hook(lambda *_: None)))
            thread.start()
            thread.join(PATIENCE)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(node_hooks, "_has_no_hooks", ask_slowly)
        Captured.of(nodes)
    assert Captured.of(nodes) is None
    handles.pop().remove()


# -- in passes -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight used twice, and one that is a view's base."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.more = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight), self.weight.t()) @ self.more.view(8, 8)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x[..., 0].detach().abs() * 9).long() % 10)  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)),
    "conv": lambda: nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.Conv2d(5, 5, 3, padding=1), nn.Flatten(-2)),
    "attention": Attention,
    "recurrent": Recurrent,
    "tied": Tied,
    "sparse": Lookup,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
}


_module: nn.Module | None = None  # the one that "a" has


def forward(x: torch.Tensor) -> torch.Tensor:
    assert _module is not None
    return _module(x)  # type: ignore[no-any-return]


@pytest.fixture
def _cluster():
    with telegrad.LocalCluster(["a"], transport="inproc"):
        yield


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "context"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.usefixtures("_cluster")
def test_ordinary_modules_go_by_the_engines_capture(make, plain, monkeypatch):
    def never(*_):
        raise AssertionError("a leaf goes by a prehook")

    torch.manual_seed(0)
    module, x = make(), torch.randn(2, 5, 8, requires_grad=True)
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), leaves)
    monkeypatch.setattr(sys.modules[__name__], "_module", module)
    monkeypatch.setattr(Capture, "watch", never)
    for _ in range(2):
        with nullcontext(0) if plain else autograd.context() as context_id:
            loss = rpc.rpc_sync("a", forward, args=(x,), timeout=PATIENCE).square().sum()
            if plain:
                for leaf in leaves:
                    leaf.grad = None
                loss.backward()
                found = {leaf: leaf.grad for leaf in leaves}
            else:
                autograd.backward(context_id, [loss])
                found = {}
                for engine in in_process.engines:
                    found.update(engine.get_gradients(context_id))
        for leaf, right in zip(leaves, expected, strict=True):
            assert torch.equal(found[leaf].to_dense(), right.to_dense())


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "context"])
def test_hooks_of_a_leafs_node_run_in_passes(plain, monkeypatch):
    module, x = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), [module.bias])
    monkeypatch.setattr(sys.modules[__name__], "_module", module)
    node, seen = node_of(module.bias), []
    handle = node.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
    with nullcontext(0) if plain else autograd.context() as context_id:
        loss = rpc.rpc_sync("a", forward, args=(x,), timeout=PATIENCE).sum()
        loss.backward() if plain else autograd.backward(context_id, [loss])
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)
    handle.remove()
