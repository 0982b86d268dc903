"""Mail: what the engine of gradients and the table of references need of their worker (Host in each): messages out
and in, and waiting."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from ..errors import PeerLostError, RemoteError, TransportError, UnknownWorkerError, text_of
from ..events import Events
from ..gradients.attach import Attach
from ..gradients.contexts import Context
from ..messages import Envelope, Failure, Hello, sender_of
from ..primitives import current, interrupts
from ..primitives.waiter import Waiter
from ..serialization.codec import Body, Codec, Control
from ..transport.base import Connection, Frames
from ..transport.lease import Turn
from .broadcast import Caller, ask
from .peers import Peers
from .pending import PendingCall
from .reader import Reader
from .threads import Threads


class Sender(Caller, Protocol):
    """The worker, as far as it is needed here."""

    attach: Attach
    events: Events

    def send(
        self,
        connection: Connection,
        envelope: Envelope,
        body: Body,
        timeout: float | None,
        call: PendingCall | None = None,
        context: Context | None = None,
    ) -> None: ...

    def on_lost(self, connection: Connection, reason: str) -> None: ...
    def new_message_id(self) -> int: ...


class Mail:
    def __init__(self, worker: Sender, codec: Codec, peers: Peers, reader: Reader, threads: Threads) -> None:
        self._worker = worker
        self.events = worker.events
        self.new_message_id = worker.new_message_id
        self._codec = codec
        self._peers = peers
        self._reader = reader
        self._threads = threads

    def post(self, to: int, envelope: Envelope, body: Any, timeout: float | None, context: Context | None) -> None:
        """Sends a message that nobody answers.

        Raises:
            PeerLostError: the worker is gone.
        """
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            try:
                _, connection = self._peers.reach(to, timeout)
            except UnknownWorkerError as error:
                raise self._lost(to, "it has left the group") from error
            except PeerLostError as error:
                raise self._lost(to, str(error)) from error
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
        error = PeerLostError(f"worker {self.name_of(worker_id)!r} is gone: {reason}")
        error.worker_id = worker_id
        return error

    def wait(self, waiter: Waiter, peer: int, deadline: float | None, turn: Turn | None) -> None:
        """Waits until `waiter` is done, or for the deadline; reads meanwhile. It most likely comes from `peer`."""
        waiting = None
        if self.events.subscribers:
            waiting = self.events.span("wait", "pass", current.current_pass_id(), self.name_of(peer))
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            if turn is None and thread.relieve is not None:
                thread.relieve()
            self._reader.wait_until(waiter, deadline, turn)
        finally:
            thread.critical = before
            if interrupts.deferred and not before:
                interrupts.deliver()
        if waiting is not None:
            waiting.end()

    def watch(self, peer: int) -> Turn | None:
        """Has this thread read what arrives while it works on a pass; `end()` ends it. None: another thread reads."""
        if current.thread.relieve is not None:
            current.thread.relieve()
        self._threads.start()  # one of which relieves this one, if need be
        return self._reader.begin_turn()

    def ask(
        self, workers: Iterable[int], function: Callable[..., Any], args: Sequence[Any], seconds: float
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        return interrupts.interruptible(ask, self._worker, workers, function, args, seconds)

    def submit(self, task: Callable[[], None]) -> None:
        self._threads.submit(task)

    def later(self, seconds: float, task: Callable[[], None]) -> Callable[[], None]:
        """Gives what has a task run so long after it was called. It takes no lock: finalisers call it."""
        return partial(self._threads.new_timer(task), seconds)

    def name_of(self, worker_id: int) -> str:
        return self._peers.name_of(worker_id)

    def encode_error(self, error: BaseException, to: int) -> Failure:
        connection = self._peers.connection_with(to)
        text = "".join(traceback.format_exception(error))
        peer = Hello("", to, "") if connection is None else connection.peer
        failure = self._codec.encode_exception(error, text, peer)
        error.__traceback__ = None  # whoever keeps the exception must not keep the frames, and what they hold
        return failure

    def decode_error(self, failure: Failure, worker: str) -> BaseException:
        error = self._codec.decode_exception(failure, worker)
        if isinstance(error, Exception):
            return error
        wrapped = RemoteError(f"{type(error).__name__}: {text_of(error)}")  # a SystemExit there must not end this one
        wrapped.__cause__ = error.__cause__
        return wrapped

    def decode(self, envelope: Envelope, frames: Frames) -> Any:
        attach = self._worker.attach.incoming(envelope)
        if not self.events.subscribers:
            return self._codec.decode(envelope, frames, attach)
        sender = self.name_of(sender_of(envelope.id))
        with self.events.span("decode", "gradients", envelope.id, sender):
            return self._codec.decode(envelope, frames, attach)

    def open_control(self, envelope: Envelope, frames: Frames) -> Control:
        return self._codec.open_control(envelope, frames)
