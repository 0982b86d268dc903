"""Walks over one worker's graph: what a node leads to, against brute force."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from telegrad.gradients.contexts import Contexts
from telegrad.gradients.local_graph import NOTHING, find_received, leads_to, members, walk
from telegrad.gradients.nodes import AccumulateGrad, CheckpointNode, Recv, RecvNode

CONTEXT = 1000


def receive(*ids: int) -> tuple[torch.Tensor, ...]:
    """Tensors as if they had come from another worker, in one message."""
    anchor = torch.empty(0, requires_grad=True)
    return Recv.apply(anchor, ids[0], ids, CONTEXT, [torch.ones(2) for _ in ids])


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def edge_of(tensor: torch.Tensor) -> tuple:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class Groups:
    """Gives groups of received tensors their ids, and knows them."""

    def __init__(self) -> None:
        self.of: dict[int, frozenset[int]] = {}

    def __call__(self, ids: frozenset[int]) -> int:
        assert len(ids) > 8
        self.of[-1 - len(self.of)] = ids
        return -len(self.of)

    def flatten(self, ids) -> set[int]:
        found = set()
        for id in ids:
            found |= {id} if id > 0 else self.flatten(self.of[id])
        return found


def brute_force(edges) -> tuple[set[int], set, set]:
    """Received ids, leaf nodes and checkpoint nodes behind edges, with nothing clever."""
    received, leaves, checkpoints = set(), set(), set()
    waiting, seen = [e for e in edges if e[0] is not None], set()
    while waiting:
        node, number = waiting.pop()
        if (node, number) in seen:
            continue
        seen.add((node, number))
        if type(node) is RecvNode:
            received.add(node.ids[number])
            continue
        if type(node) is AccumulateGrad:
            leaves.add(node)
        if type(node) is CheckpointNode:
            checkpoints.add(node)
        waiting.extend(e for e in node.next_functions if e[0] is not None)
    return received, leaves, checkpoints


def found_by_walk(edges, known, groups) -> tuple[set[int], set, set]:
    reach = walk(edges, known, groups)
    return groups.flatten(reach.received), set(members([reach.leaves])), set(members([reach.checkpoints]))


# -- by hand -----------------------------------------------------------------------------------------------


def test_nothing_leads_to_nothing():
    assert walk([], {}, Groups()) is NOTHING
    assert walk([(None, 0)], {}, Groups()) is NOTHING


def test_each_tensor_of_a_message_stands_for_itself():
    #      message (7, 8, 9):   7 ──╮
    #                           8   ├─▶ product ──▶ start
    #                           9 ──╯
    first, _, third = receive(7, 8, 9)
    reach = walk([edge_of(first * third)], {}, Groups())
    assert reach.received == {7, 9}
    assert not reach.leaves and not reach.checkpoints


def test_a_start_may_be_received_itself_or_a_leaf():
    received, weight = receive(7, 8)[1], leaf()
    reach = walk([edge_of(received), edge_of(weight)], {}, Groups())
    assert reach.received == {8}
    assert reach.leaves == {edge_of(weight)[0]}


def test_leaves_and_received_tensors_of_one_graph():
    weight, bias, (x,) = leaf(), leaf(), receive(7)
    reach = walk([edge_of(torch.tanh(x * weight + bias))], {}, Groups())
    assert reach.received == {7}
    assert {node.variable for node in members([reach.leaves])} == {weight, bias}


def test_more_than_a_few_received_tensors_become_a_group():
    groups = Groups()
    tensors = receive(*range(1, 31))
    reach = walk([edge_of(torch.stack(tensors).sum())], {}, groups)
    assert len(reach.received) <= 8
    assert groups.flatten(reach.received) == set(range(1, 31))


def test_more_than_a_few_leaves_become_a_group():
    leaves = [leaf() for _ in range(30)]
    reach = walk([edge_of(torch.stack(leaves).sum())], {}, Groups())
    assert len(reach.leaves) <= 8
    assert {node.variable for node in members([reach.leaves])} == set(leaves)
    assert len(members([reach.leaves, reach.leaves])) == 30  # each once


@pytest.mark.parametrize("length", [1, 5_000])
def test_a_chain_that_takes_one_more_at_each_step_stays_small(length):
    #      1   2   3 ...
    #      ▼   ▼   ▼
    #      h ─ h ─ h ─ ... ──▶ start
    groups, known, h = Groups(), {}, leaf() * 1
    for id in range(1, length + 1):
        h = h + receive(id)[0]
        reach = walk([edge_of(h)], known, groups)
        assert len(reach.received) <= 9
    assert len(groups.of) <= length // 7 + 1
    found, waiting = set(), list(reach.received)
    while waiting:
        id = waiting.pop()
        found |= {id} if id > 0 else set()
        waiting.extend(groups.of.get(id, ()))
    assert found == set(range(1, length + 1))


def test_many_walks_over_one_history_cost_one_walk():
    groups, known, h = Groups(), {}, leaf() * 1
    for _ in range(1_000):
        h = h * 2
    walk([edge_of(h)], known, groups)
    visited = len(known)
    for n in range(100):
        walk([edge_of(h + n)], known, groups)
    assert len(known) == visited + 100


def test_reentrant_checkpoints_are_found_and_the_others_are_not():
    (x,), weight = receive(7), leaf()
    y = checkpoint(torch.tanh, x, use_reentrant=True) + weight
    y = checkpoint(torch.sin, y, use_reentrant=False)
    y = checkpoint(torch.tanh, y, use_reentrant=True)
    reach = walk([edge_of(y)], {}, Groups())
    nodes = members([reach.checkpoints])
    assert [type(node) for node in nodes] == [CheckpointNode] * 2
    assert reach.received == {7}
    assert {node.variable for node in members([reach.leaves])} == {weight}


def test_a_node_with_sequence_number_0_gets_1():
    made = []

    def make() -> None:
        made.append(leaf() * 2)  # the first node of its thread
        made.append(made[0] * 2)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(10)
    first, second = (tensor.grad_fn for tensor in made)
    assert (first._sequence_nr(), second._sequence_nr()) == (0, 1)
    walk([(second, 0)], {}, Groups())
    assert (first._sequence_nr(), second._sequence_nr()) == (1, 1)


def test_the_received_tensor_of_an_id_is_found():
    x, y = receive(7, 8)
    (z,) = receive(9)
    starts = [edge_of(x * y + leaf()), (None, 0)]
    assert find_received(starts, 8) is x.grad_fn
    assert find_received(starts, 9) is None
    assert find_received([edge_of(x * z)], 9) is z.grad_fn


# -- what leads to given edges -----------------------------------------------------------------------------


def test_leads_to():
    weight, other, (x,) = leaf(), leaf(), receive(7)
    used, unused = torch.tanh(x * weight), torch.sin(other)
    known: dict = {}
    targets = {edge_of(weight)}
    assert leads_to(used.grad_fn, targets, known)
    assert not leads_to(unused.grad_fn, targets, known)
    assert leads_to((used + unused).grad_fn, targets, known)


def test_leads_to_tells_the_outputs_of_one_node_apart():
    first, second = torch.unbind(leaf() * 1)
    assert first.grad_fn is second.grad_fn
    assert leads_to((first * 2).grad_fn, {edge_of(first)}, {})
    assert not leads_to((first * 2).grad_fn, {edge_of(second)}, {})


def test_a_long_chain_is_no_problem():
    weight = leaf()
    h = weight * 1
    for _ in range(20_000):
        h = h + 1
    assert leads_to(h.grad_fn, {edge_of(weight)}, {})
    reach = walk([edge_of(h)], {}, Groups())
    assert [node.variable for node in members([reach.leaves])] == [weight]


# -- random graphs -----------------------------------------------------------------------------------------


def random_graph(rng: random.Random) -> list[torch.Tensor]:
    """Tensors of a graph of many received tensors, leaves and operations, the last of them deepest."""
    ids = itertools.count(1)
    tensors = []
    for _ in range(rng.randint(1, 12)):
        tensors.extend(receive(*itertools.islice(ids, rng.randint(1, 4))))
    tensors.extend(leaf() for _ in range(rng.randint(1, 15)))
    for _ in range(rng.randint(5, 60)):
        kind = rng.choice(["binary", "binary", "binary", "many", "unbind", "checkpoint", "again"])
        x, y = rng.choice(tensors[-12:]), rng.choice(tensors)
        if kind == "binary":
            tensors.append(x * y + 1)
        elif kind == "many":
            tensors.append(torch.stack(rng.sample(tensors, rng.randint(1, len(tensors)))).sum(0))
        elif kind == "unbind":
            tensors.extend(t.expand(2) for t in torch.unbind(x))
        elif kind == "checkpoint":
            tensors.append(checkpoint(torch.tanh, x, use_reentrant=True))
        else:
            tensors.append(x + x)
    return tensors


def test_walks_against_brute_force():
    for seed in range(100):
        rng = random.Random(seed)
        tensors = random_graph(rng)
        groups, known = Groups(), {}
        for _ in range(10):  # which share what they know
            edges = [edge_of(t) for t in rng.sample(tensors, rng.randint(1, min(4, len(tensors))))]
            assert found_by_walk(edges, known, groups) == brute_force(edges), f"seed {seed}"


def leads_to_by_brute_force(node, targets) -> bool:
    waiting, seen = [node], set()
    while waiting:
        for edge in waiting.pop().next_functions:
            if edge in targets:
                return True
            if edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                waiting.append(edge[0])
    return False


def test_leads_to_against_brute_force():
    for seed in range(50):
        rng = random.Random(seed)
        tensors = random_graph(rng)
        targets = {edge_of(t) for t in rng.sample(tensors, min(3, len(tensors)))}
        known: dict = {}
        for tensor in rng.sample(tensors, len(tensors)):
            node = edge_of(tensor)[0]
            assert leads_to(node, targets, known) == leads_to_by_brute_force(node, targets), f"seed {seed}"


# -- through a context, as sending and backward() do it ----------------------------------------------------


def test_what_a_send_leads_to_is_remembered_and_what_a_loss_leads_to_is_not():
    contexts = Contexts(1, itertools.count(1).__next__)
    context = contexts.new()
    h = receive(7)[0] * leaf()
    loss = h.sum()
    before = contexts.reach_of(context, [edge_of(h)])
    known = dict(context.known)
    assert before.received == {7}
    assert contexts.reach_of(context, [edge_of(loss)], remember=False).received == {7}
    assert context.known == known
    assert loss.grad_fn not in context.known


def test_groups_are_entries_of_their_context():
    contexts = Contexts(1, itertools.count(100).__next__)
    context = contexts.new()
    reach = contexts.reach_of(context, [edge_of(torch.stack(receive(*range(1, 21))).sum())])
    assert any(id < 0 for id in reach.received)
    assert len(contexts.log) >= 1
    contexts.take_out(context.id)
    assert len(contexts.log) == 0
