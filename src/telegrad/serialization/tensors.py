"""Tensors in and out of a pickle: metadata in the skeleton, large memory beside it.

`reduce_tensor` says how a tensor is rebuilt. Small memory is copied into the skeleton; from SHARED_MEMORY_FROM bytes on
it is a pickle buffer that points at the tensor's own memory, which the transport moves. The memory is sent as it lies
where it is dense (any order of strides), else packed. The conj and neg bits travel as bits. A tensor of another device
goes through host memory. Its description names the device that it is to arrive on: see devices.py.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .._torch import (
    DisableTorchFunctionSubclass,
    disabled_torch_dispatch,
    dual_level,
    get_object_state,
    make_per_channel_quantized,
    make_per_tensor_quantized,
    neg_view,
    set_conj,
    set_neg,
    set_object_state,
)
from ..errors import EncodeError
from ..options import SHARED_MEMORY_FROM
from ..primitives.futures import use_devices
from .device_lane import on_host, put_on_lane, staged, take_from_lane
from .devices import have_device
from .pickling_state import Outgoing, arriving
from .severed import severed
from .transforms import refuse_dual, without_memory

DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_DTYPE_NAMES = {v: k for k, v in DTYPES.items()}

REQUIRES_GRAD, _CONJ, _NEG = 1, 2, 4
FLAGS = 4  # their place in a description

# Arrays, not memoryviews, as views of memory: where the garbage collector breaks up a cycle with a view of a
# memoryview in it, Python 3.11 crashes.
_array_type = functools.lru_cache(maxsize=4096)(lambda nbytes: ctypes.c_char * nbytes)

# ctypes.string_at is Python code. A bytearray arrives writable.
_copied = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
EXPANDED_FROM = 4096  # bytes; what is smaller is packed faster than it is taken apart

# Of a tensor of torch's own classes; None if it has none. To ask for its __dict__ would make one.
attributes_of = object.__getstate__

_BY_ROW = {torch.sparse_csr, torch.sparse_bsr}
_BY_COLUMN = {torch.sparse_csc, torch.sparse_bsc}

_TORCHS_WAYS = {torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__}


def _saves_itself(kind: type[torch.Tensor]) -> bool:
    """Whether a subclass has a way of its own to be saved: it knows better than we do."""
    return kind.__reduce_ex__ not in _TORCHS_WAYS or kind.__reduce__ is not torch.Tensor.__reduce__


def reduce_tensor(tensor: torch.Tensor, message: Outgoing) -> Any:
    """How pickle should save a tensor, or NotImplemented for one that knows better itself.

    `keep` gets what must live until the memory that pickle buffers point at was sent. `targets` says where tensors of
    which device are to arrive; None: on the device of the same name.
    """
    kind = type(tensor)
    if kind is torch.Tensor and attributes_of(tensor) is None:
        return _reduce_plain(tensor, message)
    with DisableTorchFunctionSubclass():
        if dual_level() >= 0:
            refuse_dual(tensor)
        if _saves_itself(kind):
            return NotImplemented
        if hasattr(kind, "__tensor_flatten__"):
            return _reduce_flattened(tensor)
        if kind.__torch_dispatch__ is not disabled_torch_dispatch:
            return NotImplemented
        plain = torch.Tensor._make_subclass(torch.Tensor, tensor, False)
        return _rebuild_subclass, (kind, plain, tensor.requires_grad, _state(tensor))


class _Next:
    """Stands, in a pickle, for a function that returns the next of the tensors that stand apart."""

    def __init__(self, make: Callable[[], Callable[[], torch.Tensor]]) -> None:
        self._make = make  # that function, where the pickle arrives

    def __call__(self) -> torch.Tensor:  # pickle wants to know that it can be called
        raise NotImplementedError

    def __reduce__(self) -> Any:
        return self._make, ()


def _next_tensor() -> Callable[[], torch.Tensor]:
    return arriving().take


def _next_parameter() -> Callable[[], torch.Tensor]:
    take = arriving().take
    return lambda: _with_class(torch.nn.Parameter, take(), None)


# How pickle saves what stands apart. Nothing is allocated for a tensor: pickles are read in the order in which they are
# written, and the tensors are in that order, too.
NEXT_TENSOR = (_Next(_next_tensor), ())
_NEXT_PARAMETER = (_Next(_next_parameter), ())


class _Plain:
    """A tensor that stands apart without its class and attributes, which are in the pickle."""

    def __init__(self, tensor: torch.Tensor, apart: list[torch.Tensor]) -> None:
        self._tensor, self._apart = tensor, apart

    def __reduce__(self) -> Any:
        self._apart.append(self._tensor)
        return NEXT_TENSOR


def reduce_tracked(tensor: torch.Tensor, apart: list[torch.Tensor]) -> Any:
    """How pickle should save a tensor that requires grad, in a message whose gradients will be asked for: it stands
    apart.

    Raises:
        EncodeError: it is of a kind that gradients cannot be followed through.
    """
    kind = type(tensor)
    if dual_level() >= 0:
        refuse_dual(tensor)
    if kind is torch.Tensor and attributes_of(tensor) is None:
        apart.append(tensor)
        return NEXT_TENSOR
    if kind is torch.nn.Parameter and attributes_of(tensor) is None:
        apart.append(tensor)
        return _NEXT_PARAMETER
    if isinstance(tensor, UninitializedTensorMixin):
        return NotImplemented  # it has no values yet, and so no gradient
    with DisableTorchFunctionSubclass():
        if _saves_itself(kind) or kind.__torch_dispatch__ is not disabled_torch_dispatch:
            raise EncodeError(
                f"a {kind.__name__} that requires grad cannot be followed to another worker: its class says itself how "
                "it is saved. Send the plain tensors that it is made of, or its detach()"
            )
        return _with_class, (kind, _Plain(tensor, apart), _state(tensor))


def reduce_severed(tensor: torch.Tensor, why: str) -> Any:
    """How pickle should save a tensor that loses its history: see severed.py.

    Raises:
        EncodeError: its class says itself how it is saved.
    """
    kind = type(tensor)
    if isinstance(tensor, UninitializedTensorMixin):
        return NotImplemented  # it has no values yet, and so no history
    if dual_level() >= 0:
        refuse_dual(tensor)
    with DisableTorchFunctionSubclass():
        if _saves_itself(kind) or kind.__torch_dispatch__ is not disabled_torch_dispatch:
            raise EncodeError(f"a {kind.__name__} that requires grad cannot be sent in {why}")
        plain = torch.Tensor._make_subclass(torch.Tensor, tensor, False)
        return _rebuild_severed, (kind, plain, _state(tensor), why)


def _rebuild_severed(kind: type[torch.Tensor], plain: torch.Tensor, state: Any, why: str) -> torch.Tensor:
    return _with_class(kind, severed(plain, why), state)


def _with_class(kind: type[torch.Tensor], tensor: torch.Tensor, state: Any) -> torch.Tensor:
    """Gives a tensor that has a history already its class and attributes."""
    if issubclass(kind, torch.nn.Parameter):
        # A Parameter is a leaf, and this tensor has a history. torch takes for a Parameter what says that it is one.
        tensor._is_param = True
    elif kind is not torch.Tensor:
        with torch.enable_grad():
            tensor = tensor.as_subclass(kind)
    if state is not None:
        _set_state(tensor, state)
    return tensor


def _state(tensor: torch.Tensor) -> Any:
    """The attributes that a tensor was given, in its __dict__ or in slots; None if there are none."""
    state = get_object_state(tensor)
    return dict(state) or None if isinstance(state, dict) else state


def _reduce_plain(tensor: torch.Tensor, message: Outgoing) -> Any:
    if tensor.layout is not torch.strided:
        return _reduce_sparse(tensor)
    if tensor.is_quantized:
        return _reduce_quantized(tensor)
    description = describe(tensor, message)
    return NotImplemented if description is None else (rebuild, description)


def describe(tensor: torch.Tensor, message: Outgoing) -> tuple[Any, ...] | None:
    """A plain tensor as the arguments of `rebuild`; None for one with more to it than strided memory.

    Raises:
        UnmappedDeviceError: the message's targets are strict, and the tensor's device is not among them.
        EncodeError: a CUDA graph is being captured; or the tensor has no memory, or a tangent: see transforms.py.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    if dual_level() >= 0:
        refuse_dual(tensor)
    given, targets, flags = tensor, message.targets, 0
    if tensor.requires_grad:
        flags |= REQUIRES_GRAD
        tensor = tensor.detach()
    dtype = tensor.dtype
    if dtype.is_complex and tensor.is_conj():
        flags |= _CONJ
        tensor = tensor.conj()
    if tensor.is_neg():
        flags |= _NEG
        tensor = neg_view(tensor)
    device = None
    if not tensor.is_cpu:
        if tensor.is_meta:
            return None
        device = str(tensor.device)
        if targets is not None:
            device = targets[device]
    elif targets:
        device = targets.get("cpu")
    shape, stride = tensor.shape, tensor.stride()
    if not tensor.is_contiguous():
        if 0 not in stride:
            if not _is_dense(tensor):
                tensor = tensor.contiguous()
                stride = tensor.stride()
        elif tensor.nbytes < EXPANDED_FROM:
            tensor = tensor.contiguous()
            stride = tensor.stride()
        else:
            # Expanded, as many gradients are: what is there once is sent once.
            tensor = tensor[tuple([slice(0, 1) if step == 0 else slice(None) for step in stride])]
            if not _is_dense(tensor):
                tensor = tensor.contiguous()
            stride = tuple([0 if step == 0 else own for step, own in zip(stride, tensor.stride(), strict=True)])
    memory: Any
    if not tensor.is_cpu:
        if (memory := put_on_lane(given, tensor, device, message)) is not None:
            return memory, _DTYPE_NAMES[dtype], tuple(shape), stride, flags, device
        tensor = on_host(tensor)
    nbytes = tensor.nbytes
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise without_memory(given) from error
    if not address and nbytes:
        raise without_memory(given)
    if nbytes < SHARED_MEMORY_FROM:
        memory = _copied(address, nbytes)
    else:
        memory = pickle.PickleBuffer(_array_type(nbytes).from_address(address))
        message.keep.append(tensor)
    return memory, _DTYPE_NAMES[dtype], tuple(shape), stride, flags, None if device == "cpu" else device


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
    stride: tuple[int, ...],
    flags: int,
    device: str | None,
    detached: bool = False,
) -> torch.Tensor:
    """The tensor that `describe` described; `detached`, whether or not it required grad."""
    dtype = DTYPES[dtype_name]
    if type(memory) is int:
        tensor = take_from_lane(memory, device).view(dtype)
        if len(shape) != 1 or stride != (1,):
            tensor.as_strided_(shape, stride)
    elif not len(memory):
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        # The memory is ours alone and writable: the tensor stays where pickle or the transport put it.
        tensor = torch.frombuffer(memory, dtype=dtype)
        if device is not None:
            tensor = staged(tensor, device)
        if len(shape) != 1 or stride != (1,):
            # In place. What view() makes in no_grad could not be changed in place where gradients are recorded.
            tensor.as_strided_(shape, stride)
    if device is not None and have_device(device):
        tensor = tensor.to(device)
        use_devices(tensor.device)
    if flags:
        if flags & _NEG:
            set_neg(tensor, True)
        if flags & _CONJ:
            set_conj(tensor, True)
        if flags & REQUIRES_GRAD and not detached:
            tensor.requires_grad_()
    return tensor


