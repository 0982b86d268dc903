"""What a step costs beside torch's own, and what an owner may keep from one step to the next."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # as an optimizer does when it is first made: that takes long on a busy machine
from torch import nn, optim

import telegrad
from telegrad import autograd, rpc
from telegrad.gradients import adding
from telegrad.gradients.backward_pass import State
from telegrad.gradients.commits import Commits
from telegrad.messages import Envelope, Forget, Kind
from telegrad.nn.utils import clip_grad_norm_, clip_grad_value_
from telegrad.optim import DistributedOptimizer, owner
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
    """After every test no worker keeps or refers to anything."""
    yield
    deadline = time.monotonic() + PATIENCE
    while any(found := {name: rpc.rpc_sync(name, left_behind) for name in ("driver", "a", "b")}.values()):
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.01)


def left_behind() -> int:
    gc.collect()
    worker = current_worker()
    return sum(worker.references.statistics().values()) + len(worker.contexts)


def python_calls(act: Callable[[], Any]) -> int:
    """How many functions of telegrad's are called on this thread."""
    count = 0

    def on_event(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "telegrad" in frame.f_globals.get("__name__", "")

    sys.setprofile(on_event)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def parameters(count: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.linspace(-1, 1, 4) * (n + 1)) for n in range(count)]
    for parameter in made:
        parameter.grad = torch.full((4,), 0.1)
    return made


def owners_calls(cls: type[optim.Optimizer], count: int) -> dict[str, int]:
    optimizer = DistributedOptimizer(cls, parameters(count), lr=1e-3)
    id = optimizer.remote_optimizers[0].entry.id
    handles = [RRef(parameter) for parameter in optimizer.param_groups[0]["params"]]
    optimizer.step()
    return {
        "step": python_calls(lambda: owner.step(id, 0, None, None)),
        "norms": python_calls(lambda: owner.norms(None, handles, 2.0)) - 2 * count,  # without finding the values
        "clamp": python_calls(lambda: owner.clamp(handles, 0.05)) - 2 * count,
        "zero_grad": python_calls(lambda: owner.zero_grad(id, True)),
    }


@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW])
def test_python_at_an_owner_does_not_grow_with_the_parameters(cls):
    few, many = owners_calls(cls, 3), owners_calls(cls, 100)
    assert {what: many[what] - few[what] for what in few if what in ("step", "zero_grad")} == {
        "step": 0,
        "zero_grad": 0,
    }
    assert many["step"] < 30


def make_parameters(count: int) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in parameters(count)]


def test_python_at_the_caller_does_not_grow_with_the_parameters():
    counts = []
    for count in (3, 100):
        optimizer = DistributedOptimizer(optim.SGD, rpc.rpc_sync("a", make_parameters, args=(count,)), lr=1e-3)
        optimizer.zero_grad()
        counts.append(python_calls(optimizer.zero_grad))
        optimizer.step()
    assert counts[0] == counts[1] < 20


# -- what a step gathers is kept, until something changes ----------------------------------------------------


def assert_same(mine: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


OPTIMIZERS: list[Any] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.1, "foreach": False}),
    (optim.AdamW, {"lr": 0.1, "fused": True}),
    (optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
]


def give_all(params: list[nn.Parameter], n: int) -> None:
    for place, parameter in enumerate(params):
        parameter.grad = torch.linspace(-1, place, 4, dtype=parameter.dtype) * (n + 1)


def give_some(params: list[nn.Parameter], n: int) -> None:
    give_all(params, n)
    params[n % 2].grad = None


def give_sparse(params: list[nn.Parameter], n: int) -> None:
    give_all(params, n)
    params[0].grad = params[0].grad.to_sparse()


def change_memory(params: list[nn.Parameter], n: int) -> None:
    params[1].data = params[1].data * 2
    give_all(params, n)


