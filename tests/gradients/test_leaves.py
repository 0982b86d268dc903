"""Leaf gradients: taken before they reach `.grad`, and added up as torch's AccumulateGrad would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F

from telegrad._torch import run_backward
from telegrad.gradients import adding, captured, leaves
from telegrad.gradients.averaged import leaves_are_averaged
from telegrad.gradients.captured import Captured
from telegrad.gradients.leaves import Capture, GradientTable, accumulated

PATIENCE = 30.0  # seconds


def node_of(leaf: torch.Tensor):
    return torch.autograd.graph.get_gradient_edge(leaf).node


def take(lock: threading.Lock, held_by: str) -> None:
    """As a pass does, for a leaf whose turn another one has."""
    assert lock.acquire(timeout=PATIENCE), held_by


by_engine = True


@pytest.fixture(autouse=True, params=["engine", "prehooks"])
def way(request, monkeypatch):
    """The engine's own capture, where it can be used; and the other way, which is there for all leaves."""
    monkeypatch.setattr(sys.modules[__name__], "by_engine", request.param == "engine")
    return request.param


def capture_by_engine(loss: torch.Tensor, captured: Captured, *, create_graph: bool = False):
    ones = torch.ones_like(loss)
    return run_backward((loss,), (ones,), create_graph, create_graph, tuple(captured.inputs), True, False)


def capture_backward(
    loss: torch.Tensor, leaves: Iterable[torch.Tensor], *, create_graph: bool = False
) -> GradientTable:
    """Runs backward, and gives what would have gone to the leaves' `.grad`."""
    nodes = [node_of(leaf) for leaf in leaves]
    if by_engine and (captured := Captured.of(nodes)) is not None:
        return captured.gather(capture_by_engine(loss, captured, create_graph=create_graph))
    capture = Capture(lambda: True, take)
    capture.watch(nodes)
    try:
        loss.backward(create_graph=create_graph)
    finally:
        capture.close()
    return capture.gradients


class Gives(torch.autograd.Function):
    """The identity, whose gradient is made by `make` out of the one that comes."""

    @staticmethod
    def forward(ctx, x, make):
        ctx.make = make
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.make(gradient), None


# -- against AccumulateGrad --------------------------------------------------------------------------------


def embed(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.tensor([1, 3, 3]), weight, sparse=True).sum()


def embed_and_more(weight: torch.Tensor) -> torch.Tensor:
    return embed(weight) + weight.square().sum()


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda w: (w * w).sum(),
    "expanded": lambda w: w.sum(),  # whose gradient has stride 0
    "transposed": lambda w: (w.t() * torch.arange(20.0).view(4, 5)).sum(),
    "part": lambda w: w[1:3, ::2].sum(),
    "conj": lambda w: (torch.complex(w, w).conj() * 1j).real.square().sum(),
    "sparse": embed,
    "dense and sparse at once": embed_and_more,
}
SEQUENCES = [
    *([name, name] for name in LOSSES),
    ["sparse", "dense"],
    ["dense", "sparse"],
    ["sparse", "sparse", "dense", "sparse"],
    ["expanded", "part"],
]


def contiguous() -> torch.Tensor:
    return torch.linspace(-1, 1, 20).view(5, 4)


def column_major() -> torch.Tensor:
    return torch.linspace(-1, 1, 20).view(4, 5).t()


def with_gaps() -> torch.Tensor:
    return torch.linspace(-1, 1, 40).view(5, 8)[:, ::2]


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")  # so says torch
@pytest.mark.parametrize("make", [contiguous, column_major, with_gaps])
@pytest.mark.parametrize("names", SEQUENCES, ids="+".join)
def test_gradients_add_up_as_in_grad(names, make):
    with_grad, captured = make().requires_grad_(), make().requires_grad_()
    table = GradientTable()
    for name in names:
        LOSSES[name](with_grad).backward()
        table.take_over(capture_backward(LOSSES[name](captured), [captured]))
        found, expected = table.get(captured), with_grad.grad
        assert captured.grad is None
        assert found.layout is expected.layout
        if expected.is_sparse:
            assert torch.equal(found.to_dense(), expected.to_dense())
        else:
            assert found.stride() == expected.stride(), "a gradient lies in memory as its leaf does"
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_have_their_leafs_dtype(dtype):
    weight = torch.ones(3, dtype=dtype, requires_grad=True)
    table = capture_backward((weight * 2).abs().sum(), [weight])
    assert table.get(weight).dtype is dtype
    assert torch.equal(table.get(weight), torch.full((3,), 2, dtype=dtype))


