"""The public names, and that those which torch.distributed.rpc has too are called in the same way."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.rpc as torch_rpc

import telegrad
from telegrad import autograd, graph, nn, optim, profiler, rpc

PUBLIC = {
    "ForkServer",
    "LocalCluster",
    "Options",
    "Statistics",
    "Worker",
    "WorkerInfo",
    "autograd",
    "errors",
    "manual_seed",
    "rpc",
}
PUBLIC_IN_AUTOGRAD = {
    "DistAutogradContext",
    "backward",
    "context",
    "debug_info",
    "enter",
    "get_gradients",
    "grad",
    "graph",
    "is_available",
    "update_gradient",
}
PUBLIC_IN_GRAPH = {
    "Awaited",
    "Edge",
    "Graph",
    "Leaf",
    "Node",
    "Operation",
    "PartState",
    "Recv",
    "Root",
    "Send",
    "WorkerPart",
}
PUBLIC_IN_RPC = {
    "Future",
    "Options",
    "RRef",
    "WorkerInfo",
    "functions",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
}
PUBLIC_IN_OPTIM = {"DistributedOptimizer", "GradScaler", "OptimizerError", "clip_grad_norm_"}
PUBLIC_IN_NN = {"RemoteBuffer", "RemoteHook", "RemoteModule", "RemoteParameter", "utils"}
PUBLIC_IN_PROFILER = {
    "Summary",
    "Trace",
    "TraceError",
    "draw",
    "load",
    "local_only",
    "merge",
    "profile",
    "schedule",
}
LIKE_TORCHS = ("init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info")

SAYS_IT_ALL = {"Worker.new_message_id"}  # a method whose name needs no docstring

# (function, parameter): a default that differs from torch's on purpose.
OTHER_DEFAULTS = {("shutdown", "timeout")}  # torch waits for ever; telegrad for Options.shutdown_timeout


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (telegrad, PUBLIC),
        (rpc, PUBLIC_IN_RPC),
        (autograd, PUBLIC_IN_AUTOGRAD),
        (graph, PUBLIC_IN_GRAPH),
        (optim, PUBLIC_IN_OPTIM),
        (nn, PUBLIC_IN_NN),
        (profiler, PUBLIC_IN_PROFILER),
    ],
)
def test_public_names(module: ModuleType, names: set[str]) -> None:
    assert sorted(module.__all__) == sorted(names)
    assert all(hasattr(module, name) for name in names)


def test_version() -> None:
    from importlib.metadata import version

    assert telegrad.__version__ == version("telegrad")


@pytest.mark.parametrize("name", LIKE_TORCHS)
def test_signature_is_torchs_with_ours_after_it(name: str) -> None:
    theirs = list(inspect.signature(getattr(torch_rpc, name)).parameters.values())
    ours = list(inspect.signature(getattr(rpc, name)).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    for mine, its in zip(ours, theirs, strict=False):
        assert mine.kind is its.kind
        if (name, mine.name) not in OTHER_DEFAULTS:
            assert mine.default == its.default, mine.name
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in ours[len(theirs) :])


def test_init_rpc_has_two_parameters_of_our_own() -> None:
    own = list(inspect.signature(rpc.init_rpc).parameters)[-2:]
    assert own == ["init_method", "options"]


def test_async_execution_is_torchs() -> None:
    def function() -> None: ...

    ours, theirs = rpc.functions.async_execution(function), torch_rpc.functions.async_execution(function)
    assert set(vars(ours)) == set(vars(theirs))


def documented() -> list[Any]:
    """Each public function and class, and each public method of the classes."""
    found = []
    for module in (telegrad, rpc, rpc.functions, autograd, graph, optim, nn, profiler):
        for name in getattr(module, "__all__", ["async_execution"]):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found.append(pytest.param(value, id=f"{module.__name__}.{name}"))
            for attribute, member in vars(value).items() if inspect.isclass(value) else ():
                is_method = inspect.isfunction(member) or isinstance(member, property | classmethod)
                if is_method and not attribute.startswith("_") and f"{name}.{attribute}" not in SAYS_IT_ALL:
                    found.append(pytest.param(getattr(value, attribute), id=f"{module.__name__}.{name}.{attribute}"))
    return found


@pytest.mark.parametrize("value", documented())
def test_docstring(value: Any) -> None:
    text = inspect.getdoc(value)  # of the method that it overrides, if it has none of its own
    assert text and text.strip()
    assert not text.startswith(f"{getattr(value, '__name__', None)}("), "a dataclass's own: nobody wrote it"
