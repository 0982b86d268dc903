"""TorchScript functions and modules in a pickle: by reference where the callee can import them, else saved."""

from __future__ import annotations

import io
import sys
from typing import Any

import torch

from .by_value import MAIN, main_attribute


def reduce_scripted(obj: Any, same_main: bool) -> Any:
    """How pickle should save a scripted function or module."""
    if isinstance(obj, torch.jit.ScriptFunction):
        # torch's own name for it: "__torch__.package.module.function", with no module for __main__
        *path, name = obj.qualified_name.removeprefix("__torch__.").split(".")
        module = ".".join(path) or "__main__"
        if getattr(sys.modules.get(module), name, None) is obj:
            if module not in MAIN:
                return _attribute, (module, name)
            if same_main:
                return main_attribute, (name,)
    file = io.BytesIO()
    torch.jit.save(obj, file)
    return _load, (file.getvalue(), isinstance(obj, torch.jit.ScriptFunction))


def _attribute(module: str, name: str) -> Any:
    __import__(module)
    return getattr(sys.modules[module], name)


def _load(data: bytes, is_function: bool) -> Any:
    loaded = torch.jit.load(io.BytesIO(data))
    return loaded.forward if is_function else loaded
