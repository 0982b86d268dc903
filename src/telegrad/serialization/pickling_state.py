"""The state of one message while it is pickled (Outgoing) and while it is unpickled (unpickling)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ..messages import Placed
from ..transport.base import Frames
from .devices import Targets
from .handles import Handle

if TYPE_CHECKING:
    from .by_value_cache import Definition
    from .values import Values


MANY = 6  # tensors; up to so many are described faster one by one


class Outgoing(msgspec.Struct, eq=False):
    """A message that is being pickled."""

    peer: int
    same_main: bool  # whether the peer runs the same script as this worker
    # The tensors that require grad, in a message whose gradients will be asked for; None in any other.
    tracked: list[torch.Tensor] | None = None
    targets: Targets | None = None  # where its tensors are to arrive
    connection: Any = None  # that it goes by; None: it cannot lie in device memory
    placed: list[Placed] = []  # tensors that do
    put: dict[int, tuple[torch.Tensor, int]] = {}  # by id: these tensors, and their places in the list
    keep: list[Any] = []  # what the memory of tensors belongs to
    carried: list[Definition] | None = []  # None: it cannot carry any
    handles: list[Handle] | None = []  # None: it cannot carry any
    # Tensors that the pickle of the values only counts: those that are tracked, and what is plain after the first few.
    apart: list[torch.Tensor] = []
    in_place: int = 10  # how many more plain ones the pickle describes itself
    # The addresses of tensors in modules, which are not tracked outside of contexts nor in exceptions; else None.
    in_modules: set[int] | None = None
    copies_parameters: bool = False  # parameters are not tracked either: they arrive as leaves
    # Where tensors that are not tracked lose their history: all that have one, and leaves too, if `in_modules` is a set
    # that lacks them. See severed.py. Empty: they arrive as leaves.
    severed: str = ""

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether it follows a tensor that requires grad; else that goes by value."""
        if self.tracked is None:
            return False
        if self.copies_parameters:
            return not (tensor.is_leaf and isinstance(tensor, torch.nn.Parameter))
        return not self.in_modules or id(tensor) not in self.in_modules

    def severs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that requires grad, and is not followed, loses its history."""
        if not self.severed:
            return False
        return tensor.grad_fn is not None or (self.in_modules is not None and id(tensor) not in self.in_modules)


class unpickling:
    """A message that this thread unpickles: which worker it came to, from which other one (None: from none), and its
    tensors that stand apart, with the history of those that are tracked. Pickle has no place to hand this to the
    functions that it calls. A constructor that is called meanwhile may make calls of its own, so these nest."""

    def __init__(
        self, at: Values, sender: int | None, apart: Sequence[torch.Tensor] = (), frames: Frames | None = None,
        deadline: float | None = None,
    ) -> None:  # fmt: skip
        self.at = at
        self.sender = sender
        self.take = iter(apart).__next__  # they are taken in the order in which they stand
        self.frames = frames  # of a message with tensors in device memory
        self.deadline = deadline  # of the call that it belongs to

    def __enter__(self) -> None:
        self._before = getattr(_thread, "message", None)
        _thread.message = self

    def __exit__(self, *_: object) -> None:
        _thread.message = self._before


_thread = threading.local()


def arriving() -> unpickling:
    """The message that this thread unpickles."""
    return _thread.message  # type: ignore[no-any-return]


def defined(owner: int, number: int) -> Any:
    """In a pickle: the definition that a worker has given a number."""
    return arriving().at.definitions.get(owner, number)


def of_main(qualname: str) -> Any:
    """In a pickle: a function or class of `__main__`, of a worker that runs the same script."""
    message = arriving()
    return message.at.of_main(message.sender, qualname, message.deadline)


def received_handle(id: int, owner: int) -> Any:
    """In a pickle: the worker that it came to, and its entry for a value of a worker."""
    return arriving().at.handle(id, owner)
