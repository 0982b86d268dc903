"""Leaf gradients by the engine's own capture: an engine call that is given the leaves as its inputs returns their
gradients, and no Python runs for a leaf while it works.

    Captured.of(nodes)   what the engine is given; None where it must come to the leaves' own nodes (leaves.py)
    gather(gradients)    makes a GradientTable of what it has returned

The engine runs the hooks of a tensor before it captures its gradient, but nothing that belongs to the leaf's node. So
leaves with post-accumulate hooks, with hooks on their nodes, or in a DistributedDataParallel go the other way, and with
them all leaves of their engine call: the engine captures for an engine call as a whole.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .._torch import run_backward
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

    def can_wait(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Says whether what the engine has returned can be gathered later, by any thread: on no device's stream, and
        without code of users."""
        kinds = {*map(type, gradients), *map(type, self._leaves)}
        return kinds <= _PLAIN and all(map(_is_cpu, self._leaves))

    def gather(self, gradients: Sequence[torch.Tensor | None], starts: Sequence[Any] = ()) -> GradientTable:
        """Returns a table of what the engine has returned, which may be more than these leaves' gradients: they come
        first. `starts` is what it began with, held until now: that may be a part of a message, and no leaf keeps it."""
        leaves, free = self._leaves, _free_references()
        counts, memories = _look_at(gradients, len(leaves))  # first: to name a gradient is to hold it
        shared: set[int] = set()
        if len(set(memories)) < len(memories):
            shared.update(memory for memory, times in Counter(memories).items() if memory and times > 1)
        pairs: list[tuple[Leaf, torch.Tensor]] = []
        for leaf, gradient, count, memory in zip(leaves, gradients, counts, memories, strict=False):
            if gradient is not None and leaf.requires_grad:  # it may have been frozen since its forward
                pairs.append((leaf, own(gradient, leaf, count == free and memory not in shared)))
        return GradientTable.of(pairs)


_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
_is_cpu = attrgetter("is_cpu")
_leaf_of = attrgetter("variable")
_new_edge: Any = tuple.__new__  # that of a NamedTuple is Python code


def edges_to(nodes: Iterable[Any]) -> list[GradientEdge]:
    """Returns the edges that lead to nodes with one input."""
    return [*map(_new_edge, repeat(GradientEdge), zip(nodes, repeat(0)))]


def edges_behind(nodes: Iterable[Any]) -> list[GradientEdge]:
    """Returns the first of the edges that leave each node."""
    return [_new_edge(GradientEdge, node.next_functions[0]) for node in nodes]


# Note [captured gradients that are held elsewhere]
# A captured gradient is kept without a copy if nothing else holds it, as AccumulateGrad would. Its counts of references
# say so, as in Note [gradients that are held elsewhere] in leaves.py. But the counts are read when the engine call is
# over: of two gradients in one memory, as those of x and y in x + y.view(-1) are, AccumulateGrad finds the first one
# held by the other, and copies it. Here each may be held once. So those that share their memory are copied.


_Counts = tuple[int, int] | None  # None of what is no gradient


def _look_at(gradients: Sequence[torch.Tensor | None], count: int) -> tuple[list[_Counts], list[int]]:
    """Counts how often each of the first of what the engine has returned is held, in torch and in Python; and says what
    is the same for gradients in one memory, of which none holds another: 0 for one that has no memory of its own."""
    counts: list[_Counts] = []
    memories: list[int] = []
    for gradient in islice(gradients, count):
        counts.append(None if gradient is None else (gradient._use_count(), getrefcount(gradient)))  # type: ignore[attr-defined]
        if type(gradient) is torch.Tensor and not gradient._is_view() and gradient.layout is torch.strided:
            memories.append(gradient.data_ptr())
        else:
            memories.append(_memory_of(gradient))
    return counts, memories


def _memory_of(gradient: torch.Tensor | None) -> int:
    if gradient is None or gradient.layout is not torch.strided:
        return 0
    memory: int = gradient.untyped_storage()._cdata
    return memory


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
