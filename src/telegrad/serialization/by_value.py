"""Functions and classes that the callee cannot import: they travel by value, with cloudpickle.

That is what `__main__` of a script or notebook holds when the callee does not run the same script, and lambdas and
closures. A function's module globals go along (see namespaces.py). So do the attributes of a class, taken together:
they travel again when the origin has changed one. `by_value_cache.py` spares a callee what it has got already.
"""

from __future__ import annotations

import functools
import io
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from .namespaces import UNBOUND, CachedFunction, Namespaces, is_by_value, is_definition
from .pickling_state import arriving

# -- classes ---------------------------------------------------------------------------------------------


_ADDED_BY_PYTHON = ("__slotnames__", "__annotations__", "__annotations_cache__")  # when it needs them


class _ClassRecord:
    """The origin of a class that has travelled, and the version of its attributes."""

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
        return all(now.get(name, UNBOUND) is value for name, value in self._attributes.items())


# One for the process, as the classes themselves and cloudpickle's list of them are.
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


def origin_of(definition: Any, namespaces: Namespaces) -> int:
    """The worker whose module a function or class is of."""
    if not isinstance(definition, type):
        return namespaces.origin_of(definition)
    record = _classes.get(definition)
    return namespaces.worker_id if record is None or record.origin is None else record.origin


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
    with _classes_lock:  # at last: until then each thread that meets the class completes it
        record.version = max(record.version, version)


# -- pickling --------------------------------------------------------------------------------------------


class Dependencies:
    """All bindings that went into a pickle: it is current as long as they are the same."""

    def __init__(self) -> None:
        self.bindings: list[tuple[dict[str, Any], str, Any]] = []
        self.classes: list[_ClassSnapshot] = []

    def add(self, variables: dict[str, Any], name: str) -> None:
        self.bindings.append((variables, name, variables.get(name, UNBOUND)))

    def is_current(self) -> bool:
        for variables, name, value in self.bindings:
            if variables.get(name, UNBOUND) is not value:
                return False
        return not self.classes or all(snapshot.is_current() for snapshot in self.classes)


class ByValuePickler(cloudpickle.Pickler):
    """cloudpickle with our namespaces. `reduce` has the first word about every object."""

    def __init__(
        self,
        file: io.BytesIO,
        on_buffer: Callable[[Any], Any] | None,
        namespaces: Namespaces,
        reduce: Callable[[Any], Any],
        dependencies: Dependencies,
    ) -> None:
        super().__init__(file, 5, on_buffer)
        self._namespaces = namespaces
        self._reduce = reduce
        self._dependencies = dependencies

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


def _make_function(code: types.CodeType, where: tuple[int, str, dict[str, Any]], closure: Any) -> Any:
    message = arriving()
    namespace = message.at.namespaces.get(*where, message.sender)
    return types.FunctionType(code, namespace.variables, None, None, closure)


def _set_function_state(function: types.FunctionType, packed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    state, slots = packed
    received = slots.pop("__globals__")
    namespace = arriving().at.namespaces.of(function)
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
