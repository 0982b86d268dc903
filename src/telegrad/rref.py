"""RRef: a handle to a value on its owner.

    remote(), RRef(value)   -> a handle here, counted in this worker's table (references/)
    in a message            -> a handle there; see Note [credits] in references/table.py
    to_here(), rpc_sync()   -> calls to the owner

The value lives while any handle lives anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from signal import SIGINT
from typing import Any, Generic, TypeVar

import torch

from ._torch import BaseFuture, tree_leaves, tree_map
from .errors import CallTimeoutError, EncodeError, GradientError, NotStartedError, PeerLostError
from .messages import WorkerInfo
from .primitives import current, interrupts
from .primitives.current import current_worker
from .primitives.futures import Future
from .primitives.interrupts import critical, finaliser, getsignal, on_signal
from .primitives.untraced import untraced_methods
from .references.entries import Entry, Owned
from .runtime.changes import calls_users
from .runtime.pending import UNSET_TIMEOUT, limit_here
from .runtime.serving import MAY_WAIT
from .serialization.handles import Handle
from .serialization.pickling_state import received_handle
from .worker import Worker

T = TypeVar("T")
Function = Callable[..., Any]


@untraced_methods
class RRef(Handle, Generic[T]):
    """A handle to a value. Made by `remote()` for one on another worker; `RRef(value)` makes one to a value here.

    It can be sent to any worker, in arguments and results, and wherever in them it is.
    """

    entry: Entry

    def __init__(self, value: T, type_hint: Any = None) -> None:
        self._worker = current_worker()
        self._worker.check_open()
        self.entry = self._worker.references.own(value)

    @classmethod
    def _of(cls, worker: Worker, entry: Entry) -> RRef[Any]:
        """For an entry in which this handle is counted already."""
        self = cls.__new__(cls)
        self._worker, self.entry = worker, entry
        return self

    @finaliser
    def __del__(self) -> None:
        # A finaliser: it may run on any thread, under any lock.
        entry = getattr(self, "entry", None)
        if entry is not None:
            self._worker.references.let_go(entry)

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: Any) -> RRef[T]:
        return self.__reduce__()  # type: ignore[no-any-return]  # raises, as torch's does

    def __str__(self) -> str:
        made_by, number = self.entry.id >> 48, self.entry.id & ((1 << 48) - 1)
        id = f"GloballyUniqueId(created_on={made_by}, local_id={number})"
        if self.is_owner():
            return f"OwnerRRef({id})"
        owner = self._worker.name_of(self.entry.owner)  # which asks nobody: a text must not wait
        return f"UserRRef(RRefId = {id}, owner = {owner!r})"

    __repr__ = __str__

    # -- whose it is -----------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return WorkerInfo(self.owner_name(), self.entry.owner)

    def owner_name(self) -> str:
        """The name of the worker that has the value. For one that this worker has not met, the group's store is asked:
        within the deadline of the call that this code runs in, or `Options.rpc_timeout`."""
        return self._worker.name if self.is_owner() else self._worker.look_up_name(self.entry.owner)

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return self.entry.owner == self._worker.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this handle."""
        entry = self.entry
        if isinstance(entry, Owned):
            return True
        return entry.confirmed or (entry.creation is not None and entry.creation.done)

    # -- the value -------------------------------------------------------------------------------------

    def local_value(self) -> T:
        """The value itself, on its owner.

        Raises:
            RuntimeError: this worker is not the owner.
            Whatever was raised when the value was to be created.
        """
        entry = self.entry
        if not isinstance(entry, Owned):
            raise RuntimeError(
                f"For {self}, can't call localValue() on user {self._worker.info()}. Call it on owner {self.owner()}"
            )
        return self._worker.references.value_of(entry, self._limit(UNSET_TIMEOUT))  # type: ignore[no-any-return]

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """The value: itself on its owner, a copy elsewhere. Waits until it was created.

        In an autograd context gradients flow back through it.

        Raises:
            CallTimeoutError, PeerLostError, ValueGoneError
            Whatever was raised when the value was to be created.
        """
        entry = self.entry
        if isinstance(entry, Owned):
            return self._worker.references.value_of(entry, self._limit(timeout))  # type: ignore[no-any-return]
        worker, creation = self._worker, entry.creation
        if worker.closed_because:
            self._check_open("to_here() on it")
        if creation is not None and creation.make_error is not None:
            self.check_creation()
        return worker.calls.call(entry.owner, _fetch, (entry.id,), None, timeout)  # type: ignore[no-any-return]

    def to_here_async(self, timeout: float = UNSET_TIMEOUT) -> torch.futures.Future[T]:
        """The value's future, which can be waited for and awaited. `await rref` does the same."""
        self.check_creation()
        return self._worker.call_async(self.entry.owner, _fetch, (self,), None, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.to_here_async().__await__()  # type: ignore[attr-defined, no-any-return]

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs backward from the value, which must be a tensor with one element: in a context, or (-1) with torch's
        own autograd on the owner."""
        if self.is_owner():
            _backward_from(self.local_value(), dist_autograd_ctx_id, retain_graph)
        else:
            args = (self.entry.id, dist_autograd_ctx_id, retain_graph)
            self._worker.call(self.entry.owner, _backward, args)

    # -- calls of its methods --------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """`rref.rpc_sync().method(...)` calls a method of the value on its owner, and returns the result."""
        # Its id is enough: the caller keeps this handle until it has the answer.
        return _Methods(self, self.entry.id, self._worker.call, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """The same, and returns the result's future."""
        return _Methods(self, self, self._worker.call_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """The same, and returns a handle to the result, which stays there."""
        return _Methods(self, self, partial(create, self._worker), timeout)

    # -- torch's private names -------------------------------------------------------------------------

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """The value's type, or its future."""
        if blocking and self.is_owner():
            return type(self.local_value())
        self.check_creation()
        future = self._worker.call_async(self.entry.owner, _type_of, (self,), None, timeout)
        return future.wait() if blocking else future

    def _get_future(self) -> torch.futures.Future[None]:
        """Done when the value was created."""
        entry = self.entry
        if isinstance(entry, Owned):
            raise RuntimeError("_get_future can only be called on the user side: the owner has the value itself")
        if entry.creation is None:
            raise RuntimeError(f"{self} was not made by remote() on this worker")
        return self._worker.creation_of(entry)

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling_future = future

    def _get_profiling_future(self) -> Any:
        """Done when the events of the value's creation are in the profile."""
        return self._profiling_future

    def _serialize(self) -> Any:
        """torch's RPC pickler calls it, which is not what sends RRefs here."""
        self._check_open("fork an UserRRef")
        return self.__reduce__()

    def _check_open(self, use: str) -> None:
        if self._worker.is_closed:
            raise NotStartedError(
                f"{self} ended with worker {self._worker.name!r}, which has shut down. Cannot call {use} "
                f"after deletion."
            )

    def _limit(self, timeout: float) -> float | None:
        return limit_here(timeout, self._worker.options.rpc_timeout)

    def check_creation(self) -> None:
        """Raises if it is known already that the value was not created."""
        creation = getattr(self.entry, "creation", None)
        if creation is None or creation.make_error is None:
            return
        error = creation.make_error()
        if isinstance(error, CallTimeoutError):
            raise CallTimeoutError(
                f"RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does "
                f"not exist: {error}"
            ) from error
        if isinstance(error, PeerLostError):
            raise PeerLostError(f"the owner of {self} is gone: {error}") from error
        raise error


@untraced_methods
class _Methods:
    """The methods of a value, each as a call to its owner. `value` is what the call names it by: a handle, which
    keeps the value until the call has run, or its id."""

    def __init__(self, rref: RRef[Any], value: RRef[Any] | int, call: Function, timeout: float) -> None:
        self._rref = rref
        self._value = value
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Function:
        return partial(self._call_method, name)

    def _call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        self._rref.check_creation()
        all_args = (self._value, name, args, kwargs)
        return self._call(self._rref.entry.owner, _invoke, all_args, None, self._timeout)


def create(
    worker: Worker,
    to: str | int | WorkerInfo,
    function: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    timeout: float | None,
) -> RRef[Any]:
    """See rpc.remote()."""
    thread = current.thread
    before = thread.critical
    thread.critical = before + 1  # an interrupt must not come between the value and its handle
    try:
        if thread.is_main and getsignal(SIGINT) is not on_signal:
            interrupts.guard()
        return RRef._of(worker, worker.create(to, function, args, kwargs, timeout))
    finally:
        thread.critical = before
        if interrupts.deferred and not before:
            interrupts.deliver()


def _received(id: int, owner: int) -> RRef[Any]:
    """In a pickle: a handle that came in a message."""
    with critical():  # between being counted and being there
        return RRef._of(*received_handle(id, owner))


RRef.rebuild = staticmethod(_received)


# -- run by the owner --------------------------------------------------------------------------------------


def _may_wait(function: Function) -> Function:
    setattr(function, MAY_WAIT, True)
    return function


@_may_wait
def _fetch(value: RRef[Any] | int) -> Any:
    worker = current_worker()
    id = value.entry.id if isinstance(value, RRef) else value
    found = worker.references.fetch(id, None if worker.options.plain else _followed)
    if isinstance(found, BaseFuture) and not isinstance(found, Future):
        # The value itself, which is not to be waited for.
        raise EncodeError("Can not pickle torch.futures.Future: the value of this RRef is one, and stays where it is")
    return found


def _followed(value: Any) -> Any:
    """Replaces parameters by views of them, which gradients come back from, in a value made of tensors only: torch's
    RPC holds one that RRef(value) was given in C++, where a parameter is a tensor like any other."""
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
        return value
    with torch.enable_grad():
        return tree_map(lambda leaf: leaf.view_as(leaf) if isinstance(leaf, torch.nn.Parameter) else leaf, value)


def value_here(value: RRef[Any] | int) -> Any:
    """A value of this worker, once it was created; at most until the deadline of the call that asks for it."""
    id = value.entry.id if isinstance(value, RRef) else value
    references = current_worker().references
    entry = references.find_set(id)
    if entry is not None:
        return entry.result()
    return references.find(id, limit_here(0, 0))


@_may_wait
def _invoke(value: RRef[Any] | int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(value_here(value), name)(*args, **kwargs)


calls_users(_invoke, lambda value, name, args, kwargs: (lambda: name, (args, kwargs)))


def _type_of(value: RRef[Any]) -> type:
    return type(value_here(value))


def _backward(id: int, context_id: int, retain_graph: bool) -> None:
    _backward_from(value_here(id), context_id, retain_graph)


def _backward_from(value: Any, context_id: int, retain_graph: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise GradientError(f"RRef should contain a tensor for .backward(), not a {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
        return
    worker = current_worker()
    timeout = limit_here(None, worker.options.rpc_timeout)
    worker.engine.backward(context_id, [value], None, None, (timeout, retain_graph, False, False))
