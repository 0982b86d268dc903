"""DistributedOptimizer: the same numbers as one of torch's optimizers in one process."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # as an optimizer does when it is first made: that takes long on a busy machine
from torch import nn, optim
from torch.optim import lr_scheduler

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.optim import DistributedOptimizer, OptimizerError, clip_grad_norm_
from telegrad.primitives.current import current_worker
from telegrad.rpc import RRef

PATIENCE = 30.0
OWNERS = ("a", "b")


@pytest.fixture(scope="module", params=["inproc", "unix"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE)
    names = ["a", "b", "c"]
    with telegrad.LocalCluster(names, transport=request.param, server=server, options=options) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks(cluster: telegrad.LocalCluster) -> Iterator[None]:
    """After every test no worker keeps or refers to anything: no optimizer, no parameter, no context."""
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        found = {name: rpc.rpc_sync(name, left_behind) for name in ("driver", "a", "b", "c")}
        if not any(found.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {found}"
        threading.Event().wait(0.01)


def left_behind() -> int:
    gc.collect()  # an exception and its frames refer to each other
    worker = current_worker()
    return sum(worker.references.statistics().values()) + len(worker.contexts)


# -- a model in two halves, here and on two workers --------------------------------------------------------
#
#   driver          a                      b
#   x ─────▶ tanh(Linear(x)) ─────▶ Linear(·) ─────▶ sum of squares


def seeded(module: nn.Module, seed: int) -> Any:
    """With a generator of its own: workers of one process share torch's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.uniform_(-0.5, 0.5, generator=generator)
    return module


def make_half(seed: int) -> nn.Linear:
    return seeded(nn.Linear(4, 4), seed)


def parameters_of(module: RRef[nn.Module]) -> list[RRef[nn.Parameter]]:
    return [RRef(p) for p in module.local_value().parameters()]


def batch(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4) * (step + 1)


class Here:
    """The model in one process."""

    def __init__(self) -> None:
        self.halves = [make_half(seed) for seed in (1, 2)]
        self.params = [p for half in self.halves for p in half.parameters()]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.halves[1](torch.tanh(self.halves[0](x))).square().sum()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.params]


class There:
    """The same model on two workers."""

    def __init__(self, owners: tuple[str, str] = OWNERS) -> None:
        self.halves = [rpc.remote(owner, make_half, args=(seed,)) for owner, seed in zip(owners, (1, 2), strict=True)]
        self.params = [rref for half in self.halves for rref in rpc.rpc_sync(half.owner(), parameters_of, args=(half,))]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.halves
        return second.rpc_sync().forward(torch.tanh(first.rpc_sync().forward(x))).square().sum()

    def values(self) -> list[torch.Tensor]:
        return [rref.to_here().detach() for rref in self.params]


def assert_same(here: Here, there: There) -> None:
    for mine, theirs in zip(here.values(), there.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def train_here(model: Here, optimizer: optim.Optimizer, n: int) -> None:
    optimizer.zero_grad()
    model.loss(batch(n)).backward()
    optimizer.step()


def train_there(model: There, optimizer: DistributedOptimizer, n: int) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [model.loss(batch(n))])
        optimizer.step(context_id)


CLASSES: list[Any] = [
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "maximize": True, "foreach": False}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01, "foreach": True}),
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.5}),
    (optim.Rprop, {"lr": 0.05}),
    (optim.NAdam, {"lr": 0.05}),
    (optim.Adam, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.8), torch.tensor(0.9))}),
    (optim.SGD, {"lr": torch.tensor(0.05), "momentum": 0.9}),
]


@pytest.mark.parametrize(("cls", "options"), CLASSES)
def test_the_same_numbers_as_in_one_process(cls, options):
    here, there = Here(), There()
    mine, theirs = cls(here.params, **options), DistributedOptimizer(cls, there.params, **options)
    for n in range(4):
        train_here(here, mine, n)
        train_there(there, theirs, n)
        assert_same(here, there)


