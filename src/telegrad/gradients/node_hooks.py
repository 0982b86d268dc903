"""Whether anything looks on where the node of a leaf runs: what goes past that node must know.

The hooks of a leaf's gradient are not meant: torch's engine runs these wherever the gradient goes.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..primitives.interrupts import finaliser

Leaf = torch.Tensor

# Note [hooks of a leaf's node]
# torch does not say whether a node has hooks: only one who registers another can see. That costs 2 µs for each leaf, so
# it is remembered of a leaf that it had none. Whoever registers a hook anywhere makes a RemovableHandle, and these are
# numbered: as long as there is no new one, what is remembered holds. A new graph has a new node for a leaf, unless
# somebody keeps the old one; and that has no hooks.
_without_hooks: dict[int, weakref.ref[Leaf]] = {}  # by address: leaves that had no hooks which capture does not run
_handles = -1  # how many RemovableHandles there were then
_looking = threading.RLock()  # guards both for those that write them. Reentrant: a finaliser may run in it
_PER_LOOK = 2  # handles that _has_no_hooks() makes


def have_no_hooks(nodes: Iterable[Any], leaves: Sequence[Leaf]) -> bool:
    """Says whether these leaves have no hooks but those of their gradients, and their nodes none at all."""
    global _handles
    unknown = list(zip(nodes, leaves, strict=True))
    if RemovableHandle.next_id == _handles:
        known = _without_hooks
        unknown = [pair for pair in unknown if (ref := known.get(id(pair[1]))) is None or ref() is not pair[1]]
        if not unknown:
            return True
    with _looking:
        before = RemovableHandle.next_id
        if before != _handles:
            _without_hooks.clear()
            _handles = -1
        without = [leaf for node, leaf in unknown if _has_no_hooks(node, leaf)]
        if RemovableHandle.next_id == before + _PER_LOOK * len(unknown):  # nobody else has registered any meanwhile
            for leaf in without:
                key = id(leaf)
                _without_hooks[key] = weakref.ref(leaf, functools.partial(_forget, key))
            _handles = RemovableHandle.next_id
        return len(without) == len(unknown)


@finaliser
def _forget(key: int, ref: weakref.ref[Leaf]) -> None:
    if _without_hooks.get(key) is ref:
        _without_hooks.pop(key, None)


def has_hooks(node: Any) -> bool:
    """Says whether hooks are registered on a node. Asking registers two, and removes them."""
    handles = node.register_prehook(_nothing), node.register_hook(_nothing)
    try:
        # torch has one dictionary for all prehooks of a node, and one for all hooks.
        return any(len(handle.hooks_dict_ref()) > 1 for handle in handles)
    finally:
        for handle in handles:
            handle.remove()


def _has_no_hooks(node: Any, leaf: Any) -> bool:
    return not has_hooks(node) and not leaf._post_accumulate_grad_hooks


def _nothing(*gradients: Any) -> None:
    pass


def _in_child() -> None:
    """In a fork: the thread that held it is not there."""
    global _looking
    _looking = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
