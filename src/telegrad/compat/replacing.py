"""install(): replaces names in torch's modules by telegrad's.

# Note [why names and not modules]
A module could be swapped as a whole, in sys.modules. But torch itself, and any module that was imported before, holds
the module object; and C++ looks names up in it. So the module stays and what is in it changes. Single names that others
have taken from it before (`from torch.distributed.rpc import rpc_sync`) are found and changed where they are: names of
any module that are bound to the very object that is replaced.

# Note [children]
Processes that multiprocessing starts have what this one has. A fork has it anyway. A process that is spawned (or comes
from multiprocessing's fork server) starts with a bare interpreter: it unpickles a dictionary from its parent, then
imports the parent's script, then runs the target. So what installs the drop-in is put into that dictionary, to run when
it is unpickled: before the script imports anything.

Much of torch's RPC is Python around C++: init_rpc(), shutdown(), the backend registry, the options, _all_gather(). That
stays torch's, and runs on telegrad, since what it calls is replaced.
"""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc
import torch.distributed.rpc.backend_registry
import torch.distributed.rpc.options
import torch.distributed.rpc.rref_proxy

from .. import autograd
from ..gradients.averaged import note_averaged_leaves
from ..options import Options
from ..rref import RRef
from . import agent, calls, profiling

_C = torch._C._distributed_rpc
_torch_rpc_is_running = _C._is_current_rpc_agent_set  # before it is replaced

_installed = False
_options = Options()  # of the last install()


def is_installed() -> bool:
    return _installed


def install(options: Options | None = None, *, torch_profiler: bool = False) -> None:
    """Puts telegrad in the place of torch.distributed.rpc, torch.distributed.autograd,
    torch.distributed.optim.DistributedOptimizer and torch.distributed.nn.RemoteModule: for this process, and for those
    that it starts with multiprocessing. Any number of times.

    Args:
        options: telegrad's own options for the worker that init_rpc() will start; by default those of the call before.
            `rpc_timeout`, `plain` and `strict_devices` are always as torch has them, `device_maps` and `devices` where
            torch's options set them.
        torch_profiler: calls stand in profiles of torch.profiler.profile, too, with what they cost at the callee. The
            original leaves them out, and has them in those of torch.autograd.profiler_legacy only.

    Raises:
        RuntimeError: torch's own RPC is running in this process.
        TypeError: `options` is no telegrad.Options.
    """
    global _installed, _options
    if _torch_rpc_is_running():
        raise RuntimeError(
            "torch's own RPC is running in this process, and telegrad cannot take its place while it does: call "
            "telegrad.compat.install() before torch.distributed.rpc.init_rpc(), or after its shutdown()"
        )
    _options = _options if options is None else Options.of(options)
    _set_backend(_options)
    profiling.follow_profiles(newer=torch_profiler)
    if _installed:
        return
    _installed = True
    replaced: dict[int, tuple[Any, Any]] = {}  # by id: torch's object, and what takes its place
    for module, names in _replacements():
        for name, new in names.items():
            old = getattr(module, name, None)
            if isinstance(old, type | types.FunctionType | types.BuiltinFunctionType):
                replaced[id(old)] = old, new
            setattr(module, name, new)
    _change_where_imported(replaced)
    sys.meta_path.insert(0, _WhenImported())
    torch._jit_internal.is_rref_instance = _is_handed_to_script
    note_averaged_leaves(id(_C))  # for good
    _warn_of_calls_in_scripts()
    _follow_into_children()


def _set_backend(options: Options) -> None:
    """The TENSORPIPE backend stands for telegrad. The enum's member stays what it is: programs hold it."""
    registry = torch.distributed.rpc.backend_registry
    member = registry.BackendType["TENSORPIPE"]
    construct = member.value.construct_rpc_backend_options_handler
    member._value_ = registry.BackendValue(construct, agent.start_with(options))


def _replacements() -> Iterator[tuple[types.ModuleType, dict[str, Any]]]:
    for module in (_C, torch.distributed.rpc, torch.distributed.rpc.api):
        yield module, {name: new for name, new in _RPC.items() if hasattr(module, name)}
    for module in (torch._C._distributed_autograd, torch.distributed.autograd):
        yield module, {name: getattr(autograd, name) for name in _AUTOGRAD}
        yield module, {"backward": calls.backward}
    yield torch.distributed.autograd, {"context": autograd.context}
    yield torch.futures, {"wait_all": calls.wait_all}
    for module_name in _CLASSES:
        if module_name in sys.modules:
            yield sys.modules[module_name], _class_for(module_name)


def _class_for(module_name: str) -> dict[str, Any]:
    name, own_module = _CLASSES[module_name]
    return {name: getattr(importlib.import_module(own_module, __package__), name)}


