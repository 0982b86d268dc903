"""The callee's side: runs the functions that other workers call, and answers. On threads of the worker, and never while
they hold the read lease, unless they can be relieved of it.

# Note [answers that nobody takes]
A caller that is stopped reads nothing, and a large answer waits until it does. The answer has the time that its call
has left: after that the caller, whose clock began to run earlier, waits for it no more. If nothing of it was written
by then it is dropped, all that was counted for it is undone, and the connection stays as it was: the peer may only be
slow. Of one that is half out the rest follows, from a thread that the connection has at most one of
(HandedOverError). A call with no limit is waited for as long as its connection lives, and so is the room for its
answer.
"""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .._torch import BaseFuture
from ..errors import (
    CallTimeoutError,
    DecodeError,
    EncodeError,
    GradientError,
    HandedOverError,
    MessageError,
    OutOfMemoryError,
    TooLargeError,
    TransportError,
    text_of,
)
from ..events import logger
from ..gradients.contexts import Context
from ..gradients.torch_modes import applied, is_changed, restore_defaults
from ..messages import Call, Envelope, Failure, Kind, Reply, shortened
from ..options import reversed_map
from ..primitives import clock, current, forks
from ..primitives.interrupts import finaliser
from ..primitives.memory import with_advice
from ..serialization.codec import Codec
from ..transport.base import Connection
from . import profiled_calls
from .changes import PLAIN, Sample, Watched, changed, watch
from .recomputing import Recomputation
from .threads import Threads

if TYPE_CHECKING:
    from ..worker import Worker
    from .reader import Incoming

_REPLY = int(Kind.REPLY)
SLOW = 3e-4  # seconds; a function that took longer had better not run on a thread that holds the lease
_MOST_SLOW = 10_000  # names

Look = Callable[[Any], str]  # at a call and its result: says which arguments were changed in place

ASYNC_MARK = "_wrapped_async_rpc_function"  # torch's own name, so its decorator works too
MAY_WAIT = "_telegrad_may_wait"  # on functions of telegrad's own: a future that one returns is waited for


