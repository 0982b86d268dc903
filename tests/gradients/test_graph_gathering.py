"""The graph that telegrad.autograd.graph() gathers is the one that the test built, on whatever workers it is."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from random import Random

import fault_programs as programs
import pytest
import torch
from fault_fixtures import workers  # noqa: F401
from fault_programs import (
    Fault,
    InThread,
    forward,
    open_gate,
    stop,
    stuck_error,
    wait_at_gate,
    wait_for_arrival,
)
from graph_maker import make_program
from random_graphs import Party, check_graph
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.gradients.plan import edge_of
from telegrad.graph import Graph, Leaf, Node, Operation, Recv, Root, Send
from telegrad.primitives import current

_kept: dict[str, Tensor] = {}  # leaves of in-process workers


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    _kept.clear()


def leaf(name: str, *shape: int) -> Tensor:
    """The one leaf of that name."""
    if name not in _kept:
        _kept[name] = torch.ones(*shape, requires_grad=True)
    return _kept[name]


def shown(node: Node) -> str:
    """driver:MulBackward0, b:Recv m1 from driver, ..."""
    if isinstance(node, Send):
        return f"{node.worker}:Send to {node.peer}"
    if isinstance(node, Recv):
        return f"{node.worker}:Recv from {node.peer}"
    return f"{node.worker}:{node.name.removesuffix('Backward0')}"


def shown_edges(graph: Graph) -> Counter[str]:
    return Counter(f"{shown(graph.nodes[e.tail])} > {shown(graph.nodes[e.head])}" for e in graph.edges)


def check_ends(graph: Graph) -> None:
    """Each Send has one Recv, which is its other end."""
    recvs = {recv.id: recv for recv in graph.recvs}
    assert len(recvs) == len(graph.recvs) == len(graph.sends)
    crossing = [
        (graph.nodes[e.tail], graph.nodes[e.head]) for e in graph.edges if isinstance(graph.nodes[e.tail], Send)
    ]
    assert len(crossing) == len(graph.sends)
    for send, recv in crossing:
        assert recvs[send.id] is recv
        assert (send.worker, send.peer) == (recv.peer, recv.worker)
        assert (send.message, send.place, send.count) == (recv.message, recv.place, recv.count)
        assert (send.shape, send.dtype, send.nbytes) == (recv.shape, recv.dtype, recv.nbytes)


def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    weight = leaf("weight", 3)
    return x * weight, x + weight


# -- what is built --------------------------------------------------------------------------------------------


def test_the_smallest_example(workers):
    """
    driver   x ──▶ Send ═▶ b   Recv ─▶ · weight ─▶ Send ═▶ driver   Recv ─▶ + x ─▶ sum: the root
                                └────▶ + weight ─▶ Send ═▶ driver   Recv: not used
    """
    with autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        product, _unused = rpc.rpc_sync("b", two_results, args=(x,))
        graph = autograd.graph(context_id, [(product + x).sum()])
        check_ends(graph)
    assert shown_edges(graph) == {
        "driver:leaf > driver:Send to b": 1,
        "driver:Send to b > b:Recv from driver": 1,
        "b:Recv from driver > b:Mul": 1,
        "b:Recv from driver > b:Add": 1,
        "b:leaf > b:Mul": 1,
        "b:leaf > b:Add": 1,
        "b:Mul > b:Send to driver": 1,
        "b:Add > b:Send to driver": 1,
        "b:Send to driver > driver:Recv from b": 2,
        "driver:Recv from b > driver:Add": 1,
        "driver:leaf > driver:Add": 1,
        "driver:Add > driver:Sum": 1,
        "driver:Sum > driver:root 0": 1,
    }
    assert [(w.name, w.status) for w in graph.workers] == [("driver", "here"), ("b", "here")]
    assert {shown(node) for node in graph.nodes if node.active is False} == {
        "b:Add",
        "b:Send to driver",
        "driver:Recv from b",
    }
    (unused,) = graph.unused
    assert (unused.place, unused.count, unused.shape, unused.dtype, unused.nbytes) == (
        1,
        2,
        (3,),
        "float32",
        12,
    )
    assert unused.message >> 48 == unused.worker_id
    assert {node.shape for node in graph.roots} == {()}


def test_without_roots_nothing_is_said_to_be_unused(workers):
    with autograd.context() as context_id:
        kept = rpc.rpc_sync("b", two_results, args=(torch.ones(3, requires_grad=True),))
        graph = autograd.graph(context_id)
        del kept
    assert {node.active for node in graph.nodes} == {None}
    assert not graph.unused and not graph.roots
    assert "roots=[loss]" in str(graph)


def chain_of(x: Tensor, names: list[str], length: int) -> Tensor:
    for _ in range(length):
        x = x.sin()
    return x + rpc.rpc_sync(names[0], chain_of, args=(x, names[1:], length)) if names else x


def test_nested_calls_between_three_workers(workers):
    """driver ─▶ b ─▶ c ─▶ driver itself, each with a chain of sines, and each adds what it gets back."""
    with autograd.context() as context_id:
        y = rpc.rpc_sync("b", chain_of, args=(torch.ones(2, requires_grad=True), ["c", "driver"], 4))
        graph = autograd.graph(context_id, [y.sum()])
        check_ends(graph)
    assert Counter((s.worker, s.peer) for s in graph.sends) == {
        ("driver", "b"): 1, ("b", "c"): 1, ("c", "driver"): 1, ("driver", "c"): 1, ("c", "b"): 1, ("b", "driver"): 1,
    }  # fmt: skip
    for name in ("driver", "b", "c"):
        found = Counter(n.name for n in graph.nodes if n.worker == name and isinstance(n, Operation))
        assert found == {
            "SinBackward0": 4,
            **({"SumBackward0": 1} if name == "driver" else {"AddBackward0": 1}),
        }
    assert all(node.active for node in graph.nodes)


def test_a_fan_and_a_shared_leaf(workers):
    """One leaf is sent to two workers, and to one of them twice; it is one node."""
    with autograd.context() as context_id:
        x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
        results = [rpc.rpc_sync(name, torch.mul, args=(x, 2)) for name in ("b", "c", "c")]
        graph = autograd.graph(context_id, [sum(results).sum()])
        check_ends(graph)
    (only,) = graph.leaves
    assert (only.worker, only.shape, only.dtype, only.nbytes) == ("driver", (2, 5), "float64", 80)
    place = graph.nodes.index(only)
    assert Counter(shown(graph.nodes[e.head]) for e in graph.edges if e.tail == place) == {
        "driver:Send to b": 1,
        "driver:Send to c": 2,
    }
    assert len({send.message for send in graph.sends}) == 6


def test_a_worker_that_sends_to_itself(workers):
    with autograd.context() as context_id:
        y = rpc.rpc_sync("driver", torch.exp, args=(torch.ones(2, requires_grad=True),))
        graph = autograd.graph(context_id, [y.sum()])
        check_ends(graph)
    assert [w.name for w in graph.workers] == ["driver"]
    assert Counter((s.worker, s.peer) for s in graph.sends) == {("driver", "driver"): 2}


def test_a_parameter_is_called_one(workers):
    with autograd.context() as context_id:
        layer = torch.nn.Linear(3, 2)
        y = rpc.rpc_sync("b", torch.exp, args=(layer(torch.ones(3)),))
        graph = autograd.graph(context_id, [y.sum()])
    assert Counter((node.name, node.shape) for node in graph.leaves) == {
        ("Parameter", (2, 3)): 1,
        ("Parameter", (2,)): 1,
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_all_kinds(workers):
    """Sparse, complex, half, and nested ones, which have no shape; custom functions and checkpoints."""
    with autograd.context() as context_id:
        sparse = torch.eye(3).to_sparse().requires_grad_()
        wave = torch.ones(2, dtype=torch.complex64, requires_grad=True)
        half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
        tripped = programs.Trip.apply(checkpoint(torch.sin, half, use_reentrant=True), abs, "")
        sent = [sparse, wave, tripped, (nested * 2).to_padded_tensor(0.0)]
        kept = [rpc.rpc_sync("b", torch.clone, args=(tensor,)) for tensor in sent]
        graph = autograd.graph(context_id)
        check_ends(graph)
        del kept
    assert {(leaf.shape, leaf.dtype, leaf.nbytes) for leaf in graph.leaves} == {
        ((3, 3), "float32", 36),
        ((2,), "complex64", 16),
        ((2,), "bfloat16", 4),
        (None, "float32", 0),
    }
    assert {"CheckpointFunctionBackward", "TripBackward"} <= {node.name for node in graph.nodes}
    assert graph.dot() and str(graph)


def test_a_tensor_of_an_outer_context(workers):
    """It was received in one context and is used in another one: what is behind it belongs to the graph."""
    with autograd.context():
        outer = rpc.rpc_sync("b", two_results, args=(torch.ones(3, requires_grad=True),))[0]
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("c", torch.exp, args=(outer,)).sum()
            graph = autograd.graph(context_id, [loss])
            check_ends(graph)
    assert Counter((s.worker, s.peer) for s in graph.sends) == {
        ("driver", "b"): 1,
        ("b", "driver"): 1,
        ("driver", "c"): 1,
        ("c", "driver"): 1,
    }
    assert "MulBackward0" in {n.name for n in graph.nodes if n.worker == "b"}
    assert all(node.active for node in graph.nodes)


def test_roots_that_are_leaves_and_roots_that_are_no_scalars(workers):
    with autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        y = rpc.rpc_sync("b", torch.exp, args=(x,))
        graph = autograd.graph(context_id, [x, y])
    assert [(root.name, root.shape) for root in graph.roots] == [("root 0", (3,)), ("root 1", (3,))]
    assert len(graph.leaves) == 1


def test_what_is_active_is_what_a_pass_sends_gradients_for(workers):
    """The messages that are followed back, as seen on their way, are those of the active Sends."""
    with autograd.context() as context_id, contextlib.ExitStack() as undo:
        x = torch.ones(3, requires_grad=True)
        h = rpc.rpc_sync("b", chain_of, args=(x, ["c"], 2))
        rpc.rpc_sync("c", two_results, args=(h,))
        loss = (rpc.rpc_sync("c", two_results, args=(h,))[1] + rpc.rpc_sync("b", torch.exp, args=(x,))).sum()
        graph = autograd.graph(context_id, [loss])
        seen: set[str] = set()
        for worker in workers.values():
            undo.callback(
                worker.events.subscribe(
                    lambda e: seen.update(e.detail.split()[2:]) if (e.kind, e.stage) == ("gradients", "send") else None
                )
            )
        autograd.backward(context_id, [loss])
    assert graph.unused
    assert seen == {str(send.message) for send in graph.sends if send.active}


def test_random_graphs_reach_what_is_planned_for_them(monkeypatch):
    """Which Sends the gathered graph leads to, with no look at the log, is what a pass plans by the log alone."""
    backward, seen = autograd.backward, []
    monkeypatch.setattr(telegrad.graph.gathering, "_logged", lambda worker, own: set())

    def look_first(context_id, roots, *args, **kwargs):
        worker = current.current_worker()
        graph = autograd.graph(context_id, roots)
        edges = [edge_of(root) for root in roots]
        context = worker.contexts.get(context_id)
        with context.lock:
            reach, _, _ = context.graph.walk_once(edges)
        plan = worker.engine._planner.plan(context, reach, edges)
        planned = {id for ids in plan.sends.values() for id in ids}
        seen.append(({send.id for send in graph.sends if send.active}, planned, len(graph.unused)))
        return backward(context_id, roots, *args, **kwargs)

    monkeypatch.setattr(autograd, "backward", look_first)
    with Party() as party:
        for seed in range(150):
            check_graph(party, make_program(Random(seed)))
    assert len(seen) > 150
    assert all(found == planned for found, planned, _ in seen)
    assert sum(len(planned) for _, planned, _ in seen) > 300
    assert sum(unused > 0 for _, _, unused in seen) > 10


def test_it_can_be_asked_for_anywhere_and_sent(workers):
    with autograd.context() as context_id:
        kept = rpc.rpc_sync("b", two_results, args=(torch.ones(3, requires_grad=True),))
        here = autograd.graph(context_id)
        there = rpc.rpc_sync("b", autograd.graph, args=(context_id,))
        assert shown_edges(there) == shown_edges(here)
        assert [w.name for w in there.workers] == ["b", "driver"]
        assert pickle.loads(pickle.dumps(here)) == here
        assert autograd.graph(context_id) == here  # asking has left nothing in it
        del kept
    assert all(isinstance(node, Operation | Leaf | Root | Send | Recv) for node in here.nodes)


def test_a_context_with_no_graph_yet(workers):
    with autograd.context() as context_id:
        rpc.rpc_sync("b", abs, args=(1,))
        graph = autograd.graph(context_id)
    assert not graph.nodes and not graph.edges
    assert [w.name for w in graph.workers] == ["driver", "b"]
    assert "nothing that requires grad was sent in this context yet" in str(graph)


def test_a_deep_graph(workers):
    """Deeper than any stack, and gone after it without a trace."""
    with autograd.context() as context_id:
        y = torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            y = y * 1.0
        z = rpc.rpc_sync("b", torch.exp, args=(y,))
        graph = autograd.graph(context_id, [z.sum()])
        del y
    assert Counter(node.name for node in graph.nodes)["MulBackward0"] == 20_000
    assert "MulBackward0 × 20,000" in graph.dot()


# -- what it keeps ----------------------------------------------------------------------------------------------


def test_it_keeps_nothing_alive(workers):
    gone = []
    with autograd.context(wait=True) as context_id:
        x = torch.ones(3, requires_grad=True)
        product = rpc.rpc_sync("b", two_results, args=(x,))[0]
        loss = (product * x).sum()
        gone += [weakref.ref(tensor) for tensor in (x, product, loss, _kept["weight"])]
        graph = autograd.graph(context_id, [loss])
        _kept.clear()
        del x, product, loss
    gc.collect()
    assert graph.leaves
    assert [ref() for ref in gone] == [None] * 4


# -- passes that run, are stuck or have failed ------------------------------------------------------------------


def awaited(graph: Graph) -> list[tuple[str, str]]:
    return sorted((send.worker, send.peer) for send in graph.awaited)


def test_a_pass_that_is_stuck_shows_what_is_awaited_and_goes_on(workers):
    with autograd.context() as context_id:
        loss = forward(Fault("last", action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=20)
        wait_for_arrival("last")
        parts = workers["driver"].engine.parts
        programs.wait_until(lambda: all(s.awaited for s in parts.states_of(context_id)), "the driver waits")
        graph = autograd.graph(context_id)
        assert awaited(graph) == [("b", "c"), ("driver", "b")]
        assert [root.worker for root in graph.roots] == ["driver"]  # of the pass that runs
        assert all(node.active for node in graph.nodes)
        assert "awaited: Send" in str(graph)
        there = rpc.rpc_sync("c", autograd.graph, args=(context_id,))
        assert awaited(there) == awaited(graph)
        open_gate("last")
        assert running.wait().error is None
        programs.check_chain(context_id)
        assert not autograd.graph(context_id).awaited
    programs.check_nothing_is_left()


def test_a_failed_pass_shows_what_was_awaited_until_the_next_one(workers, jumping_clock):
    with autograd.context() as context_id:
        faults = [Fault("last", action=wait_at_gate)]
        loss = forward(*faults)
        stuck_error(jumping_clock, context_id, loss, "last", 2, retain_graph=True)
        graph = autograd.graph(context_id)
        assert awaited(graph) == [("b", "c"), ("driver", "b")]
        assert "awaited when the pass failed" in str(graph)
        assert all(send.active for send in graph.sends)
        open_gate("last")
        autograd.backward(context_id, [loss], timeout=20)
        assert not autograd.graph(context_id).awaited


def test_given_roots_are_the_only_ones(workers):
    """A pass from another root runs meanwhile."""
    with autograd.context() as context_id:
        loss = forward(Fault("last", action=wait_at_gate))
        running = InThread(autograd.backward, context_id, [loss], timeout=20)
        wait_for_arrival("last")
        other = rpc.rpc_sync("c", torch.exp, args=(torch.ones(2, requires_grad=True),)).sum()
        graph = autograd.graph(context_id, [other])
        assert len(graph.roots) == 1
        assert {send.shape for send in graph.sends if send.active} == {(2,)}
        assert {send.shape for send in graph.unused} == {(3,)}
        open_gate("last")
        assert running.wait().error is None


# -- workers that do not answer ---------------------------------------------------------------------------------


def test_a_worker_that_died_and_one_that_does_not_answer(server):
    with telegrad.LocalCluster(["b", "c"], server=server) as cluster, autograd.context() as context_id:
        loss = forward()
        whole = autograd.graph(context_id, [loss])
        stop(cluster.pids["b"])
        try:
            silent = autograd.graph(context_id, [loss], timeout=0.5)
        finally:
            os.kill(cluster.pids["b"], signal.SIGCONT)
        assert {w.name: w.status for w in silent.workers} == {"driver": "here", "b": "no answer"}
        # Only b knows of c. What the driver sent to b and got from it is there.
        assert sorted((s.worker, s.is_inferred) for s in silent.sends) == [("b", True), ("driver", False)]
        os.kill(cluster.pids["c"], signal.SIGKILL)
        rpc.rpc_sync("b", abs, args=(1,))
        graph = autograd.graph(context_id, [loss])
        assert [(w.name, w.status) for w in graph.workers] == [
            ("driver", "here"),
            ("b", "here"),
            ("c", "gone"),
        ]
        assert re.search(r"^worker 'c' \(id \d\), gone: ", str(graph), re.M)
        check_ends(graph)
        assert {s.id for s in graph.sends} == {s.id for s in whole.sends}
        assert all(node.active for node in graph.nodes)  # the log knows what is behind the dead one
        assert {n.worker for n in graph.nodes if isinstance(n, Operation)} == {"driver", "b"}


# -- bad input ----------------------------------------------------------------------------------------------------


def test_a_context_that_has_ended(workers):
    with autograd.context() as context_id:
        pass
    with pytest.raises(errors.UnknownContextError, match=rf"autograd context with id: {context_id} \(it has ended\)"):
        autograd.graph(context_id)


def test_a_context_that_is_not_known(workers):
    with pytest.raises(errors.UnknownContextError, match=r"id: 77 \(no message of it has come here\)"):
        autograd.graph(77)
    with (
        autograd.context() as context_id,
        pytest.raises(errors.UnknownContextError, match="no message of it"),
    ):
        rpc.rpc_sync("b", ask_for_another, args=(context_id,))


def ask_for_another(context_id: int) -> None:
    """The call itself has brought its own context along."""
    autograd.graph(context_id + 1)


@pytest.mark.parametrize(
    ("roots", "error", "text"),
    [
        ([torch.ones(1)], errors.GradientError, r"requires_grad not set on root \(root 0\)"),
        ([1.0], TypeError, "roots must be tensors; number 0 is a float"),
        (3, TypeError, "roots must be tensors, not 3"),
    ],
)
def test_roots_that_are_none(workers, roots, error, text):
    with autograd.context() as context_id, pytest.raises(error, match=text):
        autograd.graph(context_id, roots)


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_no_time_at_all(workers, timeout):
    with (
        autograd.context() as context_id,
        pytest.raises(ValueError, match="workers need some time to answer"),
    ):
        autograd.graph(context_id, timeout=timeout)


def test_many_at_once_while_calls_and_passes_run(workers):
    """A look disturbs no pass, and shows a graph that is whole."""
    with autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        over = threading.Event()

        def look() -> int:
            looks = 0
            while not over.is_set():
                graph = autograd.graph(context_id)
                assert len(graph.nodes) == len({id(node) for node in graph.nodes})
                assert all(0 <= e.tail < len(graph.nodes) and 0 <= e.head < len(graph.nodes) for e in graph.edges)
                looks += 1
            return looks

        looking = [InThread(look) for _ in range(2)]
        for _ in range(20):
            loss = rpc.rpc_sync("b", chain_of, args=(x, ["c"], 2)).sum()
            autograd.backward(context_id, [loss], timeout=20)
        over.set()
        for thread in looking:
            assert thread.wait().error is None
        expected = torch.ones(3, requires_grad=True)
        y = expected.sin().sin()
        (20 * (y + y.sin().sin())).sum().backward()
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected.grad)
