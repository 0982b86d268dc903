"""A training loop that does not know that it is distributed: the same numbers as in one process, bit for bit."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as an optimizer does when it is first made: that takes long on a busy machine
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.nn import RemoteModule, RemoteParameter
from telegrad.nn.utils import clip_grad_norm_, clip_grad_value_
from telegrad.optim import DistributedOptimizer, GradScaler, OptimizerError
from telegrad.optim.owner import settle
from telegrad.primitives import clock, current
from telegrad.primitives.current import current_worker
from telegrad.rpc import RRef

PATIENCE = 30.0
WORKERS = ("a", "b", "c")
WIDTH, LETTERS = 8, 11


@pytest.fixture(scope="module", params=["inproc", "unix"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster([*WORKERS], transport=request.param, server=server, options=options) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks(cluster: telegrad.LocalCluster) -> Iterator[None]:
    """After every test no worker keeps or refers to anything."""
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        found = {name: rpc.rpc_sync(name, left_behind) for name in ("driver", *WORKERS)}
        if not any(found.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {found}"
        threading.Event().wait(0.01)


def left_behind() -> int:
    gc.collect()  # an exception and its frames refer to each other
    worker, counts = current_worker(), autograd.debug_info()
    return sum(worker.references.statistics().values()) + sum(
        counts[what] for what in ("contexts", "sends", "received")
    )


# -- a small transformer: embedding and head here, its layers on three workers ------------------------------


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in WORKERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS)
        self.checkpointed = False

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text)
        x = checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)
        return self.head(self.norm(x))


def pair() -> tuple[Transformer, Transformer]:
    """The same model in one process, and with its layers elsewhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        here = Transformer().double()
    there = copy.deepcopy(here)
    for place, worker in enumerate(WORKERS):
        there.layers[place] = RemoteModule.from_module(worker, there.layers[place])
    return here, there


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(LETTERS, (3, 7), generator=generator)
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def assert_same(here: nn.Module, there: nn.Module) -> None:
    mine, theirs = here.state_dict(), there.state_dict()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.to_here() if hasattr(p, "rref") else p.grad for p in model.parameters()]


def assert_same_gradients(here: nn.Module, there: nn.Module) -> None:
    for mine, theirs in zip(gradients_of(here), gradients_of(there), strict=True):
        assert torch.equal(mine, theirs)


def train(here: nn.Module, there: nn.Module, step: Callable[[nn.Module, int], Any], steps: int = 10) -> None:
    for n in range(steps):
        assert torch.equal(torch.as_tensor(step(here, n)), torch.as_tensor(step(there, n)))
    assert_same(here, there)


