"""Walks over this worker's part of the graph: which received tensors does an edge lead to, and which leaves are there?

A walk remembers the answer for every node that it came through, so that many Sends over one history cost one
walk. The answer is a small set, however long the history is: where it would grow beyond a few members, a group
takes their place (see dependency_log.py). Of leaves it is enough to know all: a pass does not touch those that it does
not come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from .nodes import AccumulateGrad, CheckpointNode, RecvNode

Node = Any  # torch.autograd.graph.Node, but with what its kinds have besides
Edge = tuple[Node, int]  # a node, and which of its inputs
Reach = frozenset[int]  # ids of received tensors, and of groups of them

NOTHING: Reach = frozenset()
_FEW = 8


class Graph(msgspec.Struct, eq=False):
    """The findings of all walks so far. `new_group` gives a group its id."""

    new_group: Callable[[Reach], int]
    # Where an edge leads nowhere, torch has None for the node. (partial is no Python code.)
    known: dict[Node, Reach] = msgspec.field(default_factory=partial(dict, ((None, NOTHING),)))
    leaves: list[Node] = msgspec.field(default_factory=list)  # AccumulateGrad nodes
    checkpoints: list[Node] = msgspec.field(default_factory=list)  # reentrant ones, which run an engine call of theirs

    def walk(self, starts: Iterable[Edge]) -> Reach:
        """Returns what the edges lead to together."""
        known = self.known
        reach = NOTHING
        for node, _ in starts:
            found = known.get(node)
            if found is None:
                found = self._visit(node)
            reach = self._union(reach, found) if reach else found
        return reach

    def walk_once(self, starts: Iterable[Edge]) -> tuple[Reach, list[Node], list[Node]]:
        """Does the same, but remembers nothing new. Returns also the leaves and checkpoints that are new."""
        known, nodes, leaves, checkpoints = self.known, len(self.known), len(self.leaves), len(self.checkpoints)
        reach = self.walk(starts)
        found = reach, self.leaves[leaves:], self.checkpoints[checkpoints:]
        del self.leaves[leaves:], self.checkpoints[checkpoints:]
        while len(known) > nodes:
            known.popitem()  # in this order: see clear()
        return found

    def clear(self) -> None:
        # What was found last goes first. The other way round torch would free a deep graph by recursion, and overflow
        # the stack.
        known = self.known
        while len(known) > 1:
            known.popitem()
        self.leaves.clear()
        self.checkpoints.clear()

    def _visit(self, node: Node) -> Reach:
        """Finds what a node leads to, and all nodes behind it."""
        kind = node.__class__
        if kind is AccumulateGrad or kind is RecvNode:
            if kind is RecvNode:
                reach = self.known[node] = frozenset((node.id,))
                return reach
            self.leaves.append(node)
            self.known[node] = NOTHING
            return NOTHING
        # Depth first, with a path of our own: graphs are deeper than Python's stack. This loop is hot: down as long as
        # there is something unknown, then up as long as there is not.
        known = self.known
        path: list[Node] = []
        edges: list[Any] = []  # of the nodes on the path
        while True:
            if not node._sequence_nr():
                node._set_sequence_nr(1)  # see Note [why a Wait has sequence number 0]
            nexts = node.next_functions
            while True:
                reach = NOTHING
                for next, _ in nexts:
                    found = known.get(next)
                    if found is None:
                        kind = next.__class__
                        if kind is RecvNode:
                            found = frozenset((next.id,))
                        elif kind is AccumulateGrad:
                            self.leaves.append(next)
                            found = NOTHING
                        else:
                            break
                        known[next] = found
                    if found is not reach:
                        reach = self._union(reach, found) if reach else found
                else:
                    known[node] = reach
                    if node.__class__ is CheckpointNode:
                        self.checkpoints.append(node)
                    if not path:
                        return reach
                    node = path.pop()
                    nexts = edges.pop()
                    continue
                break
            path.append(node)
            edges.append(nexts)
            node = next

    def _union(self, a: Reach, b: Reach) -> Reach:
        if b <= a:
            return a
        if a <= b:
            return b
        both = a | b
        return both if len(both) <= _FEW else frozenset((self.new_group(both),))


def leads_to(start: Node, targets: set[tuple[Node, int]], known: dict[Node, bool]) -> bool:
    """Says whether a node leads to one of these edges. `known` is what was found before for the same targets."""
    stack: list[tuple[Node, bool]] = [(start, False)]
    while stack:
        node, visited = stack.pop()
        if node in known and not visited:
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if not visited:
            known[node] = False  # the graph has no cycles: this is not read before it is known
            stack.append((node, True))
            stack.extend((next, False) for next, _ in edges if next not in known)
        else:
            known[node] = any(edge in targets or known[edge[0]] for edge in edges)
    return known[start]


def find_received(starts: Iterable[Edge], id: int) -> Node | None:
    """Returns the Recv of a tensor, among all that the edges lead to. For an error's text: it looks at everything."""
    graph = Graph(lambda members: -1)
    graph.walk(starts)
    found = next((node for node in graph.known if type(node) is RecvNode and node.id == id), None)  # type: ignore[attr-defined]
    graph.clear()
    return found