# -- whose memory it is ------------------------------------------------------------------------------------


def test_a_gradient_that_nothing_else_holds_is_kept_without_a_copy():
    addresses = []

    def make(gradient):
        made = torch.full((1000,), 3.0)
        addresses.append(made.data_ptr())
        return made

    weight = torch.ones(1000, requires_grad=True)
    table = capture_backward(Gives.apply(weight, make).sum(), [weight])
    assert table.get(weight).data_ptr() == addresses[0]
    # As in torch.
    Gives.apply(weight, make).sum().backward()
    assert weight.grad.data_ptr() == addresses[1]


@pytest.mark.parametrize("counted", [lambda: (2, 4), lambda seen=[]: seen.append(0) or len(seen)])
def test_where_references_say_nothing_every_gradient_is_copied(monkeypatch, counted, way):
    """As on a torch that counts otherwise: the same for all gradients, or never the same."""
    if way == "engine":
        module = captured
        monkeypatch.setattr(
            module,
            "_look_at",
            lambda gradients, count: ([counted() for _ in range(count)], [*map(id, gradients[:count])]),
        )
    else:
        module = leaves
        monkeypatch.setattr(module, "_references", lambda gradients: counted())
    unreliable = module._free_references.__wrapped__()
    assert unreliable is None
    monkeypatch.setattr(module, "_free_references", lambda: unreliable)
    given = torch.randn(3)
    leaf = torch.ones(3, requires_grad=True)
    address = []
    loss = leaf * given
    loss.grad_fn.register_hook(lambda inputs, outputs: address.append(inputs[0].data_ptr()))
    found = capture_backward(loss.sum(), [leaf]).copy()[leaf]
    assert torch.equal(found, given)
    assert [found.data_ptr()] != address


def test_a_gradient_that_torch_has_made_is_kept_without_a_copy():
    addresses = []
    weight = torch.ones(1000, requires_grad=True)
    weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    table = capture_backward((weight * weight).sum(), [weight])
    assert table.get(weight).data_ptr() == addresses[0]


def test_a_gradient_that_is_held_elsewhere_is_copied():
    held = []

    def make(gradient):
        held.append(torch.full((1000,), 3.0))
        return held[-1]

    weight = torch.ones(1000, requires_grad=True)
    table = capture_backward(Gives.apply(weight, make).sum(), [weight])
    held[0].zero_()
    assert torch.equal(table.get(weight), torch.full((1000,), 3.0))


def test_a_gradient_that_a_hook_has_kept_is_copied():
    kept = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(kept.append)
    table = capture_backward((weight * 2).sum(), [weight])
    kept[0].zero_()
    assert torch.equal(table.get(weight), torch.full((3,), 2.0))


def test_adding_changes_no_other_memory():
    kept = []
    weight = torch.ones(3, requires_grad=True)
    table = GradientTable()
    for _ in range(3):
        loss = Gives.apply(weight, lambda gradient: kept.append(gradient.clone()) or kept[-1]).sum()
        table.take_over(capture_backward(loss, [weight]))
    assert torch.equal(table.get(weight), torch.full((3,), 3.0))
    assert all(torch.equal(gradient, torch.ones(3)) for gradient in kept)


def test_a_sparse_gradient_that_is_held_elsewhere_is_copied():
    held = []

    def make(gradient):
        held.append(torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True))
        return held[-1]

    weight = torch.ones(3, requires_grad=True)
    table = capture_backward(Gives.apply(weight, make).sum(), [weight])
    held[0]._values().zero_()
    assert table.get(weight).to_dense().tolist() == [0, 2, 0]


def test_two_leaves_with_one_gradient_do_not_share_memory():
    #      u ──╮
    #          ├─▶ u + v ──▶ loss      the sum passes one tensor on to both
    #      v ──╯
    u, v = (torch.ones(3, requires_grad=True) for _ in range(2))
    table = capture_backward(((u + v) * torch.ones(3)).sum(), [u, v])
    table.get(u).add_(1)
    assert torch.equal(table.get(v), torch.ones(3))