def change_dtype(params: list[nn.Parameter], n: int) -> None:
    params[2].grad = None
    params[2].data = params[2].data.double()
    give_all(params, n)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_steps_that_differ(cls, options):
    """Each is repeated, so that the second can take what was kept of the first."""
    mine, theirs = parameters(4), parameters(4)
    for params in (mine, theirs):
        params[3].requires_grad_(False)

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]

    ours, local = DistributedOptimizer(cls, groups(theirs), **options), cls(groups(mine), **options)
    n = 0

    def step(give: Callable[[list[nn.Parameter], int], None] = give_all) -> None:
        nonlocal n
        for _ in range(3):
            for params in (mine, theirs):
                give(params, n)
            ours.step()
            local.step()
            assert_same(mine, theirs)
            n += 1

    def change(**changed: Any) -> None:
        for optimizer in (ours, local):
            for name, value in changed.items():
                if name in optimizer.param_groups[1]:
                    optimizer.param_groups[1][name] = value

    step()
    step(give_some)
    step(change_memory)
    step()
    change(lr=0.02)
    step()
    change(lr=0.0, weight_decay=0.5, betas=(0.5, 0.6))
    step()
    change(lr=0.3, momentum=0.5, maximize=True)
    step()
    if options == {"lr": 0.1} and cls is optim.SGD:
        step(give_sparse)
        step(change_dtype)
    saved = local.state_dict()
    step()
    for optimizer in (ours, local):
        optimizer.load_state_dict(saved)
    step()
    if cls is optim.SGD:
        change(momentum=0.0)
        step()
        change(momentum=0.7)
        step()
    change(lr=torch.tensor(0.1))
    step()


def change_state(optimizer: RRef[Any]) -> None:
    for state in optimizer.local_value().optimizer.state.values():
        state["exp_avg"] = torch.ones(4)


def test_what_the_owners_program_changes():
    mine, theirs = parameters(3), parameters(3)
    ours, local = DistributedOptimizer(optim.AdamW, theirs, lr=0.1), optim.AdamW(mine, lr=0.1)
    for n in range(4):
        if n == 2:
            change_state(ours.remote_optimizers[0])
            for state in local.state.values():
                state["exp_avg"] = torch.ones(4)
        give_all(mine, n), give_all(theirs, n)
        ours.step()
        local.step()
        assert_same(mine, theirs)


def test_plain_steps_and_steps_by_contexts_in_turns():
    mine, theirs = parameters(3), parameters(3)
    ours, local = DistributedOptimizer(optim.SGD, theirs, lr=0.1, momentum=0.9), optim.SGD(mine, lr=0.1, momentum=0.9)
    for n in range(6):
        if n % 3 == 2:
            with autograd.context() as context_id:
                autograd.backward(context_id, [sum(p.square().sum() for p in theirs)])
                ours.step(context_id)
            local.zero_grad()
            sum(p.square().sum() for p in mine).backward()
        else:
            give_all(mine, n), give_all(theirs, n)
            ours.step()
        local.step()
        assert_same(mine, theirs)


# -- zero_grad() does not wait -------------------------------------------------------------------------------


def calls_served() -> int:
    return current_worker().statistics().calls_served


def gradients_of(handles: list[RRef[Any]]) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in (handle.local_value() for handle in handles)]


def squares(handles: list[RRef[Any]]) -> torch.Tensor:
    return sum((handle.local_value() ** 2).sum() for handle in handles)


def test_zero_grad_is_no_call():
    handles = rpc.rpc_sync("a", make_parameters, args=(3,))
    optimizer = DistributedOptimizer(optim.SGD, handles, lr=0.1)
    before = rpc.rpc_sync("a", calls_served)
    optimizer.zero_grad()
    assert rpc.rpc_sync("a", gradients_of, args=(handles,)) == [None] * 3
    assert rpc.rpc_sync("a", calls_served) == before + 2  # the questions


def test_zero_grad_has_the_time_limit_of_one_call(monkeypatch, jumping_clock):
    """With all of its owners, who may take nothing; and that of the call it is made in."""
    handles = [handle for name in ("a", "b") for handle in rpc.rpc_sync(name, make_parameters, args=(1,))]
    optimizer = DistributedOptimizer(optim.SGD, handles, lr=0.1)
    limits: list[float | None] = []

    def post(to: int, envelope: Envelope, body: Any, timeout: float | None, context: Any) -> None:
        if envelope.kind == Kind.CLEAR:
            limits.append(timeout)
            jumping_clock.jump(1.0)

    jumping_clock.stop()
    monkeypatch.setattr(current_worker(), "post", post)
    optimizer.zero_grad()
    token = current.serving.set(current.Serving("a", 1, clock.now() + 4.0, 1))
    try:
        optimizer.zero_grad()
    finally:
        current.serving.reset(token)
        monkeypatch.undo()
    assert limits == [PATIENCE, PATIENCE - 1.0, 4.0, 3.0]


