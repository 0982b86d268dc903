"""The globals of modules that travel by value, in one lasting namespace at the callee per module and origin.

The origin is the worker whose module it is. A global travels when its origin binds it, and again when the origin binds
it anew; what the callee has done to its copy stays otherwise. So globals persist at the callee from call to call, as a
parameter server needs. A function that is passed on to a third worker keeps its origin, so all callers there share one
namespace; back home it is in its own module.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from cloudpickle import cloudpickle as _cloudpickle

MAIN = ("__main__", "__mp_main__")  # what multiprocessing calls the script in processes that it spawns
REGISTERED: set[str] = _cloudpickle._PICKLE_BY_VALUE_MODULES  # by cloudpickle.register_pickle_by_value()
UNBOUND = object()
CachedFunction = type(functools.lru_cache(abs))  # it says of itself that it can be imported from __main__

_MARK = "__telegrad_namespace__"


def is_definition(obj: Any) -> bool:
    """Whether an object was made by `def` or `class`."""
    kind = type(obj)
    return kind is types.FunctionType or issubclass(kind, type) or kind is CachedFunction


def is_by_value(obj: Any) -> bool:
    """Whether a function or class is of a module that a callee cannot import."""
    module = getattr(obj, "__module__", None)
    if module in MAIN:
        return True
    if not isinstance(module, str):
        return False
    if module not in sys.modules:
        return True  # it came by value itself
    return bool(REGISTERED) and _cloudpickle._is_registered_pickle_by_value(sys.modules[module])


# Note [finalisers]: any allocation may collect garbage, and a user's finaliser may make a call. So a thread that holds
# one of the locks here may come back for it, and what is done under them bears that.


class Namespace:
    """The globals of one module of one origin, with a version for each name that has travelled."""

    def __init__(self, origin: int, module: str, variables: dict[str, Any], *, at_home: bool) -> None:
        self.origin = origin
        self.module = module
        self.variables = variables
        self._at_home = at_home
        self._lock = threading.RLock()  # guards the writing of both below; see Note [finalisers]
        self._versions: dict[str, int] = {}
        self._bound: dict[str, Any] = {}  # what the origin bound each name to, when it last travelled

    @property
    def source(self) -> dict[str, Any]:
        """The origin's bindings, as far as they are known here; what is bound here otherwise does not travel."""
        return self.variables if self._at_home else self._bound

    @property
    def base(self) -> dict[str, Any]:
        """The names that a module has of itself."""
        names = ("__package__", "__name__", "__path__", "__file__")
        return {name: self.variables[name] for name in names if name in self.variables}

    def bindings(self, names: Iterable[str]) -> dict[str, tuple[int, Any]]:
        """The versions and values of those names that the origin has bound, to be sent."""
        found = {}
        with self._lock:
            for name in names:
                value = self.source.get(name, UNBOUND)
                if value is UNBOUND:
                    continue
                if self._bound.get(name, UNBOUND) is not value:  # at home only
                    self._bound[name] = value
                    self._versions[name] = self._versions.get(name, 0) + 1
                found[name] = (self._versions[name], value)
        return found

    def adopt(self, received: dict[str, tuple[int, Any]]) -> None:
        """Binds the names that are new, or that the origin has bound anew."""
        if self._at_home:
            return  # the module itself knows best
        with self._lock:
            for name, (version, value) in received.items():
                if version > self._versions.get(name, 0):
                    self._versions[name] = version
                    self._bound[name] = value
                    self.variables[name] = value

    def adopt_definition(self, name: str, version: int, value: Any) -> Any:
        """Binds a function or class by its name; returns the one object that stands for it here."""
        self.adopt({name: (version, value)})
        with self._lock:
            return self._bound[name] if self._versions.get(name) == version else value


class _Kept(NamedTuple):
    namespace: Namespace
    senders: set[int]


