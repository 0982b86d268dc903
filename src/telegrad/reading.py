"""Who reads, and when: threads of the worker on duty, or a caller that waits for its own answer.

    a connection is readable  -> on_readable, on a thread of the worker's: reads, and runs what it read (duty.py)
    a caller waits            -> wait_for, on its thread: reads for itself while nobody else does

There is always somebody who reads or is woken to read: whoever stops reading arms the connection. What is
read is handed on only after the reading was passed on, or by a thread that can be relieved of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from . import current
from .codec import Codec
from .duty import Duty, Roster
from .errors import ConnectionClosedError, TelegradError
from .events import logger
from .messages import Envelope, Kind
from .pending import PendingCall, PendingCalls
from .threads import Threads
from .transport.base import Connection, Frames
from .waiter import Waiter

_GRACE = 1.0  # seconds
_PATIENCE = (
    2e-3  # seconds that a thread reads for itself, where what it waits for may also come from elsewhere
)
_ANSWERS = frozenset((int(Kind.REPLY), int(Kind.FAILURE)))


class Incoming(NamedTuple):
    """A message that was read."""

    connection: Connection
    envelope: Envelope
    frames: Frames
    deadline: float | None  # of a call
    call: PendingCall | None  # that an answer completes
    task: Callable[[], None] | None  # what is left to do for a message of a backward pass

    @property
    def is_answer(self) -> bool:
        return self.envelope.kind in _ANSWERS


def _answers_first(message: Incoming) -> bool:
    return not message.is_answer


class Reader:
    """Of one worker. `receive` gets each message, and the call that the thread waits for, if it does."""

    def __init__(
        self,
        name: str,
        codec: Codec,
        pending: PendingCalls,
        threads: Threads,
        roster: Roster,
        *,
        receive: Callable[[Incoming, PendingCall | None], None],
        on_expired: Callable[[PendingCall], None],
        on_lost: Callable[[Connection, str], None],
        merge: Callable[[Envelope, Connection], None],
        arrive: Callable[[Envelope, int], Any],
        on_control: Callable[[int, Envelope, Frames], Callable[[], None] | None],
        on_marked: Callable[[Envelope, Connection, Frames, float], None],
    ) -> None:
        self._name = name
        self._codec = codec
        self._pending = pending
        self._threads = threads
        self._roster = roster
        self._receive = receive
        self._on_expired = on_expired
        self._on_lost = on_lost
        self._merge = merge
        self._arrive = arrive
        self._on_control = on_control
        self._on_marked = on_marked

    # -- on threads of the worker ----------------------------------------------------------------------

    def adopt(self, connection: Connection) -> None:
        """Reads a connection from here on."""
        connection.on_readable = self._on_readable
        connection.arm()

    def _on_readable(self, connection: Connection) -> None:
        """On a thread of ours, when something has arrived and nobody was reading. See duty.py."""
        if not connection.reading.acquire(blocking=False):
            return  # somebody else reads, and arms the connection when done
        duty = Duty(connection, self._hand_on)
        self._roster.begin(duty)
        try:
            linger = 0.0
            while found := self._read(connection, linger):
                called = not all(message.is_answer for message in found)
                if called and len(found) > 1:
                    found.sort(key=_answers_first)
                duty.waiting.extend(found)
                del found
                if not self._run_waiting(duty):
                    return
                # Whoever called is likely to call again at once: to be there saves it a wake-up.
                linger = connection.linger if called else 0.0
                if not linger:
                    connection.pass_on()
                    return
        finally:
            self._roster.end(duty)

    def _run_waiting(self, duty: Duty) -> bool:
        """Hands on what was read, one after the other; whether the thread is still on duty after it."""
        while duty.waiting:
            message = duty.waiting.popleft()
            self._roster.leave(duty)
            try:
                self._receive(message, None)
            except Exception:  # whatever it was, the connection must be read again
                logger.exception("worker %r: a message could not be handled", self._name)
            del message
            if not duty.take_back():
                return False
        return True

    def _hand_on(self, message: Incoming) -> None:
        self._threads.submit(lambda: self._receive(message, None))

    def _read(self, connection: Connection, timeout: float | None) -> list[Incoming]:
        """Reads once. The caller holds `reading`, and still does after it if anything was found.

        An answer is claimed here, while reading: whoever takes the reading next to wait for that answer must
        see that it has come already. So must, what a message says of gradients be known before anything that was
        sent after it is looked at.
        """
        found: list[Incoming] = []
        try:
            for frames in connection.read(timeout):
                envelope = self._codec.open(frames)
                opened = time.perf_counter() if envelope.profiling is not None else 0.0
                call = deadline = task = None
                if envelope.autograd is not None:
                    self._merge(envelope, connection)
                if envelope.lent or envelope.creates or envelope.dropped:
                    frames = frames._replace(keep=self._arrive(envelope, connection.peer.id))
                if envelope.kind == Kind.CALL:
                    if envelope.timeout is not None:
                        deadline = time.monotonic() + envelope.timeout
                elif envelope.kind in _ANSWERS:
                    call = self._pending.claim(envelope.reply_to)
                else:
                    task = self._on_control(connection.peer.id, envelope, frames)
                found.append(Incoming(connection, envelope, frames, deadline, call, task))
                if opened:
                    self._on_marked(envelope, connection, frames, opened)
        except TelegradError as error:
            level = logging.DEBUG if isinstance(error, ConnectionClosedError) else logging.WARNING
            logger.log(
                level, "worker %r: the connection with %r ends: %s", self._name, connection.peer.name, error
            )
            connection.reading.release()
            self._hand_out(found, None)
            self._on_lost(connection, str(error))
            return []
        except BaseException:  # Ctrl-C on a thread that reads: what it has claimed, others may wait for
            connection.pass_on()
            self._hand_out(found, None)
            raise
        if not found:
            connection.pass_on()
        return found

    def _hand_out(self, found: list[Incoming], here: PendingCall | None) -> None:
        """Completes calls that were answered, and has others run the rest: this thread may be a user's."""
        for message in found:
            if message.envelope.kind == Kind.CALL or message.task is not None:
                self._hand_on(message)
            else:
                self._receive(message, here)

    # -- on a caller's thread --------------------------------------------------------------------------

    def wait_for(self, call: PendingCall, timeout: float | None) -> None:
        """Waits until the call is done, or for `timeout` seconds. Reads the answer itself if nobody reads."""
        if current.thread.relieve is not None:
            current.thread.relieve()
        until = None if timeout is None else time.monotonic() + timeout
        connection = call.connection
        assert connection is not None
        while not call.done:
            left = call.left()
            if left == 0 and (self._pending.take(call.id) is not None or self._is_given_up(call)):
                self._on_expired(call)
                return
            if until is not None:
                left = min(until - time.monotonic(), float("inf") if left is None else left)
                if left <= 0:
                    return
            if call.claimed or not connection.reading.acquire(blocking=False):
                call.sleep(_GRACE if left == 0 else left)
            elif call.claimed or call.done:
                connection.pass_on()
            else:
                connection.disarm()
                self.read_for(call, left)

    def wait_until(self, waiter: Waiter, connection: Connection | None, deadline: float | None) -> None:
        """Waits until `waiter` is done, or for the deadline. Reads the connection itself for a moment: what is waited
        for most likely comes there. Then it sleeps, and others read: it may come from elsewhere, too."""
        patience = time.monotonic() + _PATIENCE
        while not waiter.done:
            now = time.monotonic()
            left = None if deadline is None else deadline - now
            if left is not None and left <= 0:
                return
            if connection is None or now >= patience or not connection.reading.acquire(blocking=False):
                waiter.sleep(left)
            elif waiter.done:
                connection.pass_on()
            else:
                connection.disarm()
                found = self._read(connection, patience - now)
                if found:
                    connection.pass_on()
                    self._hand_out(found, None)

    def _is_given_up(self, call: PendingCall) -> bool:
        """Whether whoever claimed the answer of a call, whose time is over, has had long enough to hand it over.
        That takes microseconds, unless the thread was interrupted in between."""
        return call.future is None and time.monotonic() - (call.deadline or 0.0) > _GRACE

    def read_for(self, call: PendingCall, timeout: float | None) -> None:
        """Reads once on behalf of a call, by the thread that waits for it. `reading` is held, and released."""
        connection = call.connection
        assert connection is not None
        found = self._read(connection, timeout)
        if found:
            connection.pass_on()
            self._hand_out(found, call)

    # -- on a thread that works on a pass --------------------------------------------------------------

    def watch(self, connection: Connection) -> Watch | None:
        """The calling thread reads this connection from time to time, until `end`; None if somebody else does."""
        if not connection.reading.acquire(blocking=False):
            return None
        connection.disarm()
        return Watch(self, connection)

    def read_once(self, connection: Connection, timeout: float) -> bool:
        """Reads and hands out, and keeps `reading` if anything was found."""
        found = self._read(connection, timeout)
        self._hand_out(found, None)
        return bool(found)

    def new_duty(self, connection: Connection) -> Duty:
        duty = Duty(connection, self._hand_on)
        self._roster.begin(duty)
        self._roster.leave(duty)
        return duty

    def end_duty(self, duty: Duty) -> None:
        self._roster.end(duty)

    def leave_again(self, duty: Duty) -> None:
        self._roster.leave(duty)