def test_zero_grad_comes_before_all_that_is_sent_later():
    handles = {name: rpc.rpc_sync(name, make_parameters, args=(3,)) for name in ("a", "b")}
    optimizer = DistributedOptimizer(optim.SGD, [*handles["a"], *handles["b"]], lr=0.1)
    once = [(2 * torch.linspace(-1, 1, 4) * (n + 1)).tolist() for n in range(3)]
    for n in range(100):
        optimizer.zero_grad()
        futures = [rpc.rpc_async(name, squares, args=(its,)) for name, its in handles.items()]
        torch.stack([future.wait() for future in futures]).sum().backward()
        name = "ab"[n % 2]
        assert rpc.rpc_sync(name, gradients_of, args=(handles[name],)) == once


def train_there(handles: list[RRef[Any]]) -> None:
    rpc.rpc_sync("a", squares, args=(handles,)).backward()


def test_zero_grad_among_passes_of_other_roots():
    """It comes after those that are over, and before those that the caller lets begin after it."""
    handles = rpc.rpc_sync("a", make_parameters, args=(3,))
    optimizer = DistributedOptimizer(optim.SGD, handles, lr=0.1)
    once = [(2 * torch.linspace(-1, 1, 4) * (n + 1)).tolist() for n in range(3)]
    for _ in range(100):
        rpc.rpc_sync("b", train_there, args=(handles,))
        optimizer.zero_grad()
        assert rpc.rpc_sync("a", gradients_of, args=(handles,)) == [None] * 3
        rpc.rpc_sync("b", train_there, args=(handles,))
        assert rpc.rpc_sync("a", gradients_of, args=(handles,)) == once
        optimizer.zero_grad()


class Pass:
    """Of worker 7."""

    adds_to_grad = True
    pass_id = 7 << 48

    def __init__(self) -> None:
        self.state, self.gradient = State.REPORTED, torch.ones(1)


@pytest.mark.parametrize("was_read_together", [True, False])
def test_an_end_that_is_read_after_zero_grad_but_together_with_it(was_read_together):
    leaf = nn.Parameter(torch.ones(1))
    after: list[Any] = []

    class Host:
        after_reading = after.append

    local: Any = Pass()
    commits: Any = Commits("a", Host(), lambda _: None)

    def add_up(found: Any, deadline: float | None = None) -> bool:  # any number of times
        if found.gradient is not None:
            leaf.grad, found.gradient = found.gradient, None
        return True

    commits.add_up = add_up
    named = adding.Clearable()
    named.params = [leaf]
    task = commits.on_clear(3, named, [local])
    if was_read_together:
        local.state = State.FINISHED
        commits.due.append(local)
    after.pop()()
    if not was_read_together:
        local.state = State.FINISHED
        commits.due.append(local)
    task()
    assert (leaf.grad is None) is was_read_together
    assert not commits.due


def test_a_request_to_clear_what_is_no_optimizer():
    """It is dropped, and the connection stays."""
    handle = rpc.remote("a", make_parameters, args=(1,))
    handle.to_here()
    worker = current_worker()
    worker.post(
        handle.entry.owner, Envelope(Kind.CLEAR, worker.new_message_id(), handle.entry.id), Forget(()), 5.0, None
    )
    assert handle.to_here()[0].to_here().tolist() == [-1.0, pytest.approx(-1 / 3), pytest.approx(1 / 3), 1.0]


# -- clipping without a loop -------------------------------------------------------------------------------


def test_clipping_of_all_kinds_of_gradients():
    """Of two dtypes, some sparse, some missing: as torch's functions."""
    mine, theirs = parameters(4), parameters(4)
    for params in (mine, theirs):
        params[1].data = params[1].data.double()
        params[1].grad = None
        give_all(params, 3)
        params[2].grad = None
    expected = nn.utils.clip_grad_norm_(mine, 0.5)
    assert torch.equal(clip_grad_norm_(theirs, 0.5), expected)
    nn.utils.clip_grad_value_(mine, 0.1)
    clip_grad_value_(theirs, 0.1)
    for one, other in zip(mine, theirs, strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)