# -- `.grad` is left alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
def test_grad_is_left_alone(hooked):
    weight = torch.ones(3, requires_grad=True)
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda leaf: None)
    capture_backward((weight * 2).sum(), [weight])
    assert weight.grad is None
    before = weight.grad = torch.full((3,), 7.0)
    table = capture_backward((weight * 2).sum(), [weight])
    assert weight.grad is before
    assert torch.equal(before, torch.full((3,), 7.0))
    assert torch.equal(table.get(weight), torch.full((3,), 2.0))


def test_after_the_capture_backward_goes_to_grad_again():
    weight = torch.ones(3, requires_grad=True)
    capture_backward((weight * 2).sum(), [weight])
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("hooked", [False, True])
def test_another_threads_backward_through_the_same_leaf_is_left_alone(hooked):
    """It runs while the capture does, in the middle of its backward."""
    weight = torch.ones(3, requires_grad=True)
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda leaf: None)
    own = threading.get_ident()
    capture = Capture(lambda: threading.get_ident() == own, take)

    def make(gradient):
        thread = threading.Thread(target=lambda: (weight * 5).sum().backward())
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        return gradient * 2

    loss = Gives.apply(weight, make).sum()
    capture.watch([node_of(weight)])
    loss.backward()
    capture.close()
    assert torch.equal(weight.grad, torch.full((3,), 5.0))
    assert torch.equal(capture.gradients.get(weight), torch.full((3,), 2.0))


def test_two_captures_at_once_each_take_their_own():
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda leaf: None)
    found = {}

    def run(factor: int) -> None:
        own = threading.get_ident()
        for _ in range(20):
            capture = Capture(lambda: threading.get_ident() == own, take)
            loss = (weight * factor).sum()
            capture.watch([node_of(weight)])
            loss.backward()
            capture.close()
            found.setdefault(factor, []).append(capture.gradients.get(weight).tolist())

    threads = [threading.Thread(target=run, args=(factor,)) for factor in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {factor: [[float(factor)] * 3] * 20 for factor in (2, 3, 4)}
    assert weight.grad is None


# -- hooks -------------------------------------------------------------------------------------------------


def test_hooks_of_every_kind_run_once_in_torchs_order_on_the_whole_gradient():
    #      w ──▶ w * 2 ──╮
    #       ╲            ├─▶ loss      two ways to the leaf, one gradient
    #        ╰─▶ w * 3 ──╯
    def run(by_capture: bool) -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        weight = torch.ones(1, requires_grad=True)

        def double(gradient):
            seen.append(("hook", gradient.item()))
            return gradient * 2

        weight.register_hook(double)
        node = node_of(weight)
        node.register_prehook(lambda g: seen.append(("prehook", g[0].item())))
        weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(("post", leaf.grad.item())))
        loss = (weight * 2).sum() + (weight * 3).sum()
        if by_capture:
            table = capture_backward(loss, [weight])
            seen.append(("result", table.get(weight).item()))
        else:
            loss.backward()
            seen.append(("result", weight.grad.item()))
        return seen

    expected = [("hook", 5.0), ("prehook", 10.0), ("post", 10.0), ("result", 10.0)]
    assert run(by_capture=False) == expected
    assert run(by_capture=True) == expected


def test_hooks_on_the_node_run_without_post_accumulate_hooks_too():
    weight, seen = torch.ones(1, requires_grad=True), []
    node = node_of(weight)
    node.register_hook(lambda *_: seen.append("hook of the node"))
    table = capture_backward((weight * 2).sum(), [weight])
    assert seen == ["hook of the node"]
    assert table.get(weight).item() == 2


def test_what_a_post_accumulate_hook_does_to_the_gradient_counts():
    weight = torch.ones(3, requires_grad=True)

    def scale(leaf: torch.Tensor) -> None:
        leaf.grad.mul_(10)

    weight.register_post_accumulate_grad_hook(scale)
    assert capture_backward((weight * 2).sum(), [weight]).get(weight).tolist() == [20.0] * 3


def test_a_post_accumulate_hook_that_takes_the_gradient_away():
    """As optimizers that step in backward do: it is theirs, and there is nothing to keep."""
    weight, taken = torch.ones(3, requires_grad=True), []

    def take(leaf: torch.Tensor) -> None:
        taken.append(leaf.grad)
        leaf.grad = None

    weight.register_post_accumulate_grad_hook(take)
    weight.grad = before = torch.full((3,), 7.0)
    assert capture_backward((weight * 2).sum(), [weight]).get(weight) is None
    assert [g.tolist() for g in taken] == [[2.0] * 3]
    assert weight.grad is before


