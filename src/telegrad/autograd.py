"""The public functions of gradients, with torch.distributed.autograd's names where it has them.

`loss.backward()` and torch.autograd.grad() find their way to other workers by themselves, and gradients are in `.grad`
where their leaves are. Contexts are for what should be kept apart: several trainers over the same parameters, gradients
of which all or none count, a time limit for each pass.

    with context() as context_id:
        loss = rpc_sync("worker", forward, args=(batch,)).sum()
        backward(context_id, [loss])
        gradients = get_gradients(context_id)

The functions act on the current worker: inside a call the one that serves it, else the one of init_rpc().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any

import torch

from ._torch import current_graph_task_id
from .errors import GradientError
from .gradients.contexts import Context
from .graph.gathering import gather
from .graph.graph import Graph
from .messages import COUNTER_BITS
from .primitives import current, interrupts
from .primitives.current import current_worker
from .primitives.interrupts import finaliser, in_finaliser
from .primitives.untraced import untraced, untraced_methods
from .runtime import profiled_calls
from .runtime.pending import effective_timeout
from .worker import Worker

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "debug_info",
    "enter",
    "get_gradients",
    "grad",
    "graph",
    "is_available",
    "update_gradient",
]


def is_available() -> bool:
    """Whether gradients can cross workers: always."""
    return True


@untraced_methods
class context:
    """One distributed forward pass and the backward passes over it.

    Gives the id by which gradients are asked for. Calls made inside take it along. Contexts nest; leaving the
    inner one makes the outer one current again. At its end everything that was kept for it goes, on every
    worker; with `wait=True` leaving it waits until that has happened everywhere.
    """

    _worker: Worker | None = None  # while it is entered

    def __init__(self, *, wait: bool = False) -> None:
        self._wait = wait

    def __enter__(self) -> int:
        worker = current_worker()
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            self._id = worker.new_context()
            self._token = current.context_id.set(self._id)
            self._worker = worker
        finally:
            thread.critical = before
        if interrupts.deferred and not before:
            try:
                interrupts.deliver()
            except BaseException:  # the block is not entered, so it is not left
                self.__exit__()
                raise
        return self._id

    def __exit__(self, *_: object) -> None:
        thread = current.thread
        before = thread.critical
        thread.critical = before + 1
        try:
            worker, self._worker = self._worker, None
            if worker is not None:
                try:
                    current.context_id.reset(self._token)
                finally:  # also where it is left on another thread than it was entered on, which is an error
                    worker.release_context(self._id, wait=self._wait)
        finally:
            thread.critical = before
            if interrupts.deferred and not before:
                interrupts.deliver()

    @finaliser
    def __del__(self) -> None:
        """Ends a context whose block was left by an interrupt before the first line of __exit__."""
        worker, self._worker = self._worker, None
        if worker is not None:
            if current.context_id.get() == self._id:
                before = self._token.old_value
                current.context_id.set(0 if before is Token.MISSING else before)
            worker.release_context_later(self._id)


@untraced_methods
class enter:
    """Makes a context current that was begun elsewhere: by another thread, or by a worker that has called here in it.

        with autograd.context() as context_id, ThreadPoolExecutor() as pool:
            def work(batch):
                with autograd.enter(context_id):
                    return rpc_sync("worker", forward, args=(batch,))
            results = list(pool.map(work, batches))

    Each thread has a current context of its own, and a new one has none. Callbacks of `Future.then` have that of the
    code that has added them. Leaving the block makes the one before current again; the context goes on. Gives its id.

    Raises:
        UnknownContextError: there is no such context here.
    """

    def __init__(self, context_id: int) -> None:
        self._id = context_id
        self._tokens: list[Token[int]] = []

    def __enter__(self) -> int:
        current_worker().contexts.get(self._id)
        entered, before = len(self._tokens), current.context_id.get()
        try:
            self._tokens.append(current.context_id.set(self._id))
            return self._id
        except BaseException:  # an interrupt: the block is not entered, so it is not left
            del self._tokens[entered:]
            current.context_id.set(before)
            raise

    def __exit__(self, *_: object) -> None:
        current.context_id.reset(self._tokens[-1])
        self._tokens.pop()


@untraced
def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[torch.Tensor | None] | None = None,
    create_graph: bool = False,
    timeout: float | None = None,
    into: str = "context",
) -> None:
    """Runs the backward pass from these roots, through every worker that took part in the forward pass.

    Args:
        roots: tensors of this worker; scalars, unless their gradients are given.
        retain_graph: keeps the graph for another pass.
        grad_tensors: the gradients of the roots; ones by default.
        create_graph: makes the gradients themselves differentiable, across workers too.
        timeout: seconds; Options.rpc_timeout by default; 0 means no limit.
        into: "context": the gradients are had by get_gradients(). "grad": they are added to `.grad` of each leaf,
            on the worker that owns it.

    Raises:
        UnknownContextError: there is no such context here, or a tensor was received in one that has ended.
        GradientError: the roots are not what is needed.
        BackwardError: the pass failed, here or on another worker, which it names. No gradient of it is kept
            anywhere. The exception from there is its `__cause__`.
    """
    if into not in ("context", "grad"):
        raise ValueError(f"into={into!r}; choose 'context' or 'grad'")
    if current.thread.critical:
        raise in_finaliser("autograd.backward()")
    worker = current_worker()
    tensors, given = _tensors(roots, "roots"), None if grad_tensors is None else list(grad_tensors)
    options = (_timeout(worker, timeout), bool(retain_graph), bool(create_graph), into == "grad")
    if profiled_calls.running:
        with profiled_calls.span(profiled_calls.BACKWARD):
            worker.engine.backward(context_id, tensors, given, None, options)
    else:
        worker.engine.backward(context_id, tensors, given, None, options)


@untraced
def grad(
    context_id: int,
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    timeout: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of outputs with respect to inputs, as torch.autograd.grad gives them; both are tensors of this
    worker, and what is between them may be anywhere. Stores nothing in the context, and runs only what leads to
    the inputs.

    Raises:
        GradientError: an input was not used, without `allow_unused`; or as for backward().
    """
    if current.thread.critical:
        raise in_finaliser("autograd.grad()")
    wanted = _tensors(inputs, "inputs")
    if not wanted:
        raise ValueError("`inputs` argument to `grad()` cannot be empty.")
    given = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else grad_outputs
    for place, tensor in enumerate(wanted):
        if not tensor.requires_grad:
            raise GradientError(f"One of the differentiated Tensors does not require grad (input {place})")
    worker = current_worker()
    retain_graph = create_graph if retain_graph is None else retain_graph
    options = (_timeout(worker, timeout), bool(retain_graph), bool(create_graph), False)
    given = None if given is None else list(given)
    found = worker.engine.backward(context_id, _tensors(outputs, "outputs"), given, wanted, options) or ()
    if not allow_unused and any(gradient is None for gradient in found):
        raise GradientError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            f"this is the desired behavior. (input {found.index(None)})"
        )
    return found


