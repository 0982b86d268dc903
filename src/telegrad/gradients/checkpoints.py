"""Reentrant checkpoints in a pass.

Such a checkpoint's backward computes its forward again and runs an engine call of its own over that. The leaves it
comes to are known only then, and their gradients belong to the pass as well. So its function is wrapped: inside of a
pass, what it computed is walked, and its leaves are watched too, but for its own inputs; and so on for the checkpoints
in there.

A call to another worker inside of such a checkpoint is followed outside of contexts: the checkpoint's own engine call
is a pass of its own then, begun on this worker. It is done when the checkpoint is, and what it has added to `.grad`
stays there if the pass around it fails. (With use_reentrant=False there is one pass, and all or nothing.)

An engine call is known by torch's number for it, which the first of its nodes that runs finds out: a leaf on a device
runs on another thread than the checkpoint.

Beside devices a checkpoint that the thread of the pass comes to runs on a thread of its own: see devices.py.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._torch import current_graph_task_id
from ..primitives import current
from . import devices, nodes
from .leaves import Capture
from .local_graph import Graph

_nested: dict[int, Nested] = {}  # by torch's number of the engine call, while it runs


class Nested(Capture):
    """Takes the gradients of the leaves of a checkpoint's own engine call, for the call around it."""

    def __init__(self, around: Capture, roots: Sequence[Any]) -> None:
        super().__init__(self._is_running, around.take, shows=around.shows)
        self.gradients.replaced = dict(around.gradients.replaced)
        self.task = -1
        self._around = around
        for root in roots:
            self.at_close(root.register_prehook(self.begin).remove)
        around.at_close(self.close)  # where the checkpoint fails

    def _is_running(self) -> bool:
        return bool(current_graph_task_id() == self.task)

    def watch_averaged(self, together: dict[int, Tensor]) -> None:
        self._around.watch_averaged(together)  # the average is there when the outermost engine call ends

    def begin(self, *_: Any) -> None:
        """Runs before each root of the engine call."""
        if self.task < 0:
            self.task = current_graph_task_id()
            _nested[self.task] = self

    def end(self, *_: Any) -> None:
        """Runs after the checkpoint."""
        self.close()
        self._around.take_over(self)

    def close(self) -> None:
        _nested.pop(self.task, None)
        super().close()
        self._is_ours = _never  # what it was refers to this: only the collector would find the two


def _never() -> bool:
    return False


class _Apart(threading.local):
    around: Capture | None = None  # of the pass that this thread runs a checkpoint for


_apart = _Apart()


def watch_checkpoint(node: Any) -> None:
    """Has the pass that comes to this node take the gradients of the leaves that it comes to inside of it."""
    function = node.run_function
    if hasattr(function, "__telegrad__"):
        return
    own_node = weakref.ref(node)

    @functools.wraps(function)
    def recompute(*args: Any) -> Any:
        outputs = function(*args)
        call, node = nodes.running(), own_node()
        around = call.capture if call is not None else _nested.get(current_graph_task_id(), _apart.around)
        if around is not None and node is not None:
            _watch(around, node, args, (outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
        return outputs

    recompute.__telegrad__ = True  # type: ignore[attr-defined]
    node.run_function = recompute
    node.apply = functools.partial(_apply, own_node)


def _apply(own_node: weakref.ref[Any], *gradients: Any) -> Any:
    """Runs the backward of a checkpoint, in place of the node's own method."""
    node, call = own_node(), nodes.running()
    assert node is not None
    apply = functools.partial(type(node).apply, node, *gradients)
    if call is None or not call.is_beside_devices():
        return apply()
    return devices.on_own_thread(functools.partial(_apply_apart, apply, call.capture, node.preserve_rng_state))


def _apply_apart(apply: Callable[[], Any], around: Capture | None, preserves: bool) -> Any:
    _apart.around = around
    if preserves:
        current.recomputes.set(current.process_id)  # calls on this thread are not made inside of torch's engine
    return apply()


def _watch(around: Capture, node: Any, args: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    roots = [t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None]
    inputs = {id(a) for a in args if isinstance(a, Tensor)}
    graph = Graph(lambda received: -1)
    graph.walk((root, 0) for root in roots)
    nested = Nested(around, roots)
    nested.watch(leaf for leaf in graph.leaves if id(leaf.variable) not in inputs)
    for inner in graph.checkpoints:
        watch_checkpoint(inner)
    nested.at_close(node.register_hook(nested.end).remove)
    graph.clear()
