"""The models of the suite `steps`: small, of the usual shapes, each in stages that may live on other workers.

Each has random numbers of its own (a seed for each stage, set where it is made) and one batch, so that it is the same
model wherever its stages are: `trainers.py` compares its training with that in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.stages import Place, Stage

WIDTH = 64
HEADS = 4
WORDS = 256
BATCH, LENGTH = 4, 32


@dataclass(frozen=True)
class Model:
    own: nn.ModuleList
    """What the driver holds."""
    stages: Sequence[Stage]
    loss: Callable[[], Tensor]
    """A forward pass over the batch."""


Build = Callable[[Place], Model]

_seeding = threading.Lock()
"""Held while a stage is made: a worker may be asked for several at once, and they share torch's generator."""


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with _seeding:
        torch.manual_seed(seed)
        yield


# -- three transformer layers ------------------------------------------------------------------------


def make_layer(seed: int) -> nn.Module:
    """12 parameters."""
    with _seeded(seed):
        return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)


def transformer(place: Place) -> Model:
    """A layer on each of three workers; the driver has the data and the loss."""
    stages = [place(number, make_layer, (number,)) for number in range(3)]
    torch.manual_seed(100)
    inputs, target = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)

    def loss() -> Tensor:
        hidden = inputs
        for stage in stages:
            hidden = stage(hidden)
        return F.mse_loss(hidden, target)

    return Model(nn.ModuleList(), stages, loss)


# -- GPT-2, small ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of GPT-2, with 12 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm_1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x)), approximate="tanh"))  # type: ignore[no-any-return]


def make_blocks(seed: int, count: int) -> nn.Module:
    with _seeded(seed):
        return nn.Sequential(*(Block() for _ in range(count)))


def gpt2(place: Place) -> Model:
    """Four layers on three workers (2, 1, 1). The driver has the embeddings, the last norm, and a head that shares the
    weights of the embedding, as GPT-2 has it."""
    stages = [place(number, make_blocks, (number, count)) for number, count in enumerate((2, 1, 1))]
    torch.manual_seed(100)
    embedding, positions, norm = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH), nn.LayerNorm(WIDTH)
    words = torch.randint(WORDS, (BATCH, LENGTH))

    def loss() -> Tensor:
        hidden = embedding(words) + positions.weight
        for stage in stages:
            hidden = stage(hidden)
        logits = F.linear(norm(hidden), embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    return Model(nn.ModuleList([embedding, positions, norm]), stages, loss)


# -- an LSTM -----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A layer of an LSTM, with what comes before it or behind it."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.before = nn.Embedding(WORDS, WIDTH) if is_first else nn.Identity()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.behind = nn.Identity() if is_first else nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, (hidden, cell) = self.lstm(self.before(x), (hidden, cell))
        return self.behind(out), hidden, cell


def make_recurrent(seed: int, is_first: bool) -> nn.Module:
    with _seeded(seed):
        return Recurrent(is_first=is_first)


PIECES = 4


def lstm(place: Place) -> Model:
    """Two layers on two workers, the embedding with the first, the decoder with the second. A text goes through in
    four pieces, and the states of both layers travel along: three tensors in each message."""
    stages = [place(0, make_recurrent, (0, True)), place(1, make_recurrent, (1, False))]
    torch.manual_seed(100)
    words = torch.randint(WORDS, (LENGTH + 1, BATCH))
    pieces = list(zip(words[:-1].chunk(PIECES), words[1:].chunk(PIECES), strict=True))

    def loss() -> Tensor:
        states = [(torch.zeros(1, BATCH, WIDTH), torch.zeros(1, BATCH, WIDTH)) for _ in stages]
        losses = []
        for piece, target in pieces:
            x = piece
            for number, stage in enumerate(stages):
                x, *state = stage(x, *states[number])
                states[number] = (state[0], state[1])
            losses.append(F.cross_entropy(x.flatten(0, 1), target.flatten()))
        return torch.stack(losses).mean()

    return Model(nn.ModuleList(), stages, loss)


# -- a mixture of experts ----------------------------------------------------------------------------

EXPERTS, CHOSEN = 8, 2


def make_expert(seed: int) -> nn.Module:
    with _seeded(seed):
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def experts(place: Place) -> Model:
    """Eight experts, spread over the workers; the driver's router sends each token to two of them, by async calls."""
    stages = [place(number, make_expert, (number,)) for number in range(EXPERTS)]
    torch.manual_seed(100)
    norm, router, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WORDS)
    tokens, target = torch.randn(BATCH * LENGTH, WIDTH), torch.randint(WORDS, (BATCH * LENGTH,))

    def loss() -> Tensor:
        hidden = norm(tokens)
        weights, chosen = router(hidden).softmax(-1).topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        calls = []
        for number, stage in enumerate(stages):
            token, place_of_it = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                calls.append((token, weights[token, place_of_it], stage.call_async(hidden[token])))
        mixed = tokens
        for token, weight, answer in calls:
            mixed = mixed.index_add(0, token, answer.wait() * weight[:, None])
        return F.cross_entropy(head(mixed), target)

    return Model(nn.ModuleList([norm, router, head]), stages, loss)
