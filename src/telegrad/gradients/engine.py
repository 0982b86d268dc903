"""The engine: runs backward passes with torch, as one of their workers or as their root.

    backward(), grad()     plan (planning.py): which Sends of which workers will get gradients
                           -> Begin to each of them, this worker's own part, End to each of them
    on_message()           Begin, Gradients, Done, End, Release from others: the pure state says what is to be done

`on_message` is called by threads that read: it never blocks and runs no user code. What takes longer it
returns, to be run by somebody who does not read. The engine call of a pass runs on the thread that has called
backward(), or on one of the worker's; never inside of another engine call.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from .. import current
from ..config import SHARED_MEMORY_FROM
from ..errors import (
    BackwardError,
    CallTimeoutError,
    GradientError,
    NotStartedError,
    PeerLostError,
    TelegradError,
    TooLargeError,
    UnknownContextError,
    text_of,
)
from ..events import Events, logger
from ..messages import (
    Autograd,
    Begin,
    Done,
    End,
    Envelope,
    Failure,
    Gradients,
    Kind,
    Member,
    Release,
    sender_of,
    shortened,
)
from ..modes import applied, current_modes
from ..waiter import Waiter
from .awaited import PartState, explain, state_here
from .backward_pass import (
    Abort,
    BackwardPass,
    Commit,
    Complete,
    Discard,
    Finish,
    Interrupt,
    Late,
    Part,
    PartInstruction,
    Report,
    RootInstruction,
    Start,
    State,
    Wake,
)
from .contexts import Context, Contexts
from .local_graph import Node
from .local_pass import Gradient, InterruptedPassError, LatePassError, LocalPass, Roots, Surroundings
from .log import flatten_groups
from .nodes import make_beacon
from .planning import Plan, Planner, checked_roots, edge_of, no_leaves

Task = Callable[[], None]
_TOMBSTONES = 10_000
_EARLY = 60.0  # seconds that gradients wait for the begin of their pass
_GRACE = 5.0  # seconds that a participant waits longer than its root
_ASKING = 0.5  # seconds in which participants say what a failed pass awaited


class Host(Protocol):
    """What the engine needs of its worker."""

    def post(
        self, to: int, envelope: Envelope, body: Any, timeout: float | None, context: Context | None
    ) -> None:
        """Sends a message to the worker of that id. Raises PeerLostError."""

    def wait(self, waiter: Waiter, peer: int, deadline: float | None, watch: Any) -> None:
        """Waits for something that most likely comes from that worker."""

    def watch(self, peer: int) -> Any:
        """Has this thread read what that worker sends while it works on a pass; `end()` ends it. May be None."""

    events: Events

    def ask(
        self, workers: Iterable[int], function: Callable[..., Any], args: Sequence[Any], seconds: float
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Calls a function on each of them: (answers, errors). Takes `seconds` at most."""

    def submit(self, task: Task) -> None: ...
    def new_message_id(self) -> int: ...
    def name_of(self, worker_id: int) -> str: ...
    def encode_error(self, error: BaseException, to: int) -> Failure: ...
    def decode_error(self, failure: Failure, worker: str) -> BaseException: ...
    def decode(self, envelope: Envelope, frames: Any) -> Any: ...
    def open_control(self, envelope: Envelope, frames: Any) -> Any: ...


@dataclass(eq=False)
class _Root:
    """A pass that was begun here."""

    state: BackwardPass
    # Guards `state`. Threads that read take it: held for a moment only.
    lock: Any = field(default_factory=threading.RLock)
    waiter: Waiter = field(default_factory=Waiter)
    finishing: list[RootInstruction] = field(
        default_factory=list
    )  # left to the thread that waits for the pass
    error: BaseException | None = None
    worker: int = -1  # where the error happened

    def on(self, event: Callable[[BackwardPass], list[RootInstruction]]) -> list[RootInstruction]:
        with self.lock:
            return event(self.state)


