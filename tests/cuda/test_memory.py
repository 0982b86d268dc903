"""Nothing grows: host memory, device memory, descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from telegrad import autograd, rpc

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("cluster")]

MIB = 1 << 20


def same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def figures() -> tuple[int, int, int]:
    """MiB of this process in the host's memory, MiB in use on the device, descriptors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    free, total = torch.cuda.mem_get_info()
    return pages * 4096 // MIB, (total - free) // MIB, len(os.listdir("/proc/self/fd"))


def all_figures() -> list[int]:
    torch.cuda.synchronize()
    return [*figures(), *rpc.rpc_sync("a", figures)]


@pytest.mark.parametrize(("nbytes", "count"), [(1024, 3000), (256 * MIB, 1100)])
def test_echoes_and_passes_leave_nothing(request: pytest.FixtureRequest, nbytes: int, count: int) -> None:
    if "unix" not in request.node.name:
        count //= 10  # through the host it takes long
    x = torch.ones(nbytes // 4, device="cuda", requires_grad=True)

    def step() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("a", same, args=(x,)).mean()])
            assert autograd.get_gradients(context_id)[x].isfinite().all()

    def echo() -> None:
        assert rpc.rpc_sync("a", same, args=(x.detach(),)).shape == x.shape

    for _ in range(20):  # pools fill
        step()
        echo()
    before = all_figures()
    for n in range(count):
        step() if n % 10 == 0 else echo()
    after = all_figures()
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert max(grown) < 64, f"host MiB, device MiB, descriptors; here and there: {grown}"
