"""Gradients outside of contexts where something else is at work: other groups, other threads, hooks, modules."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from fault_fixtures import workers  # noqa: F401
from torch import nn

import telegrad
from telegrad import errors, rpc


def ones() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


# -- groups ------------------------------------------------------------------------------------------------


def test_what_was_received_in_another_group():
    """Its gradients go nowhere, and to no other tensor."""
    x, other = ones(), ones()
    with telegrad.LocalCluster(["b"], transport="inproc"):
        old = rpc.rpc_sync("b", torch.mul, args=(x, 2))
    with telegrad.LocalCluster(["b"], transport="inproc"):
        alive = rpc.rpc_sync("b", torch.mul, args=(other, 5))
        with pytest.raises(errors.GradientError, match="that has shut down"):
            old.sum().backward()
        with pytest.raises(errors.GradientError, match="that has shut down"):
            (old + alive).sum().backward()
        sent = rpc.rpc_sync("b", torch.mul, args=(old, 2))
        with pytest.raises(errors.GradientError):
            sent.sum().backward()
        assert x.grad is None and other.grad is None
        del sent, alive
        gc.collect()


_kept: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> None:
    _kept.append(x)


def test_received_by_two_workers_of_one_process(workers):
    x = ones()
    rpc.rpc_sync("b", keep, args=(x,))
    found = rpc.rpc_sync("c", torch.mul, args=(x, 2))
    with pytest.raises(errors.GradientError, match="and by another worker of this process"):
        (_kept.pop() + found).sum().backward()
    found.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


# -- threads -----------------------------------------------------------------------------------------------

_large = torch.ones(200_000, requires_grad=True)


def use_large() -> torch.Tensor:
    return _large * 1


def trains(count: int) -> None:
    for _ in range(count):
        rpc.rpc_sync("driver", use_large).sum().backward()


def test_passes_of_others_while_this_worker_adds_to_the_same_leaf(workers):
    """Nothing of either is lost."""
    _large.grad = torch.zeros_like(_large)
    count = 40
    done = rpc.rpc_async("b", trains, args=(count,))
    for _ in range(count):
        (_large * 1).sum().backward()
    done.wait()
    assert torch.equal(_large.grad, torch.full_like(_large, 2.0 * count).detach())
    _large.grad = None


# -- hooks -------------------------------------------------------------------------------------------------

_hooked = torch.ones(3, requires_grad=True)


def use_hooked(x: torch.Tensor) -> torch.Tensor:
    return x * _hooked


def grad_of_hooked() -> torch.Tensor | None:
    return _hooked.grad


def slowly(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.register_hook(lambda gradient: time.sleep(0.3))
    return y


@pytest.mark.parametrize(("how", "wanted"), [("nothing", 8.0), ("zeroed", 3.0), ("none", 3.0), ("added", 10.0)])
def test_a_grad_that_changes_before_its_pass_is_done(workers, how, wanted):
    _hooked.grad = torch.full((3,), 5.0)
    seen: list[torch.Tensor] = []
    handle = _hooked.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    began = threading.Event()

    def change() -> None:
        deadline = time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        if how == "zeroed":
            _hooked.grad.zero_()  # type: ignore[union-attr]
        elif how == "none":
            _hooked.grad = None
        elif how == "added":
            _hooked.grad += 2  # type: ignore[operator]
        began.set()

    thread = threading.Thread(target=change)
    thread.start()
    found = rpc.rpc_sync("b", use_hooked, args=(torch.full((3,), 3.0),))
    (found.sum() + rpc.rpc_sync("c", slowly, args=(ones(),)).sum()).backward()
    thread.join(20)
    handle.remove()
    assert began.is_set()
    assert torch.equal(seen[0], torch.full((3,), 8.0))
    assert torch.equal(rpc.rpc_sync("b", grad_of_hooked), torch.full((3,), wanted))
    _hooked.grad = None


NAMES = "abc"
PATHS = (("r1", "abc"), ("r2", "cba"), ("r1", "bacab"), ("r2", "acbca"), ("r1", "cab"))
_on_paths = {name: torch.ones(3, requires_grad=True, dtype=torch.float64) for name in NAMES}


def hop(path: str, x: torch.Tensor) -> torch.Tensor:
    y = x * _on_paths[path[0]]
    return rpc.rpc_sync(path[1], hop, args=(path[1:], y)) if len(path) > 1 else y  # type: ignore[no-any-return]


def trains_over(path: str, count: int) -> None:
    for _ in range(count):
        x = torch.ones(3, requires_grad=True, dtype=torch.float64)
        rpc.rpc_sync(path[0], hop, args=(path, x)).sum().backward()
        assert torch.equal(x.grad, torch.ones(3, dtype=torch.float64))  # type: ignore[arg-type]


def grad_on_path(name: str) -> torch.Tensor | None:
    return _on_paths[name].grad


@pytest.mark.parametrize("hooked", [False, True])
def test_many_trainers_over_the_same_leaves(hooked):
    count, handles, runs = 30, [], []
    for each in _on_paths.values():
        each.grad = None
        if hooked:
            handles.append(each.register_post_accumulate_grad_hook(runs.append))
    with telegrad.LocalCluster([*NAMES, "r1", "r2"], transport="inproc"):
        for future in [rpc.rpc_async(root, trains_over, args=(path, count)) for root, path in PATHS]:
            future.wait()
        for name in NAMES:
            times = sum(path.count(name) for _, path in PATHS) * count
            assert rpc.rpc_sync(name, grad_on_path, args=(name,)).tolist() == [times] * 3
    for handle in handles:
        handle.remove()
    assert len(runs) == (len(PATHS) * len(NAMES) * count if hooked else 0)


def test_a_part_that_begins_when_its_graph_is_gone(workers):
    """It adds to no `.grad`."""
    x = ones()
    found = rpc.rpc_sync("b", enables_grad, args=(x,))
    for sent in workers["b"].contexts.plain.sends.values():
        sent.graph.clear()
    with pytest.raises(errors.BackwardError, match="is not kept any more"):
        found.sum().backward()
    assert rpc.rpc_sync("b", grad_of_weight) is None


# -- modules and modes -------------------------------------------------------------------------------------


def run_module(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_parameter_beside_its_module(workers):
    module = nn.Linear(3, 3)
    for args in ((module, module.weight), (module.weight, module), ([module], [module.weight])):
        with pytest.raises(errors.EncodeError, match="also in a module"):
            rpc.rpc_sync("b", run_module, args=args)
    rpc.rpc_sync("b", run_module, args=(module, module.weight.detach()))
    other = nn.Linear(3, 3)
    rpc.rpc_sync("b", run_module, args=(module, other.weight)).sum().backward()
    assert torch.equal(other.weight.grad, torch.full((3, 3), 2.0))  # type: ignore[arg-type]


_weight = torch.full((3,), 3.0, requires_grad=True)


def grad_of_weight() -> torch.Tensor | None:
    return _weight.grad


def enables_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * _weight


def test_a_callee_that_enables_grad(workers):
    """As a function does locally."""
    x = ones()
    with torch.no_grad():
        found = rpc.rpc_sync("b", enables_grad, args=(x,))
    found.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]
    assert torch.equal(rpc.rpc_sync("b", grad_of_weight), torch.ones(3))
    _weight.grad = None


# -- deep graphs -------------------------------------------------------------------------------------------

DEEP = """
    import sys
    import time
    import torch
    import telegrad
    from telegrad import autograd, rpc

    def deep(x, length=80_000):
        for _ in range(length):
            x = x * 1.0
        return x

    def sent(x):
        return rpc.rpc_sync("b", torch.mul, args=(x, 2))

    kind = sys.argv[1]
    x = torch.ones(1, requires_grad=True)
    with telegrad.LocalCluster(["b"], transport="inproc"):
        alive = sent(x)
        if kind == "local":
            deep(x).backward()
        elif kind == "received":
            deep(alive).backward()
        elif kind == "sent":
            sent(deep(x)).backward()
        elif kind == "kept":
            kept = sent(deep(x))
        elif kind == "dropped":
            h = deep(x)
            middle = deep(h)
            last = deep(middle)
            sent(last).backward()
            time.sleep(0.1)  # the Send is gone
            del last
            h = None
            del middle
        elif kind == "steps":
            h, losses = x, []
            for _ in range(100):
                h = deep(h, 1000)
                losses.append(sent(h))
            sum(losses).backward()
            del losses
            time.sleep(0.1)
            del h
        elif kind == "forked":
            h = torch.stack([deep(x), deep(x)])
            sent(h).sum().backward()
            h = None
        elif kind == "in a context":
            h = deep(x)
            with autograd.context() as context_id:
                loss = sent(h)
                autograd.backward(context_id, [deep(loss)])
            del loss
            time.sleep(0.1)
            del h
        else:
            kept = sent(h := deep(x))
    if kind == "closed":
        del kept
        del h
    print("done")
