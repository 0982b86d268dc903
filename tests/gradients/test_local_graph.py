"""Walks over one worker's graph: what a node leads to, against brute force."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from telegrad.gradients.contexts import Contexts
from telegrad.gradients.local_graph import NOTHING, Graph, find_received, leads_to
from telegrad.gradients.nodes import AccumulateGrad, CheckpointNode, RecvNode, make_recvs
from telegrad.messages import LogEntry

CONTEXT = 1000


def receive(*ids: int) -> list[torch.Tensor]:
    """Tensors as if they had come from another worker, in one message."""
    return make_recvs(ids[0], [LogEntry(id, CONTEXT, ()) for id in ids], CONTEXT, [torch.ones(2) for _ in ids])[0]


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
        found, waiting = set(), list(ids)
        while waiting:
            id = waiting.pop()
            found |= {id} if id > 0 else set()
            waiting.extend(self.of.get(id, ()))
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
            received.add(node.members[number])
            continue
        if type(node) is AccumulateGrad:
            leaves.add(node)
        if type(node) is CheckpointNode:
            checkpoints.add(node)
        waiting.extend(e for e in node.next_functions if e[0] is not None)
    return received, leaves, checkpoints


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def graph(groups: Groups) -> Iterator[Graph]:
    graph = Graph(groups)
    yield graph
    graph.clear()
    assert len(graph.known) == 1 and not graph.leaves and not graph.checkpoints


# -- by hand -----------------------------------------------------------------------------------------------


def test_nothing_leads_to_nothing(graph):
    assert graph.walk([]) == graph.walk([(None, 0)]) == NOTHING


def test_each_tensor_of_a_message_stands_for_itself(graph):
    #      message (7, 8, 9):   7 ──╮
    #                           8   ├─▶ product ──▶ start
    #                           9 ──╯
    first, _, third = receive(7, 8, 9)
    assert graph.walk([edge_of(first * third)]) == {7, 9}
    assert not graph.leaves and not graph.checkpoints


def test_a_start_may_be_received_itself_or_a_leaf(graph):
    received, weight = receive(7, 8)[1], leaf()
    assert graph.walk([edge_of(received), edge_of(weight)]) == {8}
    assert graph.leaves == [edge_of(weight)[0]]


def test_leaves_and_received_tensors_of_one_graph(graph):
    weight, bias, (x,) = leaf(), leaf(), receive(7)
    y = torch.tanh(x * weight + bias)
    assert graph.walk([edge_of(y * bias)]) == {7}
    assert {node.variable for node in graph.leaves} == {weight, bias}
    assert len(graph.leaves) == 2  # each once


def test_more_than_a_few_received_tensors_become_a_group(graph, groups):
    reach = graph.walk([edge_of(torch.stack(receive(*range(1, 31))).sum())])
    assert len(reach) <= 8
    assert groups.flatten(reach) == set(range(1, 31))


@pytest.mark.parametrize("length", [1, 5_000])
def test_a_chain_that_takes_one_more_at_each_step_stays_small(graph, groups, length):
    #      1   2   3 ...
    #      ▼   ▼   ▼
    #      h ─ h ─ h ─ ... ──▶ start
    h = leaf() * 1
    for id in range(1, length + 1):
        h = h + receive(id)[0]
        reach = graph.walk([edge_of(h)])
        assert len(reach) <= 8
    assert len(groups.of) <= length // 7 + 1
    assert groups.flatten(reach) == set(range(1, length + 1))


def test_many_walks_over_one_history_cost_one_walk(graph):
    h = leaf() * 1
    for _ in range(1_000):
        h = h * 2
    graph.walk([edge_of(h)])
    visited = len(graph.known)
    for n in range(100):
        graph.walk([edge_of(h + n)])
    assert len(graph.known) == visited + 100
    assert len(graph.leaves) == 1


def test_reentrant_checkpoints_are_found_and_the_others_are_not(graph):
    (x,), weight = receive(7), leaf()
    y = checkpoint(torch.tanh, x, use_reentrant=True) + weight
    y = checkpoint(torch.sin, y, use_reentrant=False)
    y = checkpoint(torch.tanh, y, use_reentrant=True)
    assert graph.walk([edge_of(y)]) == {7}
    assert [type(node) for node in graph.checkpoints] == [CheckpointNode] * 2
    assert {node.variable for node in graph.leaves} == {weight}


def first_of_a_thread(make) -> torch.Tensor:
    """What is made where nothing was made before."""
    made = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join(10)
    return made[0]


def test_a_node_with_sequence_number_0_gets_1(graph):
    first = first_of_a_thread(lambda: leaf() * 2)
    second = torch.tanh(first)
    assert first.grad_fn._sequence_nr() == 0
    graph.walk([edge_of(second)])
    assert first.grad_fn._sequence_nr() == 1


def test_a_recv_runs_before_what_is_ready_beside_it():
    """Its gradient goes out at once."""
    (received,) = receive(7)
    later = leaf() * 2
    assert received.grad_fn._sequence_nr() > later.grad_fn._sequence_nr()


def test_the_received_tensor_of_an_id_is_found():
    x, y = receive(7, 8)
    (z,) = receive(9)
    starts = [edge_of(x * y + leaf()), (None, 0)]
    assert find_received(starts, 8) is y.grad_fn
    assert find_received(starts, 9) is None
    assert find_received([edge_of(x * z)], 9) is z.grad_fn


def test_what_a_send_leads_to_is_remembered_and_what_a_loss_leads_to_is_not(graph):
    #      7, u ──▶ h ──▶ sent          h, v, 8 ──▶ loss
    u, v = leaf(), leaf()
    h = receive(7)[0] * u
    loss = checkpoint(torch.tanh, h * v * receive(8)[0], use_reentrant=True).sum()
    graph.walk([edge_of(h)])
    known, leaves = dict(graph.known), list(graph.leaves)
    for _ in range(2):
        reach, new_leaves, new_checkpoints = graph.walk_once([edge_of(loss)])
        assert reach == {7, 8}
        assert [node.variable for node in new_leaves] == [v]
        assert len(new_checkpoints) == 1
        assert graph.known == known and graph.leaves == leaves and not graph.checkpoints


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


def test_a_long_chain_is_no_problem(graph):
    weight = leaf()
    h = weight * 1
    for _ in range(50_000):
        h = h + 1
    assert leads_to(h.grad_fn, {edge_of(weight)}, {})
    graph.walk([edge_of(h)])
    assert [node.variable for node in graph.leaves] == [weight]
    del h


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
        groups = Groups()
        graph = Graph(groups)
        leaves, checkpoints = set(), set()
        for _ in range(10):  # which share what they know
            edges = [edge_of(t) for t in rng.sample(tensors, rng.randint(1, min(4, len(tensors))))]
            received, more_leaves, more_checkpoints = brute_force(edges)
            if rng.random() < 0.5:
                reach, new_leaves, new_checkpoints = graph.walk_once(edges)
                assert leaves | set(new_leaves) >= more_leaves, f"seed {seed}"
                assert checkpoints | set(new_checkpoints) >= more_checkpoints, f"seed {seed}"
            else:
                reach = graph.walk(edges)
                leaves |= more_leaves
                checkpoints |= more_checkpoints
            assert len(reach) <= 8
            assert groups.flatten(reach) == received, f"seed {seed}"
            # All that walks came through, each once.
            assert sorted(map(id, graph.leaves)) == sorted(map(id, leaves)), f"seed {seed}"
            assert sorted(map(id, graph.checkpoints)) == sorted(map(id, checkpoints)), f"seed {seed}"
        graph.clear()


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


# -- in a context ------------------------------------------------------------------------------------------


def test_groups_are_entries_of_their_context():
    contexts = Contexts(1, itertools.count(100).__next__)
    context = contexts.new()
    reach = context.graph.walk([edge_of(torch.stack(receive(*range(1, 21))).sum())])
    assert any(id < 0 for id in reach)
    assert all(id in contexts.log for id in reach if id < 0)
    contexts.take_out(context.id)
    assert len(contexts.log) == 0
    assert len(context.graph.known) == 1


@pytest.mark.parametrize("width", [1, 4, 8])
def test_marks_end_walks_on_all_paths_through_a_long_history(width):
    """However many tensors a program carries from one step to the next."""
    (received,) = receive(5)
    state, walked = [leaf() * received for _ in range(width)], []
    for _ in range(500):
        mixed = sum(state)
        state = [(tensor * 2.0 + mixed).tanh() for tensor in state]
        graph = Graph(lambda members: -1, marks=True)
        for tensor in state:
            assert graph.walk([edge_of(tensor)]) == {5}
        walked.append(len(graph.known))
        graph.leave_marks()
    assert sum(walked[250:]) < 2 * sum(walked[:250]) + 50_000
    assert max(walked) < 6_000
