"""What importing telegrad must not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import telegrad

PROGRAM = """
import torch
torch.autograd.backward = torch.autograd.grad = None
import sys
import telegrad
telegrad.LocalCluster, telegrad.Worker, telegrad.autograd, telegrad.errors, telegrad.rpc
for_the_command_line = {"typer", "rich", "matplotlib", "pygments", "pygraphviz"}
assert not for_the_command_line & set(sys.modules), for_the_command_line & set(sys.modules)
"""


def test_importing_runs_no_backward_and_imports_nothing_of_the_command_line() -> None:
    """torch's engine starts threads, and CUDA, when it is first used; the fork server imports telegrad and forks."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'telegrad' has no attribute 'nothing'"):
        _ = telegrad.nothing
    assert not hasattr(telegrad, "__wrapped__")
    assert telegrad.optim.DistributedOptimizer.__module__.startswith("telegrad.optim")
    assert set(telegrad.__all__) <= set(dir(telegrad))
