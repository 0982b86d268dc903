"""The programs of the suite `gradients`, written once for both sides, and the functions that the peers run.

A program is a forward pass: it is given `rpc` (a module with `rpc_sync` and `rpc_async`), the names of the peers
and a leaf, and returns the loss. With `LOCAL` in place of `rpc` it runs in this process: what its gradients are
checked against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.callee import tensor_of

SMALL_BYTES = 64

Program = Callable[[Any, Sequence[str], Tensor], Tensor]


class _Local:
    """`rpc_sync` and `rpc_async` without a call: the function runs here, at once."""

    @staticmethod
    def rpc_sync(to: str, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        return func(*args)

    @staticmethod
    def rpc_async(to: str, func: Callable[..., Any], args: Sequence[Any]) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(func(*args))
        return done


LOCAL = _Local()


# -- what the peers run ------------------------------------------------------------------------------


def wave(x: Tensor) -> Tensor:
    """One node."""
    return x.sin()


def same(x: Tensor) -> Tensor:
    """One node, which computes nothing: what is measured is the way there and back."""
    return x.view_as(x)


def many_nodes(x: Tensor, nodes: int) -> Tensor:
    """A graph of so many small nodes (a multiple of four): a chain in which every fourth node joins two ways."""
    for _ in range(nodes // 4):
        x = (x + x.sin() * 0.5).tanh()
    return x


# -- the programs ------------------------------------------------------------------------------------


def chain(rpc: Any, peers: Sequence[str], leaf: Tensor, *, length: int) -> Tensor:
    """Each call is given what the one before it returned."""
    x = leaf
    for _ in range(length):
        x = rpc.rpc_sync(peers[0], wave, args=(x,))
    return loss_of(x)


def chain_with_skips(rpc: Any, peers: Sequence[str], leaf: Tensor, *, length: int) -> Tensor:
    """As `chain`, with a skip connection around each call: what is sent depends on every call before it."""
    x = leaf
    for _ in range(length):
        x = (x + rpc.rpc_sync(peers[0], wave, args=(x,))) / 2
    return loss_of(x)


def fan(rpc: Any, peers: Sequence[str], leaf: Tensor, *, width: int) -> Tensor:
    """Calls that are all under way at once; their results meet in the loss."""
    futures = [rpc.rpc_async(peers[0], wave, args=(leaf,)) for _ in range(width)]
    return loss_of(torch.stack([future.wait() for future in futures]))


def one_to_each(rpc: Any, peers: Sequence[str], leaf: Tensor, *, others: int) -> Tensor:
    """A call to each of the other workers, all under way at once."""
    futures = [rpc.rpc_async(peer, wave, args=(leaf,)) for peer in peers[:others]]
    return loss_of(torch.stack([future.wait() for future in futures]))


def there_and_back(rpc: Any, peers: Sequence[str], leaf: Tensor) -> Tensor:
    """The loss computes as little as it can: on large tensors both sides would measure memory."""
    result = rpc.rpc_sync(peers[0], same, args=(leaf,))
    return torch.dot(result, _weights(result.numel()))


@functools.lru_cache(maxsize=1)
def _weights(count: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, count)


def remote_graph(rpc: Any, peers: Sequence[str], leaf: Tensor, *, nodes: int) -> Tensor:
    return loss_of(rpc.rpc_sync(peers[0], many_nodes, args=(leaf, nodes)))


def loss_of(result: Tensor) -> Tensor:
    """A mean square. Not a sum: its gradient is one number, expanded, which need not be sent in full."""
    return result.square().mean()


def leaf_of(nbytes: int) -> Tensor:
    """A new leaf, with numbers of at most 1."""
    tensor = tensor_of(nbytes)
    return tensor.div_(tensor.numel()).requires_grad_()
