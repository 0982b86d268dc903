"""Modules on other workers: what telegrad has in place of torch.distributed.nn."""

from ..optim.remote_tensor import RemoteBuffer, RemoteParameter
from . import utils
from .remote_module import RemoteHook, RemoteModule

__all__ = ["RemoteBuffer", "RemoteHook", "RemoteModule", "RemoteParameter", "utils"]
