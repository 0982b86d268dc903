"""A recurrent network whose embedding table and decoder are on a parameter server.

What you learn here: a `RemoteModule` is used like any layer, and a `DistributedOptimizer` steps parameters wherever
they are, here on two workers, with the gradients that `loss.backward()` has left on each. The tables stay on the
server; only the rows that are looked up and the scores of letters travel.

    python examples/rnn.py --steps 120
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import telegrad
from telegrad import rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

TEXT = "she sells sea shells by the sea shore; the shells she sells are sea shells, i am sure. "
LETTERS = sorted(set(TEXT))
WIDTH, HIDDEN, LENGTH = 16, 64, 32  # of an embedding, of the LSTM's state, of a piece of text


class Writer(nn.Module):
    """Says for each letter of a text which one comes next."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self.embedding = RemoteModule(server, nn.Embedding, (len(LETTERS), WIDTH))
        self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.decoder = RemoteModule(server, nn.Linear, (HIDDEN, len(LETTERS)))

    def forward(self, letters: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(letters))
        return self.decoder(states)

    def write_on(self, start: str, length: int) -> str:
        """The text goes on with the likeliest letter, again and again."""
        text = start
        with torch.no_grad():
            while len(text) < length:
                scores = self(torch.tensor([[LETTERS.index(letter) for letter in text[-LENGTH:]]]))
                text += LETTERS[scores[0, -1].argmax()]
        return text


def pieces() -> tuple[Tensor, Tensor]:
    """All pieces of the text, and the letter that follows each of their letters."""
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT + TEXT[: LENGTH + 1]])
    windows = text.unfold(0, LENGTH + 1, 1)
    return windows[:, :-1], windows[:, 1:]


def seed(number: int) -> None:
    torch.manual_seed(number)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120, help="how many steps of training")
    options = parser.parse_args()
    letters, following = pieces()
    losses = []

    with telegrad.LocalCluster(["server"]):
        seed(0)
        rpc.rpc_sync("server", seed, args=(1,))
        model = Writer("server")
        optimizer = DistributedOptimizer(torch.optim.Adam, model.parameters(), lr=0.01)
        for _ in track(range(options.steps), description="reading"):
            batch = torch.randperm(len(letters))[:16]
            scores = model(letters[batch])
            loss = cross_entropy(scores.flatten(0, 1), following[batch].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"it writes: {model.write_on('she ', len(TEXT))}")

    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    if losses[-1] > 0.7 * losses[0]:
        sys.exit("it did not learn")


if __name__ == "__main__":
    main()
