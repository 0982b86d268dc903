"""Objects that torch knows by names of its own, in a pickle: TorchScript's functions and modules, and operators.

By reference where the callee can import them; scripted ones are saved otherwise.
"""

from __future__ import annotations

import functools
import io
import sys
from typing import Any

import torch

from .._torch import OpOverload, OpOverloadPacket, find_builtin, wrap_cpp_module
from .namespaces import MAIN, module_attribute

_SCRIPTED = (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch.ScriptMethod)
_OPERATORS = (OpOverloadPacket, OpOverload)
_NAMED_BY_TORCH = _SCRIPTED + _OPERATORS


def is_named_by_torch(obj: Any) -> bool:
    return isinstance(obj, _NAMED_BY_TORCH)


def takes_tensors_only(function: Any) -> bool:
    """Whether torch's RPC calls it in C++, where a parameter is a tensor like any other."""
    return isinstance(function, torch.jit.ScriptFunction) or find_builtin(function) is not None


def reduce_named_by_torch(obj: Any, same_main: bool) -> Any:
    """How pickle should save it."""
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
        if getattr(sys.modules.get(module), name, None) is obj and (module not in MAIN or same_main):
            return module_attribute, (module, name)
    file = io.BytesIO()
    torch.jit.save(obj, file)
    return _load, (file.getvalue(), isinstance(obj, torch.jit.ScriptFunction))


def _operator(*path: str) -> Any:
    return functools.reduce(getattr, path, torch.ops)


def _load(data: bytes, is_function: bool) -> Any:
    loaded = torch.jit.load(io.BytesIO(data))
    return loaded.forward if is_function else loaded
