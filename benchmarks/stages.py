"""Where the parts of a model live: here, or on a peer. A model is written once, against `Stage`.

Here     in this process: the reference
Held     on a peer, behind an RRef and calls, the same program on both sides
Remote   on a peer, as a telegrad.nn.RemoteModule
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.models import forward_of, parameters_of

Make = Callable[..., nn.Module]
"""A function that a peer can import; its arguments are plain values."""


class Stage(Protocol):
    """A part of a model, called as its module is."""

    def __call__(self, *inputs: Any) -> Any: ...

    def call_async(self, *inputs: Any) -> torch.futures.Future[Any]: ...

    def parameters(self) -> list[Any]:
        """What an optimizer of its kind takes."""

    def values(self) -> list[Tensor]:
        """The parameters as they are now, for checks."""


Place = Callable[[int, Make, Sequence[Any]], Stage]
"""Makes a stage with `make(*args)`: the number says on which of the peers."""


class Here:
    def __init__(self, make: Make, args: Sequence[Any]) -> None:
        self.module = make(*args)

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def call_async(self, *inputs: Any) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self.module(*inputs))
        return done

    def parameters(self) -> list[Any]:
        return list(self.module.parameters())

    def values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.module.parameters()]


class Held:
    def __init__(self, rpc: Any, peer: str, make: Make, args: Sequence[Any]) -> None:
        self._rpc, self._peer = rpc, peer
        self._handle = rpc.remote(peer, make, args=tuple(args))

    def __call__(self, *inputs: Any) -> Any:
        return self._rpc.rpc_sync(self._peer, forward_of, args=(self._handle, *inputs))

    def call_async(self, *inputs: Any) -> torch.futures.Future[Any]:
        return self._rpc.rpc_async(self._peer, forward_of, args=(self._handle, *inputs))  # type: ignore[no-any-return]

    def parameters(self) -> list[Any]:
        return self._rpc.rpc_sync(self._peer, parameters_of, args=(self._handle,))  # type: ignore[no-any-return]

    def values(self) -> list[Tensor]:
        return self._rpc.rpc_sync(self._peer, values_of, args=(self._handle,))  # type: ignore[no-any-return]


class Remote:
    def __init__(self, peer: str, make: Make, args: Sequence[Any]) -> None:
        from telegrad.nn import RemoteModule

        self.module = RemoteModule(peer, make, tuple(args))

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def call_async(self, *inputs: Any) -> torch.futures.Future[Any]:
        return self.module.forward_async(*inputs)

    def parameters(self) -> list[Any]:
        return list(self.module.parameters())

    def values(self) -> list[Tensor]:
        import telegrad.rpc

        rref = self.module.module_rref
        return telegrad.rpc.rpc_sync(rref.owner_name(), values_of, args=(rref,))  # type: ignore[no-any-return]


def values_of(handle: Any) -> list[Tensor]:
    return [parameter.detach() for parameter in handle.local_value().parameters()]


def here(number: int, make: Make, args: Sequence[Any]) -> Stage:
    return Here(make, args)


def held(rpc: Any, peers: Sequence[str]) -> Place:
    return lambda number, make, args: Held(rpc, peers[number % len(peers)], make, args)


def remote(peers: Sequence[str]) -> Place:
    return lambda number, make, args: Remote(peers[number % len(peers)], make, args)
