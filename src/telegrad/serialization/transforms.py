"""Tensors of torch's function transforms: they stand for more than their values, and cannot be sent.

A dual tensor has a tangent, which forward-mode AD carries along. One that torch.func has wrapped is a batch, or is
being differentiated. Another worker would see the values alone, and the transform would give wrong results there.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from .._torch import (
    DisableTorchFunctionSubclass,
    is_batched,
    is_functional,
    is_wrapped_by_transform,
    transform_level,
    transforms,
)
from ..errors import EncodeError

_NAMES = {"Vmap": "vmap", "Grad": "grad (or vjp, jacrev)", "Jvp": "jvp (or jacfwd)", "Functionalize": "functionalize"}


def refuse_dual(tensor: torch.Tensor) -> None:
    """Refuses a tensor with a tangent.

    Raises:
        EncodeError: it has one.
    """
    with DisableTorchFunctionSubclass():
        if is_wrapped_by_transform(tensor):
            raise without_memory(tensor)
        if forward_ad.unpack_dual(tensor).tangent is None:
            return
    raise EncodeError(
        f"a tensor of shape {tuple(tensor.shape)} has a forward-mode tangent (torch.autograd.forward_ad), and tangents "
        "do not travel: make the dual tensor inside the remote function, or send the two tensors of unpack_dual()"
    )


def without_memory(tensor: torch.Tensor) -> EncodeError:
    """Makes the error of a tensor without memory, which a transform of torch.func has wrapped in most cases."""
    shape = tuple(tensor.shape)
    if not is_wrapped_by_transform(tensor):
        return EncodeError(
            f"a tensor of shape {shape} has no memory: its storage was freed, or it is not a real tensor"
        )
    return EncodeError(
        f"a tensor of shape {shape} belongs to torch.func.{_transform_of(tensor)}, and transforms do not reach other "
        "workers: apply the transform inside the remote function"
    )


def _transform_of(tensor: torch.Tensor) -> str:
    if is_batched(tensor):
        return _NAMES["Vmap"]
    if is_functional(tensor):
        return _NAMES["Functionalize"]
    level = transform_level(tensor)
    for transform in transforms() or ():
        if transform.level() == level:
            return _NAMES[transform.key().name]
    return f"{_NAMES['Grad']} or {_NAMES['Jvp']}"  # on another thread, or ended
