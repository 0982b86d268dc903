"""Values that are created on another worker: calls whose results stay there. Handles to them are in references/."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import tree_map
from ..errors import CallTimeoutError, HandedOverError, PeerLostError, text_of
from ..events import logger
from ..gradients import plain
from ..gradients.torch_modes import applied, current_modes
from ..messages import Call
from ..primitives import clock, current
from ..primitives.futures import Future
from ..primitives.interrupts import in_finaliser, interruptible
from ..references.entries import Entry, Held
from ..serialization.torch_objects import takes_tensors_only
from .calls import Calls, To
from .pending import PendingCall, limit_here
from .recomputing import recomputing_process, run_as_part

if TYPE_CHECKING:
    from ..worker import Worker

_LEAST = 1e-6  # seconds; a time limit of 0 would mean none


class Creations:
    """Makes the calls of one worker whose results become values."""

    def __init__(self, worker: Worker, calls: Calls) -> None:
        self._worker = worker
        self._calls = calls
        self._peers = calls.peers
        self._threads = calls.threads

    def create(self, to: To, body: Call, timeout: float | None) -> Entry:
        """Has another worker create a value. The entry counts as a handle: this is called in a critical section, in
        which it becomes one."""
        peer = self._peers.known_peers.get(to) if isinstance(to, (str, int)) else None
        if peer is None or peer.connection is None:
            limit = limit_here(timeout, self._worker.options.rpc_timeout)
            deadline = None if limit is None else clock.now() + limit
            try:
                peer, _ = self._calls.reach(to, limit)
                if deadline is not None:
                    timeout = max(_LEAST, deadline - clock.now())
            except CallTimeoutError as error:
                if not isinstance(error.__cause__, PeerLostError) or error.__cause__.worker_id < 0:
                    raise
                return self._late(error.__cause__.worker_id, body, limit, str(error))
        entry = self._worker.references.new(peer.member.id)
        try:
            self._calls.start(entry.owner, body, timeout, None, entry)
        except BaseException:
            if isinstance(entry, Held) and entry.creation is not None:
                self._worker.references.let_go(entry)  # it is handed over, and will be created there
            else:
                self._worker.references.forget(entry)
            raise
        return entry

    def _late(self, owner: int, body: Call, limit: float | None, text: str) -> Entry:
        """An entry for a value whose owner could not be reached in time. As where the answer is late, the handle says
        so when the value is asked for, and the value is created all the same, once the owner is reached: in the
        context and the modes of this call, and with the history of its tensors. Another worker may use the value, and
        gradients find their way back here."""
        again = self._as_now()
        copied = partial(_copied, follows=self._follows(body))
        args, kwargs = tree_map(copied, (body.args, body.kwargs))  # tensors, which the caller may overwrite now
        entry = self._worker.references.new(owner)
        assert isinstance(entry, Held)
        entry.creation = PendingCall(entry.id, "", self._peers.name_of(owner), limit, None)
        self._calls.fail(entry.creation, partial(CallTimeoutError, text))
        entry.handles += 1  # the message's
        send = partial(self._send, entry, Call(body.function, args, kwargs), None)
        self._threads.submit(partial(run_as_part, recomputing_process(), partial(again, send)))
        return entry

    def _as_now(self) -> Callable[[Callable[[], None]], None]:
        """A function that runs another one in the context and the modes of this code, on a thread of the worker."""
        context_id, modes, is_untracked = current.current_context_id(), current_modes(), plain.thread.untracked

        def run(task: Callable[[], None]) -> None:
            if not current.thread.is_workers:  # all threads have ended, and with them the worker: it will say so
                task()
                return
            token = current.context_id.set(context_id)
            try:
                with plain.untracked() if is_untracked else nullcontext(), applied(modes):
                    task()
            finally:
                current.context_id.reset(token)

        return run

    def _follows(self, body: Call) -> Callable[[Tensor], bool]:
        """A function that says whether gradients will be asked for a leaf that is an argument of this call. Like
        Calls.start() and Codec.pack(), which will send it."""
        options = self._worker.options
        if not current.current_context_id():
            followed = options.plain and not plain.thread.untracked and not torch.is_inference_mode_enabled()
            return lambda leaf: followed
        if options.plain or takes_tensors_only(body.function):
            return lambda leaf: True
        return lambda leaf: not isinstance(leaf, Parameter)

    def create_later(self, to: To, body: Call, timeout: float | None) -> Entry:
        """Creates a value for a finaliser that ran inside of telegrad's own code: another thread sends the message."""
        peer = self._peers.known(to)
        if peer is None:
            raise in_finaliser(f"rpc.remote() to worker {to!r}, which is not known here yet,")
        entry = self._worker.references.new(peer.member.id)
        entry.handles += 1  # the message's
        self._threads.submit_from_finaliser(partial(self._send, entry, body, timeout))
        return entry

    def _send(self, entry: Entry, body: Call, timeout: float | None) -> None:
        """Sends the message of a value whose handle was given out already. The message counts as a handle until it is
        sent: the owner must not hear that the last one has died before it is told to create the value."""
        try:
            self._calls.start(entry.owner, body, timeout, None, entry)
        except Exception as error:
            # As a text: a log handler that keeps its records must not keep the frames of the error.
            peer = self._peers.name_of(entry.owner)
            logger.warning(
                "worker %r: rpc.remote() to worker %r failed: %s", self._worker.name, peer, text_of(error)
            )  # fmt: skip
            if not isinstance(error.__cause__, HandedOverError):  # else it will be created there
                self._worker.references.forget(entry)
        finally:
            self._worker.references.let_go(entry)

    def future_of(self, entry: Held) -> Future:
        """The future of a value's creation: done when that is known."""
        call = entry.creation
        assert call is not None
        future = self._calls.future_of(call)

        def complete() -> None:
            self._calls.reader.wait_for(call, None)
            if call.make_error is not None:
                interruptible(future.fail, call.make_error, f"the creation of a value on worker {call.peer!r}")
            else:
                interruptible(future.set_result, None)

        self._threads.submit(partial(run_as_part, call.recomputes, complete))
        return future


def _copied(value: Any, follows: Callable[[Tensor], bool]) -> Any:
    """A tensor with memory of its own, and the history of the one that it is a copy of: as a leaf it would take the
    gradient of that one. Anything else as it is."""
    if type(value) not in (Tensor, Parameter):  # what other tensors are made of is their own affair
        return value
    if not value.requires_grad:
        return value.detach().clone()
    if value.is_leaf and not follows(value):  # it arrives as a leaf in any case
        leaf = value.detach().clone()
        return Parameter(leaf) if type(value) is Parameter else leaf.requires_grad_()
    with torch.inference_mode(False), torch.enable_grad():
        copy = value.clone()
    if type(value) is Parameter:
        copy._is_param = True  # it arrives as one, as the parameter itself would
    return copy
