"""Folds a graph: says which of its nodes are drawn as one, so that a picture can be read at once.

Sends are no items: they are the arrows. What is folded keeps the order of the computation, but for "groups" and
"workers", in which something may come before and after the same thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..gradients.snapshot import Leaf, Node, Operation, Recv, Root, Send

if TYPE_CHECKING:
    from .graph import Graph

Key = Hashable  # of a node: nodes of the same key are one item

DETAILS = ("nodes", "chains", "blocks", "groups", "workers")
_ENOUGH = {"chains": 40, "blocks": 60, "groups": 100}  # items that a picture of this detail may have
_CHAIN = 3  # nodes in a row that are drawn as one


@dataclass
class Item:
    """Nodes of one worker that are drawn as one, all of them active or none."""

    worker_id: int
    nodes: list[Node] = field(default_factory=list)

    @property
    def is_recv(self) -> bool:
        return all(isinstance(node, Recv) for node in self.nodes)

    @property
    def active(self) -> bool | None:
        return self.nodes[0].active if self.nodes else None


@dataclass
class Arrow:
    """Between two items: what is sent, or, with no Sends, what is used."""

    tail: int
    head: int
    active: bool | None
    sends: list[Send] = field(default_factory=list)

    @property
    def is_awaited(self) -> bool:
        return any(send.awaited for send in self.sends)


@dataclass(frozen=True)
class Picture:
    detail: str
    items: list[Item]
    arrows: list[Arrow]


def fold(graph: Graph, detail: str = "auto") -> Picture:
    """Folds the graph. "auto" takes the first detail from "chains" on that is small enough to be read.

    Raises:
        ValueError: there is no such detail.
    """
    if detail != "auto" and detail not in DETAILS:
        raise ValueError(f"detail={detail!r}; choose 'auto' or one of {', '.join(map(repr, DETAILS))}")
    links = _Links(graph)
    if detail != "auto":
        return _picture(links, detail)
    for each, enough in _ENOUGH.items():
        picture = _picture(links, each)
        if len(picture.items) <= enough and len(picture.arrows) <= 2 * enough:
            return picture
    return _picture(links, "workers")


class _Links:
    """The edges by node, without those between a Send and its Recv."""

    def __init__(self, graph: Graph) -> None:
        nodes = self.nodes = graph.nodes
        self.users: list[list[int]] = [[] for _ in nodes]
        self.used: list[list[int]] = [[] for _ in nodes]
        self.recv_of: dict[int, int] = {}  # by Send
        for tail, head in dict.fromkeys((edge.tail, edge.head) for edge in graph.edges):
            if isinstance(nodes[tail], Send):
                self.recv_of[tail] = head
            else:
                self.users[tail].append(head)
                self.used[head].append(tail)
        # Workers that told of nothing have only inferred ends, which are drawn as one.
        self.untold = {node.worker_id for node in nodes} - {part.id for part in graph.workers if part.status == "here"}


def _picture(links: _Links, detail: str) -> Picture:
    keys = _KEYS[detail](links)
    items: list[Item] = []
    place_of: dict[Key, int] = {}
    arrows: dict[Key, Arrow] = {}

    def item_of(place: int) -> int:
        """Returns the item of a node. A Send is in the item of what it sends, if its worker told of that."""
        if isinstance(links.nodes[place], Send) and links.used[place]:
            place = links.used[place][0]
        worker = links.nodes[place].worker_id
        key = ("untold", worker) if worker in links.untold else keys[place]
        if key not in place_of:
            place_of[key] = len(items)
            items.append(Item(worker))
        return place_of[key]

    def arrow(tail: int, head: int, active: bool | None, kind: Key) -> Arrow:
        return arrows.setdefault((tail, head, active, kind), Arrow(tail, head, active))

    for place, node in enumerate(links.nodes):
        if not isinstance(node, Send) or not links.used[place]:
            items[item_of(place)].nodes.append(node)
    for place, node in enumerate(links.nodes):
        if isinstance(node, Send):
            head = item_of(links.recv_of[place])
            arrow(item_of(place), head, node.active, ("sent", node.awaited)).sends.append(node)
        else:
            for used in links.used[place]:
                if (tail := item_of(used)) != (head := item_of(place)):
                    arrow(tail, head, node.active, "used")
    return Picture(detail, items, list(arrows.values()))


# -- how much is one: a key for each node; nodes of the same key are one item -------------------------------


def _by_node(links: _Links) -> list[Key]:
    return list(range(len(links.nodes)))


def _by_chain(links: _Links) -> list[Key]:
    """Operations in a row, each used by the next one only."""
    nodes, keys = links.nodes, _by_node(links)
    chains: dict[int, list[int]] = {}  # by the last of them
    for place, node in enumerate(nodes):  # what a node uses comes before it
        if isinstance(node, Operation):
            before = links.used[place][0] if len(links.used[place]) == 1 else -1
            follows = before in chains and len(links.users[before]) == 1 and nodes[before].active == node.active
            chains[place] = [*(chains.pop(before) if follows else ()), place]
    for last, chain in chains.items():
        for place in chain if len(chain) >= _CHAIN else ():
            keys[place] = ("chain", last)
    return keys


def _by_block(links: _Links) -> list[Key]:
    """All that is computed between the same messages. See Note [blocks]."""
    upstream, downstream = _messages_around(links)
    keys: list[Key] = _by_node(links)
    for place, node in enumerate(links.nodes):
        if isinstance(node, Operation):
            keys[place] = ("block", node.worker_id, upstream[place], downstream[place], node.active)
    _absorb(links, keys, lambda place: upstream[place] == 0)
    return keys


def _by_group(links: _Links) -> list[Key]:
    """Blocks of a worker that have the same operations, and send to and receive from the same workers."""
    keys = _by_block(links)
    blocks: dict[Key, list[int]] = {}
    for place, node in enumerate(links.nodes):
        if isinstance(node, Operation):
            blocks.setdefault(keys[place], []).append(place)
    for places in blocks.values():
        names = Counter(links.nodes[place].name for place in places)
        peers = frozenset(
            (type(node).__name__, node.peer_id)
            for place in places
            for other in (*links.used[place], *links.users[place])
            if isinstance(node := links.nodes[other], Send | Recv)
        )
        first = links.nodes[places[0]]
        key = ("group", first.worker_id, frozenset(names.items()), peers, first.active)
        for place in places:
            keys[place] = key
    for place, node in enumerate(links.nodes):
        if isinstance(node, Send):  # of what is only passed on
            keys[place] = ("sent", node.worker_id, node.peer_id, node.active, node.awaited)
    _absorb(links, keys, lambda place: isinstance(links.nodes[place], Leaf))
    return keys


def _by_worker(links: _Links) -> list[Key]:
    return [
        place if isinstance(node, Root) else ("worker", node.worker_id, node.active)
        for place, node in enumerate(links.nodes)
    ]


_KEYS: dict[str, Callable[[_Links], list[Key]]] = {
    "nodes": _by_node,
    "chains": _by_chain,
    "blocks": _by_block,
    "groups": _by_group,
    "workers": _by_worker,
}


# Note [blocks]
# A block is all operations of a worker that the same messages lead to, and that lead to the same messages. No way
# leads out of a block and back into it: whatever is on it would have the same messages around it, and be of the block.
# So blocks, like nodes, come one after the other. What depends on no message at all (a weight, its transpose) joins
# the only block that uses it.
def _messages_around(links: _Links) -> tuple[list[int], list[int]]:
    """For each node: the messages that lead to it, and those that it leads to, as sets of bits."""
    bits: dict[tuple[int, int], int] = {}
    upstream, downstream = [0] * len(links.nodes), [0] * len(links.nodes)

    def bit(worker: int, message: int) -> int:
        return 1 << bits.setdefault((worker, message), len(bits))

    for place, node in enumerate(links.nodes):
        if isinstance(node, Recv):
            upstream[place] = bit(node.worker_id, node.message)
        for used in links.used[place]:
            upstream[place] |= upstream[used]
    for place in range(len(links.nodes) - 1, -1, -1):
        node = links.nodes[place]
        if isinstance(node, Send):
            downstream[place] = bit(-1 - node.worker_id, node.message)
        elif isinstance(node, Root):
            downstream[place] = bit(-1, -1 - place)
        for used in links.used[place]:
            downstream[used] |= downstream[place]
    return upstream, downstream


def _absorb(links: _Links, keys: list[Key], may_join: Callable[[int], bool]) -> None:
    """Joins a node with the only item that uses it; leaves that have the same users, and Recvs that have."""
    nodes = links.nodes
    for place in range(len(nodes) - 1, -1, -1):
        node, users = nodes[place], [nodes[user] for user in links.users[place]]
        if isinstance(node, Send | Root):
            continue
        items = frozenset(keys[user] for user in links.users[place])
        is_hidden = all(isinstance(user, Operation) and user.active == node.active for user in users)
        if isinstance(node, Recv):
            keys[place] = ("received", node.worker_id, node.peer_id, items, node.active)
        elif is_hidden and len(items) == 1 and may_join(place):
            keys[place] = next(iter(items))
        elif isinstance(node, Leaf) and items:
            keys[place] = ("leaves", node.worker_id, items, node.active)
