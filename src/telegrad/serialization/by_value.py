"""Functions and classes that the callee cannot import: they travel by value, with cloudpickle.

That is what `__main__` of a script or notebook holds when the callee does not run the same script, and
lambdas and closures. A function's module globals go along, into one lasting namespace at the callee per
module and origin (the worker whose module it is), so that globals persist there from call to call, as a
parameter server needs. A global travels when its origin binds it, and again when the origin binds it
anew; what the callee has done to its copy stays otherwise. The same holds for the attributes of a class,
taken together. A function that is passed on to a third worker keeps its origin, so all who call it there
share one namespace; back home it is in its own module.

`definitions.py` spares a callee what it has got already.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

MAIN = ("__main__", "__mp_main__")  # what multiprocessing calls the script in processes that it spawns
REGISTERED: set[str] = _cloudpickle._PICKLE_BY_VALUE_MODULES  # by cloudpickle.register_pickle_by_value()

_MARK = "__telegrad_namespace__"
_UNBOUND = object()
CachedFunction = type(functools.lru_cache(abs))  # it says of itself that it can be imported from __main__


def is_definition(obj: Any) -> bool:
    """Whether it is what `def` or `class` makes."""
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


# Note [finalisers]: any allocation may collect garbage, and a user's finaliser may make a call. So whoever holds one
# of the locks here may come back for it, and what is done under them bears that.


# -- globals ---------------------------------------------------------------------------------------------


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
        """What the origin binds, as far as it is known here; what is bound here otherwise does not travel."""
        return self.variables if self._at_home else self._bound

    @property
    def base(self) -> dict[str, Any]:
        """What a module has of itself."""
        names = ("__package__", "__name__", "__path__", "__file__")
        return {name: self.variables[name] for name in names if name in self.variables}

    def bindings(self, names: Iterable[str]) -> dict[str, tuple[int, Any]]:
        """The versions and values of those names that the origin has bound, to be sent."""
        found = {}
        with self._lock:
            for name in names:
                value = self.source.get(name, _UNBOUND)
                if value is _UNBOUND:
                    continue
                if self._bound.get(name, _UNBOUND) is not value:  # at home only
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
        self._lost: set[int] = set()  # workers for which nothing is kept any more

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
            if sender is not None and sender not in self._lost:
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
        """Keeps nothing any more for a worker that is gone; what is not kept any more for any other."""
        with self._lock:
            self._lost.add(sender)
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

    def origin_of(self, definition: Any) -> int:
        """The worker whose module a function or class is of."""
        if isinstance(definition, type):
            record = _classes.get(definition)
            return self.worker_id if record is None or record.origin is None else record.origin
        function = definition.__wrapped__ if type(definition) is CachedFunction else definition
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


# -- classes ---------------------------------------------------------------------------------------------


_ADDED_BY_PYTHON = ("__slotnames__", "__annotations__", "__annotations_cache__")  # when it needs them


class _ClassRecord:
    """What is known of a class that has travelled."""

    def __init__(self, origin: int | None) -> None:
        self.origin = origin  # None: it was made here
        self.version = 0  # of its attributes
        self.snapshot: weakref.ref[_ClassSnapshot] | None = None


class _ClassSnapshot:
    """The attributes of a class as they were sent. Only definitions hold it, so it keeps no other class alive."""

    def __init__(self, cls: type, record: _ClassRecord) -> None:
        self._cls = cls
        self._record = record
        self._attributes = dict(cls.__dict__) if record.origin is None else {}
        for name in _ADDED_BY_PYTHON:
            self._attributes.pop(name, None)
        self.version = record.version

    def is_current(self) -> bool:
        if self._record.version != self.version:
            return False
        if self._record.origin is not None:
            return True  # what is done to a class away from home does not travel
        now = self._cls.__dict__
        if len(now) - sum(name in now for name in _ADDED_BY_PYTHON) != len(self._attributes):
            return False
        return all(now.get(name, _UNBOUND) is value for name, value in self._attributes.items())


# Of the process, as the classes themselves and cloudpickle's list of them are.
_classes: weakref.WeakKeyDictionary[type, _ClassRecord] = weakref.WeakKeyDictionary()
_classes_lock = threading.RLock()  # guards the writing of it and of the records


def _snapshot(cls: type) -> tuple[_ClassSnapshot, int | None]:
    """The class as it is now, and its origin (None: this process)."""
    with _classes_lock:
        record = _classes.get(cls)
        if record is None:
            record = _classes[cls] = _ClassRecord(None)
        last = None if record.snapshot is None else record.snapshot()
        if last is not None and last.is_current():
            return last, record.origin
        if record.origin is None:
            record.version += 1
        snapshot = _ClassSnapshot(cls, record)
        record.snapshot = weakref.ref(snapshot)
        return snapshot, record.origin


def _make_class(origin: int, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    tracked = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    cls: type = make(*arguments) if tracked is None else tracked
    with _classes_lock:
        # A class that comes home has a record, since it was sent from here.
        _classes.setdefault(cls, _ClassRecord(origin))
    return cls


def _set_class_state(cls: type, packed: tuple[int, Any]) -> None:
    version, state = packed
    record = _classes[cls]
    if record.origin is None or record.version >= version:
        return
    _cloudpickle._class_setstate(cls, state)
    with _classes_lock:  # at last: until then whoever meets the class completes it
        record.version = max(record.version, version)


# -- pickling --------------------------------------------------------------------------------------------


class Dependencies:
    """All bindings that went into a pickle: it is current as long as they are the same."""

    def __init__(self) -> None:
        self.bindings: list[tuple[dict[str, Any], str, Any]] = []
        self.classes: list[_ClassSnapshot] = []

    def add(self, variables: dict[str, Any], name: str) -> None:
        self.bindings.append((variables, name, variables.get(name, _UNBOUND)))

    def is_current(self) -> bool:
        for variables, name, value in self.bindings:
            if variables.get(name, _UNBOUND) is not value:
                return False
        return not self.classes or all(snapshot.is_current() for snapshot in self.classes)


class ByValuePickler(cloudpickle.Pickler):
    """cloudpickle with our namespaces. `reduce` has the first word about every object."""

    def __init__(
        self,
        file: io.BytesIO,
        *,
        buffer_callback: Callable[[Any], Any] | None,
        namespaces: Namespaces,
        reduce: Callable[[Any], Any],
        dependencies: Dependencies | None = None,
    ) -> None:
        super().__init__(file, 5, buffer_callback)
        self._namespaces = namespaces
        self._reduce = reduce
        self._dependencies = dependencies or Dependencies()

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._reduce(obj)
        if reduced is not NotImplemented:
            return reduced
        if is_definition(obj) and is_by_value(obj):  # cloudpickle would import it from __mp_main__
            if type(obj) is CachedFunction:
                return _make_cached, (obj.__wrapped__, obj.cache_parameters(), dict(obj.__dict__))
            return self._dynamic_class_reduce(obj) if isinstance(obj, type) else self._dynamic_function_reduce(obj)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and reduced[-1] is _cloudpickle._class_setstate:
            return self._dynamic_class_reduce(obj)
        return reduced

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        names = _cloudpickle._extract_code_globals(func.__code__)
        namespace = self._namespaces.of(func)
        source = func.__globals__ if namespace is None else namespace.source
        for name in names:  # before they are read: what changes in between is seen as a change
            self._dependencies.add(source, name)
        if namespace is None:
            return super()._dynamic_function_reduce(func)
        code, _, _, _, closure = self._function_getnewargs(func)
        state, slots = _cloudpickle._function_getstate(func)
        slots["__globals__"] = namespace.bindings(names)
        where = (namespace.origin, namespace.module, namespace.base)
        return _make_function, (code, where, closure), (state, slots), None, None, _set_function_state

    def _dynamic_class_reduce(self, cls: type) -> Any:
        snapshot, origin = _snapshot(cls)
        self._dependencies.classes.append(snapshot)
        make, arguments, state = _cloudpickle._dynamic_class_reduce(cls)[:3]
        where = self._namespaces.worker_id if origin is None else origin
        packed = (snapshot.version, state)
        return _make_class, (where, make, arguments), packed, None, None, _set_class_state


_decoding = threading.local()


class decoding:
    """While it is entered, functions are rebuilt in these namespaces, which are kept for the sender (None: for none),
    `defined` says what a number stands for, and `handle` what a handle refers to, on this thread. (A constructor
    that is run meanwhile may make calls of its own.)"""

    def __init__(
        self,
        namespaces: Namespaces,
        defined: Callable[[int, int], Any],
        handle: Callable[[int, int], Any],
        sender: int | None,
    ) -> None:
        self._entered = (namespaces, defined, handle, sender)

    def __enter__(self) -> None:
        self._before = getattr(_decoding, "entered", None)
        _decoding.entered = self._entered

    def __exit__(self, *_: object) -> None:
        _decoding.entered = self._before


def defined(owner: int, number: int) -> Any:
    """In a pickle: what a worker has defined under a number."""
    return _decoding.entered[1](owner, number)


def received_handle(id: int, owner: int) -> Any:
    """In a pickle: the worker that it came to, and its entry for a value of a worker."""
    return _decoding.entered[2](id, owner)


def _make_function(code: types.CodeType, where: tuple[int, str, dict[str, Any]], closure: Any) -> Any:
    namespaces, _, _, sender = _decoding.entered
    return types.FunctionType(code, namespaces.get(*where, sender).variables, None, None, closure)


def _set_function_state(function: types.FunctionType, packed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    state, slots = packed
    received = slots.pop("__globals__")
    namespace = _decoding.entered[0].of(function)
    if namespace is not None:
        namespace.adopt(received)
    slots.pop("_cloudpickle_submodules")  # that they were unpickled has imported them
    for cell, sent in zip(function.__closure__ or (), slots.pop("__closure__") or (), strict=True):
        try:
            cell.cell_contents = sent.cell_contents
        except ValueError:
            pass  # an empty cell
    function.__dict__.update(state)
    for name, value in slots.items():
        setattr(function, name, value)


def _make_cached(function: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    cached = functools.lru_cache(**parameters)(function)
    cached.__dict__.update(attributes)
    return cached


# -- scripts ---------------------------------------------------------------------------------------------


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
    """An object of one of this process's own modules, by its name."""
    obj: Any = sys.modules[module]
    for part in qualname.split("."):
        obj = getattr(obj, part)
    return obj