def test_arguments_by_place():
    here, there = Here(), There()
    mine, theirs = optim.SGD(here.params, 0.1, 0.9), DistributedOptimizer(optim.SGD, there.params, 0.1, 0.9)
    for n in range(3):
        train_here(here, mine, n)
        train_there(there, theirs, n)
    assert_same(here, there)


def test_parameters_of_ones_own_and_of_others():
    here, there = Here(), There(("driver", "a"))
    mine = optim.Adam(here.params, lr=0.1)
    theirs = DistributedOptimizer(optim.Adam, there.params, lr=0.1)
    for n in range(3):
        train_here(here, mine, n)
        train_there(there, theirs, n)
    assert_same(here, there)
    assert sorted(rref.owner_name() for rref in theirs.remote_optimizers) == ["a", "driver"]


# -- groups ------------------------------------------------------------------------------------------------


def groups(params: list[Any]) -> list[dict[str, Any]]:
    """The weights, which are on both workers; one bias, with the default; and the other."""
    return [
        {"params": [params[0], params[2]], "lr": 0.1, "momentum": 0.5},
        {"params": [params[3]]},
        {"params": params[1], "weight_decay": 0.5},
    ]


def test_groups():
    here, there = Here(), There()
    mine = optim.SGD(groups(here.params), lr=0.01)
    theirs = DistributedOptimizer(optim.SGD, groups(there.params), lr=0.01)
    assert theirs.defaults == mine.defaults
    for group, its in zip(theirs.param_groups, mine.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in its.items() if k != "params"}
        assert all(isinstance(rref, RRef) for rref in group["params"])
    for n in range(3):
        train_here(here, mine, n)
        train_there(there, theirs, n)
        assert_same(here, there)
    for optimizer in (mine, theirs):
        optimizer.param_groups[0]["lr"] = 0.001
        optimizer.param_groups[2]["weight_decay"] = 0.0
    for n in range(3):
        train_here(here, mine, n)
        train_there(there, theirs, n)
        assert_same(here, there)


def test_names_of_parameters():
    there = There()
    theirs = DistributedOptimizer(optim.SGD, [(f"p{n}", rref) for n, rref in enumerate(there.params)], lr=0.1)
    assert theirs.state_dict()["param_groups"][0]["param_names"] == ["p0", "p1", "p2", "p3"]


def test_a_group_without_parameters():
    here, there = Here(), There()
    mine = optim.SGD([{"params": []}, {"params": here.params}], lr=0.1)
    theirs = DistributedOptimizer(optim.SGD, [{"params": []}, {"params": there.params}], lr=0.1)
    train_here(here, mine, 0)
    train_there(there, theirs, 0)
    assert_same(here, there)
    assert theirs.state_dict()["param_groups"][0] == mine.state_dict()["param_groups"][0]


# -- schedulers --------------------------------------------------------------------------------------------

SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    lambda o: lr_scheduler.ExponentialLR(o, gamma=0.7),
    lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10),
    lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers(make):
    here, there = Here(), There()
    mine = optim.SGD(here.params, lr=0.1, momentum=0.9)
    theirs = DistributedOptimizer(optim.SGD, there.params, lr=0.1, momentum=0.9)
    schedulers = [make(mine), make(theirs)]
    for n in range(5):
        train_here(here, mine, n)
        train_there(there, theirs, n)
        for scheduler in schedulers:
            scheduler.step()
        assert_same(here, there)
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


def test_a_scheduler_of_a_rate_that_is_a_tensor():
    """It is changed in place."""
    here, there = Here(), There()
    mine = optim.Adam(here.params, lr=torch.tensor(0.1))
    theirs = DistributedOptimizer(optim.Adam, there.params, lr=torch.tensor(0.1))
    schedulers = [lr_scheduler.ExponentialLR(o, 0.5) for o in (mine, theirs)]
    for n in range(4):
        train_here(here, mine, n)
        train_there(there, theirs, n)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(here, there)


