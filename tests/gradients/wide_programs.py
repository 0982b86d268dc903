"""Steps of programs that have many tensors: messages of up to 200, modules of up to 300 parameters.

They stand beside those of graph_programs.py; wide_maker.py makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from graph_programs import ROW_NUMBERS, SIZE, Checkpoint, Frame, Program, steps_of
from torch import Tensor, nn

# How often a vector of SIZE is repeated. Tensors of up to 4096 bytes have other nodes than larger ones.
LARGEST_SMALL, SMALLEST_LARGE, LARGE = 170, 171, 400
assert LARGEST_SMALL * SIZE * 8 <= 4096 < SMALLEST_LARGE * SIZE * 8


@dataclass(frozen=True)
class Spread:
    """Makes many values of one. `sizes`: how often each repeats it. `way`: "each" has a node of its own; "rows" and
    "unbind" are views of one tensor; in a "chain" each is made of the one before."""

    value: int
    sizes: tuple[int, ...]
    way: str

    def run(self, frame: Frame) -> None:
        x = frame.values[self.value]
        factors = [1 + i / 64 for i in range(len(self.sizes))]
        made: Sequence[Tensor]
        if self.way in ("rows", "unbind"):
            table = torch.stack([x] * len(factors)) * torch.tensor(factors, dtype=x.dtype, device=x.device).view(
                -1, *[1] * x.dim()
            )
            made = table.unbind() if self.way == "unbind" else [table[i] for i in range(len(factors))]
        elif self.way == "chain":
            made = [x * factors[0]]
            for factor in factors[1:]:
                made = [*made, made[-1].sin() * factor]
        else:
            made = [x * factor for factor in factors]
        frame.values.extend(y if size == 1 else y.repeat(size) for y, size in zip(made, self.sizes, strict=True))


@dataclass(frozen=True)
class Blend:
    """Makes one vector of many values of any size."""

    values: tuple[int, ...]
    stacked: bool

    def run(self, frame: Frame) -> None:
        given = [_folded(frame.values[i]) for i in self.values]
        given = [x.to(given[0].device) for x in given]
        if self.stacked:
            made = torch.stack(given).sin().mean(0)
        else:
            made = torch.zeros_like(given[0])
            for i, x in enumerate(given):
                made = made + x.sin() * ((1 + i % 3) / len(given))
        frame.values.append(made)


def _folded(x: Tensor) -> Tensor:
    if x.numel() % SIZE:
        return x.mean().expand(SIZE)
    return x.reshape(-1, SIZE).mean(0)


@dataclass(frozen=True)
class Layers:
    """The forward pass of a module: its parameters in turn, some more than once. Of a table of embeddings every other
    use has a sparse gradient."""

    leaves: tuple[int, ...]
    input: int

    def run(self, frame: Frame) -> None:
        x = _folded(frame.values[self.input])
        for i, number in enumerate(self.leaves):
            weight = frame.place.leaves[number]
            if frame.place.program.leaves[number].kind == "table":
                rows = ROW_NUMBERS.to(weight.device)
                weight = nn.functional.embedding(rows, weight, sparse=True).sum(0) if i % 2 else weight.sin().sum(0)
            x = x + torch.sin(x * weight.to(x.device)) / len(self.leaves)
        frame.values.append(x)


@dataclass(frozen=True)
class HookAll:
    """Hooks on many tensors. `received`: they have come in a message."""

    values: tuple[int, ...]
    number: int
    factor: float | None
    received: bool

    def run(self, frame: Frame) -> None:
        place = frame.place
        for i, value in enumerate(self.values):
            tensor, label = frame.values[value], f"hook {self.number}.{i}"
            if tensor.requires_grad:
                tensor.register_hook(place.hook(label, self.factor))
                if self.received:
                    place.hooked.add(label)


@dataclass(frozen=True)
class RetainAll:
    values: tuple[int, ...]
    number: int

    def run(self, frame: Frame) -> None:
        for i, value in enumerate(self.values):
            tensor = frame.values[value]
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()
                frame.place.retained[1000 * self.number + i] = tensor


@dataclass(frozen=True)
class ChangeAll:
    """Changes tensors in place; their names stay. `sent`: they were arguments of a call before."""

    values: tuple[int, ...]
    sent: bool

    def run(self, frame: Frame) -> None:
        for value in self.values:
            frame.values[value].mul_(0.75)


def wide_traits(program: Program) -> dict[str, bool]:
    """What can be seen of a program without running it."""
    steps = steps_of(program)
    modules = [step for step in steps if isinstance(step, Layers)]
    apart = {frozenset(module.leaves) for module in modules}
    changes = [step for step in steps if isinstance(step, ChangeAll)]
    around = [step for step in steps if isinstance(step, Checkpoint) and step.calls]
    larger = SMALLEST_LARGE
    return {
        "modules of more than 50 parameters": any(len(set(module.leaves)) > 50 for module in modules),
        "modules that share parameters": sum(map(len, apart)) > len(frozenset[int]().union(*apart)),
        "a parameter used twice in its module": any(len(set(m.leaves)) < len(m.leaves) for m in modules),
        "larger tensors among small ones": any(
            isinstance(step, Spread) and min(step.sizes) < larger <= max(step.sizes) for step in steps
        ),
        "received tensors changed in place": any(not step.sent for step in changes),
        "tensors changed after they were sent": any(step.sent for step in changes),
        "frozen leaves": any(leaf.frozen == "always" for leaf in program.leaves),
        "leaves frozen after the forward pass": any(leaf.frozen == "later" for leaf in program.leaves),
        "hooks on nodes of leaves": any(leaf.on_node for leaf in program.leaves),
        "no leaf with hooks": not any(leaf.has_hooks or leaf.kind == "module" for leaf in program.leaves),
        "checkpoints around calls": any(not step.reentrant for step in around),
        "reentrant checkpoints around calls": any(step.reentrant for step in around),
        "grad() for some leaves": any(each.asks for each in program.passes),
        "gradients of gradients": any(each.doubles for each in program.passes),
    }
