"""The caller's modes of torch, which hold on the callee: grad, inference, autocast and anomaly mode.

docs/threads-and-seeds.md lists them, and what else torch keeps per thread. A function of a user's leaves nothing of it
behind on a thread of telegrad: which function runs there next is a matter of timing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import is_grad_enabled

from .._torch import is_any_autocast_enabled, len_torch_function_stack
from ..messages import Modes
from ..primitives.current import thread
from .anomaly import anomaly_mode

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu")


def current_modes() -> Modes | None:
    """The modes of this thread; None if they are torch's defaults."""
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    anomaly = torch.is_anomaly_enabled()
    if grad and not inference and not anomaly and not is_any_autocast_enabled():
        return None
    autocast = tuple(
        (device, True, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in _DEVICE_TYPES
        if torch.is_autocast_enabled(device)
    )
    cache, check_nan = torch.is_autocast_cache_enabled(), torch.is_anomaly_check_nan_enabled()
    return Modes(grad, inference, autocast, cache, anomaly, check_nan)


_DENORMAL = 5e-324


def flushes_denormals() -> bool:
    """Whether torch.set_flush_denormal() is on. It is a state of this thread's processor, which torch cannot read."""
    return _DENORMAL * 1.0 == 0.0


def is_changed() -> bool:
    """Whether a function left something behind on this thread of telegrad."""
    return (
        not is_grad_enabled()
        or is_any_autocast_enabled()
        or len_torch_function_stack() > 0
        or (_DENORMAL * 1.0 == 0.0) is not thread.flushes_denormals
    )


def restore_defaults() -> None:
    """Undoes what a function left behind on its thread, which must not meet the next one."""
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
    if is_any_autocast_enabled():
        for device in _DEVICE_TYPES:
            torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()
    if len_torch_function_stack():
        torch.set_default_device(None)
    if flushes_denormals() is not thread.flushes_denormals:
        torch.set_flush_denormal(thread.flushes_denormals)


@contextmanager
def applied(modes: Modes | None) -> Iterator[None]:
    """Runs its body in these modes, and leaves the thread in torch's defaults whatever the body did."""
    try:
        if modes is None:
            yield
            return
        autocast = _autocast(modes) if modes.autocast else nullcontext()
        anomaly = anomaly_mode(modes.check_nan) if modes.anomaly else nullcontext()
        with torch.inference_mode(modes.inference), torch.set_grad_enabled(modes.grad), autocast, anomaly:
            yield
    finally:
        restore_defaults()


@contextmanager
def _autocast(modes: Modes) -> Iterator[None]:
    """Not torch.autocast, which warns of a device type that is not here, and leaves it out. The mode may be meant
    for a third worker, which is called from here."""
    before = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device, _, _ in modes.autocast
    ]
    cache = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    try:
        for device, enabled, dtype in modes.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, getattr(torch, dtype))
        torch.set_autocast_cache_enabled(modes.autocast_cache)
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        for device, enabled, last_dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, last_dtype)
        torch.set_autocast_cache_enabled(cache)


@functools.cache
def use_up_warning() -> None:
    """Has torch give its warning, once in a process, that backward() with create_graph makes a cycle through `.grad`.
    Here it makes none: the gradient never gets there."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        (leaf * 1).backward(create_graph=True)
        leaf.grad = None
