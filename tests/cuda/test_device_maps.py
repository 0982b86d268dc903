"""Device maps on one GPU: to it, from it, and beside it. Maps from one GPU to another need two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import telegrad
from telegrad import Options, autograd, errors, optim, rpc
from telegrad.nn import RemoteModule

CUDA = "cuda:0"
Map = dict[Any, Any]
SETUPS: list[tuple[str, Map]] = [
    ("unix", {0: 0}),
    ("unix", {"cpu": 0}),
    ("unix", {0: "cpu"}),
    ("unix", {0: "cpu", "cpu": 0}),
    ("inproc", {"cpu": 0}),
    ("tcp", {0: "cpu"}),
]


class Setup:
    """A cluster, and where the tensors of its driver's calls to "a" arrive, and those of the answers."""

    def __init__(self, device_map: Map) -> None:
        names = Options(device_maps={"a": device_map}).device_maps["a"]
        self.there = {"cpu": "cpu", CUDA: CUDA} | names
        self.back = {"cpu": "cpu", CUDA: CUDA} | {target: source for source, target in names.items()}


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[Setup]:
    transport, device_map = request.param
    options = Options(rpc_timeout=60, device_maps={"a": device_map})
    with telegrad.LocalCluster(["a", "b"], transport=transport, server=server, options=options):
        yield Setup(device_map)


def where(value: Any) -> str:
    return str((value[0] if isinstance(value, list) else value).device)


def double(tensor: torch.Tensor, to: str) -> torch.Tensor:
    return tensor.to(to) * 2


def kinds(device: str) -> list[torch.Tensor]:
    dense = torch.arange(12.0, device=device).view(3, 4)
    return [
        dense,
        dense.t(),
        dense[:, 1:3],
        torch.ones(1 << 20, device=device),
        torch.ones(0, device=device),
        torch.ones((), device=device, dtype=torch.bfloat16),
        torch.ones(2, device=device, dtype=torch.complex64).conj(),
        nn.Parameter(dense.clone()),
        dense.to_sparse(),
        dense.to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8).to(device),
    ]


@pytest.mark.filterwarnings("ignore")  # of sparse tensors
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_tensors_of_all_kinds_go_by_the_map(setup: Setup, device: str) -> None:
    for tensor in kinds(device):
        assert rpc.rpc_sync("a", where, args=(tensor,)) == setup.there[device]
        assert rpc.rpc_sync("a", where, args=([tensor],)) == setup.there[device]
        found = rpc.rpc_sync("a", torch.clone, args=(tensor.detach(),))
        assert str(found.device) == setup.back[setup.there[device]]
        assert found.dtype == tensor.dtype
        if tensor.layout is torch.strided and not tensor.is_quantized:
            torch.testing.assert_close(found.cpu(), tensor.detach().cpu())


@pytest.mark.parametrize("result", ["cpu", CUDA])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_results_come_back_by_the_reverse(setup: Setup, device: str, result: str) -> None:
    tensor = torch.arange(3.0, device=device)
    for found in (
        rpc.rpc_sync("a", double, args=(tensor, result)),
        rpc.rpc_async("a", double, args=(tensor, result)).wait(),
        rpc.remote("a", double, args=(tensor, result)).to_here(),
    ):
        assert str(found.device) == setup.back[result]
        assert found.tolist() == [0, 2, 4]
    assert str(rpc.rpc_sync("b", double, args=(tensor, result)).device) == result  # no map: the same device


