"""Ordinary modules are trained without any Python for their leaves during a pass: see captured.py. The other way, by a
Capture's prehooks, is for leaves that something looks on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import telegrad
from telegrad import autograd
from telegrad.gradients.leaves import Capture
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

STEPS = 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two layers with one weight, of which one is frozen but for it; and a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.frozen.requires_grad_(False)
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[..., 0].detach().abs() * 9).long() % 10
        return self.frozen(self.second(self.first(x).tanh()).tanh()) + self.table(rows)  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "recurrent": Recurrent,
    "tied": Tied,
}


class Watched(nn.Linear):
    """Its weight has a post-accumulate hook."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight.register_post_accumulate_grad_hook(lambda leaf: SEEN.update(["hook"]))


SEEN: Counter[str] = Counter()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what takes the other way, on all workers: they are of this process."""
    counts: Counter[str] = Counter()
    for name in ("__init__", "watch", "watch_averaged", "_take"):
        method = getattr(Capture, name)

        def counting(self: Capture, *given: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            counts[_name] += 1
            return _method(self, *given, **options)

        monkeypatch.setattr(Capture, name, counting)
    return counts


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """With a generator of its own: the workers share that of the process, and make their modules at the same time."""
    module, generator = make(), torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def train(make: Callable[[], nn.Module], *, mode: str) -> list[float]:
    """Trains a layer of this process between two modules, of other workers unless the mode is "local"."""
    with telegrad.LocalCluster(["a", "b"], transport="inproc"):
        layer = build(lambda: nn.Linear(8, 8), 0)
        if mode == "local":
            model = nn.Sequential(build(make, 1), layer, build(make, 2))
        else:
            model = nn.Sequential(RemoteModule("a", build, (make, 1)), layer, RemoteModule("b", build, (make, 2)))
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = (optim.SGD if mode == "local" else partial(DistributedOptimizer, optim.SGD))(parameters, lr=0.1)
        losses = []
        for _ in range(STEPS):
            if mode == "context":
                with autograd.context() as context_id:
                    loss = model(x).square().mean()
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
            else:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["context", "plain"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_ordinary_modules_take_the_engines_capture(
    make: Callable[[], nn.Module], mode: str, made: Counter[str]
) -> None:
    assert train(make, mode=mode) == train(make, mode="local")
    assert not made


@pytest.mark.parametrize("mode", ["context", "plain"])
def test_leaves_with_post_accumulate_hooks_do_not(mode: str, made: Counter[str]) -> None:
    SEEN.clear()
    losses = train(Watched, mode=mode)
    assert SEEN["hook"] == 2 * STEPS
    assert made["__init__"] == made["watch"] == 2 * STEPS
    assert made["_take"] == 2 * STEPS  # of the bias, which goes with its weight
    assert losses == train(Watched, mode="local")