class Watch:
    """A thread that expects messages of one connection while it does something else, as the root of a pass does.

    Others would be woken for each of them, and hold up the thread that they are for. Like any thread on duty it
    is relieved of the reading when it makes a call of its own, or has not looked for a while.
    """

    def __init__(self, reader: Reader, connection: Connection) -> None:
        self._reader = reader
        self._connection = connection
        self._duty: Duty | None = reader.new_duty(connection)

    def wait(self, waiter: Waiter, deadline: float | None) -> bool:
        """Reads until `waiter` is done; False if that is to be waited for in another way."""
        duty = self._duty
        if duty is None or not duty.take_back():
            return False
        patience = time.monotonic() + _PATIENCE
        if deadline is not None:
            patience = min(patience, deadline)
        while not waiter.done:
            left = patience - time.monotonic()
            if left <= 0:
                self._give_up(duty)
                self._connection.pass_on()
                return False
            if not self._reader.read_once(self._connection, left):
                self._give_up(duty)
                return waiter.done
        self._reader.leave_again(duty)
        return True

    def _give_up(self, duty: Duty) -> None:
        self._duty = None
        self._reader.end_duty(duty)

    def end(self) -> None:
        duty = self._duty
        if duty is not None:
            self._give_up(duty)
            if duty.take_back():
                self._connection.pass_on()
