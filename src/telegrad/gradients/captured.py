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
from functools import partial
from itertools import islice, repeat
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .._torch import run_backward, set_grad_enabled
from .averaged import averaged
from .leaves import GradientTable, Leaf, own
from .node_hooks import have_no_hooks


class Captured:
    """What the engine captures in one engine call: the gradients of these leaves."""

    __slots__ = ("_leaves", "inputs")

    def __init__(self, nodes: Iterable[Any], leaves: list[Leaf]) -> None:
        self._leaves = leaves
        self.inputs = edges_to(nodes)

    @classmethod
    def of(cls, nodes: Iterable[Any]) -> Captured | None:
        """Makes one for these AccumulateGrad nodes; None if something looks on that would not run."""
        leaves: list[Leaf] = [*map(_leaf_of, nodes)]
        if averaged.data and any(leaf in averaged for leaf in leaves):
            return None
        return cls(nodes, leaves) if have_no_hooks(nodes, leaves) else None

    def add_to(self, table: GradientTable, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adds what the engine has returned, which may be more than these leaves' gradients: they come first."""
        leaves, free = self._leaves, _free_references()
        looks = _look_at(gradients, len(leaves))  # first: to name a gradient is to hold it
        shared: set[int] = set()
        if len(leaves) > 1:
            seen: set[int] = set()
            for _, memory in looks:
                (shared if memory in seen else seen).add(memory)
            shared.discard(0)
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            for leaf, gradient, (counts, memory) in zip(leaves, gradients, looks, strict=False):
                if gradient is not None and leaf.requires_grad:  # it may have been frozen since its forward
                    table.add(leaf, own(gradient, leaf, counts == free and memory not in shared))
        finally:
            set_grad_enabled(before)


_leaf_of = attrgetter("variable")
_edge: Any = partial(tuple.__new__, GradientEdge)  # that of a NamedTuple is Python code


def edges_to(nodes: Iterable[Any]) -> list[GradientEdge]:
    """Returns the edges that lead to nodes with one input."""
    return [*map(_edge, zip(nodes, repeat(0)))]


def edges_behind(nodes: Iterable[Any]) -> list[GradientEdge]:
    """Returns the first of the edges that leave each node."""
    return [_edge(node.next_functions[0]) for node in nodes]


# Note [captured gradients that are held elsewhere]
# A captured gradient is kept without a copy if nothing else holds it, as AccumulateGrad would. Its counts of references
# say so, as in Note [gradients that are held elsewhere] in leaves.py. But the counts are read when the engine call is
# over: of two gradients in one memory, as those of x and y in x + y.view(-1) are, AccumulateGrad finds the first one
# held by the other, and copies it. Here each may be held once. So those that share their memory are copied.


_Look = tuple[tuple[int, int] | None, int]


def _look_at(gradients: Sequence[torch.Tensor | None], count: int) -> list[_Look]:
    """Counts how often each of the first of what the engine has returned is held, in torch and in Python; and says what
    is the same for gradients in one memory, of which none holds another: 0 for one that has no memory of its own."""
    looks: list[_Look] = []
    for gradient in islice(gradients, count):
        if gradient is None:
            looks.append((None, 0))
            continue
        counts = (gradient._use_count(), getrefcount(gradient))  # type: ignore[attr-defined]
        memory = 0
        if gradient.layout is torch.strided:
            if type(gradient) is torch.Tensor and not gradient._is_view():
                memory = gradient.data_ptr()
            else:
                memory = gradient.untyped_storage()._cdata
        looks.append((counts, memory))
    return looks


@functools.cache
def _free_references() -> tuple[int, int] | None:
    """Measures the counts of a gradient that nothing else holds; None if they are not to be relied on."""
    kept: list[Any] = []

    def measure(loss: torch.Tensor, *, keep: bool = False) -> tuple[int, int] | None:
        node: Any = loss.grad_fn
        if keep:
            node.register_hook(lambda inputs, outputs: kept.append(inputs))
        edges = edges_to([next for next, _ in node.next_functions if next is not None])
        found = run_backward((loss,), (one.new_ones(1),), False, False, tuple(edges), True, False)
        return _look_at(found, 1)[0][0]

    one = torch.ones((), device="cpu")
    with torch.enable_grad(), torch.inference_mode(False):
        a, b = (one.new_zeros(1).requires_grad_() for _ in range(2))
        free = measure(a * 2)
        held = (measure(a * 2, keep=True), measure(a + b))
        is_reliable = free == measure(b * 2) and free not in held
    return free if is_reliable else None
