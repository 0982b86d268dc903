"""The leaves of DistributedDataParallel modules: see Note [averaged leaves] in leaves.py.

A module is noted when it is made, while there is a worker; those from before are looked for when the first one starts.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import DistributedDataParallel

averaged: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by leaf: all leaves of its module, weakly
_changing = threading.RLock()  # guards the two below
_users: set[int] = set()
_original: Any = None


def leaves_are_averaged(leaves: Iterable[torch.Tensor]) -> None:
    """Says that these are the leaves of one DistributedDataParallel."""
    together = WeakIdKeyDictionary()
    for leaf in leaves:
        together[leaf] = None
        averaged[leaf] = together


def note_averaged_leaves(user: int) -> None:
    """Takes note of the leaves of all DistributedDataParallel modules of this process, as long as it has a user."""
    global _original
    with _changing:
        _users.add(user)
        if _original is not None:
            return
        init = _original = DistributedDataParallel._ddp_init_helper

        @functools.wraps(init)
        def _ddp_init_helper(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            leaves_are_averaged(parameters)
            return init(self, parameters, *args, **kwargs)

        DistributedDataParallel._ddp_init_helper = _ddp_init_helper
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # else there are none
        for module in gc.get_objects():
            if issubclass(type(module), DistributedDataParallel):  # isinstance() would ask a proxy of what is gone
                leaves_are_averaged(module._module_parameters)


def forget_averaged_leaves(user: int) -> None:
    """Ends it for a user. Any number of times."""
    global _original
    with _changing:
        _users.discard(user)
        if not _users and _original is not None:
            DistributedDataParallel._ddp_init_helper, _original = _original, None
