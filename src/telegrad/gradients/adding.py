"""Adding to `.grad`, where several threads do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

import torch

from .._torch import current_graph_task_id, foreach_add_, run_backward
from ..primitives.torch_threads import prepared
from .node_hooks import have_no_hooks

# Two threads must never touch one leaf's `.grad` at the same time: not even to read it is safe in torch. Held for a
# moment only. Reentrant: a finaliser may run in it.
touching_grad = threading.RLock()

# Note [two that add to one leaf]
# A backward() of this process has torch add to `.grad`, under a lock that is the node's own. So while one runs, what
# other passes have for a leaf is added by the node, too: by an engine call that has nothing else in it. The hooks of
# the leaf would run again in it; so a leaf with hooks, or on a device, is left to the program, as among threads that
# change `.grad` themselves. An engine call that begins waits for the lock above, once: then those that add without a
# node are done, or will see it.
engine_calls: list[None] = []  # as many as there are engine calls of torch's own backward(): see seam.py


def can_go_by_node(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Says whether a leaf's node can add this to its `.grad`, and run no code of users."""
    return (
        leaf.is_cpu
        and leaf.requires_grad
        and not gradient.requires_grad
        and not leaf._backward_hooks
        and have_no_hooks((torch.autograd.graph.get_gradient_edge(leaf).node,), (leaf,))
    )


def add_by_nodes(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Adds gradients to their leaves' `.grad`."""
    if current_graph_task_id() >= 0:  # inside of an engine call, whose nodes this one would work off
        thread = threading.Thread(target=prepared(add_by_nodes, found), daemon=True)
        thread.start()
        thread.join()
        return
    edges = tuple(torch.autograd.graph.get_gradient_edge(leaf) for leaf, _ in found)
    run_backward(edges, tuple(gradient for _, gradient in found), False, False, (), True, True)


class Clearable:
    """A value that a Clear can name: it says whose gradients go."""

    params: list[torch.Tensor]


def clear(leaves: Iterable[torch.Tensor], set_to_none: bool = True) -> None:
    """Takes the gradients off, or replaces them by zeros."""
    with touching_grad:
        for leaf in leaves:
            leaf.grad = None if set_to_none or leaf.grad is None else torch.zeros_like(leaf.grad)


def _in_child() -> None:
    """In a fork: the threads that held it, or ran engine calls, are not there."""
    global touching_grad
    touching_grad = threading.RLock()
    engine_calls.clear()


os.register_at_fork(after_in_child=_in_child)


def accumulated(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Returns the sum, by AccumulateGrad's rules: into the old one where that can be, out of place for a gradient that
    is itself to be differentiated, and the dense term first in a mixed sum."""
    if old is None:
        return new
    if old.requires_grad or new.requires_grad:
        with torch.enable_grad():
            return old + new
    with torch.no_grad():
        if old.is_sparse and not new.is_sparse:
            return new + old
        if old.is_inference() and not torch.is_inference_mode_enabled():
            return old + new
        return old.add_(new)


class Sums:
    """Sums that `accumulated` would make in place, made together."""

    __slots__ = ("_new", "_old")

    def __init__(self) -> None:
        self._old: list[torch.Tensor] = []
        self._new: list[torch.Tensor] = []

    def take(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Takes on a sum into `old`; False if it can't be made with others."""
        if (
            old.requires_grad
            or new.requires_grad
            or type(old) is not torch.Tensor
            or type(new) is not torch.Tensor
            or old.layout is not torch.strided
            or new.layout is not torch.strided
            or old.is_inference()
        ):
            return False
        self._old.append(old)
        self._new.append(new)
        return True

    def add_up(self) -> None:
        if self._old:
            with torch.no_grad():
                foreach_add_(self._old, self._new)
