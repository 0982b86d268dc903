"""Worker: the path of a message, written once.

    outbound   call, dispatch, engine  ->  send:     codec -> gradients.attach -> transport
    inbound    transport  ->  receive:  dispatch (codec, gradients.attach) -> user function | waiting caller | engine

A body is decoded by whoever needs it, a call's on the thread that runs it, an answer's on the thread that waits
for it: decoding may run users' code. A reply is another message, and so is a gradient. `send` and `receive`
mirror each other, and report to `events`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .errors import (
    HandedOverError,
    NotStartedError,
    PeerLostError,
    RendezvousError,
    TelegradError,
    UnknownWorkerError,
    text_of,
)
from .events import Event, Events, logger
from .gradients.attach import Attach
from .gradients.contexts import Context, Contexts
from .gradients.root import Engine
from .messages import COUNTER_BITS, KIND_NAMES, Call, Envelope, Hello, Kind, Member, WorkerInfo
from .options import Options
from .primitives import current, interrupts
from .primitives.futures import Future
from .primitives.interrupts import critical, install, interruptible, run_all, uninstall
from .primitives.text import check_name
from .references.table import Entry, Held, References
from .rendezvous.group import Group, this_host
from .runtime.calls import Calls
from .runtime.mail import Mail
from .runtime.peers import Peers
from .runtime.pending import PendingCall, PendingCalls
from .runtime.reader import Incoming, Reader
from .runtime.recording import Recorder
from .runtime.serving import Dispatch
from .runtime.shutdown import Retirement
from .runtime.threads import Threads
from .serialization.by_value import main_script
from .serialization.codec import Body, Codec
from .transport.base import Connection, ConnectionStatistics, Frames, Transport
from .transport.inproc import Hub, InprocTransport, loopback
from .transport.lease import ReadLease
from .transport.poller import Poller
from .transport.tcp import TcpTransport
from .transport.unix import UnixTransport


@dataclass(frozen=True)
class Statistics:
    """What a worker has done so far, and what it is doing."""

    name: str
    id: int
    calls_pending: int
    calls_served: int
    calls_being_served: int
    late_answers: int
    threads: int
    contexts: int
    passes: int
    bytes_in_flight: dict[str, int]
    connections: dict[str, ConnectionStatistics]


class Worker:
    """One worker of a group. Several can live in one process. Made by `Worker.start`."""

    def __init__(self, member: Member, group: Group, options: Options, hello: Hello, hub: Hub | None) -> None:
        self.name = member.name
        self.id = member.id
        self.member = member
        self.options = options
        self.events = Events()
        self.recorder = Recorder(self, self.events)
        self.group = group
        self._pid = os.getpid()
        self._closed_because = ""
        self._ended_together = False  # all of the group have come to their end
        self._on_call: Callable[..., None] = self._refuse_call  # until it listens
        self._closing = threading.Lock()  # taken once and for all by close()
        self._ids = itertools.count((member.id << COUNTER_BITS) + 1)
        self._poller = Poller()
        self._threads = Threads(
            member.name, self._poller, options.idle_thread_timeout, self._on_thread_start, self._tick
        )
        self._lease = ReadLease(self._poller, options.spin)
        self._codec = Codec(member.id, hello.main)
        self._pending = PendingCalls(self._on_expired, self._threads.new_timer)
        self.contexts = Contexts(member.id, self.new_message_id)
        self.attach = Attach(member.id, self.contexts, self.new_message_id)
        self.engine = Engine(member, self.contexts)
        self.references = References(member.id, member.name)
        self._dispatch = Dispatch(
            self._codec,
            self._pending,
            self.send,
            self._threads.submit,
            self.new_message_id,
            self.attach,
            self.references,
            self.events,
        )
        self._reader = Reader(
            member.name, self._lease, self._codec, self._pending, self._threads,
            receive=self.receive, on_expired=self._on_expired, on_lost=self.on_lost, on_marked=self.recorder.on_read,
            merge=self.attach.merge, arrive=self.references.incoming, on_control=self._on_control,
        )  # fmt: skip
        transports: list[Transport] = []
        if hub is not None:
            transports.append(InprocTransport(hub, self._lease, options))
        if "unix" in options.transports and hub is None:
            transports.append(UnixTransport(self._poller, self._lease, options))
        if "tcp" in options.transports and hub is None:
            transports.append(TcpTransport(self._poller, self._lease, options))
        self._peers = Peers(hello, member.host, group, transports, options, lambda connection: connection.open())
        self._calls = Calls(self, self._codec, self._peers, self._pending, self._reader, self._dispatch, self._threads)
        mail = Mail(self, self._codec, self._peers, self._reader, self._threads)
        self.engine.connect(mail)
        self.references.start(mail)
        self._codec.handle = lambda id, owner: (self, self.references.take(id, owner))
        self._self_ends = loopback(hello, self._lease, options)
        self._peers.know_self(member, self._self_ends[0])

    @classmethod
    def start(
        cls,
        name: str,
        group: Group,
        options: Options | None = None,
        *,
        rank: int = -1,
        hub: Hub | None = None,
        listen: bool = True,
    ) -> Worker:
        """Joins a group: takes a name and an id, listens, and tells the others. One that does not `listen` cannot be
        connected to, and refuses calls.

        Raises:
            ValueError: the name is empty, too long, or cannot be printed.
            NameTakenError: a live worker has the name.
            RendezvousError: the store does not answer.
            AddressError: it cannot listen.
        """
        options = options or Options()
        worker: Worker | None = None
        try:
            check_name(name)
            install(group)
            with critical():
                id = group.new_id(rank)
                main = main_script() if hub is None else f"process {os.getpid()}"
                hello = Hello(group.name, id, name, os.getpid(), main)
                worker = cls(Member(id, name, (), this_host(), rank), group, options, hello, hub)
                worker._join(listen)
                return worker  # from in here: an interrupt that was deferred raises at the end of the section
        except BaseException:
            if worker is None:
                run_all([group.let_go, partial(uninstall, group)])
            else:
                worker.close(graceful=False)
            raise

    def _join(self, listen: bool) -> None:
        try:
            self.group.claim(self.name, self.id, partial(interruptible, self._peers.is_alive))
            if listen:
                self._listen()
            self._start_reading()
            self.group.publish(self.member)
        except BaseException as error:
            self._tell_failure(error)
            raise
        if self.group.world_size is not None:
            self.group.wait_for_all()

    def _tell_failure(self, error: BaseException) -> None:
        """Those who wait for this rank need not wait any longer."""
        with contextlib.suppress(RendezvousError):  # the store may be what failed
            self.group.fail(self.member.rank, f"worker {self.name!r}: {type(error).__name__}: {text_of(error)}")

    def _listen(self) -> None:
        self._on_call = self._dispatch.on_call
        addresses = self._peers.listen()
        self.member = Member(self.id, self.name, addresses, self.member.host, self.member.rank)

    def _start_reading(self) -> None:
        for end in self._self_ends:
            end.open()
        self._threads.start()

    def _refuse_call(self, connection: Connection, *_: object) -> None:
        self.on_lost(connection, f"worker {self.name!r} only looks at the group, and takes no calls")

    def _on_thread_start(self) -> None:
        current.worker_var.set(self)

    def _tick(self) -> None:
        for connection in (*self._peers.connections(), *self._self_ends):
            connection.tick()
        self.engine.tick()

    def new_message_id(self) -> int:
        return next(self._ids)

    # -- the path of a message -------------------------------------------------------------------------

    def send(
        self,
        connection: Connection,
        envelope: Envelope,
        body: Body,
        timeout: float | None,
        call: PendingCall | None = None,
        context: Context | None = None,
    ) -> None:
        """Encodes a message and writes it. `call` is what waits for its answer; `context` is what it belongs to."""
        if self.events.subscribers:
            envelope = self.recorder.mark(envelope, connection.peer)
            self._emit("send", "started", envelope, connection)
        try:
            packed = self._codec.pack(envelope, body, connection.peer, track=context is not None)
            if context is not None:
                to = connection.peer.id
                envelope = self.attach.outgoing(context, envelope, packed.tracked, connection, to)
                if call is not None:
                    call.context = context.id
            if packed.handles or self.references.unsettled:
                entries = [handle.entry for handle in packed.handles]
                envelope = self.references.outgoing(envelope, entries, connection.peer.id)
            frames = self._codec.seal(envelope, packed)
            if self.events.subscribers:
                self._emit("write", "started", envelope, connection, frames.nbytes)
            if call is None:
                nbytes = connection.write(frames, timeout)
            else:
                call.admit(sum(map(len, frames.buffers)))
                nbytes = connection.write(frames, timeout, call.stop_reading)
        except BaseException as error:
            if not isinstance(error, HandedOverError):
                if context is not None:
                    self.attach.not_written(envelope)
                if envelope.lent or envelope.dropped:
                    self.references.not_written(envelope, connection.peer.id)
                if self._codec.unanswered:
                    self._codec.not_sent(envelope)
            if self.events.subscribers:
                self._emit("send", "failed", envelope, connection, detail=repr(error))
            raise
        if context is not None and not self.attach.written(envelope, connection):
            self.engine.tell_released(connection.peer.id, context.id)
        if self.events.subscribers:
            self._emit("send", "complete", envelope, connection, nbytes)

    def receive(self, message: Incoming, here: PendingCall | None = None) -> None:
        """Decodes a message that was read and hands it to whoever it is for. `here` is the call that this
        thread waits for; no other call's callbacks run on it."""
        connection, envelope, frames, deadline, call, task = message
        if self.events.subscribers:
            self.recorder.on_receive()
            self._emit("receive", "started", envelope, connection, sum(map(len, frames.buffers)))
        if envelope.kind == Kind.CALL:
            self._on_call(connection, envelope, frames, deadline)
        elif not message.is_answer:
            if task is not None:
                task()
        else:
            if self._codec.unanswered:
                self._codec.on_answer(connection.peer.id, envelope)
            self._dispatch.on_answer(envelope, frames, call, may_run_callbacks=call is here)
        if self.events.subscribers:
            self._emit("receive", "complete", envelope, connection)

    def _emit(
        self,
        stage: str,
        phase: str,
        envelope: Envelope,
        connection: Connection,
        nbytes: int = 0,
        detail: str = "",
    ) -> None:
        kind = KIND_NAMES.get(envelope.kind, "?")
        if not detail and envelope.kind == Kind.GRADIENTS:
            detail = f"of message {envelope.reply_to}"
        self.events.emit(
            Event(
                stage, phase, kind, envelope.id, connection.peer.name, nbytes, detail, envelope.reply_to,
                time.perf_counter(),
            )
        )  # fmt: skip

    def _on_control(self, peer: int, envelope: Envelope, frames: Frames) -> Callable[[], None] | None:
        """A message between workers, and not between their users. While reading."""
        if self.id < 0:
            return None  # an observer has no part in contexts and references
        if envelope.kind >= Kind.HOLD:
            return self.references.on_message(peer, self._codec.open_control(envelope, frames))
        return self.engine.on_message(peer, envelope, frames)

    def on_lost(self, connection: Connection, reason: str) -> None:
        """A connection has ended: whatever waits for its peer fails."""
        if self._peers.drop(connection):
            for call in self._pending.take_all(connection):
                gone = f"worker {call.peer!r} is gone, with the call of {call.function} unanswered: {reason}"
                self._dispatch.fail(call, partial(PeerLostError, gone))
            self.references.on_lost(connection.peer.id, connection.peer.name)
            self._codec.forget(connection.peer.id)
            if connection.peer.is_observer:
                return  # it had no part in anything else
            self.engine.on_lost(connection.peer.id, connection.peer.name, reason)
            self.recorder.on_lost(connection.peer.id)
            for context in self.contexts.all():
                # Its end may have been to come from the one who is gone.
                self._threads.submit(partial(interruptible, self._check_context, context))

    # -- calls -----------------------------------------------------------------------------------------

    def call(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Runs a function on another worker and returns its result.

        Raises:
            UnknownWorkerError, EncodeError, TooLargeError: nothing was sent.
            CallTimeoutError: no answer within `timeout` seconds (None: the default; 0: no limit).
            PeerLostError: the worker is gone. Whether the function ran is not known.
            NotStartedError: this worker has shut down.
            Whatever the function raises.
        """
        self._check_open()
        return self._calls.call(to, Call(function, tuple(args), kwargs or None), timeout)

    def call_async(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Future:
        """Like `call`, but returns a future. What fails before anything was sent raises here.

        Waits only while more than Options.peer_byte_limit bytes of calls to the peer are unanswered.
        """
        self._check_open()
        return self._calls.call_async(to, Call(function, tuple(args), kwargs or None), timeout)

    def create(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Entry:
        """Like `call_async`, but the result stays there. What is returned counts as a handle to it: to be called inside
        of a critical section, in which it becomes one."""
        self._check_open()
        create = self._calls.create if current.thread.critical == 1 else self._calls.create_later
        return create(to, Call(function, tuple(args), kwargs or None), timeout)

    def creation_of(self, entry: Held) -> Future:
        """The future of a value's creation: done when that is known."""
        return self._calls.creation_of(entry)

    def _on_expired(self, call: PendingCall) -> None:
        self._dispatch.fail(call, call.timeout_error())

    # -- contexts --------------------------------------------------------------------------------------

    def new_context(self) -> int:
        """Makes an autograd context, and gives its id."""
        self._check_open()
        return self.contexts.new().id

    def release_context(self, context_id: int, *, wait: bool = False) -> None:
        """Ends a context here and on every worker that took part in it; with `wait`, not before all know it."""
        if self._closed_because:
            return
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            others = self.engine.release(context_id, tell=not wait)
            if wait:
                interruptible(self._release_at, others, context_id)
        finally:
            thread.critical = before
            if interrupts.deferred and not before:
                interrupts.deliver()

    def _release_at(self, others: set[int], context_id: int) -> None:
        futures = []
        for worker in others:
            with contextlib.suppress(PeerLostError, UnknownWorkerError):  # gone, and its context with it
                futures.append(self.call_async(worker, _release_there, (context_id,)))
        for future in futures:
            with contextlib.suppress(PeerLostError):
                future.wait()

    def release_context_later(self, context_id: int) -> None:
        """Ends a context on a thread of the worker's. From finalisers: takes no lock."""
        self._threads.submit_from_finaliser(partial(self.release_context, context_id))

    def _check_context(self, context: Context) -> None:
        """Asks the owner of a context whether it lives, and to be told of its end."""
        if context.owner == self.id or self._closed_because:
            return
        try:
            lives = self.call(context.owner, _takes_part, (context.id, self.id))
        except (PeerLostError, UnknownWorkerError):
            lives = False
        except TelegradError:
            return  # it is busy, but there
        if not lives and not self._closed_because:
            self.engine.release(context.id, told_by=context.owner)

    # -- life ------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it has left its group."""
        return bool(self._closed_because)

    def _check_open(self) -> None:
        if self._closed_because:
            raise NotStartedError(
                f"worker {self.name!r} {self._closed_because}; RPC has not been initialized. Call init_rpc first."
            )
        if os.getpid() != self._pid:
            raise NotStartedError(
                f"worker {self.name!r} belongs to process {self._pid}, of which this one is a fork; "
                "start a worker of its own here"
            )

    def info(self, to: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """The name and id of a worker; of this one by default."""
        return WorkerInfo(self.name, self.id) if to is None else self._peers.find(to).info

    def name_of(self, worker_id: int) -> str:
        """Of a worker that may be gone, or that we have not met yet."""
        try:
            return self._peers.find(worker_id).member.name
        except TelegradError:
            return self._peers.name_of(worker_id)

    def infos(self) -> list[WorkerInfo]:
        """All workers of the group, by id."""
        return [WorkerInfo(m.name, m.id) for m in self.group.members()]

    def statistics(self) -> Statistics:
        """A snapshot. Never blocks for long. Connections with observers are left out: they are not the group's."""
        with_peers = [c for c in self._peers.connections() if not c.peer.is_observer]
        connections = {f"{c.peer.name}#{n}": c.statistics() for n, c in enumerate(with_peers)}
        return Statistics(
            self.name,
            self.id,
            len(self._pending),
            self._dispatch.calls_served,
            self._dispatch.unanswered,
            self._dispatch.late_answers,
            self._threads.count,
            len(self.contexts),
            self.engine.busy,
            self._peers.bytes_in_flight(),
            connections,
        )

    def close(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leaves the group. Any number of times.

        Graceful: waits until all calls made and served here are done; in a group of a fixed size, until the
        same holds for every worker, so that nobody loses an answer. Otherwise ends at once; what is pending
        fails.

        Raises:
            RendezvousError: some worker did not come to a graceful end in time. This one is closed all the same.
        """
        with critical():
            if not self._closing.acquire(blocking=False):
                return
            steps: list[Callable[[], Any]] = [self.group.let_go, partial(uninstall, self.group)]
            # A fork lets go of its copies only: the worker is the parent's, and so is its name.
            is_fork = os.getpid() != self._pid
            try:
                if graceful and not is_fork:
                    self.retire(timeout)
            finally:
                self._closed_because = "has shut down"
                if not is_fork:
                    # Where all end together there is none left to tell, and rank 0 may have taken the store with it.
                    leave = partial(self.group.leave, self.member, tell=not self._ended_together)
                    steps = [self._tear_down, leave, *steps]
                run_all(steps)

    def retire(self, timeout: float | None = None) -> None:
        """The first half of a graceful close(): waits for the work in flight, here and everywhere. Then nobody needs
        this worker any more. See shutdown.py.

        Raises:
            RendezvousError: some worker did not come to a graceful end in time.
        """
        if self._ended_together:
            return
        limit = self.options.shutdown_timeout if timeout is None else timeout
        own = 0 if current.current_serving() is None else 1  # the call in which we are told to shut down
        self._retirement(own).wait(limit or None)
        self._ended_together = self.group.world_size is not None

    def meet(self, place: str, timeout: float | None) -> None:
        """In a group of a fixed size: waits until every other worker has come to that place, too. The dead are not
        waited for. A place can be used once.

        Raises:
            RendezvousError: somebody did not come within `timeout` seconds.
        """
        if self.group.world_size is not None:
            self._retirement(0).meet(place, timeout)

    def _retirement(self, own: int) -> Retirement:
        return Retirement(
            name=self.name,
            rank=self.member.rank,
            group=self.group,
            waits_for=lambda: len(self._pending) + self.engine.busy,
            serves=lambda: self._dispatch.unanswered - own,
            is_lost=self._peers.is_lost,
        )

    def _tear_down(self) -> None:
        self.recorder.close()
        self._dispatch.close()
        self.engine.close()
        self.references.close()
        self._peers.close()
        for end in self._self_ends:
            end.abort(f"worker {self.name!r} has shut down")
        closed = partial(PeerLostError, f"worker {self.name!r} was shut down before the call was answered")
        for call in self._pending.take_all(None):
            self._dispatch.fail(call, closed)
        all_ended = self._threads.close(timeout=2.0)
        self._lease.relieve()  # a thread that still runs a function must not keep the lease
        for connection in self._peers.connections():
            self._peers.drop(connection)
        self._calls.log_notes()
        self._lease.close()
        if all_ended:
            self._poller.close()
        else:
            logger.warning("worker %r: some functions still run after its shutdown", self.name)


def _takes_part(context_id: int, worker_id: int) -> bool:
    """Whether a context of this worker lives. If so, that worker is told of its end."""
    context = current.current_worker().contexts.find(context_id)
    if context is not None:
        context.known_workers.add(worker_id)
    return context is not None


def _release_there(context_id: int) -> None:
    current.current_worker().release_context(context_id, wait=True)
