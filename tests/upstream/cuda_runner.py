"""Runs one test of PyTorch's own CUDA suites on telegrad, in ranks that are spawned: CUDA does not survive a fork.

    cuda_runner.py SUITE.TEST SECONDS    prints the outcome, as a line of JSON

The ranks import this file, too: all of them run on telegrad, and find the suites in it.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from typing import Any

import torch

import telegrad.compat


def _no_agent(self: Any, *_: Any, **__: Any) -> None:
    raise AssertionError("an agent of torch's own was started")


if not telegrad.compat.is_installed():  # a rank has it from this process, before it imports anything
    torch._C._distributed_rpc.TensorPipeAgent.__init__ = _no_agent
    telegrad.compat.install()

# The suites are imported after install(), as any program of torch's is that runs on telegrad.
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed.nn.api import remote_module_test  # noqa: E402
from torch.testing._internal.distributed.rpc import dist_autograd_test, rpc_test  # noqa: E402
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)


class Spawned(common_distributed.MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class TensorPipeAgentCudaRpcTest(rpc_test.TensorPipeAgentCudaRpcTest, TensorPipeRpcAgentTestFixture, Spawned):
    pass


class CudaDistAutogradTest(dist_autograd_test.CudaDistAutogradTest, TensorPipeRpcAgentTestFixture, Spawned):
    pass


class CudaRemoteModuleTest(remote_module_test.CudaRemoteModuleTest, TensorPipeRpcAgentTestFixture, Spawned):
    pass


def main(test: str, limit: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the suites print goes where errors go
    common_distributed.TIMEOUT_DEFAULT = float(limit)
    assert rpc_test.rpc.TensorPipeAgent.__module__ == "telegrad.compat.agent"
    suite, _, method = test.partition(".")
    result = unittest.TestResult()
    globals()[suite](method).run(result)
    problems = [text for _, text in (*result.failures, *result.errors)]
    outcome = "failed" if problems else "skipped" if result.skipped else "passed"
    detail = "\n".join(problems) or "".join(reason for _, reason in result.skipped)
    print(json.dumps({"outcome": outcome, "detail": detail}), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
