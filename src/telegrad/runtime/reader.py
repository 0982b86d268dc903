"""Reading for one worker: from connections that have something to read to messages that are handed on.

    something has arrived, and no thread reads   -> serve(), on an idle thread: reads, and runs what it read
    a thread waits for an answer, or for a pass  -> wait_for(), wait(): reads for itself, if no other thread does

The right to read is the lease of transport/lease.py, and its rules hold here: what is read is handed on only after the
lease was released, or inside of a Turn that can be relieved of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ..errors import ConnectionClosedError, ProtocolError, TelegradError
from ..events import Events, logger
from ..messages import Envelope, Kind
from ..primitives import clock, current, interrupts, torch_threads
from ..primitives.forks import leave_if_orphan
from ..primitives.waiter import Waiter
from ..serialization.codec import KINDS, decode_envelope, not_understood
from ..transport.base import Connection, Frames
from ..transport.lease import ReadLease, Turn
from .pending import PendingCall, PendingCalls
from .threads import Threads

_GRACE = 1.0  # seconds
_CALL = int(Kind.CALL)
_ANSWERS = frozenset((int(Kind.REPLY), int(Kind.FAILURE)))


class Incoming(msgspec.Struct, eq=False):
    """A message that was read."""

    connection: Connection
    envelope: Envelope
    frames: Frames
    deadline: float | None  # of a call
    call: PendingCall | None  # that an answer completes
    task: Callable[[], None] | None  # what is left to do: for a message of a pass; before a call; after an answer


def _answers_first(message: Incoming) -> bool:
    return message.envelope.kind not in _ANSWERS


class Reader:
    """Reads for one worker. `receive` is given each message, and the call that the thread waits for, if any."""

    def __init__(
        self,
        name: str,
        lease: ReadLease,
        pending: PendingCalls,
        threads: Threads,
        events: Events,
        name_of: Callable[[int], str],
        *,
        receive: Callable[[Incoming, PendingCall | None], None],
        on_expired: Callable[[PendingCall], None],
        on_lost: Callable[[Connection, str], None],
        merge: Callable[[Envelope, Connection], object],
        on_forgotten: Callable[[int, tuple[int, ...]], Callable[[], None] | None],
        arrive: Callable[[Envelope, int], tuple[Any, Callable[[], None] | None]],
        on_control: Callable[[int, Envelope, Frames], Callable[[], None] | None],
        on_ends: Callable[[int, Envelope], Callable[[], None] | None],
        on_marked: Callable[[Envelope, Connection, Frames, float], None],
    ) -> None:
        self._name = name
        self._lease = lease
        self._pending = pending
        self._threads = threads
        self._events = events
        self._name_of = name_of
        self._receive = receive
        self._on_expired = on_expired
        self._on_lost = on_lost
        self._merge = merge
        self._on_forgotten = on_forgotten
        self._arrive = arrive
        self._on_control = on_control
        self._on_ends = on_ends
        self._on_marked = on_marked
        self.to_do: list[Callable[[], None]] = []  # when all that is being read is opened; with the lease
        lease.on_readable = self.serve

    # -- on threads of the worker ----------------------------------------------------------------------

    def serve(self) -> None:
        """Reads and runs what was read, until nothing more comes or the thread is relieved. The lease is held."""
        lease = self._lease
        turn = Turn(lease, self._hand_on)
        thread = current.thread
        linger = 0.0
        try:
            while found := self._read(linger):
                called = answered = False
                for message in found:
                    if message.envelope.kind in _ANSWERS:
                        answered = True
                    else:
                        called = True
                if called and answered:
                    found.sort(key=_answers_first)
                turn.waiting.extend(found)
                del found
                while turn.waiting:
                    message = turn.waiting.popleft()
                    turn.leave()
                    if thread.times_set != torch_threads.times_set:
                        torch_threads.follow()
                    try:
                        self._receive(message, None)
                    except BaseException as error:  # also a SystemExit: the thread is the worker's, and reads for all
                        leave_if_orphan(error)
                        logger.exception("worker %r: a message could not be handled", self._name)
                    del message
                    if not turn.take_back():
                        return
                # A caller is likely to call again at once: to be there saves it a wake-up.
                linger = lease.linger if called else 0.0
                if not linger:
                    lease.release()
                    return
        finally:
            turn.end()

    def _hand_on(self, message: Incoming) -> None:
        self._threads.submit(lambda: self._receive(message, None))

    def _read(self, timeout: float | None, waiter: Waiter | None = None) -> list[Incoming]:
        """Reads once. The lease is held, and is released if nothing was found.

        An answer is claimed here: a thread that takes the lease next, to wait for that answer, must see that it has
        come already. And what a message says of gradients must be known before a message that was sent after it is
        looked at.
        """
        found: list[Incoming] = []
        lost: list[tuple[Connection, Exception]] | None = None
        try:
            for connection in self._lease.wait(timeout, waiter):
                try:
                    for frames in connection.receive():
                        self._open(connection, frames, found)
                except Exception as error:
                    self._lease.remove(connection)
                    lost = [*(lost or ()), (connection, error)]
        except BaseException:  # Ctrl-C while waiting
            self._end_of_reading()
            self._lease.release()
            self._hand_out(found, None)
            raise
        if self.to_do:
            self._end_of_reading()
        if lost is not None:
            self._lease.release()
            self._hand_out(found, None)
            for connection, reason in lost:
                self._end(connection, reason)
            return []
        if not found:
            self._lease.release()
        return found

    def _end_of_reading(self) -> None:
        while self.to_do:
            self.to_do.pop()()

    def _open(self, connection: Connection, frames: Frames, found: list[Incoming]) -> None:
        """Opens a message, and does what must be done in the order of messages."""
        try:
            envelope = decode_envelope(frames.header)
            kind = envelope.kind
        except msgspec.MsgspecError:
            kind = -1
        if kind not in KINDS:
            raise not_understood(frames.header)
        opened = time.perf_counter() if envelope.profiling is not None else 0.0
        call = deadline = task = undecoded = ends = None
        if envelope.ended or envelope.released:
            ends = self._on_ends(connection.peer.id, envelope)
        if envelope.autograd is not None:
            undecoded = self._merge(envelope, connection)
        if envelope.lent or envelope.creates or envelope.dropped:
            frames.keep, task = self._arrive(envelope, connection.peer.id)
            if task is not None and kind != _CALL:
                self._threads.submit(task)
            if kind != _CALL:
                task = None
        freed = self._on_forgotten(connection.peer.id, envelope.forgotten) if envelope.forgotten else None
        if undecoded is not None:
            frames.keep = (frames.keep, undecoded)
        if envelope.placed or envelope.lane:
            lane = connection.open_device_lane()
            if lane is None:
                raise ProtocolError("a message that speaks of device memory, where there is none to share")
            lane.heard(envelope.lane)
            frames.arrived = lane.arrived(envelope.placed) if envelope.placed else ()
        if kind == _CALL:
            if envelope.timeout is not None:
                deadline = frames.deadline = clock.now() + envelope.timeout
        elif kind in _ANSWERS:
            call = self._pending.claim(envelope.reply_to, connection)
        else:
            task = self._on_control(connection.peer.id, envelope, frames)
        if ends is not None:
            task = ends if task is None else partial(interrupts.run_all, [ends, task])
        if freed is not None:  # last: nobody waits for it
            task = freed if task is None else partial(interrupts.run_all, [task, freed])
        found.append(Incoming(connection, envelope, frames, deadline, call, task))
        if opened:
            self._on_marked(envelope, connection, frames, opened)

    def _end(self, connection: Connection, error: Exception) -> None:
        """A connection has ended, or its peer sends what makes no sense."""
        if isinstance(error, TelegradError):
            level = logging.DEBUG if isinstance(error, ConnectionClosedError) else logging.WARNING
            text = "worker %r: the connection with %r ends: %s"
            logger.log(level, text, self._name, connection.peer.name, str(error))
        else:
            text = "worker %r: a message of %r could not be opened, and its connection ends"
            logger.error(text, self._name, connection.peer.name, exc_info=error)
        self._on_lost(connection, str(error))

    def _hand_out(self, found: list[Incoming], here: PendingCall | None) -> None:
        """Completes calls that were answered, and has other threads run the rest: this one may be a user's. The lease
        is not held, or can be relieved. Others may wait for what was claimed, so all of it is handed out, whatever
        happens with one."""
        left = len(found)
        try:
            for message in found:
                left -= 1
                if message.envelope.kind in _ANSWERS:
                    self._receive(message, here)
                elif message.envelope.kind == _CALL or message.task is not None:
                    self._hand_on(message)
                elif self._events.subscribers:  # else nothing is left to do
                    self._receive(message, here)
        except BaseException:
            for message in found[len(found) - left :]:
                self._hand_on(message)
            raise

    # -- on a thread that waits ------------------------------------------------------------------------

    def wait_for(self, call: PendingCall, timeout: float | None) -> None:
        """Waits until the call is done, or for `timeout` seconds. Reads the answer itself if no other thread reads."""
        if current.thread.relieve is not None:
            current.thread.relieve()
        until = None if timeout is None else clock.now() + timeout
        lease = self._lease
        while not call.done:
            left = call.left()
            if left == 0 and (self._pending.take(call.id) is not None or self._is_given_up(call)):
                self._on_expired(call)
                return
            if until is not None:
                left = min(until - clock.now(), float("inf") if left is None else left)
                if left <= 0:
                    return
            if call.claimed or not lease.try_take():
                call.sleep(_GRACE if left == 0 else left)
            elif call.claimed or call.done:
                lease.release()
            else:
                self.read_for(call, left)

    def read_for(self, call: PendingCall, timeout: float | None) -> None:
        """Reads once on behalf of a call, by the thread that waits for it. The lease is held, and released."""
        found = self._read(timeout, call)
        if found:
            self._lease.release()
            self._hand_out(found, call)

    def _is_given_up(self, call: PendingCall) -> bool:
        """Whether the thread that claimed the answer of a call, whose time is over, has had long enough to hand it
        over. That takes microseconds, unless no thread could be started for it."""
        return call.future is None and clock.now() - (call.deadline or 0.0) > _GRACE

    def wait_until(self, waiter: Waiter, deadline: float | None, turn: Turn | None = None) -> None:
        """Waits until `waiter` is done, or for the deadline. Reads if no other thread does; with a `turn` of this
        thread's that was not relieved, the thread has the lease still, and has it after."""
        if waiter.done:
            return
        if turn is not None and turn.take_back():
            if turn.waiting:
                turn.pass_waiting_on()
            while found := self._read(None if deadline is None else max(0.0, deadline - clock.now()), waiter):
                turn.leave()
                self._hand_out(found, None)
                del found  # or its end, which may run users' code, would come with the lease, when the next is read
                if waiter.done:
                    return
                if not turn.take_back():
                    break
        lease = self._lease
        while not waiter.done:
            left = _left(deadline)
            if left == 0:
                return
            if not lease.try_take():
                waiter.sleep(left)
            elif waiter.done:
                lease.release()
            elif found := self._read(left, waiter):
                lease.release()
                self._hand_out(found, None)
                del found  # as above

    def wait(self, waiter: Waiter, peer: int, deadline: float | None, turn: Turn | None) -> None:
        """Waits until `waiter` is done, most likely by a message of `peer`, or for the deadline; reads meanwhile."""
        waiting = None
        if self._events.subscribers:
            waiting = self._events.span("wait", "pass", current.current_pass_id(), self._name_of(peer))
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            if turn is None and thread.relieve is not None:
                thread.relieve()
            self.wait_until(waiter, deadline, turn)
        finally:
            thread.critical = before
            if interrupts.deferred and not before:
                interrupts.deliver()
        if waiting is not None:
            waiting.end()

    def begin_turn(self) -> Turn | None:
        """Lets this thread keep the lease while it works on a pass, until the turn's `end()`; None if another one has
        it. Others would be woken for each message of the pass, and hold up the thread that it is for."""
        if current.thread.relieve is not None:
            current.thread.relieve()
        self._threads.start()  # one of which relieves this one, if need be
        if not self._lease.try_take():
            return None
        turn = Turn(self._lease, self._hand_on)
        turn.leave()
        return turn


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - clock.now())
