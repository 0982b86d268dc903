"""Waiters, windows, pending calls and the pool of threads, in every order of their threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from world import World, orders

from telegrad.primitives import waiter
from telegrad.primitives.waiter import Waiter
from telegrad.runtime import pending, threads
from telegrad.runtime.flow_control import Window
from telegrad.runtime.pending import PendingCall, PendingCalls
from telegrad.runtime.reader import Reader
from telegrad.runtime.threads import Threads

Switches = Sequence[tuple[int, int]]
WATCHED = (waiter, pending, threads)


def in_all_orders(play: Callable[[World], Callable[[], None]], *, of: int, two: int = 300) -> None:
    """`play` spawns threads in a world, and gives what must hold at the end."""

    def program(switches: Switches) -> int:
        patches = pytest.MonkeyPatch()
        world = World(switches, *WATCHED)
        world.put_into(patches, *WATCHED)
        try:
            must_hold = play(world)
            world.run()
        finally:
            patches.undo()
        for thread in world.threads:
            if thread.error is not None:
                raise thread.error
        must_hold()
        return world.lines

    for _ in orders(program, threads=of, two_switches=two):
        pass


def test_a_waiter_that_is_done_twice_wakes_everyone_once():
    def play(world: World) -> Callable[[], None]:
        made = Waiter()
        world.spawn(lambda: made.sleep(None), "one")
        world.spawn(lambda: made.sleep(None), "two")
        world.spawn(made.set_done, "done")
        world.spawn(made.set_done, "done again")
        return lambda: None

    in_all_orders(play, of=4)


def test_a_sleeper_whose_time_is_over_leaves_the_waiter_as_it_was():
    def play(world: World) -> Callable[[], None]:
        made = Waiter()
        world.spawn(lambda: made.sleep(1.0), "short")
        world.spawn(lambda: made.sleep(None), "long")
        world.spawn(lambda: (world.block(lambda: False, 2.0), made.set_done()), "later")
        return lambda: None

    in_all_orders(play, of=3)


def test_bytes_that_leave_a_window_let_those_in_who_wait():
    def play(world: World) -> Callable[[], None]:
        window = Window(100)
        entered: list[int] = []

        def enter(number: int) -> None:
            window.enter(60, 1, None)
            entered.append(number)
            window.leave(60, 1)

        for number in range(3):
            world.spawn(lambda number=number: enter(number), f"caller {number}")

        def must_hold() -> None:
            assert sorted(entered) == [0, 1, 2]
            assert window.bytes_in_flight() == 0

        return must_hold

    in_all_orders(play, of=3)


def test_a_window_that_stays_full_lets_a_caller_go_in_time():
    def play(world: World) -> Callable[[], None]:
        window = Window(100)
        window.enter(60, 1, None)
        window.enter(60, 2, None)  # another depth

        def late() -> None:
            with pytest.raises(TimeoutError, match="120 bytes"):
                window.enter(60, 1, world.now + 5.0)

        world.spawn(late)
        return lambda: None

    in_all_orders(play, of=1, two=0)


class Timers:
    """The timer of a worker, as the world's clock has it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.at = float("inf")
        self.task: Callable[[], None] = lambda: None

    def new(self, task: Callable[[], None]) -> Callable[[float], None]:
        self.task = task
        return self.set

    def set(self, seconds: float) -> None:
        self.at = self.world.now + seconds

    def ring(self, times: int) -> None:
        """A thread of the worker's, that the timer wakes."""
        for _ in range(times):
            if self.at == float("inf"):
                return
            if not self.world.block(lambda: self.world.now >= self.at, self.at - self.world.now):
                return
            self.at = float("inf")
            self.task()


def test_a_call_is_completed_once_whatever_comes_first():
    """Its answer, its deadline, the loss of its connection."""

    def play(world: World) -> Callable[[], None]:
        timers = Timers(world)
        completed: list[str] = []
        pending_calls = PendingCalls(lambda call: completed.append("expired"), timers.new)
        connection: Any = SimpleNamespace(peer=SimpleNamespace(name="b", id=2))
        call = PendingCall(1, "f", "b", 1.0, world.now + 1.0, 1, connection)
        pending_calls.calls[call.id] = call
        call.sent = True
        pending_calls.expire_by(world.now + 1.0)

        def answer() -> None:
            world.block(lambda: False, 1.0)
            if pending_calls.claim(1, connection) is not None:
                completed.append("answered")

        def lose() -> None:
            world.block(lambda: False, 1.0)
            completed.extend("lost" for _ in pending_calls.take_all(connection))

        world.spawn(answer)
        world.spawn(lose)
        world.spawn(lambda: timers.ring(1), "timer")
        return lambda: pytest.fail(f"{completed}") if len(completed) != 1 else None

    in_all_orders(play, of=3)


def test_every_watched_call_expires_also_after_one_that_could_not_be_completed():
    def play(world: World) -> Callable[[], None]:
        timers = Timers(world)
        expired: list[int] = []

        def on_expired(call: PendingCall) -> None:
            expired.append(call.id)
            if call.id == 2:
                raise ValueError("of a future that is strange")

        pending_calls = PendingCalls(on_expired, timers.new)

        def watch(id: int, timeout: float) -> None:
            deadline = world.now + timeout
            call = PendingCall(id, "f", "b", timeout, deadline)
            pending_calls.calls[call.id] = call
            call.sent = True
            if deadline < pending_calls.next_look:
                pending_calls.expire_by(deadline)

        watch(1, 3.0)
        world.spawn(lambda: watch(2, 1.0), "sooner")
        world.spawn(lambda: watch(3, 2.0), "between")

        def clock() -> None:
            world.block(lambda: False, 0.5)
            timers.ring(9)

        world.spawn(clock)

        def must_hold() -> None:
            assert sorted(expired) == [1, 2, 3]

        return must_hold

    in_all_orders(play, of=3)


