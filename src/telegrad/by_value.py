"""Functions and classes that the callee cannot import: they travel by value, with cloudpickle.

That is what `__main__` of a script or notebook holds when the callee does not run the same script, and
lambdas and closures. A function's module globals go along, into one lasting namespace at the callee per
module and origin (the worker whose module it is), so that globals persist there from call to call, as a
parameter server needs. A global travels when its origin binds it, and again when the origin binds it
anew; what the callee has done to its copy stays otherwise. A function that is passed on to a third
worker keeps its origin, so all who call it there share one namespace; back home it is in its own module.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

_MARK = "__telegrad_namespace__"
MAIN = ("__main__", "__mp_main__")


class Namespace:
    """The globals of one module of one origin, with a version for each name that has travelled."""

    def __init__(self, origin: int, module: str, variables: dict[str, Any]) -> None:
        self.origin = origin
        self.module = module
        self.variables = variables
        self._lock = threading.Lock()  # guards both below
        self._versions: dict[str, int] = {}
        self._bound: dict[str, Any] = {}  # what the origin bound each name to, when it last travelled

    def versions_of(self, variables: dict[str, Any], *, at_home: bool) -> dict[str, tuple[int, Any]]:
        """The named globals with their versions, to be sent."""
        with self._lock:
            if not at_home:
                return {
                    name: (self._versions.get(name, 0), self._bound.get(name, variables[name]))
                    for name in variables
                }
            for name, value in variables.items():
                if name not in self._bound or self._bound[name] is not value:
                    self._bound[name] = value
                    self._versions[name] = self._versions.get(name, 0) + 1
            return {name: (self._versions[name], self._bound[name]) for name in variables}

    def adopt(self, received: dict[str, tuple[int, Any]]) -> None:
        """Binds the names that are new, or that the origin has bound anew."""
        with self._lock:
            for name, (version, value) in received.items():
                if name not in self._versions or version > self._versions[name]:
                    self._versions[name] = version
                    self._bound[name] = value
                    self.variables[name] = value


class Namespaces:
    """All namespaces of one worker, its own and those that it received."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self._lock = threading.Lock()  # guards the dictionary
        self._namespaces: dict[tuple[int, str], Namespace] = {}

    def get(self, origin: int, module: str, base: dict[str, Any]) -> Namespace:
        """The namespace, made on first use from what a module has of itself."""
        with self._lock:
            namespace = self._namespaces.get((origin, module))
            if namespace is None:
                if origin == self.worker_id and module in sys.modules:
                    variables = vars(sys.modules[module])
                else:
                    variables = {**base, "__builtins__": __builtins__}
                namespace = Namespace(origin, module, variables)
                if origin != self.worker_id:
                    variables[_MARK] = namespace
                self._namespaces[origin, module] = namespace
            return namespace

    def of(self, function: types.FunctionType) -> Namespace:
        """The namespace that a function of this process belongs to."""
        received = function.__globals__.get(_MARK)
        if isinstance(received, Namespace):
            return received
        return self.get(self.worker_id, function.__module__ or "__main__", {})


_decoding = threading.local()


class decoding:
    """While it is entered, functions are rebuilt in these namespaces, on this thread."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces

    def __enter__(self) -> None:
        self._before = getattr(_decoding, "namespaces", None)
        _decoding.namespaces = self._namespaces

    def __exit__(self, *_: object) -> None:
        _decoding.namespaces = self._before


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with our namespaces. `reduce` has the first word about every object."""

    def __init__(
        self,
        file: io.BytesIO,
        *,
        buffer_callback: Callable[[Any], Any] | None,
        namespaces: Namespaces,
        reduce: Callable[[Any], Any],
    ) -> None:
        super().__init__(file, 5, buffer_callback)
        self._namespaces = namespaces
        self._reduce = reduce

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        namespace = self._namespaces.of(func)
        code, base, _, _, closure = self._function_getnewargs(func)
        state, slots = _cloudpickle._function_getstate(func)
        at_home = namespace.origin == self._namespaces.worker_id
        slots["__globals__"] = namespace.versions_of(slots["__globals__"], at_home=at_home)
        where = (namespace.origin, namespace.module)
        return (
            _make_function,
            (code, where, base, closure),
            (where, state, slots),
            None,
            None,
            _set_function_state,
        )


def _make_function(code: types.CodeType, where: tuple[int, str], base: dict[str, Any], closure: Any) -> Any:
    namespace = _decoding.namespaces.get(*where, base)
    return types.FunctionType(code, namespace.variables, None, None, closure)


def _set_function_state(function: types.FunctionType, packed: Any) -> None:
    where, state, slots = packed
    namespaces: Namespaces = _decoding.namespaces
    received = slots["__globals__"]
    if where[0] != namespaces.worker_id:  # at home the module itself knows best
        namespaces.get(*where, {}).adopt(received)
    slots["__globals__"] = {}
    _cloudpickle._function_setstate(function, (state, slots))


def main_script() -> str:
    """Which script runs as __main__ here; empty where there is none (interactive, or a forked worker)."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not file or getattr(main, "__spec__", None) is not None:
        return ""
    try:
        stat = os.stat(file)
    except OSError:
        return ""
    return f"{os.path.realpath(file)}:{stat.st_mtime_ns}:{stat.st_size}"


def is_of_main(obj: Any) -> bool:
    return getattr(obj, "__module__", None) in MAIN


def main_attribute(qualname: str) -> Any:
    """An object of this process's own __main__, by its name."""
    obj: Any = sys.modules.get("__mp_main__") or sys.modules["__main__"]
    for part in qualname.split("."):
        obj = getattr(obj, part)
    return obj
