"""Functions by name: "module:qualname", looked up on the callee, where the caller finds the same object there.

Both directions are remembered, and checked again on each use, so a name that is bound anew is seen.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from .by_value import MAIN

_MOST = 10_000  # names remembered, before starting anew

_NAMED_TYPES = (types.FunctionType, types.BuiltinFunctionType, type)


class Names:
    """Of one worker."""

    def __init__(self) -> None:
        # Only single operations on these, which are atomic; what is lost in a race is looked up again.
        self._names: dict[
            Any, tuple[bytes, Any, str]
        ] = {}  # function -> name, the object it is in, its name there
        self._functions: dict[bytes, tuple[Any, Any, str]] = {}  # name -> function, the object it is in, ...

    def name_of(self, function: Any, *, same_main: bool) -> bytes:
        """The name under which a callee finds the function; empty if there is none."""
        if not isinstance(function, _NAMED_TYPES):
            return b""
        known = self._names.get(function)
        if known is not None and getattr(known[1], known[2], None) is function:
            name = known[0]
        else:
            name = self._look_for(function)
        return b"" if name.startswith(b"__main__:") and not same_main else name

    def _look_for(self, function: Any) -> bytes:
        module_name = getattr(function, "__module__", None)
        module = sys.modules.get(module_name) if isinstance(module_name, str) else None
        if module is None:
            return b""
        # torch's own functions call themselves _VariableFunctionsClass.add; they are torch.add.
        for qualname in (function.__qualname__, function.__name__):
            *path, last = qualname.split(".")
            holder: Any = module
            for part in path:
                holder = getattr(holder, part, None)
            if holder is not None and getattr(holder, last, None) is function:
                shown = "__main__" if module_name in MAIN else module_name
                name = f"{shown}:{qualname}".encode()
                if len(self._names) >= _MOST:
                    self._names.clear()
                self._names[function] = (name, holder, last)
                return name
        return b""

    def resolve(self, name: bytes) -> Any:
        """The function of that name here.

        Raises:
            ImportError, AttributeError: there is none.
        """
        known = self._functions.get(name)
        if known is not None and getattr(known[1], known[2], None) is known[0]:
            return known[0]
        module_name, _, qualname = name.decode().partition(":")
        if module_name == "__main__" and "__mp_main__" in sys.modules:
            module_name = (
                "__mp_main__"  # what multiprocessing calls the script in the processes that it spawns
            )
        holder: Any = importlib.import_module(module_name)
        *path, last = qualname.split(".")
        for part in path:
            holder = getattr(holder, part)
        function = getattr(holder, last)
        if len(self._functions) >= _MOST:
            self._functions.clear()
        self._functions[name] = (function, holder, last)
        return function
