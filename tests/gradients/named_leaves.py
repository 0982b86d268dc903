"""Leaves by name: "a.weight" lives on worker "a". Every process makes the same values for the same name, so a test
can run its forward pass across workers and again locally, and compare the gradients.

    forward(there)  its calls go to other workers        forward(here)  its calls are plain calls
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from telegrad import autograd, rpc

PATIENCE = 20.0  # seconds

_leaves: dict[str, torch.Tensor] = {}
_making = threading.Lock()  # guards the above

Call = Callable[..., Any]


def leaf(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The leaf of that name in this process, made when it is asked for first (of shape (3,), if none is given)."""
    with _making:
        if name not in _leaves:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = torch.randn(shape or (3,), generator=generator, dtype=torch.float64)
            _leaves[name] = value.to(dtype).requires_grad_()
        return _leaves[name]


def there(to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a function on another worker."""
    return rpc.rpc_sync(to, function, args=args, kwargs=kwargs, timeout=PATIENCE)


def here(to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `there` gives, without any worker."""
    return function(*args, **kwargs)


def own_gradient(context_id: int, name: str) -> torch.Tensor | None:
    return autograd.get_gradients(context_id).get(leaf(name))


def own_grad(name: str) -> torch.Tensor | None:
    return leaf(name).grad


def own_gradient_count(context_id: int) -> int:
    return len(autograd.get_gradients(context_id))


def gradients(context_id: int, names: Iterable[str]) -> dict[str, torch.Tensor | None]:
    """The gradients of these leaves in a context, each from the worker where it lives."""
    return {name: _at_owner(name, own_gradient, context_id, name) for name in names}


def grads(names: Iterable[str]) -> dict[str, torch.Tensor | None]:
    """`.grad` of these leaves, each from the worker where it lives."""
    return {name: _at_owner(name, own_grad, name) for name in names}


def _at_owner(name: str, function: Callable[..., Any], *args: Any) -> Any:
    owner = name.partition(".")[0]
    return function(*args) if owner == rpc.get_worker_info().name else there(owner, function, *args)


def expected(losses: torch.Tensor | list[torch.Tensor], names: Iterable[str], **options: Any) -> dict[str, Any]:
    """What local autograd says."""
    names = list(names)
    losses = [losses] if isinstance(losses, torch.Tensor) else losses
    found = torch.autograd.grad(losses, [leaf(name) for name in names], allow_unused=True, **options)
    return dict(zip(names, found, strict=True))


def assert_same(found: dict[str, Any], wanted: dict[str, Any], *, times: float = 1) -> None:
    """That gradients are those of local autograd, or a multiple of them."""
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, f"{name} should have no gradient"
        else:
            assert found[name] is not None, f"{name} has no gradient"
            torch.testing.assert_close(
                found[name].detach(), gradient.detach() * times, msg=lambda text, name=name: f"{name}: {text}"
            )


def check(forward: Callable[[Call], torch.Tensor], names: Iterable[str], **options: Any) -> None:
    """Runs a forward pass and its backward across workers, and compares every gradient with local autograd's."""
    names = list(names)
    with autograd.context() as context_id:
        loss = forward(there)
        autograd.backward(context_id, [loss], timeout=PATIENCE, **options)
        found = gradients(context_id, names)
    wanted = forward(here)
    torch.testing.assert_close(loss.detach(), wanted.detach())
    assert_same(found, expected(wanted, names))
