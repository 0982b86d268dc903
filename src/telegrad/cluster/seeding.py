"""Random numbers on several workers: each has a stream of its own, which a seed and the worker's name determine."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from importlib import import_module
from typing import Any

import torch

from ..errors import PeerLostError
from ..primitives import clock
from ..primitives.current import current_worker
from ..primitives.untraced import untraced
from ..rendezvous.group import this_host
from ..runtime.broadcast import ask
from ..runtime.pending import limit_here


def seed_of(name: str, seed: int) -> int:
    """Returns the seed of a worker. The same in each process, Python and release: results depend on it."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8, person=b"telegrad seed")
    return int.from_bytes(digest.digest(), "little")


def checked(seed: int) -> int:
    """Returns a seed as torch.initial_seed() would; torch maps negative ones to large ones.

    Raises:
        RuntimeError: torch takes no such seed.
    """
    return torch.Generator().manual_seed(int(seed)).initial_seed()


def numpy_random() -> Any:
    """Imports numpy.random, or returns None. torch has imported numpy already, where there is one."""
    try:
        return import_module("numpy.random")
    except ImportError:
        return None


def seed_process(seed: int) -> torch.Generator:
    """Seeds the generators of this process: torch's on all devices, Python's and numpy's."""
    random.seed(seed)
    if (numpy := numpy_random()) is not None:
        numpy.seed(seed & 0xFFFFFFFF)
    return torch.manual_seed(seed)


@untraced
def manual_seed(seed: int) -> torch.Generator:
    """Seeds all workers of the group: torch on all devices, `random` and numpy. Returns when all are seeded.

    The caller's process gets `seed` itself, as by torch.manual_seed(); every other worker a seed that `seed` and its
    name determine, the one it would have in `LocalCluster(seed=seed)`. Workers in the caller's process share its
    generators. Workers that join later, or are gone, are left out.

    Raises:
        NotStartedError: there is no worker.
        CallTimeoutError: a worker did not answer in time: the time of one call, Options.rpc_timeout, is for all of it.
        RendezvousError: the group's store did not.
    """
    worker, seed = current_worker(), checked(seed)
    limit = limit_here(None, worker.options.rpc_timeout)
    deadline = clock.now() + (threading.TIMEOUT_MAX if limit is None else limit)
    others = [member.id for member in worker.group.members(limit) if member.id != worker.id]
    _, errors = ask(worker, others, _seed_worker, (seed, _process()), deadline - clock.now())
    for error in errors.values():
        if not isinstance(error, PeerLostError):
            raise error
    return seed_process(seed)


def _process() -> tuple[str, int]:
    return this_host(), os.getpid()


def _seed_worker(seed: int, caller: tuple[str, int]) -> None:
    if caller != _process():
        seed_process(seed_of(current_worker().name, seed))
