"""Worker: the path of a message, written once.

    send      Server, Calls, gradients, references  ->  pack, attach, lend, envelope  ->  Connection.write
    receive   Connection.receive  ->  Reader: open, merge, claim  ->  Server.on_call | Calls.complete | a task
    decode    after reading: on the thread that runs the function, that waits for the answer, or that completes a future

`send` and `receive` mirror each other, and report to `events`. Decoding may run users' code, so it never happens while
a thread reads. A reply is another message, and so is a gradient.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from .errors import HandedOverError, NotStartedError, PeerLostError, RendezvousError, TelegradError, text_of
from .events import Events
from .gradients.attach import Attach, refuse
from .gradients.contexts import Context, Contexts
from .gradients.engine import Engine
from .messages import KIND_NAMES, Call, Envelope, Hello, Kind, Member, WorkerInfo, message_ids, sender_of
from .options import SHARED_MEMORY_FROM, Options
from .primitives import clock, current
from .primitives.futures import Future
from .primitives.interrupts import critical, install, interruptible, run_all, uninstall
from .primitives.text import check_name
from .references.entries import Entry, Held
from .references.table import References
from .rendezvous.group import Group, this_host
from .runtime import arguments, context_ends, device_maps, shutdown
from .runtime.broadcast import ask
from .runtime.calls import Calls
from .runtime.creations import Creations
from .runtime.peers import Peers
from .runtime.pending import OVERHEAD_BYTES, PendingCall, PendingCalls, limit_here
from .runtime.reader import Incoming, Reader
from .runtime.recording import Recorder, report
from .runtime.serving import Server
from .runtime.statistics import Statistics as Statistics
from .runtime.threads import Threads
from .serialization.codec import CONTROLS, Body, Codec, Packed, encode_control, encode_envelope
from .serialization.namespaces import main_script
from .transport.base import Connection, Frames
from .transport.inproc import Hub, loopback
from .transport.lease import ReadLease
from .transport.poller import Poller
from .transport.registry import make_transports

To = str | int | WorkerInfo
Kwargs = dict[str, Any] | None


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
        self.closed_because = ""
        self._ended_together = False  # all of the group have come to their end: see shutdown.py
        self._on_call: Callable[[Incoming], None] = self._refuse_call  # until it listens
        self._closing = threading.Lock()  # taken once and for all by close()
        self.new_message_id = message_ids(member.id)
        self._poller = Poller()
        self._threads = Threads(
            member.name, self._poller, options.idle_thread_timeout, self._on_thread_start, self._tick
        )
        self.events.log_by(self._threads.submit)
        self._lease = ReadLease(self._poller, options.spin, self._threads.submit)
        self._codec = Codec(member.id, hello.main, options.strict_devices, options.plain)
        self._pending = PendingCalls(self._on_expired, self._threads.new_timer, self._threads.submit)
        self.contexts = Contexts(member.id, self.new_message_id)
        self.attach = Attach(member.id, self.contexts, self.new_message_id)
        self.references = References(member.id, member.name, self)
        self._codec.handle = lambda id, owner: (self, self.references.take(id, owner))
        transports = make_transports(hub, self._poller, self._lease, options)
        self._peers = Peers(hello, member.host, group, transports, options, lambda connection: connection.open())
        self._reader = Reader(
            member.name, self._lease, self._pending, self._threads, self.events, self._peers.name_of,
            receive=self.receive, on_expired=self._on_expired, on_lost=self.on_lost, on_marked=self.recorder.on_read,
            merge=self.attach.merge, on_forgotten=self.contexts.plain.on_forgotten, arrive=self.references.incoming,
            on_control=self._on_control,
            on_ends=lambda *told: self.engine.on_ends(*told),
        )  # fmt: skip
        # For gradients and references (gradients/host.py):
        self.submit = self._threads.submit
        self.wait, self.begin_turn = self._reader.wait, self._reader.begin_turn
        self.after_reading = self._reader.to_do.append
        self.goes_by_lane = self._peers.goes_by_lane
        self.open_control = self._codec.open_control
        self.name_of = self._peers.name_of
        self.engine: Engine = Engine(member, self.contexts, self, options.backward_timeout)
        self._server = Server(self, self._codec, self._threads)
        self.calls = Calls(self, self._codec, self._peers, self._pending, self._reader, self._threads)
        self.creations = Creations(self, self.calls)
        self._self_ends = loopback(hello, self._lease, options)
        self._peers.know_self(member, self._self_ends[0])
        self.post, self.decode_error, self.encode_error = self.calls.post, self.calls.error_of, self.calls.failure_of

    @classmethod
    def start(
        cls, name: str, group: Group, options: Options | None = None, *, rank: int = -1, hub: Hub | None = None,
        listen: bool = True,
    ) -> Worker:  # fmt: skip
        """Joins a group: takes a name and an id, listens, and tells the others. One that does not `listen` cannot be
        connected to, and refuses calls.

        Raises:
            TypeError: `options` is no Options object.
            ValueError: the name is empty, too long, or cannot be printed.
            NameTakenError: a live worker has the name.
            RendezvousError: the store does not answer.
            AddressError: it cannot listen.
        """
        worker: Worker | None = None
        try:
            options = Options.of(options)
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
                self._on_call = self._server.on_call
                addresses = self._peers.listen()
                host, rank, has_maps = self.member.host, self.member.rank, device_maps.are_set(self.options)
                self.member = Member(self.id, self.name, addresses, host, rank, has_maps)
            device_maps.check_own(self.group, self.member, self.options)
            for end in self._self_ends:
                end.open()
            self._threads.start()
            self.group.publish(self.member)
        except BaseException as error:
            # Workers that wait for this rank need not wait any longer.
            with contextlib.suppress(RendezvousError):  # the store may be what failed
                self.group.fail(self.member.rank, f"worker {self.name!r}: {type(error).__name__}: {text_of(error)}")
            raise
        device_maps.agree(self.group, self.member, self.options)
        self.engine.open(plain=self.options.plain)

    def _refuse_call(self, message: Incoming) -> None:
        self.on_lost(message.connection, f"worker {self.name!r} only looks at the group, and takes no calls")

    def _on_thread_start(self) -> None:
        current.worker_var.set(self)

    def _tick(self) -> None:
        for connection in (*self._peers.connections(), *self._self_ends):
            connection.tick()
        self.engine.tick()

    # -- the path of a message -------------------------------------------------------------------------

    def send(
        self, connection: Connection, envelope: Envelope, body: Body, timeout: float | None,
        call: PendingCall | None = None, context: Context | None = None,
    ) -> None:  # fmt: skip
        """Encodes a message and writes it, in `timeout` seconds from when it is encoded; or by the deadline of `call`,
        which waits for its answer. `context` is the one that it belongs to."""
        plain, nbytes = self.contexts.plain, -1  # until it is written
        if self.events.subscribers:
            envelope = self.recorder.mark(envelope, connection.peer)
            report(self.events, "send", "started", envelope, connection)
        try:
            if type(body) in CONTROLS:
                packed = Packed(b"", [encode_control(body)])
            else:
                how = (context is not None, context is plain)
                packed = self._codec.pack(envelope, body, connection.peer, connection, *how)
            if (lane := connection.device_lane) is not None:
                envelope.placed = tuple(packed.placed)
                envelope.lane = lane.to_say()
            if context is not None and (packed.tracked or context is not plain):
                self.attach.outgoing(context, envelope, packed.tracked, connection, connection.peer.id)
                if call is not None:
                    call.context = context.id
            if packed.handles or self.references.let_go_here or self.references.to_go_back:
                entries = [handle.entry for handle in packed.handles] if packed.handles else ()
                self.references.outgoing(envelope, entries, connection.peer.id)
            if plain.dead or plain.to_forget or self.engine.ends.untold:
                self.engine.ends.outgoing(envelope, connection.peer.id)
            if call is not None:
                counted = sum(map(len, packed.buffers)) + OVERHEAD_BYTES
                call.window.enter(counted, call.depth, call.deadline)
                call.nbytes = counted
                timeout = None if call.deadline is None else max(0.0, call.deadline - clock.now())
                # With no time left the caller has given up; that the message was late is not for its receiver to mind.
                envelope.timeout = timeout or call.timeout
            packed.header = encode_envelope(envelope)
            if self.events.subscribers:
                report(self.events, "write", "started", envelope, connection, packed.nbytes)
            if call is not None and call.caller_waits and counted < SHARED_MEMORY_FROM:
                # The answer may be here before the write returns: be the thread that reads it.
                call.reading = connection.lease.try_take()
            nbytes = connection.write(packed, timeout, None if call is None else call.stop_reading)
        except BaseException as error:
            if call is not None:
                call.stop_reading()  # what follows may run users' code
            written = nbytes >= 0 or isinstance(error, HandedOverError)
            if not written:
                self.attach.not_written(envelope, connection.peer.id)
                self.engine.ends.not_written(envelope, connection.peer.id)
                if envelope.lent or envelope.dropped:
                    self.references.not_written(envelope, connection.peer.id)
                self._codec.not_sent(envelope)
            if connection.device_lane is not None:
                connection.device_lane.after_write(envelope.placed, envelope.lane, written=written)
            if self.events.subscribers:
                report(self.events, "send", "failed", envelope, connection, detail=repr(error))
            raise
        if lane is not None:
            lane.after_write(envelope.placed, envelope.lane, written=True)
        if context is not None and envelope.autograd and not self.attach.written(envelope, connection):
            if call is not None:
                call.stop_reading()  # the next line may wait
            self.engine.tell_released(connection.peer.id, context.id)
        if self.events.subscribers:
            if call is not None:
                call.stop_reading()
            report(self.events, "send", "complete", envelope, connection, nbytes)

    def receive(self, message: Incoming, here: PendingCall | None = None) -> None:
        """Hands on a message that was read. `here` is the call that this thread waits for: callbacks of other calls run
        elsewhere."""
        envelope = message.envelope
        if self.events.subscribers:
            self.recorder.on_receive()
            nbytes = sum(map(len, message.frames.buffers))
            report(self.events, "receive", "started", envelope, message.connection, nbytes)
        if envelope.kind == Kind.CALL:
            self._on_call(message)
        elif envelope.kind > Kind.FAILURE:
            if message.task is not None:
                message.task()
        else:
            if self._codec.unanswered:
                self._codec.on_answer(message.connection.peer.id, envelope)
            if (call := message.call) is None:
                self.calls.on_late_answer(envelope)
            else:
                call.envelope, call.frames = envelope, message.frames
                self.calls.complete(call, may_run_callbacks=call is here)
            if message.task is not None:
                message.task()
        if self.events.subscribers:
            report(self.events, "receive", "complete", envelope, message.connection)

    def decode(self, envelope: Envelope, frames: Frames, tracked_in: int = 0) -> Any:
        """Decodes the body of a message, with the history of its tensors. Runs users' code.

        Raises:
            DecodeError: it cannot be rebuilt; or it answers a call of context `tracked_in`, and tensors that require
                grad come without their history.
        """
        attach = None
        if envelope.autograd is not None and envelope.autograd.sent:
            attach = self.attach.incoming(envelope)
        elif tracked_in:
            attach = refuse
        if not self.events.subscribers:
            return self._codec.decode(envelope, frames, attach)
        sender = self.name_of(sender_of(envelope.id))
        with self.events.span("decode", KIND_NAMES[envelope.kind], envelope.id, sender):
            return self._codec.decode(envelope, frames, attach)

    def _on_control(self, peer: int, envelope: Envelope, frames: Frames) -> Callable[[], None] | None:
        """A message between workers, and not between their users. While reading."""
        if self.id < 0:
            return None  # an observer has no part in contexts and references
        if envelope.kind == Kind.CLEAR:
            entry, parts = self.references.find_set(envelope.reply_to), self.engine.parts
            return parts.commits.on_clear(peer, entry and entry.value, parts.all())
        if Kind.HOLD <= envelope.kind <= Kind.RETURN:
            return self.references.on_message(peer, self._codec.open_control(envelope, frames))
        return self.engine.on_message(peer, envelope, frames)

    def on_lost(self, connection: Connection, reason: str) -> None:
        """A connection has ended: whatever waits for its peer fails."""
        if self._peers.drop(connection):
            for call in self._pending.take_all(connection):
                gone = f"worker {call.peer!r} is gone, with the call of {call.function} unanswered: {reason}"
                self.calls.fail(call, partial(PeerLostError, gone))
            self.references.on_lost(connection.peer.id, connection.peer.name)
            self._codec.forget(connection.peer.id, self._threads.submit)
            if connection.peer.is_observer:
                return  # it had no part in anything else
            self.engine.on_lost(connection.peer.id, connection.peer.name, reason)
            self.recorder.on_lost(connection.peer.id)
            for context in self.contexts.all():  # whose end the lost peer may have been to tell
                self._threads.submit(partial(interruptible, context_ends.check, self, context))

    # -- what gradients and references need (gradients/host.py) ----------------------------------------

    def ask(
        self, workers: Iterable[int], function: Callable[..., Any], args: Sequence[Any], seconds: float
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Calls a function on each of these workers: (answers, errors)."""
        return interruptible(ask, self, workers, function, args, seconds)

    def later(self, seconds: float, task: Callable[[], None]) -> Callable[[], None]:
        """A function that has a task run so long after it was called. It takes no lock: finalisers call it."""
        return partial(self._threads.new_timer(task), seconds)

    # -- calls -----------------------------------------------------------------------------------------

    def call(
        self, to: To, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Kwargs = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Runs a function on another worker and returns its result.

        Raises:
            UnknownWorkerError, EncodeError, TooLargeError: nothing was sent.
            CallTimeoutError: no answer within `timeout` seconds (None: the default; 0: no limit).
            PeerLostError: the worker is gone. Whether the function ran is not known.
            NotStartedError: this worker has shut down.
            Any exception that the function raises.
        """
        return self.calls.call(to, function, args, kwargs, timeout)

    def call_async(
        self, to: To, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Kwargs = None,
        timeout: float | None = None,
    ) -> Future:  # fmt: skip
        """Like `call`, but returns a future. An error from before anything was sent is raised here.

        Waits only while more than Options.peer_byte_limit bytes of calls to the peer are unanswered.
        """
        return self.calls.call_async(to, function, args, kwargs, timeout)

    def create(
        self, to: To, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Kwargs = None,
        timeout: float | None = None,
    ) -> Entry:  # fmt: skip
        """Like `call_async`, but the result stays there. The entry that is returned counts as a handle to it: to be
        called inside of a critical section, in which it becomes one."""
        if self.closed_because or os.getpid() != self._pid:
            self.check_open()
        create = self.creations.create if current.thread.critical == 1 else self.creations.create_later
        return create(to, Call(function, *arguments.checked(args, kwargs)), timeout)

    def creation_of(self, entry: Held) -> Future:
        """The future of a value's creation: done when that is known."""
        return self.creations.future_of(entry)

    def _on_expired(self, call: PendingCall) -> None:
        self.calls.fail(call, call.timeout_error())

    # -- contexts --------------------------------------------------------------------------------------

    def new_context(self) -> int:
        """Makes an autograd context, and gives its id."""
        if self.closed_because or os.getpid() != self._pid:
            self.check_open()
        return self.contexts.new().id

    def release_context(self, context_id: int, *, wait: bool = False) -> None:
        """Ends a context here and on every worker that took part in it; with `wait`, returns when all know it."""
        if not self.closed_because:
            context_ends.release(self, context_id, wait=wait)

    def release_context_later(self, context_id: int) -> None:
        """Ends a context on a thread of the worker's. From finalisers: takes no lock."""
        self._threads.submit_from_finaliser(partial(self.release_context, context_id))

    # -- life ------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it has left its group."""
        return bool(self.closed_because)

    def check_open(self) -> None:
        """Raises NotStartedError, if this worker has shut down or belongs to another process."""
        if self.closed_because:
            raise NotStartedError(
                f"worker {self.name!r} {self.closed_because}; RPC has not been initialized. Call init_rpc first."
            )
        if os.getpid() != self._pid:
            raise NotStartedError(
                f"worker {self.name!r} belongs to process {self._pid}, of which this one is a fork; "
                "start a worker of its own here"
            )

    def info(self, to: To | None = None) -> WorkerInfo:
        """The name and id of a worker; of this one by default. The store may be asked, within the time of a call."""
        if to is None:
            return WorkerInfo(self.name, self.id)
        return self._peers.find(to, limit_here(None, self.options.rpc_timeout)).info

    def look_up_name(self, worker_id: int) -> str:
        """The name of a worker that may be gone, or that this one has not met yet: the store may be asked."""
        try:
            return self._peers.find(worker_id, limit_here(None, self.options.rpc_timeout)).member.name
        except TelegradError:
            return self._peers.name_of(worker_id)

    def infos(self) -> list[WorkerInfo]:
        """All workers of the group, by id."""
        return [WorkerInfo(m.name, m.id) for m in self.group.members(limit_here(None, self.options.rpc_timeout))]

    def statistics(self) -> Statistics:
        """Takes a snapshot. Never blocks for long."""
        return Statistics.of(self)

    def close(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leaves the group. Any number of times.

        Graceful: waits until all calls made and served here are done; in a group of a fixed size, until the same holds
        for every worker, so that no worker loses an answer. Otherwise ends at once; what is pending fails.

        Raises:
            RendezvousError: some worker did not come to a graceful end in time. This one is closed all the same.
        """
        with critical():
            if self._closing.acquire(blocking=False):
                shutdown.close(self, graceful, timeout)

    def retire(self, timeout: float | None = None) -> None:
        """The first half of a graceful close(): waits for the work in flight, here and everywhere. After it, no worker
        needs this one any more.

        Raises:
            RendezvousError: some worker did not come to a graceful end in time.
        """
        shutdown.retire(self, timeout)