def test_a_call_that_is_being_sent_does_not_expire():
    """The thread that sends it watches its time, and gives back its place in the window."""
    expired: list[PendingCall] = []
    pending_calls = PendingCalls(expired.append, lambda task: lambda seconds: None)
    call = pending_calls.calls[1] = PendingCall(1, "f", "a", 0.0, 0.0)
    pending_calls._expire()
    assert not expired
    call.sent = True
    pending_calls._expire()
    assert expired == [call]


def test_only_the_worker_that_was_asked_can_answer():
    calls = PendingCalls(lambda call: None, lambda task: lambda seconds: None)
    asked: Any = SimpleNamespace(peer=SimpleNamespace(name="b"))
    liar: Any = SimpleNamespace(peer=SimpleNamespace(name="liar"))
    call = PendingCall(1, "f", "b", None, None, 1, asked)
    calls.calls[call.id] = call
    assert calls.claim(1, liar) is None
    assert not call.claimed
    assert calls.claim(1, asked) is call


# -- the pool of threads ---------------------------------------------------------------------------------


class BellPoller:
    """A poller with nothing but its bell."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rung = 0

    def wake(self) -> None:
        self._rung += 1

    def poll(self, timeout: float | None) -> list[Callable[[], None]]:
        if self._world.block(lambda: self._rung > 0, timeout):
            self._rung -= 1
        return []


def test_of_idle_threads_one_stays():
    """Two that have had nothing to do for long must not both see two."""

    def play(world: World) -> Callable[[], None]:
        pool = Threads("w", BellPoller(world), 5.0, lambda: None)  # type: ignore[arg-type]
        gate, ran = Waiter(), []

        def user() -> None:
            pool.submit(lambda: gate.sleep(None))
            pool.submit(lambda: gate.sleep(None))
            world.block(lambda: False, 1.0)
            gate.set_done()
            world.block(lambda: False, 12.0)  # all but one end
            assert pool._idle == len(pool._threads) >= 1
            pool.submit(lambda: ran.append(1))
            assert world.block(lambda: bool(ran), 60.0)
            with pool._lock:
                pool._closed = True
            pool._poller.wake()

        world.spawn(user)
        return lambda: None

    in_all_orders(play, of=3, two=100)


def test_threads_that_cannot_be_started_are_started_later(caplog):
    """A limit on threads that lasts for a while must not leave the worker deaf."""

    def play(world: World) -> Callable[[], None]:
        pool = Threads("w", BellPoller(world), 5.0, lambda: None)  # type: ignore[arg-type]
        failures, ran = [3], []
        start = world.start

        def try_to_start(thread: Any) -> None:
            if failures[0]:
                failures[0] -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        world.start = try_to_start  # type: ignore[method-assign]

        def user() -> None:
            for number in range(6):
                pool.submit(lambda number=number: ran.append(number))
                world.block(lambda: False, 0.1)
            assert world.block(lambda: len(ran) == 6, 60.0), f"only {ran} were run"
            assert pool._idle == len(pool._threads)
            with pool._lock:
                pool._closed = True
            pool._poller.wake()

        world.spawn(user)
        return lambda: None

    in_all_orders(play, of=2, two=50)
    assert "no thread could be started" in caplog.text


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_a_task_that_raises_anything_costs_no_thread(raised, caplog):
    def play(world: World) -> Callable[[], None]:
        pool = Threads("w", BellPoller(world), 5.0, lambda: None)  # type: ignore[arg-type]
        ran: list[int] = []

        def fail() -> None:
            raise raised("of a task")

        def user() -> None:
            for number in range(3):
                pool.submit(fail)
                pool.submit(lambda number=number: ran.append(number))
            assert world.block(lambda: len(ran) == 3, 60.0)
            world.block(lambda: False, 1.0)
            assert pool._idle == len(pool._threads)
            with pool._lock:
                pool._closed = True
            pool._poller.wake()

        world.spawn(user)
        return lambda: None

    in_all_orders(play, of=2, two=30)


@pytest.mark.parametrize("in_a_turn", [True, False])
def test_what_was_read_goes_before_the_thread_that_waits_reads_again(in_a_turn):
    """Its end may run users' code, and would come while the lease is held."""

    class Message:
        pass

    waiter, read = Waiter(), list[weakref.ref[Message]]()
    free = SimpleNamespace(try_take=lambda: True, release=lambda: None)
    turn = SimpleNamespace(take_back=lambda: True, leave=lambda: None, waiting=())

    def read_one(*_: object) -> list[Message]:
        assert all(message() is None for message in read)
        found = [Message()]
        read.append(weakref.ref(found[0]))
        if len(read) == 3:
            waiter.set_done()
        return found

    reader = Reader.__new__(Reader)
    reader._lease, reader._read, reader._hand_out = free, read_one, lambda found, here: None
    reader.wait_until(waiter, None, turn if in_a_turn else None)
    assert len(read) == 3
