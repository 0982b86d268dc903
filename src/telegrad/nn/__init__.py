"""Modules on other workers: what telegrad has in place of torch.distributed.nn."""

from .remote_module import RemoteHook, RemoteModule

__all__ = ["RemoteHook", "RemoteModule"]
