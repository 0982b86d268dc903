"""The calls that a worker makes: from a function and its arguments to a message that waits for its answer.

call         the caller's thread waits, and reads the answer itself if nobody does
call_async   a future waits
create       nobody waits: the result stays there
"""

from __future__ import annotations

from collections import deque
from functools import partial
from signal import SIGINT
from typing import Any, Protocol

import msgspec

from ..errors import (
    CallTimeoutError,
    EncodeError,
    HandedOverError,
    PeerLostError,
    RendezvousError,
    TransportError,
)
from ..events import Span, logger
from ..gradients.torch_modes import current_modes
from ..messages import Call, Envelope, Kind, WorkerInfo
from ..options import Options
from ..primitives import clock, current, interrupts
from ..primitives.futures import Future
from ..primitives.interrupts import getsignal, in_finaliser, interruptible, on_signal
from ..references.table import Entry, Held, References
from ..serialization.codec import Codec
from ..transport.base import Connection
from . import profiled_calls
from .mail import Sender
from .peers import Peer, Peers
from .pending import PendingCall, PendingCalls, effective_timeout
from .reader import Reader
from .serving import Dispatch
from .threads import Threads

To = str | int | WorkerInfo


class Host(Sender, Protocol):
    """The worker, as far as it is needed here."""

    name: str
    options: Options
    references: References


