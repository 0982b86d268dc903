"""The section on planning: what telegrad's own walks over the local graph cost, beside torch's backward of it.

When a worker sends tensors it walks from them back to what they depend on; when a pass begins it walks again,
and finds most of it known. Both walks together are the planning. torch has nothing to compare it with: the
measure is the local backward of the same graph. One process, no workers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import ALONE, Repeats, Section, Session
from benchmarks.programs import SMALL_BYTES, leaf_of, loss_of, many_nodes
from benchmarks.sampling import Spread
from benchmarks.tables import Grid

NODES = (1_000, 10_000, 100_000)
SENDS = 32
GOAL = 0.20
"""Planning is to be at most this part of the local backward."""


class Planner:
    """What one worker does, as far as walks go, for the Sends of a context and for a pass over them."""

    def __init__(self) -> None:
        from telegrad.gradients.local_graph import Graph

        self._graph: Any = Graph(self._new_group)
        self._groups = 0

    def at_send(self, tensor: Tensor) -> None:
        self._graph.walk([(tensor.grad_fn, tensor.output_nr)])

    def at_backward(self, tensors: Sequence[Tensor]) -> None:
        self._graph.walk_once([(tensor.grad_fn, tensor.output_nr) for tensor in tensors])

    def end(self) -> None:
        self._graph.clear()

    def _new_group(self, members: frozenset[int]) -> int:
        self._groups -= 1
        return self._groups


@dataclass(frozen=True)
class Planned:
    """Seconds."""

    graph: str
    nodes: int
    planning: Spread
    backward: Spread
    share: float
    """The median of planning / backward, taken on the same graph."""


@dataclass(frozen=True)
class Planning:
    sizes: tuple[Planned, ...]
    one_send: Spread
    many_sends: Spread


def measure_planning(session: Session) -> Planning:
    torch.set_num_threads(1)
    sizes = NODES[:2] if session.quick else NODES
    planned = [_measure_graph("one leaf", nodes, 0, session.repeats) for nodes in sizes]
    planned += [_measure_graph("a leaf for every 4 nodes", nodes, nodes // 4, session.repeats) for nodes in sizes]
    return Planning(tuple(planned), _measure_sends(1, session.repeats), _measure_sends(SENDS, session.repeats))


def _measure_graph(graph: str, nodes: int, leaves: int, repeats: Repeats) -> Planned:
    """Each sample has a new graph, and plans and differentiates it: nothing is known of it beforehand."""
    first = leaf_of(SMALL_BYTES)
    others = [leaf_of(SMALL_BYTES) for _ in range(leaves)]
    chains = nodes // NODES[0]
    planning, backward = [], []
    for number in range(-repeats.warmup // chains, max(3, repeats.count // chains)):
        result = _chains(first, others, chains)
        loss = loss_of(result)
        start = perf_counter()
        planner = Planner()
        planner.at_send(result)
        planner.at_backward([result])
        walked = perf_counter()
        planner.end()
        again = perf_counter()
        loss.backward()
        if number >= 0:
            planning.append(walked - start)
            backward.append(perf_counter() - again)
        for leaf in (first, *others):
            leaf.grad = None
    shares = [one / other for one, other in zip(planning, backward, strict=True)]
    return Planned(graph, nodes, Spread.of(planning), Spread.of(backward), statistics.median(shares))


# Note [depth of a graph]: once Python has looked at a node, torch 2.13 frees that node and what is behind it by
# recursion, so that a chain of some 50,000 that was walked ends the process when it is freed. Wide graphs don't.
def _chains(x: Tensor, leaves: Sequence[Tensor], count: int) -> Tensor:
    """So many chains of `NODES[0]` nodes each, side by side (see Note [depth of a graph])."""
    each = len(leaves) // count
    ends = [
        _many_leaves(x, leaves[i * each : (i + 1) * each]) if each else many_nodes(x, NODES[0]) for i in range(count)
    ]
    return torch.stack(ends)


def _many_leaves(x: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """As `many_nodes`, with a leaf of its own for every four nodes."""
    for leaf in leaves:
        x = (x + x.sin() * leaf).tanh()
    return x


def _measure_sends(sends: int, repeats: Repeats) -> Spread:
    """So many Sends, each of a tensor one node away from a history that they share, and the pass over all."""
    leaf = leaf_of(SMALL_BYTES)
    samples = []
    for number in range(-repeats.warmup, repeats.count):
        history = many_nodes(leaf, NODES[0])
        sent = [history * scale for scale in range(sends)]
        start = perf_counter()
        planner = Planner()
        for tensor in sent:
            planner.at_send(tensor)
        planner.at_backward(sent)
        if number >= 0:
            samples.append(perf_counter() - start)
    return Spread.of(samples)


def render_planning(planning: Planning) -> str:
    header = (
        "graph",
        "nodes",
        "planning",
        "p99",
        "per node",
        "backward",
        "p99",
        "per node",
        "share",
        "goal",
        "met",
    )
    grid = Grid(header, [_row(one) for one in planning.sizes])
    walks = planning.many_sends.median / planning.one_send.median
    return (
        "telegrad: the walks at Send and at backward together, beside torch's backward of the same graph, on small "
        f"CPU tensors. Larger graphs are chains of {NODES[0]:,} nodes side by side.\n\n{grid.markdown()}\n\n"
        f"Planning {SENDS} Sends over one history of {NODES[0]:,} nodes takes {_ms(planning.many_sends.median)} "
        f"(p99 {_ms(planning.many_sends.p99)}), one Send {_ms(planning.one_send.median)} "
        f"(p99 {_ms(planning.one_send.p99)}): {walks:.2f} times as long."
    )


def _row(one: Planned) -> tuple[str, ...]:
    cells = [one.graph, f"{one.nodes:,}"]
    for spread in (one.planning, one.backward):
        cells += [_ms(spread.median), _ms(spread.p99), f"{spread.median / one.nodes * 1e6:.2f} µs"]
    return (*cells, f"{one.share:.1%}", f"{GOAL:.0%}", "yes" if one.share <= GOAL else "no")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


SECTION = Section(
    name="planning",
    title="Planning",
    measure=measure_planning,
    render=render_planning,
    repeats=Repeats(count=60, warmup=3),
    setting=ALONE,
)