def test_a_scheduler_that_looks_at_the_loss():
    here, there = Here(), There()
    mine, theirs = optim.SGD(here.params, lr=0.1), DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    schedulers = [lr_scheduler.ReduceLROnPlateau(o, patience=0) for o in (mine, theirs)]
    for n in range(4):
        train_here(here, mine, n)
        train_there(there, theirs, n)
        for scheduler in schedulers:
            scheduler.step(1.0)
    assert_same(here, there)
    assert theirs.param_groups[0]["lr"] < 0.1


def test_a_changed_rate_goes_along_with_the_step(cluster):
    there = There()
    optimizer = DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [there.loss(batch(0))])
        for _ in range(2):
            optimizer.param_groups[0]["lr"] *= 0.5
            before = {name: rpc.rpc_sync(name, calls_served) for name in OWNERS}
            optimizer.step(context_id)
            after = {name: rpc.rpc_sync(name, calls_served) for name in OWNERS}
            assert after == {name: n + 2 for name, n in before.items()}  # the step, and asking


def calls_served() -> int:
    return current_worker().statistics().calls_served


def calls_being_served() -> int:
    return current_worker().statistics().calls_being_served


class Counting(optim.Optimizer):
    """Keeps a number in its groups, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


def test_what_an_optimizer_writes_into_its_groups_stays():
    here, there = Here(), There()
    mine, theirs = Counting(here.params, 0.1), DistributedOptimizer(Counting, there.params, 0.1)
    for n in range(3):
        train_here(here, mine, n)
        train_there(there, theirs, n)
        for optimizer in (mine, theirs):
            optimizer.param_groups[0]["lr"] *= 0.5
    assert_same(here, there)
    assert theirs.state_dict()["param_groups"][0]["k"] == 3


# -- state -------------------------------------------------------------------------------------------------


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for key, state in mine["state"].items():
        assert state.keys() == theirs["state"][key].keys()
        for name, value in state.items():
            torch.testing.assert_close(value, theirs["state"][key][name], rtol=0, atol=0)


def trained(cls: Any, **options: Any) -> tuple[Here, There, Any, Any]:
    here, there = Here(), There()
    mine = cls(groups(here.params), **options)
    theirs = DistributedOptimizer(cls, groups(there.params), **options)
    for n in range(3):
        train_here(here, mine, n)
        train_there(there, theirs, n)
    return here, there, mine, theirs


@pytest.mark.parametrize(("cls", "options"), [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (Counting, {})])
def test_the_state_is_that_of_one_process(cls, options):
    _, _, mine, theirs = trained(cls, **options)
    assert_same_state(mine.state_dict(), theirs.state_dict())


def adam_groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "betas": (0.5, 0.9)}]


def test_state_of_one_is_loaded_by_the_other():
    here, there = Here(), There()
    mine = optim.Adam(adam_groups(here.params), lr=0.01)
    theirs = DistributedOptimizer(optim.Adam, adam_groups(there.params), lr=0.01)
    for n in range(2):
        train_here(here, mine, n)
        train_there(there, theirs, n)
    assert_same_state(mine.state_dict(), theirs.state_dict())
    saved = pickle.loads(pickle.dumps(theirs.state_dict()))

    new_mine = optim.Adam(adam_groups(here.params), lr=0.5)
    new_mine.load_state_dict(saved)
    new_theirs = DistributedOptimizer(optim.Adam, adam_groups(there.params), lr=0.5)
    new_theirs.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert new_theirs.param_groups[0]["lr"] == 0.1
    assert new_theirs.param_groups[1]["betas"] == (0.5, 0.9)
    for n in range(2):
        train_here(here, new_mine, n)
        train_there(there, new_theirs, n)
        assert_same(here, there)
    for optimizer in (new_mine, new_theirs):
        optimizer.param_groups[0]["lr"] = 0.3
    train_here(here, new_mine, 2)
    train_there(there, new_theirs, 2)
    assert_same(here, there)


def test_a_saved_state_does_not_change_with_the_next_step():
    _, there, _, theirs = trained(optim.SGD, lr=0.1, momentum=0.9)
    saved = theirs.state_dict()
    kept = copy.deepcopy(saved)
    train_there(there, theirs, 0)
    assert_same_state(saved, kept)


def test_hooks_of_the_optimizer():
    there = There()
    theirs = DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    seen = []
    theirs.register_step_pre_hook(lambda *_: seen.append("before step"))
    theirs.register_step_post_hook(lambda *_: seen.append("after step"))
    theirs.register_state_dict_pre_hook(lambda *_: seen.append("before state_dict"))
    theirs.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    theirs.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
    theirs.register_load_state_dict_post_hook(lambda *_: seen.append("after load"))
    train_there(there, theirs, 0)
    state = theirs.state_dict()
    assert state["more"] == 1
    theirs.load_state_dict(state)
    assert seen == ["before step", "after step", "before state_dict", "before load", "after load"]
    theirs.register_state_dict_post_hook(lambda *_: {})
    assert theirs.state_dict() == {}


def test_a_state_of_other_groups():
    there = There()
    theirs = DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    state = theirs.state_dict()
    state["param_groups"][0]["params"] = [0, 1]
    with pytest.raises(ValueError, match=r"sizes: \[2\]; those of the optimizer are \[4\]"):
        theirs.load_state_dict(state)


# -- gradients ---------------------------------------------------------------------------------------------


def grads_of(module: RRef[nn.Module]) -> list[torch.Tensor | None]:
    return [p.grad for p in module.local_value().parameters()]


def set_grads(module: RRef[nn.Module], value: float) -> None:
    for p in module.local_value().parameters():
        p.grad = torch.full_like(p, value)


def ask(half: RRef[nn.Module], function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(half.owner(), function, args=(half, *args))


def test_grad_of_the_parameters_is_left_alone():
    here, there = Here(), There()
    mine, theirs = optim.SGD(here.params, lr=0.1), DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    ask(there.halves[0], set_grads, 7.0)
    train_here(here, mine, 0)
    train_there(there, theirs, 0)
    assert_same(here, there)
    assert all(bool((g == 7).all()) for g in ask(there.halves[0], grads_of))
    assert ask(there.halves[1], grads_of) == [None, None]
    theirs.zero_grad(set_to_none=False)
    assert all(bool((g == 0).all()) for g in ask(there.halves[0], grads_of))
    theirs.zero_grad()
    assert ask(there.halves[0], grads_of) == [None, None]


_watched: list[nn.Parameter] = []


class Watching(optim.SGD):
    """Looks at what others see of `.grad` while it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(p.grad is None for p in _watched)
        assert any(p.grad is not None for group in self.param_groups for p in group["params"])
        super().step()


