"""A pass that was begun on this worker, and the error that backward() raises if it fails."""

from __future__ import annotations

from _thread import RLock  # threading.RLock is Python code
from collections.abc import Callable, Collection, Iterable
from functools import partial

from ..errors import BackwardError, CallTimeoutError, PeerLostError, text_of
from ..events import logger
from ..messages import COUNTER_BITS, Begin
from ..primitives import clock
from ..primitives.interrupts import interruptible
from ..primitives.waiter import Waiter
from .backward_pass import BackwardPass
from .contexts import Context
from .diagnosis import PartState, explain, state_here
from .host import Host
from .local_pass import LocalPass

_ASKING = 0.5  # seconds in which participants say what a pass awaits: the last ones of its time limit
_MOST_LOOKING, _LEAST_LOOKING = 5.0, 1.0  # the same, before it is given up: a part of its patience, within these

_ADVICE = "No other worker has kept gradients of it; this one may have some in `.grad`: zero it before the next pass"
_LOST = f"Its part of the graph is gone: run the forward pass again. {_ADVICE}"

_OVERWRITTEN = "has been modified by an inplace operation"  # torch's words
_STEPPED = (
    "If that is a parameter of a module of several trainers, the step of another one has changed it between this one's "
    "forward and backward: use RemoteModule(..., snapshot=True), which keeps the values of each forward, or let one "
    "trainer at a time go from forward to step"
)


class RootedPass(BackwardPass):
    """A pass that was begun here."""

    is_unsaid = False  # all are done, and the last word is left to the thread that waits for the pass
    deadline: float | None = None
    states: dict[int, PartState] | None = None  # by worker, as they were when its time was nearly over

    def __init__(self, begin: Begin, root: int, participants: Iterable[int], patience: float | None) -> None:
        super().__init__(root, participants)
        self.begin = begin  # this worker's own
        self.patience = patience  # for how many seconds nothing may move; None: no limit
        self.lock = RLock()  # guards the state (see BackwardPass). Threads that read take it: held for a moment
        self.waiter = Waiter()

    def left(self, seconds: float) -> float:
        """Returns so many seconds, or what is left of the time of the pass."""
        return seconds if self.deadline is None else max(0.0, min(seconds, self.deadline - clock.now()))


def looking_time(patience: float) -> float:
    """Returns how many of the seconds in which nothing may move go into asking the others whether anything does."""
    return min(max(patience / 4, _LEAST_LOOKING), patience / 2, _MOST_LOOKING)


def limit(root: RootedPass, local: LocalPass, deadline: float, host: Host) -> None:
    """Gives a pass and its root's own part a deadline, before which the others are asked what they await."""
    local.deadline = root.deadline = deadline
    local.asks_at = deadline - min((root.begin.timeout or 0.0) / 4, _ASKING)
    local.ask = partial(look, root, root.begin.pass_id >> COUNTER_BITS, host)


def late_error(root: RootedPass, host: Host, held_up: str = "") -> CallTimeoutError:
    """Makes the error of a pass whose time is over. `held_up` says by whom its part on this worker is."""
    missing = sorted(host.name_of(worker) for worker in root.missing)
    held_up = held_up and f": {held_up}"
    if root.begin.timeout is None and root.patience is not None:
        return CallTimeoutError(
            f"nothing has moved in the backward pass for {root.patience:g} s (Options.backward_timeout); workers "
            f"{missing} are not done"
        )
    return CallTimeoutError(
        f"the backward pass ran for more than set timeout ({int((root.begin.timeout or 0) * 1000)} ms); "
        f"workers {missing} are not done{held_up}"
    )


def moves(root: RootedPass, worker_id: int, host: Host, describe: Callable[[int], PartState]) -> bool:
    """Asks all workers twice whether one of them computes, or has got further meanwhile: a message between two workers
    that both wait may be on its way. `describe` answers for this worker, `worker_id`. One that computes for ever ends
    no pass, as it would not locally; but it is named in the log."""
    seconds = root.left(looking_time(root.patience or 0.0))
    deadline = clock.now() + seconds
    before: dict[int, PartState] | None = None
    while True:
        states = look(root, worker_id, host, describe, deadline - clock.now())
        busy = sorted(host.name_of(state.worker) for state in states.values() if state.computes)
        if busy:
            text = "a backward pass has waited for %g s for workers %s, which compute"
            logger.warning(text, root.patience or 0.0, busy)
        if busy or root.waiter.done or before is not None:
            return bool(busy) or root.waiter.done or states != before
        before = states
        pause = min(seconds / 4, deadline - clock.now())
        if pause <= 0:
            return False
        interruptible(root.waiter.sleep, pause)


def look(
    root: RootedPass, worker_id: int, host: Host, describe: Callable[[int], PartState], seconds: float = _ASKING
) -> dict[int, PartState]:
    """Returns the states of the workers whose reports are missing, as far as they answer; and keeps them for the error,
    should the pass be late."""
    states = _ask(root, root.missing - {worker_id}, host, root.left(seconds))
    states[worker_id] = describe(worker_id)
    root.states = states
    return states


def _ask(root: RootedPass, workers: Collection[int], host: Host, seconds: float) -> dict[int, PartState]:
    if not workers or seconds <= 0:
        return {}
    answers, _ = host.ask(workers, state_here, (root.begin.context, root.begin.pass_id), seconds)
    return {worker: state for worker, state in answers.items() if state is not None}


def raise_error(root: RootedPass, context: Context, worker_id: int, host: Host) -> None:
    """Raises what backward() raises. `worker_id` is this worker's."""
    error, worker = root.error, root.worker
    assert error is not None
    is_own = not context.id and worker == worker_id and not isinstance(error, PeerLostError | CallTimeoutError)
    if not isinstance(error, Exception) or is_own:  # as torch's own backward() raises it
        try:
            raise error
        finally:
            del error
    if isinstance(error, PeerLostError) and error.worker_id >= 0:
        worker = error.worker_id  # not the worker that noticed it
    name = host.name_of(worker)
    text = f"Error on Node {worker}: {text_of(error)} (worker {name!r}, in a backward pass)"
    if _OVERWRITTEN in text:
        text = f"{text}. {_STEPPED}"
    if awaited := _awaited(root, context, worker_id, host):
        text = f"{text}. {awaited}"
    if not context.id:
        text = f"{text.rstrip('.')}. {_LOST if isinstance(error, PeerLostError) else _ADVICE}"
    raise BackwardError(text, name, worker) from error


def _awaited(root: RootedPass, context: Context, worker_id: int, host: Host) -> str:
    """Says what a pass awaited that failed because of a peer: as its participants tell, or as is known here."""
    error, pass_id = root.error, root.begin.pass_id
    if not isinstance(error, PeerLostError | CallTimeoutError):
        return ""
    lost = {error.worker_id} if isinstance(error, PeerLostError) else set()
    missing = root.missing - lost
    others = missing - {worker_id}
    known = root.states if isinstance(error, CallTimeoutError) else None  # there is no time left to ask again
    found = _ask(root, others, host, root.left(_ASKING)) if known is None else known
    own = context.failed if context.failed is not None and context.failed.pass_id == pass_id else None
    theirs = [state for worker, state in found.items() if worker != worker_id]
    states = [s for s in (own, *theirs) if s is not None and s.worker in missing]
    silent = others - {state.worker for state in states}
    return explain(states, lost=lost, silent=silent, name_of=host.name_of)
