"""Objects that torch knows by names of its own, in a pickle: TorchScript's functions and modules, and operators.

By reference where the callee can import them; scripted ones are saved otherwise, by torch.jit.save, which knows no
history. So the tensors of a scripted module whose gradients belong to the sender are taken out of what it saves. They
go beside it, as any tensors do (see values.py), and take their places in the module that was loaded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
from typing import Any

import torch

from .._torch import (
    ConcreteModuleType,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    dual_level,
    find_builtin,
    tree_leaves,
    wrap_cpp_module,
)
from ..errors import EncodeError
from .namespaces import MAIN, module_attribute
from .pickling_state import Outgoing
from .transforms import refuse_dual

_SCRIPTED = (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch.ScriptMethod)
_OPERATORS = (OpOverloadPacket, OpOverload)
_NAMED_BY_TORCH = _SCRIPTED + _OPERATORS

# Of a scripted module: the path of the submodule, the attribute's name, and its value, a tensor or some in a container.
_Attribute = tuple[str, str, Any]


def is_named_by_torch(obj: Any) -> bool:
    return isinstance(obj, _NAMED_BY_TORCH)


def takes_tensors_only(function: Any) -> bool:
    """Whether torch's RPC calls it in C++, where a parameter is a tensor like any other."""
    return isinstance(function, torch.jit.ScriptFunction) or find_builtin(function) is not None


def reduce_named_by_torch(obj: Any, message: Outgoing) -> Any:
    """How pickle should save it.

    Raises:
        EncodeError: a scripted module has a tensor whose gradient could not come back.
    """
    if isinstance(obj, _OPERATORS):
        packet = obj._overloadpacket if isinstance(obj, OpOverload) else obj
        path = packet._qualified_op_name.split("::")
        return _operator, (*path, obj._overloadname) if obj is not packet else tuple(path)
    if isinstance(obj, torch.ScriptMethod):
        return getattr, (wrap_cpp_module(obj.owner), obj.name)
    if isinstance(obj, torch.jit.ScriptFunction):
        # torch's own name for it: "__torch__.package.module.function", with no module for __main__
        *path, name = obj.qualified_name.removeprefix("__torch__.").split(".")
        module = ".".join(path) or "__main__"
        if getattr(sys.modules.get(module), name, None) is obj and (module not in MAIN or message.same_main):
            return module_attribute, (module, name)
    is_function = isinstance(obj, torch.jit.ScriptFunction)  # its tensors are constants, which have no history
    plain, beside = (obj, []) if is_function else _taken_out(obj, message)
    file = io.BytesIO()
    torch.jit.save(plain, file)
    return _load, (file.getvalue(), is_function, beside)


def _operator(*path: str) -> Any:
    return functools.reduce(getattr, path, torch.ops)


def _load(data: bytes, is_function: bool, beside: list[_Attribute]) -> Any:
    loaded = torch.jit.load(io.BytesIO(data))
    parts = dict(loaded.named_modules(remove_duplicate=False)) if beside else {}
    for path, name, value in beside:
        parts[path]._c.setattr(name, value)
    return loaded.forward if is_function else loaded


def _taken_out(module: torch.jit.ScriptModule, message: Outgoing) -> tuple[torch.jit.ScriptModule, list[_Attribute]]:
    """Takes the tensors that must not arrive as leaves out of a copy of a scripted module; the attributes with them.

    Raises:
        EncodeError: such a tensor is not in an attribute of a module; or one has a tangent.
    """
    if message.tracked is None and not message.severed and dual_level() < 0:
        return module, []
    with torch.no_grad(), _TakingOut(message) as taking:
        copied = copy.deepcopy(module._c)
    if dual_level() >= 0:
        for tensor in taking.seen:
            refuse_dual(tensor)
    if not taking.taken:
        return module, []
    found, left = list[_Attribute](), dict(taking.taken)
    for path, part in module.named_modules():
        for name in ConcreteModuleType.from_jit_type(part._c._type()).get_attributes():
            with contextlib.suppress(RuntimeError):  # of a class that TorchScript has, and Python has not
                value = part._c.getattr(name)
                if inside := [leaf for leaf in tree_leaves(value) if id(leaf) in taking.taken]:
                    found.append((path, name, value))
                for tensor in inside:
                    left.pop(id(tensor), None)
    for tensor in left.values():
        raise EncodeError(
            f"a tensor of shape {tuple(tensor.shape)} that requires grad lies in an object inside of a scripted module "
            "and cannot be followed from there: make it an attribute of the module, detach() it, or make the module "
            "where it is called (rpc.remote, RemoteModule)"
        )
    return wrap_cpp_module(copied), found


class _TakingOut(TorchDispatchMode):
    """Meanwhile torch copies a scripted module: without its memory, and without what must not arrive as leaves."""

    def __init__(self, message: Outgoing) -> None:
        super().__init__()
        self._message = message
        self.seen: list[torch.Tensor] = []
        self.taken: dict[int, torch.Tensor] = {}  # by id

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.clone.default:
            return function(*args, **kwargs or {})
        tensor = args[0]
        self.seen.append(tensor)
        if not self._is_to_be_taken(tensor):
            return tensor.detach().requires_grad_(tensor.requires_grad)
        self.taken[id(tensor)] = tensor
        return torch.empty(0)

    def _is_to_be_taken(self, tensor: torch.Tensor) -> bool:
        message = self._message
        if message.copies_parameters and tensor.is_leaf:  # parameters of a module that was loaded are no Parameters
            return False
        return tensor.requires_grad and (message.follows(tensor) or message.severs(tensor))
