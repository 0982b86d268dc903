"""telegrad: autograd that crosses machines.

A program calls functions on other workers as if they were local, and gradients find their way back. `telegrad.rpc`
and `telegrad.autograd` have the names of torch.distributed.rpc and torch.distributed.autograd;
`telegrad.LocalCluster` starts workers on this machine.

What is named here is imported when it is first used: importing torch takes seconds, and the launcher and every
`--help` of the command line do without it.
"""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module that it was told to run; before any other import
    from .primitives.current_directory import take_out

    take_out()

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import autograd, errors, rpc
    from .cluster.forkserver import ForkServer
    from .cluster.local import LocalCluster
    from .cluster.seeding import manual_seed
    from .messages import WorkerInfo
    from .options import Options
    from .worker import Statistics, Worker

__version__ = "0.1.0"

__all__ = [
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
]

_HOMES = {
    "ForkServer": "cluster.forkserver",
    "LocalCluster": "cluster.local",
    "Options": "options",
    "Statistics": "worker",
    "Worker": "worker",
    "WorkerInfo": "messages",
    "manual_seed": "cluster.seeding",
}


def __getattr__(name: str) -> Any:
    """Imports a name on its first use: one of the above, or a module of the package."""
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return value
    missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.startswith("_"):
        raise missing
    try:
        return import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise missing from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
