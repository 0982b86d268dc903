"""Arguments that a function changes in place: it has changed copies, and its caller is told once.

    Sample.takes(call)        whether this call is watched
    watch(call)               before the function runs: the versions of the tensors in its arguments
    changed(watched, result)  after it: the arguments with a tensor that is new or was written to

A tensor that the function returns does not count, since the caller has it. Nor does one that was taken out of a
container: functions take apart the dicts that they are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Buffer, Module, Parameter

from ..messages import Call
from ..serialization.handles import Handle

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))  # arguments that no one can change

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Name = Callable[[], str]  # makes the name of a user's function

_TENSORS = frozenset((Tensor, Parameter, Buffer))  # other classes have rules of their own
_SEQUENCES = (list, tuple)
_SETS = (set, frozenset, deque)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, Handle, Tensor)
_MOST = 300  # objects that are looked at in one argument, and elements of each
_ALL, _ONE_IN = 64, 16  # of a function's calls so many are watched, and of those after them one in so many
_MOST_COUNTED = 10_000  # functions and values
_LONG = 16  # elements; a longer list with plain ones at both ends is one of numbers

# By the ids of functions of telegrad's own that call one of the user's: gives its name and arguments.
_of_users: dict[int, Callable[..., tuple[Name, Arguments]]] = {}

# The arguments of a call, by position and name; the versions of those that are tensors, and of the tensors in others by
# their ids: a function may let go of their memory.
Watched = tuple[Name | None, tuple[Any, ...], dict[str, Any], list[Any]]


def calls_users(function: Callable[..., Any], split: Callable[..., tuple[Name, Arguments]]) -> None:
    """Says of a function of telegrad's own that it calls one of the user's: `split` gives its name and arguments."""
    _of_users[id(function)] = split


class Sample:
    """Chooses the calls whose arguments are watched: the first ones of each function, then a few. One that changes its
    arguments does so early, and to look at many tensors in each call costs some microseconds."""

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


def watch(call: Call) -> Watched:
    """Notes the versions of the tensors in the arguments of a call."""
    name, args, kwargs = None, call.args, call.kwargs or {}
    if (split := _of_users.get(id(call.function))) is not None:
        name, (args, kwargs) = split(*args, **kwargs)
    versions = [_versions(value) for value in args]
    if kwargs:
        versions += [_versions(value) for value in kwargs.values()]
    return name, args, kwargs, versions


def changed(watched: Watched, result: Any) -> str:
    """Says which arguments were changed; empty: none."""
    _, args, kwargs, versions = watched
    found: list[tuple[int, list[Tensor]]] = []
    for place, before in enumerate(versions):
        if before is None:
            continue
        value = args[place] if place < len(args) else list(kwargs.values())[place - len(args)]
        if type(before) is int:
            if value._version != before:
                found.append((place, [value]))
        elif tensors := [tensor for tensor in _tensors_in(value) if before.get(id(tensor)) != _version(tensor)]:
            found.append((place, tensors))
    if not found:
        return ""
    returned = {id(tensor) for each in _tensors_in([result]) for tensor in (each, each._base)}
    names = [*map(str, range(len(args))), *map(repr, kwargs)]
    return " and ".join(
        f"argument {names[place]}" for place, tensors in found if not returned.issuperset(map(id, tensors))
    )


def _versions(value: Any) -> Any:
    kind = type(value)
    if kind is Tensor:
        return value._version
    return None if kind in PLAIN else {id(tensor): _version(tensor) for tensor in _tensors_in(value)}


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # these have none


def _tensors_in(value: Any) -> list[Tensor]:
    """Finds the tensors in containers and in the attributes of objects, and runs no user's code."""
    found: list[Tensor] = []
    left, seen = [[value]] if type(value) in _TENSORS else [value], {id(value)}
    for value in left:  # which grows
        kind = type(value)
        for item in value if (kind is list or kind is tuple) and len(value) <= _LONG else _inside(value):
            kind = type(item)
            if kind is Tensor:
                found.append(item)
            elif kind in PLAIN:
                pass
            elif kind in _TENSORS:
                found.append(item)
            elif id(item) not in seen and len(left) < _MOST:
                seen.add(id(item))
                left.append(item)
    return found


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
