"""Diagnosis of a pass: what it awaits on a worker, as plain numbers that can travel, and in words for an error.

LocalPass.describe()  -> PartState, of a pass that runs
Context.failed        -> PartState, of the last pass that failed there
explain(states)       -> "Awaited: Send of message 5 on worker 'a' from worker 'b'. ..."
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ..primitives import current

MOST_DUE = 16
_MOST = 8  # workers that a text names


@dataclass(frozen=True, slots=True)
class Awaited:
    """A message whose gradients a worker waits for."""

    message: int
    worker: int  # to which it was sent, and from which they are to come


@dataclass(frozen=True, slots=True)
class PartState:
    """The progress of a worker's part in a pass, or its last one before it failed."""

    worker: int
    pass_id: int
    sends: tuple[int, ...]  # ids of the tensors that will get gradients
    awaited: tuple[Awaited, ...]  # what holds it up: it has nothing else to do
    due: tuple[Awaited, ...] = ()  # what will be awaited when that is here, at most MOST_DUE of it
    is_done: bool = False  # here; others may not be
    has_failed: bool = False  # here, and that ended the pass
    is_over: bool = False  # for all

    @property
    def computes(self) -> bool:
        """Whether it has something to do."""
        return not (self.awaited or self.is_done or self.has_failed or self.is_over)


def state_here(context_id: int, pass_id: int) -> PartState | None:
    """Returns what this worker knows of a pass. Called by the pass's root."""
    return current.current_worker().engine.parts.state_of(context_id, pass_id)


def holding_up(state: PartState, lost: Collection[int]) -> list[Awaited]:
    """Returns what holds a part up, or soon would: what is due from workers that are gone counts, too."""
    return [*state.awaited, *(due for due in state.due if due.worker in lost)]


def explain(
    states: Sequence[PartState],
    *,
    lost: Collection[int],
    silent: Iterable[int],
    name_of: Callable[[int], str],
) -> str:
    """Says which Send on which worker is awaited from which worker. First come those from workers that wait for nothing
    themselves: they hold up the rest. `lost` are workers that are gone, `silent` those that did not answer. Empty if
    nothing is awaited."""
    waiting = {state.worker for state in states if state.awaited}
    found = [(awaited, state.worker) for state in states for awaited in holding_up(state, lost)]
    found.sort(key=lambda one: (one[0].worker not in lost, one[0].worker in waiting))
    said = [
        f"Send of message {awaited.message} on worker {name_of(worker)!r} from worker {name_of(awaited.worker)!r}"
        + (", which is gone" if awaited.worker in lost else "")
        for awaited, worker in found
    ]
    sentences = []
    if said:
        more = [f"and {len(said) - _MOST} more"] if len(said) > _MOST else []
        sentences.append(f"Awaited: {'; '.join(said[:_MOST] + more)}.")

    def names(workers: Iterable[int]) -> str:
        return ", ".join(repr(name_of(worker)) for worker in sorted(workers)[:_MOST])

    running = [s.worker for s in states if not (s.awaited or s.is_done or s.has_failed or s.worker in lost)]
    if running:
        await_ = "Worker {} awaits" if len(running) == 1 else "Workers {} await"
        sentences.append(f"{await_.format(names(running))} nothing: the pass runs there.")
    if quiet := names(silent):
        sentences.append(f"What is awaited on {quiet} is not known: nothing was heard from there.")
    return " ".join(sentences)
