"""The arguments of a call, as users give them: a tuple or list, and a dict."""

from __future__ import annotations

from typing import Any


def checked(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """Returns the arguments as a tuple and a dict. None stands for no arguments.

    Raises:
        TypeError: `args` is neither a tuple nor a list, or `kwargs` is no dict. A tensor or a string could be unpacked,
            and the function would get something else than its caller meant.
    """
    if args is not None and not isinstance(args, tuple | list):
        raise TypeError(f"args is a tuple, not a {type(args).__name__}; did you mean args=(x,)?")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs is a dict, not a {type(kwargs).__name__}; did you mean kwargs={{'name': x}}?")
    return () if args is None else tuple(args), kwargs
