"""The seam: torch's own backward() and grad() find their way to other workers.

All of torch's Python reaches the engine through one attribute. While there is a worker that follows tensors outside of
contexts, an engine stands there that looks before it starts: do the roots lead to a received tensor? If so, the pass is
planned and run as autograd.backward() does it (engine.py). If not, it is torch's own affair.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from .._torch import ImperativeEngine, Variable, current_graph_task_id, is_batched, is_batched_by_autograd
from ..errors import GradientError
from ..primitives import clock, current
from ..primitives.interrupts import in_finaliser
from ..primitives.untraced import untraced
from . import adding, devices, nodes
from .local_graph import Node, find_any_received
from .look import find_received_among, run_unless_received
from .plan import edge_of

if TYPE_CHECKING:
    from .engine import Engine

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)
_engines: list[Engine] = []  # of the workers of this process that follow tensors; replaced as a whole


class PlainEngine(ImperativeEngine):
    """torch's engine, with a look at the roots."""

    def __init__(self, below: Any) -> None:
        super().__init__()
        self.below = below  # what was there before, and is asked for all that is not ours

    @untraced  # torch.compile must not look into what it runs
    def run_backward(
        self,
        tensors: Sequence[Any],
        grad_tensors: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        args = (keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)
        adding.engine_calls.append(None)  # see Note [two that add to one leaf]
        try:
            with adding.touching_grad:
                pass
            for engine in _engines:
                if engine.plain.received:
                    return self._run(tensors, grad_tensors, *args)
            run = self._run_below if current_graph_task_id() >= 0 else self.below.run_backward
            return run(tensors, grad_tensors, *args)
        finally:
            if adding.engine_calls:  # else this is a fork, made in a hook
                adding.engine_calls.pop()

    def _run_below(self, *args: Any) -> Any:
        if (call := nodes.running()) is not None and call.is_beside_devices():
            return devices.on_own_thread(partial(self.below.run_backward, *args))
        return self.below.run_backward(*args)

    def _run(
        self,
        tensors: Sequence[Any],
        grad_tensors: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        allow_unreachable: bool,
        accumulate_grad: bool,
    ) -> Any:
        """Does the same where received tensors live."""
        args = (keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)
        run = self._run_below
        recv: Node | None = None
        candidates = [node for engine in _engines if engine.plain.received for node in engine.plain.recvs()]
        if candidates:
            if inputs or torch.cuda.is_initialized() or not all(_is_inner(root) for root in tensors):
                recv = _find_received(tensors, candidates)
            else:
                recv, done = run_unless_received(run, tensors, grad_tensors, args, candidates)
                if recv is None:
                    return done
        if recv is None:
            return run(tensors, grad_tensors, *args)
        if any(is_batched(g) or is_batched_by_autograd(g) for g in grad_tensors if g is not None):
            raise GradientError(
                "is_grads_batched=True, or another transform, is not supported where the outputs depend on tensors "
                "received from other workers: ask for one gradient after the other, with retain_graph=True"
            )
        if not all(_requires_grad(tensor) for tensor in tensors):
            return run(tensors, grad_tensors, *args)  # which says what is wrong
        if current.thread.critical:
            raise in_finaliser("backward()")
        engine, serving = _engine_of(recv), current.current_serving()
        left = None
        if serving is not None and serving.deadline is not None:
            left = max(0.0, serving.deadline - clock.now())
        options = (left, bool(keep_graph), bool(create_graph), True)
        patience = engine.backward_timeout or None
        found = engine.backward(
            0, tensors, grad_tensors, inputs or None, options, accumulates=bool(accumulate_grad), patience=patience
        )
        if found is None:
            return run(tensors, grad_tensors, *args)
        if inputs and not accumulate_grad and not allow_unreachable and any(gradient is None for gradient in found):
            raise RuntimeError(_UNUSED)
        return found


def _is_inner(root: Any) -> bool:
    return isinstance(root, torch.Tensor) and root.grad_fn is not None


def _find_received(roots: Sequence[Any], candidates: Sequence[Node]) -> Node | None:
    """Returns a tensor's Recv that the roots lead to; None if there is none."""
    if any(isinstance(root, GradientEdge) for root in roots):
        edges = [edge_of(root) for root in roots if isinstance(root, GradientEdge) or root.grad_fn is not None]
        return find_any_received(edges, 1 << 62)[0]
    inner = [root for root in roots if root.grad_fn is not None]
    return find_received_among(inner, candidates) if inner else None


def _requires_grad(root: Any) -> bool:
    return hasattr(root, "node") or root.requires_grad


def _engine_of(recv: Node) -> Engine:
    """Returns the engine of the worker that has received a tensor."""
    for engine in _engines:
        if engine.plain.received.get(recv.ids[0]) is recv:
            return engine
    if not recv.context:
        raise GradientError(
            "a tensor was received from another worker by a worker of this process that has shut down: there is no way "
            "back to where it came from. Run backward() before shutdown(), or detach() what is kept"
        )
    current_one: Engine = current.current_worker().engine
    return current_one


_installed: PlainEngine | None = None
_changing = threading.RLock()  # guards the two for those that change them; a finaliser may run in it


def put(engine: Engine) -> None:
    """Has torch's backward() look for tensors that this worker has received."""
    global _engines, _installed
    with _changing:
        _engines = [*_engines, engine]
        if _installed is None:
            _installed = Variable._execution_engine = PlainEngine(Variable._execution_engine)


def remove(engine: Engine) -> None:
    """Undoes it; with the last of them torch's own engine is back. Any number of times."""
    global _engines, _installed
    with _changing:
        _engines = [other for other in _engines if other is not engine]
        # If another engine was put over ours, ours stays below it, and hands everything on.
        if not _engines and _installed is not None and Variable._execution_engine is _installed:
            Variable._execution_engine, _installed = _installed.below, None


def _in_child() -> None:
    """In a fork: its workers are those of another process."""
    global _engines, _changing
    _engines, _changing = [], threading.RLock()


os.register_at_fork(after_in_child=_in_child)
