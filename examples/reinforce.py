"""REINFORCE: observers on other workers play a game, and ask one policy what to do.

What you learn here: an RRef to a local object is a way for others to call back. The policy stays in this process; the
observers get a handle to it, ask it before each move, and build the loss where the rewards are known. The backward
pass follows every one of these questions back to the policy, in one go for all observers.

    python examples/reinforce.py --steps 100
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.progress import track
from torch import Tensor, nn

import telegrad
from telegrad import rpc

OBSERVERS = ["observer0", "observer1", "observer2"]
GAMES, WIDTH, HEIGHT = 32, 7, 5  # each observer plays so many games at once, on a board of this size
MOVES = torch.tensor([-1, 0, 1])


class Catch:
    """Balls fall, one in each game; move the bat under yours before it is down."""

    def __init__(self, random: torch.Generator) -> None:
        self.ball = torch.randint(WIDTH, (GAMES,), generator=random)
        self.bat = torch.full((GAMES,), WIDTH // 2)

    def view(self) -> Tensor:
        return torch.cat([nn.functional.one_hot(column, WIDTH) for column in (self.ball, self.bat)], 1).float()

    def move(self, action: Tensor) -> None:
        self.bat = (self.bat + MOVES[action]).clamp(0, WIDTH - 1)

    def caught(self) -> Tensor:
        return (self.bat == self.ball).float()


class Observer:
    """Lives on a worker. Its moves and its rewards stay there: only the loss is handed out."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def play(self, policy: rpc.RRef[nn.Module]) -> tuple[Tensor, float]:
        """The loss of one round of games, and how many of the balls were caught."""
        game = Catch(self.random)
        log_probability = torch.zeros(GAMES)
        for _ in range(HEIGHT):
            choices = policy.rpc_sync().forward(game.view())
            action = torch.multinomial(choices.exp(), 1, generator=self.random)
            log_probability = log_probability + choices.gather(1, action).squeeze(1)
            game.move(action.squeeze(1))
        reward = game.caught()
        return -(log_probability * (reward - reward.mean())).mean(), reward.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="how many rounds of games")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.Tanh(), nn.Linear(64, len(MOVES)), nn.LogSoftmax(dim=1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)

    with telegrad.LocalCluster(OBSERVERS):
        observers = [rpc.remote(name, Observer, args=(seed,)) for seed, name in enumerate(OBSERVERS)]
        handle = rpc.RRef(policy)
        history = []
        for _ in track(range(steps), description="playing"):
            optimizer.zero_grad()
            rounds = [observer.rpc_async().play(handle) for observer in observers]
            losses, caught = zip(*[played.wait() for played in rounds], strict=True)
            torch.stack(losses).mean().backward()
            optimizer.step()
            history.append(sum(caught) / len(caught))

    before, after = history[0], sum(history[-5:]) / 5
    print(f"balls caught: {before:.0%} in the first round, {after:.0%} in the last five")
    if after < before + 0.2:
        sys.exit("it did not learn")


if __name__ == "__main__":
    main()
