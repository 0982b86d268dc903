"""TorchScript functions and modules in a pickle: by reference where the callee can import them, else saved."""

from __future__ import annotations

import io
import sys
from typing import Any

import torch

from .by_value import MAIN, module_attribute


def is_scripted(obj: Any) -> bool:
    return isinstance(obj, torch.jit.ScriptFunction | torch.jit.ScriptModule | torch.ScriptMethod)


def reduce_scripted(obj: Any, same_main: bool) -> Any:
    """How pickle should save a scripted function, module or method."""
    if isinstance(obj, torch.ScriptMethod):
        return getattr, (torch.jit._recursive.wrap_cpp_module(obj.owner), obj.name)
    if isinstance(obj, torch.jit.ScriptFunction):
        # torch's own name for it: "__torch__.package.module.function", with no module for __main__
        *path, name = obj.qualified_name.removeprefix("__torch__.").split(".")
        module = ".".join(path) or "__main__"
        if getattr(sys.modules.get(module), name, None) is obj and (module not in MAIN or same_main):
            return _attribute, (module, name)
    file = io.BytesIO()
    torch.jit.save(obj, file)
    return _load, (file.getvalue(), isinstance(obj, torch.jit.ScriptFunction))


def _attribute(module: str, name: str) -> Any:
    __import__(module)
    return module_attribute(module, name)


def _load(data: bytes, is_function: bool) -> Any:
    loaded = torch.jit.load(io.BytesIO(data))
    return loaded.forward if is_function else loaded
