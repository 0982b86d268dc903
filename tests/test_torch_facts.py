"""What telegrad takes for granted of torch's private names: one test, or more, for each line of _torch.py, and for the
private methods of nodes, tensors and futures that other files use. A torch that changes one of them fails here first.
"""

from __future__ import annotations

import ast
import copy
import gc
import importlib.util
import inspect
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler, profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from telegrad import _torch
from telegrad.gradients import nodes

PACKAGE = Path(_torch.__file__).parent
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*is deprecated", "ignore:.*quantized tensor creation functions:UserWarning"
)
_covered: set[str] = set()


def fact_of(*names: str) -> Callable[[Any], Any]:
    """Says which names of _torch.py a test is about."""
    _covered.update(names)
    return lambda test: test


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class Marked(torch.Tensor):
    pass


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


# -- futures -----------------------------------------------------------------------------------------------


@fact_of("BaseFuture")
def test_every_future_is_a_base_future() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    assert isinstance(future, _torch.BaseFuture)
    future.set_result(1)
    assert isinstance(future.then(lambda done: done.value()), _torch.BaseFuture)
    assert isinstance(torch.futures.collect_all([future]), _torch.BaseFuture)


def test_an_unwrap_function_raises_for_everyone_who_asks_for_the_value() -> None:
    future: torch.futures.Future[None] = torch.futures.Future()

    def unwrap(_: object) -> None:
        raise KeyError("made anew")

    future._set_unwrap_func(unwrap)
    future.set_result(None)
    for ask in (future.wait, future.value, lambda: torch.futures.wait_all([future])):
        with pytest.raises(KeyError, match="made anew"):
            ask()


# -- the engine and its nodes ------------------------------------------------------------------------------


@fact_of("run_backward")
def test_the_engine_accumulates_into_leaves_from_several_roots() -> None:
    x = leaf()
    roots = (x * 2).sum(), (x * 3).sum()
    _torch.run_backward(roots, (torch.ones(()),) * 2, False, False, (), True, True)
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5, 5]


@fact_of("run_backward")
def test_the_engine_returns_gradients_of_inputs_and_leaves_grad_alone() -> None:
    x, unused = leaf(), leaf()
    found = _torch.run_backward(((x * 2).sum(),), (torch.ones(()),), False, False, (x, unused), True, False)
    assert found[0].tolist() == [2, 2, 2]
    assert found[1] is None
    assert x.grad is None


@fact_of("current_graph_task_id")
def test_a_graph_task_has_a_number_only_inside_of_the_engine() -> None:
    seen = []
    x = leaf()
    y = x * 2
    y.register_hook(lambda _: seen.append(_torch.current_graph_task_id()))
    assert _torch.current_graph_task_id() == -1
    y.sum().backward()
    (x * 3).sum().backward()
    assert _torch.current_graph_task_id() == -1
    assert len(seen) == 1
    assert seen[0] >= 0


@fact_of("stash_in_tls", "is_in_tls")
def test_what_is_stashed_is_seen_by_nodes_of_the_engine_call_and_of_those_inside_of_it() -> None:
    """And on the threads of devices: tests/cuda/test_cuda_facts.py."""
    key, seen = "tests: key", []
    assert not _torch.is_in_tls(key)

    def look(_: Any) -> None:
        seen.append(_torch.is_in_tls(key))

    def run(hook: Callable[[Any], None]) -> None:
        with torch.enable_grad():
            y = leaf() * 2
        y.register_hook(hook)
        torch.autograd.backward([y], [torch.ones(3)])

    def on_another_thread() -> None:
        _torch.stash_in_tls(key, None)
        run(lambda _: run(look))
        run(look)

    thread = threading.Thread(target=on_another_thread)
    thread.start()
    thread.join()
    run(look)
    assert seen == [True, True, False]