class Calls:
    """Of one worker."""

    def __init__(
        self,
        worker: Host,
        codec: Codec,
        peers: Peers,
        pending: PendingCalls,
        reader: Reader,
        dispatch: Dispatch,
        threads: Threads,
    ) -> None:
        self._worker = worker
        self._codec = codec
        self._peers = peers
        self._pending = pending
        self._reader = reader
        self._dispatch = dispatch
        self._threads = threads
        self._to_log: deque[str] = deque()  # from finalisers, which must not log themselves

    def call(self, to: To, body: Call, timeout: float | None) -> Any:
        thread = current.thread
        if thread.critical:
            raise in_finaliser("rpc_sync()")
        thread.critical = 1
        try:
            if thread.is_main and getsignal(SIGINT) is not on_signal:
                interrupts.guard()
            call = self._start_call(to, body, timeout, None)
            waiting = self._report_wait(call) if self._worker.events.subscribers else None
            if call.reading:
                call.reading = False
                self._reader.read_for(call, call.timeout)
            if not call.done:
                self._reader.wait_for(call, None)
            if waiting is not None:
                waiting.end()
            return self._dispatch.result(call)
        finally:
            thread.critical = 0
            if interrupts.deferred:
                interrupts.deliver()

    def _report_wait(self, call: PendingCall) -> Span:
        return self._worker.events.span("wait", "call", call.id, call.peer, call.function)

    def _wait_for(self, call: PendingCall, timeout: float | None) -> None:
        """Waits for the future of a call."""
        with interrupts.critical():
            if self._worker.events.subscribers:
                with self._report_wait(call):
                    self._reader.wait_for(call, timeout)
            else:
                self._reader.wait_for(call, timeout)

    def call_async(self, to: To, body: Call, timeout: float | None) -> Future:
        thread = current.thread
        future = Future(self._wait_for, self._log_later)
        if thread.critical:
            self._threads.submit_from_finaliser(partial(self._call_later, to, body, timeout, future))
            return future
        thread.critical = 1
        try:
            if thread.is_main and getsignal(SIGINT) is not on_signal:
                interrupts.guard()
            self._pending.watch(self._start_call(to, body, timeout, future))
        finally:
            thread.critical = 0
            if interrupts.deferred:
                interrupts.deliver()
        return future

    def _call_later(self, to: To, body: Call, timeout: float | None, future: Future) -> None:
        """Makes a call of a finaliser that ran inside of telegrad's own code: see interrupts.py."""
        try:
            self._pending.watch(self._start_call(to, body, timeout, future))
        except Exception as error:
            text, kind = str(error), type(error)
            future.fail(lambda: kind(text), f"a call to worker {to!r} that a finaliser made")

    def create(self, to: To, body: Call, timeout: float | None) -> Entry:
        """Inside of a critical section of the caller's: the entry that is returned counts as a handle."""
        limit = effective_timeout(timeout, self._worker.options.rpc_timeout, None)
        peer, _ = self._reach(to, limit)
        entry = self._worker.references.new(peer.member.id)
        try:
            self._pending.watch(self._start_call(entry.owner, body, timeout, None, entry))
        except BaseException:
            if isinstance(entry, Held) and entry.creation is not None:
                self._worker.references.let_go(entry)  # it is handed over, and will be created there
            else:
                self._worker.references.forget(entry)
            raise
        return entry

    def create_later(self, to: To, body: Call, timeout: float | None) -> Entry:
        """Creates a value for a finaliser that ran inside of telegrad's own code: another thread sends the message."""
        peer = self._peers.known(to)
        if peer is None:
            raise in_finaliser(f"rpc.remote() to worker {to!r}, which is not known here yet,")
        entry = self._worker.references.new(peer.member.id)

        def send() -> None:
            try:
                self._pending.watch(self._start_call(entry.owner, body, timeout, None, entry))
            except Exception as error:
                logger.warning("worker %r: rpc.remote() in a finaliser failed: %s", self._worker.name, error)
                self._worker.references.forget(entry)

        self._threads.submit_from_finaliser(send)
        return entry

    def creation_of(self, entry: Held) -> Future:
        """The future of a value's creation: done when that is known."""
        future = Future(self._wait_for, self._log_later)
        call = future.call = entry.creation
        assert call is not None

        def complete() -> None:
            self._reader.wait_for(call, None)
            if call.make_error is not None:
                what = f"the creation of a value on worker {call.peer!r}"
                interruptible(future.fail, call.make_error, what)
            else:
                interruptible(future.set_result, None)

        self._threads.submit(complete)
        return future

    def _start_call(
        self,
        to: To,
        body: Call,
        timeout: float | None,
        future: Future | None,
        creates: Entry | None = None,
    ) -> PendingCall:
        serving = current.current_serving()
        if current.thread.relieve is not None:
            current.thread.relieve()
        limit = effective_timeout(timeout, self._worker.options.rpc_timeout, serving.deadline if serving else None)
        depth = serving.depth + 1 if serving else 1
        peer, connection = self._reach(to, limit)
        name = getattr(body.function, "__qualname__", None) or repr(body.function)
        call = PendingCall(self._worker.new_message_id(), name, peer.member.name, limit, depth)
        call.future = future
        call.caller_waits = future is None and creates is None
        if future is not None:
            future.call = call
        call.connection = connection
        call.window = peer.window
        envelope = Envelope(Kind.CALL, call.id, 0, limit, depth, current_modes())
        if creates is not None:
            envelope = msgspec.structs.replace(envelope, creates=creates.id)
            if isinstance(creates, Held):
                creates.creation = call
        if profiled_calls.running:
            mode = "remote" if creates is not None else "sync" if future is None else "async"
            call.profiled = profiled_calls.begin(mode, body.function, self._worker.name, call.peer)
            if call.profiled is not None:
                envelope = msgspec.structs.replace(envelope, profiling=call.profiled.asks)

        self._pending.add(call)
        try:
            self._worker.send(connection, envelope, body, limit, call, self._worker.attach.current())
        except HandedOverError as error:
            # It will run there. Its caller hears that its time is over, or of the interrupt.
            call.stop_reading()
            if self._pending.take(call.id) is not None:
                call.leave_window()
                if error.interrupt is not None:
                    raise error.interrupt from None
                raise self._translated(error, call, body) from error
        except BaseException as error:
            call.stop_reading()
            if isinstance(creates, Held):
                creates.creation = None
            if call.profiled is not None:
                call.profiled.sent()
            if self._pending.take(call.id) is not None:
                call.leave_window()
                translated = self._translated(error, call, body)
                if translated is error:
                    raise
                raise translated from error
            # Else it was completed meanwhile, by the loss of the connection: the caller hears of that.
        finally:
            if call.profiled is not None and not call.caller_waits:
                call.profiled.sent()
        return call

    def _reach(self, to: To, timeout: float | None) -> tuple[Peer, Connection]:
        began = clock.now()
        try:
            return self._peers.reach(to, timeout)
        except (PeerLostError, RendezvousError) as error:
            if timeout is None or clock.now() - began < timeout:
                raise
            # Whether it lives is not known: there was no time to find out.
            late = f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms): {error}"
            raise CallTimeoutError(late) from error

    def _translated(self, error: BaseException, call: PendingCall, body: Call) -> BaseException:
        """What the caller sees of a call that could not be sent."""
        assert call.connection is not None
        if isinstance(error, EncodeError):
            culprit = self._codec.first_unsendable(
                [*body.args, *(body.kwargs or {}).values()],
                call.connection.peer,
                track=self._worker.attach.current() is not None,
            )
            what = "the function" if culprit is None else f"an argument, a {type(culprit).__name__},"
            return EncodeError(f"{what} of the call of {call.function} on worker {call.peer!r} cannot be sent: {error}")
        if isinstance(error, TransportError):
            self._worker.on_lost(call.connection, str(error))
            return PeerLostError(f"worker {call.peer!r} is gone, the call of {call.function} was not sent: {error}")
        if isinstance(error, TimeoutError) and not isinstance(error, CallTimeoutError):
            late = call.timeout_error()()
            late.add_note(str(error))
            return late
        return error

    def _log_later(self, text: str) -> None:
        """From finalisers: takes no lock and does nothing itself."""
        self._to_log.append(text)
        self._threads.submit_from_finaliser(self.log_notes)

    def log_notes(self) -> None:
        while self._to_log:
            logger.warning("worker %r: %s", self._worker.name, self._to_log.popleft())