@untraced
def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of this worker's leaves in a context, by leaf. All passes of the context that are done count.

    Raises:
        UnknownContextError: there is no such context here.
    """
    return current_worker().engine.get_gradients(context_id)


@untraced
def update_gradient(
    context_id: int, tensor: torch.Tensor, callback: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Calls `callback` with the gradient of a leaf, and stores what it returns in its place (None: nothing).

    Raises:
        UnknownContextError: there is no such context here.
        GradientError: the leaf has no gradient in it.
    """
    current_worker().engine.update_gradient(context_id, tensor, callback)


@untraced
def graph(
    context_id: int, roots: torch.Tensor | Sequence[torch.Tensor] | None = None, *, timeout: float = 5.0
) -> Graph:
    """The distributed graph of a context, gathered from all workers that have a part of it: to inspect, and to see.

    It can be taken at any time, also while a pass runs or is stuck: then it shows which Send is awaited from whom. It
    keeps nothing alive. A worker that is gone is shown as gone.

    Args:
        roots: tensors of this worker that a backward pass would start from, the loss, say. The graph then has
            what leads to them, and what does not is grey.
        timeout: seconds that all others together have for their answers.

    Raises:
        UnknownContextError: there is no such context here.
        GradientError: a root does not require grad.
    """
    if timeout <= 0:
        raise ValueError(f"timeout={timeout}; workers need some time to answer")
    worker = current_worker()
    worker.contexts.get(context_id)
    given = [] if roots is None else _tensors(roots, "roots")
    for place, root in enumerate(given):
        if not root.requires_grad:
            raise GradientError(f"requires_grad not set on root (root {place})")
    return gather(worker, context_id, given, timeout)