@fact_of("COMPILED_AUTOGRAD")
def test_compiled_autograd_is_a_module_that_torch_does_not_import_by_itself() -> None:
    look = f"import sys, torch, importlib.util; assert {_torch.COMPILED_AUTOGRAD!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=100)
    assert importlib.util.find_spec(_torch.COMPILED_AUTOGRAD) is not None


@fact_of("bind_apply")
def test_the_bound_apply_is_functions_own() -> None:
    apply = _torch.bind_apply(None, Double)
    x = leaf()
    y = apply(x)
    assert isinstance(y.grad_fn, Double._backward_cls)  # type: ignore[attr-defined]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


@fact_of("push_saved_tensors_hooks", "pop_saved_tensors_hooks", "are_saved_tensors_hooks_enabled")
@pytest.mark.parametrize("at_once", [True, False])
def test_what_hooks_unpack_leads_to_where_the_saved_tensor_led(at_once: bool) -> None:
    x = leaf()
    parts = (x * 2).unbind()
    tensors, token = [x * 3, x * 4, parts[0].view(1), parts[2] * 1, parts[1]], torch.zeros(())
    edges = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors]
    if at_once:
        _torch.push_saved_tensors_hooks(callable, lambda packed: token)
        try:
            output = Saving.apply(*tensors)
        finally:
            _torch.pop_saved_tensors_hooks()
    else:
        with torch.autograd.graph.disable_saved_tensors_hooks("disabled"):
            assert not _torch.are_saved_tensors_hooks_enabled()
            output = Saving.apply(*tensors)
            for saved in output.grad_fn._raw_saved_tensors:
                saved.register_hooks(callable, lambda packed: token)
    assert _torch.are_saved_tensors_hooks_enabled()
    tensors[0].mul_(2)
    tensors[1].detach_()
    node = output.grad_fn  # on torch 2.11 it must be kept by its output
    for _ in range(2):
        assert [(found.grad_fn, found.output_nr) for found in node.saved_tensors] == edges
    assert all(found.shape == () and found.requires_grad for found in node.saved_tensors)
    assert not token.requires_grad


def test_a_class_of_nodes_takes_another_name() -> None:
    class Named(Double):
        pass

    Named._backward_cls.__name__ = "another::Name"  # type: ignore[attr-defined]
    node = Named.apply(leaf()).grad_fn
    assert type(node).__name__ == "another::Name"
    assert isinstance(CheckpointFunction._backward_cls, type)  # type: ignore[attr-defined]


def test_of_nodes_with_the_highest_number_the_one_that_was_ready_first_runs_first() -> None:
    """So the Beacon, a node with that number and the first start, comes before any leaf."""
    leaves = [torch.zeros((), requires_grad=True) for _ in range(6)]
    nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
    beacon = torch.zeros((), requires_grad=True).clone()
    nodes.insert(0, beacon.grad_fn)
    nodes[0]._set_sequence_nr(2**64 - 1)
    assert {node._sequence_nr() for node in nodes} == {2**64 - 1}
    order: list[int] = []
    for number, node in enumerate(nodes):
        node.register_prehook(lambda gradients, number=number: order.append(number))
    torch.autograd.backward([beacon, *leaves], [torch.ones(())] * 7)
    assert order[0] == 0
    assert sorted(order) == list(range(7))


def test_the_engine_runs_nodes_by_their_sequence_numbers() -> None:
    """The highest first, whatever the order in which they were made."""
    order: list[str] = []
    x = leaf()
    first, second = Double.apply(x), Double.apply(x)
    assert second.grad_fn._sequence_nr() > first.grad_fn._sequence_nr() > 0
    first.grad_fn._set_sequence_nr(1 << 40)
    second.grad_fn._set_sequence_nr(0)
    assert (first.grad_fn._sequence_nr(), second.grad_fn._sequence_nr()) == (1 << 40, 0)
    other = Double.apply(x)
    for name, tensor in (("first", first), ("second", second), ("other", other)):
        tensor.register_hook(lambda _, name=name: order.append(name))
    (first + other + second).sum().backward()
    assert order == ["first", "other", "second"]


