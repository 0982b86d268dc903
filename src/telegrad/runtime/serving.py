"""What happens to a message that has arrived: a call is run and answered, an answer goes to who waits for it.

Everything here runs on the threads of the worker, or on a thread that waits for its own answer, and never
while a connection is being read.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from .._torch import BaseFuture
from ..errors import (
    CallTimeoutError,
    DecodeError,
    EncodeError,
    GradientError,
    RemoteError,
    TooLargeError,
    TransportError,
)
from ..events import Events, Span, logger
from ..gradients.attach import Attach, NoHistoryError, refuse
from ..gradients.contexts import Context
from ..gradients.torch_modes import applied, restore_defaults
from ..messages import Call, Envelope, Failure, Kind, Reply, shortened
from ..primitives import clock, current
from ..references.table import References
from ..serialization.codec import Body, Codec
from ..transport.base import Connection, Frames
from . import profiled_calls
from .pending import PendingCall, PendingCalls

Send = Callable[[Connection, Envelope, Body, float | None, PendingCall | None, Context | None], None]

SLOW = 3e-4  # seconds; a function that took longer had better not run on a thread that is also to read

ASYNC_MARK = "_wrapped_async_rpc_function"  # torch's own name, so its decorator works too
MAY_WAIT = "_telegrad_may_wait"  # on functions of ours: a future that it returns is waited for


class Dispatch:
    """`send` answers a call; `submit` runs a function on a thread of the worker."""

    def __init__(
        self,
        codec: Codec,
        pending: PendingCalls,
        send: Send,
        submit: Callable[[Callable[[], None]], None],
        new_id: Callable[[], int],
        attach: Attach,
        references: References,
        events: Events,
    ) -> None:
        self._events = events
        self._references = references
        self._attach = attach
        self._codec = codec
        self._pending = pending
        self._send = send
        self._submit = submit
        self._new_id = new_id
        self._unanswered: dict[int, str] = {}  # calls being served, by id; its single operations are atomic
        self._slow: set[str] = set()  # functions that took long the last time
        self._closed = False
        self.calls_served = 0
        self.late_answers = 0

    def close(self) -> None:
        """Runs no call any more that has not begun."""
        self._closed = True

    # -- calls -----------------------------------------------------------------------------------------

    @property
    def unanswered(self) -> int:
        """How many calls are being served, those that wait for a future included."""
        return len(self._unanswered)

    def on_call(self, connection: Connection, envelope: Envelope, frames: Frames, deadline: float | None) -> None:
        """Runs the function of a call and answers it."""
        if self._closed:
            return
        peer = connection.peer
        self._unanswered[envelope.id] = peer.name
        self.calls_served += 1
        token = current.serving.set(current.Serving(peer.name, envelope.id, deadline, envelope.depth))
        autograd = envelope.autograd
        if autograd is not None:
            context_token = current.context_id.set(autograd.context)
            pass_token = current.pass_id.set(autograd.during)
        try:
            if deadline is not None and clock.now() > deadline:
                raise CallTimeoutError(
                    "RPC ran for more than set timeout: the call waited for a thread until then, and was not run"
                )
            if envelope.modes is None:
                try:
                    result, is_async = self._run(envelope, frames)
                finally:
                    restore_defaults()
            else:
                with applied(envelope.modes):
                    result, is_async = self._run(envelope, frames)
        except BaseException as error:
            self._answer_failure(connection, envelope, error)
            return
        finally:
            current.serving.reset(token)
            if autograd is not None:
                current.context_id.reset(context_token)
                current.pass_id.reset(pass_token)
        del frames
        if is_async:
            # The thread is free: whoever completes the future sends the answer.
            result.add_done_callback(
                lambda future: self._submit(lambda: self._answer_future(connection, envelope, future))
            )
        else:
            self._answer(connection, envelope, result)

    def _run(self, envelope: Envelope, frames: Frames) -> tuple[Any, bool]:
        decoding = self._report("decode", "call", envelope) if self._events.subscribers else None
        try:
            call = self._codec.decode(envelope, frames, self._attach.incoming(envelope))
        except DecodeError as error:
            raise DecodeError(
                f"the call cannot be rebuilt there: {error}. The RPC pickler does not serialize what a module has: a "
                "function and the classes of its arguments must be in modules that the callee can import (or in "
                "__main__ of the caller)"
            ) from error.__cause__
        assert isinstance(call, Call)
        if decoding is not None:
            decoding.end()
        function = call.function
        name = getattr(function, "__qualname__", "")
        if name in self._slow and current.thread.relieve is not None:
            current.thread.relieve()
        began = clock.now()
        thread = current.thread
        try:
            thread.critical = 0  # users' code: see interrupts.py
            if envelope.profiling is None and not self._events.subscribers:
                result = function(*call.args, **call.kwargs) if call.kwargs else function(*call.args)
            else:
                result = self._run_profiled(envelope, call, name)
        finally:
            thread.critical = 1
        self._remember(name, clock.now() - began)
        if hasattr(function, ASYNC_MARK):
            if not isinstance(result, BaseFuture):
                raise RuntimeError(
                    "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
                    f"{name} returned a {type(profiled_calls.value_of(result)).__name__}"
                )
            return result, True
        return result, hasattr(function, MAY_WAIT) and isinstance(result, BaseFuture)

    def _run_profiled(self, envelope: Envelope, call: Call, name: str) -> Any:
        """The function's result, or that and what it cost, where the caller asks for it."""
        function, settings = call.function, envelope.profiling.call if envelope.profiling else None
        with self._report("run", "call", envelope, name):
            if settings is None:
                return function(*call.args, **call.kwargs or {})
            worker = current.current_worker().id
            return profiled_calls.run(settings, worker, lambda: function(*call.args, **call.kwargs or {}))

    def _report(self, stage: str, kind: str, envelope: Envelope, detail: str = "") -> Span:
        serving = current.serving.get()
        return self._events.span(stage, kind, envelope.id, serving.caller if serving else "", detail)

    def _remember(self, name: str, took: float) -> None:
        if took > SLOW:
            if len(self._slow) < 10_000:
                self._slow.add(name)
        elif name in self._slow:
            self._slow.discard(name)

    def _answer_future(self, connection: Connection, envelope: Envelope, future: Any) -> None:
        try:
            result = future.value() if hasattr(future, "value") else future.wait()
        except BaseException as error:
            self._answer_failure(connection, envelope, error)
        else:
            self._answer(connection, envelope, result)

    def _answer(self, connection: Connection, call: Envelope, result: Any) -> None:
        if call.creates:
            result = self._keep(call.creates, result)
        envelope = Envelope(Kind.REPLY, self._new_id(), call.id)
        try:
            self._send(connection, envelope, Reply(result), None, None, self._attach.context_of(call))
            self._unanswered.pop(call.id, None)
        except TransportError as error:
            self._give_up(connection, call, error)
        except BaseException as error:
            if isinstance(error, EncodeError):
                error = EncodeError(f"the result, a {type(result).__name__}, cannot be sent back: {error}")
            self._answer_failure(connection, call, error)

    def _keep(self, creates: int, result: Any) -> Any:
        """The result stays here. Returns what is answered."""
        if type(result) is profiled_calls.Profiled:
            self._references.set_value(creates, result.value)
            return profiled_calls.Profiled(None, result.events, result.seconds)
        self._references.set_value(creates, result)
        return None

    def _answer_failure(self, connection: Connection, call: Envelope, error: BaseException) -> None:
        envelope = Envelope(Kind.FAILURE, self._new_id(), call.id)
        try:
            text = "".join(traceback.format_exception(error))
            failure = self._codec.encode_exception(error, text, connection.peer)
            if call.creates:  # raised where the value is asked for
                self._references.set_error(call.creates, error)
            error.__traceback__ = None  # who keeps the exception must not keep our frames, and what they hold
            try:
                self._send(connection, envelope, failure, None, None, None)
            except TooLargeError:
                self._send(connection, envelope, shortened(failure), None, None, None)
        except TransportError as lost:
            self._give_up(connection, call, lost)
        finally:
            self._unanswered.pop(call.id, None)

    def _give_up(self, connection: Connection, call: Envelope, error: BaseException) -> None:
        self._unanswered.pop(call.id, None)
        logger.info("worker %r was gone before its call was answered: %s", connection.peer.name, error)

    # -- answers ---------------------------------------------------------------------------------------

    def on_answer(
        self, envelope: Envelope, frames: Frames, call: PendingCall | None, *, may_run_callbacks: bool
    ) -> None:
        """Completes the call that is answered."""
        if call is None:
            self.late_answers += 1
            logger.debug("an answer to message %d came too late and was dropped", envelope.reply_to)
            return
        call.envelope, call.frames = envelope, frames
        self._complete(call, may_run_callbacks=may_run_callbacks)

    def fail(self, call: PendingCall, make_error: Callable[[], BaseException]) -> None:
        """Completes a call that was taken out of the pending ones, with an error."""
        call.make_error = make_error
        self._complete(call, may_run_callbacks=False)

    def _complete(self, call: PendingCall, *, may_run_callbacks: bool) -> None:
        call.leave_window()
        future = call.future
        if future is None:
            if not call.caller_waits:
                if call.profiled is not None:
                    self._submit(lambda: self._open_creation(call))
                else:
                    call.frames = None  # of a creation's answer nothing is needed, and its handle keeps the call
            call.set_done()  # its caller, who waits, decodes the answer itself
        elif may_run_callbacks or not future.has_callbacks:
            self._complete_future(call)
        else:
            self._submit(lambda: self._complete_future(call))

    def _complete_future(self, call: PendingCall) -> None:
        future = call.future
        assert future is not None
        thread = current.thread
        before = thread.critical
        try:
            value = self._open_answer(call)
            if call.profiled is not None:
                value = call.profiled.answered(value)
            if not future.done():  # else its user has completed it
                thread.critical = 0  # callbacks are users' code
                if call.make_error is None:
                    future.set_result(value)
                else:
                    future.fail(call.make_error, f"the call of {call.function} on worker {call.peer!r}")
        except Exception as error:  # other calls are answered by this thread, too
            logger.warning("the future of a call on worker %r could not be completed: %s", call.peer, error)
        finally:
            thread.critical = before
            # The future refers to the call: without this, only the collector would find it.
            call.future = None
            call.set_done()

    def result(self, call: PendingCall) -> Any:
        """The value of an answered call; raises what it failed with."""
        value = self._open_answer(call)
        if call.profiled is not None:
            value = call.profiled.answered(value)
        if call.make_error is not None:
            raise call.make_error()
        return value

    def _open_creation(self, call: PendingCall) -> None:
        """Of a value that stays with its owner, only what its creation cost comes here."""
        assert call.profiled is not None
        call.profiled.answered(self._open_answer(call))

    def _open_answer(self, call: PendingCall) -> Any:
        """Decodes the answer: the value, or None with `make_error` set."""
        if call.make_error is not None:
            return None
        envelope, frames = call.envelope, call.frames
        assert envelope is not None
        assert frames is not None
        call.frames = None  # a large result must not live as long as the future
        decoding = None
        if self._events.subscribers:
            decoding = self._events.span("decode", "reply", envelope.id, call.peer)
        attach = self._attach.incoming(envelope)
        if attach is None and call.context:
            attach = refuse
        try:
            body = self._codec.decode(envelope, frames, attach)
        except DecodeError as error:
            if isinstance(error.__cause__, NoHistoryError):
                call.make_error = partial(
                    GradientError,
                    f"the answer of worker {call.peer!r} to the call of {call.function} in autograd context "
                    f"{call.context} has {error.__cause__} and no history: no gradient would go back. Has the context "
                    "ended there?",
                )
                return None
            text = f"the answer of worker {call.peer!r} to the call of {call.function} cannot be rebuilt here: {error}"
            call.make_error = lambda: DecodeError(text)
            return None
        if decoding is not None:
            decoding.end()
        if type(body) is Failure:
            failure, peer = body, call.peer
            call.make_error = _only_exceptions(lambda: self._codec.decode_exception(failure, peer))
            return None
        assert isinstance(body, Reply)
        return body.value


def _only_exceptions(make_error: Callable[[], BaseException]) -> Callable[[], Exception]:
    """A remote SystemExit must not end whoever waits for the answer."""

    def make() -> Exception:
        error = make_error()
        if isinstance(error, Exception):
            return error
        wrapped = RemoteError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error.__cause__
        return wrapped

    return make