def watch(module: RRef[nn.Module]) -> None:
    _watched[:] = list(module.local_value().parameters())


def test_nobody_sees_the_gradients_of_a_step():
    there = There()
    ask(there.halves[0], watch)
    theirs = DistributedOptimizer(Watching, there.params[:2], lr=0.1)
    before = there.values()
    train_there(there, theirs, 0)
    assert not torch.equal(before[0], there.values()[0])
    _watched.clear()


def test_a_step_is_noticed_by_autograd(cluster):
    """A parameter that was changed in place after the forward is an error in backward, as in one process."""
    there = There()
    optimizer = DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    with autograd.context() as context_id:
        first, second = there.loss(batch(0)), there.loss(batch(1))
        autograd.backward(context_id, [first])
        optimizer.step(context_id)
        with pytest.raises(errors.BackwardError, match="modified by an inplace operation"):
            autograd.backward(context_id, [second])


def test_parameters_without_gradients_stay():
    there = There()
    theirs = DistributedOptimizer(optim.SGD, there.params, lr=0.1, weight_decay=0.1)
    before = there.values()
    with autograd.context() as context_id:
        loss = there.halves[0].rpc_sync().forward(batch(0)).sum()
        autograd.backward(context_id, [loss])
        theirs.step(context_id)
    after = there.values()
    assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [False, False, True, True]


