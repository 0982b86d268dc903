"""This worker's parts in passes: their table, the messages that come for them, and what follows.

    on_begin, on_gradients, on_end   a message of a pass -> its pure state (backward_pass.py) -> follow
    follow                           runs torch's engine (engine_call.py), reports to the root, adds gradients up

A thread that reads does only what takes no time, and returns the rest as a task for another thread.
"""

from __future__ import annotations

import logging
import os
from _thread import RLock  # threading.RLock is Python code
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..errors import CallTimeoutError, NotStartedError, PeerLostError, TooLargeError, UnknownContextError
from ..events import log_by, logger
from ..messages import COUNTER_BITS, Begin, Done, Envelope, Kind, Member, sender_of, shortened
from ..primitives import clock, current
from ..primitives.forks import leave_if_orphan
from .backward_pass import COMMIT, REPORT, START, WAKE, Failed, Late, Outcome, State
from .commits import Commits
from .contexts import Context, Contexts
from .diagnosis import PartState, state_here
from .engine_call import EngineCall
from .host import Host, Task, tell
from .local_pass import Arrived, LocalPass
from .outbox import Poster
from .torch_modes import applied, is_changed, restore_defaults

_TOMBSTONES = 10_000
_EARLY = 60.0  # seconds that gradients wait for the begin of their pass
_GRACE = 5.0  # seconds that a participant waits longer than its root
_ASKING = 5.0  # seconds for which a root is asked for the state of a pass, before it is asked again