class _WhenImported(MetaPathFinder):
    """Replaces the classes of modules that are imported after install(): importing them there would cost every process
    more than the rest of install() does."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _CLASSES else None
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            vars(module).update(_class_for(name))

        loader.exec_module = exec_module
        return spec


def _change_where_imported(replaced: dict[int, tuple[Any, Any]]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == __name__.partition(".")[0] or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            old, new = replaced.get(id(value), (None, None))
            if old is not None and old is value:
                setattr(module, name, new)


class _InstallsWhenUnpickled:
    """See Note [children]."""

    def __reduce__(self) -> Any:
        # The child has its parent's sys.path only later: it is told where telegrad is. Until then the current directory
        # is first there, as with `python -c`, and nothing may come from that.
        where = str(Path(__file__).resolve().parents[2])
        code = f"""
import pickle, sys
before = sys.path[:]
sys.path[:] = [*filter(None, before), {where!r}]
import telegrad.compat
sys.path[:] = before
telegrad.compat.install(pickle.loads({pickle.dumps(_options)!r}), torch_profiler={profiling.follows_newer})
"""
        return exec, (code,)


def _follow_into_children() -> None:
    """Has every process that multiprocessing starts from now on call install() first: see Note [children]."""
    before = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**before(name), "telegrad": _InstallsWhenUnpickled()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def _warn_of_calls_in_scripts() -> None:
    """TorchScript's own RPCs look for an agent of torch's in C++, and say only that there is none."""
    before = torch._C._jit_script_compile

    def _jit_script_compile(*args: Any, **kwargs: Any) -> Any:
        compiled = before(*args, **kwargs)
        if any(compiled.graph.findAllNodes(kind) for kind in _CALLS_IN_SCRIPTS):
            warnings.warn(
                f"{compiled.name} makes an RPC from inside of TorchScript, which will fail: telegrad's calls are made "
                "from Python. Do not script the function that makes the call",
                stacklevel=4,
            )
        return compiled

    torch._C._jit_script_compile = _jit_script_compile


def _not_here(name: str, instead: str) -> Callable[..., Any]:
    """A function in the place of one that telegrad does not have: says what to use."""

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"torch.distributed.rpc.{name} is not there with telegrad: {instead}")

    missing.__name__ = missing.__qualname__ = name
    return missing


def _is_handed_to_script(obj: object) -> bool:
    """torch asks this of each argument of a scripted function."""
    if isinstance(obj, RRef):
        raise NotImplementedError(
            f"{obj} cannot be handed to TorchScript, which knows only torch's own RRefs: hand over its value "
            "(to_here()), or do not script the function"
        )
    return False


_CALLS_IN_SCRIPTS = ("prim::rpc_sync", "prim::rpc_async", "prim::rpc_remote")

_RPC: dict[str, Any] = {
    # calls
    "rpc_sync": calls.rpc_sync,
    "rpc_async": calls.rpc_async,
    "remote": calls.remote,
    "RRef": RRef,
    "PyRRef": RRef,
    "WorkerInfo": agent.WorkerInfo,
    # the agent
    "RpcAgent": agent.Agent,
    "TensorPipeAgent": agent.Agent,
    "_is_current_rpc_agent_set": agent.is_set,
    "_get_current_rpc_agent": agent.get_agent,
    "_set_and_start_rpc_agent": agent.set_agent,
    "_reset_current_rpc_agent": agent.reset_agent,
    "_set_rpc_timeout": agent.set_timeout,
    "get_rpc_timeout": agent.get_timeout,
    "_wait_all_workers": agent.wait_all_workers,
    "_cleanup_python_rpc_handler": agent.nothing,
    "enable_gil_profiling": agent.enable_gil_profiling,
    # references
    "_delete_all_user_and_unforked_owner_rrefs": agent.delete_all_handles,
    "_destroy_rref_context": agent.destroy_references,
    "_rref_context_get_debug_info": agent.reference_counts,
    "_get_debug_info": agent.debug_info,
    "_enable_server_process_global_profiler": profiling.enable,
    "_disable_server_process_global_profiler": profiling.disable,
    # what is not there
    **{
        name: _not_here(name, "call rpc_sync(), rpc_async() or remote() with the function itself")
        for way in ("remote", "rpc")
        for name in (f"_invoke_{way}_builtin", f"_invoke_{way}_python_udf", f"_invoke_{way}_torchscript")
    },
    **{
        name: _not_here(name, "send RRefs as arguments and results of calls")
        for name in ("_enable_jit_rref_pickle", "_disable_jit_rref_pickle")
    },
}

_AUTOGRAD = (
    "DistAutogradContext", "_current_context", "_get_debug_info", "_get_max_id", "_init", "_is_valid_context",
    "_new_context", "_release_context", "_retrieve_context", "get_gradients",
)  # fmt: skip

# by torch's module: the name there, and telegrad's module
_CLASSES = {
    "torch.distributed.optim": ("DistributedOptimizer", "..optim"),
    "torch.distributed.optim.optimizer": ("DistributedOptimizer", "..optim"),
    "torch.distributed.nn": ("RemoteModule", "..nn"),
    "torch.distributed.nn.api.remote_module": ("RemoteModule", "..nn"),
}