class Server:
    """Serves the calls to one worker."""

    def __init__(self, worker: Worker, codec: Codec, threads: Threads) -> None:
        self._worker = worker
        self._codec = codec
        self._threads = threads
        self._serving: dict[int, str] = {}  # callers, by message id; its single operations are atomic
        self._slow: set[str] = set()  # functions that took long the last time
        self._commits = worker.engine.parts.commits  # see Note [.grad before the next call]
        self._sample = Sample()
        self._kept: weakref.WeakValueDictionary[str, Watched] = weakref.WeakValueDictionary()  # by function
        self._told: set[tuple[str, str]] = set()  # callers and functions: that its arguments were changed
        self._closed = False
        self.calls_served = 0
        _all.add(self)

    def close(self) -> None:
        """Runs no call any more that has not begun."""
        self._closed = True

    @property
    def being_served(self) -> int:
        """How many calls are being served, those that wait for a future included."""
        return len(self._serving)

    def on_call(self, message: Incoming) -> None:
        """Runs the function of a call and answers it."""
        if message.task is not None:
            message.task()
        connection, envelope, deadline = message.connection, message.envelope, message.deadline
        if self._commits.due:
            self._commits.add_due(deadline)  # where its time is over by then, it is not run
        if self._closed:
            return
        caller = connection.peer.name
        self._serving[envelope.id] = caller
        self.calls_served += 1
        token = current.serving.set(current.Serving(caller, envelope.id, deadline, envelope.depth))
        autograd, recomputes = envelope.autograd, envelope.modes.recomputes if envelope.modes is not None else 0
        recomputes_token = current.recomputes.set(recomputes) if recomputes else None
        if autograd is not None:
            context_token = current.context_id.set(autograd.context)
            pass_token = current.pass_id.set(autograd.during)
        try:
            if deadline is not None and clock.now() >= deadline:
                raise CallTimeoutError(
                    "RPC ran for more than set timeout: the call waited for a thread, or for gradients that are being "
                    "added to `.grad`, until then, and was not run"
                )
            if envelope.modes is None:
                try:
                    result, look, changed = self._run(message)
                finally:
                    if is_changed():
                        restore_defaults()
            else:
                with applied(envelope.modes):
                    result, look, changed = self._run(message)
        except BaseException as error:
            self._answer_failure(connection, envelope, deadline, error)
            return
        finally:
            current.serving.reset(token)
            if autograd is not None:
                current.context_id.reset(context_token)
                current.pass_id.reset(pass_token)
            if recomputes_token is not None:
                current.recomputes.reset(recomputes_token)
        del message
        if look is not None:
            # This thread is free: the answer is sent when the future completes.
            result.add_done_callback(partial(self._on_future, connection, envelope, deadline, look))
        else:
            self._answer(connection, envelope, deadline, result, changed)

    def _run(self, message: Incoming) -> tuple[Any, Look | None, str]:
        """Runs the function. Returns its result; what looks at the call when that is done, if it is a future whose
        value is the answer; and else, which arguments were changed in place, if the caller was not told yet."""
        envelope, thread = message.envelope, current.thread
        try:
            call = self._worker.decode(envelope, message.frames)
        except DecodeError as error:
            if isinstance(error.__cause__, TimeoutError | TransportError):
                raise  # a tensor on the caller's device did not come
            if isinstance(error, OutOfMemoryError):
                why = with_advice(str(error), "send less at once, or give that worker more memory")
                raise OutOfMemoryError(
                    f"worker {self._worker.name!r} could not read a call, which was not run: {why}"
                ) from error.__cause__
            raise DecodeError(
                f"the call cannot be rebuilt there: {error}. The RPC pickler does not serialize what a module has: a "
                "function and the classes of its arguments must be in modules that the callee can import (or in "
                "__main__ of the caller)"
            ) from error.__cause__
        assert isinstance(call, Call)
        function = call.function
        name = getattr(function, "__qualname__", "")
        if name in self._slow and thread.relieve is not None:
            thread.relieve()
        watched = None
        if call.kwargs or not PLAIN.issuperset(map(type, call.args)):
            watched = watch(call, name, self._sample)
        recomputation = None
        if envelope.modes is not None and envelope.modes.recomputes not in (0, current.process_id):
            recomputation = Recomputation()
        began = clock.now()
        try:
            thread.critical = 0  # users' code: see interrupts.py
            if envelope.profiling is None and not self._worker.events.subscribers:
                result = function(*call.args, **call.kwargs) if call.kwargs else function(*call.args)
            else:
                result = self._run_profiled(envelope, call, name)
        finally:
            thread.critical = 1
        if clock.now() - began > SLOW:
            if len(self._slow) < _MOST_SLOW:
                self._slow.add(name)
        elif name in self._slow:
            self._slow.discard(name)
        waits = hasattr(function, MAY_WAIT) and isinstance(result, BaseFuture)
        if hasattr(function, ASYNC_MARK):
            if not isinstance(result, BaseFuture):
                raise RuntimeError(
                    "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
                    f"{name} returned a {type(profiled_calls.value_of(result)).__name__}"
                )
            waits = True
        if waits:
            if watched is not None and not BaseFuture.done(result) and not self._may_keep(watched):
                watched = None
            return result, partial(self._look, envelope, name, watched, recomputation), ""
        if watched is None and recomputation is None:
            return result, None, ""
        return result, None, self._look(envelope, name, watched, recomputation, result)

    def _may_keep(self, watched: Watched) -> bool:
        """Says whether the arguments of a call may be kept until its future is done: of each function those of one
        call at a time, since they may be large."""
        name = watched.user_name()
        if name in self._kept:
            return False
        self._kept[name] = watched
        return True

    def _look(
        self, call: Envelope, name: str, watched: Watched | None, recomputation: Recomputation | None, result: Any
    ) -> str:
        """Looks at a call whose result is there: refuses the result if a checkpoint could not use it, and says which
        arguments were changed in place, the first time that the function does so for a caller."""
        if recomputation is not None:
            recomputation.check(self._worker.name, name)
        if watched is None or not (what := changed(watched, result)):
            return ""
        key = (self._serving.get(call.id, ""), watched.user_name())
        if key in self._told:
            return ""
        if len(self._told) < _MOST_SLOW:
            self._told.add(key)
        return f"{what} of {key[1]}"

    def _run_profiled(self, envelope: Envelope, call: Call, name: str) -> Any:
        """Runs the function: its result, with what it cost where the caller asks for that."""
        worker, kwargs = self._worker, call.kwargs or {}
        settings = envelope.profiling.call if envelope.profiling else None
        with worker.events.span("run", "call", envelope.id, self._serving[envelope.id], name):
            if settings is None:
                return call.function(*call.args, **kwargs)
            return profiled_calls.run(settings, worker.id, partial(call.function, *call.args, **kwargs))

    @finaliser
    def _on_future(
        self, connection: Connection, call: Envelope, deadline: float | None, look: Look, future: Any
    ) -> None:
        self._threads.submit(partial(self._answer_future, connection, call, deadline, look, future))

    def _answer_future(
        self, connection: Connection, call: Envelope, deadline: float | None, look: Look, future: Any
    ) -> None:
        try:
            result = BaseFuture.wait(future)  # and not value(): this thread's streams wait for those that made it
            changed = look(result)
        except BaseException as error:
            self._answer_failure(connection, call, deadline, error)
        else:
            self._answer(connection, call, deadline, result, changed)

    def _answer(
        self, connection: Connection, call: Envelope, deadline: float | None, result: Any, changed: str = ""
    ) -> None:
        """Answers a call whose caller waits until the deadline: see Note [answers that nobody takes]."""
        worker = self._worker
        if call.creates:
            result = self._keep(call.creates, result)
        envelope = Envelope(_REPLY, worker.new_message_id(), call.id, changed=changed)
        if call.device_map is not None:
            envelope.device_map = reversed_map(call.device_map)
        try:
            left = None if deadline is None else max(0.0, deadline - clock.now())
            worker.send(connection, envelope, Reply(result), left, None, self._context_of(call))
            self._serving.pop(call.id, None)
        except TransportError as error:
            self._give_up(connection, call, error)
        except BaseException as error:
            forks.leave_if_orphan(error)
            if isinstance(error, HandedOverError) or (isinstance(error, TimeoutError) and deadline is not None):
                self._give_up(connection, call, error)
                return
            if isinstance(error, EncodeError):
                error = EncodeError(f"the result, a {type(result).__name__}, cannot be sent back: {error}")
            self._answer_failure(connection, call, deadline, error)

    def _context_of(self, call: Envelope) -> Context | None:
        """The context in which a call is answered."""
        if call.autograd is not None and call.autograd.context:
            return self._worker.attach.context_of(call)
        if not call.untracked and (call.modes is None or not call.modes.inference):
            return self._worker.contexts.plain  # the caller follows tensors outside of contexts
        return None

    def _keep(self, creates: int, result: Any) -> Any:
        """Keeps the result here; what is answered instead."""
        if type(result) is profiled_calls.Profiled:
            self._worker.references.set_value(creates, result.value)
            return profiled_calls.Profiled(None, result.events, result.seconds)
        self._worker.references.set_value(creates, result)
        return None

    def _answer_failure(
        self, connection: Connection, call: Envelope, deadline: float | None, error: BaseException
    ) -> None:
        worker = self._worker
        try:
            context = None if call.creates else self._context_of(call)
            try:
                text = "".join(traceback.format_exception(error))
                how = (context is not None, context is worker.contexts.plain)
                failure = self._codec.encode_exception(error, text, connection.peer, *how)
            except MemoryError:
                text = ""
                failure = Failure(b"", type(error).__qualname__, text_of(error), "")
            if call.creates:  # raised where the value is asked for
                worker.references.set_error(call.creates, error)
            error.__traceback__ = None  # an exception that is kept must not keep our frames, and what they hold
            if failure.tensors is not None:
                try:
                    self._send_failure(connection, call, deadline, failure, context)
                    return
                except (MessageError, GradientError):  # the context has ended, or a device has no map
                    failure = self._codec.encode_exception(error, text, connection.peer)
            try:
                self._send_failure(connection, call, deadline, failure)
            except (TooLargeError, MemoryError):
                self._send_failure(connection, call, deadline, shortened(failure))
        except (TransportError, TimeoutError) as lost:
            self._give_up(connection, call, lost)
        finally:
            self._serving.pop(call.id, None)

    def _send_failure(
        self,
        connection: Connection,
        call: Envelope,
        deadline: float | None,
        failure: Failure,
        context: Context | None = None,
    ) -> None:
        worker = self._worker
        envelope = Envelope(Kind.FAILURE, worker.new_message_id(), call.id)
        if failure.tensors is not None and call.device_map is not None:
            envelope.device_map = reversed_map(call.device_map)
        left = None if deadline is None else max(0.0, deadline - clock.now())
        worker.send(connection, envelope, failure, left, None, context)

    def _give_up(self, connection: Connection, call: Envelope, error: BaseException) -> None:
        self._serving.pop(call.id, None)
        logger.info("worker %r has not got the answer to its call: %s", connection.peer.name, str(error))

    def abandon(self) -> None:
        """In a fork: a function that has forked and comes back in the child is not answered from there."""
        self._closed = True
        self._answer = lambda *_: forks.leave_if_orphan()  # type: ignore[method-assign]
        self._answer_failure = lambda *args: forks.leave_if_orphan(args[-1])  # type: ignore[method-assign]


_all: weakref.WeakSet[Server] = weakref.WeakSet()


def _in_child() -> None:
    for server in list(_all):
        server.abandon()


os.register_at_fork(after_in_child=_in_child)
