"""telegrad: autograd that crosses machines.

A program calls functions on other workers as if they were local, and gradients find their way back. `telegrad.rpc`
and `telegrad.autograd` have the names of torch.distributed.rpc and torch.distributed.autograd;
`telegrad.LocalCluster` starts workers on this machine.
"""

import importlib
from typing import Any

from . import autograd, errors, rpc
from .cluster import LocalCluster
from .config import Options
from .forkserver import ForkServer
from .messages import WorkerInfo
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
    "rpc",
]


def __getattr__(name: str) -> Any:
    """`telegrad.profiler` is imported when it is first used."""
    if name == "profiler":
        return importlib.import_module(".profiler", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
