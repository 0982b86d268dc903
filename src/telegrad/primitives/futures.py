"""The future of a call: torch's own Future, which can also be awaited, and waited for with a time limit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .._torch import BaseFuture
from ..errors import CallTimeoutError
from . import current
from .forks import leave_if_orphan
from .interrupts import calling_back, critical, finaliser, in_finaliser
from .untraced import untraced, untraced_methods

if TYPE_CHECKING:
    from ..runtime.pending import PendingCall


# Note [futures and devices]
# A future that has devices lets the current streams of a thread that asks for its value wait for the work that was
# queued when it was completed; and so do those that `then` and collect_all make of it. To find the tensors, torch
# pickles the value, which not every value can be. So a future has devices only if tensors on some are likely to come:
# its call takes some along, or its function has returned some before. Others are completed when the work is done.
devices: list[torch.device] = []  # all that there are, once a tensor on one has come or gone


def use_devices(device: torch.device | None = None) -> None:
    """Notes that tensors on devices come or go; on this one, in what this thread decodes."""
    if not devices and (kind := torch.accelerator.current_accelerator()) is not None:
        devices[:] = [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    if device is not None and device not in current.thread.used_devices:
        current.thread.used_devices = (*current.thread.used_devices, device)


os.register_at_fork(after_in_child=devices.clear)


@untraced_methods
class Future(torch.futures.Future[Any]):
    """The future of a call, as rpc_async() returns it.

    `torch.futures.wait_all`, `collect_all` and `then` work on it as on any other. A call that failed and that
    was never asked about is logged when its future dies.
    """

    def __init__(
        self,
        help_wait: Callable[[PendingCall, float | None], None],
        log_later: Callable[[str], None],
        of_devices: Sequence[torch.device] = (),
    ) -> None:
        # Here and below without torch's wrappers in Python, of which each call would cost several.
        BaseFuture.__init__(self, list(of_devices) if of_devices else [])
        self.call: PendingCall | None = None
        self._help_wait = help_wait
        self._log_later = log_later
        self.has_callbacks = False  # completing it runs users' code
        self.has_devices = bool(of_devices)
        self._failure: _Failure | None = None

    def wait(self, timeout: float | None = None) -> Any:
        """The result; raises what the call raised.

        Raises:
            CallTimeoutError: `timeout` seconds have passed. The call itself goes on, and can be waited for again.
        """
        if not BaseFuture.done(self):
            if current.thread.critical:
                raise in_finaliser("Future.wait()")
            call = self.call
            if call is not None:
                self._help_wait(call, timeout)
                if timeout is not None and not call.done:
                    raise CallTimeoutError(
                        f"no answer from worker {call.peer!r} to the call of {call.function} within {timeout} s"
                    )
        return BaseFuture.wait(self)

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """As torch's. The callback runs in the autograd context that this was called in."""
        self._with_callback()
        return calling_back(super().then, _in_this_context(callback))

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """As torch's. The callback runs in the autograd context that this was called in."""
        self._with_callback()
        calling_back(super().add_done_callback, _in_this_context(callback))

    def set_result(self, result: Any) -> None:
        """As torch's."""
        calling_back(super().set_result, result)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        with critical():  # where it is done, torch calls back at once
            self.add_done_callback(partial(_wake, loop, waiter))
        yield from waiter
        return self.wait()

    # -- for the worker --------------------------------------------------------------------------------

    def fail(self, make_error: Callable[[], BaseException], description: str) -> None:
        """Completes it with an error, made anew for each thread that asks.

        torch keeps the function below where the garbage collector cannot see it. An exception that it held
        would hold the frames that it passed through, and with them this future, for ever.
        """
        text = f"{description} failed, and no one waited for it: {make_error()!r}"
        seen: list[None] = []
        self._failure = _Failure(text, seen, self._log_later)
        if self.has_callbacks:  # after that, so that a callback which is added meanwhile sees the failure, or is seen
            seen.append(None)

        def unwrap(_: object) -> Any:
            seen.append(None)
            raise make_error()

        # torch calls this for each that asks for the value, wait_all() and collect_all() included.
        self._set_unwrap_func(unwrap)
        self.set_result(None)

    def _with_callback(self) -> None:
        self.has_callbacks = True
        if self._failure is not None:
            self._failure.seen.append(None)


@finaliser
def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], _: object) -> None:
    try:
        loop.call_soon_threadsafe(partial(_set_done, waiter))
    except RuntimeError:
        pass  # the loop was closed, and nothing awaits any more


def _set_done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _in_this_context(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a callback that runs in the autograd context that is current now, on whichever thread."""
    if not callable(callback):
        return callback  # torch says what is wrong
    return partial(_run_in, current.current_context_id(), callback)


@untraced
def _run_in(context_id: int, callback: Callable[[Any], Any], future: Any) -> Any:
    token = current.context_id.set(context_id) if context_id else None
    try:
        return callback(future)
    except BaseException as error:
        leave_if_orphan(error)  # torch would make another error of it, or drop it
        raise
    finally:
        if token is not None:
            current.context_id.reset(token)


class _Failure:
    """What is logged when a future dies, unless it was seen. Only futures that failed have a finaliser."""

    def __init__(self, text: str, seen: list[None], log_later: Callable[[str], None]) -> None:
        self._text = text
        self.seen = seen
        self._log_later = log_later

    @finaliser
    def __del__(self) -> None:
        # It may run on any thread, under any lock, so it leaves a note and does no more.
        if not self.seen:
            self._log_later(self._text)
