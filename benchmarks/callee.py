"""The functions that the peer runs, and the tensors they are given."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import torch

MIB = 1 << 20


def empty() -> None:
    """The smallest call."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def tensor_of(nbytes: int) -> torch.Tensor:
    """float32, every page touched, no two neighbours alike."""
    return torch.arange(nbytes // 4, dtype=torch.float32)


@dataclass(frozen=True)
class Usage:
    """What a process has used so far: seconds of processor time, and how often it gave up its core."""

    user: float
    system: float
    waits: float
    preempted: float

    @classmethod
    def here(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime, used.ru_stime, used.ru_nvcsw, used.ru_nivcsw)

    def per_call(self, before: Usage, calls: int) -> Usage:
        return Usage(
            (self.user - before.user) / calls,
            (self.system - before.system) / calls,
            (self.waits - before.waits) / calls,
            (self.preempted - before.preempted) / calls,
        )


def usage() -> Usage:
    return Usage.here()


def process_id() -> int:
    return os.getpid()