class Namespaces:
    """All namespaces of one worker, its own and those that it received.

    A received one is kept for the workers whose messages have brought something into it: their next message finds
    its globals as the last one left them. When all of these are gone it lives as long as its functions do.
    """

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self._lock = threading.RLock()  # guards the writing of all below; see Note [finalisers]
        self._own: dict[str, Namespace] = {}  # by module
        self._kept: dict[tuple[int, str], _Kept] = {}  # by origin and module
        self._received: weakref.WeakValueDictionary[tuple[int, str], Namespace] = weakref.WeakValueDictionary()
        self.lost: set[int] = set()  # workers that are gone, for which nothing is kept any more

    def find(self, origin: int, module: str) -> Namespace | None:
        """The namespace, if it is one of this worker's own or is kept."""
        if origin == self.worker_id and module in sys.modules:
            return self._at_home(module)
        kept = self._kept.get((origin, module))
        return None if kept is None else kept.namespace

    def get(self, origin: int, module: str, base: dict[str, Any], sender: int | None) -> Namespace:
        """The namespace, made on first use from what a module has of itself, and kept for the sender."""
        if origin == self.worker_id and module in sys.modules:
            return self._at_home(module)
        key = (origin, module)
        with self._lock:
            namespace = self._received.get(key)
            if namespace is None:
                variables = {**base, "__builtins__": __builtins__}
                namespace = variables[_MARK] = Namespace(origin, module, variables, at_home=False)
                namespace = self._received.setdefault(key, namespace)
            if sender is not None and sender not in self.lost:
                self._kept.setdefault(key, _Kept(namespace, set())).senders.add(sender)
            return namespace

    def _at_home(self, module: str) -> Namespace:
        with self._lock:
            namespace = self._own.get(module)
            variables = _variables(module)
            if namespace is None or namespace.variables is not variables:
                # On first use; or the module was imported anew, or another script runs as __main__.
                namespace = self._own[module] = Namespace(self.worker_id, module, variables, at_home=True)
            return namespace

    def forget(self, sender: int) -> list[_Kept]:
        """Keeps nothing any more for a worker that is gone; returns what is kept for no other."""
        with self._lock:
            self.lost.add(sender)
            for kept in self._kept.values():
                kept.senders.discard(sender)
            return [self._kept.pop(key) for key in [k for k, kept in self._kept.items() if not kept.senders]]

    def of(self, function: types.FunctionType) -> Namespace | None:
        """The namespace that a function lives in; None if its globals are no module's."""
        variables = function.__globals__
        received = variables.get(_MARK)
        if isinstance(received, Namespace):
            return received
        # Not the function's __module__: that of a decorated function is not where its globals are.
        name = variables.get("__name__")
        if isinstance(name, str) and name in sys.modules and _variables(name) is variables:
            return self._at_home(name)
        return None

    def origin_of(self, function: Any) -> int:
        """The worker whose module a function is of."""
        if type(function) is CachedFunction:
            function = function.__wrapped__
        received = getattr(function, "__globals__", {}).get(_MARK)
        return received.origin if isinstance(received, Namespace) else self.worker_id


def _variables(module: str) -> dict[str, Any]:
    """The globals of a module of this process."""
    variables = vars(sys.modules[module])
    if variables.get("__name__") == "__mp_main__":
        # A process that multiprocessing spawned: it has run the script somewhere else and made a copy.
        for value in list(variables.values()):
            if type(value) is types.FunctionType and value.__module__ == "__mp_main__":
                return value.__globals__
    return variables


def main_script() -> str:
    """Which script runs as __main__ here; empty where there is none (interactive, or a forked worker)."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return ""
    try:
        stat = os.stat(file)
    except OSError:
        return ""
    return f"{os.path.realpath(file)}:{stat.st_mtime_ns}:{stat.st_size}"


def module_attribute(module: str, qualname: str) -> Any:
    """An object of a module of this process, by its name. Also in pickles."""
    return operator.attrgetter(qualname)(importlib.import_module(module))


def follow(obj: Any, path: Iterable[str]) -> Any:
    """The object at the end of a path of attributes; None if there is none."""
    for part in path:
        obj = getattr(obj, part, None)
    return obj
