"""The passes that were begun on this worker: begins them everywhere, waits for all reports, and says the last word.

    run       Begin to each participant, this worker's own part, End to each of them
    on_done   a participant is done, or has failed: the pure state (backward_pass.py) says what that means

The engine call of a pass runs on the thread that has called backward(); never inside of another engine call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .._torch import current_graph_task_id
from ..errors import BackwardError, CallTimeoutError, PeerLostError, text_of
from ..events import logger
from ..messages import Begin, End, Envelope, Failure, Kind, Member
from ..primitives import clock, current
from ..primitives.waiter import Waiter
from .backward_pass import Abort, BackwardPass, Complete, Finish, Late, RootInstruction
from .contexts import Context, Contexts
from .diagnosis import explain, state_here
from .host import Host, Task, disbelieve, tell
from .local_pass import LatePassError, LocalPass, Roots
from .participant import Parts
from .plan import Plan
from .torch_modes import current_modes

_ASKING = 0.5  # seconds in which participants say what a failed pass awaited


@dataclass(frozen=True)
class How:
    """What whoever begins a pass has said of it."""

    retain_graph: bool
    create_graph: bool
    into_grad: bool
    timeout: float | None  # None: no limit


@dataclass(eq=False)
class RootedPass:
    """A pass that was begun here."""

    id: int
    state: BackwardPass
    # Guards `state`. Threads that read take it: held for a moment only.
    lock: Any = field(default_factory=threading.RLock)
    waiter: Waiter = field(default_factory=Waiter)
    # Left to the thread that waits for the pass:
    finishing: list[RootInstruction] = field(default_factory=list)
    error: BaseException | None = None
    worker: int = -1  # where the error happened

    def on(self, event: Callable[[BackwardPass], list[RootInstruction]]) -> list[RootInstruction]:
        with self.lock:
            return event(self.state)


class RootedPasses:
    """Of one worker, whose parts `parts` has."""

    host: Host

    def __init__(self, member: Member, contexts: Contexts, parts: Parts) -> None:
        self._id = member.id
        self._name = member.name
        self._contexts = contexts
        self._parts = parts
        self._roots: dict[int, RootedPass] = {}  # by id; its single operations are atomic
        parts.report_here = self._on_report_here

    def __len__(self) -> int:
        return len(self._roots)

    def run(self, context: Context, plan: Plan, roots: Roots, how: How) -> LocalPass:
        """Runs a pass to its end on every worker. Returns this worker's part.

        Raises:
            BackwardError: it failed.
            UnknownContextError: the context has ended.
            NotStartedError: this worker has shut down.
        """
        pass_id = self.host.new_message_id()
        root = RootedPass(pass_id, BackwardPass(self._id, plan.sends))
        self._roots[pass_id] = root
        try:
            try:
                local = self._own_part(root, context, plan, roots, how)
                self._run_everywhere(root, local, plan, how)
            finally:
                self._roots.pop(pass_id, None)
            if root.error is not None:
                self._raise(root, local)
            return local
        finally:
            root.error = None  # its traceback may have frames with the pass: only the collector would find them

    def _own_part(self, root: RootedPass, context: Context, plan: Plan, roots: Roots, how: How) -> LocalPass:
        local = self._parts.new_of_root(root.id)
        serving = current.current_serving()
        local.context, local.begin, local.roots = context, _begin(root, context, plan, how, self._id), roots
        local.deadline = None if how.timeout is None else clock.now() + how.timeout
        local.depth = serving.depth + 1 if serving else 1
        self._parts.add(local)
        if root.state.is_over:  # it failed before its part was there to be ended
            self._parts.end(local, "it has failed")
        return local

    def _run_everywhere(self, root: RootedPass, local: LocalPass, plan: Plan, how: How) -> None:
        context = local.context
        assert context is not None
        others = [worker for worker in plan.sends if worker != self._id]
        inside = current_graph_task_id() >= 0
        watch = local.watch = self.host.watch(others[0]) if others and not inside else None
        try:
            for worker in others:
                self._begin_at(worker, root, _begin(root, context, plan, how, worker), local.depth)
            first = local.on(lambda part: part.on_begin(self._parts.messages_of(local)))
            if inside:
                # Never inside of another engine call: its thread would work off nodes of this one.
                self.host.submit(partial(self._parts.carry_out, local, first))
            else:
                local.on_own_thread = True
                self._parts.carry_out(local, first)
            self._parts.wait(root.waiter, others[0] if others else self._id, local.deadline, watch)
            if not root.waiter.done:
                self._fail(root, self._late(root, how.timeout))
            self._finish(root)
        except BaseException as error:
            self._fail(root, error)
            self._finish(root)  # all had reported when it came
            if not isinstance(error, Exception):
                raise
            if root.error is None:  # it came after all were done
                root.error, root.worker = error, self._id
        finally:
            if watch is not None:
                watch.end()

    def _finish(self, root: RootedPass) -> None:
        """Says the last word, if all have reported; once."""
        with root.lock:
            finishing, root.finishing = root.finishing, []
        self._carry_out(root, finishing)

    def _begin_at(self, worker: int, root: RootedPass, begin: Begin, depth: int) -> None:
        context = self._contexts.find(begin.context)
        if context is not None:
            context.known_workers.add(worker)  # it may have been reached through another context
        envelope = Envelope(Kind.BEGIN, self.host.new_message_id(), 0, begin.timeout, depth)
        try:
            self.host.post(worker, envelope, begin, begin.timeout, None)
        except PeerLostError as lost:
            error = lost
            self._carry_out(root, root.on(lambda state: state.on_lost(worker, error)))

    def _late(self, root: RootedPass, timeout: float | None) -> CallTimeoutError:
        missing = sorted(self.host.name_of(worker) for worker in root.state.missing)
        return CallTimeoutError(
            f"the backward pass ran for more than set timeout ({int((timeout or 0) * 1000)} ms); "
            f"workers {missing} are not done"
        )

    def _awaited(self, root: RootedPass, local: LocalPass) -> str:
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

    def _raise(self, root: RootedPass, local: LocalPass) -> None:
        error, worker = root.error, root.worker
        assert error is not None
        if not isinstance(error, Exception):
            try:
                raise error
            finally:
                del error
        if isinstance(error, PeerLostError) and error.worker_id >= 0:
            worker = error.worker_id  # whoever noticed it
        name = self.host.name_of(worker)
        text = f"Error on Node {worker}: {text_of(error)} (worker {name!r}, in a backward pass)"
        if awaited := self._awaited(root, local):
            text = f"{text}. {awaited}"
        raise BackwardError(text, name, worker) from error

    def _carry_out(self, root: RootedPass, instructions: list[RootInstruction]) -> None:
        local = self._parts.find(root.id)
        for instruction in instructions:
            match instruction:
                case Finish(workers):
                    try:  # the others first: adding this worker's gradients up may fail
                        self._tell_end(root.id, workers, "")
                    finally:
                        if local is not None:
                            self._parts.end(local, "")
                case Abort(workers, reason):
                    if local is not None:
                        self._parts.end(local, reason)
                    # Not by this thread: a worker that takes nothing must not hold up the error.
                    self.host.submit(partial(self._tell_end, root.id, workers, reason))
                case Complete(error, worker):
                    root.error, root.worker = error, worker
                    root.waiter.set_done()
                case Late(what):
                    logger.info("%s came after the end of pass %d", what, root.id)

    def _tell_end(self, pass_id: int, workers: Sequence[int], aborted: str) -> None:
        left = list(workers)
        try:
            while left:
                tell(self.host, left[0], Kind.END, End(pass_id, aborted))
                left.pop(0)
        except BaseException:  # Ctrl-C: whoever was not told yet must hear of it all the same
            if left:
                self.host.submit(partial(self._tell_end, pass_id, left, aborted))
            raise

    # -- reports ---------------------------------------------------------------------------------------

    def on_done(self, peer: int, pass_id: int, failure: Failure | None) -> Task | None:
        """A participant has reported. While reading: what may run users' code is returned."""
        root = self._roots.get(pass_id)
        if root is None:
            logger.info("the report of worker %d came after the end of pass %d", peer, pass_id)
            return None
        if peer not in root.state.others:
            name = self.host.name_of(peer)
            disbelieve(self._name, name, peer, f"a report of pass {pass_id}, which it has no part in")
            return None
        if failure is None:
            self._on_success(root, peer)
            return None
        return partial(self._on_failed, peer, root, failure)

    def _on_report_here(self, local: LocalPass, error: BaseException | None) -> None:
        """This worker's own part is done, or has failed."""
        root = self._roots.get(local.pass_id)
        if root is None:
            return
        if error is None:
            self._on_success(root, self._id)
            return
        if isinstance(error, LatePassError):
            error = self._late(root, local.begin.timeout if local.begin is not None else None)
        # Of any other interrupted pass, whoever ended it has said why: this is heard only if nobody has.
        reason = error
        self._carry_out(root, root.on(lambda state: state.on_report(self._id, reason)))

    def _on_success(self, root: RootedPass, worker: int) -> None:
        """The thread that waits for the pass says the last word itself: backward() returns after it."""
        with root.lock:  # whoever finds the pass over must also find what is left to do
            instructions = root.on(lambda state: state.on_report(worker, None))
            if instructions:
                root.finishing = instructions
        if instructions:
            root.waiter.set_done()

    def _on_failed(self, peer: int, root: RootedPass, failure: Failure) -> None:
        error = self.host.decode_error(failure, self.host.name_of(peer))  # which may run users' code
        self._carry_out(root, root.on(lambda state: state.on_report(peer, error)))

    # -- ends ------------------------------------------------------------------------------------------

    def fail(self, pass_id: int, error: BaseException) -> bool:
        """Ends a pass with an error; False if it was not begun here."""
        root = self._roots.get(pass_id)
        if root is not None:
            self._fail(root, error)
        return root is not None

    def fail_all(self, error: BaseException) -> None:
        for root in list(self._roots.values()):
            self._fail(root, error)

    def _fail(self, root: RootedPass, error: BaseException) -> None:
        self._carry_out(root, root.on(lambda state: state.on_failure(error)))

    def on_lost(self, peer: int, lost: PeerLostError) -> None:
        """A worker is gone: the passes that need it fail."""
        for root in list(self._roots.values()):
            self._carry_out(root, root.on(lambda state: state.on_lost(peer, lost)))


def _begin(root: RootedPass, context: Context, plan: Plan, how: How, worker: int) -> Begin:
    return Begin(
        root.id,
        context.id,
        plan.sends.get(worker, ()),
        how.timeout,
        how.retain_graph,
        how.create_graph,
        how.into_grad,
        None if plan.wanted is None else plan.wanted.get(worker, ()),
        current_modes(),
    )
