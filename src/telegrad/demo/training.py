"""The training loop, and what the model writes. All of it is code of the driver."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..optim.distributed import DistributedOptimizer
from .model import LENGTH, Transformer
from .text import decode, encode

Batch = tuple[Tensor, Tensor]  # pieces of the text, and the character that follows each of their characters


def loss_of(model: Transformer, batch: Batch) -> Tensor:
    """How surprised the model is by what follows."""
    text, following = batch
    return cross_entropy(model(text).flatten(0, 1), following.flatten())


class Training:
    """A model, the text that it learns, and the optimizer of its parameters, wherever they are."""

    def __init__(self, model: Transformer, text: Tensor, *, size: int = 16, lr: float = 3e-3) -> None:
        self.model = model
        self.pieces = text.unfold(0, LENGTH + 1, 1)  # all of them, as a view
        self.size = size
        self.optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters(), lr=lr)

    def batch(self) -> Batch:
        """Some pieces, taken at random."""
        pieces = self.pieces[torch.randint(len(self.pieces), (self.size,))]
        return pieces[:, :-1], pieces[:, 1:]

    def step(self) -> float:
        """One step on all workers; the loss before it."""
        loss = loss_of(self.model, self.batch())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@torch.no_grad()
def write_on(model: Transformer, text: str, length: int) -> str:
    """The text goes on for so many characters, each drawn from those that the model thinks likely."""
    numbers = encode(text)
    for _ in range(length):
        scores = model(numbers[None, -LENGTH:])[0, -1]
        numbers = torch.cat([numbers, torch.multinomial((scores / 0.7).softmax(0), 1)])
    return decode(numbers)
