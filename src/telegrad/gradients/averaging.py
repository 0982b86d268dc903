"""DistributedDataParallel in passes of ours: which leaves it averages (Note [averaged leaves] in leaves.py).

While this process has a worker, the forward of such a module says so: it may have been made before.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import torch

from .leaves import leaves_are_averaged

_parallel: Any = torch.nn.parallel.DistributedDataParallel
_workers: set[int] = set()  # by the id() of their engines; its single operations are atomic
_named: WeakSet[Any] = WeakSet()  # modules whose leaves are known
_before: Any = None


def put(engine: object) -> None:
    """Has the forward of DistributedDataParallel name the leaves."""
    global _before
    _workers.add(id(engine))
    if _before is None:
        before = _before = _parallel.forward

        @functools.wraps(before)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _workers and self not in _named:
                _named.add(self)
                leaves_are_averaged([p for p in self.module.parameters() if p.requires_grad])
            return before(self, *args, **kwargs)

        forward.is_ours = True  # type: ignore[attr-defined]
        _parallel.forward = forward


def remove(engine: object) -> None:
    """Undoes it with the last worker, unless another wrapper was put over it: then it does nothing. Any number of
    times."""
    global _before
    _workers.discard(id(engine))
    if not _workers and _before is not None and hasattr(_parallel.forward, "is_ours"):
        _parallel.forward, _before = _before, None