@pytest.mark.parametrize("kind", ["hook", "post"])
def test_a_hook_that_raises_leaves_grad_as_it_was(kind):
    weight = torch.ones(3, requires_grad=True)
    weight.grad = before = torch.full((3,), 7.0)

    def fail(_) -> None:
        raise ZeroDivisionError("in a hook")

    if kind == "hook":
        handle = weight.register_hook(fail)
    else:
        handle = weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        capture_backward((weight * 2).sum(), [weight])
    assert weight.grad is before
    handle.remove()
    # And nothing is locked or watched any more.
    weight.register_post_accumulate_grad_hook(lambda leaf: None)
    assert capture_backward((weight * 2).sum(), [weight]).get(weight).tolist() == [2.0] * 3


# -- gradients with a graph of their own -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")  # which would be a cycle in `.grad`
@pytest.mark.parametrize("hooked", [False, True])
def test_with_create_graph_gradients_keep_their_history_and_are_added_out_of_place(hooked):
    weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda leaf: None)
    table = capture_backward(weight**3, [weight], create_graph=True)
    first = table.get(weight)
    (second,) = torch.autograd.grad(first, weight, retain_graph=True)
    assert second.item() == 18.0
    table.take_over(capture_backward(weight**2, [weight], create_graph=True))
    assert first.item() == 27.0, "the first gradient may be part of a graph: it was not changed"
    assert table.get(weight).item() == 33.0
    (second,) = torch.autograd.grad(table.get(weight), weight)
    assert second.item() == 20.0


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_sum_of_one_gradient_with_history_and_one_without():
    weight = torch.tensor(3.0, requires_grad=True)
    table = capture_backward(weight**3, [weight])
    table.take_over(capture_backward(weight**2, [weight], create_graph=True))
    assert table.get(weight).requires_grad
    assert table.get(weight).item() == 33.0


PROGRAM = """
import torch, telegrad
from telegrad import autograd
with telegrad.LocalCluster(["a"], transport="inproc") as cluster, autograd.context() as context_id:
    x = torch.ones(3, requires_grad=True)
    autograd.backward(context_id, [cluster.call("a", torch.sin, x).sum()], create_graph=True)
"""


