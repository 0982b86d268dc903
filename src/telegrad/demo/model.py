"""The model: a transformer that reads a text and says of each character which one comes next.

    driver                stage1                stage2                driver
    embedding  ───────▶   layers    ───────▶    layers    ───────▶    head
                             ▲                     ▲
                             └──────  table  ──────┘
                                     server

It is written as if all of it were in one process; `place` says where its parts go. A part on another worker is a
`RemoteModule`: calling it is a remote call, and in the backward pass the gradients come back the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..nn.remote_module import RemoteModule
from .text import CHARACTERS

WORKERS = ("stage1", "stage2", "server")
WIDTH, HEADS, LENGTH = 64, 4, 64
LAYERS = 2  # on each stage
ROWS = 4_096  # of the table

Place = Callable[[str, nn.Module], nn.Module]


def here(worker: str, module: nn.Module) -> nn.Module:
    """Leaves a part in this process: with it, the model is one like any other."""
    return module


class Stage(nn.Module):
    """Some layers of the transformer. Before them, what the table knows is added."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor, triples: Tensor) -> Tensor:
        x = x + self.table(triples)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return x


class Transformer(nn.Module):
    """The whole. Both stages use the same table, so its gradient is a sum of what comes from two workers."""

    def __init__(self, place: Place = RemoteModule.from_module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.table = place("server", nn.Embedding(ROWS, WIDTH))
        self.stage1 = place("stage1", Stage(self.table))
        self.stage2 = place("stage2", Stage(self.table))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS)))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.positions[: text.shape[1]]
        triples = triples_of(text)
        x = self.stage1(x, triples)
        x = self.stage2(x, triples)
        scores: Tensor = self.head(x)
        return scores


def triples_of(text: Tensor) -> Tensor:
    """For each character the row of the table that stands for it and the two before it."""
    before = nn.functional.pad(text, (2, 0))
    return (before[:, :-2] * 9973 + before[:, 1:-1] * 101 + text) % ROWS
