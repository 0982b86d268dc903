"""Importing telegrad and running a cluster replaces nothing inside of torch: only what users ask for does."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# Prints each name in torch's modules, and in their classes, that is bound to another object than before.
PROGRAM = """
    import sys
    import torch, torch.profiler, torch.autograd.profiler, torch.autograd.profiler_legacy
    import torch.autograd.profiler_util, torch.distributed.rpc, torch.distributed.autograd, torch.distributed.nn
    import torch.distributed.optim, torch.nn.parallel

    PARTS = ("torch.autograd", "torch.profiler", "torch.distributed", "torch.nn.parallel", "torch.futures", "torch._C")

    def bound():
        found = {}
        for module_name, module in sorted(sys.modules.items()):
            if module_name.startswith(PARTS):
                for name, value in list(vars(module).items()):
                    if callable(value):
                        found[f"{module_name}.{name}"] = value
                    if isinstance(value, type):
                        for attribute, inner in list(vars(value).items()):
                            if callable(inner):
                                found[f"{module_name}.{name}.{attribute}"] = inner
        return found

    with torch.profiler.profile():  # torch itself binds names late
        pass
    before = bound()
    import telegrad
    from telegrad import autograd, profiler, rpc
    import telegrad.nn, telegrad.optim, telegrad.graph, telegrad.compat, telegrad.cli
    with telegrad.LocalCluster(["a"]):
        with profiler.profile(), autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            autograd.backward(context_id, [rpc.rpc_sync("a", torch.mul, args=(x, 2)).sum()])
    {ask}
    after = bound()
    assert "torch.autograd.profiler.profile.__exit__" in before
    for name, value in before.items():
        if after.get(name) is not value:
            print(name)
"""


def replaced(ask: str) -> list[str]:
    code = textwrap.dedent(PROGRAM).replace("{ask}", ask)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_is_replaced_unasked() -> None:
    assert replaced("") == []


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        ("telegrad.compat.follow_profiles()", "torch.autograd.profiler.profile.__exit__"),
        ("telegrad.compat.install()", "torch.distributed.rpc.rpc_sync"),
    ],
)
def test_what_is_asked_for_is_seen(ask: str, expected: str) -> None:
    assert expected in replaced(ask)
