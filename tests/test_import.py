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


WITHOUT_C10 = """
import ctypes, torch
def missing(name, *args, load=ctypes.CDLL, **kwargs):
    if "c10" in str(name):
        raise OSError(f"{name}: cannot open shared object file")
    return load(name, *args, **kwargs)
ctypes.CDLL = missing
import telegrad.rpc, telegrad._torch
assert telegrad._torch.cpp_log_level is None
"""


def test_a_torch_whose_libraries_lie_elsewhere() -> None:
    """As some distributions have it. What is looked for there only makes logs shorter."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_C10], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'telegrad' has no attribute 'nothing'"):
        _ = telegrad.nothing
    assert not hasattr(telegrad, "__wrapped__")
    assert telegrad.optim.DistributedOptimizer.__module__.startswith("telegrad.optim")
    assert set(telegrad.__all__) <= set(dir(telegrad))