def test_create_graph_does_not_warn():
    """torch does, once in a process, of a cycle with `.grad` that there is not here."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# -- the table ---------------------------------------------------------------------------------------------


def test_leaves_are_told_apart_by_identity():
    twins = [torch.ones(3, requires_grad=True) for _ in range(2)]
    table = GradientTable()
    for place, leaf in enumerate(twins):
        table.add(leaf, torch.full((3,), float(place)))
    assert len(table) == 2
    assert [table.copy()[leaf][0].item() for leaf in twins] == [0.0, 1.0]
    assert table.get(torch.ones(3)) is None


def test_a_table_is_taken_over_by_another():
    leaf, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    context, finished = GradientTable(), GradientTable()
    context.add(leaf, torch.ones(3))
    finished.add(leaf, torch.ones(3))
    finished.add(other, torch.ones(3))
    context.take_over(finished)
    assert len(finished) == 0
    assert context.get(leaf).tolist() == [2.0] * 3
    assert context.get(other).tolist() == [1.0] * 3


def test_a_table_goes_to_the_leaves_grad():
    leaf, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    leaf.grad = torch.ones(3)
    table = GradientTable()
    for tensor in (leaf, other):
        table.add(tensor, torch.ones(3))
    table.add_to_leaves()
    assert len(table) == 0
    assert leaf.grad.tolist() == [2.0] * 3
    assert other.grad.tolist() == [1.0] * 3


def test_replace_and_clear():
    leaf, table = torch.ones(3, requires_grad=True), GradientTable()
    table.add(leaf, torch.ones(3))
    table.replace(leaf, torch.zeros(3))
    assert table.get(leaf).tolist() == [0.0] * 3
    table.clear()
    assert len(table) == 0 and table.get(leaf) is None


def test_a_gradient_made_in_inference_mode_is_added_to_out_of_place():
    with torch.inference_mode():
        old = torch.ones(3)
    assert accumulated(old, torch.ones(3)).tolist() == [2.0] * 3
    assert old.tolist() == [1.0] * 3


def test_what_is_added_to_grad_while_another_pass_runs_the_hooks_is_not_lost():
    """`.grad` is set aside for the hooks meanwhile."""
    leaf = torch.ones(3, requires_grad=True)
    other = GradientTable()
    other.add(leaf, torch.full((3,), 5.0))
    seen = []

    def hook(leaf: torch.Tensor) -> None:
        other.add_to_leaves()
        seen.append(leaf.grad.clone())

    leaf.grad = torch.ones(3)
    leaf.register_post_accumulate_grad_hook(hook)
    captured = capture_backward((leaf * 2).sum(), [leaf]).copy()
    torch.testing.assert_close(seen, [torch.full((3,), 2.0)])
    torch.testing.assert_close(captured[leaf], torch.full((3,), 2.0))
    torch.testing.assert_close(leaf.grad, torch.full((3,), 6.0))


def test_a_gradient_of_several_leaves_is_none_of_theirs():
    """Also not of the last one, when nothing else holds it any more: the Function that made it may have its address."""

    class Both(torch.autograd.Function):
        address = 0

        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, gradient):
            Both.address = gradient.data_ptr()
            return gradient, gradient

    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    found = capture_backward((Both.apply(a, b) * 2).sum(), [a, b])
    addresses = {found.get(leaf).data_ptr() for leaf in (a, b)}
    assert len(addresses) == 2
    assert Both.address not in addresses


def test_a_sparse_gradient_with_expanded_parts_is_copied():
    """More could not be added to it in place."""

    def expanded(_):
        with torch.sparse.check_sparse_tensor_invariants(False):
            return torch.sparse_coo_tensor(torch.ones(1, 1).long().expand(1, 4), torch.ones(1, 2).expand(4, 2), (5, 2))

    leaf = torch.zeros(5, 2, requires_grad=True)
    table = capture_backward(Gives.apply(leaf, expanded).sum(), [leaf])
    assert table.get(leaf)._values().is_contiguous()
    table.add(leaf, table.get(leaf).clone())
    assert torch.equal(table.get(leaf).to_dense(), 2 * expanded(None).to_dense())


def test_what_a_module_around_the_leaves_puts_into_grad_is_the_gradient():
    """As DistributedDataParallel does at the end of the engine call, also for leaves that were not reached."""
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    leaves_are_averaged(leaves)
    leaves[0].grad = torch.full((2,), 7.0)

    def average(_):
        def at_the_end():
            for leaf in leaves:
                leaf.grad = torch.full((2,), 3.0)

        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    loss = (leaves[0] * 2).sum()
    loss.register_hook(average)
    found = capture_backward(loss, leaves[:1])
    assert [found.get(leaf).tolist() for leaf in leaves] == [[3.0, 3.0]] * 2
    assert leaves[0].grad.tolist() == [7.0, 7.0]
    assert leaves[1].grad is None


# -- forks and finalisers -----------------------------------------------------------------------------------


def test_a_fork_does_not_wait_for_threads_that_it_does_not_have():
    """At the moment of the fork another thread holds all that there is to hold."""
    leaf = torch.ones(3, requires_grad=True)
    turn = leaves._turn_of(leaf)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with adding.touching_grad, leaves._making_turns, turn.free:
            held.set()
            assert release.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, since Python 3.12
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # which ends it, if it waits
        table = GradientTable()
        table.add(leaf, torch.ones(3))
        table.add_to_leaves()
        os._exit(0 if leaves._turn_of(leaf).free.acquire(blocking=False) else 1)
    _, status = os.waitpid(pid, 0)
    release.set()
    thread.join(PATIENCE)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_finaliser_that_adds_gradients_while_some_are_added():
    """Whatever dies while gradients are added up may have a `__del__` that adds up some itself."""
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    done = []

    class Dying:
        def __del__(self) -> None:
            inner = GradientTable()
            inner.add(other, torch.ones(3))
            inner.add_to_leaves()
            done.append(True)

    table = GradientTable()
    table.replace(leaf, Adding(torch.ones(3), [Dying()]))
    leaf.grad = torch.zeros(3)
    thread = threading.Thread(target=table.add_to_leaves, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done
    assert not thread.is_alive()


class Adding(torch.Tensor):
    """A gradient that lets go of something while it is added."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, keeps: list[object]) -> Adding:
        self = torch.Tensor._make_subclass(cls, data)
        self.keeps = keeps
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        for arg in args:
            if isinstance(arg, cls) and getattr(function, "__name__", "") == "add_":
                arg.keeps.clear()
        return super().__torch_function__(function, types, args, kwargs or {})
