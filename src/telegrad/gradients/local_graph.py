"""Walks over this worker's part of the graph: which received tensors does an edge lead to, and which leaves are there?

A walk remembers the answer for every node that it came through, so that many Sends over one history cost one
walk. The answer is a small set, however long the history is: where it would grow beyond a few members, a group
takes their place (see dependency_log.py). Of leaves it is enough to know all: a pass does not touch those that it does
not come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .nodes import AccumulateGrad, CheckpointNode, RecvNode

Node = Any  # torch.autograd.graph.Node, but with what its kinds have besides
Edge = tuple[Node, int]  # a node, and which of its inputs
Reach = frozenset[int]  # ids of received tensors, and of groups of them

NOTHING: Reach = frozenset()
_FEW = 8


class Graph:
    """The findings of all walks so far. `new_group` gives a group its id."""

    __slots__ = ("_new_group", "checkpoints", "known", "leaves")

    def __init__(self, new_group: Callable[[Reach], int]) -> None:
        self._new_group = new_group
        self.known: dict[Node, Reach] = {None: NOTHING}  # where an edge leads nowhere, torch has None for the node
        self.leaves: list[Node] = []  # AccumulateGrad nodes
        self.checkpoints: list[Node] = []  # reentrant ones, which run an engine call of their own

    def walk(self, starts: Iterable[Edge]) -> Reach:
        """Returns what the edges lead to together."""
        known = self.known
        reach = NOTHING
        for node, _ in starts:
            if node not in known:
                self._visit(node)
            reach = self._union(reach, known[node])
        return reach

    def walk_once(self, starts: Iterable[Edge]) -> tuple[Reach, list[Node], list[Node]]:
        """Does the same, but remembers nothing new. Returns also the leaves and checkpoints that are new."""
        nodes, leaves, checkpoints = len(self.known), len(self.leaves), len(self.checkpoints)
        reach = self.walk(starts)
        found = reach, self.leaves[leaves:], self.checkpoints[checkpoints:]
        del self.leaves[leaves:], self.checkpoints[checkpoints:]
        self._forget_since(nodes)
        return found

    def clear(self) -> None:
        self._forget_since(1)
        self.leaves.clear()
        self.checkpoints.clear()

    def _forget_since(self, nodes: int) -> None:
        # What was found last goes first. The other way round torch would free a deep graph by recursion, and overflow
        # the stack.
        while len(self.known) > nodes:
            self.known.popitem()

    def _visit(self, node: Node) -> None:
        """Finds what a node leads to, and all nodes behind it."""
        if node.__class__ is AccumulateGrad or node.__class__ is RecvNode:
            self.known[node] = self._end(node)
            return
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
                        if kind is not AccumulateGrad and kind is not RecvNode:
                            break
                        found = known[next] = self._end(next)
                    if found is not reach:
                        reach = self._union(reach, found) if reach else found
                else:
                    known[node] = reach
                    if node.__class__ is CheckpointNode:
                        self.checkpoints.append(node)
                    if not path:
                        return
                    node = path.pop()
                    nexts = edges.pop()
                    continue
                break
            path.append(node)
            edges.append(nexts)
            node = next

    def _end(self, node: Node) -> Reach:
        """Returns what a leaf or a Recv leads to."""
        if node.__class__ is AccumulateGrad:
            self.leaves.append(node)
            return NOTHING
        return frozenset((node.id,))

    def _union(self, a: Reach, b: Reach) -> Reach:
        if b <= a:
            return a
        if a <= b:
            return b
        both = a | b
        return both if len(both) <= _FEW else frozenset((self._new_group(both),))


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
