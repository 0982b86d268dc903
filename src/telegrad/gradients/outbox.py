"""Gradients on their way out of a worker's part in a pass.

Small gradients for one worker that follow each other closely go together: a message costs more than such a gradient
does. None waits for another while the worker has nothing else to do, and none longer than a moment:

    add       a Recv's backward: into the outbox of the worker that sent the tensor; sent at once, unless something was
              sent there just before
    flush     the engine is about to wait
    finish    it has come to its end
    a timer   for an engine that computes for long

A small gradient that waits is a copy: the Function that made it may use its memory again. The root's first gradients
for a participant tell it of the pass, too: see plan.py, `apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec.structs import replace

from ..errors import CallTimeoutError
from ..messages import Autograd, Begin, Envelope, Gradients, Kind
from ..options import SHARED_MEMORY_FROM
from ..primitives import clock
from . import devices
from .host import Host

if TYPE_CHECKING:
    from .local_pass import LocalPass

_BURST = 2e-4  # seconds; gradients for one worker that follow each other more closely go together
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


class Poster:
    """Sends the gradients of one worker's parts. `on_error` hears of what another thread could not send."""

    def __init__(
        self, host: Host, all_passes: Callable[[], list[LocalPass]], on_error: Callable[[LocalPass, Exception], None]
    ) -> None:
        self._host = host
        self._all_passes = all_passes
        self._on_error = on_error
        self._set_timer = host.later(_LINGER, self._post_held)
        self._timer_is_set = False

    def weigh(self, worker: int, gradients: Sequence[Gradient]) -> tuple[int, bool]:
        """Says how many bytes it takes to send gradients to a worker, what goes by device memory left out; and whether
        they go at once, in a message of their own."""
        nbytes, at_once = 0, False
        for gradient in gradients:
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    nbytes += SHARED_MEMORY_FROM
                elif gradient.is_cpu:
                    nbytes += gradient.nbytes
                else:
                    at_once = True
                    if not self._host.goes_by_lane(worker, gradient):
                        nbytes += gradient.nbytes
        return nbytes, at_once

    def add(
        self,
        local: LocalPass,
        worker: int,
        message: int,
        gradients: Sequence[Gradient],
        *,
        nbytes: int,
        at_once: bool,
        is_last: bool,
        events: Sequence[devices.Event] = (),
    ) -> None:
        """Sends the gradients of a message, now or with others; `is_last`: with the report of the part, which is all
        but done. Inside of the engine, on the thread and the stream that have computed the last of them; the others
        are ready behind the events."""
        with local.lock:
            outbox = local.outboxes.get(worker)
            if outbox is None:
                outbox = local.outboxes[worker] = Outbox(worker)
            now = clock.now()
            fits = not at_once and outbox.nbytes + nbytes < SHARED_MEMORY_FROM
            if fits and (is_last or now - outbox.emptied < _BURST):
                outbox.messages.append(message)
                for gradient in gradients:
                    outbox.gradients.append(gradient if gradient is None else gradient.clone())
                outbox.nbytes += nbytes
                if not is_last and not self._timer_is_set:
                    self._timer_is_set = True
                    self._set_timer()
                return
        if outbox.messages:
            self.post(local, outbox)
        with local.lock:
            begin, outbox.begin, outbox.emptied = outbox.begin, None, now
        if nbytes < SHARED_MEMORY_FROM:
            self._post(local, worker, [message], gradients, begin, False, events)
            return
        # Not by this thread: a worker that takes nothing must not hold up the engine.
        events = events or devices.record(gradients)
        self._submit(local, partial(self._post, local, worker, [message], gradients, begin, False, events))

    def post(self, local: LocalPass, outbox: Outbox, *, done: bool = False) -> bool:
        """Sends what is in an outbox; False if that is nothing."""
        with local.lock:
            messages, gradients = outbox.messages, outbox.gradients
            if not messages:
                return False
            outbox.messages, outbox.gradients, outbox.nbytes, outbox.emptied = [], [], 0, clock.now()
            begin, outbox.begin = outbox.begin, None
        self._post(local, outbox.worker, messages, gradients, begin, done, ())
        return True

    def _post(
        self,
        local: LocalPass,
        worker: int,
        messages: list[int],
        gradients: Sequence[Gradient],
        begins: Begin | None,
        done: bool,
        events: Sequence[devices.Event],
    ) -> None:
        context, begin, host = local.context, local.begin, self._host
        assert context is not None
        assert begin is not None
        if events:
            devices.wait(events, gradients)
        left = None if local.deadline is None else max(0.0, local.deadline - clock.now())
        more = tuple(messages[1:]) if len(messages) > 1 else ()
        if begins is not None and left is not None:
            begins = replace(begins, timeout=left)
        autograd = Autograd(context.id, during=local.pass_id, done=done, more=more, begin=begins)
        envelope = Envelope(Kind.GRADIENTS, host.new_message_id(), messages[0], depth=local.depth, autograd=autograd)
        if local.device_maps:
            envelope.device_map = local.device_maps.get(messages[0])
        try:
            limit = local.patience if left is None else left
            body = Gradients(tuple(gradients))
            host.post(worker, envelope, body, limit, context if begin.create_graph else None)
        except TimeoutError as error:
            _check_patience(local, error)
            raise

    def _submit(self, local: LocalPass, post: Callable[[], object]) -> None:
        def try_to_post() -> None:
            try:
                post()
            except Exception as error:
                self._on_error(local, error)

        self._host.submit(try_to_post)

    def flush(self, local: LocalPass) -> None:
        """Sends all that waits for more to follow."""
        for outbox in list(local.outboxes.values()):
            if outbox.messages:
                self.post(local, outbox)

    def finish(self, local: LocalPass, root_id: int) -> None:
        """Sends all that has waited when the engine has come to its end, but what goes to the root, which goes with the
        report; and tells the participants of the pass that no gradients have told of it."""
        for outbox in list(local.outboxes.values()):
            if outbox.messages:
                if outbox.worker != root_id:
                    self.post(local, outbox)
            elif outbox.begin is not None:
                self.begin(local, outbox)

    def begin(self, local: LocalPass, outbox: Outbox) -> None:
        """Tells a participant of a pass that was begun here, in a message of its own."""
        with local.lock:
            begin, outbox.begin = outbox.begin, None
        if begin is not None:
            left = None if local.deadline is None else max(0.0, local.deadline - clock.now())
            envelope = Envelope(Kind.BEGIN, self._host.new_message_id(), begin.pass_id, left, local.depth)
            try:
                limit = local.patience if left is None else left
                self._host.post(outbox.worker, envelope, replace(begin, timeout=left), limit, None)
            except TimeoutError as error:
                _check_patience(local, error)
                raise

    def _post_held(self) -> None:
        """Sends the gradients that have waited for long enough, while their engine computes."""
        self._timer_is_set = False
        for local in self._all_passes():
            for outbox in list(local.outboxes.values()):
                if outbox.messages and not local.interrupted:
                    self._submit(local, partial(self.post, local, outbox))


def _check_patience(local: LocalPass, error: TimeoutError) -> None:
    """Says it where a worker has not taken a message in the time in which it would have to move.

    Raises:
        CallTimeoutError: it has not.
    """
    if local.patience is not None and getattr(error, "interrupt", None) is None:
        raise CallTimeoutError(f"nothing has moved in the backward pass (Options.backward_timeout): {error}") from error
