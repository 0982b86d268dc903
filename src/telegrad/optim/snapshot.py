"""Snapshot: a forward whose backward sees the parameters as they were, though another trainer has stepped meanwhile.

torch saves what backward needs. Parameters among that are copied when they are saved, and the gradients still go to the
parameters themselves. A step of an optimizer waits until no such forward runs on its worker, so a forward never sees a
half-made step. All else that was changed in place is an error in backward, as without a snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from .stepping import forward_runs


@contextlib.contextmanager
def snapshot(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Has what is computed meanwhile save copies of these parameters for its backward."""
    with forward_runs():
        saved = _Saved(params)
        with saved_tensors_hooks(saved.pack, _unpack):
            yield


class _Saved:
    """What one forward saves for its backward. Each parameter is copied once."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._addresses = {_address(param) for param in params} - {0}
        self._copies: dict[Any, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        if (address := _address(tensor)) not in self._addresses:
            return tensor, tensor._version
        key = address, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = tensor.detach().clone()
        return copy, copy._version


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:  # torch does not look at what has hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
