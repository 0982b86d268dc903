"""The check: one step's gradients over all workers, and those of the same model in one process."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .. import autograd, rpc
from ..rpc import RRef
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
    handles = spread.handles()
    found = []
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(spread, batch)])
        for name, parameter in alone.named_parameters():
            handle, expected = handles[name], parameter.grad
            assert expected is not None
            gradient = rpc.rpc_sync(handle.owner(), gradient_of, args=(context_id, handle))
            largest = (gradient - expected).abs().max().item()
            found.append(Difference(name, handle.owner_name(), expected.numel(), largest, expected.abs().max().item()))
    return found


def gradient_of(context_id: int, handle: RRef[nn.Parameter]) -> Tensor:
    """Runs on the owner of a parameter."""
    return autograd.get_gradients(context_id)[handle.local_value()]


def in_words(difference: float) -> str:
    """Formats a difference: a plain 0 means that not one bit is different."""
    return "0" if difference == 0 else f"{difference:.1e}"
