"""Runs tests of PyTorch's own suites on telegrad, each in ranks that are forked from this process.

Started by test_upstream.py. Reads what to run, one test in a line of JSON, and answers each with another. This process
is warm: it has imported torch and the suites, and runs nothing itself, so a test needs no more than its ranks need.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import unittest
from typing import Any

import torch

import telegrad.compat

# -- no agent of torch's own may start -------------------------------------------------------------------------

_fork = multiprocessing.get_context("fork")
_agents = _fork.Value("i", 0)  # how many were started, in this process and its forks


def _count_agent(self: Any, *_: Any, **__: Any) -> None:
    with _agents.get_lock():
        _agents.value += 1
    raise AssertionError("an agent of torch's own was started")


torch._C._distributed_rpc.TensorPipeAgent.__init__ = _count_agent
telegrad.compat.install()
# Tests of DDP call a rank as soon as their own init_process_group() has returned, and expect that it has returned
# there, too. torch promises that only with this; without it, a quick call comes too early.
os.environ["TORCH_DIST_INIT_BARRIER"] = "1"

# The suites are imported after install(), as any program of torch's is that runs on telegrad.
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import ddp_under_dist_autograd_test  # noqa: E402
from torch.testing._internal.distributed.nn.api import remote_module_test  # noqa: E402
from torch.testing._internal.distributed.rpc import (  # noqa: E402
    dist_autograd_test,
    dist_optimizer_test,
    rpc_test,
)
from torch.testing._internal.distributed.rpc.examples import (  # noqa: E402
    parameter_server_test,
    reinforcement_learning_rpc_test,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)

_MODULES = (
    dist_autograd_test,
    dist_optimizer_test,
    rpc_test,
    remote_module_test,
    parameter_server_test,
    reinforcement_learning_rpc_test,
    ddp_under_dist_autograd_test,
)


class InForks(common_distributed.MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(_fork.Process)


def _suite(name: str) -> type[unittest.TestCase]:
    """A suite with the fixtures that it needs, as PyTorch's own test files put it together."""
    found = next(vars(module)[name] for module in _MODULES if name in vars(module))
    return type(name, (found, TensorPipeRpcAgentTestFixture, InForks), {"__module__": __name__})


def run(test: str, limit: float) -> dict[str, Any]:
    """Runs one test, of which each rank may take `limit` seconds."""
    common_distributed.TIMEOUT_DEFAULT = limit
    suite, _, method = test.partition(".")
    result = unittest.TestResult()
    began = time.monotonic()
    _suite(suite)(method).run(result)
    problems = [text for _, text in (*result.failures, *result.errors)]
    if _agents.value:
        problems.append("an agent of torch's own was started")
    outcome = "failed" if problems else "skipped" if result.skipped else "passed"
    detail = "\n".join(problems) or "".join(reason for _, reason in result.skipped)
    return {"outcome": outcome, "detail": detail, "seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the suites print goes where errors go
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
