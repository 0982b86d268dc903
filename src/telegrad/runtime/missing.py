"""Definitions of `__main__` that a worker of the same script has not got: it asks the worker that has sent their names.

Such a definition comes after init_rpc(), or under the `__main__` guard, which a spawned child does not run. The message
that names it is kept meanwhile, and nothing of it has run: so it runs once. From then on the worker that was asked
sends the definition by value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..gradients.plain import untracked
from ..messages import sender_of
from ..primitives import clock, current
from ..primitives.current import current_worker

if TYPE_CHECKING:
    from ..worker import Worker


_LEAST = 1e-6  # seconds; a time limit of 0 would mean none


def ask_for(worker: Worker, sender: int, name: str, deadline: float | None) -> bytes | None:
    """Asks a worker for a function or class of its `__main__`; None if it has none of that name. The deadline is that
    of the call whose message names it.

    Raises:
        EncodeError: it cannot be sent by value.
        CallTimeoutError, PeerLostError: that worker does not answer.
    """
    left = None if deadline is None else max(_LEAST, deadline - clock.now())
    with untracked():
        found: bytes | None = worker.call(sender, by_value, (name,), timeout=left)
        return found


def by_value(name: str) -> bytes | None:
    """The same, on the worker that is asked."""
    serving = current.serving.get()
    return None if serving is None else current_worker().calls.definition_for(sender_of(serving.message_id), name)
