"""The caller's thread-local modes of torch, which hold on the callee: grad, inference and autocast."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from collections.abc import Iterator

import torch

from .messages import Modes

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu")


def current_modes() -> Modes | None:
    """The modes of this thread; None if they are torch's defaults."""
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    if grad and not inference and not torch._C._is_any_autocast_enabled():
        return None
    autocast = tuple(
        (device, True, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in _DEVICE_TYPES
        if torch.is_autocast_enabled(device)
    )
    return Modes(grad, inference, autocast, torch.is_autocast_cache_enabled())


@contextmanager
def applied(modes: Modes | None) -> Iterator[None]:
    """Runs its body in these modes, and leaves the thread in torch's defaults whatever the body did."""
    try:
        if modes is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(modes.inference))
            stack.enter_context(torch.set_grad_enabled(modes.grad))
            for device, enabled, dtype in modes.autocast:
                context = torch.autocast(
                    device, getattr(torch, dtype), enabled=enabled, cache_enabled=modes.autocast_cache
                )
                stack.enter_context(context)
            yield
    finally:
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
