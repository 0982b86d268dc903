"""torch.compile breaks its graph at telegrad's public calls, and runs them as they are.

dynamo looks at two things, and this module sets both without importing it, which would take more than a second: an
attribute of the function when it meets a call of it, and what the code object says to do with frames of it, which
here is to run them and everything that they call.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

from .._torch import eval_frame

F = TypeVar("F", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

_RUN_AS_IT_IS = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(function: F) -> F:
    """Marks a function that torch.compile does not look into. It costs nothing when the function is called."""
    eval_frame.set_code_exec_strategy(function.__code__, _RUN_AS_IT_IS)
    function.__dict__.update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="it is a call to another worker",
        _torchdynamo_disable_recursive=True,
    )
    return function


def untraced_methods(cls: Class) -> Class:
    """Marks all methods of a class."""
    for member in vars(cls).values():
        if isinstance(member, types.FunctionType):
            untraced(member)
    return cls
