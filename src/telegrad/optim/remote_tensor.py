"""Parameters of other workers, as a module or an optimizer here sees them.

    RemoteParameter   stands for a parameter of a RemoteModule, in `parameters()` of it and of every module around it
    RemoteBuffer      for a buffer
    RemoteGradient    for the `.grad` of a parameter there

They say what they are (`shape`, `numel()`, `dtype`, `requires_grad`) and have no values here. `requires_grad_()` and
`grad = None` are carried to the owner. Everything else is refused: an optimizer or a function of torch's that took them
for tensors of this process would leave them out, or change a copy. One parameter has one such object on each worker,
however many RemoteModules lead to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from .. import rpc
from .._torch import DisableTorchFunctionSubclass
from ..errors import GradientError
from ..gradients import adding
from ..gradients.plain import untracked
from ..primitives import current
from ..primitives.current import current_worker
from ..rref import RRef, value_here
from ..serialization.handles import Handle
from ..serialization.severed import IN_GRADIENT, severed
from .owner import grads, settle

__all__ = ["RemoteBuffer", "RemoteGradient", "RemoteParameter", "RemoteTensor"]

Key = tuple[int, int]  # the owner's id, and the tensor's address there: it lives as long as a handle to it
Row = tuple[str, Key, RRef[Any] | None, tuple[int, ...], torch.dtype, bool]  # of a tensor: see to_rows()

# Attributes and methods that are answered here. Not `is_leaf`: an optimizer of torch's asks for it first, and must not
# take these. On the CPU they are for programs that take their inputs to the device of the parameters: a RemoteModule
# takes them on to its own.
_ANSWERED = frozenset(
    ("shape", "size", "dim", "ndim", "numel", "nelement", "__len__", "dtype", "element_size", "itemsize", "nbytes")
    + ("is_floating_point", "is_complex", "layout", "is_sparse", "is_quantized", "is_nested", "names", "__hash__")
    + ("device", "is_cpu", "is_cuda", "is_meta", "requires_grad", "grad_fn", "retains_grad")
)

# By worker of this process: all that live.
_known: WeakKeyDictionary[Any, WeakValueDictionary[Key, Any]] = WeakKeyDictionary()


class RemoteTensor(torch.Tensor):
    """Base of the three."""

    rref: RRef[Any]  # to the tensor; of a gradient: to its parameter
    key: Key
    on: str  # the owner's name

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        method = getattr(func, "__name__", str(func))
        is_attribute = method in ("__get__", "__set__")
        name = getattr(func.__self__, "__name__", "an attribute") if is_attribute else method
        if name in _ANSWERED and method != "__set__":
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        tensor = args[0] if args else None
        if isinstance(tensor, RemoteParameter | RemoteBuffer):
            if name in ("requires_grad", "requires_grad_"):
                tensor._require_grad(*args[1:], **(kwargs or {}))
                return None if is_attribute else tensor  # torch never lets go of what a setter returns
            if name == "grad" and method == "__get__":
                return tensor._gradient()
            if name == "grad" and args[1] is None:
                return tensor._clear_gradient(True)
        elif isinstance(tensor, RemoteGradient):  # Module.zero_grad(set_to_none=False) asks for these
            if name == "zero_":
                tensor._clear_gradient(False)
                return tensor
            if name == "requires_grad_" and args[1:] == (False,):
                return tensor
        raise _refusal(name, args)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuses what torch does without asking __torch_function__: torch.tensor() copies so."""
        raise _refusal(str(func), args)

    def to_here(self) -> torch.Tensor:
        """Fetches the values. Gradients flow back through those of a parameter."""
        return self.rref.to_here()  # type: ignore[no-any-return]

    def _require_grad(self, requires_grad: bool = True) -> None:
        rpc.rpc_sync(self.rref.entry.owner, _require_grad, (self.rref.entry.id, requires_grad))
        with DisableTorchFunctionSubclass():
            torch.Tensor.requires_grad_(self, requires_grad)

    def _clear_gradient(self, set_to_none: bool) -> None:
        check_no_pass("clearing a gradient", (self.rref.entry.owner,))
        rpc.rpc_sync(self.rref.entry.owner, _clear_gradient, (self.rref.entry.id, set_to_none))

    def _gradient(self) -> RemoteGradient | None:
        check_no_pass("`.grad`", (self.rref.entry.owner,))
        found = rpc.rpc_sync(self.rref.entry.owner, _describe_gradient, (self.rref.entry.id,))
        if found is None:
            return None
        gradient: RemoteGradient = _made(RemoteGradient, *found)
        gradient.rref, gradient.key, gradient.on = self.rref, self.key, self.on
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype}, on={self.on!r})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def as_subclass(self, cls: Any) -> Any:  # torch does not ask __torch_function__
        raise _refusal("as_subclass", (self,))

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal("copy.deepcopy", (self,))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickle", (self,))


class _Sendable(RemoteTensor, Handle):
    """In a message it goes as its RRef."""

    rebuild = staticmethod(RRef.rebuild)

    @property
    def entry(self) -> Any:
        return self.rref.entry


class RemoteParameter(_Sendable, nn.Parameter):
    """A parameter that is on another worker. `rref` is the handle to it, `to_here()` fetches its values.

    Its shape, dtype and `requires_grad` are as of the last `parameters()`.
    """


