"""Large tensors on their way through host memory: in pieces, each of which is right, whatever the streams do."""

from __future__ import annotations

import threading

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.errors import DecodeError
from telegrad.serialization.device_lane import on_host, staged
from telegrad.transport.copying import WORTH_HELP as PIECE

MIB = 1 << 20
SIZES = [MIB - 1, MIB, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 12345]


def bytes_of(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_all_pieces_arrive_and_the_host_memory_is_free_at_once(nbytes: int, busy: bool) -> None:
    side = torch.cuda.Stream()
    for _ in range(4):
        source = bytes_of(nbytes)
        expected = source.clone()
        with torch.cuda.stream(side):
            if busy:
                torch.cuda._sleep(20_000_000)
            result = staged(source, "cuda:0")
            source.zero_()
            assert result.is_cpu == (nbytes < MIB)
            if not result.is_cpu:
                result = result + 0  # on the same stream
        side.synchronize()
        assert torch.equal(result.cpu(), expected if nbytes >= MIB else source)


def test_other_targets_are_left_alone() -> None:
    source = bytes_of(2 * MIB)
    assert staged(source, "cpu") is source
    assert staged(source, "cuda:99") is source
    assert staged(source, "no device at all") is source


def test_capture_of_a_graph() -> None:
    source = bytes_of(2 * MIB)
    work = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(DecodeError, match="cannot arrive on cuda:0 while a CUDA graph is captured"):
            staged(source, "cuda:0")
        work += 1
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("nbytes", [2 * MIB, 5 * PIECE])
@pytest.mark.parametrize("way", ["to the device", "to the host"])
def test_capture_of_a_graph_in_another_thread(nbytes: int, way: str) -> None:
    """Memory is pinned, and events are asked, meanwhile: the capture goes on, and so do the copies."""
    source = bytes_of(nbytes)
    on_device = source.cuda()
    work = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    # CUDA makes no stream beside a capture. torch hands out 32 in turn: its own choice could be `side`.
    side, captured = torch.cuda.Stream(), torch.cuda.Stream()
    found: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def copy() -> None:
        try:
            with torch.cuda.stream(side):
                for _ in range(3):
                    found.append(staged(source, "cuda:0") if way == "to the device" else on_host(on_device))
        except BaseException as error:
            errors.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=captured):
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join(60)
        work += 1
    graph.replay()
    torch.cuda.synchronize()
    assert errors == [] and work.tolist() == [2.0] * 8
    assert all(torch.equal(one.cpu(), source) for one in found) and len(found) == 3
    assert all(one.is_cuda == (way == "to the device") for one in found)


def changed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_calls(transport: str, server: telegrad.ForkServer) -> None:
    with telegrad.LocalCluster(["a"], transport=transport, server=server):
        for x in (
            torch.randn(3 * MIB, device="cuda"),
            torch.randn(1500, 2000, device="cuda", dtype=torch.float64).t(),
            torch.randn(700, 1000, device="cuda", dtype=torch.complex64)[:, ::2],
            torch.randn(3 * MIB, 1, device="cuda").expand(3 * MIB, 4),
        ):
            result = rpc.rpc_sync("a", changed, args=(x,))
            assert result.device == x.device and torch.equal(result, x * 2)
            assert torch.equal(rpc.rpc_async("a", changed, args=(x,)).wait(), x * 2)
