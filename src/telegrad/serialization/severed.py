"""Severed tensors: they had a history where they were sent from, and came in a pickle that carries values only.

A severed tensor arrives with its values, and with a node in the place of its history. A backward pass that reaches that
node fails and says why: as a leaf the tensor would take the gradient, and what it was computed from would get none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import DisableTorchFunctionSubclass
from ..errors import GradientError

IN_EXCEPTION = (
    "an exception, which carries values and no history: return the tensor instead of raising it, or detach() it"
)
IN_DEFINITION = (
    "the globals, defaults or attributes of a function or class that goes by value, and these are copies: pass the "
    "tensor as an argument, or detach() it"
)
IN_MODULE = "a module or its state, which goes by value: pass the tensor as an argument of a call, or detach() it"
IN_GRADIENT = (
    "`.grad` of a parameter of another worker, of which to_here() fetches a copy: compute what depends on it on that "
    "worker, use telegrad.autograd.grad(create_graph=True), or detach() it"
)


class _Severed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: Sequence[torch.Tensor], text: str) -> torch.Tensor:
        ctx.text = text
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(ctx.text)


def severed(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Gives a tensor without history one whose backward raises a GradientError, which names the place it came in."""
    text = f"a backward pass reached a tensor of shape {tuple(tensor.shape)} that came in {where}"
    with torch.inference_mode(False), torch.enable_grad(), DisableTorchFunctionSubclass():
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        return _Severed.apply(anchor, (tensor,), text)  # type: ignore[no-any-return]