class RemoteBuffer(_Sendable):
    """A buffer that is on another worker."""


class RemoteGradient(RemoteTensor):
    """The `.grad` of a parameter on another worker."""

    def to_here(self) -> torch.Tensor:
        """Fetches a copy."""
        check_no_pass("`.grad`", (self.rref.entry.owner,))
        with untracked():
            found = rpc.rpc_sync(self.rref.entry.owner, _grad, (self.rref.entry.id,))
        if found is None:
            raise RuntimeError(f"the parameter on worker {self.on!r} has no gradient any more")
        # With create_graph=True it has a history there, which does not come along.
        return severed(found.detach(), IN_GRADIENT) if found.requires_grad else found


def check_no_pass(what: str, owners: Iterable[int]) -> None:
    """
    Raises:
        GradientError: this is in a hook of a pass that puts gradients into `.grad`. On other workers they are there
            when it has ended, and it waits for the hook.
    """
    pass_id = current.current_pass_id()
    if not pass_id:
        return
    worker = current_worker()
    local = worker.engine.parts.passes.get(pass_id)
    begin = None if local is None else local.begin
    if begin is None:  # this was called from a hook on another worker
        adds = not current.current_context_id()
    else:
        adds = begin.into_grad and begin.wanted is None
    others = sorted({worker.look_up_name(owner) for owner in owners if owner != worker.id}) if adds else []
    if others:
        raise GradientError(
            f"{what} in a hook of a backward pass that still runs: gradients on other workers, here {others}, are in "
            "`.grad` when backward() has returned. Do this after backward()"
        )


def _refusal(name: str, args: Any) -> RuntimeError:
    found = _first_of(args)
    what = "a tensor of another worker" if found is None else repr(found)
    return RuntimeError(
        f"{name}: refused for {what}, since its values are not in this process. What there is for such tensors: "
        "telegrad.optim.DistributedOptimizer and GradScaler; telegrad.nn.utils.clip_grad_norm_ and clip_grad_value_; "
        "DistributedDataParallel around the modules of this process only; state_dict() to save them. to_here() fetches "
        "the values; a call to that worker with `rref` can change them"
    )


def _first_of(args: Any) -> RemoteTensor | None:
    for arg in args:
        if isinstance(arg, RemoteTensor):
            return arg
        if isinstance(arg, list | tuple) and (found := _first_of(arg)) is not None:
            return found
    return None


def _made(cls: type[Any], shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False) -> Any:
    with torch.inference_mode(False):
        return torch.Tensor._make_subclass(cls, _filler(shape, dtype), requires_grad)


def _filler(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor of one element's memory. If ever it is taken for the values, that shows."""
    one = torch.zeros((), dtype=dtype, device="cpu")
    return (one.fill_(math.nan) if dtype.is_floating_point or dtype.is_complex else one).expand(shape)


# -- from an owner to here ---------------------------------------------------------------------------------


def from_rows(cls: type[Any], rows: Iterable[Row]) -> list[tuple[str, torch.Tensor]]:
    """Returns the objects that stand for an owner's tensors, with their names; for a tensor of this worker itself,
    that."""
    worker = current_worker()
    known = _known.setdefault(worker, WeakValueDictionary())
    found: list[tuple[str, torch.Tensor]] = []
    for name, key, rref, shape, dtype, requires_grad in rows:
        if rref is not None and rref.is_owner():
            found.append((name, rref.local_value()))
            continue
        tensor = known.get(key)
        if tensor is None:
            assert rref is not None
            new = _made(cls, shape, dtype, requires_grad)
            new.rref, new.key, new.on = rref, key, rref.owner_name()
            tensor = known.setdefault(key, new)
        with torch.inference_mode(False), DisableTorchFunctionSubclass():  # it may have changed there
            if tensor.shape != shape or tensor.dtype != dtype:
                tensor.data = _filler(shape, dtype)
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        found.append((name, tensor))
    return found


# -- run by the owner --------------------------------------------------------------------------------------


def to_rows(named: Iterable[tuple[str, torch.Tensor]], known: Collection[Key]) -> Iterator[Row]:
    """Describes tensors of a module of this worker, with handles to those that the caller has none for. A RemoteModule
    may be among its parts."""
    here, known = current_worker().id, set(known)
    handles: dict[Key, RRef[Any]] = {}
    for name, tensor in named:
        remote = tensor if isinstance(tensor, RemoteTensor) else None
        key = (here, id(tensor)) if remote is None else remote.key
        rref = handles.get(key)
        if rref is None and key not in known:
            rref = handles[key] = RRef(tensor) if remote is None else remote.rref
        shape = (0,) if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
        yield name, key, rref, shape, tensor.dtype, tensor.requires_grad


def _require_grad(id: int, requires_grad: bool) -> None:
    value_here(id).requires_grad_(requires_grad)


def _grad(id: int) -> torch.Tensor | None:
    settle()
    return grads([value_here(id)])[0]


def _describe_gradient(id: int) -> tuple[tuple[int, ...], torch.dtype] | None:
    gradient = _grad(id)
    return None if gradient is None else (tuple(gradient.shape), gradient.dtype)


def _clear_gradient(id: int, set_to_none: bool) -> None:
    tensor = value_here(id)
    settle()
    adding.clear((tensor,), set_to_none)
