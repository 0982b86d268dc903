"""Handle: what the codec must know of an RRef. It can be sent in messages, and pickled in no other way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .._torch import extract_tensors


class Handle:
    """Stands for a value of a worker. `entry` is that in the worker's table of references."""

    entry: Any
    rebuild: Callable[[int, int], Any]  # (value, owner): what a pickle calls where it arrives

    def __reduce__(self) -> Any:
        if sys._getframe(1).f_code is extract_tensors.__code__:
            return object, ()  # a future of torch's looks for tensors in its value, by pickling it: there are none here
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: an RRef stands for a "
            "value that its owner keeps only as long as it knows who has one"
        )
