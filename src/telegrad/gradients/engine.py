"""The engine of one worker: it begins passes as their root, takes part in others' (participant.py), ends contexts.

    backward, grad   plan (plan.py): which Sends of which workers will get gradients; then Begin to each participant,
                     this worker's own part, a report from each of them, and End to each of them
    on_message       Begin, Gradients, Done, End and Release from other workers

Threads that read call `on_message`: it never blocks and runs no user code. It returns what takes longer, as a task for
another thread. The root's own part runs on the thread that has called backward(); never inside of another engine call,
but on the thread of a device: see Note [an engine call inside of another] in devices.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from signal import SIGINT
from typing import Any, TypeVar

import torch

from .._torch import current_graph_task_id
from ..errors import (
    GradientError,
    NotStartedError,
    OutOfMemoryError,
    PeerLostError,
    RemoteError,
    UnknownContextError,
    text_of,
)
from ..events import log_by
from ..messages import COUNTER_BITS, Begin, Done, End, Envelope, Failure, Forget, Kind, Member, Release, sender_of
from ..primitives import clock, current
from ..primitives.interrupts import critical, deferred, deliver, getsignal, guard, interruptible, on_signal, run_all
from . import averaged, devices, in_process, seam
from .backward_pass import ABORT, FINISH, Late, Outcome
from .contexts import Context, Contexts
from .ends import Ends
from .host import Host, Task, tell
from .leaves import GradientTable
from .local_graph import Graph
from .local_pass import LatePassError, LocalPass, Roots
from .outbox import Gradient, Outbox
from .participant import Parts
from .pasts import Past
from .plan import Planner, checked_roots, edge_of
from .rooted_pass import RootedPass, late_error, limit, looking_time, moves, raise_error
from .torch_modes import current_modes

Result = TypeVar("Result")
_LATE = "%s came after the end of pass %d"


class Engine:
    """Gradients on one worker."""

    def __init__(self, member: Member, contexts: Contexts, host: Host, backward_timeout: float = 60.0) -> None:
        self.host = host
        self.plain = contexts.plain
        self.backward_timeout = backward_timeout  # of a plain backward()
        self.id, self._name = member.id, member.name
        self._contexts = contexts
        self._roots: dict[int, RootedPass] = {}  # by id; its single operations are atomic
        self.parts = Parts(member, contexts, host, self._on_report_here)
        self._planner = Planner(member.id, contexts, host)
        self.ends = Ends(host, contexts.plain)
        contexts.plain.start(host)

    def open(self, *, plain: bool) -> None:
        """Begins its work, when this worker has joined its group."""
        if self.id < 0:  # an observer
            return
        in_process.engines.append(self)
        averaged.note_averaged_leaves(id(self))
        if plain:
            seam.put(self)

    # -- what users call -------------------------------------------------------------------------------

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """Returns the gradients of this worker's leaves in a context, from all passes that are done."""
        return self._read(context_id, GradientTable.copy)

    def gradients_of(self, context_id: int, leaves: Sequence[torch.Tensor]) -> list[Gradient]:
        """Returns the gradients of these leaves; None where there is none."""
        return self._read(context_id, GradientTable.get_all, leaves)

    def _read(self, context_id: int, read: Callable[..., Result], *args: Any) -> Result:
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            if thread.is_main and getsignal(SIGINT) is not on_signal:
                guard()
            context = self._contexts.live.get(context_id) or self._contexts.get(context_id)
            if self.parts.passes:
                self.parts.settle(context)
            with context.lock:
                return read(context.gradients, *args)
        finally:
            thread.critical = before
            if deferred and not before:
                deliver()

    def update_gradient(
        self, context_id: int, leaf: torch.Tensor, callback: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        """Replaces a leaf's gradient by what the callback makes of it; None leaves it as it is."""
        with critical():
            context = self._contexts.get(context_id)
            self.parts.settle(context)
            with context.lock:
                gradient = context.gradients.get(leaf)
            if gradient is None:
                raise GradientError("The grad for the variable should exist in dist_autograd context.")
            changed = interruptible(callback, gradient)  # outside of the lock: it is the user's
            if changed is not None:
                with context.lock:
                    context.gradients.replace(leaf, changed)

    def statistics(self) -> dict[str, int]:
        return {"passes": len(self.parts), "passes_begun_here": len(self._roots), **self._contexts.statistics()}

    @property
    def busy(self) -> int:
        return len(self.parts)  # passes that this worker takes part in now

    # -- a pass that is begun here ---------------------------------------------------------------------

    def backward(
        self,
        context_id: int,
        tensors: Sequence[torch.Tensor],
        given: Sequence[Gradient] | None,
        inputs: Sequence[torch.Tensor] | None,
        options: tuple[float | None, bool, bool, bool],
        *,
        accumulates: bool = False,
        patience: float | None = None,
    ) -> tuple[Gradient, ...] | None:
        """Plans a backward pass and runs it to its end on every worker. None, outside of contexts: torch can do it.

        Args:
            context_id: 0: outside of contexts. Then the roots and inputs may be edges, and all gradients are given.
            given: the gradients of the tensors; ones by default.
            inputs: tensors of this worker, whose gradients are returned; nothing else is computed or kept. None: all
                leaves get their gradients.
            options: timeout in seconds (None: no limit), retain_graph, create_graph, into_grad. See Begin.
            accumulates: the gradients of the inputs go to `.grad` instead.
            patience: for how many seconds nothing may move anywhere; None: no limit.
        """
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        root: RootedPass | None = None
        try:
            if thread.is_main and getsignal(SIGINT) is not on_signal:
                guard()
            began = clock.now()
            context: Context = self._contexts.plain
            starts, gradients = tensors, given or ()
            leaves: Sequence[Any] = ()
            checkpoints: Sequence[Any] = ()
            if context_id:
                context = self._contexts.live.get(context_id) or self._contexts.get(context_id)
                edges, starts, gradients = checked_roots(tensors, given)
                with context.lock:
                    reach, leaves, checkpoints = context.graph.walk_once(edges)
            else:  # torch has checked the roots, and its own accumulation runs here
                edges = [edge_of(tensor) for tensor in tensors]
                graph = Graph(self._contexts.plain.new_group, marks=True)
                reach = graph.walk(edges)
                graph.clear()
                for member in reach:
                    if type(member) is Past:
                        self._planner.check_own(member)
            if inputs is None:
                plan = self._planner.plan(context, reach, edges, (options[0], patience))
                roots = Roots(starts, gradients, leaves, checkpoints, reach)
            else:
                targets = {edge_of(tensor) for tensor in inputs}
                plan = self._planner.plan_for(context, reach, edges, targets, (options[0], patience))
                if not context_id and not plan.sends:
                    return None
                roots = Roots(starts, gradients, inputs=tuple(inputs), accumulates=accumulates)
            pass_id, modes = self.host.new_message_id(), current_modes()
            sends, wanted = plan.sends, plan.wanted
            own = None if wanted is None else wanted.get(self.id, ())
            begin = Begin(pass_id, context.id, sends.get(self.id, ()), *options, own, modes)
            root = RootedPass(begin, self.id, sends, patience)
            local = LocalPass(is_root=True, pass_id=pass_id, context=context, begin=begin, roots=roots)
            if patience is not None:
                local.patience = patience - looking_time(patience)
                local.moves = partial(moves, root, self.id, self.host)
            if begin.timeout is not None:
                limit(root, local, began + begin.timeout, self.host)  # planning counts in
            local.depth = serving.depth + 1 if (serving := current.current_serving()) else 1
            for worker in root.others:
                theirs = None if wanted is None else wanted.get(worker, ())
                begin = Begin(pass_id, context.id, sends[worker], *options, theirs, modes)
                local.outboxes[worker] = Outbox(worker, begin)
                context.known_workers.add(worker)  # it may have been reached through another context
            self._roots[pass_id] = root
            try:
                self.parts.add(local)
                if root.is_over:  # it failed before its part was there to be ended
                    self.parts.end(local, "it has failed")
                self._run_everywhere(root, local, plan.apart)
            finally:
                self._roots.pop(pass_id, None)
            if root.error is not None:
                raise_error(root, context, self.id, self.host)
            return local.results
        finally:
            if root is not None:
                root.error = None  # its traceback may have frames with the pass: only the collector would find them
            thread.critical = before
            if deferred and not before:
                deliver()

    def _run_everywhere(self, root: RootedPass, local: LocalPass, apart: frozenset[int]) -> None:
        others = root.others
        inside = current_graph_task_id() >= 0
        turn = local.turn = self.host.begin_turn() if others and not inside else None
        try:
            for outbox in list(local.outboxes.values()) if apart else ():
                if outbox.worker in apart:
                    self.parts.poster.begin(local, outbox)
            outcome = local.start(self._contexts)
            if inside and not devices.is_thread_of_torch():
                # Not inside of another engine call: its thread would work off nodes of this one.
                self.host.submit(partial(self.parts.follow, local, outcome))
            else:
                local.on_own_thread = True
                self.parts.follow(local, outcome)
            while not root.waiter.done:
                self.host.wait(root.waiter, others[0] if others else self.id, local.wait_until(), turn)
                if root.waiter.done or not local.goes_on():
                    break
            if not root.waiter.done:
                self._on(root, root.on_failure, late_error(root, self.host))
            self._finish(root)
        except BaseException as error:
            self._on(root, root.on_failure, error)
            self._finish(root)  # all had reported when it came
            if not isinstance(error, Exception):
                raise
            if root.error is None:  # it came after all were done
                root.error, root.worker = error, self.id
        finally:
            if turn is not None:
                turn.end()

    def _on(self, root: RootedPass, event: Callable[..., Outcome], *args: Any) -> None:
        """Has a pass take an event that may end it with an error."""
        with root.lock:
            outcome, error = event(*args), root.error  # which the thread that waits clears when it has raised it
        pass_id = root.begin.pass_id
        if outcome is ABORT:
            assert error is not None
            reason = f"{type(error).__name__}: {text_of(error)}"
            if (local := self.parts.passes.get(pass_id)) is not None:
                self.parts.end(local, reason)
            # Not by this thread: a worker that takes nothing must not hold up the error.
            self.host.submit(partial(self.ends.tell_pass, pass_id, root.others, reason))
            if not root.waiter.done:
                root.waiter.set_done()
        elif type(outcome) is Late:
            log_by(self.host.submit, logging.INFO, _LATE, outcome.what, pass_id)

    def _finish(self, root: RootedPass) -> None:
        """Says the last word, if all have reported; once."""
        with root.lock:
            is_due, root.is_unsaid = root.is_unsaid, False
        if not is_due:
            return
        try:  # the others first: adding this worker's gradients up may fail
            self._tell_end(root.begin, root.others)
        finally:
            if (local := self.parts.passes.get(root.begin.pass_id)) is not None:
                self.parts.end(local, "")

    def _tell_end(self, begin: Begin, workers: Sequence[int]) -> None:
        if not begin.into_grad:
            self.ends.add(workers, passes=(begin.pass_id,))
            return
        try:
            if len(in_process.engines) > 1:
                workers = in_process.finish(self, begin.pass_id, workers)
        finally:  # also after Ctrl-C: to those that have ended it, it is no news
            self.ends.tell_pass(begin.pass_id, workers, "")

    # -- messages --------------------------------------------------------------------------------------

    def on_message(self, peer: int, envelope: Envelope, frames: Any) -> Task | None:
        """Takes a message of a pass, on a thread that reads: what takes longer is returned."""
        if envelope.kind == Kind.GRADIENTS:
            autograd, task = envelope.autograd, None
            if autograd is not None and autograd.begin is not None:
                task = self._on_begin(peer, autograd.begin, envelope.depth)
            task = self.parts.on_gradients(peer, envelope, frames) or task
            if autograd is not None and autograd.done:
                self._on_done(peer, autograd.during, None)
            return task
        if envelope.kind == Kind.BEGIN and frames.missing:
            return self.parts.on_unread(peer, envelope.reply_to, OutOfMemoryError(frames.missing))
        match self.host.open_control(envelope, frames):
            case Begin() as begin:
                return self._on_begin(peer, begin, envelope.depth)
            case Done(pass_id, failure):
                return self._on_done(peer, pass_id, failure)
            case End(pass_id, aborted):
                return self._on_end(peer, pass_id, aborted)
            case Forget(ids):
                return self.plain.on_forgotten(peer, ids)
            case Release(context_id):
                return partial(self._on_release, context_id, peer)
        return None

    def on_ends(self, peer: int, envelope: Envelope) -> Task | None:
        """Takes the ends that a message tells of, in the same way, and before anything else of it."""
        tasks = [task for pass_id in envelope.ended if (task := self._on_end(peer, pass_id, "")) is not None]
        tasks += [partial(self._on_release, context_id, peer) for context_id in envelope.released]
        return partial(run_all, tasks) if tasks else None

    def _on_end(self, peer: int, pass_id: int, aborted: str) -> Task | None:
        if pass_id >> COUNTER_BITS == peer:
            return self.parts.on_end(pass_id, aborted)
        self.parts.disbelieve(peer, f"the end of pass {pass_id}, whose root it is not")
        return None

    def _on_begin(self, peer: int, begin: Begin, depth: int) -> Task | None:
        if begin.pass_id >> COUNTER_BITS == peer:
            return self.parts.on_begin(begin, depth)
        self.parts.disbelieve(peer, f"the begin of pass {begin.pass_id}, whose root it is not")
        return None

    def _on_done(self, peer: int, pass_id: int, failure: Failure | None) -> Task | None:
        """Takes the report of a participant, or of this worker's own part."""
        root = self._roots.get(pass_id)
        if root is None:
            log_by(self.host.submit, logging.INFO, _LATE, f"the report of worker {peer}", pass_id)
        elif peer not in root.others and peer != self.id:
            self.parts.disbelieve(peer, f"a report of pass {pass_id}, which it has no part in")
        elif failure is not None:
            return partial(self._on_failed, root, peer, failure)  # which may run users' code
        else:
            self._on_part_done(root, peer)
        return None

    def _on_part_done(self, root: RootedPass, worker: int) -> None:
        with root.lock:  # a thread that finds the pass over must also find what is left to do
            is_done = root.on_report(worker, None) is FINISH
            if is_done:  # the last word is left to the thread that waits: backward() returns after it
                root.is_unsaid = True
        if is_done:
            root.waiter.set_done()

    def _on_failed(self, root: RootedPass, peer: int, failure: Failure) -> None:
        name = self.host.name_of(peer)
        try:
            error = self.host.decode_error(failure, name)
        except Exception as undecoded:  # else the pass would wait for a report that has come
            error = RemoteError(f"worker {name!r} failed, and its error cannot be rebuilt here: {text_of(undecoded)}")
        self._on(root, root.on_report, peer, error)

    def _on_report_here(self, local: LocalPass, error: BaseException | None) -> None:
        """Takes the report of this worker's own part."""
        if (root := self._roots.get(local.pass_id)) is None:
            return
        if error is None:
            self._on_part_done(root, self.id)
            return
        if isinstance(error, LatePassError):
            error = late_error(root, self.host, local.held_up)
        # If the pass was already aborted, the first error wins and this one is dropped.
        self._on(root, root.on_report, self.id, error)

    # -- ends ------------------------------------------------------------------------------------------

    def release(self, context_id: int, *, told_by: int | None = None, tell_others: bool = True) -> set[int]:
        """Ends a context here, and tells the workers that it was sent to. Returns them: without `tell_others`, that is
        left to the caller."""
        context = self._contexts.take_out(context_id)
        if context is None:
            return set()
        others = context.known_workers - {told_by, self.id, context_id >> COUNTER_BITS}
        if tell_others:
            self.ends.add(others, contexts=(context_id,))
        if self.parts.passes:
            ended = UnknownContextError(f"context {context_id} ended while its backward pass ran")
            self._end(self.parts.of_context(context_id), ended)
        return others

    def tell_released(self, worker: int, context_id: int) -> None:
        """Tells a worker that a context has ended."""
        if worker != self.id:
            tell(self.host, worker, Kind.RELEASE, Release(context_id))

    def _on_release(self, context_id: int, told_by: int) -> None:
        """Believes the end of a context only from its owner, or from a worker that has told of the context itself: a
        context that is not known here must not be buried before its first message comes."""
        context = self._contexts.find(context_id)
        if told_by == sender_of(context_id) or (context is not None and told_by in context.heard_from):
            self.release(context_id, told_by=told_by)
        elif context is not None:
            self.parts.disbelieve(told_by, f"the end of context {context_id}, which it has no part in")

    def _end(self, passes: Sequence[LocalPass], error: Exception) -> None:
        """Ends passes with an error: everywhere those that were begun here, on this worker the others."""
        for local in passes:
            root = self._roots.get(local.pass_id)
            if root is not None:
                self._on(root, root.on_failure, error)
            else:
                self.parts.end(local, str(error))

    def on_lost(self, peer: int, name: str, reason: str) -> None:
        """Fails the passes that need a worker that is gone; ends its own passes and contexts."""
        lost = PeerLostError(f"worker {name!r} is gone: {reason}")
        lost.worker_id = peer
        self.ends.on_lost(peer)
        for root in list(self._roots.values()):
            self._on(root, root.on_lost, peer, lost)
        self.parts.on_lost(peer, name, lost)
        for context in self._contexts.of_owner(peer):
            self.release(context.id, told_by=peer)
        if (task := self._contexts.plain.on_lost(peer)) is not None:
            self.host.submit(task)

    def tick(self) -> None:
        self.parts.end_early_ones()

    def close(self) -> None:
        """Ends everything: this worker shuts down."""
        self.ends.tell_all()
        if self in in_process.engines:
            in_process.engines.remove(self)
        seam.remove(self)
        averaged.forget_averaged_leaves(id(self))
        self.parts.close()
        ended = NotStartedError(f"worker {self._name!r} was shut down during a backward pass")
        for root in list(self._roots.values()):  # also those whose own part is not in the table yet
            self._on(root, root.on_failure, ended)
        self._end(self.parts.all(), ended)
        for context in self._contexts.all():
            self._contexts.take_out(context.id)
        self._contexts.plain.close()