def layer(weight: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [(tensor.to(weight.device) * weight).sin().to(tensor.device) for tensor in tensors]


def by_way_of_b(weight: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return rpc.rpc_sync("b", layer, args=(weight, *tensors))


@pytest.mark.parametrize("size", [4, 1 << 18])
@pytest.mark.parametrize("function", [layer, by_way_of_b])
def test_gradients_go_back_to_where_the_tensors_came_from(setup: Setup, function: Any, size: int) -> None:
    for first, second in (("cpu", "cpu"), ("cpu", CUDA), (CUDA, "cpu"), (CUDA, CUDA)):
        generator = torch.Generator().manual_seed(1)
        leaves = [
            torch.randn(size, generator=generator, dtype=torch.float64).to(device).requires_grad_()
            for device in (first, second, first)
        ]
        weight, *tensors = leaves
        expected = torch.autograd.grad(sum(y.cpu().sum() for y in layer(weight, *tensors)), leaves)
        for _ in range(3):
            with autograd.context() as context_id:
                results = rpc.rpc_sync("a", function, args=(weight, *tensors))
                autograd.backward(context_id, [sum(result.cpu().sum() for result in results)])
                found = autograd.get_gradients(context_id)
                for leaf, right in zip(leaves, expected, strict=True):
                    assert found[leaf].device == leaf.device
                    torch.testing.assert_close(found[leaf], right)


def test_second_derivatives_go_by_the_map(setup: Setup) -> None:
    for device in ("cpu", CUDA):
        x = torch.tensor([0.5, 1.0], device=device, requires_grad=True)
        with autograd.context() as context_id:
            (y,) = rpc.rpc_sync("a", layer, args=(torch.ones((), device=device), x))
            (first,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True)
            (second,) = autograd.grad(context_id, [first.sum()], [x])
        torch.testing.assert_close(first.detach(), x.detach().cos())
        torch.testing.assert_close(second, -x.detach().sin())


def test_a_module_on_the_gpu_is_trained(setup: Setup) -> None:
    torch.manual_seed(2)
    here = nn.Linear(4, 3)
    there = RemoteModule.from_module(f"a/{CUDA}", here)
    x = torch.randn(5, 4)
    local = torch.optim.SGD(here.parameters(), 0.1)
    remote = optim.DistributedOptimizer(torch.optim.SGD, there.remote_parameters(), 0.1)
    for _ in range(3):
        local.zero_grad()
        here(x).square().sum().backward()
        local.step()
        with autograd.context() as context_id:
            found = there(x)
            assert str(found.device) == setup.back[CUDA]
            autograd.backward(context_id, [found.square().sum()])
            remote.step(context_id)
    torch.testing.assert_close(there(x).cpu(), here(x))


def test_a_strict_worker_refuses_and_goes_on(server: telegrad.ForkServer) -> None:
    words = "TensorPipe RPC backend only supports CPU tensors by default.*`set_device_map` on `TensorPipeRpcBackendOp.*"
    tensor = torch.ones(2, device=CUDA)
    options = Options(strict_devices=True, device_maps={"b": {"cpu": "cpu"}})
    with telegrad.LocalCluster(["a", "b"], server=server, options=options):
        for _ in range(20):
            with pytest.raises(errors.EncodeError, match=f"{words}Request.*destination a, but found .* {CUDA}"):
                rpc.rpc_sync("a", torch.neg, args=(tensor,))
            with pytest.raises(errors.EncodeError, match=f"{words}Request.*destination b for device {CUDA} but"):
                rpc.rpc_sync("b", torch.neg, args=(tensor,))
            with pytest.raises(errors.EncodeError, match=f"{words}Response.*destination driver, but found .* {CUDA}"):
                rpc.rpc_sync("a", double, args=(torch.ones(2), CUDA))
        assert rpc.rpc_sync("a", double, args=(torch.ones(2), "cpu")).tolist() == [2, 2]


def test_a_map_to_a_device_that_is_not_there(server: telegrad.ForkServer) -> None:
    missing = torch.cuda.device_count()
    with pytest.raises(ValueError, match="driver has source devices with invalid indices in its device map for a"):
        with telegrad.LocalCluster(["a"], server=server, options=Options(device_maps={"a": {missing: 0}})):
            pass
    with pytest.raises(errors.ClusterError, match="worker 'a' ended with status 1 before it joined"):
        with telegrad.LocalCluster(["a"], server=server, options=Options(device_maps={"a": {0: missing}})):
            pass


def test_a_gpu_that_the_peer_does_not_see(server: telegrad.ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a map a tensor goes to the CPU there, and its gradient comes back to the GPU."""
    with telegrad.LocalCluster(["a"], server=server) as cluster:
        cluster.call("a", hide_gpus)
        x = torch.ones(3, device=CUDA, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("a", double, args=(x, "cpu"))
            assert y.is_cpu
            autograd.backward(context_id, [y.sum()])
            gradient = autograd.get_gradients(context_id)[x]
        assert gradient.is_cuda
        assert gradient.tolist() == [2, 2, 2]


def hide_gpus() -> None:
    torch.accelerator.device_count = lambda: 0