def _rebuild_subclass(kind: type[torch.Tensor], plain: torch.Tensor, requires_grad: bool, state: Any) -> torch.Tensor:
    if kind is torch.Tensor:
        tensor = plain.requires_grad_(requires_grad)
    else:
        tensor = torch.Tensor._make_subclass(kind, plain, requires_grad)
    if state is not None:
        _set_state(tensor, state)
    return tensor


def _reduce_flattened(tensor: Any) -> Any:
    """A wrapper of other tensors, taken apart in the way that torch.compile does it."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    outer = (tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
    return _rebuild_flattened, (type(tensor), inner, context, *outer)


def _rebuild_flattened(
    kind: Any,
    inner: dict[str, Any],
    context: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Any:
    tensor = kind.__tensor_unflatten__(inner, context, shape, stride)
    if requires_grad and not tensor.requires_grad:
        tensor.requires_grad_()
    return tensor


def _set_state(tensor: torch.Tensor, state: Any) -> None:
    setter = getattr(type(tensor), "__setstate__", None)
    if setter is not None and setter is not torch.Tensor.__setstate__:
        setter(tensor, state)
    else:
        set_object_state(tensor, state)


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    """How pickle should save a sparse tensor: by the dense tensors that it is made of."""
    requires_grad, shape, layout = tensor.requires_grad, tuple(tensor.shape), tensor.layout
    tensor = tensor.detach()
    arguments: tuple[Any, ...]
    options: dict[str, bool] = {}
    if layout is torch.sparse_coo:
        arguments, options = (tensor._indices(), tensor._values(), shape), {"is_coalesced": tensor.is_coalesced()}
    elif layout in _BY_ROW:
        arguments = (tensor.crow_indices(), tensor.col_indices(), tensor.values(), shape)
    elif layout in _BY_COLUMN:
        arguments = (tensor.ccol_indices(), tensor.row_indices(), tensor.values(), shape)
    else:
        return NotImplemented
    return _rebuild_sparse, (str(layout).removeprefix("torch."), arguments, options, requires_grad)


def _rebuild_sparse(layout: str, arguments: Any, options: dict[str, Any], requires_grad: bool) -> torch.Tensor:
    if layout == "sparse_coo":
        tensor = torch.sparse_coo_tensor(*arguments, check_invariants=False, **options)
    else:
        tensor = torch.sparse_compressed_tensor(*arguments, layout=getattr(torch, layout), check_invariants=False)
    return tensor.requires_grad_(requires_grad)


def _reduce_quantized(tensor: torch.Tensor) -> Any:
    """By its integers: torch's own way is slow, and warns."""
    if tensor.qscheme() is torch.per_tensor_affine:
        return _rebuild_quantized, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    if tensor.qscheme() is torch.per_channel_affine:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return _rebuild_quantized, (tensor.int_repr(), scales, zero_points, tensor.q_per_channel_axis())
    return NotImplemented


def _rebuild_quantized(integers: torch.Tensor, scale: Any, zero_point: Any, axis: int | None = None) -> Any:
    if axis is None:
        return make_per_tensor_quantized(integers, scale, zero_point)
    return make_per_channel_quantized(integers, scale, zero_point, axis)
