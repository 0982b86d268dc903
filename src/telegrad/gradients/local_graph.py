"""Walks over this worker's part of the graph: which received tensors, and which leaves, does an edge lead to?

A walk remembers the answer for every node that it came through, so that many Sends over one history cost one
walk. Both answers are small sets, however long the history is: where one would grow beyond a few members, a
group takes their place (see log.py; for leaves it is a `Leaves`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .nodes import AccumulateGrad, CheckpointNode, RecvNode

Node = Any  # torch.autograd.graph.Node, but with what its kinds have besides
Edge = tuple[Node, int]  # a node, and which of its inputs

_FEW = 8


class Reach(NamedTuple):
    """What a node leads to."""

    received: frozenset[int]  # ids of received tensors, and of groups of them
    leaves: frozenset[Any]  # AccumulateGrad nodes, and groups of them (Leaves)
    checkpoints: frozenset[
        Any
    ]  # nodes of reentrant checkpoints, which run an engine call of their own, and groups


_NO_IDS: frozenset[int] = frozenset()
_NO_NODES: frozenset[Any] = frozenset()
NOTHING = Reach(_NO_IDS, _NO_NODES, _NO_NODES)

Known = dict[Node, Reach | list[Reach]]  # of a Recv, for each of its tensors


class Leaves:
    """A group of nodes."""

    __slots__ = ("members",)

    def __init__(self, members: frozenset[Any]) -> None:
        self.members = members


def walk(starts: Iterable[Edge], known: Known, new_group: Callable[[frozenset[int]], int]) -> Reach:
    """What the edges lead to together. `known` is what earlier walks found, and gets what this one finds."""
    reach = NOTHING
    for node, number in starts:
        if node is None:
            continue
        if node not in known:
            _visit(node, known, new_group)
        found = known[node]
        reach = _union(reach, found[number] if found.__class__ is list else found, new_group)  # type: ignore[arg-type]
    return reach


def _visit(start: Node, known: Known, new_group: Callable[[frozenset[int]], int]) -> None:
    # Depth first with a stack of our own: graphs are deeper than Python's.
    stack: list[tuple[Node, Any]] = [(start, None)]
    while stack:
        node, nexts = stack.pop()
        if nexts is None:
            if node in known:
                continue
            kind = type(node)
            if kind is AccumulateGrad:
                known[node] = Reach(_NO_IDS, frozenset((node,)), _NO_NODES)
                continue
            if kind is RecvNode:
                known[node] = [Reach(frozenset((id,)), _NO_NODES, _NO_NODES) for id in node.ids]
                continue
            if node._sequence_nr() == 0:
                node._set_sequence_nr(1)  # see Note [why a Wait has sequence number 0]
            nexts = node.next_functions
            missing = [next for next, _ in nexts if next is not None and next not in known]
            if missing:
                stack.append((node, nexts))
                for next in missing:
                    stack.append((next, None))
                continue
        reach = NOTHING
        for next, number in nexts:
            if next is not None:
                found = known[next]
                if found.__class__ is list:
                    found = found[number]
                if found is not reach:
                    reach = found if reach is NOTHING else _union(reach, found, new_group)  # type: ignore[assignment,arg-type]
        if type(node) is CheckpointNode:
            reach = _union(reach, Reach(_NO_IDS, _NO_NODES, frozenset((node,))), new_group)
        known[node] = reach


def _union(a: Reach, b: Reach, new_group: Callable[[frozenset[int]], int]) -> Reach:
    if b is a or b is NOTHING:
        return a
    if a is NOTHING:
        return b
    received, leaves, checkpoints = a
    if not b.received <= received:
        received = received | b.received
        if len(received) > _FEW:
            received = frozenset((new_group(received),))
    if not b.leaves <= leaves:
        leaves = _grouped(leaves | b.leaves)
    if not b.checkpoints <= checkpoints:
        checkpoints = _grouped(checkpoints | b.checkpoints)
    if received is a.received and leaves is a.leaves and checkpoints is a.checkpoints:
        return a
    return Reach(received, leaves, checkpoints)


def _grouped(nodes: frozenset[Any]) -> frozenset[Any]:
    return nodes if len(nodes) <= _FEW else frozenset((Leaves(nodes),))


def members(groups: Iterable[frozenset[Any]]) -> list[Node]:
    """The nodes in these sets and in the groups among them, each once."""
    found: dict[Node, None] = {}
    seen: set[Leaves] = set()
    waiting = list(groups)
    while waiting:
        for node in waiting.pop():
            if type(node) is not Leaves:
                found[node] = None
            elif node not in seen:
                seen.add(node)
                waiting.append(node.members)
    return list(found)


def leads_to(start: Node, targets: set[tuple[Node, int]], known: dict[Node, bool]) -> bool:
    """Whether a node leads to one of these edges. `known` is what was found before for the same targets."""
    stack: list[tuple[Node, bool]] = [(start, False)]
    while stack:
        node, visited = stack.pop()
        if node in known and not visited:
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if not visited:
            known[node] = False  # the graph has no cycles: nobody asks before it is known
            stack.append((node, True))
            stack.extend((next, False) for next, _ in edges if next not in known)
        else:
            known[node] = any(edge in targets or known[edge[0]] for edge in edges)
    return known[start]


def find_received(starts: Iterable[Edge], id: int) -> Node | None:
    """The Recv of a tensor, among all that the edges lead to. For an error's text: it looks at everything."""
    waiting = [node for node, _ in starts if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if type(node) is RecvNode and id in node.ids:  # type: ignore[attr-defined]
            return node
        for next, _ in node.next_functions:
            if next is not None and next not in seen:
                seen.add(next)
                waiting.append(next)
    return None