"""


@pytest.mark.parametrize(
    "kind", ["local", "received", "sent", "kept", "dropped", "steps", "forked", "in a context", "closed", "left"]
)
def test_deep_graphs(kind):
    run_to_its_end(DEEP, kind)


def run_to_its_end(text, *arguments):
    """Runs a program in a process of its own: where it crashes, only that ends."""
    program = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n"


DEEP_SENDS = """
    import sys
    import torch
    from telegrad.gradients.context import all_sent
    from telegrad.gradients.local_graph import Graph
    from telegrad.gradients.plain import make_plain

    x = torch.ones(1, requires_grad=True)
    for _ in range(80_000):
        x = x * 1.0
    plain = make_plain(1, lambda: 0)
    graph = Graph(plain.new_group)
    plain.add(all_sent(1, 7, [x, x], graph, lambda: 2))
    del x
    if sys.argv[1] == "closed":
        plain.close()
    else:
        first, _ = plain.forget_sent(7, [1])
        last, _ = plain.forget_sent(7, [2])
        assert 1 in plain.receivers
        last()  # on another thread, which is faster
        first()
    assert len(graph.known) == 1 and not plain.sends and not plain.receivers
    print("done")
"""


@pytest.mark.parametrize("kind", ["closed", "forgotten by two threads"])
def test_deep_graphs_behind_sends(kind):
    """However the Sends of a message go."""
    run_to_its_end(DEEP_SENDS, kind)


ON_ANOTHER_DEVICE = """
    import torch
    torch.set_default_device("meta")
    import telegrad
    from telegrad import rpc
    from telegrad.gradients import engine_call, nodes

    with telegrad.LocalCluster(["b"], transport="inproc"):
        x = torch.ones(3, device="cpu", requires_grad=True)
        y = rpc.rpc_sync("b", torch.mul, args=(x, 2))
        y.sum().backward()
        assert x.grad.tolist() == [2, 2, 2]
        (anchor,) = [node.variable for node, _ in y.grad_fn.next_functions if node is not None]
        assert {t.device.type for t in (nodes._TOKEN, engine_call._ONE, engine_call._BEACON, anchor)} == {"cpu"}
    print("done")
"""


def test_another_default_device():
    """Where torch makes new tensors has nothing to say in which thread's queue our nodes are."""
    run_to_its_end(ON_ANOTHER_DEVICE)
