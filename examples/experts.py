"""A transformer block with a mixture of experts: attention here, the experts on two other workers.

What you learn here: calls to remote experts run at the same time (`forward_async`), and the gradients that come back
add up with those of the skip connections around them. What the loss does not use costs nothing: in each step the
answer of one expert is left out, as if it were late, and the backward pass neither runs there nor waits for it.

    python examples/experts.py --steps 100
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import telegrad
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

WORKERS = ["left", "right"]
EXPERTS, TOKENS, WIDTH, LENGTH, BATCH = 4, 10, 32, 8, 32


class Expert(nn.Sequential):
    """Made here, moved to a worker; counts what it does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.passes: Counter[str] = Counter()

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes["forward"] += 1
        answer = super().forward(tokens)
        answer.register_hook(lambda _: self.passes.update(["backward"]))
        return answer

    def get_passes(self) -> Counter[str]:
        return self.passes


class Block(nn.Module):
    """Attention, then for each token the expert that its gate prefers; skip connections around both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.head = nn.Linear(WIDTH, TOKENS)
        workers = [WORKERS[n % len(WORKERS)] for n in range(EXPERTS)]
        self.experts = nn.ModuleList(RemoteModule.from_module(worker, Expert()) for worker in workers)

    def forward(self, tokens: Tensor, late: int) -> Tensor:
        x = self.embedding(tokens)
        x = (x + self.attention(x, x, x, need_weights=False)[0]).flatten(0, 1)
        weight, choice = self.gate(x).softmax(1).max(1)
        rows = [(choice == n).nonzero().squeeze(1) for n in range(EXPERTS)]
        calls = {n: self.experts[n].forward_async(x[rows[n]]) for n in range(EXPERTS) if len(rows[n])}
        for n, call in calls.items():
            answer = call.wait()
            if n != late:  # the tokens of that one take the skip connection alone
                x = x.index_add(0, rows[n], weight[rows[n], None] * answer)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="how many steps of training")
    steps, losses = parser.parse_args().steps, []
    torch.manual_seed(0)
    with telegrad.LocalCluster(WORKERS):
        block = Block()
        optimizer = DistributedOptimizer(torch.optim.Adam, block.parameters(), lr=0.01)
        for step in track(range(steps), description="training"):
            tokens = torch.randint(TOKENS, (BATCH, LENGTH))
            wanted = (tokens + tokens.amax(1, keepdim=True)) % TOKENS  # add the largest one to each
            loss = cross_entropy(block(tokens, late=step % EXPERTS), wanted.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        for expert in block.experts:
            passes = expert.get_module_rref().rpc_sync().get_passes()
            print(f"expert on {expert.on:6} {passes['forward']} times forward, {passes['backward']} backward")
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    if losses[-1] > 0.8 * losses[0]:
        sys.exit("it did not learn")


if __name__ == "__main__":
    main()
