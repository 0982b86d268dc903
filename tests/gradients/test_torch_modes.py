"""The caller's modes hold on the callee, and a function's own do not outlive it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from telegrad import rpc
from telegrad.gradients.torch_modes import applied, current_modes
from telegrad.messages import Modes

DEFAULT = (True, False, False, torch.bfloat16, False)


def look() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def ask_third() -> tuple[object, ...]:
    return rpc.rpc_sync("b", look)


def leave_grad_off() -> None:
    torch.set_grad_enabled(False)


def leave_autocast_on() -> None:
    torch.set_autocast_enabled("cpu", True)


CONTEXTS = {
    "no_grad": (torch.no_grad, (False, False, False, torch.bfloat16, False)),
    "inference_mode": (torch.inference_mode, (False, True, False, torch.bfloat16, False)),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), (True, False, True, torch.bfloat16, False)),
    "autocast to half": (
        lambda: torch.autocast("cpu", torch.float16),
        (True, False, True, torch.float16, False),
    ),
}


@contextlib.contextmanager
def autocast_of_cuda():
    """As torch.autocast("cuda") on a machine that has it."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_callers_modes_hold(cluster, name):
    context, expected = CONTEXTS[name]
    with context():
        assert rpc.rpc_sync("a", look) == expected
        assert rpc.rpc_async("a", look).wait() == expected
        assert rpc.rpc_sync("a", ask_third) == expected
    assert rpc.rpc_sync("a", look) == DEFAULT
    assert rpc.rpc_sync("a", ask_third) == DEFAULT


def test_autocast_acts(cluster):
    with torch.autocast("cpu", torch.bfloat16):
        assert rpc.rpc_sync("a", product) is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert rpc.rpc_sync("a", product) is torch.float32
    assert rpc.rpc_sync("a", product) is torch.float32


def test_autocast_of_a_device_that_is_not_there(cluster):
    # No warning, which would be an error; and whoever is called from there gets it too.
    with autocast_of_cuda():
        assert rpc.rpc_sync("a", look) == (*DEFAULT[:4], True)
        assert rpc.rpc_sync("a", ask_third) == (*DEFAULT[:4], True)
    assert rpc.rpc_sync("a", look) == DEFAULT


def test_what_a_function_leaves_behind_does_not_meet_the_next(cluster):
    for context in (contextlib.nullcontext, *[context for context, _ in CONTEXTS.values()]):
        with context():
            rpc.rpc_sync("a", leave_grad_off)
        assert rpc.rpc_sync("a", look) == DEFAULT
    with torch.autocast("cpu"):
        rpc.rpc_sync("a", leave_autocast_on)
    assert rpc.rpc_sync("a", look) == DEFAULT


def fail() -> None:
    torch.set_grad_enabled(False)
    raise ValueError("on purpose")


def test_nor_what_a_failing_function_leaves_behind(cluster):
    for context in (contextlib.nullcontext, *[context for context, _ in CONTEXTS.values()]):
        with context(), pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("a", fail)
        assert rpc.rpc_sync("a", look) == DEFAULT


KEPT: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> bool:
    KEPT.append(x)
    return x.requires_grad


def train() -> torch.Tensor:
    weight = torch.ones(3, requires_grad=True)
    (KEPT.pop() * weight).sum().backward()
    return weight.grad


def test_arguments_are_ordinary_tensors_in_every_mode(cluster):
    x = torch.arange(3.0, requires_grad=True)
    with torch.inference_mode():
        assert rpc.rpc_sync("a", keep, args=(x,))
    assert rpc.rpc_sync("a", train).tolist() == [0.0, 1.0, 2.0]


def test_current_modes():
    assert current_modes() is None
    with torch.no_grad():
        assert current_modes() == Modes(grad=False)
        with torch.enable_grad():
            assert current_modes() is None
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert current_modes() == Modes(autocast=(("cpu", True, "float16"),), autocast_cache=False)


def test_applied_restores_everything():
    before = (*look(), torch.is_autocast_cache_enabled())
    modes = Modes(False, True, (("cpu", True, "float16"), ("cuda", True, "bfloat16")), False)
    with pytest.raises(ValueError, match="on purpose"), applied(modes):
        assert current_modes() == modes
        raise ValueError("on purpose")
    assert (*look(), torch.is_autocast_cache_enabled()) == before
