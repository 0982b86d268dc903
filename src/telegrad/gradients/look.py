"""A look at what the roots of a backward() lead to, before anything of it runs.

torch walks a graph in C++ when an engine call begins, much faster than Python could, and a graph that Python has not
walked over is freed as torch does best (see deep.py). So after the first few nodes torch is asked, by a node that runs
first in an engine call: which of the received tensors are in its graph? If one is, the node raises, and nothing else of
the call is run. If none is,

    run_unless_received   the call goes on, and is the backward() itself
    find_received_among   nothing else was to run: for calls that have `inputs`, or nodes on devices, which torch runs
                          on other threads at the same time
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import COMPILED_AUTOGRAD, bind_apply, current_graph_task_id, run_backward, will_engine_execute
from .local_graph import Edge, Node, find_any_received
from .nodes import drop_leftovers, make_first

_FEW = 8  # nodes; for more it is quicker to ask torch
_MANY = 16_384  # nodes; Python can look at so many
_PER_CANDIDATE = 4  # so much quicker is it to ask torch for one received tensor than to look at a node
_ONE = torch.ones((), device="cpu")


class _Thread(threading.local):
    candidates: Sequence[Node] = ()
    found: Node | None = None


_thread = _Thread()


class _FoundError(Exception):
    """Inside the engine: nothing else is to be run."""


def _ask(gradients: Any) -> Any:
    """Runs before the first node of an engine call."""
    candidates, _thread.candidates = _thread.candidates, ()
    for node in candidates:
        if will_engine_execute(node):
            _thread.found = node
            raise _FoundError
    return (None,)  # nothing is behind it


_FIRST = make_first(_ask)


class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *roots: torch.Tensor) -> torch.Tensor:
        ctx.materialize_grads = False
        return _ONE.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _ask(None)
        raise _FoundError  # none, in fact


_node: Any = Look._backward_cls
_node.apply = Look.backward  # see nodes.py
_apply = bind_apply(None, Look)


def _can_ask() -> bool:
    """Whether an engine call can be begun that ends at its first node. Inside of another one it would work off nodes of
    that; anomaly mode would report the error; compiled autograd would compile it."""
    return current_graph_task_id() < 0 and not torch.is_anomaly_enabled() and COMPILED_AUTOGRAD not in sys.modules


def _look_at_few(edges: Sequence[Edge], candidates: Sequence[Node]) -> tuple[Node | None, bool]:
    most = min(max(_FEW, len(candidates) // _PER_CANDIDATE), _MANY) if _can_ask() else 1 << 62
    return find_any_received(edges, most)


def run_unless_received(
    run: Callable[..., Any], roots: Sequence[torch.Tensor], gradients: Sequence[Any], args: tuple[Any, ...],
    candidates: Sequence[Node],
) -> tuple[Node | None, Any]:  # fmt: skip
    """Runs an engine call from these roots, which have a history, if they lead to none of these Recvs: (None, what it
    returns). Else (one of them, None)."""
    found, is_more = _look_at_few([(root.grad_fn, root.output_nr) for root in roots], candidates)
    if found is not None:
        return found, None
    if not is_more:
        return None, run(tuple(roots), tuple(gradients), *args)
    _thread.candidates = candidates
    try:
        return None, run((_FIRST, *roots), (_ONE, *gradients), *args)
    except _FoundError:
        drop_leftovers()
        return _thread.found, None
    finally:
        _thread.found, _thread.candidates = None, ()


def find_received_among(roots: Sequence[torch.Tensor], candidates: Sequence[Node]) -> Node | None:
    """Returns one of these Recvs that the roots, which have a history, lead to; None if there is none."""
    found, is_more = _look_at_few([(root.grad_fn, root.output_nr) for root in roots], candidates)
    if not is_more:
        return found
    with torch.enable_grad():
        token = _apply(*roots)
    _thread.candidates = candidates
    try:
        run_backward((token,), (_ONE,), True, False, (), True, True)
    except _FoundError:
        pass
    finally:
        found, _thread.found, _thread.candidates = _thread.found, None, ()
    return found