def test_an_owner_that_the_context_has_not_reached(cluster):
    """A step from outside of the context does not bring it there."""
    there = There()
    theirs = DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    before = there.values()
    with autograd.context() as context_id:
        autograd.backward(context_id, [there.halves[0].rpc_sync().forward(batch(0)).sum()])
        token = telegrad.primitives.current.context_id.set(0)
        theirs.step(context_id)
        norm = clip_grad_norm_(context_id, there.params, 1.0)
        telegrad.primitives.current.context_id.reset(token)
    assert norm > 1
    after = there.values()
    assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [False, False, True, True]


def move(module: RRef[nn.Module]) -> None:
    module.local_value().to(torch.float64)


def test_parameters_that_get_other_memory():
    """Module.to() keeps the parameters and gives them other memory."""
    here, there = Here(), There()
    mine, theirs = optim.SGD(here.params, lr=0.1), DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    train_here(here, mine, 0)
    train_there(there, theirs, 0)
    for half, other in zip(here.halves, there.halves, strict=True):
        half.double()
        ask(other, move)
    for n in range(2):
        mine.zero_grad()
        here.loss(batch(n).double()).backward()
        mine.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [there.loss(batch(n).double())])
            theirs.step(context_id)
    assert_same(here, there)


class Rebinding(optim.Optimizer):
    """Gives parameters new memory, which some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - 0.1 * p.grad


def test_an_optimizer_that_gives_parameters_other_memory():
    here, there = Here(), There()
    mine, theirs = Rebinding(here.params), DistributedOptimizer(Rebinding, there.params)
    for n in range(3):
        train_here(here, mine, n)
        train_there(there, theirs, n)
    assert_same(here, there)


def test_the_same_parameter_twice():
    there = There()
    again = rpc.rpc_sync("a", parameters_of, args=(there.halves[0],))
    with pytest.raises(OptimizerError, match="appear in more than one parameter group"):
        DistributedOptimizer(optim.SGD, [{"params": there.params}, {"params": again}], lr=0.1)


def make_embedding() -> nn.Embedding:
    return seeded(nn.Embedding(10, 3, sparse=True), 0)


def test_sparse_gradients():
    here, there = make_embedding(), rpc.remote("a", make_embedding)
    params = rpc.rpc_sync("a", parameters_of, args=(there,))
    mine = optim.SparseAdam(here.parameters(), lr=0.1)
    theirs = DistributedOptimizer(optim.SparseAdam, params, lr=0.1)
    rows = torch.tensor([1, 2, 2, 5])
    for _ in range(3):
        mine.zero_grad()
        here(rows).square().sum().backward()
        mine.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [there.rpc_sync().forward(rows).square().sum()])
            theirs.step(context_id)
    torch.testing.assert_close(params[0].to_here().detach(), here.weight.detach(), rtol=0, atol=0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [there.rpc_sync().forward(rows).square().sum()])
        norm = clip_grad_norm_(context_id, params, 0.1)
        again = clip_grad_norm_(context_id, params, 0.1)
    here.zero_grad()
    here(rows).square().sum().backward()
    torch.testing.assert_close(norm, here.weight.grad.to_dense().norm())
    torch.testing.assert_close(again, torch.tensor(0.1))


def accumulate(module: RRef[nn.Module], times: int) -> None:
    """What somebody else does on that worker, with `.grad` of the same parameters."""
    for _ in range(times):
        sum(p.sum() for p in module.local_value().parameters()).backward()


def test_others_use_grad_at_the_same_time():
    """Neither a step nor a backward of theirs is lost or disturbed."""
    there = There()
    half = there.halves[0]
    optimizer = DistributedOptimizer(optim.SGD, there.params[:2], lr=0.01)
    before = there.values()[:2]
    future = rpc.rpc_async("a", accumulate, args=(half, 200))
    for _ in range(20):
        with autograd.context() as context_id:
            loss = sum((rref.rpc_sync().sum() for rref in there.params[:2]), torch.zeros(()))
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    future.wait()
    for gradient in ask(half, grads_of):
        torch.testing.assert_close(gradient, torch.full_like(gradient, 200.0))
    for old, new in zip(before, there.values(), strict=False):
        torch.testing.assert_close(new, old - 20 * 0.01)


# -- clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping(norm_type, max_norm):
    here, there = Here(), There()
    mine, theirs = optim.SGD(here.params, lr=0.1), DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    here.loss(batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(here.params, max_norm, norm_type)
    mine.step()
    with autograd.context() as context_id:
        autograd.backward(context_id, [there.loss(batch(0))])
        found = clip_grad_norm_(context_id, there.params, max_norm, norm_type)
        theirs.step(context_id)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_same(here, there)


def test_clipping_leaves_the_gradients_that_others_hold():
    weight = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(weight * 5).sum()])
        held = autograd.get_gradients(context_id)[weight]
        norm = clip_grad_norm_(context_id, RRef(weight), 1.0)
        clipped = autograd.get_gradients(context_id)[weight]
    torch.testing.assert_close(norm, torch.tensor(75.0).sqrt())
    torch.testing.assert_close(held, torch.full((3,), 5.0))
    torch.testing.assert_close(clipped.norm(), torch.tensor(1.0))


@pytest.mark.parametrize("foreach", [None, True])
def test_momentum_is_not_added_to_the_gradients_of_a_context(foreach):
    there = There()
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": foreach}
    optimizer = DistributedOptimizer(optim.SGD, there.params, **options)
    with autograd.context() as context_id:
        autograd.backward(context_id, [there.loss(batch(0))])
        before = gradients_of(there, context_id)
        optimizer.step(context_id)
        assert gradients_of(there, context_id) == before


def gradients_of(there: There, context_id: int) -> list[Any]:
    return [rpc.rpc_sync(rref.owner(), gradient_there, args=(context_id, rref)) for rref in there.params]


def gradient_there(context_id: int, rref: RRef[Any]) -> list[float]:
    return autograd.get_gradients(context_id)[rref.local_value()].flatten().tolist()


def test_clipping_what_is_not_finite():
    weight = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        assert clip_grad_norm_(context_id, [RRef(weight)], 1.0) == 0
        autograd.backward(context_id, [(weight * float("inf")).sum()])
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(context_id, [RRef(weight)], 1.0, error_if_nonfinite=True)
        assert clip_grad_norm_(context_id, [RRef(weight)], 1.0) == float("inf")
        assert bool(autograd.get_gradients(context_id)[weight].isnan().all())


# -- many at once ------------------------------------------------------------------------------------------


def train_from_there(params: list[RRef[Any]], halves: list[RRef[Any]], steps: int) -> None:
    model = There.__new__(There)
    model.params, model.halves = params, halves
    optimizer = DistributedOptimizer(optim.SGD, params, lr=0.01)
    for _ in range(steps):
        with autograd.context() as context_id:
            # The gradients do not depend on the parameters: the sum of all steps is known.
            loss = sum((rref.rpc_sync().sum() for rref in params), torch.zeros(()))
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)


def test_several_trainers_for_the_same_parameters():
    there = There()
    before = there.values()
    steps = 10
    futures = [rpc.rpc_async(to, train_from_there, args=(there.params, there.halves, steps)) for to in ("a", "b", "c")]
    train_from_there(there.params, there.halves, steps)
    for future in futures:
        future.wait()
    for old, new in zip(before, there.values(), strict=True):
        torch.testing.assert_close(new, old - 4 * steps * 0.01)


def test_several_threads_with_one_optimizer():
    there = There()
    optimizer = DistributedOptimizer(optim.SGD, there.params, lr=0.01)
    before = there.values()
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                with autograd.context() as context_id:
                    loss = sum((rref.rpc_sync().sum() for rref in there.params), torch.zeros(()))
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for old, new in zip(before, there.values(), strict=True):
        torch.testing.assert_close(new, old - 20 * 0.01)


class Meeting(optim.SGD):
    """Its steps on two owners wait for each other."""

    def __init__(self, params: Any, here: dict[str, RRef[Any]]) -> None:
        super().__init__(params, lr=0.1)
        self._here = here

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        me = current_worker().name
        self._here[me].rpc_sync().set()
        other = next(name for name in self._here if name != me)
        assert self._here[other].rpc_sync().wait(PATIENCE)
        super().step()


def test_owners_step_at_the_same_time():
    there = There()
    optimizer = DistributedOptimizer(Meeting, there.params, {name: RRef(threading.Event()) for name in OWNERS})
    train_there(there, optimizer, 0)


# -- errors ------------------------------------------------------------------------------------------------


class FailingOnB(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if current_worker().name == "b":
            raise ValueError("no step here")
        super().step()


def test_an_error_on_one_owner():
    here, there = Here(), There()
    mine, theirs = optim.SGD(here.params, lr=0.1), DistributedOptimizer(FailingOnB, there.params, lr=0.1)
    before = there.values()
    with pytest.raises(OptimizerError, match=r"step of FailingOnB failed on 1 of 2 .*'b': ValueError") as caught:
        train_there(there, theirs, 0)
    assert "done on: ['a']" in str(caught.value)
    assert caught.value.done == ("a",)
    assert isinstance(caught.value.errors["b"], ValueError)
    assert "on worker 'b'" in str(caught.value.errors["b"].__cause__)
    train_here(here, mine, 0)
    for place, value in enumerate(there.values()):
        torch.testing.assert_close(value, here.values()[place] if place < 2 else before[place])


class FailingToBegin(optim.SGD):
    def __init__(self, params: Any) -> None:
        raise ValueError("Error creating optimizer.")


def test_an_error_when_it_is_made():
    there = There()
    with pytest.raises(OptimizerError, match=r"creating FailingToBegin failed on 2 of 2.*Error creating optim"):
        DistributedOptimizer(FailingToBegin, there.params)
    with pytest.raises(OptimizerError, match="'a': ValueError: Invalid learning rate: -1"):
        DistributedOptimizer(optim.SGD, there.params[:1], lr=-1)
    with pytest.raises(OptimizerError, match="unexpected keyword argument"):
        DistributedOptimizer(optim.SGD, there.params, speed=1)


def test_bad_input():
    there = There()
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(optim.SGD, [], lr=0.1)
    with pytest.raises(TypeError, match="parameters must be tensors of this process, RRefs, .* number 1 is a int"):
        DistributedOptimizer(optim.SGD, [there.params[0], 3], lr=0.1)
    for one in (there.params[0], nn.Parameter(torch.ones(1))):
        with pytest.raises(TypeError, match="a list, or as a list of dicts, not as a"):
            DistributedOptimizer(optim.SGD, one, lr=0.1)
    with pytest.raises(ValueError, match="a parameter group needs 'params'"):
        DistributedOptimizer(optim.SGD, [{"lr": 0.1}], lr=0.1)
    for wrong in (dict, torch.nn.Linear, "SGD", optim.SGD([torch.ones(1)]), lambda params: None):
        with pytest.raises(TypeError, match="a class of torch.optim is needed"):
            DistributedOptimizer(wrong, there.params)
    with pytest.raises(TypeError, match="needs \\['closure'\\]"):
        DistributedOptimizer(optim.LBFGS, there.params)
    with pytest.raises(OptimizerError, match="refers to a Linear; an optimizer needs a tensor"):
        DistributedOptimizer(optim.SGD, there.halves, lr=0.1)
    with pytest.raises(NotImplementedError, match="make a new one"):
        DistributedOptimizer(optim.SGD, there.params, lr=0.1).add_param_group({"params": there.params})
    with pytest.raises(TypeError, match="cannot be sent or copied"):
        copy.deepcopy(DistributedOptimizer(optim.SGD, there.params, lr=0.1))


def test_a_value_that_could_not_be_created():
    failed = rpc.remote("a", int, args=("no number",))
    with pytest.raises(OptimizerError, match="invalid literal for int"):
        DistributedOptimizer(optim.SGD, [failed], lr=0.1)


def test_a_tensor_that_is_no_leaf():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(OptimizerError, match="can't optimize a non-leaf Tensor"):
        DistributedOptimizer(optim.SGD, [RRef(x * 2)], lr=0.1)


def test_a_context_that_is_gone():
    there = There()
    optimizer = DistributedOptimizer(optim.SGD, there.params, lr=0.1)
    with autograd.context() as context_id:
        pass
    with pytest.raises(errors.UnknownContextError, match="it has ended"):
        optimizer.step(context_id)
    with pytest.raises(errors.UnknownContextError):
        optimizer.step(12345)
    with pytest.raises(errors.UnknownContextError):
        clip_grad_norm_(context_id, there.params, 1.0)
    with pytest.raises(TypeError, match="the id of an autograd context, not a str"):
        optimizer.step("1")
    with pytest.raises(TypeError, match="not a list; for gradients in `.grad` there is telegrad.nn.utils"):
        clip_grad_norm_(there.params, 1.0, 2.0)


def test_a_dead_owner(server):
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a", "b"], server=server, options=options, driver="boss") as cluster:
        there = There()
        optimizer = DistributedOptimizer(optim.SGD, there.params, lr=0.1)
        with autograd.context() as context_id:
            autograd.backward(context_id, [there.loss(batch(0))])
            before = there.values()
            server.stop([cluster.pids["b"]], 0.0)
            with pytest.raises(OptimizerError, match="'b': PeerLostError") as caught:
                optimizer.step(context_id)
            assert caught.value.done == ("a",)
            assert not torch.equal(before[0], there.params[0].to_here())
            with pytest.raises(OptimizerError, match="on 1 of 2"):
                clip_grad_norm_(context_id, there.params, 1.0)
        with pytest.raises(OptimizerError, match="creating SGD failed on 1 of 2"):
            DistributedOptimizer(optim.SGD, there.params, lr=0.1)
        with pytest.raises(OptimizerError, match="'b'"):
            optimizer.state_dict()


class Stuck(optim.SGD):
    def __init__(self, params: Any, entered: RRef[Any], release: RRef[Any]) -> None:
        super().__init__(params, lr=0.1)
        self._entered, self._release = entered, release

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._entered.rpc_sync().set()
        self._release.rpc_sync().wait(PATIENCE)


def step_quickly(params: list[Any], context_id: int) -> None:
    DistributedOptimizer(optim.SGD, params, lr=0.1).step(context_id)


def test_a_step_that_waited_too_long_is_not_made():
    there = There()
    entered, release = RRef(threading.Event()), RRef(threading.Event())
    stuck = DistributedOptimizer(Stuck, there.params[:2], entered, release)
    with autograd.context() as context_id:
        autograd.backward(context_id, [there.loss(batch(0))])
        before = there.values()[:2]
        thread = threading.Thread(target=stuck.step, args=(context_id,))
        thread.start()
        assert entered.local_value().wait(PATIENCE)
        before_it = rpc.rpc_sync("a", calls_being_served)
        # The deadline of the call is that of the step made in it. Which of the two is heard of first is open.
        with pytest.raises((errors.CallTimeoutError, OptimizerError)):
            rpc.rpc_sync("c", step_quickly, args=(there.params[:2], context_id), timeout=0.5)
        # Until the owner has given it up: what it was doing before is left.
        deadline = time.monotonic() + PATIENCE
        while (now := rpc.rpc_sync("a", calls_being_served)) > before_it:
            assert time.monotonic() < deadline, f"{now} calls, {before_it} before"
        release.local_value().set()
        thread.join()
    for old, new in zip(before, there.values()[:2], strict=True):
        torch.testing.assert_close(old, new)
