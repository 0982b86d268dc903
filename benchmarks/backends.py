"""The two sides of the comparison, behind one small face.

Both have modules with the same names (`init_rpc`, `rpc_sync`, `rpc_async`, `shutdown`; `context`, `backward`,
`get_gradients`; `DistributedOptimizer`), so a figure is written once, against `backend.rpc`, `backend.autograd` and
`backend.optim`. Only the options of `init_rpc` differ. Importing this module imports neither side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Backend:
    """One implementation: where its modules are, and how `init_rpc` is told which transport to use."""

    name: str
    package: str
    options: Callable[[str | None], dict[str, Any]]

    @property
    def rpc(self) -> Any:
        return import_module(f"{self.package}.rpc")

    @property
    def autograd(self) -> Any:
        return import_module(f"{self.package}.autograd")

    @property
    def optim(self) -> Any:
        return import_module(f"{self.package}.optim")

    def join(self, name: str, *, rank: int, world_size: int, transport: str | None) -> None:
        """Make this process the worker `name` of a group that meets at MASTER_ADDR and MASTER_PORT."""
        # torch's init_rpc uses a torch API that torch has deprecated.
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        self.rpc.init_rpc(name, rank=rank, world_size=world_size, **self.options(transport))


def _telegrad_options(transport: str | None) -> dict[str, Any]:
    if transport is None or transport == "gpu":
        return {}
    return {"options": import_module("telegrad").Options(transports=("tcp",))}


# Note [torch over TCP]: `_transports=["uv"]` holds only torch's messages to TCP. The bytes of a tensor take a
# channel, and on one host torch picks `cma`, by which one process reads the other's memory: /proc/net/dev
# counts nothing on the loopback for a 16 MiB echo. With `_channels=["basic"]` they follow the messages.
_TORCH_HELD_TO: dict[str | None, dict[str, Any]] = {
    None: {},
    "gpu": {"device_maps": {"driver": {0: 0}, "peer1": {0: 0}}},
    "tcp": {"_transports": ["uv"]},
    "tcp, tensors too": {"_transports": ["uv"], "_channels": ["basic"]},
}


def _torch_options(transport: str | None) -> dict[str, Any]:
    from torch.distributed.rpc import TensorPipeRpcBackendOptions

    held_to = _TORCH_HELD_TO[transport]
    return {"rpc_backend_options": TensorPipeRpcBackendOptions(num_worker_threads=16, **held_to)}


def backend_here() -> Backend:
    """The side whose call runs in this process."""
    from telegrad.errors import NotStartedError
    from telegrad.primitives.current import current_worker

    try:
        current_worker()  # a call may be served before init_rpc() has returned in this process
    except NotStartedError:
        return TORCH
    return TELEGRAD


TELEGRAD = Backend("telegrad", "telegrad", _telegrad_options)
TORCH = Backend("torch", "torch.distributed", _torch_options)
