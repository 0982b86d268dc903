"""The chain of Waits in front of the tensors that a worker has sent. Its order is what keeps passes from deadlock.

# Note [errors on the threads of devices]
An error on a device's thread ends an engine call once the thread that makes the call is done with the node that it
runs; and that may be a Wait, for gradients that now never come. So beside devices each Wait has nodes in front of it,
which wait for the same, but no longer than their limit: between two of them torch looks.

# Note [past the node of a leaf]
torch runs the node of a leaf that is on a device on the device's thread: there and back, for a gradient that is only
put aside. So where such a leaf was sent, the Wait puts its gradient aside; unless somebody looks on: a hook of the leaf
or of its node, or DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import nodes
from .averaged import averaged
from .contexts import Sent
from .local_graph import Node
from .node_hooks import have_no_hooks

_LIMITS = (30.0, 3.0, 0.3)  # seconds; the last one waits first


def make_waits(
    waits: dict[int, list[Sent]], inner: set[int], leaves: dict[Node, None], kept: set[int], *, has_devices: bool
) -> torch.Tensor:
    """Chains the Waits for these messages; returns the token of the one that the engine comes to first. `kept` has the
    ids of leaves whose gradients do not go to their nodes.

    Nothing is behind a leaf, so no other gradient depends on when it is waited for: messages with nothing but small
    leaves have one Wait together, at the end. Large gradients are added up as they come, one after the other.
    """
    token: torch.Tensor | None = None
    messages: list[int] = []
    ids: list[int] = []
    past: list[int] = []
    inputs: list[torch.Tensor] = []
    for message in sorted(waits, reverse=True):  # what was sent last is added up first, as with a Wait for each
        if message not in inner:
            messages.append(message)
            for sent in waits[message]:
                if sent.id in kept:
                    past.append(sent.id)
                else:
                    ids.append(sent.id)
                    inputs.append(sent.leaf)  # type: ignore[arg-type]
    if messages:
        token = _make_wait(messages, ids, past, inputs, leaves, has_devices, len(ids))
    for message in wait_order(inner) if inner else ():
        ids, past, inputs, others = [], [], [], list[Sent]()
        for sent in waits[message]:
            if not sent.is_leaf:
                others.append(sent)
            elif sent.id in kept:
                past.append(sent.id)
            else:
                ids.append(sent.id)
                inputs.append(sent.leaf)  # type: ignore[arg-type]
        leaf_count = len(ids)
        if others:
            stand_ins = others[0].sends.grad_fn.saved_tensors  # type: ignore[union-attr]
            for sent in others:
                ids.append(sent.id)
                inputs.append(stand_ins[sent.number])
        if token is not None:
            inputs.append(token)
        token = _make_wait([message], ids, past, inputs, leaves, has_devices, leaf_count)
    assert token is not None
    return token


def is_unseen(sent: Sent) -> bool:
    """Says whether the gradient of what was sent can go past its node. The caller has disabled __torch_function__ of
    subclasses."""
    leaf = sent.leaf
    if leaf is None or leaf.is_cpu or leaf.layout is not torch.strided:
        return False
    if leaf.device != sent.device or leaf.dtype != sent.dtype:
        return False  # its `.data` was set since: it has another node, which casts the gradient
    if leaf._backward_hooks or (averaged.data and leaf in averaged):
        return False
    return have_no_hooks((sent.edge[0],), (leaf,))


def _make_wait(
    messages: list[int],
    ids: list[int],
    past: list[int],
    inputs: list[torch.Tensor],
    leaves: dict[Node, None],
    has_devices: bool,
    leaf_count: int,
) -> torch.Tensor:
    """Makes a Wait. Its inputs are those with these ids, the leaves first, then the rest."""
    token = nodes.make_wait(messages, ids, inputs, past)
    if leaf_count:
        for node, _ in token.grad_fn.next_functions[:leaf_count]:  # type: ignore[union-attr]
            if node is not None:
                leaves[node] = None
    if has_devices:
        for limit in _LIMITS:
            token = nodes.make_wait_for_a_while(messages, limit, token)
    return token


def wait_order(messages: Iterable[int]) -> list[int]:
    """Returns the order in which Waits are chained. The engine takes them in reverse: the gradients of what was sent
    last are waited for first. Any other order can deadlock: see docs/backward.md."""
    return sorted(messages)