OPTIMIZERS: list[Any] = [
    (optim.Adam, {"lr": 0.01}),
    (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_ten_steps(cls, options):
    here, there = pair()
    optimizers = {
        here: cls(here.parameters(), **options),
        there: DistributedOptimizer(cls, there.parameters(), **options),
    }

    def step(model: nn.Module, n: int) -> torch.Tensor:
        loss = loss_of(model, n)
        loss.backward()
        optimizers[model].step()
        optimizers[model].zero_grad()
        return loss.detach()

    train(here, there, step)
    for n in range(10, 13):  # a step leaves `.grad` as it is: gradients are added to it
        for model in (here, there):
            loss_of(model, n).backward()
            optimizers[model].step()
    assert_same_gradients(here, there)
    assert_same(here, there)
    assert_states_are_equal(optimizers[here].state_dict(), optimizers[there].state_dict())


def assert_states_are_equal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    torch.testing.assert_close(theirs["state"], mine["state"], rtol=0, atol=0)
    assert theirs["param_groups"] == mine["param_groups"]


def test_all_that_a_loop_may_have():
    """Groups, clipping, a scheduler, gradients that are accumulated, a state that is saved and loaded."""
    here, there = pair()

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        ids = {id(p) for p in decayed}
        others = [p for p in model.parameters() if id(p) not in ids]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]

    def make(model: nn.Module) -> Any:
        if model is here:
            return optim.AdamW(groups(model), lr=0.01)
        return DistributedOptimizer(optim.AdamW, groups(model), lr=0.01)

    clip = {here: nn.utils.clip_grad_norm_, there: clip_grad_norm_}
    clip_value = {here: nn.utils.clip_grad_value_, there: clip_grad_value_}
    optimizers = {model: make(model) for model in (here, there)}
    schedulers = {model: lr_scheduler.OneCycleLR(o, 0.02, total_steps=20) for model, o in optimizers.items()}

    def step(model: nn.Module, n: int) -> torch.Tensor:
        for part in range(3):
            (loss_of(model, 3 * n + part) / 3).backward()
        norm = clip[model](model.parameters(), 0.5)
        clip_value[model](model.parameters(), 0.05)
        optimizers[model].step()
        schedulers[model].step()
        if n % 2:
            optimizers[model].zero_grad()
        else:
            model.zero_grad(set_to_none=n % 4 == 0 or model is there)
        return norm

    train(here, there, step, 5)
    saved = optimizers[here].state_dict(), optimizers[there].state_dict()
    assert_states_are_equal(*saved)
    for model, state in zip((here, there), reversed(saved), strict=True):  # each takes the other's
        optimizers[model] = make(model)
        optimizers[model].load_state_dict(state)
    schedulers = {model: lr_scheduler.ExponentialLR(o, 0.9) for model, o in optimizers.items()}
    train(here, there, step, 5)


def test_frozen_parts():
    here, there = pair()
    optimizers = {}
    for model in (here, there):
        model.layers[1].requires_grad_(False)
        for p in model.layers[2].parameters():
            p.requires_grad_(p.ndim > 1)
        wanted = [p for p in model.parameters() if p.requires_grad]
        optimizers[model] = (
            optim.Adam(wanted, lr=0.01) if model is here else DistributedOptimizer(optim.Adam, wanted, lr=0.01)
        )

    def step(model: nn.Module, n: int) -> torch.Tensor:
        optimizers[model].zero_grad()
        loss = loss_of(model, n)
        loss.backward()
        optimizers[model].step()
        return loss.detach()

    train(here, there, step, 3)
    assert all((p.grad is None) is not p.requires_grad for p in there.parameters())


def test_checkpoints():
    here, there = pair()
    here.checkpointed = there.checkpointed = True
    optimizers = {
        here: optim.Adam(here.parameters(), lr=0.01),
        there: DistributedOptimizer(optim.Adam, there.parameters(), lr=0.01),
    }

    def step(model: nn.Module, n: int) -> torch.Tensor:
        loss = loss_of(model, n)
        loss.backward()
        optimizers[model].step()
        optimizers[model].zero_grad()
        return loss.detach()

    train(here, there, step, 3)


# -- loops of frameworks ------------------------------------------------------------------------------------


class Lit(nn.Module):
    """What a framework's user writes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: int) -> torch.Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        if any(isinstance(module, RemoteModule) for module in self.modules()):
            optimizer: Any = DistributedOptimizer(optim.AdamW, self.parameters(), lr=0.01)
        else:
            optimizer = optim.AdamW(self.parameters(), lr=0.01)
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 10)


def fit(module: Lit, steps: int) -> list[float]:
    """What a framework does with it: the optimizer calls a closure, and hooks are called around the step."""
    optimizer, scheduler = module.configure_optimizers()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    module.train()
    losses = []
    for batch in range(steps):

        def closure(batch: int = batch) -> torch.Tensor:
            loss = module.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append(float(optimizer.step(closure=closure) if batch % 2 else optimizer.step(closure)))
        scheduler.step()
    assert seen == ["before", "after"] * steps
    return losses


def test_a_loop_that_is_a_framework():
    here, there = pair()
    assert fit(Lit(here), 5) == fit(Lit(there), 5)
    assert_same(here, there)


# -- GradScaler ---------------------------------------------------------------------------------------------


def test_grad_scaler():
    here, there = pair()
    optimizers = {
        here: optim.SGD(here.parameters(), lr=0.1, momentum=0.9),
        there: DistributedOptimizer(optim.SGD, there.parameters(), lr=0.1, momentum=0.9),
    }
    scalers = {
        here: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
        there: GradScaler("cpu", init_scale=1024.0, growth_interval=2),
    }
    clip = {here: nn.utils.clip_grad_norm_, there: clip_grad_norm_}

    def step(model: nn.Module, n: int) -> torch.Tensor:
        scaler, optimizer = scalers[model], optimizers[model]
        loss = loss_of(model, n) * (float("inf") if n == 2 else 1.0)
        scaler.scale(loss).backward()
        if n % 2:
            scaler.unscale_(optimizer)
            clip[model](model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return torch.tensor(scaler.get_scale())

    train(here, there, step, 6)
    assert scalers[there].get_scale() != 1024.0
    loss = scalers[there].scale(loss_of(there, 0))
    loss.backward()
    wrong = torch.amp.GradScaler("cpu")
    wrong.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="telegrad.optim.DistributedOptimizer and GradScaler"):
        wrong.unscale_(optimizers[there])
    ours = GradScaler("cpu")  # for other optimizers it is torch's
    weight = torch.ones(2, requires_grad=True)
    ours.scale(weight.sum()).backward()
    ours.unscale_(optim.SGD([weight]))
    assert weight.grad.tolist() == [1.0, 1.0]
    there.half()
    there.zero_grad()
    there.layers[0](torch.ones(1, 2, WIDTH).half()).sum().backward()
    with pytest.raises(OptimizerError, match="Attempting to unscale FP16 gradients"):
        scalers[there]._unscale_grads_(optimizers[there], torch.ones(()), torch.zeros(()), False)


# -- contexts and `.grad` ----------------------------------------------------------------------------------


def test_a_pass_into_grad_and_a_step_by_the_id_of_its_context():
    here, there = pair()
    optimizer = DistributedOptimizer(optim.SGD, there.parameters(), lr=0.1)
    mine = optim.SGD(here.parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(there, 0)], into="grad")
        with pytest.raises(OptimizerError, match=r"(?s)failed on 4 of 4.*leave out the context's id"):
            optimizer.step(context_id)
        with pytest.raises(OptimizerError, match="leave out the context's id"):
            telegrad.optim.clip_grad_norm_(context_id, there.parameters(), 1.0)
        assert_same(here, there)
        optimizer.step()
    loss_of(here, 0).backward()
    mine.step()
    assert_same(here, there)
    with autograd.context() as context_id:  # one in the context; `.grad` has its own and stays
        autograd.backward(context_id, [loss_of(there, 1)])
        optimizer.step(context_id)
    mine.zero_grad()
    loss_of(here, 1).backward()
    mine.step()
    assert_same(here, there)


def test_a_step_by_another_worker_than_the_root():
    """It takes the gradients of a pass whose end is still on its way to the owner."""
    here, there = pair()
    params = [p if isinstance(p, RemoteParameter) else RRef(p) for p in there.parameters()]
    optimizer = rpc.remote("c", make_optimizer, args=(params,))
    mine = optim.SGD(here.parameters(), lr=0.1)
    for n in range(5):
        for model in (here, there):
            loss_of(model, n).backward()
        optimizer.rpc_sync().step()
        optimizer.rpc_sync().zero_grad()
        mine.step()
        mine.zero_grad()
        assert_same(here, there)


def make_optimizer(params: list[Any]) -> DistributedOptimizer:
    return DistributedOptimizer(optim.SGD, params, lr=0.1)


def hold_ends() -> None:
    """From now on this worker does not hear of the ends of passes."""
    held: list[Any] = []
    parts: Any = current_worker().engine.parts
    parts.held, parts.on_end = held, lambda *args: held.append(args)


def release_ends() -> None:
    parts: Any = current_worker().engine.parts
    del parts.on_end
    for args in parts.held:
        parts.on_end(*args)
    del parts.held


def step_of(optimizer: RRef[Any]) -> None:
    optimizer.local_value().step()


@pytest.mark.parametrize("cluster", ["unix"], indirect=True)  # in one process the root ends the pass on all itself
@pytest.mark.parametrize("by", ["driver", "c"])
def test_a_step_that_did_not_hear_of_the_end_of_a_pass_is_not_made(by):
    here, there = pair()
    mine = optim.SGD(here.layers[0].parameters(), lr=0.1)
    optimizer = rpc.remote(by, make_optimizer, args=([*there.layers[0].parameters()],))
    loss_of(here, 0).backward()
    rpc.rpc_sync("a", hold_ends)
    try:
        loss_of(there, 0).backward()
        with pytest.raises((errors.CallTimeoutError, OptimizerError)):
            rpc.rpc_sync(by, step_of, args=(optimizer,), timeout=0.5)
        with pytest.raises(
            errors.CallTimeoutError, match="end of a backward pass of worker 'driver'.*nothing was done"
        ):
            rpc.rpc_sync("a", settle_here)
        assert_same(here, there)
    finally:
        rpc.rpc_sync("a", release_ends)
    rpc.rpc_sync(by, step_of, args=(optimizer,))
    mine.step()
    assert_same(here, there)


def settle_here() -> None:
    """Waits as a step does; the deadline is far enough that the answer still comes."""
    served = current.serving.get()
    token = current.serving.set(current.Serving(served.caller, served.message_id, clock.now() + 0.5, served.depth))
    try:
        settle()
    finally:
        current.serving.reset(token)


def test_passes_that_still_run_elsewhere_are_not_awaited():
    """Not those of other trainers over the same module, nor those of other threads."""
    here, there = pair()
    module = there.layers[0]
    optimizer = DistributedOptimizer(optim.SGD, there.parameters(), lr=0.1)
    weight = next(module.parameters())
    for trainer in ("c", "driver"):
        entered, release = RRef(threading.Event()), RRef(threading.Event())
        running = rpc.rpc_async(trainer, train_slowly, args=(module, entered, release))
        assert entered.local_value().wait(PATIENCE)
        assert weight.grad is None
        optimizer.step()
        assert clip_grad_norm_(there.parameters(), 1.0) == 0.0
        optimizer.zero_grad()
        module.zero_grad()
        assert_same(here, there)
        release.local_value().set()
        running.wait()
        assert weight.grad is not None
        optimizer.zero_grad()


def train_slowly(module: RemoteModule, entered: RRef[Any], release: RRef[Any]) -> None:
    x = torch.ones(1, 2, WIDTH, dtype=torch.float64, requires_grad=True)

    def wait(_: torch.Tensor) -> None:
        entered.rpc_sync().set()
        release.rpc_sync(timeout=0).wait(PATIENCE)

    x.register_hook(wait)
    module(x).sum().backward()


def test_in_a_hook_of_the_pass():
    """Gradients on other workers are not there yet; those of this one are."""
    here, there = pair()
    optimizer = DistributedOptimizer(optim.SGD, there.parameters(), lr=0.1)
    weight = next(there.layers[0].parameters())
    loss_of(there, 0).backward()
    loss_of(here, 0).backward()
    gradient, errors_seen = weight.grad, []
    refused: list[Callable[[], Any]] = [
        lambda: weight.grad,
        lambda: setattr(weight, "grad", None),
        gradient.to_here,
        gradient.zero_,
        optimizer.step,
        optimizer.zero_grad,
        there.layers[1].zero_grad,
        lambda: clip_grad_norm_(there.parameters(), 1.0),
        lambda: clip_grad_value_(there.parameters(), 1.0),
        lambda: GradScaler("cpu")._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), False),
    ]

    def hook(_: torch.Tensor) -> None:
        for act in refused:
            with pytest.raises(errors.GradientError, match="still runs: gradients on other workers, here .*'.'"):
                act()
            errors_seen.append(act)

    own = {model: model.head.weight for model in (here, there)}
    stepping = {here: optim.SGD([own[here]], lr=0.1), there: DistributedOptimizer(optim.SGD, [own[there]], lr=0.1)}
    hooks = [
        own[model].register_post_accumulate_grad_hook(lambda _, model=model: stepping[model].step())
        for model in (here, there)
    ]
    hooks.append(there.embedding.weight.register_post_accumulate_grad_hook(hook))
    loss_of(there, 1).backward()
    loss_of(here, 1).backward()
    for handle in hooks:  # the collector does not look into them
        handle.remove()
    assert errors_seen == refused
    assert_same_gradients(here, there)
    assert_same(here, there)
    x = torch.ones(1, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    x.register_hook(lambda _: errors_seen.append(weight.grad.to_here()))
    torch.autograd.grad(there.layers[0](x).sum(), [x])  # which changes no `.grad`
    assert torch.equal(errors_seen[-1], next(here.layers[0].parameters()).grad)


def test_gradients_in_the_other_place():
    here, there = pair()
    optimizer = DistributedOptimizer(optim.SGD, there.parameters(), lr=0.1)
    acts: list[Callable[..., Any]] = [
        optimizer.step,
        lambda *c: (
            telegrad.optim.clip_grad_norm_(*c, there.parameters(), 1.0)
            if c
            else clip_grad_norm_(there.parameters(), 1.0)
        ),
    ]
    with autograd.context() as context_id:
        for act in acts:  # none anywhere
            act()
            act(context_id)
        autograd.backward(context_id, [loss_of(there, 0)])
        for act in (*acts, lambda: clip_grad_value_(there.parameters(), 1.0)):
            with pytest.raises(errors.GradientError, match=rf"in context {context_id} some have one: give its id"):
                act()
        assert_same(here, there)
        assert acts[1](context_id) > 0.0
    loss_of(there, 0).backward()
    with autograd.context() as context_id:
        for act in acts:
            with pytest.raises(errors.GradientError, match="leave out the context's id, or call zero_grad"):
                act(context_id)
        assert_same(here, there)
        assert acts[1]() > 0.0
        optimizer.step()  # without its id, also inside


def test_clipping_what_has_no_gradients():
    here, there = pair()
    assert clip_grad_norm_(there.parameters(), 1.0) == 0.0
    assert clip_grad_norm_([], 1.0) == 0.0
    clip_grad_value_(there.parameters(), 1.0)
    loss_of(there, 0).backward()
    loss_of(here, 0).backward()
    for norm_type in (1.0, 2.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(here.parameters(), 1.0, norm_type)
        assert torch.equal(clip_grad_norm_(there.parameters(), 1.0, norm_type), expected)
        assert_same_gradients(here, there)
    weight = next(there.layers[0].parameters())
    nn.utils.clip_grad_norm_(next(here.layers[0].parameters()), 0.1)
    clip_grad_norm_(weight, 0.1)
    assert_same_gradients(here, there)
    clip_grad_value_([weight.rref, there.head.weight], 0.001)
    nn.utils.clip_grad_value_([next(here.layers[0].parameters()), here.head.weight], 0.001)
    assert_same_gradients(here, there)
    there.head.weight.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(there.parameters(), 1.0, error_if_nonfinite=True)


# -- DistributedDataParallel -------------------------------------------------------------------------------


class Averaging:
    """A worker of a process group, with a module whose gradients are averaged over it."""

    def __init__(self, where: str, rank: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
        self.weight = nn.Linear(1, 1, bias=False)
        self.module = nn.parallel.DistributedDataParallel(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def gradient(self, context_id: int) -> float:
        weight = self.weight.weight
        return (weight.grad if context_id == 0 else autograd.get_gradients(context_id)[weight]).item()

    def close(self) -> None:
        del self.module
        torch.distributed.destroy_process_group()


def test_ddp_on_other_workers(cluster, tmp_path: Path):
    """Its gradients are averaged in passes of ours: in contexts, and in plain ones."""
    if not cluster.pids:
        pytest.skip("a process group needs processes")
    workers = [rpc.remote(name, Averaging, args=(str(tmp_path / "ranks"), rank)) for rank, name in enumerate("ab")]
    try:

        def total() -> torch.Tensor:
            parts = [w.rpc_async().forward(torch.full((1, 1), n + 1.0)) for n, w in enumerate(workers)]
            return torch.stack([part.wait().sum() for part in parts]).sum()

        with autograd.context() as context_id:
            autograd.backward(context_id, [total()])
            assert [w.rpc_sync().gradient(context_id) for w in workers] == [1.5, 1.5]
        total().backward()
        assert [w.rpc_sync().gradient(0) for w in workers] == [1.5, 1.5]
    finally:
        for future in [w.rpc_async().close() for w in workers]:
            future.wait()


def test_ddp_around_a_remote_module(tmp_path: Path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), RemoteModule("a", nn.Linear, (4, 4)))
        with pytest.raises(RuntimeError, match="DistributedDataParallel around the modules of this process only"):
            nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


def test_rrefs_and_parameters_together():
    """An RRef, a parameter of this process, and one of a RemoteModule."""
    remote = RemoteModule("a", nn.Linear, (2, 2))
    local, other = nn.Parameter(torch.ones(2)), rpc.remote("b", make_parameter)
    optimizer = DistributedOptimizer(optim.SGD, [("w", next(remote.parameters())), ("l", local), ("r", other)], lr=1.0)
    assert [type(p) for p in optimizer.param_groups[0]["params"]] == [
        *map(type, (next(remote.parameters()), local, other))
    ]
    (local.sum() + other.to_here().sum()).backward()
    optimizer.step()
    assert local.tolist() == [0.0, 0.0]
    assert other.to_here().tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert local.grad is None


def make_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))
