"""Marks on users' functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .runtime.serving import ASYNC_MARK


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Says that a function returns a Future, whose value is the answer to the call.

    The thread that runs the function is free as soon as it returns. Goes inside @staticmethod and
    @classmethod, as in torch.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper
