"""The check: one step's gradients over all workers, and those of the same model in one process."""

from __future__ import annotations

from dataclasses import dataclass

from ..optim.remote_tensor import RemoteGradient, RemoteParameter
from .model import Transformer, here
from .training import Batch, loss_of

LIMIT = 1e-10


@dataclass(frozen=True)
class Difference:
    """How far two gradients of a parameter are apart."""

    parameter: str
    owner: str
    elements: int
    largest: float  # difference of two elements
    scale: float  # the largest element

    @property
    def is_small(self) -> bool:
        return self.largest <= LIMIT  # which nan is not


def differences(model: Transformer, batch: Batch) -> list[Difference]:
    """Compares the gradients of each parameter, in float64, at the model's present values, which stay as they are."""
    values = model.state_dict()
    alone = Transformer(place=here).double()
    alone.load_state_dict(values)
    loss_of(alone, batch).backward()

    spread = Transformer().double()
    spread.load_state_dict(values)
    loss_of(spread, batch).backward()
    places = dict(spread.named_parameters())
    found = []
    for name, parameter in alone.named_parameters():
        place, expected = places[name], parameter.grad
        owner = place.on if isinstance(place, RemoteParameter) else "driver"
        gradient = place.grad
        if isinstance(gradient, RemoteGradient):
            gradient = gradient.to_here()
        assert expected is not None and gradient is not None
        largest = (gradient - expected).abs().max().item()
        found.append(Difference(name, owner, expected.numel(), largest, expected.abs().max().item()))
    return found


def in_words(difference: float) -> str:
    """Formats a difference: a plain 0 means that not one bit is different."""
    return "0" if difference == 0 else f"{difference:.1e}"
