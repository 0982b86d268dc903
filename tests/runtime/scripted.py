"""A worker's reading on the bench: scripted connections, a poller and threads of the world's, everything else real."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from world import Epoll, World

from telegrad.errors import ConnectionClosedError
from telegrad.events import Events
from telegrad.messages import Envelope, Hello, Kind, Reply
from telegrad.primitives import current, interrupts, waiter
from telegrad.runtime import pending
from telegrad.runtime import reader as reading
from telegrad.runtime.pending import PendingCall, PendingCalls
from telegrad.runtime.reader import Reader
from telegrad.serialization.codec import Codec, encode_envelope
from telegrad.transport import lease as lease_module
from telegrad.transport.base import Connection, Frames
from telegrad.transport.lease import ReadLease

WATCHED = (lease_module, reading, waiter, pending, interrupts)


class ScriptedPoller:
    """The worker's outer epoll."""

    def __init__(self, world: World) -> None:
        self._epoll = Epoll(world)
        self._world = world
        self.watch = self._epoll.modify
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._bell = world.new_fd()
        world.counts[self._bell] = 0
        self._epoll.register(self._bell, 1)
        self.on_timer: Callable[[], None] = lambda: None
        self.timer_at = float("inf")

    def register(self, fd: int, callback: Callable[[], None]) -> None:
        self._callbacks[fd] = callback
        self._epoll.register(fd, 0)

    def unregister(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def own(self, fd: int) -> None:
        """Nothing of the scripted world is closed."""

    def timer(self, seconds: float | None) -> Callable[[], None]:
        def set_timer() -> None:
            self.timer_at = float("inf") if seconds is None else self._world.now + seconds

        return set_timer

    def wake(self) -> None:
        self._world.counts[self._bell] += 1

    def poll(self) -> list[Callable[[], None]]:
        """The callback of one event, or of the timer."""
        left = self.timer_at - self._world.now
        events = self._epoll.poll(None if left == float("inf") else max(left, 1e-9), 1)
        if not events and self._world.now >= self.timer_at:
            self.timer_at = float("inf")
            return [self.on_timer]
        self._world.counts[self._bell] = 0
        return [callback for fd, _ in events if (callback := self._callbacks.get(fd))]


class ScriptedConnection(Connection):
    """Says what it is told, when it is told."""

    transport = "scripted"

    def __init__(self, world: World, lease: ReadLease, name: str, id: int) -> None:
        super().__init__(Hello("bench", id, name), lease)
        self._world = world
        self.fd = world.new_fd()
        self._arrived: deque[Frames] = deque()
        self._ended = ""
        self.inside = 0  # threads in receive()
        self.closed_while_read = False
        self.is_closed = False

    def say(self, envelope: Envelope, body: Any, codec: Codec) -> None:
        packed = codec.pack(envelope, body, self.peer)
        self._arrived.append(Frames(encode_envelope(envelope), [bytearray(b) for b in packed.buffers]))
        self._world.readable.add(self.fd)

    def lose(self, reason: str = "lost") -> None:
        self._ended = reason
        self._world.readable.add(self.fd)

    def open(self) -> None:
        self.lease.add(self)

    def receive(self) -> list[Frames]:
        self.inside += 1
        assert self.inside == 1, "two threads read at once"
        try:
            found = list(self._arrived)
            self._arrived.clear()
            if not self._ended:
                self._world.readable.discard(self.fd)
            elif not found:
                raise ConnectionClosedError(self._ended)
            return found
        finally:
            self.inside -= 1

    def write(self, frames: Frames, timeout: float | None = None, before_waiting: Any = None) -> int:
        raise AssertionError("nothing is written on the bench")

    def abort(self, reason: str = "closed") -> None:
        self.lose(reason)

    def dispose(self) -> None:
        self.abort()
        self.lease.remove(self)
        self.lease.run_unread(self._close)

    def _close(self) -> None:
        self.closed_while_read = self.closed_while_read or bool(self.inside)
        self.is_closed = True
        self._world.readable.discard(self.fd)

    def statistics(self) -> Any:
        raise AssertionError


class Bench:
    """A reader with its lease, pool thread and pending calls, in a world."""

    def __init__(self, world: World, monkeypatch: Any) -> None:
        world.put_into(monkeypatch, lease_module, reading, waiter, pending)
        self.world = world
        self.poller = ScriptedPoller(world)
        self.lease = ReadLease(self.poller)  # type: ignore[arg-type]
        lease_module._leases.discard(self.lease)
        self.codec = Codec(1, "")
        self.far = Codec(2, "")
        self.tasks: deque[Callable[[], None]] = deque()
        self.served: list[int] = []
        self.lost: list[str] = []
        self.stopping = False
        self.function: Callable[[int], None] = lambda id: None  # runs for each call that comes
        self.pending = PendingCalls(self._on_expired, lambda task: lambda seconds: None)
        self.reader = Reader(
            "bench", self.lease, self.pending, SimpleNamespace(submit=self._submit, start=self._nothing),  # type: ignore[arg-type]
            Events(), str,
            receive=self._receive, on_expired=self._on_expired, on_lost=self._on_lost, merge=self._nothing,
            on_forgotten=self._nothing,
            arrive=self._nothing, on_control=self._nothing, on_ends=self._nothing, on_marked=self._nothing,
        )  # fmt: skip

    def _nothing(self, *_: Any) -> None:
        return None

    def _submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)
        self.poller.wake()

    def _receive(self, message: Any, here: Any) -> None:
        if message.envelope.kind == Kind.CALL:
            self.function(message.envelope.id)
            self.served.append(message.envelope.id)
        elif message.call is not None:
            message.call.frames = message.frames
            message.call.set_done()

    def _on_expired(self, call: PendingCall) -> None:
        call.make_error = TimeoutError
        call.set_done()

    def _on_lost(self, connection: Any, reason: str) -> None:
        self.lost.append(connection.peer.name)
        for call in self.pending.take_all(connection):
            call.make_error = ConnectionError
            call.set_done()
        connection.dispose()

    def pool_thread(self) -> None:
        """An idle thread of the worker: polls, and runs what there is to run."""
        current.thread.critical = 1
        while not self.stopping or self.tasks:
            while self.tasks:
                self.tasks.popleft()()
            if self.stopping:
                break
            for callback in self.poller.poll():
                callback()
        self.poller.wake()  # the next one ends, too

    def stop(self) -> None:
        self.stopping = True
        self.poller.wake()

    def connection(self, name: str, id: int) -> ScriptedConnection:
        made = ScriptedConnection(self.world, self.lease, name, id)
        made.open()
        return made

    def call(self, id: int, connection: ScriptedConnection, timeout: float | None = 60.0) -> PendingCall:
        call = PendingCall(
            id, "f", connection.peer.name, timeout, None if timeout is None else self.world.now + timeout, 1, connection
        )
        self.pending.calls[call.id] = call
        return call

    def answer(self, call_id: int, connection: ScriptedConnection) -> None:
        connection.say(Envelope(Kind.REPLY, 1000 + call_id, call_id), Reply(call_id), self.far)