def test_a_gradient_that_is_held_has_more_references_than_a_free_one() -> None:
    """In torch (a view of it by another node) and in Python: gradients/leaves.py compares with a free one."""

    def references(hold: Callable[[torch.Tensor], object]) -> tuple[int, int]:
        found, held = [], []
        x = leaf()
        y = x * 2
        y.grad_fn.register_prehook(lambda gradients: held.append(hold(gradients[0])))  # type: ignore[union-attr]

        def count(gradients: tuple[torch.Tensor, ...]) -> None:
            found.append((gradients[0]._use_count(), sys.getrefcount(gradients[0])))  # type: ignore[attr-defined]

        accumulate: Any = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        accumulate.register_prehook(lambda gradients: held.append(hold(gradients[0])))
        accumulate.register_prehook(count)
        y.backward(torch.ones(3))
        return found[0]

    free = references(lambda gradient: None)
    assert references(lambda gradient: None) == free
    assert references(lambda gradient: gradient) > free


def test_a_node_says_what_it_gives() -> None:
    (metadata,) = (leaf() * 2).grad_fn._input_metadata  # type: ignore[union-attr]
    assert tuple(metadata.shape) == (3,)
    assert metadata.dtype is torch.float32


def test_a_leaf_says_whether_it_has_post_accumulate_hooks() -> None:
    x = leaf()
    assert not x._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert x._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@fact_of("len_torch_function_stack")
def test_a_default_device_is_a_function_mode_of_the_thread() -> None:
    assert _torch.len_torch_function_stack() == 0
    torch.set_default_device("meta")
    try:
        assert _torch.len_torch_function_stack() == 1
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_torch.len_torch_function_stack).result(10) == 0
    finally:
        torch.set_default_device(None)
    assert _torch.len_torch_function_stack() == 0


@fact_of("len_torch_dispatch_stack")
def test_dispatch_modes_are_the_threads() -> None:
    class Mode(TorchDispatchMode):
        pass

    assert _torch.len_torch_dispatch_stack() == 0
    with Mode():
        assert _torch.len_torch_dispatch_stack() == 1
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_torch.len_torch_dispatch_stack).result(10) == 0
    assert _torch.len_torch_dispatch_stack() == 0


@fact_of("is_any_autocast_enabled")
def test_autocast_of_any_device_is_seen() -> None:
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.is_any_autocast_enabled()
    assert not _torch.is_any_autocast_enabled()
    was_on = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)  # needs no GPU
    try:
        assert _torch.is_any_autocast_enabled()
    finally:
        torch.set_autocast_enabled("cuda", was_on)


# -- tensors -----------------------------------------------------------------------------------------------


@fact_of("DisableTorchFunctionSubclass")
def test_torch_function_of_subclasses_can_be_switched_off() -> None:
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(3).as_subclass(Watched)
    seen.clear()
    with _torch.DisableTorchFunctionSubclass():
        x + 1
    assert seen == []
    x + 1
    assert seen


