"""The caller's side: from a function and its arguments to a message, and from its answer to the caller.

call         the caller's thread waits, and reads the answer itself if no other thread reads
call_async   a future waits
start        the message of either; also of calls whose result stays with its owner (creations.py)
post         a one-way message, of gradients and references
complete     on the thread that has read the answer; fail: with an error instead
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from signal import SIGINT
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import Tensor, is_anomaly_enabled, is_grad_enabled, is_inference_mode_enabled

from .._torch import BaseFuture, current_graph_task_id, is_any_autocast_enabled
from ..errors import (
    CallTimeoutError,
    DecodeError,
    HandedOverError,
    PeerLostError,
    RemoteError,
    RendezvousError,
    TransportError,
    UnknownWorkerError,
    text_of,
)
from ..events import Span, logger
from ..gradients import plain
from ..gradients.contexts import Context
from ..gradients.torch_modes import current_modes, is_changed, restore_defaults
from ..messages import Call, Envelope, Failure, Hello, Kind, Modes, WorkerInfo
from ..primitives import clock, current, interrupts
from ..primitives.futures import Future, devices, use_devices
from ..primitives.interrupts import blocking, calling_back, getsignal, in_finaliser, on_signal
from ..references.entries import Entry, Held
from ..serialization.codec import Body, Codec
from ..transport.base import Connection
from . import changes, missing, profiled_calls
from .arguments import checked
from .call_errors import not_added, why_no_answer, why_not_sent
from .peers import Peer, Peers
from .pending import UNSET_TIMEOUT, PendingCall, PendingCalls, effective_timeout
from .reader import Reader
from .recomputing import recomputing_process, run_as_part
from .threads import Threads

if TYPE_CHECKING:
    from ..worker import Worker

To = str | int | WorkerInfo
Function = Callable[..., Any]
Kwargs = dict[str, Any] | None

_CALL = int(Kind.CALL)
_MOST_NAMES = 1000


class Calls:
    """Makes the calls of one worker."""

    def __init__(
        self, worker: Worker, codec: Codec, peers: Peers, pending: PendingCalls, reader: Reader, threads: Threads
    ) -> None:
        self._worker = worker
        self._codec = codec
        codec.ask_for = partial(missing.ask_for, worker)
        self.definition_for = codec.definitions.for_peer
        self.peers = peers
        self._pending = pending
        self.reader = reader
        self.threads = threads
        self._pid = os.getpid()
        # What takes the place of a context outside of contexts; None: tensors are not followed there.
        self._plain = worker.contexts.plain if worker.options.plain and worker.id >= 0 else None
        self._commits = worker.engine.parts.commits  # see Note [.grad before the next call]
        self._to_log: deque[str] = deque()  # from finalisers, which must not log themselves
        self.late_answers = 0
        self._device_functions: set[str] = set()  # which have returned tensors on devices

    # -- out -------------------------------------------------------------------------------------------

    def call(self, to: To, function: Function, args: Sequence[Any], kwargs: Kwargs, timeout: float | None) -> Any:
        """See Worker.call()."""
        worker, thread = self._worker, current.thread
        if worker.closed_because or os.getpid() != self._pid:
            worker.check_open()
        if thread.critical:
            raise in_finaliser("rpc_sync()")
        if type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
            args, kwargs = checked(args, kwargs)
        body = Call(function, args, kwargs)
        thread.critical = 1
        try:
            if thread.is_main and getsignal(SIGINT) is not on_signal:
                interrupts.guard()
            call = self.start(to, body, timeout, None)
            waiting = self._report_wait(call) if worker.events.subscribers else None
            if call.reading:
                call.reading = False
                left = None if call.deadline is None else max(0.0, call.deadline - clock.now())
                self.reader.read_for(call, left)
            if not call.done:
                self.reader.wait_for(call, None)
            if waiting is not None:
                waiting.end()
            value = self._open_answer(call)
            if call.make_error is not None:
                raise call.make_error()
            return value
        finally:
            thread.critical = 0
            if interrupts.deferred:
                interrupts.deliver()

    def call_async(
        self, to: To, function: Function, args: Sequence[Any], kwargs: Kwargs, timeout: float | None
    ) -> Future:
        """See Worker.call_async()."""
        worker, thread = self._worker, current.thread
        if worker.closed_because or os.getpid() != self._pid:
            worker.check_open()
        if type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
            args, kwargs = checked(args, kwargs)
        body = Call(function, args, kwargs)
        of_devices = devices if devices and getattr(function, "__qualname__", "") in self._device_functions else ()
        for value in body.args:
            if isinstance(value, Tensor) and not value.is_cpu:
                use_devices()
                of_devices = devices
                break
        future = Future(self._wait_for, self._log_later, of_devices)
        if thread.critical:
            self.threads.submit_from_finaliser(partial(self._call_later, to, body, timeout, future))
            return future
        thread.critical = 1
        try:
            if thread.is_main and getsignal(SIGINT) is not on_signal:
                interrupts.guard()
            self.start(to, body, timeout, future)
        finally:
            thread.critical = 0
            if interrupts.deferred:
                interrupts.deliver()
        return future

    def _call_later(self, to: To, body: Call, timeout: float | None, future: Future) -> None:
        """Makes a call of a finaliser that ran inside of telegrad's own code: see interrupts.py."""
        try:
            self.start(to, body, timeout, future)
        except Exception as error:
            text, kind = str(error), type(error)
            future.fail(lambda: kind(text), f"a call to worker {to!r} that a finaliser made")

    def start(
        self, to: To, body: Call, timeout: float | None, future: Future | None, creates: Entry | None = None
    ) -> PendingCall:
        """Sends a call. It is pending from before its message is written until it completes."""
        worker, serving, context_id = self._worker, current.serving.get(), current.context_id.get()
        if in_engine := current_graph_task_id() >= 0:  # which may run this on a thread of its own
            serving, context_id = current.current_serving(), current.current_context_id()
        if current.thread.relieve is not None:
            current.thread.relieve()
        if serving is None and (timeout is None or timeout == UNSET_TIMEOUT):
            limit, depth = worker.options.rpc_timeout or None, 1
        else:
            limit = effective_timeout(timeout, worker.options.rpc_timeout, serving.deadline if serving else None)
            depth = serving.depth + 1 if serving else 1
        deadline = None if limit is None else clock.now() + limit  # of all that follows
        peer = self.peers.known_peers.get(to) if isinstance(to, (str, int)) else None
        if peer is None or (connection := peer.connection) is None:
            peer, connection = self.reach(to, limit)
        function = body.function
        name = getattr(function, "__qualname__", None) or repr(function)
        call = PendingCall(
            worker.new_message_id(), name, peer.member.name, limit, deadline, depth, connection, peer.window, future,
            future is None and creates is None,
        )  # fmt: skip
        if future is not None:
            future.call = call
        modes = None
        if not is_grad_enabled() or is_inference_mode_enabled() or is_any_autocast_enabled() or is_anomaly_enabled():
            modes = current_modes()
        if recomputes := recomputing_process() if in_engine else current.recomputes.get():
            modes = replace(modes or Modes(), recomputes=recomputes)
            call.recomputes = recomputes
        envelope = Envelope(_CALL, call.id, 0, limit, depth, modes)
        if maps := worker.options.device_maps:
            envelope.device_map = maps.get(call.peer)
        if creates is not None:
            envelope.creates = creates.id
            if isinstance(creates, Held) and creates.creation is None:  # else it has timed out before it was sent
                creates.creation = call
        if profiled_calls.running:
            mode = "remote" if creates is not None else "sync" if future is None else "async"
            call.profiled = profiled_calls.begin(mode, function, worker.name, call.peer)
            if call.profiled is not None:
                envelope.profiling = call.profiled.asks
        context: Context | None = None
        if context_id:
            context = worker.contexts.live.get(context_id) or worker.attach.current()
        elif self._plain is None or plain.thread.untracked:
            envelope.untracked = True
        elif modes is None or not modes.inference:
            context = self._plain
        self._pending.calls[call.id] = call
        try:
            worker.send(connection, envelope, body, limit, call, context)
            call.sent = True
        except HandedOverError as error:
            # It will run there. Its caller hears that its time is over, or of the interrupt.
            call.stop_reading()
            if self._pending.take(call.id) is not None:
                call.leave_window()
                if error.interrupt is not None:
                    raise error.interrupt from None
                raise why_not_sent(worker, self._codec, error, call, body) from error
        except BaseException as error:
            call.stop_reading()
            if isinstance(creates, Held) and creates.creation is call:
                creates.creation = None
            if call.profiled is not None:
                call.profiled.sent()
            if self._pending.take(call.id) is not None:
                call.leave_window()
                translated = why_not_sent(worker, self._codec, error, call, body)
                if translated is error:
                    raise
                raise translated from error
            # Else it was completed meanwhile, by the loss of the connection: the caller hears of that.
        finally:
            if call.profiled is not None and not call.caller_waits:
                call.profiled.sent()
        if not call.caller_waits and call.deadline is not None and call.deadline < self._pending.next_look:
            self._pending.expire_by(call.deadline)
        return call

    def reach(self, to: To, timeout: float | None) -> tuple[Peer, Connection]:
        began = clock.now()
        try:
            return self.peers.reach(to, timeout)
        except (PeerLostError, RendezvousError) as error:
            if timeout is None or clock.now() - began < timeout:
                raise
            # Whether it lives is not known: there was no time to find out.
            late = f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms): {error}"
            raise CallTimeoutError(late) from error

    def post(self, to: int, envelope: Envelope, body: Body, timeout: float | None, context: Context | None) -> None:
        """Sends a one-way message, to a worker that is connected with in the same time if it is not yet.

        Raises:
            PeerLostError: the worker is gone.
        """
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            peer = self.peers.known_peers.get(to)
            if peer is None or (connection := peer.connection) is None:
                deadline = None if timeout is None else clock.now() + timeout
                try:
                    _, connection = self.peers.reach(to, timeout)
                except UnknownWorkerError as error:
                    raise self._lost(to, "it has left the group") from error
                except PeerLostError as error:
                    raise self._lost(to, str(error)) from error
                timeout = None if deadline is None else max(0.0, deadline - clock.now())
            try:
                self._worker.send(connection, envelope, body, timeout, None, context)
            except TransportError as error:
                self._worker.on_lost(connection, str(error))
                raise self._lost(to, str(error)) from error
        finally:
            thread.critical = before
            if interrupts.deferred and not before:
                interrupts.deliver()

    def _lost(self, worker_id: int, reason: str) -> PeerLostError:
        error = PeerLostError(f"worker {self.peers.name_of(worker_id)!r} is gone: {reason}")
        error.worker_id = worker_id
        return error

    # -- waiting ---------------------------------------------------------------------------------------

    def future_of(self, call: PendingCall) -> Future:
        """A future that waits for the call, and that another completes."""
        future = Future(self._wait_for, self._log_later)
        future.call = call
        return future

    def _wait_for(self, call: PendingCall, timeout: float | None) -> None:
        """Waits for the future of a call. Not in a critical section: see Future.wait."""
        thread = current.thread
        thread.critical = 1
        try:
            if thread.is_main and getsignal(SIGINT) is not on_signal:
                interrupts.guard()
            waiting = self._report_wait(call) if self._worker.events.subscribers else None
            try:
                self.reader.wait_for(call, timeout)
            finally:
                if waiting is not None:
                    waiting.end()
        finally:
            thread.critical = 0
            if interrupts.deferred:
                interrupts.deliver()

    def _report_wait(self, call: PendingCall) -> Span:
        call.stop_reading()
        return self._worker.events.span("wait", "call", call.id, call.peer, call.function)

    # -- in --------------------------------------------------------------------------------------------

    def on_late_answer(self, envelope: Envelope) -> None:
        """Drops the answer to a call that has completed already."""
        self.late_answers += 1
        logger.debug("an answer to message %d came too late and was dropped", envelope.reply_to)

    def fail(self, call: PendingCall, make_error: Callable[[], BaseException]) -> None:
        """Completes a call with an error, after it was taken out of the pending ones."""
        call.make_error = make_error
        self.complete(call, may_run_callbacks=False)

    def complete(self, call: PendingCall, *, may_run_callbacks: bool) -> None:
        """Completes a call, which has its answer or its error. Callbacks of its future run on this thread, or on
        another one."""
        if call.nbytes:
            call.window.leave(call.nbytes, call.depth)
            call.nbytes = 0
        future = call.future
        if future is None:
            if not call.caller_waits:
                if call.profiled is not None or (call.envelope is not None and call.envelope.changed):
                    # The answer says what the creation cost, or what it has changed.
                    self.threads.submit(partial(self._open_answer, call))
                else:
                    call.frames = None  # a creation's answer says nothing more, and its handle keeps the call
            call.done = True  # the caller, which waits, decodes the answer itself
            if call.wakes:
                call.set_done()
        elif may_run_callbacks or not (future.has_callbacks or (call.frames is not None and call.frames.arrived)):
            # Else this thread, which may wait for another answer, would run callbacks, or wait for a peer's device.
            self._complete_future(call)
        else:
            self.threads.submit(partial(self._complete_future, call))

    def _complete_future(self, call: PendingCall) -> None:
        future, recomputes = call.future, call.recomputes
        if recomputes != current.recomputes.get():
            return run_as_part(recomputes, partial(self._complete_future, call))
        assert future is not None
        thread = current.thread
        before = thread.critical
        try:
            thread.used_devices = ()
            value = self._open_answer(call)
            if thread.used_devices:
                self._on_devices(call, future)
            if not BaseFuture.done(future):  # else its user has completed it
                thread.critical = 0  # callbacks are users' code
                if call.make_error is None:
                    calling_back(BaseFuture.set_result, future, value)
                else:
                    future.fail(call.make_error, f"the call of {call.function} on worker {call.peer!r}")
        except BaseException as error:  # other calls are answered by this thread, too; and it may be a Ctrl-C
            text = f"the future of a call on worker {call.peer!r} could not be completed: {text_of(error)}"
            thread.critical = max(before, 1)
            if not BaseFuture.done(future):
                future.fail(partial(RemoteError, text), f"the call of {call.function} on worker {call.peer!r}")
            if not isinstance(error, Exception):
                raise
            logger.warning("%s", text)
        finally:
            thread.critical = before
            if future.has_callbacks and thread.is_workers and is_changed():
                restore_defaults()
            call.future = None  # the future refers to the call: a circle that only the collector would find
            call.done = True
            if call.wakes:
                call.set_done()

    def _on_devices(self, call: PendingCall, future: Future) -> None:
        """An answer brings tensors on devices: a future that has none must not be done before they are there."""
        if len(self._device_functions) < _MOST_NAMES:
            self._device_functions.add(call.function)
        if not future.has_devices:
            for device in current.thread.used_devices:
                blocking(torch.accelerator.current_stream(device).synchronize)

    def _open_answer(self, call: PendingCall) -> Any:
        """Decodes the answer: the value, or None with `make_error` set."""
        if self._commits.due and not self._commits.add_due(call.deadline) and call.left() == 0.0:
            call.make_error = call.make_error or not_added(call)
        value = None
        if call.make_error is None:
            envelope, frames = call.envelope, call.frames
            assert envelope is not None and frames is not None
            call.frames = None  # a large result must not live as long as the future
            frames.deadline = call.deadline
            if envelope.changed:
                logger.warning("%s", changes.warning(call.peer, envelope.changed))
            try:
                body = self._worker.decode(envelope, frames, call.context)
                if type(body) is Failure:
                    call.make_error = partial(self.error_of, body, call.peer)
                else:
                    value = body.value
            except DecodeError as error:
                call.make_error = why_no_answer(call, error)
        return value if call.profiled is None else call.profiled.answered(value)

    def failure_of(self, error: BaseException, to: int) -> Failure:
        """Encodes an exception for a message to worker `to`."""
        connection = self.peers.connection_with(to)
        text = "".join(traceback.format_exception(error))
        peer = Hello("", to, "") if connection is None else connection.peer
        failure = self._codec.encode_exception(error, text, peer)
        error.__traceback__ = None  # an exception that is kept must not keep the frames, and what they hold
        return failure

    def error_of(self, failure: Failure, peer: str) -> Exception:
        """The exception that the function raised. A remote SystemExit does not end the thread that waits for it."""
        error = self._codec.decode_exception(failure, peer)
        if isinstance(error, Exception):
            return error
        wrapped = RemoteError(f"{type(error).__name__}: {text_of(error)}")
        wrapped.__cause__ = error.__cause__
        return wrapped

    # -- notes of finalisers ---------------------------------------------------------------------------

    def _log_later(self, text: str) -> None:
        """Logs a text. From finalisers: takes no lock and does nothing itself."""
        self._to_log.append(text)
        self.threads.submit_from_finaliser(self.log_notes)

    def log_notes(self) -> None:
        while self._to_log:
            logger.warning("worker %r: %s", self._worker.name, self._to_log.popleft())
