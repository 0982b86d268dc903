"""Leaf gradients by the engine's own capture: an engine call that is given the leaves as its inputs returns their
gradients, and no Python runs for a leaf while it works.

    Captured.of(nodes)   what the engine is given; None where it must come to the leaves' own nodes (leaves.py)
    add_to(table, …)     what it has returned, as a GradientTable's own

The engine runs the hooks of a tensor before it captures its gradient, but nothing that belongs to the leaf's node. So
leaves with post-accumulate hooks, with hooks on their nodes, or in a DistributedDataParallel go the other way, and with
them all leaves of their engine call: the engine captures for an engine call as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import islice
from sys import getrefcount
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .._torch import run_backward, set_grad_enabled
from .averaged import averaged
from .leaves import GradientTable, Leaf, own
from .node_hooks import have_no_hooks

_new_edge: Any = tuple.__new__  # that of a NamedTuple is Python code


class Captured:
    """What the engine captures in one engine call: the gradients of these leaves."""

    __slots__ = ("_leaves", "inputs")

    def __init__(self, nodes: Iterable[Any], leaves: list[Leaf]) -> None:
        self._leaves = leaves
        self.inputs = edges_to(nodes)

    @classmethod
    def of(cls, nodes: Iterable[Any]) -> Captured | None:
        """Makes one for these AccumulateGrad nodes; None if something looks on that would not run."""
        leaves = [node.variable for node in nodes]
        if averaged.data and any(leaf in averaged for leaf in leaves):
            return None
        return cls(nodes, leaves) if have_no_hooks(nodes, leaves) else None

    def add_to(self, table: GradientTable, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adds what the engine has returned, which may be more than these leaves' gradients: they come first."""
        leaves, free = self._leaves, _free_references()
        held = [counts != free for counts in _references(gradients, len(leaves))]  # first: to name one is to hold it
        memories = [_memory_of(gradient) for gradient in islice(gradients, len(leaves))]
        seen: set[int] = set()
        shared = {memory for memory in memories if memory in seen or seen.add(memory)}  # type: ignore[func-returns-value]
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            for leaf, gradient, is_held, memory in zip(leaves, gradients, held, memories, strict=False):
                if gradient is not None and leaf.requires_grad:  # it may have been frozen since its forward
                    table.add(leaf, own(gradient, leaf, not (is_held or (memory and memory in shared))))
        finally:
            set_grad_enabled(before)


def edges_to(nodes: Iterable[Any]) -> list[GradientEdge]:
    """Returns the edges that lead to nodes with one input."""
    return [_new_edge(GradientEdge, (node, 0)) for node in nodes]


# Note [captured gradients that are held elsewhere]
# A captured gradient is kept without a copy if nothing else holds it, as AccumulateGrad would. Its counts of references
# say so, as in Note [gradients that are held elsewhere] in leaves.py. But the counts are read when the engine call is
# over: of two gradients in one memory, as those of x and y in x + y.view(-1) are, AccumulateGrad finds the first one
# held by the other, and copies it. Here each may be held once. So those that share their memory are copied.


def _references(gradients: Sequence[torch.Tensor | None], count: int) -> list[tuple[int, int] | None]:
    """Counts how often each of the first of what the engine has returned is held, in torch and in Python."""
    return [
        None if gradient is None else (gradient._use_count(), getrefcount(gradient))  # type: ignore[attr-defined]
        for gradient in islice(gradients, count)
    ]


def _memory_of(gradient: torch.Tensor | None) -> int:
    """Returns what is the same for gradients in one memory, of which none holds another; 0 for one that has no memory
    of its own."""
    if gradient is None or gradient.layout is not torch.strided:
        return 0
    if type(gradient) is torch.Tensor and not gradient._is_view():
        return gradient.data_ptr()
    return gradient.untyped_storage()._cdata  # type: ignore[no-any-return]


@functools.cache
def _free_references() -> tuple[int, int] | None:
    """Measures the counts of a gradient that nothing else holds; None if they are not to be relied on."""
    kept: list[Any] = []

    def measure(loss: torch.Tensor, *, keep: bool = False) -> tuple[int, int] | None:
        node: Any = loss.grad_fn
        if keep:
            node.register_hook(lambda inputs, outputs: kept.append(inputs))
        edges = edges_to([next for next, _ in node.next_functions if next is not None])
        return _references(run_backward((loss,), (one.new_ones(1),), False, False, tuple(edges), True, False), 1)[0]

    one = torch.ones((), device="cpu")
    with torch.enable_grad(), torch.inference_mode(False):
        a, b = (one.new_zeros(1).requires_grad_() for _ in range(2))
        free = measure(a * 2)
        held = (measure(a * 2, keep=True), measure(a + b))
        is_reliable = free == measure(b * 2) and free not in held
    return free if is_reliable else None
