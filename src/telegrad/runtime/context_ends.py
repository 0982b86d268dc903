"""The end of an autograd context on all workers that took part in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..errors import PeerLostError, TelegradError, UnknownWorkerError
from ..gradients.contexts import Context
from ..primitives import current, interrupts

if TYPE_CHECKING:
    from ..worker import Worker


def release(worker: Worker, context_id: int, *, wait: bool) -> None:
    """Ends a context here and on every worker that took part in it; with `wait`, returns when all know it."""
    thread = current.thread
    before = thread.critical
    thread.critical = before + 1
    try:
        others = worker.engine.release(context_id, tell_others=not wait)
        if wait:
            interrupts.interruptible(_release_at, worker, others, context_id)
    finally:
        thread.critical = before
        if interrupts.deferred and not before:
            interrupts.deliver()


def _release_at(worker: Worker, others: set[int], context_id: int) -> None:
    futures = []
    for other in others:
        with contextlib.suppress(PeerLostError, UnknownWorkerError):  # gone, and its context with it
            futures.append(worker.call_async(other, _release_there, (context_id,)))
    for future in futures:
        with contextlib.suppress(PeerLostError):
            future.wait()


def check(worker: Worker, context: Context) -> None:
    """Asks the owner of a context whether it lives, and to be told of its end; ends it here if it does not."""
    if context.owner == worker.id or worker.is_closed:
        return
    try:
        lives = worker.call(context.owner, _takes_part, (context.id, worker.id))
    except (PeerLostError, UnknownWorkerError):
        lives = False
    except TelegradError:
        return  # it is busy, but there
    if not lives and not worker.is_closed:
        worker.engine.release(context.id, told_by=context.owner)


def _takes_part(context_id: int, worker_id: int) -> bool:
    """Whether a context of this worker lives. If so, that worker is told of its end."""
    context = current.current_worker().contexts.find(context_id)
    if context is not None:
        context.known_workers.add(worker_id)
    return context is not None


def _release_there(context_id: int) -> None:
    current.current_worker().release_context(context_id, wait=True)
