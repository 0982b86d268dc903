"""Reentrant checkpoints in a pass.

Such a checkpoint's backward computes its forward again and runs an engine call of its own over that. The leaves it
comes to are known only then, and their gradients belong to the pass as well. So its function is wrapped: inside of a
pass, what it computed is walked, and its leaves are watched too, but for its own inputs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from . import nodes
from .leaves import Capture
from .local_graph import Graph

if TYPE_CHECKING:
    from .engine_call import EngineCall


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
        if call is not None and call.capture is not None and node is not None:
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            starts = [(t.grad_fn, 0) for t in found if isinstance(t, torch.Tensor) and t.grad_fn is not None]
            inputs = {id(a) for a in args if isinstance(a, torch.Tensor)}
            graph = Graph(lambda received: -1)
            graph.walk(starts)
            _watch(call, node, [leaf for leaf in graph.leaves if id(leaf.variable) not in inputs])
            graph.clear()
        return outputs

    recompute.__telegrad__ = True  # type: ignore[attr-defined]
    node.run_function = recompute


def _watch(call: EngineCall, node: Any, leaves: list[Any]) -> None:
    thread = threading.get_ident()
    assert call.capture is not None
    nested = Capture(lambda: threading.get_ident() == thread and nodes.running() is not call, shows=call.capture.shows)
    nested.gradients.replaced = dict(call.capture.gradients.replaced)
    nested.watch(leaves)

    def after(*_: Any) -> None:
        handle.remove()
        nested.close()
        assert call.capture is not None
        call.capture.gradients.take_over(nested.gradients)

    handle = node.register_hook(after)
