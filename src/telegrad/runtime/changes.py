"""Arguments that a function changes in place: it has changed copies, and its caller is told once.

    watch(call, name, sample)   before the function runs: the versions of the tensors in its arguments
    changed(watched, result)    when its result is there: the arguments with a tensor that is new or was written to

Where all arguments are tensors, or what no one can change, each call is watched: that costs half a microsecond. To look
into containers and objects costs several, so a Sample of the calls is taken for that.

What the function returns does not count, since the caller has it: a tensor that was written to, a container that has
another tensor in it. Nor does a tensor that was taken out of a container: functions take apart the dicts that they are
given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import msgspec
from torch import Tensor
from torch.nn import Buffer, Module, Parameter

from ..messages import Call
from ..serialization.handles import Handle
from .profiled_calls import value_of

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))  # arguments that no one can change

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Name = Callable[[], str]  # makes the name of a user's function

_TENSORS = frozenset((Tensor, Parameter, Buffer))  # other classes have rules of their own
_FLAT = PLAIN | _TENSORS
_UNKNOWN = lambda: None, 0
_VERSION, _NONE = repeat("_version"), repeat(None)
_SEQUENCES = (list, tuple)
_SETS = (set, frozenset, deque)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, Handle, Tensor)
_MOST = 300  # objects that are looked at in one argument, and elements of each
_ALL, _ONE_IN = 64, 16  # of a function's calls so many are looked into, and of those after them one in so many
_MOST_COUNTED = 10_000  # functions and values
_LONG = 16  # elements; a longer list with plain ones at both ends is one of numbers

# By the ids of functions of telegrad's own that call one of the user's: gives its name and arguments.
_of_users: dict[int, Callable[..., tuple[Name, Arguments]]] = {}


class Watched(msgspec.Struct, eq=False, weakref=True):
    """A call, and what its arguments were like before it."""

    call: Call
    name: str
    values: tuple[Any, ...]  # the arguments, by position and by name
    # Of each: the version of a tensor; or the tensors inside with their versions, by their ids, which others may have
    # when the function has let go of them; None: no one can change it.
    versions: list[Any]
    is_flat: bool  # nothing is inside of them

    def user_name(self) -> str:
        return self.split()[0]()

    def split(self) -> tuple[Name, Arguments]:
        """The name and the arguments of the user's function."""
        args, kwargs = self.call.args, self.call.kwargs or {}
        split = _of_users.get(id(self.call.function))
        return (lambda: self.name, (args, kwargs)) if split is None else split(*args, **kwargs)


def calls_users(function: Callable[..., Any], split: Callable[..., tuple[Name, Arguments]]) -> None:
    """Says of a function of telegrad's own that it calls one of the user's: `split` gives its name and arguments."""
    _of_users[id(function)] = split


class Sample:
    """Chooses the calls whose arguments are looked into: the first ones of each function, then a few. One that changes
    its arguments does so early."""

    def __init__(self) -> None:
        self._counts: dict[Any, int] = {}  # calls by function, and by its value for a method

    def takes(self, call: Call, name: str) -> bool:
        args = call.args
        key: Any = name
        if id(call.function) in _of_users:
            method = args[1] if len(args) > 1 and type(args[1]) is str else ""
            key = name, args[0] if type(args[0]) is int else 0, method
        count = self._counts.get(key, 0)
        if count >= _ALL and count % _ONE_IN:
            self._counts[key] = count + 1
            return False
        if len(self._counts) >= _MOST_COUNTED:
            self._counts.clear()
        self._counts[key] = count + 1
        return True


def watch(call: Call, name: str, sample: Sample) -> Watched | None:
    """Notes the versions of the tensors in the arguments of a call; None: this one is not watched."""
    values = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
    if _FLAT.issuperset(map(type, values)):
        return Watched(call, name, values, _versions(values), True)
    if not sample.takes(call, name):
        return None
    watched = Watched(call, name, values, [], False)
    args, kwargs = watched.split()[1]
    watched.values = (*args, *kwargs.values())
    watched.versions = [value._version if type(value) in _TENSORS else _versions_in(value) for value in watched.values]
    return watched


def changed(watched: Watched, result: Any) -> str:
    """Says which arguments were changed; empty: none."""
    if watched.is_flat and watched.versions == _versions(watched.values):
        return ""
    found: list[tuple[int, list[Any]]] = []  # by place: what the caller has to have for each change
    for place, before in enumerate(watched.versions):
        if before is None:
            continue
        value = watched.values[place]
        if type(before) is int:
            if value._version != before:
                found.append((place, [value]))
            continue
        tensors, holders = _inside_of(value)
        changes = []
        for tensor, holder in zip(tensors, holders, strict=True):
            known, version = before.get(id(tensor), _UNKNOWN)
            if known() is not tensor:
                changes.append(holder)
            elif version != _version(tensor):
                changes.append(tensor)
        if changes:
            found.append((place, changes))
    if not found:
        return ""
    tensors, holders = _inside_of([value_of(result)])
    returned = {id(each) for tensor in tensors for each in (tensor, tensor._base)}.union(map(id, holders))
    args, kwargs = watched.split()[1]
    names = [*map(str, range(len(args))), *map(repr, kwargs)]
    names = [""] * (len(watched.values) - len(names)) + names  # what is for telegrad's own function comes first
    return " and ".join(
        f"argument {names[place]}" for place, changes in found if not returned.issuperset(map(id, changes))
    )


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [*map(getattr, values, _VERSION, _NONE)]  # in C


def _versions_in(value: Any) -> Any:
    if type(value) in PLAIN:
        return None
    return {id(tensor): (ref(tensor), _version(tensor)) for tensor in _inside_of(value)[0]}


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # these have none


def _inside_of(value: Any) -> tuple[list[Tensor], list[Any]]:
    """Finds the tensors in containers and in the attributes of objects, and what each of them is in. Runs no user's
    code."""
    found: list[Tensor] = []
    holders: list[Any] = []
    left, seen = [value], {id(value)}
    for value in left:  # which grows
        kind = type(value)
        for item in value if (kind is list or kind is tuple) and len(value) <= _LONG else _inside(value):
            kind = type(item)
            if kind in PLAIN:
                pass
            elif kind in _TENSORS:
                found.append(item)
                holders.append(value)
            elif id(item) not in seen and len(left) < _MOST:
                seen.add(id(item))
                left.append(item)
    return found, holders


def _inside(value: Any) -> Sequence[Any]:
    """Returns what is to be looked at in a container or object."""
    if isinstance(value, dict):
        return list(dict.values(value)) if value else ()
    if isinstance(value, _SEQUENCES):
        base: Any = list if isinstance(value, list) else tuple  # whose methods a user's class may have replaced
        at, length = base.__getitem__, base.__len__(value)
        is_plain = length > _LONG and type(at(value, 0)) in PLAIN and type(at(value, -1)) in PLAIN
        return () if is_plain else at(value, slice(_MOST))
    for kind in _SETS:
        if isinstance(value, kind):
            iterate: Any = kind.__iter__
            return list(iterate(value))
    if isinstance(value, _OPAQUE):
        return ()
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()  # it has slots
    if isinstance(value, Module):
        return [attributes.get(name) for name in ("_parameters", "_buffers", "_modules")]
    return list(attributes.values())


def warning(callee: str, what: str) -> str:
    """The caller's text about what the callee has found."""
    return (
        f"worker {callee!r}: {what} was changed in place by the call, which works on copies: the caller's stays as it "
        "was. Return what was changed, or keep it on that worker and send an RRef to it. (Said once for each function)"
    )