class Parts:
    """All parts of one worker. `report_here` takes the report of a part whose pass was begun on this worker."""

    def __init__(
        self,
        member: Member,
        contexts: Contexts,
        host: Host,
        report_here: Callable[[LocalPass, BaseException | None], None],
    ) -> None:
        self._name = member.name
        self._id = member.id
        self._pid = os.getpid()
        self._contexts = contexts
        self._host = host
        self._report_here = report_here
        self._log_later = partial(log_by, host.submit)
        self._lock = RLock()  # guards all below; held for a moment only
        self.passes: dict[int, LocalPass] = {}  # by id; single lookups go without the lock
        self._over: OrderedDict[int, None] = OrderedDict()  # tombstones
        self._closed = False
        self.commits = Commits(member.name, host, self._forget)
        self.poster = Poster(host, self.all, self._on_local_end)

    def __len__(self) -> int:
        return len(self.passes)

    def all(self) -> list[LocalPass]:
        with self._lock:
            return list(self.passes.values())

    def of_context(self, context_id: int) -> list[LocalPass]:
        if not self.passes:
            return []
        return [local for local in self.all() if local.context is not None and local.context.id == context_id]

    def add(self, local: LocalPass) -> None:
        """Adds the part of the pass's root.

        Raises:
            NotStartedError: this worker has shut down.
            UnknownContextError: the context has ended.
        """
        assert local.context is not None
        with self._lock:
            if self._closed:
                raise NotStartedError(f"worker {self._name!r} has shut down")
            self.passes[local.pass_id] = local
        if self._contexts.of_message(local.context.id) is None:
            # It has ended since. From here on its end would end the pass.
            with self._lock:
                self.passes.pop(local.pass_id, None)
            self._contexts.get(local.context.id)

    # -- messages: on threads that read, so nothing may block or run users' code -----------------------

    def on_begin(self, begin: Begin, depth: int) -> Task | None:
        root_id = begin.pass_id >> COUNTER_BITS
        context = self._contexts.of_message(begin.context) or self._contexts.get_or_make(begin.context)
        local = None if context is None else self._find_or_make(begin.pass_id)
        if local is None or context is None:
            what = f"the begin of pass {begin.pass_id} came after the end of it or its context"
            self._log_later(logging.INFO, "%s", what)
            drop = self.on_end(begin.pass_id, what)  # gradients may have come before
            # The root would wait for this worker until its time is over.
            ended = UnknownContextError(
                f"{what} {begin.context} on worker {self._name!r}: what it had for the context is gone there"
            )
            return partial(self._refuse, begin.pass_id, root_id, ended, drop)
        context.heard_from.add(root_id)
        local.context, local.begin, local.depth = context, begin, depth
        if begin.timeout is not None:
            local.deadline = clock.now() + begin.timeout + _GRACE
        return self.follow(local, local.start(self._contexts), reading=True)

    def on_unread(self, peer: int, pass_id: int, error: Exception) -> Task | None:
        """Fails a pass whose begin this worker had no memory to read."""
        if pass_id >> COUNTER_BITS != peer:
            self.disbelieve(peer, f"the begin of pass {pass_id}, whose root it is not")
            return None
        drop = self.on_end(pass_id, str(error))  # gradients may have come before
        return partial(self._refuse, pass_id, peer, error, drop)

    def _refuse(self, pass_id: int, root_id: int, reason: Exception, drop: Task | None) -> None:
        tell(self._host, root_id, Kind.DONE, Done(pass_id, self._host.encode_error(reason, root_id)))
        if drop is not None:
            drop()

    def on_gradients(self, peer: int, envelope: Envelope, frames: Any) -> Task | None:
        """Keeps the gradients of one message or several. They are decoded when the engine comes to them."""
        autograd = envelope.autograd
        if autograd is None:
            self.disbelieve(peer, f"gradients of message {envelope.reply_to}, of no pass")
            return None
        pass_id, context = autograd.during, self._contexts.of_message(autograd.context)
        messages = (envelope.reply_to, *autograd.more)
        is_over = pass_id in self._over or context is None
        for message in () if is_over else messages:
            sent = None if context is None else context.sends.get(message)
            if sent is None and message not in self._contexts.plain.receivers:
                # It was sent in another context, or there is no such message any more.
                sent = self._contexts.find_sent_anywhere(message)
            to = self._contexts.plain.receivers.get(message) if sent is None else sent.to
            if to != peer:
                self.disbelieve(peer, f"gradients of message {message}, which it was not sent")
                return None
        local = None if is_over else self.passes.get(pass_id) or self._find_or_make(pass_id)
        if local is None:
            late = "the gradients of message %d came after the end of pass %d"
            self._log_later(logging.INFO, late, envelope.reply_to, pass_id)
            return None
        arrived = Arrived(envelope, frames, messages)
        task: Task | None = None
        for message in messages:
            with local.lock:
                outcome = local.on_gradients(message)
                if message in local.arrived and not local.interrupted:
                    local.undecoded.setdefault(message, arrived)
                waiter = local.waiters.pop(message, None) if outcome is WAKE else None
            if waiter is not None:
                waiter.set_done()
            elif outcome is not WAKE:
                task = self.follow(local, outcome, reading=True) or task
        return task

    def on_end(self, pass_id: int, aborted: str) -> Task | None:
        local = self.passes.get(pass_id)
        if local is None:
            with self._lock:
                self._bury_locked(pass_id)
            return None
        with local.lock:
            outcome = local.on_end(aborted)
        return self.follow(local, outcome, aborted, reading=True)

    def _find_or_make(self, pass_id: int) -> LocalPass | None:
        """Returns this worker's part in a pass; None if that is over."""
        with self._lock:
            if pass_id in self._over or self._closed:
                return None
            local = self.passes.get(pass_id)
            if local is None:
                local = self.passes[pass_id] = LocalPass(pass_id=pass_id, since=clock.now())
            return local

    def disbelieve(self, peer: int, what: str) -> None:
        """Warns of a message that its sender had no right to send, and that is dropped."""
        name = self._host.name_of(peer)
        text = "worker %r: worker %r (id %d) has sent %s; this is dropped"
        self._log_later(logging.WARNING, text, self._name, name, peer, what)

    # -- what is to be done ----------------------------------------------------------------------------

    def finish_here(self, pass_id: int) -> bool:
        """Ends a part whose root is another worker of this process, on the root's thread; False if it is not known."""
        local = self.passes.get(pass_id)
        if local is None:
            return False
        self.end(local, "")
        return True

    def end(self, local: LocalPass, aborted: str) -> None:
        """Ends a part: the root has said the last word, or it is gone, or the context is."""
        with local.lock:
            outcome = local.on_end(aborted)
        self.follow(local, outcome, aborted)

    def _on_local_end(self, local: LocalPass, error: BaseException | None) -> None:
        """Notes that the engine is done here, or that something went wrong here."""
        with local.lock:
            outcome = local.on_local_end(error)
        self.follow(local, outcome)

    def follow(self, local: LocalPass, outcome: Outcome, reason: str = "", *, reading: bool = False) -> Task | None:
        """Does what follows from an event. A thread that reads does what takes no time, and returns the rest."""
        if outcome is None:
            return None
        task = None
        if outcome is START:
            task = partial(self._run, local)
        elif outcome is COMMIT:
            if local.adds_to_grad:
                self.commits.due.append(local)
            task = partial(self.commits.commit, local)
        elif isinstance(outcome, Late):
            late = "worker %r: %s came after the end of pass %d"
            self._log_later(logging.INFO, late, self._name, outcome.what, local.pass_id)
        else:  # DROP, or Failed
            left = local.interrupt(self._id, reason or "it failed")
            self._forget(local)
            task = partial(self._drop, local, left, outcome.error if isinstance(outcome, Failed) else None)
        try:
            if task is None or reading:
                return task
            task()
            return None
        finally:
            if local.is_over and not local.settled.done:
                local.settled.set_done()

    def _drop(self, local: LocalPass, left: list[Any], error: BaseException | None) -> None:
        """Tells the root why a part has failed, if it has, and lets go of what the part has gathered."""
        try:
            if error is not None:
                self._report(local, error)
        finally:
            left.clear()
            if local.state is not State.FINISHED:
                local.gradients = local.gathering = None  # which nobody adds up, so no lock

    def _run(self, local: LocalPass) -> None:
        if self.commits.due:
            self.commits.add_due(local.deadline)
        error: BaseException | None = None
        events, running = self._host.events, None
        if events.subscribers:
            running = events.span("pass", "pass", local.pass_id, self._host.name_of(sender_of(local.pass_id)))
        try:
            call = EngineCall(local, self._contexts, self._host, self.poster)
            modes = None if local.begin is None else local.begin.modes
            if local.on_own_thread:
                call.run()
            elif modes is None:
                try:
                    call.run()
                finally:
                    if is_changed():
                        restore_defaults()
            else:
                with applied(modes):
                    call.run()
            root_id = local.pass_id >> COUNTER_BITS
            if local.outboxes:
                self.poster.finish(local, root_id)
        except BaseException as raised:
            error = raised
        if os.getpid() != self._pid:  # in a fork; but a worker that was started there runs its passes to the end
            leave_if_orphan(error)
        if running is not None:
            running.end()
        try:
            with local.lock:
                outcome = local.on_local_end(error)
            if outcome is REPORT:
                self._report(local, None)
            else:
                self.follow(local, outcome)
        finally:
            error = outcome = None  # its traceback has this frame: only the collector would find the two
        try:
            if local.gathering is not None:
                local.gather()  # behind the report: the root need not wait for it
        except Exception as failed:  # no memory; where the root has gone on, add_up() says so
            self._on_local_end(local, failed)

    def _report(self, local: LocalPass, error: BaseException | None) -> None:
        root_id = local.pass_id >> COUNTER_BITS
        if root_id == self._id:
            self._report_here(local, error)
            return
        outbox = local.outboxes.get(root_id)
        try:
            if error is not None or outbox is None or not self.poster.post(local, outbox, done=True):
                self._post_done(local.pass_id, root_id, error)
        except PeerLostError as lost:
            logger.info("the root of pass %d is gone: %s", local.pass_id, str(lost))
            self.end(local, "its root is gone")
        except Exception as failed:
            if error is not None:
                raise
            self._on_local_end(local, failed)
        else:
            if error is not None:
                self._forget(local)

    def _post_done(self, pass_id: int, root_id: int, error: BaseException | None) -> None:
        failure = None if error is None else self._host.encode_error(error, root_id)
        try:
            self._post(root_id, Done(pass_id, failure))
        except (TooLargeError, MemoryError):
            assert failure is not None
            self._post(root_id, Done(pass_id, shortened(failure)))

    def _post(self, root_id: int, done: Done) -> None:
        envelope = Envelope(Kind.DONE, self._host.new_message_id(), done.pass_id if done.failure else 0)
        self._host.post(root_id, envelope, done, None, None)

    def _forget(self, local: LocalPass) -> None:
        with self._lock:
            if local.is_over:
                self.passes.pop(local.pass_id, None)
                self._over[local.pass_id] = None
                if len(self._over) > _TOMBSTONES:
                    self._over.popitem(last=False)

    def _bury_locked(self, pass_id: int) -> None:
        self._over[pass_id] = None
        if len(self._over) > _TOMBSTONES:
            self._over.popitem(last=False)

    # -- questions -------------------------------------------------------------------------------------

    def settle(self, context: Context | None) -> None:
        """Waits for the last word on passes that are over for their roots: it is on its way. These are passes of a
        context; or (None) those that put gradients into `.grad` here.

        Raises:
            CallTimeoutError: it did not come before the deadline of the call that is served.
        """
        for local in self.all():
            if context is None:
                concerns = local.adds_to_grad
            else:
                concerns = local.context is context
            if not concerns:
                continue
            # Not in a hook of that very pass, whose root waits for this worker.
            if local.state is State.REPORTED and local.pass_id != current.current_pass_id():
                self._await_end(local)
            if local.state is State.FINISHED:
                serving = current.current_serving()
                deadline = serving.deadline if serving else None
                if self.commits.due:
                    self.commits.add_due(deadline)
                if not self.commits.add_up(local, deadline):
                    raise self.commits.not_added()

    def _await_end(self, local: LocalPass) -> None:
        """Waits for the last word on a pass, unless it still runs at its root: no order is promised then, and the root
        may wait for the code that asks."""
        serving, root_id, context = current.current_serving(), sender_of(local.pass_id), local.context
        deadline = serving.deadline if serving else local.deadline
        assert context is not None
        while not local.settled.done:
            left = _ASKING if deadline is None else min(_ASKING, deadline - clock.now())
            if left <= 0:
                break
            if root_id == self._id:
                state = self.state_of(context.id, local.pass_id)
            else:
                answers, failed = self._host.ask((root_id,), state_here, (context.id, local.pass_id), left)
                if isinstance(failed.get(root_id), CallTimeoutError):
                    continue
                if failed:  # it is gone, or leaves: this worker will hear of it
                    return
                state = answers[root_id]
            if state is not None and not (state.is_over or state.has_failed):
                return
            self._host.wait(local.settled, root_id, deadline, None)
            break
        if not local.settled.done:
            raise CallTimeoutError(
                f"timed out on worker {self._name!r} waiting for the end of a backward pass of worker "
                f"{self._host.name_of(root_id)!r}, whose gradients belong here; nothing was done. Raise the call's "
                "timeout"
            )

    def state_of(self, context_id: int, pass_id: int) -> PartState | None:
        """Says how far a pass is here, or was when it failed; None if nothing is known of it."""
        local, context = self.passes.get(pass_id), self._contexts.of_message(context_id)
        if local is not None:
            return local.describe(self._id)
        failed = None if context is None else context.failed
        return failed if failed is not None and failed.pass_id == pass_id else None

    def states_of(self, context_id: int) -> list[PartState]:
        """Says how far the passes of a context are here: those that run; with none, the last one if it has failed."""
        states = [local.describe(self._id) for local in self.of_context(context_id)]
        context = self._contexts.of_message(context_id)
        if not states and context is not None and context.failed is not None:
            states.append(context.failed)
        return states

    def roots_of(self, context_id: int) -> list[torch.Tensor]:
        """Returns the roots of passes that run and were begun here."""
        return [root for local in self.of_context(context_id) for root in local.roots.tensors]

    # -- ends ------------------------------------------------------------------------------------------

    def on_lost(self, peer: int, name: str, lost: PeerLostError) -> None:
        """Ends the parts in passes of a worker that is gone; those that wait for it fail."""
        for local in self.all():
            if sender_of(local.pass_id) == peer:
                self.end(local, f"its root, worker {name!r}, is gone")
            elif not local.is_root and any(sent.to == peer for sent in local.sent.values()):
                # The root will know as well, but perhaps not as soon.
                with local.lock:
                    outcome = local.on_lost(lost)
                # Not here: the root may take the report slowly, and this thread may be a caller's with a deadline.
                self._host.submit(partial(self.follow, local, outcome))

    def end_early_ones(self) -> None:
        """Drops gradients whose pass never began."""
        before = clock.now() - _EARLY
        for local in self.all():
            if local.state is State.EARLY and not local.is_root and local.since < before:
                logger.warning("pass %d never began here; gradients for it are dropped", local.pass_id)
                self.end(local, "it never began here")

    def close(self) -> None:
        """Takes part in nothing new."""
        with self._lock:
            self._closed = True
