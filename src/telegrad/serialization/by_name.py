"""Functions by name: "module:qualname", looked up on the callee, where the caller finds the same object there.

Both directions are remembered, and checked again on each use, so a name that is bound anew is seen.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any, NamedTuple

from .namespaces import MAIN, REGISTERED, CachedFunction, follow, is_by_value

_MOST = 10_000  # names remembered, before starting anew

_NAMED_TYPES = (types.FunctionType, types.BuiltinFunctionType, type, CachedFunction)


class _Named(NamedTuple):
    name: bytes
    function: Any
    holder: Any  # the module or class that it is in
    attribute: str  # its name there
    is_of_main: bool


class Names:
    """The names of functions that one worker has sent or looked up."""

    def __init__(self) -> None:
        # Only single operations on these, which are atomic; what is lost in a race is looked up again.
        self._by_id: dict[int, _Named] = {}  # the id of a function, not itself: a metaclass may define equality
        self._by_name: dict[bytes, _Named] = {}

    def name_of(self, function: Any, *, same_main: bool) -> bytes:
        """The name under which a callee finds the function; empty if there is none."""
        known = self._by_id.get(id(function))
        if (
            known is not None
            and known.function is function
            and getattr(known.holder, known.attribute, None) is function
            and not REGISTERED
        ):
            return b"" if known.is_of_main and not same_main else known.name
        if not isinstance(function, _NAMED_TYPES):
            return b""
        if is_by_value(function) and not (same_main and function.__module__ in MAIN):
            return b""
        return self._look_for(function)

    def _look_for(self, function: Any) -> bytes:
        module_name = getattr(function, "__module__", None)
        module = sys.modules.get(module_name) if isinstance(module_name, str) else None
        if module is None:
            return b""
        # torch's own functions call themselves _VariableFunctionsClass.add; they are torch.add.
        for qualname in (function.__qualname__, function.__name__):
            *path, last = qualname.split(".")
            holder = follow(module, path)
            if holder is not None and getattr(holder, last, None) is function:
                is_of_main = module_name in MAIN
                name = f"{'__main__' if is_of_main else module_name}:{qualname}".encode()
                if len(self._by_id) >= _MOST:
                    self._by_id.clear()
                self._by_id[id(function)] = _Named(name, function, holder, last, is_of_main)
                return name
        return b""

    def resolve(self, name: bytes) -> Any:
        """The function of that name here.

        Raises:
            ImportError, AttributeError: there is none.
        """
        known = self._by_name.get(name)
        if known is not None and getattr(known.holder, known.attribute, None) is known.function:
            return known.function
        module_name, _, qualname = name.decode().partition(":")
        *path, last = qualname.split(".")
        holder = functools.reduce(getattr, path, importlib.import_module(module_name))
        function = getattr(holder, last)
        if len(self._by_name) >= _MOST:
            self._by_name.clear()
        self._by_name[name] = _Named(name, function, holder, last, module_name in MAIN)
        return function
