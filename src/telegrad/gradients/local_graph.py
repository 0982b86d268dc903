"""Walks over this worker's part of the graph: which received tensors does an edge lead to, and which leaves are there?

A walk remembers the answer for every node that it came through, so that many Sends over one history cost one
walk. The answer is a small set, however long the history is: where it would grow beyond a few members, a group
takes their place (see dependency_log.py). Of leaves it is enough to know all: a pass does not touch those that it does
not come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from . import deep
from .deep import BITS, HASH
from .nodes import AccumulateGrad, CheckpointNode, CopyNode, RecvNode
from .pasts import Member

Node = Any  # torch.autograd.graph.Node, but with what its kinds have besides
Edge = tuple[Node, int]  # a node, and which of its inputs
Reach = frozenset[Member]  # received tensors, and groups of them

NOTHING: Reach = frozenset()
_FEW = 8

# Note [marks]
# Outside of contexts a table of what walks have found would keep the graph, or lose what another Send could use. So it
# is kept on the nodes themselves. Not on all of them, since that is slow, but on those whose sequence numbers a hash
# picks out. A walk ends only if all paths come to marks, so neighbours are picked together: a slab that is longer than
# one step of a program cuts all paths through it. Slabs have two lengths; one in eight of each is picked.
_REACH = "telegrad"  # where a mark is, in the metadata of its node
_SHORT, _LONG = 6, 9  # slabs of 64 and 512 numbers
_PICKED = 1 << 29  # of 1 << 32
# Nodes: a walk that came to fewer leaves no marks. With each start there may be more.
_UNMARKED, _UNMARKED_OF_START = 64, 8


class Graph(msgspec.Struct, eq=False):
    """The findings of all walks so far. `new_group` gives a group its id."""

    new_group: Callable[[Reach], Member]
    # Where an edge leads nowhere, torch has None for the node. (partial is no Python code.)
    known: dict[Node, Reach] = msgspec.field(default_factory=partial(dict, ((None, NOTHING),)))
    leaves: list[Node] = msgspec.field(default_factory=list)  # AccumulateGrad nodes
    checkpoints: list[Node] = msgspec.field(default_factory=list)  # reentrant ones, which run an engine call of theirs
    marks: bool = False  # see Note [marks]
    is_complete: bool = True  # no walk has ended at a mark: all leaves and checkpoints are here
    sends: int = 0  # outside of contexts: those that still need this
    was_cleared: bool = False  # leaves may be missing

    def walk(self, starts: Iterable[Edge]) -> Reach:
        """Returns what the edges lead to together."""
        known = self.known
        reach = NOTHING
        for node, number in starts:
            found = known.get(node)
            if found is None:
                found = self.visit(node, number)
            reach = self._union(reach, found) if reach else found
        return reach

    def walk_once(self, starts: Iterable[Edge]) -> tuple[Reach, list[Node], list[Node]]:
        """Does the same, but remembers nothing new. Returns also the leaves and checkpoints that are new."""
        known, nodes, leaves, checkpoints = self.known, len(self.known), len(self.leaves), len(self.checkpoints)
        reach = self.walk(starts)
        new = self.leaves[leaves:], self.checkpoints[checkpoints:]
        del self.leaves[leaves:], self.checkpoints[checkpoints:]
        if len(known) - nodes > deep.DEEP:
            deep.brace(islice(known, nodes, None))
        while len(known) > nodes:
            known.popitem()
        return reach, *new

    def leave_marks(self, starts: int = 0) -> None:
        """Leaves what a walk from so many starts has found on nodes, and keeps no more of it than is needed."""
        known = self.known
        if len(known) > min(_UNMARKED + _UNMARKED_OF_START * starts, deep.DEEP):
            for node, reach in known.items():
                if node is not None:
                    number, kind = node._sequence_nr(), node.__class__
                    if (
                        (number >> _SHORT) * HASH & BITS < _PICKED or (number >> _LONG) * HASH & BITS < _PICKED
                    ) and kind is not AccumulateGrad:
                        node.metadata[_REACH] = reach
                    if number * HASH & BITS < deep.PICKED:
                        deep.put_break(node)
        self._forget()

    def clear(self) -> None:
        self.was_cleared = True
        if len(self.known) > deep.DEEP:
            deep.brace(self.known)
        self.known.clear()
        self.known[None] = NOTHING
        self.leaves.clear()
        self.checkpoints.clear()

    def _forget(self) -> None:
        self.known.clear()
        self.known[None] = NOTHING

    def visit(self, node: Node, number: int) -> Reach:
        """Finds what an edge leads to, and all nodes behind it. A Recv is not among the known nodes: it may give
        several tensors."""
        kind = node.__class__
        if kind is RecvNode:
            return frozenset((node.members[number],))
        if kind is AccumulateGrad:
            self.leaves.append(node)
            self.known[node] = NOTHING
            return NOTHING
        # Depth first, with a path of our own: graphs are deeper than Python's stack. This loop is hot.
        known, marks = self.known, self.marks
        found: Any = NOTHING  # of the node that was left last
        path: list[Any] = []  # nodes that were come through, each with its edges that are left, and what was found
        if not node._sequence_nr():
            node._set_sequence_nr(1)  # see Note [why a Wait has sequence number 0]
        edges = iter(node.next_functions)
        reach, many = NOTHING, None  # the second takes the place of the first where that grows
        while True:
            if found is not reach:
                if many is not None:
                    many.update(found)
                elif not reach:
                    reach = found
                elif not found <= reach:
                    reach = reach | found
                    if len(reach) > _FEW:
                        many = set(reach)
            for next, number in edges:
                found = known.get(next)
                if found is None:
                    kind = next.__class__
                    if kind is RecvNode:
                        found = frozenset((next.members[number],))
                    else:
                        if kind is AccumulateGrad:
                            self.leaves.append(next)
                            found = NOTHING
                        else:
                            number = next._sequence_nr()
                            if marks and (
                                (number >> _SHORT) * HASH & BITS < _PICKED or (number >> _LONG) * HASH & BITS < _PICKED
                            ):
                                found = next.metadata.get(_REACH)
                            if found is not None:
                                self.is_complete = False
                            else:
                                if not number:
                                    next._set_sequence_nr(1)
                                behind = next.next_functions
                                if kind is not CopyNode or behind[0][0].__class__ is not RecvNode:
                                    path.append((node, edges, reach, many))
                                    node, edges, reach, many = next, iter(behind), NOTHING, None
                                    found = NOTHING
                                    break
                                # A copy of what was received, of which there may be many.
                                copied, number = behind[0]
                                found = frozenset((copied.members[number],))
                        known[next] = found
                if found is not reach:
                    if many is not None:
                        many.update(found)
                    elif not reach:
                        reach = found
                    elif not found <= reach:
                        reach = reach | found
                        if len(reach) > _FEW:
                            many = set(reach)
            else:
                if many is not None:
                    reach = self._grouped(frozenset(many))
                known[node] = reach
                if node.__class__ is CheckpointNode:
                    self.checkpoints.append(node)
                if not path:
                    return reach
                found = reach
                node, edges, reach, many = path.pop()

    def _union(self, a: Reach, b: Reach) -> Reach:
        both = a if b <= a else a | b
        return both if len(both) <= _FEW else self._grouped(both)

    def _grouped(self, members: Reach) -> Reach:
        return frozenset((self.new_group(members),))


def leads_to(start: Node, targets: set[tuple[Node, int]], known: dict[Node, bool]) -> bool:
    """Says whether a node leads to one of these edges. `known` is what was found before for the same targets."""
    before = len(known)
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
    if len(known) - before > deep.DEEP:
        deep.brace(islice(known, before, None))
    return known[start]


def find_received(starts: Iterable[Edge], id: int) -> Node | None:
    """Returns the Recv of a tensor, among all that the edges lead to. For an error's text: it looks at everything."""
    waiting: list[Node] = [node for node, _ in starts if node is not None]
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        if node.__class__ is RecvNode and id in node.ids:
            break
        new = {next for next, _ in node.next_functions} - seen
        seen |= new
        waiting += new
    else:
        node = None
    if len(seen) > deep.DEEP:
        deep.brace(seen)
    return node


def find_any_received(starts: Iterable[Edge], most: int) -> tuple[Node | None, bool]:
    """Returns a Recv that the edges lead to; None if there is none, or none among so many nodes. Then the second says
    whether there are more. This loop is hot."""
    waiting = [node for node, _ in starts]
    seen = {None, *waiting}
    for node in waiting:
        if node.__class__ is RecvNode:
            return node, False
    while waiting:
        if len(seen) > most:
            break
        for next, _ in waiting.pop().next_functions:
            if next not in seen:
                kind = next.__class__
                if kind is RecvNode:
                    return next, False
                seen.add(next)
                if kind is not AccumulateGrad:
                    waiting.append(next)
    if len(seen) > deep.DEEP:
        deep.brace(seen)
    return None, bool(waiting)
