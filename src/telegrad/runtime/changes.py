"""Arguments that a function changes in place: it has changed copies, and its caller is told once.

    watch(call)               before the function runs: the versions of the tensors in its arguments
    changed(watched, result)  after it: the arguments with a tensor that is new or was written to

A tensor that the function returns does not count, since the caller has it. Nor does one that was taken out of a
container: functions take apart the dicts that they are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Buffer, Module, Parameter

from ..messages import Call
from ..serialization.handles import Handle

# On functions of telegrad's own that call one of the user's: gives the name and the arguments of that. The name may be
# a function, which is called where it is needed.
CALLS_USERS = "_telegrad_calls_users"
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))  # arguments that no one can change

_TENSORS = frozenset((Tensor, Parameter, Buffer))  # other classes have rules of their own
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, Handle, Tensor)
_MOST = 300  # objects that are looked at in one argument, and elements of each
_LONG = 16  # elements; a longer list with plain ones at both ends is one of numbers


class Watched(NamedTuple):
    """A call whose arguments may be changed."""

    name: str | Callable[[], str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: dict[int, int]  # by the ids of tensors: a function may let go of their memory


def watch(call: Call, name: str) -> Watched:
    """Notes the versions of the tensors in the arguments of a call."""
    function, args, kwargs = call.function, call.args, call.kwargs or {}
    if hasattr(function, CALLS_USERS):
        name, args, kwargs = getattr(function, CALLS_USERS)(*args, **kwargs)
    versions: dict[int, int] = {}
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is Tensor:
            versions[id(value)] = value._version
        elif type(value) not in PLAIN:
            for tensor in _tensors_in(value):
                versions[id(tensor)] = _version(tensor)
    return Watched(name, args, kwargs, versions)


def changed(watched: Watched, result: Any) -> str:
    """Says which arguments were changed; empty: none."""
    versions, found = watched.versions, []
    for place, value in enumerate(watched.args):
        if type(value) is Tensor:
            if value._version != versions[id(value)]:
                found.append((f"argument {place}", [value]))
        elif type(value) not in PLAIN and (tensors := _differing(value, versions)):
            found.append((f"argument {place}", tensors))
    for name, value in watched.kwargs.items():
        if type(value) not in PLAIN and (tensors := _differing(value, versions)):
            found.append((f"argument {name!r}", tensors))
    if not found:
        return ""
    returned = {id(tensor) for each in _tensors_in(result) for tensor in (each, each._base)}
    return " and ".join(name for name, tensors in found if not returned.issuperset(map(id, tensors)))


def _differing(value: Any, versions: dict[int, int]) -> list[Tensor]:
    return [tensor for tensor in _tensors_in(value) if versions.get(id(tensor)) != _version(tensor)]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # these have none


def _tensors_in(value: Any) -> list[Tensor]:
    """Finds the tensors in containers and in the attributes of objects, and runs no user's code."""
    if type(value) in _TENSORS:
        return [value]
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    left = [value]
    while left and len(seen) < _MOST:
        value = left.pop()
        inside = _inside(value)
        if not inside or id(value) in seen:
            continue
        seen[id(value)] = value
        for item in inside:
            kind = type(item)
            if kind is Tensor or kind in _TENSORS:
                found.append(item)
            elif kind not in PLAIN:
                left.append(item)
    return found


def _inside(value: Any) -> Sequence[Any]:
    """Returns what is to be looked at in a container or object."""
    if isinstance(value, dict):
        return list(dict.values(value)) if value else ()
    if isinstance(value, list | tuple):
        at: Any = list.__getitem__ if isinstance(value, list) else tuple.__getitem__
        is_plain = len(value) > _LONG and type(at(value, 0)) in PLAIN and type(at(value, -1)) in PLAIN
        return () if is_plain else at(value, slice(_MOST))
    if isinstance(value, set | frozenset | deque):
        return list(value)
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
