"""Parameters and modules in messages: a program prints the same on torch's own RPC and on the drop-in."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import telegrad
from telegrad import autograd, rpc

PROGRAM = """
    import copy
    import sys
    import warnings

    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    import torch.multiprocessing as mp
    from torch import nn

    warnings.simplefilter("ignore")
    KEPT = nn.Parameter(torch.full((2,), 3.0))

    def square(tensor):
        return (tensor * tensor).sum()

    def of_first(tensors):
        return square(tensors[0])

    @torch.jit.script
    def scripted(tensor: torch.Tensor):
        return (tensor * tensor).sum()

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.computed = torch.ones(1, requires_grad=True) * 2

        def forward(self, x):
            return (self.weight * self.computed * x).sum()

    def apply(module, x):
        return module(x)

    def kinds(module):
        return [(type(tensor).__name__, tensor.is_leaf) for tensor in module.parameters()]

    def trained(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.zero_grad()
        module(torch.ones(1)).backward()
        optimizer.step()
        return module.weight.detach()

    def copied(module):
        return copy.deepcopy(module)(torch.ones(1)).detach()

    def are_one(module, tensor):
        return module.weight is tensor

    def kept():
        return KEPT

    def handle():
        return rpc.RRef(KEPT)

    def handle_of_list():
        return rpc.RRef([KEPT])

    def gradients(context_id):
        found = dist_autograd.get_gradients(context_id)
        return sorted([tuple(leaf.shape), gradient.tolist()] for leaf, gradient in found.items())

    def compare():
        def leaf():
            return torch.ones(2, requires_grad=True)

        def parameter():
            return nn.Parameter(torch.ones(2))

        for what, function, *args in (
            ("tensor", square, leaf()),
            ("parameter", square, parameter()),
            ("view of a parameter", square, parameter() * 2),
            ("list", of_first, [parameter()]),
            ("operator", torch.mul, parameter(), 2),
            ("method", torch.Tensor.mul, parameter(), 2),
            ("scripted", scripted, parameter()),
            ("module", apply, Mixed(), torch.ones(1)),
        ):
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", function, args=tuple(args)).sum()
                dist_autograd.backward(context_id, [loss])
                there = rpc.rpc_sync("worker1", gradients, args=(context_id,))
                print(what, "here", gradients(context_id), "there", there)
        for what, get in (
            ("result", lambda: rpc.rpc_sync("worker1", kept)),
            ("remote()", lambda: rpc.remote("worker1", kept).to_here()),
            ("RRef()", lambda: rpc.rpc_sync("worker1", handle).to_here()),
            ("RRef() of a list", lambda: rpc.rpc_sync("worker1", handle_of_list).to_here()[0]),
        ):
            with dist_autograd.context() as context_id:
                value = get()
                dist_autograd.backward(context_id, [square(value)])
                there = rpc.rpc_sync("worker1", gradients, args=(context_id,))
                print(what, type(value).__name__, value.is_leaf, "here", gradients(context_id), "there", there)
        with dist_autograd.context():
            torch.manual_seed(0)
            module = nn.Linear(1, 1)
            for function in (kinds, trained, copied):
                print(function.__name__, rpc.rpc_sync("worker1", function, args=(module,)))
            print(rpc.rpc_sync("worker1", are_one, args=(module, module.weight)))
        print(rpc.rpc_sync("worker1", kinds, args=(module,)))

    def run(rank, path):
        options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + path, rpc_timeout=30)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0:
            compare()
        rpc.shutdown()

    if __name__ == "__main__":
        mp.start_processes(run, args=(sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_parameters_are_sent_as_torch_sends_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))
    shown = []
    for how in ([], ["-m", "telegrad.compat"]):
        command = [sys.executable, *how, str(script), str(tmp_path / f"store{len(how)}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout.splitlines())
    torchs, telegrads = shown
    assert len(torchs) == 17
    assert telegrads == torchs


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * tensor).sum()


@pytest.mark.parametrize("plain", [True, False])
def test_a_subclass_that_is_no_parameter_is_followed(plain: bool) -> None:
    """torch's gradients of one end in a tensor that nobody has."""
    with telegrad.LocalCluster(["b"], transport="inproc", options=telegrad.Options(plain=plain)):
        with autograd.context() as context_id:
            leaf = torch.ones(2).as_subclass(_Marked).requires_grad_()
            autograd.backward(context_id, [rpc.rpc_sync("b", _square, args=(leaf,)).as_subclass(torch.Tensor)])
            assert autograd.get_gradients(context_id)[leaf].tolist() == [2, 2]


class _Marked(torch.Tensor):
    pass
