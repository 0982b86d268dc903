"""A look at what the roots of a backward() lead to, before it starts.

torch walks a graph in C++ when an engine call begins, much faster than Python could; and a deep graph that Python has
walked overflows the stack when torch frees it (see tests/test_torch_facts.py). So after the first few nodes torch is
asked: an engine call is begun whose first node has the roots behind it. It asks which of the received tensors are in
the graph, and raises, so that nothing else of it is run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .._torch import bind_apply, current_graph_task_id, run_backward, will_engine_execute
from .local_graph import Node, find_any_received

_FEW = 8  # nodes; for more it is quicker to ask torch
_MANY = 16_384  # nodes; Python can look at so many
_PER_CANDIDATE = 4  # so much quicker is it to ask torch for one received tensor than to look at a node
_ONE = torch.ones(())


class _Thread(threading.local):
    candidates: Sequence[Node] = ()
    found: Node | None = None


_thread = _Thread()


class _LookedError(Exception):
    """Inside the engine: nothing else is to be run."""


class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *roots: torch.Tensor) -> torch.Tensor:
        ctx.materialize_grads = False
        return _ONE.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        for node in _thread.candidates:
            if will_engine_execute(node):
                _thread.found = node
                break
        raise _LookedError


_node: Any = Look._backward_cls
_node.apply = Look.backward  # see nodes.py
_apply = bind_apply(None, Look)


def find_received_among(roots: Sequence[torch.Tensor], candidates: Sequence[Node]) -> Node | None:
    """Returns one of these Recvs that the roots, which have a history, lead to; None if there is none."""
    edges = [(root.grad_fn, root.output_nr) for root in roots]
    ask = current_graph_task_id() < 0 and not torch.is_anomaly_enabled()  # which would report the error
    most = min(max(_FEW, len(candidates) // _PER_CANDIDATE), _MANY) if ask else 1 << 62
    found, is_more = find_any_received(edges, most)
    if not is_more:
        return found
    if torch.is_grad_enabled():
        token = _apply(*roots)
    else:
        with torch.enable_grad():
            token = _apply(*roots)
    _thread.candidates = candidates
    try:
        run_backward((token,), (_ONE,), True, False, (), True, True)
    except _LookedError:
        pass
    finally:
        found, _thread.found, _thread.candidates = _thread.found, None, ()
    return found
