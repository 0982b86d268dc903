"""Gradients on their way out of a worker's part in a pass.

Gradients for one worker that follow each other closely go together: a message costs more than a small gradient does.
None waits for another while the worker has nothing else to do, and none longer than a moment:

    post          a Recv's backward: into the outbox of the worker that sent the tensor; sent at once, unless something
                  was sent there just before
    flush         the engine is about to wait, or has come to its end
    _post_held    a timer, for an engine that computes for long

The root's first gradients for a participant tell it of the pass, too: see plan.py, `apart`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from ..messages import Autograd, Begin, Envelope, Gradients, Kind
from ..options import SHARED_MEMORY_FROM
from ..primitives import clock
from .host import Host, Task

if TYPE_CHECKING:
    from .local_pass import LocalPass

BURST = 2e-4  # seconds; gradients for one worker that follow each other more closely go together
_LINGER = 1e-3  # seconds that gradients wait at most for others to follow

Gradient = torch.Tensor | None


class Outbox(msgspec.Struct, eq=False):
    """Gradients for one worker that have not been sent yet. Guarded by the lock of its LocalPass."""

    worker: int
    begin: Begin | None = None  # the worker has not been told of the pass yet
    messages: list[int] = msgspec.field(default_factory=list)
    gradients: list[Gradient] = msgspec.field(default_factory=list)  # of these messages, one after the other
    nbytes: int = 0
    emptied: float = 0.0  # when gradients were last sent to that worker

    def add(self, message: int, gradients: list[Gradient]) -> None:
        self.messages.append(message)
        self.gradients += gradients
        for gradient in gradients:
            if gradient is not None:
                self.nbytes += gradient.nbytes if gradient.layout is torch.strided else SHARED_MEMORY_FROM


class Poster:
    """Sends the gradients of one worker's parts. `on_error` hears of a large one that could not be sent."""

    def __init__(
        self, host: Host, all_passes: Callable[[], list[LocalPass]], on_error: Callable[[LocalPass, Exception], None]
    ) -> None:
        self._host = host
        self._all_passes = all_passes
        self._on_error = on_error
        self.post_later = host.later(_LINGER, self._post_held)

    def post(self, local: LocalPass, outbox: Outbox, *, done: bool = False) -> bool:
        """Sends what is in an outbox; False if that is nothing. Another thread writes what is large."""
        context, begin, host = local.context, local.begin, self._host
        assert context is not None
        assert begin is not None
        now = clock.now()
        with local.lock:
            messages, gradients, nbytes = outbox.messages, outbox.gradients, outbox.nbytes
            if not messages:
                return False
            outbox.messages, outbox.gradients, outbox.nbytes, outbox.emptied = [], [], 0, now
            begins, outbox.begin = outbox.begin, None
        more = tuple(messages[1:]) if len(messages) > 1 else ()
        autograd = Autograd(context.id, during=local.pass_id, done=done, more=more, begin=begins)
        envelope = Envelope(Kind.GRADIENTS, host.new_message_id(), messages[0], depth=local.depth, autograd=autograd)
        body, tracked = Gradients(tuple(gradients)), context if begin.create_graph else None
        left = None if local.deadline is None else max(0.0, local.deadline - now)
        if done or nbytes < SHARED_MEMORY_FROM:
            host.post(outbox.worker, envelope, body, left, tracked)
        else:
            post = partial(host.post, outbox.worker, envelope, body, left, tracked)
            host.submit(partial(self._post_large, local, post))
        return True

    def _post_large(self, local: LocalPass, post: Task) -> None:
        try:
            post()
        except Exception as error:
            self._on_error(local, error)

    def flush(self, local: LocalPass, *, but: int = -1) -> None:
        """Sends all that waits for more to follow, but what goes to worker `but`; and tells the participants of the
        pass that no gradients have told of it."""
        for outbox in list(local.outboxes.values()):
            if outbox.messages:
                if outbox.worker != but:
                    self.post(local, outbox)
            elif outbox.begin is not None:
                self.begin(local, outbox)

    def begin(self, local: LocalPass, outbox: Outbox) -> None:
        """Tells a participant of a pass that was begun here, in a message of its own."""
        with local.lock:
            begin, outbox.begin = outbox.begin, None
        if begin is not None:
            envelope = Envelope(Kind.BEGIN, self._host.new_message_id(), 0, begin.timeout, local.depth)
            self._host.post(outbox.worker, envelope, begin, begin.timeout, None)

    def _post_held(self) -> None:
        """Sends the gradients that have waited for long enough, while their engine computes."""
        for local in self._all_passes():
            for outbox in list(local.outboxes.values()):
                if outbox.messages and not local.part.is_over:
                    try:
                        self.post(local, outbox)
                    except Exception as error:
                        self._on_error(local, error)
