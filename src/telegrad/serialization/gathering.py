"""Tensors that are alike, in a message of many: they are described together, as one tensor that holds them all, which
costs a fraction of what each takes by itself. They arrive with memory of their own all the same.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from .._torch import dual_level, len_torch_dispatch_stack, transforms
from ..options import LEAST_COPIED, MOST_COPIED, SHARED_MEMORY_FROM
from .pickling_state import Outgoing
from .tensors import DTYPES, EXPANDED_FROM, REQUIRES_GRAD, describe

_ENOUGH = 4  # tensors that are alike; fewer are described faster one by one
# Of the types that torch can copy in bulk, those that people use.
_GATHERED = frozenset((
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
))  # fmt: skip
_is_contiguous, _is_neg, _address = torch.Tensor.is_contiguous, torch.Tensor.is_neg, torch.Tensor.data_ptr
_alike = operator.attrgetter("dtype", "shape", "layout", "is_cpu", "requires_grad")


def gather(
    values: Sequence[Any], positions: Collection[int], found: dict[Any, Any], message: Outgoing
) -> Collection[int]:
    """Adds to `found` descriptions of tensors that are alike: small, plain, packed, of one type and shape. By their
    positions, it is the description of each of them, but with the memory of all. Returns the positions of the others,
    which are left for `describe`."""
    if message.targets and "cpu" in message.targets:
        return positions
    if dual_level() >= 0 or transforms() or len_torch_dispatch_stack():  # these would come into stack()
        return positions
    left = set(positions)
    try:
        groups: dict[Any, list[int]] = {}
        for position in positions:
            groups.setdefault(_alike(values[position]), []).append(position)
        for (dtype, shape, layout, is_cpu, requires_grad), places in groups.items():
            nbytes = shape.numel() * dtype.itemsize
            if len(places) < _ENOUGH or not 0 < nbytes < SHARED_MEMORY_FROM or dtype not in _GATHERED:
                continue
            if layout is not torch.strided or not is_cpu:
                continue
            tensors = [values[place] for place in places]
            if 1 in shape or not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)):
                stride = tensors[0].new_empty(shape).stride()
                places = [place for place in places if _is_packed(values[place], stride, nbytes)]
                tensors = [values[place] for place in places]
            if len(tensors) < _ENOUGH or not all(map(_address, tensors)):
                continue
            together = tensors[0].new_empty((len(tensors), *shape))
            with torch.no_grad():  # into a tensor of ours: autocast would look at the types
                torch.stack(tensors, out=together)
            memory, dtype_name, _, stride, flags, _ = describe(together, message)  # type: ignore[misc]
            if requires_grad:
                flags |= REQUIRES_GRAD
            found[tuple(places)] = memory, dtype_name, tuple(shape), stride[1:], flags, None
            left.difference_update(places)
    except RuntimeError:  # one has names, or no shape: `describe` knows what to do
        pass
    return sorted(left)


def _is_packed(tensor: torch.Tensor, stride: tuple[int, ...], nbytes: int) -> bool:
    """Whether `describe` sends a tensor with that stride."""
    own = tensor.stride()
    if own != stride and (nbytes >= EXPANDED_FROM or 0 not in own or tensor.is_contiguous()):
        return False
    return not tensor.is_neg()


def rebuild_gathered(
    count: int,
    detached: bool,
    memory: Any,
    dtype_name: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    flags: int,
    device: None,
) -> Sequence[torch.Tensor]:
    """The tensors that `gather` has found. Each has memory of its own, but for `detached` ones that are copied when
    they get their history."""
    dtype, size = DTYPES[dtype_name], len(memory) // count
    whole = memory if type(memory) is bytearray else bytearray(memory)
    if detached and size <= MOST_COPIED and count >= LEAST_COPIED and shape:
        together = torch.frombuffer(whole, dtype=dtype).view(-1, *shape[1:])
        return torch.unsafe_split(together, shape[0])
    tensors = [torch.frombuffer(whole[at : at + size], dtype=dtype) for at in range(0, count * size, size)]
    if len(shape) != 1:
        for tensor in tensors:
            tensor.as_strided_(shape, stride)
    if flags and not detached:
        for tensor in tensors:
            tensor.requires_grad_()
    return tensors
