"""The read lease by itself, over a real poller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from telegrad.transport.lease import PATIENCE, ReadLease, Turn
from telegrad.transport.poller import Poller

LONG = 100 * PATIENCE


@contextmanager
def taken_lease(submit: Callable[..., object] = lambda task: task()) -> Iterator[tuple[ReadLease, Poller]]:
    """A lease that this thread has."""
    poller = Poller()
    lease = ReadLease(poller, submit=submit)
    assert lease.try_take()
    try:
        yield lease, poller
    finally:
        lease.close()
        poller.close()


def ring(poller: Poller, turn: Turn) -> None:
    """Waits for the timer. It may be early for this turn, and is set again then."""
    for _ in range(2):
        for callback in poller.poll(LONG) if turn.is_away else ():
            callback()


def test_a_turn_that_ends_in_time_wakes_nobody_later():
    with taken_lease() as (lease, poller):
        turn = Turn(lease, lambda message: None)
        turn.leave()
        assert lease.timer_at
        turn.end()
        assert not lease.timer_at
        assert poller.poll(4 * PATIENCE) == []


def test_each_turn_that_takes_long_is_relieved_whatever_came_before():
    with taken_lease() as (lease, poller):
        for _ in range(3):
            quick = Turn(lease, lambda message: None)
            quick.leave()
            quick.end()
            assert lease.try_take()
            turn = Turn(lease, lambda message: None)
            turn.leave()
            ring(poller, turn)
            assert not turn.is_away
            assert not turn.take_back()
            turn.end()
            assert lease.try_take()
        lease.release()


def test_a_connection_that_cannot_be_closed_is_logged_by_another_thread(caplog):
    tasks: list[Callable[[], None]] = []

    def close() -> None:
        raise OSError("it is stuck")

    with taken_lease(tasks.append) as (lease, _), caplog.at_level(logging.ERROR):
        lease.run_unread(close)
        lease.release()
        assert not caplog.records
        for task in tasks:
            task()
    assert "a connection could not be closed: OSError: it is stuck" in caplog.text
