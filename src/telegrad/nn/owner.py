"""An owner's part of a RemoteModule: the functions that are called for a module of this worker.

create, adopt   -> the module, which the caller has a handle to
the others      the handle's id  -> a method of the module
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._torch import tree_leaves, tree_map
from ..optim.owner import settle
from ..optim.remote_tensor import Key, Row, to_rows
from ..optim.snapshot import snapshot
from ..rref import RRef, value_here
from ..runtime.changes import Arguments, calls_users

Hook = Callable[..., Any]


def create(module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    return module.to(device)


def adopt(module: nn.Module, device: str) -> nn.Module:
    return module.to(device)


def forward(id: int, /, *args: Any, **kwargs: Any) -> Any:
    module: nn.Module = value_here(id)
    device = _device_of(module)
    if device.type == "cpu":
        return module(*args, **kwargs)
    came = any(isinstance(leaf, torch.Tensor) and leaf.device == device for leaf in tree_leaves((args, kwargs)))
    args, kwargs = _moved((args, kwargs), device)
    result = module(*args, **kwargs)
    return result if came else _moved(result, torch.device("cpu"))


def forward_by_map(id: int, /, *args: Any, **kwargs: Any) -> Any:
    """The same where the caller has a device map: that says where the results go."""
    module: nn.Module = value_here(id)
    device = _device_of(module)
    if device.type != "cpu":
        args, kwargs = _moved((args, kwargs), device)
    return module(*args, **kwargs)


def forward_of_snapshot(id: int, /, *args: Any, **kwargs: Any) -> Any:
    with snapshot(value_here(id).parameters()):
        return forward(id, *args, **kwargs)


def forward_of_snapshot_by_map(id: int, /, *args: Any, **kwargs: Any) -> Any:
    with snapshot(value_here(id).parameters()):
        return forward_by_map(id, *args, **kwargs)


def _call_of_module(id: int, /, *args: Any, **kwargs: Any) -> tuple[Callable[[], str], Arguments]:
    return lambda: f"{type(value_here(id)).__qualname__}.forward", (args, kwargs)


# Without a device map of the caller's, and with one.
FORWARDS = forward, forward_by_map
SNAPSHOT_FORWARDS = forward_of_snapshot, forward_of_snapshot_by_map
for _function in (*FORWARDS, *SNAPSHOT_FORWARDS):
    calls_users(_function, _call_of_module)


def _device_of(module: nn.Module) -> torch.device:
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    return torch.device("cpu")  # it has neither, and works where its arguments are


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def run(id: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(value_here(id), method)(*args, **kwargs)


def zero_grad(id: int, set_to_none: bool) -> None:
    settle()
    value_here(id).zero_grad(set_to_none)


def members(id: int, which: str, known: list[Key]) -> list[Row]:
    return list(to_rows(getattr(value_here(id), which)(remove_duplicate=False), known))


def state_dict(id: int) -> tuple[dict[str, Any], dict[str, Any]]:
    state = value_here(id).state_dict()
    return dict(state), dict(getattr(state, "_metadata", {}))


def load_state_dict(
    id: int, state: dict[str, Any], versions: Mapping[str, Any] | None, assign: bool
) -> tuple[list[str], list[str], str]:
    """Returns the missing keys, the unexpected keys, and an error."""
    module: nn.Module = value_here(id)
    if versions is None:  # today's are the best guess
        versions = {name: {"version": part._version} for name, part in module.named_modules()}
    found = _StateDict(state)
    found._metadata = {name: dict(value) for name, value in versions.items()}
    try:
        missing, unexpected = module.load_state_dict(found, strict=False, assign=assign)
    except RuntimeError as error:
        return [], [], str(error)
    return missing, unexpected, ""


class _StateDict(dict[str, Any]):
    _metadata: dict[str, Any]


def change_dtypes(id: int, changes: dict[torch.dtype, torch.dtype]) -> None:
    value_here(id)._apply(lambda tensor: tensor.to(changes.get(tensor.dtype, tensor.dtype)))


def register(id: int, method: str, hook: Hook, options: dict[str, Any]) -> RRef[RemovableHandle]:
    return RRef(getattr(value_here(id), method)(hook, **options))
