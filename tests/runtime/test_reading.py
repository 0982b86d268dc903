"""The read lease and the reader, in every order: two threads that wait, a pool thread, answers, losses, relief,
Ctrl-C, disposal. After each order the worker must not be deaf."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import WATCHED, Bench
from world import DeadlockError, World, orders

from telegrad.messages import Call, Envelope, Kind
from telegrad.primitives import current, interrupts
from telegrad.primitives.waiter import Waiter

UNCHECKED = True  # threads of the bench stop in the middle of all that is checked

Switches = Sequence[tuple[int, int]]


class Play:
    """One run: waiting threads, a pool thread, and a last message that shows that somebody reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, switches: Switches) -> None:
        self._patches = pytest.MonkeyPatch()
        self.world = World(switches, *WATCHED)
        self.bench = Bench(self.world, self._patches)
        self.b = self.bench.connection("b", 2)
        self.c = self.bench.connection("c", 3)
        self.waiting = 0

    def wait_for(self, call: Any, name: str, timeout: float | None = None) -> Any:
        """A thread that waits for a call, as Future.wait() does."""

        def wait() -> None:
            current.thread.is_main = name == "main"
            try:
                with interrupts.critical():
                    self.bench.reader.wait_for(call, timeout)
            finally:
                self.ended()

        self.waiting += 1
        return self.world.spawn(wait, name)

    def ended(self) -> None:
        """When the last thread has ended, one more call comes: the pool thread must read it."""
        self.waiting -= 1
        if not self.waiting:
            self.last_words()

    def last_words(self) -> None:
        if not self.c.is_closed:
            self.c.say(Envelope(Kind.CALL, 99, 0, 60.0, 1), Call(abs, (1,), None), self.bench.far)
            assert self.world.block(lambda: 99 in self.bench.served, 60.0), "the worker is deaf"
        self.bench.stop()

    def run(self) -> int:
        self.world.spawn(self.bench.pool_thread, "pool")
        try:
            self.world.run()
        finally:
            self._patches.undo()
        for thread in self.world.threads:
            if thread.error is not None and thread.name != "main":
                raise thread.error
        assert not self.bench.lease._lock._taken, "the lease was not released"
        assert not self.b.closed_while_read
        assert not self.c.closed_while_read
        return self.world.lines


def check(monkeypatch, setup: Callable[[Play], Callable[[], None]], *, threads: int = 4, two: int = 150) -> int:
    """Runs a play in all orders; `setup` prepares it and gives what must hold at its end."""
    runs = 0

    def program(switches: Switches) -> int:
        play = Play(monkeypatch, switches)
        must_hold = setup(play)
        lines = play.run()
        must_hold()
        return lines

    for _ in orders(program, threads=threads, two_switches=two):
        runs += 1
    return runs


def done(*calls: Any) -> Callable[[], None]:
    def must_hold() -> None:
        for call in calls:
            assert call.done
            assert call.make_error is None, f"call {call.id} failed"

    return must_hold


@pytest.mark.parametrize("same", [True, False], ids=["one peer", "two peers"])
def test_two_threads_wait_and_both_get_their_answers(monkeypatch, same):
    def setup(play: Play) -> Callable[[], None]:
        bench = play.bench
        other = play.b if same else play.c
        one, two = bench.call(1, play.b), bench.call(2, other)
        play.wait_for(one, "first")
        play.wait_for(two, "second")

        def network() -> None:
            bench.answer(2, other)
            bench.answer(1, play.b)

        play.world.spawn(network)
        return done(one, two)

    assert check(monkeypatch, setup) > 200


def test_an_answer_that_came_before_anybody_waited(monkeypatch):
    def setup(play: Play) -> Callable[[], None]:
        one = play.bench.call(1, play.b)
        play.bench.answer(1, play.b)
        play.wait_for(one, "first")
        return done(one)

    check(monkeypatch, setup, threads=2)


def test_a_lost_peer_fails_its_calls_and_no_others(monkeypatch):
    def setup(play: Play) -> Callable[[], None]:
        bench = play.bench
        one, two = bench.call(1, play.b), bench.call(2, play.c)
        play.wait_for(one, "first")
        play.wait_for(two, "second")

        def network() -> None:
            play.b.lose()
            bench.answer(2, play.c)

        play.world.spawn(network)

        def must_hold() -> None:
            assert one.make_error is ConnectionError
            assert bench.lost == ["b"]
            assert play.b.is_closed
            done(two)()

        return must_hold

    check(monkeypatch, setup)


def test_a_loss_that_another_thread_noticed_wakes_the_one_that_reads(monkeypatch):
    """A writer finds that the peer is gone: the thread that reads for a call to it hears of it at once."""

    def setup(play: Play) -> Callable[[], None]:
        bench = play.bench
        one = bench.call(1, play.b, timeout=None)
        play.wait_for(one, "first")
        play.world.spawn(lambda: bench._on_lost(play.b, "a write failed"), "writer")

        def must_hold() -> None:
            assert one.make_error is ConnectionError
            assert play.b.is_closed

        return must_hold

    check(monkeypatch, setup, threads=3)


def test_a_connection_is_closed_only_when_no_thread_reads_it(monkeypatch):
    def setup(play: Play) -> Callable[[], None]:
        bench = play.bench
        two = bench.call(2, play.c)
        play.wait_for(two, "first")

        def dispose() -> None:
            bench.answer(3, play.b)
            play.b.dispose()
            play.b.dispose()
            bench.answer(2, play.c)

        play.world.spawn(dispose)

        def must_hold() -> None:
            assert play.b.is_closed
            done(two)()

        return must_hold

    check(monkeypatch, setup, threads=3)


