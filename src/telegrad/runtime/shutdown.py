"""A graceful end: nobody leaves while somebody still needs an answer.

# Note [two barriers]
In a group of a fixed size workers end together. At the first barrier, every program has made its last call.
What still runs then are calls made by calls. A worker is idle when it waits for no answer and owes none; it
comes to the second barrier when it is, and goes on serving. A call that runs anywhere has a chain of callers who
wait for it, back to one that was running before the first barrier, and that one's worker has not come to the
second. So when all have, nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RendezvousError
from ..primitives import clock
from ..rendezvous.group import Group, poll_until
from ..rendezvous.store import Deadline

_LEAST = 1.0  # seconds that the store has for an answer: the time limit of a shutdown is for the other workers


@dataclass(frozen=True, kw_only=True)
class Retirement:
    """One worker's way out. The functions say how many answers it waits for, how many calls it serves, and
    whether a rank is known to have died: the dead are not waited for."""

    name: str
    rank: int
    group: Group
    waits_for: Callable[[], int]
    serves: Callable[[], int]
    is_lost: Callable[[int], bool]

    def wait(self, timeout: float | None) -> None:
        """Waits until this worker may go.

        Raises:
            RendezvousError: it may not, after `timeout` seconds; says who or what is missing.
        """
        deadline = None if timeout is None else clock.now() + timeout

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - clock.now())

        fixed = self.group.world_size is not None
        if fixed:
            self.meet("programs_done", left())
        if not poll_until(lambda: not self.waits_for() and self.serves() <= 0, left()):
            raise RendezvousError(
                f"worker {self.name!r} still waits for {self.waits_for()} answers and serves {self.serves()} "
                f"calls after {timeout:.1f} s; use shutdown(graceful=False) to drop them"
            )
        if fixed:
            self.meet("workers_idle", left())
            # The store lives in the process of rank 0: it leaves last, when all others have seen the barrier.
            last = Deadline(min(5.0, left() or 5.0))
            self.group.arrive("gone", self.rank, _for_the_store(last))
            if self.rank == 0:
                poll_until(lambda: not self._missing("gone", last), last.left())

    def meet(self, name: str, timeout: float | None) -> None:
        """Waits until every rank has come to that barrier.

        Raises:
            RendezvousError: some did not within `timeout` seconds, or the store does not answer.
        """
        until = None if timeout is None else Deadline(timeout)
        missing: list[int] = []

        def all_here() -> bool:
            missing[:] = self._missing(name, until)
            return not missing

        self.group.arrive(name, self.rank, _for_the_store(until))
        if not poll_until(all_here, timeout):
            raise RendezvousError(
                f"ranks {missing} did not come to the shutdown within {timeout or 0:g} s; "
                "have they ended, or do they still work? shutdown(graceful=False) does not wait for them"
            )

    def _missing(self, barrier: str, until: Deadline | None) -> list[int]:
        """The ranks that have not arrived, and may still come."""
        ranks = range(self.group.world_size or 0)
        return [r for r in ranks if not self._has_come(barrier, r, until) and not self._has_left(r, until)]

    def _has_come(self, barrier: str, rank: int, until: Deadline | None) -> bool:
        return self.group.arrived(barrier, rank, _for_the_store(until))

    def _has_left(self, rank: int, until: Deadline | None) -> bool:
        """Whether it has died, or ended without waiting for the others."""
        return self.is_lost(rank) or self._has_come("left", rank, until)


def _for_the_store(until: Deadline | None) -> float | None:
    return None if until is None else max(_LEAST, until.left())
