"""The end of a worker: at once, or when no other worker needs an answer of it.

# Note [two barriers]
In a group of a fixed size workers end together. At the first barrier, every program has made its last call. What still
runs then are calls made by calls. A worker is idle when it waits for no answer and owes none; it comes to the second
barrier when it is, and goes on serving. A call that runs anywhere has a chain of callers that wait for it, back to one
that was running before the first barrier, and that one's worker has not come to the second. So when all have, nothing
runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import PeerLostError, RendezvousError
from ..events import logger
from ..primitives import clock, current
from ..primitives.interrupts import interruptible, run_all, uninstall
from ..rendezvous.group import pause_after, poll_until
from ..rendezvous.store import Deadline
from ..transport.device_board import janitor

if TYPE_CHECKING:
    from ..worker import Worker

_LEAST = 1.0  # seconds that the store has for an answer: the time limit of a shutdown is for the other workers

# Seconds of waiting after which a missing rank is looked for, and between two looks, at least and at most:
_BEFORE_QUESTIONS, _BETWEEN_QUESTIONS = 0.5, (0.2, 1.0)

_DEVICE_PATIENCE = 2.0  # seconds


def close(worker: Worker, graceful: bool, timeout: float | None) -> None:
    """Leaves the group, in a critical section and once."""
    group = worker.group
    steps: list[Callable[[], Any]] = [group.let_go, partial(uninstall, group)]
    # A fork lets go of its copies only: the worker is the parent's, and so is its name.
    is_fork = os.getpid() != worker._pid
    try:
        if graceful and not is_fork:
            retire(worker, timeout)
    finally:
        worker.closed_because = "has shut down"
        if not is_fork:
            # Where all end together there is none left to tell, and rank 0 may have taken the store with it.
            leave = partial(group.leave, worker.member, tell=not worker._ended_together)
            steps = [partial(_tear_down, worker), leave, *steps]
        run_all(steps)


def _tear_down(worker: Worker) -> None:
    gone = f"worker {worker.name!r} has shut down"
    worker.recorder.close()
    worker._server.close()
    worker.engine.close()
    worker.references.close()
    worker._peers.close()
    for end in worker._self_ends:
        end.abort(gone)
    for call in worker._pending.take_all(None):
        worker.calls.fail(call, partial(PeerLostError, f"{gone} before the call was answered"))
    all_ended = worker._threads.close(timeout=2.0)
    worker._lease.relieve()  # a thread that still runs a function must not keep the lease
    for connection in worker._peers.connections():
        worker._peers.drop(connection)
    worker.calls.log_notes()
    janitor.wait(_DEVICE_PATIENCE)  # for copies that peers have queued: the memory must not end before them
    worker._lease.close()
    if all_ended:
        worker._poller.close()
    else:
        logger.warning("worker %r: some functions still run after its shutdown", worker.name)


def retire(worker: Worker, timeout: float | None) -> None:
    """Waits until this worker may go: see Worker.retire()."""
    try:
        _retire(worker, timeout)
    except RendezvousError as error:
        lost = [rank for rank in range(worker.group.world_size or 0) if worker._peers.is_lost(rank)]
        if not error.no_answer or not lost:
            raise
        known = ", ".join(f"worker {worker._peers.name_of(rank)!r} (rank {rank})" for rank in lost)
        raise RendezvousError(
            f"{known} is gone, and so is the group's store, without which the others cannot be waited for: {error}"
        ) from error


def _retire(worker: Worker, timeout: float | None) -> None:
    if worker._ended_together:
        return
    limit = (worker.options.shutdown_timeout if timeout is None else timeout) or None
    deadline = None if limit is None else clock.now() + limit
    own = 0 if current.current_serving() is None else 1  # the call in which this worker is told to shut down
    pending, server = worker._pending, worker._server

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - clock.now())

    def waits_for() -> int:
        return len(pending) + worker.engine.busy

    worker.engine.ends.tell_all()
    meet(worker, "programs_done", left())
    if not poll_until(lambda: not waits_for() and server.being_served <= own, left()):
        raise RendezvousError(
            f"worker {worker.name!r} still waits for {waits_for()} answers and serves {server.being_served - own} "
            f"calls after {limit:.1f} s; use shutdown(graceful=False) to drop them"
        )
    if worker.group.world_size is not None:
        worker.engine.ends.tell_all()
        meet(worker, "workers_idle", left())
        # The store lives in the process of rank 0: it leaves last, when all others have seen the barrier.
        last = Deadline(min(5.0, left() or 5.0))
        worker.group.arrive("gone", worker.member.rank, _for_the_store(last))
        if worker.member.rank == 0:
            poll_until(_RollCall(worker, "gone", last).is_complete, last.left())
        worker._ended_together = True


def meet(worker: Worker, barrier: str, timeout: float | None) -> None:
    """Waits, in a group of a fixed size, until every other live worker has come to that barrier, too. Each can be used
    once.

    Raises:
        RendezvousError: a worker did not come within `timeout` seconds.
    """
    if worker.group.world_size is None:
        return
    until = None if timeout is None else Deadline(timeout)
    roll = _RollCall(worker, barrier, until)
    began = clock.now()
    next_question = began + _BEFORE_QUESTIONS

    def all_here() -> bool:
        nonlocal next_question
        while not roll.is_complete():
            now = clock.now()
            if now < next_question:
                return False
            if not _has_died(worker, roll.missing[0], until):
                next_question = now + pause_after(now - began, *_BETWEEN_QUESTIONS)
                return False
        return True

    worker.group.arrive(barrier, worker.member.rank, _for_the_store(until))
    if not poll_until(all_here, timeout) and (missing := roll.all_missing()):
        raise RendezvousError(
            f"ranks {missing} did not come to the shutdown within {timeout or 0:g} s; "
            "have they ended, or do they still work? shutdown(graceful=False) does not wait for them"
        )


class _RollCall:
    """The ranks that have not come to a barrier, and may still: those that died, or left without waiting, will not.

    Workers may wait here for hours, on the cores of those that work. So a rank is asked about only while nothing is
    known of it, and one at a time: as long as one is missing, the others do not matter.
    """

    def __init__(self, worker: Worker, barrier: str, until: Deadline | None) -> None:
        self._worker = worker
        self._barrier = barrier
        self._until = until
        self.missing = list(range(worker.group.world_size or 0))  # the first one is; of the others nothing is known
        self._left: list[int] = []

    def is_complete(self) -> bool:
        """Asks as far as to the first rank that is missing; False if there is one."""
        self._go_on()
        if not self.missing and self._left:  # others may have taken their place meanwhile
            self.missing, self._left = self._left, []
            self._go_on()
        return not self.missing

    def _go_on(self) -> None:
        self.missing = [rank for rank in self.missing if not self._is_gone(rank)]
        count, left = self._ask(self.missing)
        self._left += left
        del self.missing[:count]

    def all_missing(self) -> list[int]:
        return [rank for rank in self.missing if not (self._is_gone(rank) or self._ask([rank])[0])]

    def _is_gone(self, rank: int) -> bool:
        return rank in self._worker.group.dead or self._worker._peers.is_lost(rank)

    def _ask(self, ranks: list[int]) -> tuple[int, list[int]]:
        if not ranks:
            return 0, []
        return self._worker.group.arrived(self._barrier, ranks, _for_the_store(self._until))


def _has_died(worker: Worker, rank: int, until: Deadline | None) -> bool:
    """Looks whether a rank still lives, with which this worker has no connection that would tell its end.

    Every rank has joined before any of them can be here, so there is an entry with its addresses. One that does not
    answer in time may be busy.
    """
    peers = worker._peers
    if peers.connection_with(rank) is not None:  # the first to have a rank has it as its id
        return False
    member = worker.group.of_rank(rank, _for_the_store(until))
    if member is None or peers.connection_with(member.id) is not None:
        return False
    try:
        is_alive = interruptible(partial(peers.is_alive, member, _LEAST, if_silent=True))
    except OSError as error:  # this process has no descriptor to ask with
        logger.debug("worker %r could not be looked for: %s", member.name, str(error))
        return False
    if not is_alive:
        worker.group.dead.add(rank)
        logger.warning("worker %r (rank %d) has ended; its shutdown is not waited for", member.name, rank)
    return not is_alive


def _for_the_store(until: Deadline | None) -> float | None:
    return None if until is None else max(_LEAST, until.left())
