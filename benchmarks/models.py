"""What the owners of the suite `training` run: the same for both sides, which give their `rpc`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.backends import backend_here

WORDS = 100
WIDTH = 32


def negated(x: Tensor) -> Tensor:
    return -x


def make_parameters(count: int, size: int) -> list[Any]:
    """Handles to new parameters of this worker."""
    rref = backend_here().rpc.RRef
    return [rref(nn.Parameter(torch.linspace(0.5, 1.5, size) * (n + 1))) for n in range(count)]


def total(handles: list[Any]) -> Tensor:
    """The sum of squares of parameters of this worker."""
    return torch.stack([handle.local_value().square().sum() for handle in handles]).sum()


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)  # type: ignore[no-any-return]


def forward_of(handle: Any, *inputs: Any) -> Any:
    return handle.local_value()(*inputs)


def parameters_of(handle: Any) -> list[Any]:
    """Handles to the parameters of a module of this worker."""
    rref = backend_here().rpc.RRef
    return [rref(parameter) for parameter in handle.local_value().parameters()]


class RemoteRNN(nn.Module):
    """An LSTM here, its embedding table and its decoder on a peer."""

    def __init__(self, rpc: Any, peer: str) -> None:
        super().__init__()
        self._rpc = rpc
        self._peer = peer
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)
        self._embedding = rpc.remote(peer, Embedding)
        self._decoder = rpc.remote(peer, Decoder)

    def handles(self) -> list[Any]:
        """To all parameters, wherever they are."""
        own = [self._rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        theirs = [
            self._rpc.rpc_sync(self._peer, parameters_of, args=(part,)) for part in (self._embedding, self._decoder)
        ]
        return [*own, *theirs[0], *theirs[1]]

    def forward(self, words: Tensor) -> Tensor:
        embedded = self._rpc.rpc_sync(self._peer, forward_of, args=(self._embedding, words))
        hidden, _ = self.lstm(embedded)
        return self._rpc.rpc_sync(self._peer, forward_of, args=(self._decoder, hidden))  # type: ignore[no-any-return]
