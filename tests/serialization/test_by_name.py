"""Functions by name, both ways."""

from __future__ import annotations

import functools
import os.path
import sys
import types

import cloudpickle
import pytest
import torch

from telegrad.serialization.by_name import Names


def function() -> int:
    return 1


class Outer:
    class Inner:
        @staticmethod
        def deep() -> int:
            return 2


@functools.cache
def cached() -> int:
    return 3


class Odd(type):
    """A metaclass whose classes are all equal, and cannot be hashed."""

    __hash__ = None

    def __eq__(cls, other):
        return True


class One(metaclass=Odd):
    pass


class Two(metaclass=Odd):
    pass


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        (function, "test_by_name:function"),
        (Outer, "test_by_name:Outer"),
        (Outer.Inner, "test_by_name:Outer.Inner"),
        (Outer.Inner.deep, "test_by_name:Outer.Inner.deep"),
        (cached, "test_by_name:cached"),
        (abs, "builtins:abs"),
        (int, "builtins:int"),
        (torch.add, "torch:add"),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (torch.Tensor, "torch:Tensor"),
        (os.path.join, "posixpath:join"),
        (One, "test_by_name:One"),
        (Two, "test_by_name:Two"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_of_what_can_be_imported(obj, name):
    caller, callee = Names(), Names()
    for _ in range(2):  # the second time from memory
        assert caller.name_of(obj, same_main=False) == name.encode()
        assert callee.resolve(name.encode()) is obj


@pytest.mark.parametrize(
    "obj",
    [lambda: 1, [].append, torch.ones(1).add, functools.partial(abs), Outer().__str__, 5, torch.ops.aten.add],
    ids=range(7),
)
def test_what_has_no_name(obj):
    assert Names().name_of(obj, same_main=True) == b""


def test_a_function_that_hides_behind_another_has_no_name():
    assert Names().name_of(cached.__wrapped__, same_main=True) == b""


def test_names_that_are_bound_anew(monkeypatch):
    names = Names()
    assert names.name_of(function, same_main=False) == b"test_by_name:function"
    assert names.resolve(b"test_by_name:function") is function
    before = function
    monkeypatch.setitem(globals(), "function", new := types.FunctionType(function.__code__, globals()))
    assert names.name_of(before, same_main=False) == b""
    assert names.resolve(b"test_by_name:function") is new


def test_names_that_are_not_there():
    with pytest.raises(ModuleNotFoundError):
        Names().resolve(b"no_such_module:f")
    with pytest.raises(AttributeError):
        Names().resolve(b"test_by_name:no_such_function")


def test_main_only_where_the_same_script_runs(monkeypatch):
    main = types.ModuleType("__main__")
    exec("def f(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    names = Names()
    for _ in range(2):
        assert names.name_of(main.f, same_main=False) == b""
        assert names.name_of(main.f, same_main=True) == b"__main__:f"
        assert names.resolve(b"__main__:f") is main.f


def test_the_script_in_a_spawned_process(monkeypatch):
    # multiprocessing calls it __mp_main__, and binds both names to it.
    spawned = types.ModuleType("__mp_main__")
    exec("def f(): pass", vars(spawned))
    monkeypatch.setitem(sys.modules, "__mp_main__", spawned)
    monkeypatch.setitem(sys.modules, "__main__", spawned)
    assert Names().name_of(spawned.f, same_main=False) == b""
    assert Names().name_of(spawned.f, same_main=True) == b"__main__:f"
    assert Names().resolve(b"__main__:f") is spawned.f


def test_modules_registered_with_cloudpickle_have_no_names():
    names = Names()
    assert names.name_of(function, same_main=True)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        assert names.name_of(function, same_main=True) == b""
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert names.name_of(function, same_main=True)
