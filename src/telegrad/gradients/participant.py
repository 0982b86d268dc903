"""This worker's parts in passes: their table, what comes for them, and what their state says is to be done.

on_begin, on_gradients, on_end   a message of a pass -> the pure state (backward_pass.py) -> carried out at once, or
                                 returned, to be run by somebody who does not read
carry_out                        starts the engine call, reports to the root, adds gradients up, forgets
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..errors import (
    GradientError,
    NotStartedError,
    PeerLostError,
    TooLargeError,
    UnknownContextError,
    text_of,
)
from ..events import logger
from ..messages import Autograd, Begin, Done, Envelope, Gradients, Kind, Member, sender_of, shortened
from ..options import SHARED_MEMORY_FROM
from ..primitives import clock, current
from ..primitives.waiter import Waiter
from .backward_pass import Commit, Discard, Interrupt, Late, Part, PartInstruction, Report, Start, State, Wake
from .contexts import Context, Contexts
from .dependency_log import flatten_groups
from .diagnosis import PartState
from .host import Host, Task, disbelieve, tell
from .local_graph import Node
from .local_pass import Gradient, LocalPass, Surroundings
from .nodes import make_beacon
from .torch_modes import applied

_TOMBSTONES = 10_000
_EARLY = 60.0  # seconds that gradients wait for the begin of their pass
_GRACE = 5.0  # seconds that a participant waits longer than its root


class Parts:
    """Of one worker. `report_here` gets what a part reports whose pass was begun on this worker."""

    host: Host
    report_here: Callable[[LocalPass, BaseException | None], None]

    def __init__(self, member: Member, contexts: Contexts) -> None:
        self._name = member.name
        self._id = member.id
        self._contexts = contexts
        self._lock = threading.RLock()  # guards all below; held for a moment only
        self._passes: dict[int, LocalPass] = {}
        self._over: OrderedDict[int, None] = OrderedDict()  # tombstones
        self._closed = False
        self._around = Surroundings(
            member.id,
            self.wait,
            self._decode,
            self._post_gradients,
            contexts.find_sent,
            self._received_in,
            make_beacon(),
        )

    def __len__(self) -> int:
        return len(self._passes)

    def find(self, pass_id: int) -> LocalPass | None:
        return self._passes.get(pass_id)

    def all(self) -> list[LocalPass]:
        with self._lock:
            return list(self._passes.values())

    def of_context(self, context_id: int) -> list[LocalPass]:
        return [local for local in self.all() if local.context is not None and local.context.id == context_id]

    def new_of_root(self, pass_id: int) -> LocalPass:
        """The part of the worker that begins a pass. It is not among the others yet."""
        return LocalPass(pass_id, self._around, Part(is_root=True))

    def add(self, local: LocalPass) -> None:
        """
        Raises:
            NotStartedError: this worker has shut down.
            UnknownContextError: its context has ended.
        """
        assert local.context is not None
        with self._lock:
            if self._closed:
                raise NotStartedError(f"worker {self._name!r} has shut down")
            self._passes[local.pass_id] = local
        if self._contexts.find(local.context.id) is None:
            # It has ended since. From here on its end would end the pass.
            with self._lock:
                self._passes.pop(local.pass_id, None)
            self._contexts.get(local.context.id)

    def messages_of(self, local: LocalPass) -> set[int]:
        """The messages that this worker has sent and whose gradients will come.

        Raises:
            GradientError: this worker has sent no such message.
        """
        begin, context = local.begin, local.context
        assert begin is not None
        assert context is not None
        return {self._contexts.find_sent(context, id).message for id in begin.sends}

    # -- what comes for them: while reading, so nothing may block or run users' code -------------------

    def on_begin(self, begin: Begin, depth: int) -> Task | None:
        root_id = sender_of(begin.pass_id)
        context = self._contexts.get_or_make(begin.context)
        local = None if context is None else self._local(begin.pass_id)
        if local is None or context is None:
            what = f"the begin of pass {begin.pass_id} came after the end of it or its context"
            logger.info("%s", what)
            self.on_end(begin.pass_id, what)  # gradients may have come before
            ended = UnknownContextError(
                f"{what} {begin.context} on worker {self._name!r}: what it had for the context is gone there"
            )
            return partial(self._refuse, begin.pass_id, root_id, ended)
        context.heard_from.add(root_id)
        local.context, local.begin, local.depth = context, begin, depth
        local.root_name = self.host.name_of(root_id)
        if begin.timeout is not None:
            local.deadline = clock.now() + begin.timeout + _GRACE
        try:
            messages = self.messages_of(local)
        except GradientError as error:
            failed = error
            return self._later(local, local.on(lambda part: part.on_local_end(failed)))
        return self._later(local, local.on(lambda part: part.on_begin(messages)))

    def _refuse(self, pass_id: int, root_id: int, error: BaseException) -> None:
        """Tells a root that its pass cannot be begun here: it would wait for this worker until its time is over."""
        tell(self.host, root_id, Kind.DONE, Done(pass_id, self.host.encode_error(error, root_id)))

    def on_gradients(self, peer: int, envelope: Envelope, frames: Any) -> Task | None:
        autograd, message = envelope.autograd, envelope.reply_to
        pass_id = autograd.during if autograd is not None else 0
        context = self._contexts.live.get(autograd.context) if autograd is not None else None
        sent = None if context is None else context.sends.get(message)
        if sent is None:  # it was sent in another context, or there is no such message any more
            receiver = self._contexts.receiver_of(message)
        else:
            receiver = sent.to
        is_over = pass_id in self._over or context is None
        if receiver != peer and not is_over:
            what = f"gradients of message {message}, which it was not sent"
            disbelieve(self._name, self.host.name_of(peer), peer, what)
            return None
        local = None if is_over else self._local(pass_id)
        if local is None:
            logger.info("the gradients of message %d came after the end of pass %d", envelope.reply_to, pass_id)
            return None
        return self._later(local, local.keep(envelope.reply_to, (envelope, frames)))

    def on_end(self, pass_id: int, aborted: str) -> Task | None:
        local = self._passes.get(pass_id)
        if local is None:
            with self._lock:
                self._bury_locked(pass_id)
            return None
        return self._later(local, local.on(lambda part: part.on_end(aborted)), aborted)

    def _local(self, pass_id: int) -> LocalPass | None:
        """This worker's part in a pass; None if that is over."""
        with self._lock:
            if pass_id in self._over or self._closed:
                return None
            local = self._passes.get(pass_id)
            if local is None:
                local = self._passes[pass_id] = LocalPass(pass_id, self._around, Part())
            return local

    def _later(self, local: LocalPass, instructions: list[PartInstruction], reason: str = "") -> Task | None:
        """Carries out at once what takes no time; the rest is returned."""
        rest: list[PartInstruction] = []
        for instruction in instructions:
            if isinstance(instruction, Start | Report) or (
                # What goes to `.grad` must be there before any call that was sent after the end is run.
                isinstance(instruction, Commit) and not (local.begin is not None and local.begin.into_grad)
            ):
                rest.append(instruction)
            else:
                self._carry_out_one(local, instruction, reason)
        self._on_settled(local)
        return partial(self.carry_out, local, rest) if rest else None

    # -- what is to be done ----------------------------------------------------------------------------

    def end(self, local: LocalPass, aborted: str) -> None:
        """The root's last word; or the root is gone, or the context is."""
        self.carry_out(local, local.on(lambda part: part.on_end(aborted)), aborted)

    def fail(self, local: LocalPass, error: BaseException) -> None:
        """Something went wrong here."""
        self.carry_out(local, local.on(lambda part: part.on_local_end(error)))

    def carry_out(self, local: LocalPass, instructions: list[PartInstruction], reason: str = "") -> None:
        for instruction in instructions:
            self._carry_out_one(local, instruction, reason)
        self._on_settled(local)

    def _carry_out_one(self, local: LocalPass, instruction: PartInstruction, reason: str) -> None:
        match instruction:
            case Start():
                self._run_part(local)
            case Wake(message):
                local.wake(message)
            case Interrupt():
                local.interrupt(reason or "it failed")
            case Report(error):
                self._report(local, error)
            case Commit():
                self._commit(local)
            case Discard():
                self._forget(local)
            case Late(what):
                logger.info("worker %r: %s came after the end of pass %d", self._name, what, local.pass_id)

    def _on_settled(self, local: LocalPass) -> None:
        if local.part.is_over:
            with local.lock:
                settled = local.settled
            if settled is not None:
                settled.set_done()

    def _run_part(self, local: LocalPass) -> None:
        error: BaseException | None = None
        events, running = self.host.events, None
        if events.subscribers:
            running = events.span("pass", "pass", local.pass_id, self.host.name_of(sender_of(local.pass_id)))
        try:
            if local.on_own_thread:
                local.run()
            else:
                assert local.begin is not None
                with applied(local.begin.modes):
                    local.run()
        except BaseException as raised:
            error = raised
        if running is not None:
            running.end()
        try:
            self.carry_out(local, local.on(lambda part: part.on_local_end(error)))
        finally:
            error = None  # its traceback has this frame: only the collector would find the two

    def _report(self, local: LocalPass, error: BaseException | None) -> None:
        root_id = sender_of(local.pass_id)
        if root_id == self._id:
            self.report_here(local, error)
            return
        try:
            if error is None and local.last is not None:
                last, local.last = local.last, None
                self._post_gradients(local, *last, done=True)
            else:
                self._post_done(local, root_id, error)
        except PeerLostError as lost:
            logger.info("the root of pass %d is gone: %s", local.pass_id, lost)
            self.end(local, "its root is gone")
        except Exception as failed:
            if error is not None:
                raise
            self.fail(local, failed)
        else:
            if error is not None:
                self._forget(local)

    def _post_done(self, local: LocalPass, root_id: int, error: BaseException | None) -> None:
        failure = None if error is None else self.host.encode_error(error, root_id)
        envelope = Envelope(Kind.DONE, self.host.new_message_id())
        try:
            self.host.post(root_id, envelope, Done(local.pass_id, failure), None, None)
        except TooLargeError:
            assert failure is not None
            self.host.post(root_id, envelope, Done(local.pass_id, shortened(failure)), None, None)

    def _commit(self, local: LocalPass) -> None:
        """Any number of times, by whoever needs it first."""
        context, begin = local.context, local.begin
        assert context is not None
        assert begin is not None
        try:
            with local.committing:
                gradients, local.gradients = local.gradients, None
                if gradients is not None and begin.into_grad:
                    gradients.add_to_leaves()
                elif gradients is not None:
                    with context.lock:
                        context.gradients.take_over(gradients)
        except Exception as error:
            if local.part.is_root:
                raise
            # Without its traceback: whoever keeps the log must not keep the frames, and what they hold.
            logger.error("the gradients of pass %d could not be added up: %s", local.pass_id, text_of(error))
        finally:
            self._forget(local)

    def _forget(self, local: LocalPass) -> None:
        with self._lock:
            if local.part.is_over:
                self._passes.pop(local.pass_id, None)
                self._bury_locked(local.pass_id)
        if local.part.state is not State.FINISHED:
            with local.committing:
                local.gradients = None

    def _bury_locked(self, pass_id: int) -> None:
        self._over[pass_id] = None
        if len(self._over) > _TOMBSTONES:
            self._over.popitem(last=False)

    # -- what a running part needs ---------------------------------------------------------------------

    def _received_in(self, local: LocalPass) -> list[Node]:
        """The Recvs that a pass comes to on this worker."""
        assert local.begin is not None
        if local.begin.wanted is not None:
            ids = set(local.begin.wanted)
        else:
            ids = {id for sent in local.sent.values() for id in sent.reach} | local.roots.reach
            if any(id < 0 for id in ids):
                ids = flatten_groups(ids, self._contexts.log.closure(ids))
        return [self._contexts.find_received(id) for id in ids]

    def wait(self, waiter: Waiter, peer: int, deadline: float | None, watch: Any = None) -> None:
        if not waiter.done:
            self.host.wait(waiter, peer, deadline, watch)

    def _decode(self, envelope: Envelope, frames: Any) -> tuple[Gradient, ...]:
        return self.host.decode(envelope, frames).gradients  # type: ignore[no-any-return]

    def _post_gradients(
        self, local: LocalPass, message: int, gradients: tuple[Gradient, ...], *, done: bool = False
    ) -> None:
        """Never blocks for long: what is large is written by another thread."""
        context, begin = local.context, local.begin
        assert context is not None
        assert begin is not None
        autograd = Autograd(context.id, during=local.pass_id, done=done)
        envelope = Envelope(Kind.GRADIENTS, self.host.new_message_id(), message, autograd=autograd)
        tracked = context if begin.create_graph else None
        left = None if local.deadline is None else max(0.0, local.deadline - clock.now())
        post = partial(self.host.post, sender_of(message), envelope, Gradients(gradients), left, tracked)
        if done or sum(map(_size_of, gradients)) < SHARED_MEMORY_FROM:
            post()
        else:
            self.host.submit(partial(self._post_later, local, post))

    def _post_later(self, local: LocalPass, post: Task) -> None:
        try:
            post()
        except Exception as error:
            self.fail(local, error)

    # -- what others ask -------------------------------------------------------------------------------

    def settle(self, context: Context) -> None:
        """Passes that are done here but have not heard the root's last word are waited for: it is on its way."""
        for local in self.of_context(context.id):
            # Not in a hook of that very pass, whose root waits for us.
            if local.part.state is State.REPORTED and local.pass_id != current.current_pass_id():
                self._wait_settled(local)
            if local.part.state is State.FINISHED:
                self._commit(local)

    def _wait_settled(self, local: LocalPass) -> None:
        with local.lock:
            if local.part.is_over:
                return
            settled = local.settled or Waiter()
            local.settled = settled
        serving = current.current_serving()
        self.wait(settled, sender_of(local.pass_id), serving.deadline if serving else local.deadline)

    def state_of(self, context_id: int, pass_id: int) -> PartState | None:
        """How far a pass is here, or was when it failed; None if nothing is known of it."""
        local, context = self._passes.get(pass_id), self._contexts.find(context_id)
        if local is not None:
            return local.describe()
        failed = None if context is None else context.failed
        return failed if failed is not None and failed.pass_id == pass_id else None

    def states_of(self, context_id: int) -> list[PartState]:
        """How far the passes of a context are here: those that run; with none, the last one if that has failed."""
        states = [local.describe() for local in self.of_context(context_id)]
        context = self._contexts.find(context_id)
        if not states and context is not None and context.failed is not None:
            states.append(context.failed)
        return states

    def roots_of(self, context_id: int) -> list[torch.Tensor]:
        """What passes that run start from, if they were begun here."""
        return [root for local in self.of_context(context_id) for root in local.roots.tensors]

    # -- ends ------------------------------------------------------------------------------------------

    def on_lost(self, peer: int, name: str, lost: PeerLostError) -> None:
        """A worker is gone: the parts of its passes end, and those that wait for it fail."""
        for local in self.all():
            if sender_of(local.pass_id) == peer:
                self.end(local, f"its root, worker {name!r}, is gone")
            elif peer in local.awaited_from.values() and not local.part.is_root:
                # The root will know as well, but perhaps not as soon.
                self.carry_out(local, local.on(lambda part: part.on_lost(lost)))

    def end_early_ones(self) -> None:
        """Forgets gradients whose pass never began."""
        before = clock.now() - _EARLY
        for local in self.all():
            if local.part.state is State.EARLY and local.since < before:
                logger.warning("pass %d never began here; gradients for it are dropped", local.pass_id)
                self.end(local, "it never began here")

    def close(self) -> None:
        """Takes part in nothing new."""
        with self._lock:
            self._closed = True


def _size_of(gradient: Gradient) -> int:
    if gradient is None:
        return 0
    return gradient.nbytes if gradient.layout is torch.strided else SHARED_MEMORY_FROM