@fact_of("disabled_torch_dispatch")
def test_a_class_without_a_dispatch_of_its_own_has_the_disabled_one() -> None:
    class Dispatching(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert Marked.__torch_dispatch__ is _torch.disabled_torch_dispatch
    assert torch.nn.Parameter.__torch_dispatch__ is _torch.disabled_torch_dispatch
    assert Dispatching.__torch_dispatch__ is not _torch.disabled_torch_dispatch


def test_make_subclass_shares_the_memory() -> None:
    plain = torch.ones(3)
    made = torch.Tensor._make_subclass(Marked, plain, True)
    assert type(made) is Marked
    assert made.requires_grad
    assert made.data_ptr() == plain.data_ptr()
    assert type(torch.Tensor._make_subclass(torch.Tensor, made, False)) is torch.Tensor


def test_what_says_that_it_is_a_parameter_is_taken_for_one() -> None:
    x = torch.ones(3)
    assert not isinstance(x, torch.nn.Parameter)
    x._is_param = True  # type: ignore[attr-defined]
    assert isinstance(x, torch.nn.Parameter)


@fact_of("extract_tensors")
def test_tensors_of_a_value_are_found_by_pickling_it() -> None:
    class Picklable:
        def __reduce__(self) -> Any:
            callers.append(sys._getframe(1).f_code)
            return object, ()

    callers: list[Any] = []
    x = torch.ones(1)
    found = _torch.extract_tensors({"a": [x, Picklable()], "b": 1})
    assert len(found) == 1
    assert found[0] is x
    assert callers == [_torch.extract_tensors.__code__]


@fact_of("WeakTensorRef")
def test_a_weak_reference_expires_with_its_tensor() -> None:
    x = torch.ones(3)
    weak = _torch.WeakTensorRef(x)
    assert not weak.expired()
    del x
    assert weak.expired()


@fact_of("get_object_state", "set_object_state")
def test_attributes_of_a_tensor_can_be_taken_along() -> None:
    x, y = torch.ones(3).as_subclass(Marked), torch.ones(3).as_subclass(Marked)
    assert not _torch.get_object_state(x)
    x.note = "here"  # type: ignore[attr-defined]
    _torch.set_object_state(y, _torch.get_object_state(x))
    assert y.note == "here"  # type: ignore[attr-defined]


@fact_of("group_by_kind", "foreach_add_", "foreach_mul_", "foreach_norm", "foreach_clamp_min_", "foreach_clamp_max_")
def test_functions_of_several_tensors() -> None:
    single, double = torch.tensor([3.0, -4.0]), torch.tensor([1.0], dtype=torch.float64)
    groups = _torch.group_by_kind([[single, double]], False)
    found = {dtype: tensors for (_, dtype), ((tensors,), _) in groups.items()}
    assert found[torch.float32][0] is single
    assert found[torch.float64][0] is double
    norms = _torch.foreach_norm([single, double], 2.0)  # also of several dtypes
    assert [norm.item() for norm in norms] == [5.0, 1.0]
    _torch.foreach_mul_([single], torch.tensor(2.0))
    _torch.foreach_clamp_min_([single], -7.0)
    _torch.foreach_clamp_max_([single], 5.0)
    _torch.foreach_add_([single], [torch.ones(2)])
    assert single.tolist() == [6.0, -6.0]


@fact_of("unscale_together")
def test_gradients_are_unscaled_together() -> None:
    found = torch.zeros(())
    gradient = torch.tensor([2.0, float("inf")])
    _torch.unscale_together([gradient], found, torch.tensor(0.5))
    assert gradient[0] == 1.0
    assert found == 1.0


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_look_up_what_gathers_on_the_object(cls: Any) -> None:
    """optim/owner.py puts a function of its own there: one group after the other, the lists by position."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizer: Any = cls([{"params": [weight]} for weight in weights], lr=0.1)
    seen = []

    def gather(group: Any, params: list[Any], gradients: list[Any], *states: list[Any]) -> Any:
        assert not (params or gradients or any(states))
        seen.append(group["params"])
        return cls._init_group(optimizer, group, params, gradients, *states)

    optimizer._init_group = gather
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [group[0] is weight for group, weight in zip(seen, weights, strict=True)] == [True, True]


@fact_of("neg_view", "set_neg")
def test_the_bit_for_negation() -> None:
    x = torch.tensor([1.0, -2.0])
    view = _torch.neg_view(x)
    assert view.is_neg()
    assert view.tolist() == [-1, 2]
    assert view.data_ptr() == x.data_ptr()
    assert not _torch.neg_view(view).is_neg()
    _torch.set_neg(x, True)
    assert x.is_neg()
    assert x.tolist() == [-1, 2]


@fact_of("set_conj")
def test_the_bit_for_conjugation() -> None:
    x = torch.tensor([1 + 2j])
    _torch.set_conj(x, True)
    assert x.is_conj()
    assert x.tolist() == [1 - 2j]


@fact_of("make_per_tensor_quantized", "make_per_channel_quantized")
def test_quantized_tensors_are_made_of_their_integers() -> None:
    whole = torch.quantize_per_tensor(torch.tensor([0.5, -1.0]), 0.5, 3, torch.qint8)
    assert torch.equal(_torch.make_per_tensor_quantized(whole.int_repr(), 0.5, 3), whole)
    scales, zeros = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([1, 2])
    by_channel = torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)
    assert torch.equal(_torch.make_per_channel_quantized(by_channel.int_repr(), scales, zeros, 0), by_channel)


@fact_of("tree_leaves", "tree_map")
def test_trees_of_containers() -> None:
    tree = ({"a": 1}, [2, (3,)])
    assert _torch.tree_leaves(tree) == [1, 2, 3]
    assert _torch.tree_map(lambda leaf: leaf * 2, tree) == ({"a": 2}, [4, (6,)])


# -- modules, operators, TorchScript -----------------------------------------------------------------------


@fact_of("parse_to")
def test_the_arguments_of_to() -> None:
    assert _torch.parse_to("cpu", torch.float64, non_blocking=True) == (torch.device("cpu"), torch.float64, True, None)
    assert _torch.parse_to(torch.float16) == (None, torch.float16, False, None)


@fact_of("set_grad_enabled")
def test_grad_mode_is_set() -> None:
    _torch.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    _torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()


@fact_of("OpOverload", "OpOverloadPacket")
def test_operators_know_their_names() -> None:
    packet, overload = torch.ops.aten.add, torch.ops.aten.add.Tensor
    assert isinstance(packet, _torch.OpOverloadPacket)
    assert isinstance(overload, _torch.OpOverload)
    assert overload._overloadpacket is packet
    assert (packet._qualified_op_name, overload._overloadname) == ("aten::add", "Tensor")


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@fact_of("wrap_cpp_module")
def test_a_scripted_method_leads_to_its_module() -> None:
    method = torch.jit.script(Scripted()).forward
    assert isinstance(method, torch.ScriptMethod)
    module = _torch.wrap_cpp_module(method.owner)
    assert isinstance(module, torch.jit.ScriptModule)
    assert getattr(module, method.name)(torch.ones(1)).tolist() == [2]


@fact_of("ConcreteModuleType", "TorchDispatchMode")
def test_what_a_scripted_module_holds() -> None:
    module = torch.jit.script(nn_with(leaf() * 2))
    assert "found" in _torch.ConcreteModuleType.from_jit_type(module._c._type()).get_attributes()
    found = module._c.getattr("found")
    assert found.grad_fn is not None and module._c.getattr("found") is found
    seen = []

    class Look(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert function is torch.ops.aten.clone.default
            seen.append(args[0])
            return args[0].detach()

    with Look():
        copy.deepcopy(module._c)
    assert seen == [found]
    other = leaf() * 3
    module._c.setattr("found", other)
    assert module.found is other and module._c.getattr("found") is other


def nn_with(tensor: torch.Tensor) -> torch.nn.Module:
    module = Scripted()
    module.register_buffer("found", tensor)
    return module


@fact_of("find_builtin", "qualified_name")
def test_names_of_functions() -> None:
    assert _torch.find_builtin(torch.mul) == "aten::mul"
    assert _torch.find_builtin(scripted) is None
    function = torch.jit.script(scripted)
    assert _torch.qualified_name(function).startswith("__torch__.")
    assert _torch.qualified_name(function).endswith(".scripted")
    assert function.qualified_name == _torch.qualified_name(function)


@fact_of("eval_frame")
def test_dynamo_can_be_told_to_run_a_function_as_it_is() -> None:
    def function() -> int:
        return 1

    action = _torch.eval_frame._FrameAction.SKIP
    _torch.eval_frame.set_code_exec_strategy(function.__code__, _torch.eval_frame._FrameExecStrategy(action, action))
    assert function() == 1


# -- profilers ---------------------------------------------------------------------------------------------


@fact_of("ExperimentalConfig", "is_newer_profiler_on", "prepare_newer_profile", "start_newer_profile")
def test_the_newer_profiler_records_all_threads_and_says_that_it_is_on() -> None:
    assert not _torch.is_newer_profiler_on()
    config = _torch.ExperimentalConfig(profile_all_threads=True)
    found = profiler.profile(use_kineto=True, experimental_config=config)
    _torch.prepare_newer_profile(found)
    _torch.start_newer_profile(found)
    try:
        assert _torch.is_newer_profiler_on()
        assert not _torch.profiler_enabled()  # by a profile of this thread: so a callee may start a legacy one
        thread = threading.Thread(target=lambda: torch.ones(3) * 2)
        thread.start()
        thread.join(20)
    finally:
        found.__exit__(None, None, None)
    assert not _torch.is_newer_profiler_on()
    assert any(event.name() == "aten::mul" for event in found.kineto_results.events())


@fact_of("enable_legacy_profiler", "disable_legacy_profiler", "parse_legacy_records", "profiler_enabled")
def test_the_legacy_profiler_belongs_to_a_thread() -> None:
    seen_elsewhere = []
    _torch.enable_legacy_profiler(profiler_legacy.profile().config())
    try:
        assert _torch.profiler_enabled()
        thread = threading.Thread(target=lambda: seen_elsewhere.append(_torch.profiler_enabled()))
        thread.start()
        thread.join(20)
        torch.ones(3) * 2
    finally:
        records = _torch.disable_legacy_profiler()
    assert seen_elsewhere == [False]
    assert not _torch.profiler_enabled()
    assert "aten::mul" in [event.name for event in _torch.parse_legacy_records(records)]


@fact_of("DeviceType")
def test_devices_of_events() -> None:
    assert _torch.DeviceType.CPU != _torch.DeviceType.CUDA
    with profiler.profile(use_kineto=True) as found:
        torch.ones(3)
    assert {event.device_type for event in found.function_events} == {_torch.DeviceType.CPU}


# -- the seam ----------------------------------------------------------------------------------------------


@fact_of("Variable", "ImperativeEngine")
def test_backward_and_grad_reach_the_engine_through_one_attribute() -> None:
    asked: list[tuple[Any, ...]] = []

    class Engine(_torch.ImperativeEngine):
        def run_backward(
            self,
            tensors: Any,
            grad_tensors: Any,
            keep_graph: Any,
            create_graph: Any,
            inputs: Any = (),
            allow_unreachable: Any = False,
            accumulate_grad: Any = False,
        ) -> Any:
            asked.append((tuple(inputs), allow_unreachable, accumulate_grad))
            return super().run_backward(
                tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            )

    x, before = leaf(), _torch.Variable._execution_engine
    _torch.Variable._execution_engine = Engine()
    try:
        x.sum().backward()
        x.sum().backward(inputs=[x])
        torch.autograd.grad(x.sum(), x)
        torch.autograd.grad(x.sum(), [x, leaf()], allow_unused=True)
    finally:
        _torch.Variable._execution_engine = before
    assert isinstance(before, _torch.ImperativeEngine)
    assert [(len(inputs), *rest) for inputs, *rest in asked] == [
        (0, True, True),
        (1, True, True),
        (1, False, False),
        (2, True, False),
    ]
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


@fact_of("will_engine_execute")
def test_the_engine_knows_what_is_in_its_graph_before_it_runs_it() -> None:
    x, y = leaf(), leaf()
    inside, outside = (x * 2).sin(), (y * 2).sin()
    inner, other = (tensor.grad_fn.next_functions[0][0] for tensor in (inside, outside))
    seen: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.extend(map(_torch.will_engine_execute, (inner, other)))
            raise KeyError

    with pytest.raises(KeyError):
        Asks.apply(inside).sum().backward()
    assert seen == [True, False]
    assert x.grad is None


def test_a_node_that_was_ready_when_another_raised_stays_until_a_call_comes_to_it() -> None:
    class Noted:
        pass

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, noted: Noted) -> torch.Tensor:
            ctx.noted = noted
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return gradient, None

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise KeyError

    noted = Noted()
    dies = weakref.ref(noted)
    x = leaf()
    loss = (Keeps.apply(x, noted) + Raises.apply(x)).sum()
    with pytest.raises(KeyError):
        loss.backward()
    del loss, noted
    gc.collect()
    assert dies() is not None
    nodes.drop_leftovers()
    gc.collect()
    assert dies() is None


_FREES_A_DEEP_GRAPH = """
import sys
import torch
y = torch.ones(1, requires_grad=True)
for _ in range(int(sys.argv[1])):
    y = y * 1.0
node = y.grad_fn if len(sys.argv) > 2 else None
while node is not None:
    node = node.next_functions[0][0] if node.next_functions else None
del y
print("done")
"""


@pytest.mark.parametrize("args", [("200000",), ("10000", "walked")])
def test_how_deep_graphs_can_be_freed(args: tuple[str, ...]) -> None:
    """Any, unless Python has looked at all nodes. Those are freed by recursion, since a node's Python object lives as
    long as the node: in 2.13 a chain of 100,000 overflows a stack of 8 MiB, without any telegrad."""
    program = [sys.executable, "-c", _FREES_A_DEEP_GRAPH, *args]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=90)
    assert ran.stdout == "done\n"


@fact_of("DistributedDataParallel")
def test_what_begins_the_work_of_a_parallel_module() -> None:
    parallel = _torch.DistributedDataParallel
    assert list(inspect.signature(parallel._ddp_init_helper).parameters)[:2] == ["self", "parameters"]
    assert "_module_parameters" in parallel.__init__.__code__.co_names


@fact_of("is_batched", "is_batched_by_autograd")
def test_the_gradients_of_a_batched_grad_tell_so() -> None:
    seen: list[bool] = []
    x = leaf()
    y = x * 2
    y.register_hook(lambda gradient: seen.append(_torch.is_batched_by_autograd(gradient)))
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3))
    assert seen == [True, False]
    torch.func.vmap(lambda z: seen.append(_torch.is_batched(z)) or z)(x)
    assert seen.pop() and not _torch.is_batched(x)


@fact_of("is_wrapped_by_transform", "is_functional", "transform_level", "transforms")
def test_a_tensor_of_a_transform_has_no_memory_and_names_its_transform() -> None:
    found: list[tuple[str, int | None]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        assert _torch.is_wrapped_by_transform(x)
        names = [t.key().name for t in _torch.transforms() if t.level() == _torch.transform_level(x)]
        try:
            address = x.data_ptr()
        except RuntimeError:
            address = None
        found.append((*names, address))
        assert _torch.is_functional(x) == (names == ["Functionalize"])
        return x.sum()

    x = torch.ones(2)
    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.functionalize(look)(x)
    assert found == [("Vmap", None), ("Grad", None), ("Jvp", None), ("Functionalize", 0)]
    assert not _torch.transforms()
    assert not _torch.is_wrapped_by_transform(x)


@fact_of("dual_level")
def test_tangents_live_in_a_dual_level_only() -> None:
    forward_ad = torch.autograd.forward_ad
    assert _torch.dual_level() < 0
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert _torch.dual_level() >= 0
        assert forward_ad.unpack_dual(dual).tangent is not None
        assert forward_ad.unpack_dual(dual.detach()).tangent is None
    assert _torch.dual_level() < 0


def test_the_python_object_of_a_function_lives_as_long_as_its_node() -> None:
    """And can be referred to weakly. What is put into the metadata of a node goes with it."""
    died: list[Any] = []

    class Noticed:
        def __del__(self) -> None:
            died.append("metadata")

    x = leaf()
    y = Double.apply(x)
    ref = weakref.ref(y.grad_fn, died.append)
    z = y * 3
    z.grad_fn.metadata["test"] = Noticed()
    del y
    z.sum().backward()
    assert ref() is not None and not died
    del z
    assert ref() is None and len(died) == 2


# -- the list itself ---------------------------------------------------------------------------------------


def test_each_line_has_a_fact() -> None:
    names = {name for name in vars(_torch) if not name.startswith("_")} - {"torch", "annotations", "cast", "Any"}
    of_cuda = {"cuda_device", "cuda_raw_stream"}  # tests/cuda/test_cuda_facts.py
    assert names - {"partial", "ctypes", "os"} - of_cuda == _covered


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of one of torch's modules that is imported, or taken from such a module.
    Private members of classes are no part of it."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.partition(".")[0], alias.name, alias.asname) for alias in node.names]
            imported = [(name, full if alias else name, full) for name, full, alias in names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported = [(a.asname or a.name, *[f"{node.module}.{a.name}"] * 2) for a in node.names]
        else:
            continue
        for name, bound, full in imported:
            if full.partition(".")[0] == "torch":
                known[name] = bound
                if any(part.startswith("_") for part in full.split(".")):
                    yield node.lineno, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root, _, rest = ast.unparse(node.value).partition(".")
            if root in known and isinstance(_found(f"{known[root]}.{rest}".rstrip(".")), types.ModuleType):
                yield node.lineno, ast.unparse(node)


def _found(path: str) -> Any:
    """What a dotted name is bound to; None if it cannot be had."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for part in rest:
        found = getattr(found, part, None)
    return found


def test_private_names_of_torch_are_said_in_one_file() -> None:
    said = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "_torch.py" and PACKAGE / "compat" not in path.parents:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            said += [f"{path.relative_to(PACKAGE)}:{line} says {name}" for line, name in private_names(tree)]
    assert not said, "give these a line in _torch.py, and a test here:\n" + "\n".join(said)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch\ntorch._C", ["torch._C"]),
        ("import torch\nprint(torch.jit._recursive.x)", ["torch.jit._recursive"]),
        ("import torch._C", ["torch._C"]),
        ("import torch.autograd.profiler as p\np._is_profiler_enabled", ["p._is_profiler_enabled"]),
        ("from torch.autograd import profiler\nprofiler._x", ["profiler._x"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("import torch\ntorch.Tensor._make_subclass\ntorch.__version__\ntorch.nn.Linear", []),
        ("'torch._C'  # torch._C\nimport os\nos._exit", []),
    ],
)
def test_how_private_names_are_found(code: str, expected: list[str]) -> None:
    assert [name for _, name in private_names(ast.parse(code))] == expected


def test_all_hooks_of_a_node_are_in_one_dictionary_which_its_handles_know():
    """waits.is_unseen() finds hooks of others by it."""
    leaf = torch.zeros(1, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    for register in (node.register_prehook, node.register_hook):
        first = register(lambda *gradients: None)
        assert len(first.hooks_dict_ref()) == 1
        second = register(lambda *gradients: None)
        assert len(first.hooks_dict_ref()) == len(second.hooks_dict_ref()) == 2
        first.remove()
        assert len(second.hooks_dict_ref()) == 1
        second.remove()
        third = register(lambda *gradients: None)
        assert len(third.hooks_dict_ref()) == 1
        third.remove()


@fact_of("c10", "cpp_log_level")
def test_the_level_of_messages_silences_a_store_whose_process_died():
    script = """
        import os, signal, sys, time, torch
        from telegrad import _torch
        from torch.distributed import TCPStore
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        client = TCPStore("127.0.0.1", server.port, None, False)
        _torch.cpp_log_level.value = int(sys.argv[1])
        del server
        try:
            client.add("key", 1)
        except torch.distributed.DistNetworkError as error:
            print(str(error).count("\\n"))
    """
    shown = []
    for level in ("1", "2"):
        command = [sys.executable, "-c", textwrap.dedent(script), level]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "0\n"
        shown.append(done.stderr)
    assert "TCPStore.cpp" in shown[0] and not shown[1]
