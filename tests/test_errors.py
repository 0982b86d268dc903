"""Errors travel: whatever telegrad raises on one worker can be caught by its type on another."""

from __future__ import annotations

import pickle

import pytest

from telegrad import errors

MADE = {
    errors.OptimizerError: lambda: errors.OptimizerError("the step", {"a": ValueError("no")}, ["b"]),
    errors.BackwardError: lambda: errors.BackwardError("Error on Node 1: no", "b", 1),
    errors.RemoteTraceback: lambda: errors.RemoteTraceback("b", "Traceback"),
}
ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_each_can_be_sent(kind: type[BaseException]) -> None:
    error = MADE.get(kind, lambda: kind("no"))()
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind
    assert str(found) == str(error)
    assert {name: repr(value) for name, value in vars(found).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }
