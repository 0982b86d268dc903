"""telegrad: autograd that crosses machines.

A program calls functions on other workers as if they were local. `telegrad.rpc` has torch.distributed.rpc's
names; `telegrad.LocalCluster` starts workers on this machine.
"""

from . import errors, rpc
from .cluster import LocalCluster
from .config import Options
from .forkserver import ForkServer
from .messages import WorkerInfo
from .worker import Statistics, Worker

__version__ = "0.1.0"

__all__ = ["ForkServer", "LocalCluster", "Options", "Statistics", "Worker", "WorkerInfo", "errors", "rpc"]