class Engine:
    """Of one worker. `host` is set before the first message comes."""

    host: Host

    def __init__(self, member: Member, contexts: Contexts) -> None:
        self._name = member.name
        self._id = member.id
        self._contexts = contexts
        self._lock = threading.RLock()  # guards all below; held for a moment only
        self._passes: dict[int, LocalPass] = {}  # this worker's part, by pass
        self._roots: dict[int, _Root] = {}  # passes that were begun here
        self._over: OrderedDict[int, None] = OrderedDict()  # tombstones of passes
        self._closed = False
        self._planner = Planner(member.id, contexts, lambda worker: self.host.name_of(worker))
        self._around = Surroundings(
            member.id,
            self._wait,
            self._decode,
            self._post_gradients,
            contexts.find_sent,
            self._received_in,
            make_beacon(),
        )

    # -- what users call -------------------------------------------------------------------------------

    def backward(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        *,
        grad_tensors: Sequence[Gradient] | None,
        retain_graph: bool,
        create_graph: bool,
        into_grad: bool,
        timeout: float | None,
    ) -> None:
        """Runs a backward pass, to its end on every worker. `timeout` None: no limit."""
        context = self._contexts.get(context_id)
        edges, gradients = checked_roots(roots, grad_tensors)
        with context.lock:
            reach, leaves, checkpoints = context.graph.walk_once(edges)
        plan = self._planner.plan(reach, edges)
        start = Roots(no_leaves(roots), gradients, leaves, checkpoints, reach)
        self._run(context, plan, start, timeout, retain_graph, create_graph, into_grad)

    def grad(
        self,
        context_id: int,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        grad_outputs: Sequence[Gradient] | None,
        retain_graph: bool,
        create_graph: bool,
        timeout: float | None,
    ) -> tuple[Gradient, ...]:
        """The gradients of the inputs, which are tensors of this worker. Nothing else is computed or kept."""
        context = self._contexts.get(context_id)
        edges, gradients = checked_roots(outputs, grad_outputs)
        with context.lock:
            reach, _, _ = context.graph.walk_once(edges)
        targets = {edge_of(tensor) for tensor in inputs}
        plan = self._planner.plan_for(context, reach, edges, targets)
        start = Roots(no_leaves(outputs), gradients, inputs=tuple(inputs))
        return self._run(context, plan, start, timeout, retain_graph, create_graph, False).results

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of this worker's leaves in a context, from all passes that are done."""
        context = self._contexts.get(context_id)
        self._settle(context)
        with context.lock:
            return context.gradients.copy()

    def update_gradient(
        self, context_id: int, leaf: torch.Tensor, callback: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        """Replaces a leaf's gradient by what the callback makes of it; None leaves it as it is."""
        context = self._contexts.get(context_id)
        self._settle(context)
        with context.lock:
            gradient = context.gradients.get(leaf)
        if gradient is None:
            raise GradientError("The grad for the variable should exist in dist_autograd context.")
        changed = callback(gradient)  # outside of the lock: it is the user's
        if changed is not None:
            with context.lock:
                context.gradients.replace(leaf, changed)

    def _settle(self, context: Context) -> None:
        """Passes that are done here but have not heard the root's last word are waited for: it is on its way."""
        for local in self._passes_of(context.id):
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
        self._wait(settled, sender_of(local.pass_id), serving.deadline if serving else local.deadline)

    def state_of(self, context_id: int, pass_id: int) -> PartState | None:
        """How far a pass is here, or was when it failed; None if nothing is known of it."""
        local, context = self._passes.get(pass_id), self._contexts.find(context_id)
        if local is not None:
            return local.describe()
        failed = None if context is None else context.failed
        return failed if failed is not None and failed.pass_id == pass_id else None

    def states_of(self, context_id: int) -> list[PartState]:
        """How far the passes of a context are here: those that run; with none, the last one if that has failed."""
        states = [local.describe() for local in self._passes_of(context_id)]
        context = self._contexts.find(context_id)
        if not states and context is not None and context.failed is not None:
            states.append(context.failed)
        return states

    def roots_of(self, context_id: int) -> list[torch.Tensor]:
        """What passes that run start from, if they were begun here."""
        return [root for local in self._passes_of(context_id) for root in local.roots.tensors]

    def statistics(self) -> dict[str, int]:
        contexts = self._contexts.all()
        return {
            "contexts": len(contexts),
            "passes": len(self._passes),
            "passes_begun_here": len(self._roots),
            "sends": sum(len(c.sends) for c in contexts),
            "received": sum(len(c.received) for c in contexts),
            "gradients": sum(len(c.gradients) for c in contexts),
            "log_entries": len(self._contexts.log),
        }

    @property
    def busy(self) -> int:
        """How many passes this worker takes part in now."""
        return len(self._passes)

    # -- a pass, at its root ---------------------------------------------------------------------------

    def _run(
        self,
        context: Context,
        plan: Plan,
        roots: Roots,
        timeout: float | None,
        retain_graph: bool,
        create_graph: bool,
        into_grad: bool,
    ) -> LocalPass:
        pass_id = self.host.new_message_id()
        serving = current.current_serving()
        deadline = None if timeout is None else time.monotonic() + timeout

        def begin_for(worker: int) -> Begin:
            wanted = None if plan.wanted is None else plan.wanted.get(worker, ())
            sends = plan.sends.get(worker, ())
            return Begin(
                pass_id,
                context.id,
                sends,
                timeout,
                retain_graph,
                create_graph,
                into_grad,
                wanted,
                current_modes(),
            )

        root = _Root(BackwardPass(self._id, plan.sends))
        local = LocalPass(pass_id, self._around, Part(is_root=True))
        local.context, local.begin, local.roots = context, begin_for(self._id), roots
        local.deadline, local.depth = deadline, serving.depth + 1 if serving else 1
        with self._lock:
            if self._closed:
                raise NotStartedError(f"worker {self._name!r} has shut down")
            self._roots[pass_id], self._passes[pass_id] = root, local
        if (
            self._contexts.find(context.id) is None
        ):  # it has ended since; from here on its end would end the pass
            with self._lock:
                self._roots.pop(pass_id, None)
                self._passes.pop(pass_id, None)
            self._contexts.get(context.id)
        others = [worker for worker in plan.sends if worker != self._id]
        inside = torch._C._current_graph_task_id() >= 0
        watch = local.watch = self.host.watch(others[0]) if others and not inside else None
        try:
            for worker in others:
                self._begin_at(worker, root, begin_for(worker), local.depth)
            first = local.on(lambda part: part.on_begin(self._messages_of(local)))
            if inside:
                # Never inside of another engine call: its thread would work off nodes of this one.
                self.host.submit(partial(self._carry_out, local, first))
            else:
                local.on_own_thread = True
                self._carry_out(local, first)
            self._wait(root.waiter, others[0] if others else self._id, deadline, watch)
            if not root.waiter.done:
                self._carry_out_root(pass_id, root, root.on(partial(_fail, error=self._late(root, timeout))))
            self._finish(pass_id, root)
        except BaseException as error:
            self._carry_out_root(pass_id, root, root.on(partial(_fail, error=error)))
            self._finish(pass_id, root)  # all had reported when it came
            if not isinstance(error, Exception):
                raise
            if root.error is None:  # it came after all were done
                root.error, root.worker = error, self._id
        finally:
            if watch is not None:
                watch.end()
            with self._lock:
                self._roots.pop(pass_id, None)
        if root.error is not None:
            self._raise(root, local)
        return local

    def _finish(self, pass_id: int, root: _Root) -> None:
        """Says the last word, if all have reported; once."""
        with root.lock:
            finishing, root.finishing = root.finishing, []
        self._carry_out_root(pass_id, root, finishing)

    def _begin_at(self, worker: int, root: _Root, begin: Begin, depth: int) -> None:
        context = self._contexts.find(begin.context)
        if context is not None:
            context.known_workers.add(worker)  # it may have been reached through another context
        envelope = Envelope(Kind.BEGIN, self.host.new_message_id(), 0, begin.timeout, depth)
        try:
            self.host.post(worker, envelope, begin, begin.timeout, None)
        except PeerLostError as lost:
            error = lost
            self._carry_out_root(begin.pass_id, root, root.on(lambda state: state.on_lost(worker, error)))

    def _late(self, root: _Root, timeout: float | None) -> CallTimeoutError:
        missing = sorted(self.host.name_of(worker) for worker in root.state.missing)
        return CallTimeoutError(
            f"the backward pass ran for more than set timeout ({int((timeout or 0) * 1000)} ms); "
            f"workers {missing} are not done"
        )

    def _messages_of(self, local: LocalPass) -> set[int]:
        """The messages that this worker has sent and whose gradients will come."""
        begin, context = local.begin, local.context
        assert begin is not None
        assert context is not None
        return {self._contexts.find_sent(context, id).message for id in begin.sends}

    def _awaited(self, root: _Root, local: LocalPass) -> str:
        """What a pass awaited that failed because of a peer: as its participants say, or at least as is known here."""
        error, context_id = root.error, local.context_id
        if not isinstance(error, PeerLostError | CallTimeoutError):
            return ""
        lost = {error.worker_id} if isinstance(error, PeerLostError) else set()
        missing = root.state.missing - lost
        others = missing - {self._id}
        answers, _ = self.host.ask(others, state_here, (context_id, local.pass_id), _ASKING)
        own = local.context.failed if local.context is not None else None
        if own is not None and own.pass_id != local.pass_id:
            own = None
        states = [s for s in (own, *answers.values()) if s is not None and s.worker in missing]
        silent = others - {state.worker for state in states}
        return explain(states, lost=lost, silent=silent, name_of=self.host.name_of)

    def _raise(self, root: _Root, local: LocalPass) -> None:
        error, worker = root.error, root.worker
        assert error is not None
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, PeerLostError) and error.worker_id >= 0:
            worker = error.worker_id  # whoever noticed it
        name = self.host.name_of(worker)
        text = f"Error on Node {worker}: {text_of(error)} (worker {name!r}, in a backward pass)"
        if awaited := self._awaited(root, local):
            text = f"{text}. {awaited}"
        raise BackwardError(text, name, worker) from error

    def _carry_out_root(self, pass_id: int, root: _Root, instructions: list[RootInstruction]) -> None:
        local = self._passes.get(pass_id)
        for instruction in instructions:
            match instruction:
                case Finish(workers):
                    try:  # the others first: adding this worker's gradients up may fail
                        self._tell_end(pass_id, workers, "")
                    finally:
                        if local is not None:
                            self._end_here(local, "")
                case Abort(workers, reason):
                    if local is not None:
                        self._end_here(local, reason)
                    # Not by this thread: a worker that takes nothing must not hold up the error.
                    self.host.submit(partial(self._tell_end, pass_id, workers, reason))
                case Complete(error, worker):
                    root.error, root.worker = error, worker
                    root.waiter.set_done()
                case Late(what):
                    logger.info("worker %r: %s came after the end of pass %d", self._name, what, pass_id)

    def _tell_end(self, pass_id: int, workers: Sequence[int], aborted: str) -> None:
        left = list(workers)
        try:
            while left:
                self._tell(left[0], Kind.END, End(pass_id, aborted))
                left.pop(0)
        except BaseException:  # Ctrl-C: whoever was not told yet must hear of it all the same
            if left:
                self.host.submit(partial(self._tell_end, pass_id, left, aborted))
            raise

    def _tell(self, worker: int, kind: Kind, body: End | Release, timeout: float | None = 1.0) -> None:
        """Says something that nobody answers. Whoever is gone needs not hear it; who does not take it now hears it
        later."""
        try:
            self.host.post(worker, Envelope(kind, self.host.new_message_id()), body, timeout, None)
        except TimeoutError:
            self.host.submit(partial(self._tell, worker, kind, body, None))
        except TelegradError as error:
            logger.debug("worker %d was not told %s: %s", worker, body, error)

    # -- a pass, as one of its workers -----------------------------------------------------------------

    def on_message(self, peer: int, envelope: Envelope, frames: Any) -> Task | None:
        """A message of a pass has come. Called while reading: what takes longer is returned."""
        if envelope.kind == Kind.GRADIENTS:
            return self._on_gradients(peer, envelope, frames)
        match self.host.open_control(envelope, frames):
            case Begin() as begin:
                return self._on_begin(begin, envelope.depth)
            case Done(pass_id, failure):
                return self._on_done(peer, pass_id, failure)
            case End(pass_id, aborted):
                return self._on_end(pass_id, aborted)
            case Release(context_id):
                return partial(self._on_release, context_id, peer)
        return None

    def _local(self, pass_id: int) -> LocalPass | None:
        """This worker's part in a pass; None if that is over."""
        with self._lock:
            if pass_id in self._over or self._closed:
                return None
            local = self._passes.get(pass_id)
            if local is None:
                local = self._passes[pass_id] = LocalPass(pass_id, self._around, Part())
            return local

    def _on_begin(self, begin: Begin, depth: int) -> Task | None:
        local = self._local(begin.pass_id)
        context = self._contexts.get_or_make(begin.context)
        if local is None or context is None:
            logger.info("the begin of pass %d came after the end of it or its context", begin.pass_id)
            return None
        local.context, local.begin, local.depth = context, begin, depth
        local.root_name = self.host.name_of(sender_of(begin.pass_id))
        if begin.timeout is not None:
            local.deadline = time.monotonic() + begin.timeout + _GRACE
        try:
            messages = self._messages_of(local)
        except GradientError as error:
            return self._later(local, local.on(partial(_fail_part, error=error)))
        return self._later(local, local.on(lambda part: part.on_begin(messages)))

    def _on_gradients(self, peer: int, envelope: Envelope, frames: Any) -> Task | None:
        pass_id = envelope.autograd.during if envelope.autograd is not None else 0
        local = self._local(pass_id)
        if local is None:
            logger.info(
                "the gradients of message %d came after the end of pass %d", envelope.reply_to, pass_id
            )
            return None
        task = self._later(local, local.keep(envelope.reply_to, (envelope, frames)))
        if envelope.autograd is not None and envelope.autograd.done:
            self._on_done(peer, pass_id, None)
        return task

    def _on_done(self, peer: int, pass_id: int, failure: Failure | None) -> Task | None:
        root = self._roots.get(pass_id)
        if root is None:
            logger.info("the report of worker %d came after the end of pass %d", peer, pass_id)
            return None
        if failure is None:
            self._on_success(root, peer)
            return None
        return partial(self._on_failed, peer, pass_id, root, failure)

    def _on_success(self, root: _Root, worker: int) -> None:
        """The thread that waits for the pass says the last word itself: backward() returns after it."""
        with root.lock:  # whoever finds the pass over must also find what is left to do
            instructions = root.on(lambda state: state.on_report(worker, None))
            if instructions:
                root.finishing = instructions
        if instructions:
            root.waiter.set_done()

    def _on_failed(self, peer: int, pass_id: int, root: _Root, failure: Failure) -> None:
        error = self.host.decode_error(failure, self.host.name_of(peer))  # which may run users' code
        self._carry_out_root(pass_id, root, root.on(lambda state: state.on_report(peer, error)))

    def _on_end(self, pass_id: int, aborted: str) -> Task | None:
        local = self._passes.get(pass_id)
        if local is None:
            with self._lock:
                self._bury_locked(pass_id)
            return None
        return self._later(local, local.on(lambda part: part.on_end(aborted)), aborted)

    def _end_here(self, local: LocalPass, aborted: str) -> None:
        self._carry_out(local, local.on(lambda part: part.on_end(aborted)), aborted)

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
        return partial(self._carry_out, local, rest) if rest else None

    def _on_settled(self, local: LocalPass) -> None:
        if local.part.is_over:
            with local.lock:
                settled = local.settled
            if settled is not None:
                settled.set_done()

    def _carry_out(self, local: LocalPass, instructions: list[PartInstruction], reason: str = "") -> None:
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
        except InterruptedPassError as interrupted:
            # Whoever ended the pass has said why; this is heard only if nobody has.
            error = interrupted
            if (
                isinstance(interrupted, LatePassError)
                and (root := self._roots.get(local.pass_id)) is not None
            ):
                error = self._late(root, local.begin.timeout if local.begin else None)
        except BaseException as raised:
            error = raised
        if running is not None:
            running.end()
        self._carry_out(local, local.on(lambda part: part.on_local_end(error)))

    def _report(self, local: LocalPass, error: BaseException | None) -> None:
        root_id = sender_of(local.pass_id)
        if root_id == self._id:
            root = self._roots.get(local.pass_id)
            if root is not None and error is None:
                self._on_success(root, root_id)
            elif root is not None:
                self._carry_out_root(
                    local.pass_id, root, root.on(lambda state: state.on_report(root_id, error))
                )
            return
        try:
            if error is None and local.last is not None:
                last, local.last = local.last, None
                self._post_gradients(local, *last, done=True)
            else:
                self._post_done(local, root_id, error)
        except PeerLostError as lost:
            logger.info("the root of pass %d is gone: %s", local.pass_id, lost)
            self._end_here(local, "its root is gone")
        except Exception as failed:
            if error is not None:
                raise
            reason = failed
            self._carry_out(local, local.on(lambda part: part.on_local_end(reason)))
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

    # -- what a running pass needs ---------------------------------------------------------------------

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

    def _wait(self, waiter: Waiter, peer: int, deadline: float | None, watch: Any = None) -> None:
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
        left = None if local.deadline is None else max(0.0, local.deadline - time.monotonic())
        post = partial(self.host.post, sender_of(message), envelope, Gradients(gradients), left, tracked)
        if done or sum(map(_size_of, gradients)) < SHARED_MEMORY_FROM:
            post()
        else:
            self.host.submit(partial(self._post_later, local, post))

    def _post_later(self, local: LocalPass, post: Task) -> None:
        try:
            post()
        except Exception as error:
            failed = error
            self._carry_out(local, local.on(lambda part: part.on_local_end(failed)))

    # -- ends ------------------------------------------------------------------------------------------

    def _passes_of(self, context_id: int) -> list[LocalPass]:
        with self._lock:
            return [p for p in self._passes.values() if p.context is not None and p.context.id == context_id]

    def release(self, context_id: int, *, told_by: int | None = None, tell: bool = True) -> set[int]:
        """Ends a context here, and tells the workers that it was sent to. Returns them: without `tell`, they are
        left to the caller."""
        context = self._contexts.take_out(context_id)
        if context is None:
            return set()
        others = context.known_workers - {told_by, self._id, context.owner}
        for worker in others if tell else ():
            self.tell_released(worker, context_id)
        self._end_passes_of(context)
        return others

    def tell_released(self, worker: int, context_id: int) -> None:
        """Tells a worker that a context has ended."""
        if worker != self._id:
            self._tell(worker, Kind.RELEASE, Release(context_id))

    def _on_release(self, context_id: int, told_by: int) -> None:
        self.release(context_id, told_by=told_by)

    def _end_passes_of(self, context: Context) -> None:
        ended = UnknownContextError(f"context {context.id} ended while its backward pass ran")
        for local in self._passes_of(context.id):
            root = self._roots.get(local.pass_id)
            if root is not None:
                self._carry_out_root(local.pass_id, root, root.on(partial(_fail, error=ended)))
            else:
                self._end_here(local, str(ended))

    def on_lost(self, peer: int, name: str, reason: str) -> None:
        """A worker is gone: passes that need it fail, its own passes and contexts end."""
        lost = PeerLostError(f"worker {name!r} is gone: {reason}")
        lost.worker_id = peer
        with self._lock:
            roots, passes = list(self._roots.items()), list(self._passes.values())
        for pass_id, root in roots:
            self._carry_out_root(pass_id, root, root.on(lambda state: state.on_lost(peer, lost)))
        for local in passes:
            if sender_of(local.pass_id) == peer:
                self._end_here(local, f"its root, worker {name!r}, is gone")
            elif peer in local.awaited_from.values() and not local.part.is_root:
                # The root will know as well, but perhaps not as soon.
                self._carry_out(local, local.on(partial(_fail_part, error=lost)))
        for context in self._contexts.of_owner(peer):
            self.release(context.id, told_by=peer)

    def tick(self) -> None:
        """Now and then: forgets gradients whose pass never began."""
        before = time.monotonic() - _EARLY
        with self._lock:
            old = [p for p in self._passes.values() if p.part.state is State.EARLY and p.since < before]
        for local in old:
            logger.warning("pass %d never began here; gradients for it are dropped", local.pass_id)
            self._end_here(local, "it never began here")

    def close(self) -> None:
        """This worker shuts down: everything ends."""
        with self._lock:
            self._closed = True
            roots, passes = list(self._roots.items()), list(self._passes.values())
        ended = NotStartedError(f"worker {self._name!r} was shut down during a backward pass")
        for pass_id, root in roots:
            self._carry_out_root(pass_id, root, root.on(partial(_fail, error=ended)))
        for local in passes:
            self._end_here(local, str(ended))
        for context in self._contexts.all():
            self._contexts.take_out(context.id)


def _size_of(gradient: Gradient) -> int:
    if gradient is None:
        return 0
    return gradient.nbytes if gradient.layout is torch.strided else SHARED_MEMORY_FROM


def _fail(state: BackwardPass, *, error: BaseException) -> list[RootInstruction]:
    return state.on_failure(error)


def _fail_part(part: Part, *, error: BaseException) -> list[PartInstruction]:
    return part.on_local_end(error)