def test_a_call_expires_while_another_thread_reads(monkeypatch):
    def setup(play: Play) -> Callable[[], None]:
        bench = play.bench
        late, two = bench.call(1, play.b, timeout=5.0), bench.call(2, play.c)
        play.wait_for(late, "first")
        play.wait_for(two, "second")

        def network() -> None:
            play.world.block(lambda: late.done, None)
            bench.answer(1, play.b)  # too late
            bench.answer(2, play.c)

        play.world.spawn(network)

        def must_hold() -> None:
            assert late.make_error is TimeoutError
            done(two)()

        return must_hold

    check(monkeypatch, setup)


def test_a_function_that_takes_long_is_relieved_of_the_lease(monkeypatch):
    """It waits for something that only a message behind its own brings: without relief the two wait for ever."""

    def setup(play: Play) -> Callable[[], None]:
        bench = play.bench
        gate = Waiter()
        one = bench.call(1, play.b, timeout=None)

        def function(id: int) -> None:
            if id == 50:
                gate.sleep(None)

        bench.function = function
        play.wait_for(one, "first")

        def network() -> None:
            play.b.say(Envelope(Kind.CALL, 50, 0, 60.0, 1), Call(abs, (1,), None), bench.far)
            play.world.block(lambda: False, 1.0)  # until somebody is inside of the function
            bench.answer(1, play.b)
            play.world.block(lambda: one.done, None)
            gate.set_done()

        play.world.spawn(network)
        play.world.spawn(bench.pool_thread, "second pool thread")

        def must_hold() -> None:
            assert 50 in bench.served
            done(one)()

        return must_hold

    check(monkeypatch, setup, two=60)


def test_a_pass_keeps_the_lease_and_wakes_whatever_completes_it(monkeypatch):
    """The root of a pass waits with a turn of its own; the pass is ended by a message, or by another thread."""

    for by in ("message", "thread"):

        def setup(play: Play, by: str = by) -> Callable[[], None]:
            bench = play.bench
            ended = Waiter()
            one = bench.call(1, play.b, timeout=None)

            def root() -> None:
                with interrupts.critical():
                    turn = bench.reader.begin_turn()
                    try:
                        bench.reader.wait_until(one if by == "message" else ended, None, turn)
                    finally:
                        if turn is not None:
                            turn.end()
                play.ended()

            play.waiting += 1
            play.world.spawn(root)

            def other() -> None:
                if by == "message":
                    bench.answer(1, play.b)
                else:
                    play.c.say(Envelope(Kind.CALL, 51, 0, 60.0, 1), Call(abs, (1,), None), bench.far)
                    ended.set_done()

            play.world.spawn(other)

            def must_hold() -> None:
                assert one.done if by == "message" else ended.done
                assert by == "message" or 51 in bench.served

            return must_hold

        check(monkeypatch, setup, threads=3)


def test_ctrl_c_at_every_line_leaves_a_worker_that_reads(monkeypatch):
    """The interrupt comes through, at once or when the section ends; the other thread gets its answer."""
    interrupted = returned = 0

    def program(at: int, switch: Switches) -> int:
        nonlocal interrupted, returned
        play = Play(monkeypatch, switch)
        bench = play.bench
        one, two = bench.call(1, play.b), bench.call(2, play.c)
        main = play.wait_for(one, "main")
        play.wait_for(two, "second")
        pressed = False

        def press(line: int, name: str) -> None:
            nonlocal pressed
            if line >= at and name == "main" and not pressed:
                pressed = True
                interrupts.on_signal(signal.SIGINT, None)

        play.world.at_line = press

        def network() -> None:
            bench.answer(2, play.c)
            bench.answer(1, play.b)

        play.world.spawn(network)
        interrupts.deferred.clear()
        lines = play.run()
        done(two)()
        assert not interrupts.deferred
        if pressed:
            assert isinstance(main.error, KeyboardInterrupt), "the interrupt was lost"
            interrupted += 1
        else:
            done(one)()
            returned += 1
        return lines

    lines = program(10**9, ())
    for at in range(1, lines + 1):
        program(at, ())
        program(at, [(at // 2, 0)])
        program(at, [(at // 2, 1), (at, 0)])
    assert interrupted > lines
    assert returned


def test_ctrl_c_while_blocked_comes_through_at_once(monkeypatch):
    """A thread that waits for an answer which never comes: the interrupt ends the wait, not the time limit."""
    play = Play(monkeypatch, ())
    one = play.bench.call(1, play.b, timeout=None)
    main = play.wait_for(one, "main")
    real = interrupts.blocking

    def block_and_press(function: Callable[..., Any], *args: Any) -> Any:
        if current.thread.is_main and getattr(function, "__name__", "") == "poll":
            return real(interrupts.on_signal, signal.SIGINT, None)
        return real(function, *args)

    play._patches.setattr("telegrad.transport.lease.blocking", block_and_press)
    play.run()
    assert isinstance(main.error, KeyboardInterrupt)
    assert play.world.now == 1000.0


def test_the_bench_finds_a_reader_that_forgets_to_arm(monkeypatch):
    """What is checked above can fail: a lease that does not arm leaves the worker deaf in some order."""
    from telegrad.transport.lease import ReadLease

    def release(self: Any) -> None:
        self._lock.release()

    def setup(play: Play) -> Callable[[], None]:
        one = play.bench.call(1, play.b)
        play.bench.answer(1, play.b)
        play.wait_for(one, "first")
        return done(one)

    monkeypatch.setattr(ReadLease, "release", release)
    with pytest.raises((AssertionError, DeadlockError)):
        check(monkeypatch, setup, threads=2)