def debug_info() -> dict[str, int]:
    """Counts of what this worker keeps for gradients."""
    return current_worker().engine.statistics()


# -- torch's private names, which programs and tests reach for ---------------------------------------------


class SendFunction:
    """The Sends of one message, as the one node that torch's is."""

    def __init__(self, next_functions: tuple[tuple[Any, int], ...]) -> None:
        self.next_functions = next_functions  # the edges to the tensors that were sent

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"


class DistAutogradContext:
    """A view of what this worker keeps for a context."""

    def __init__(self, found: Context) -> None:
        self._found = found

    def _context_id(self) -> int:
        return self._found.id

    def _send_functions(self) -> dict[int, SendFunction]:
        """By message."""
        edges: dict[int, list[Any]] = {}
        for sent in list(self._found.sends.values()):
            edges.setdefault(sent.message, []).append(sent.edge)
        return {message: SendFunction(tuple(of_message)) for message, of_message in edges.items()}

    def _recv_functions(self) -> dict[int, Any]:
        """By message."""
        return {node.message: node for node in list(self._found.received.values())}

    def _known_worker_ids(self) -> set[int]:
        return set(self._found.known_workers)


def _new_context() -> DistAutogradContext:
    worker = current_worker()
    found = worker.contexts.get(worker.new_context())
    _entered.set((*_entered.get(), current.context_id.set(found.id)))
    return DistAutogradContext(found)


def _release_context(context_id: int) -> None:
    worker = current_worker()
    worker.contexts.get(context_id)
    if current.context_id.get() == context_id and _entered.get():
        *before, token = _entered.get()
        current.context_id.reset(token)
        _entered.set(tuple(before))
    worker.release_context(context_id)


_entered: ContextVar[tuple[Token[int], ...]] = ContextVar("telegrad_entered", default=())


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(current_worker().contexts.get(context_id))


def _current_context() -> DistAutogradContext:
    found = current_worker().contexts.find(current.current_context_id())
    if found is None:
        raise GradientError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with dist_autograd.context() as context_id` to generate a valid context"
        )
    return DistAutogradContext(found)


def _is_valid_context(context_id: int) -> bool:
    return current_worker().contexts.find(context_id) is not None


def _get_max_id() -> int:
    """The highest id that a context of this worker can have."""
    return (current_worker().id + 1 << COUNTER_BITS) - 1


def _init(worker_id: int) -> None:
    """Nothing is to be done: a worker comes with its contexts."""


def _get_debug_info() -> dict[str, int]:
    """With exactly torch's keys."""
    counts = debug_info()
    return {"num_current_backward_passes": counts["passes"], "num_autograd_contexts": counts["contexts"]}


def _tensors(given: Any, what: str) -> list[torch.Tensor]:
    try:
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
    except TypeError:
        raise TypeError(f"incompatible function arguments: {what} must be tensors, not {given!r}") from None
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} must be tensors; number {place} is a {type(tensor).__name__}")
    return tensors


def _timeout(worker: Worker, timeout: float | None) -> float | None:
    serving = current.serving.get() if current_graph_task_id() < 0 else current.current_serving()
    if serving is None and timeout is None:
        return worker.options.rpc_timeout or None  # 0: no limit
    return effective_timeout(timeout, worker.options.rpc_timeout, serving.deadline if serving else None)
