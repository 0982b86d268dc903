"""Tensors in and out of a pickle: metadata in the skeleton, large memory beside it.

`reduce_tensor` says how a tensor is rebuilt. Small memory is copied into the skeleton; from
SHARED_MEMORY_FROM bytes on it is a pickle buffer that points at the tensor's own memory, which the
transport moves. The memory is sent as it lies where it is dense (any order of strides), else packed. The
conj and neg bits travel as bits. A tensor of another device goes through host memory, and back to its
device where the receiver has it.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch

from .config import SHARED_MEMORY_FROM

_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_DTYPE_NAMES = {v: k for k, v in _DTYPES.items()}

_REQUIRES_GRAD, _CONJ, _NEG = 1, 2, 4

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object
_PYBUF_WRITE = 0x200  # a read-only buffer would arrive read-only

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def reduce_tensor(tensor: torch.Tensor, keep: list[Any]) -> Any:
    """How pickle should save a tensor, or NotImplemented for one that knows better itself.

    `keep` gets whatever must live until the memory that pickle buffers point at was sent.
    """
    kind = type(tensor)
    if kind is torch.Tensor:
        return _reduce_plain(tensor, keep)
    if kind is torch.nn.Parameter:
        data = tensor.detach()
        return _rebuild_parameter, (data, tensor.requires_grad, dict(tensor.__dict__) or None)
    if hasattr(kind, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}
        return _rebuild_flattened, (kind, inner, context, tuple(tensor.shape), tensor.stride())
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(torch.Tensor)
        return _rebuild_subclass, (kind, plain, tensor.requires_grad, dict(tensor.__dict__) or None)


def _reduce_plain(tensor: torch.Tensor, keep: list[Any]) -> Any:
    if tensor.layout is not torch.strided:
        return _reduce_sparse(tensor)
    description = describe(tensor, keep)
    return NotImplemented if description is None else (rebuild, description)


def describe(tensor: torch.Tensor, keep: list[Any]) -> tuple[Any, ...] | None:
    """A plain tensor as the arguments of `rebuild`; None for one that has no strided memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    flags = 0
    if tensor.requires_grad:
        flags |= _REQUIRES_GRAD
        tensor = tensor.detach()
    dtype = tensor.dtype
    if dtype.is_complex and tensor.is_conj():
        flags |= _CONJ
        tensor = tensor.conj()
    if tensor.is_neg():
        flags |= _NEG
        tensor = torch._neg_view(tensor)
    device = None
    if not tensor.is_cpu:
        if tensor.is_meta:
            return None
        device = str(tensor.device)
        tensor = tensor.cpu()
    stride = None
    if not tensor.is_contiguous():
        if _is_dense(tensor):
            stride = tensor.stride()
        else:
            tensor = tensor.contiguous()
    nbytes = tensor.nbytes
    memory: Any
    if nbytes < SHARED_MEMORY_FROM:
        memory = bytearray(ctypes.string_at(tensor.data_ptr(), nbytes))  # which arrives writable
    else:
        memory = pickle.PickleBuffer(_view_of_memory(tensor.data_ptr(), nbytes, _PYBUF_WRITE))
        keep.append(tensor)
    return memory, _DTYPE_NAMES[dtype], tuple(tensor.shape), stride, flags, device


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def rebuild(
    memory: Any,
    dtype_name: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    flags: int,
    device: str | None,
) -> torch.Tensor:
    """The tensor that `describe` described."""
    dtype = _DTYPES[dtype_name]
    if not len(memory):
        tensor = torch.empty(shape, dtype=dtype)
    else:
        # The memory is ours alone and writable: the tensor stays where pickle or the transport put it.
        tensor = torch.frombuffer(memory, dtype=dtype)
        if stride is not None:
            tensor = tensor.as_strided(shape, stride)
        elif len(shape) != 1:
            tensor = tensor.view(shape)
    if device is not None and _have_device(device):
        tensor = tensor.to(device)
    if flags & _NEG:
        tensor = torch._neg_view(tensor)
    if flags & _CONJ:
        tensor = tensor.conj()
    if flags & _REQUIRES_GRAD and not tensor.is_inference():
        tensor = tensor.detach().requires_grad_() if flags != _REQUIRES_GRAD else tensor.requires_grad_()
    return tensor


def _have_device(name: str) -> bool:
    device = torch.device(name)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def _rebuild_parameter(
    data: torch.Tensor, requires_grad: bool, state: dict[str, Any] | None
) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(data, requires_grad)
    if state:
        parameter.__dict__.update(state)
    return parameter


def _rebuild_subclass(
    kind: type[torch.Tensor], plain: torch.Tensor, requires_grad: bool, state: dict[str, Any] | None
) -> torch.Tensor:
    tensor = plain.as_subclass(kind)
    if state:
        tensor.__dict__.update(state)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _rebuild_flattened(
    kind: Any, inner: dict[str, Any], context: Any, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    return kind.__tensor_unflatten__(inner, context, shape, stride)


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    requires_grad = tensor.requires_grad
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
        return _rebuild_coo, (*parts, tuple(tensor.shape), tensor.is_coalesced(), requires_grad)
    if tensor.layout in _COMPRESSED:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer = tensor.crow_indices() if by_row else tensor.ccol_indices()
        inner = tensor.col_indices() if by_row else tensor.row_indices()
        layout = str(tensor.layout).removeprefix("torch.")
        return _rebuild_compressed, (
            outer,
            inner,
            tensor.values(),
            tuple(tensor.shape),
            layout,
            requires_grad,
        )
    return NotImplemented


def _rebuild_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_compressed(
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: str,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=getattr(torch, layout), check_invariants=False
    )
    return tensor.requires_grad_() if requires_grad else tensor
