"""Commits: the gradients of finished passes join those of their context, or `.grad`.

# Note [.grad before the next call]
The root of a pass sends End before it sends anything else, so `.grad` must be complete here before any call, answer or
part of a pass that was read after End is handled. But adding to `.grad` can block and can run users' code (a tensor's
subclass), which a thread that reads must not. That thread only queues the pass in `due`, and returns a task that adds
up what is queued. Whoever handles a later message does that first (`add_due`), or waits for the thread that does: no
longer than its call lasts, since users' code may block for ever.

# Note [.grad is cleared in its turn]
An optimizer's zero_grad() does not wait for its owners. Its message (Clear) is queued in `due`, too: `.grad` is cleared
after the gradients of the passes that have ended before were added, before anything that was sent later is handled, and
before those of a pass that ends later are added. The end of a pass with another root may be read after the message
though it was sent before it; on one host it is read together with it then. So the passes of other roots that wait for
their end are looked at again when all that was read together is known.
"""

from __future__ import annotations

import logging
from _thread import RLock  # threading.RLock is Python code
from collections import deque
from collections.abc import Callable, Iterable
from threading import Event
from typing import Any

from ..errors import CallTimeoutError, text_of
from ..events import log_by, logger
from ..messages import COUNTER_BITS, sender_of
from ..primitives import clock
from .adding import Clearable, clear
from .backward_pass import State
from .host import Host, Task
from .leaves import GradientTable
from .local_pass import LocalPass

_LONGEST = 60.0  # seconds that is waited for another thread where there is no deadline


class Commits:
    """Adds up the gradients of one worker's parts in passes. `forget` drops a part that is added up."""

    def __init__(self, worker: str, host: Host, forget: Callable[[LocalPass], None]) -> None:
        self._worker = worker
        self._host = host
        self._forget = forget
        # Finished parts whose gradients go to `.grad` and are not there yet, in the order of their ends:
        self.due: deque[LocalPass | Callable[[float | None], bool]] = deque()  # or clears it
        self._adding = RLock()  # held while `due` is added up: later handlers wait for those that came first
        self._last_root = -1  # of the last plain backward() whose gradients are in `.grad`
        self._has_warned = False  # see _warn_of_sharing()

    def add_due(self, deadline: float | None = None) -> bool:
        """Adds the gradients of all parts in `due` to `.grad`, or waits for the thread that does. False if that thread
        was not through by the deadline, or after a minute: it goes on."""
        if not self._adding.acquire(blocking=False) and not self._wait_for(self._adding, deadline):
            return False
        try:
            while self.due:
                local = self.due[0]  # stays there meanwhile: other threads must see that there is something to wait for
                is_done = True  # also where it raises
                try:
                    is_done = local(deadline) if callable(local) else self.add_up(local, deadline)
                finally:
                    if is_done and self.due and self.due[0] is local:
                        self.due.popleft()
                if not is_done:
                    return False
            return True
        finally:
            self._adding.release()

    def _wait_for(self, lock: Any, deadline: float | None) -> bool:
        """Takes a lock that another thread holds while it adds. False if it was not free in time."""
        left = _LONGEST if deadline is None else min(_LONGEST, max(0.0, deadline - clock.now()))
        if lock.acquire(timeout=left):  # a tensor's subclass may do anything when it is added
            return True
        if left == _LONGEST:
            logger.error("worker %r: gradients are still being added to `.grad` after %g s", self._worker, _LONGEST)
        return False

    def on_clear(self, peer: int, value: Any, passes: Iterable[LocalPass]) -> Task | None:
        """Queues the clearing of `.grad`, while reading: see Note [.grad is cleared in its turn]. `value` is what the
        message names; the sender has a handle to it."""
        if not isinstance(value, Clearable):
            text = "worker %r: worker %r (id %d) wants gradients cleared for what is no optimizer here; this is dropped"
            log_by(self._host.submit, logging.WARNING, text, self._worker, self._host.name_of(peer), peer)
            return None
        others = [p for p in passes if p.state is State.REPORTED and sender_of(p.pass_id) != peer]
        known = Event()

        def look_again() -> None:
            others[:] = [p for p in others if p.state is State.FINISHED and p.adds_to_grad]
            known.set()

        def clear_now(deadline: float | None) -> bool:
            if others:
                left = _LONGEST if deadline is None else max(0.0, deadline - clock.now())
                if not known.wait(min(left, _LONGEST)) and left < _LONGEST:
                    return False
                if not all(self.add_up(local, deadline) for local in others):
                    return False
            clear(value.params)
            return True

        if others:
            self._host.after_reading(look_again)
        self.due.append(clear_now)
        return self._add_now

    def _add_now(self) -> None:
        self.add_due()

    def add_up(self, local: LocalPass, deadline: float | None = None) -> bool:
        """Adds the gradients of a finished part to the context's, or to `.grad`, or waits for the thread that does: see
        add_due(). Any number of times. What is raised at a root is left to check()."""
        context, begin = local.context, local.begin
        assert context is not None
        assert begin is not None
        if not local.committing.acquire(blocking=False) and not self._wait_for(local.committing, deadline):
            return False
        try:
            try:
                if local.gathering is not None:
                    local.gather()
                gradients, local.gradients = local.gradients, None
                if gradients is not None and begin.into_grad:
                    context.went_into_grad = True
                    if not context.id:
                        self._warn_of_sharing(local.pass_id >> COUNTER_BITS, gradients)
                    gradients.add_to_leaves()
                elif gradients is not None:
                    with context.lock:
                        context.gradients.take_over(gradients)
            finally:
                local.committing.release()
        except Exception as error:
            if local.is_root:  # for backward(): this thread may be one that has come with something else
                local.not_added = error
                return True
            # Without its traceback: a log handler that keeps it would keep the frames, and what they hold.
            logger.error("the gradients of pass %d could not be added up: %s", local.pass_id, text_of(error))
        finally:
            self._forget(local)
        return True

    def commit(self, local: LocalPass) -> None:
        """Adds the gradients of a part that has just finished, with all that came before it. Raises at a root what was
        raised meanwhile."""
        deadline = local.deadline if local.is_root else None  # elsewhere no call waits for this thread
        is_done = self.add_due(deadline) if local.adds_to_grad else self.add_up(local, deadline)
        if local.not_added is not None:
            self.check(local)
        if not is_done and local.is_root:
            raise self.not_added()

    def not_added(self) -> CallTimeoutError:
        return CallTimeoutError(
            f"timed out on worker {self._worker!r} waiting for another thread that adds gradients to `.grad`, or to "
            "those of a context: is it blocked in a tensor's subclass? They are added when it goes on"
        )

    def check(self, local: LocalPass) -> None:
        """Raises what was raised when the gradients of a root's own part were added up, on whichever thread."""
        error, local.not_added = local.not_added, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which refers to this frame

    def _warn_of_sharing(self, root: int, gradients: GradientTable) -> None:
        """Warns once when gradients of passes that were begun on different workers meet in one `.grad`."""
        last, self._last_root = self._last_root, root
        if last in (root, -1) or self._has_warned or not gradients.meet_others():
            return
        self._has_warned = True
        logger.warning(
            "worker %r: gradients of backward passes that were begun on workers %r and %r are added up in one `.grad`. "
            "Zero it between them; or have each of them use telegrad.autograd.context(), which keeps gradients apart",
            self._worker, self._host.name_of(last), self._host.name_of(root),
        )  # fmt: skip
