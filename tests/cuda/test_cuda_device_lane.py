"""The device lane between two processes that share a GPU. Its rules are held to on a simulated machine in
tests/transport/test_device_lane.py; this shows that the real one does what the simulated one does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lane_peer import GPU, LIMIT, MIB, busy, decoded, encoded, janitor_is_idle, main, put

from telegrad.errors import ConnectionClosedError, EncodeError
from telegrad.messages import Placed
from telegrad.transport.cuda import CUDA
from telegrad.transport.device import DeviceLane
from telegrad.transport.device_pool import SLOT

PATIENCE = 60.0  # seconds


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


class Ends:
    """A lane in this process, and the peer in another."""

    def __init__(self, **environment: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, os.getpid()), daemon=True)
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        theirs.close()
        self.lane = DeviceLane(CUDA, "peer", self.ask("pid"), LIMIT)

    def ask(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        assert self._pipe.poll(PATIENCE), f"no answer to {name}"
        fine, result = self._pipe.recv()
        assert fine, result
        return result

    def negotiate(self) -> Ends:
        """In both directions."""
        self.ask("use_cuda")
        self.lane.heard(decoded(self.ask("offer")).lane)
        assert not put(self.lane, torch.ones(1, device=GPU), [])
        for _ in range(1000):
            self.lane.heard(decoded(self.ask("talk", encoded(self.lane, []))).lane)
            if (self.lane._accepted or self.lane._refused) and not self.lane._offers:
                break
            time.sleep(1e-3)
        self.ask("talk", encoded(self.lane, []))
        assert self.lane._accepted, "the offer was refused: see the log"
        return self

    def put(self, *tensors: torch.Tensor) -> bytes:
        placed: list[Placed] = []
        for tensor in tensors:
            deadline = time.monotonic() + PATIENCE
            while not put(self.lane, tensor, placed):
                assert time.monotonic() < deadline
                time.sleep(1e-3)
        return encoded(self.lane, placed)

    def take(self, data: bytes, timeout: float = PATIENCE) -> list[torch.Tensor]:
        envelope = decoded(data)
        self.lane.heard(envelope.lane)
        deadline = time.monotonic() + timeout
        return [arrived.take(GPU, deadline, self.process.is_alive) for arrived in self.lane.arrived(envelope.placed)]

    def close(self) -> None:
        self.lane.close()
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()
        eventually(janitor_is_idle)


@pytest.fixture(scope="module")
def shared() -> Iterator[Ends]:
    ends = Ends().negotiate()
    yield ends
    ends.close()


@pytest.fixture
def fresh() -> Iterator[Ends]:
    """For tests after which the peer is of no use."""
    ends = Ends().negotiate()
    yield ends
    ends.close()


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=GPU)


def test_random_sizes_and_layouts(shared: Ends) -> None:
    rng = random.Random(0)
    for _ in range(150):
        size = rng.choice([0, 1, rng.randrange(SLOT), SLOT, SLOT + 1, rng.randrange(20 * MIB)])
        tensor = random_bytes(size)
        if size >= 6 and rng.random() < 0.3:
            tensor = tensor[: size - size % 6].view(-1, 6).t()
        (result,) = shared.take(shared.ask("echo", shared.put(tensor)))
        assert torch.equal(result, tensor.flatten() + 1)


@pytest.mark.parametrize("count", [1000, 4 * MIB])
@pytest.mark.parametrize("side", [False, True])
def test_the_sender_overwrites_and_the_receiver_is_busy(shared: Ends, count: int, side: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream() if side else None):
        tensor = torch.empty(count, dtype=torch.uint8, device=GPU)
        for number in range(40):
            busy(2)
            tensor.fill_(number)
            message = shared.put(tensor)
            tensor.zero_()
            (result,) = shared.take(shared.ask("echo", message, 1, side))
            assert bool((result == number + 1).all()), number


def test_memory_is_used_again_under_load(shared: Ends) -> None:
    assert reused_under_load(shared) == 0


def reused_under_load(ends: Ends) -> int:
    """How many of the tensors were wrong, that a busy receiver takes while the sender goes on."""
    tensor = torch.empty(4 * MIB, dtype=torch.uint8, device=GPU)
    expected = []
    for number in range(1, 41):
        tensor.fill_(number)
        ends.ask("take_later", ends.put(tensor), 3)
        expected.append(number * tensor.numel())
    return sum(got != wanted for got, wanted in zip(ends.ask("sums"), expected, strict=True))


def test_a_sender_that_does_not_look_before_reuse_is_seen(fresh: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDA, "is_done", lambda event: True)
    assert reused_under_load(fresh) > 0


def test_a_receiver_that_does_not_look_is_seen(fresh: Ends) -> None:
    def wrong() -> int:
        result = 0
        for number in range(1, 11):
            tensor = torch.zeros(4 * MIB, dtype=torch.uint8, device=GPU)
            torch.cuda.synchronize()
            busy(20)
            tensor.fill_(number)
            result += fresh.ask("take_and_sum", fresh.put(tensor)) != [number * tensor.numel()]
        return result

    assert wrong() == 0
    fresh.ask("be_blind")
    assert wrong() > 0


def test_a_put_does_not_wait_for_its_stream(shared: Ends) -> None:
    tensor = random_bytes(MIB)
    shared.ask("drop", shared.put(tensor))
    torch.cuda.synchronize()
    busy(50)
    began = time.perf_counter()
    message = shared.put(tensor)
    took = time.perf_counter() - began
    assert not torch.cuda.current_stream().query()
    shared.ask("drop", message)
    assert took < 5e-3, took


def test_the_deadline(shared: Ends) -> None:
    message = shared.ask("put_behind", 400, 7, 1000)
    with pytest.raises(TimeoutError, match="worker 'peer' did not finish"):
        shared.take(message, 0.02)
    (result,) = shared.take(shared.ask("put_behind", 20, 8, 1000))
    assert bool((result == 8).all())


@pytest.mark.parametrize("count", [1000, 64 * MIB])
def test_the_sender_dies_before_its_copy_is_done(fresh: Ends, count: int) -> None:
    message = fresh.ask("put_behind", 3000, 7, count)
    error: list[BaseException] = []

    def take() -> None:
        try:
            fresh.take(message)
        except BaseException as caught:
            error.append(caught)

    taking = threading.Thread(target=take)
    taking.start()
    time.sleep(0.1)
    fresh.process.kill()
    taking.join(PATIENCE)
    assert not taking.is_alive()
    assert isinstance(error[0], ConnectionClosedError), error
    assert torch.ones(10, device=GPU).sum().item() == 10  # no stream of ours waits for the dead
    torch.cuda.synchronize()


@pytest.mark.alone
@pytest.mark.parametrize("state", ["unread", "copying"])
def test_the_receiver_dies_and_its_memory_goes_back(state: str) -> None:
    torch.cuda.synchronize()
    ends = Ends().negotiate()
    message = ends.put(random_bytes(256 * MIB))
    if state == "copying":
        ends.ask("take_later", message, 3000)
    ends.process.kill()
    ends.process.join()
    held = ends.lane.statistics().segment_bytes
    assert held >= 256 * MIB
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    ends.close()
    assert torch.cuda.mem_get_info()[0] >= before + 256 * MIB
    assert torch.ones(10, device=GPU).sum().item() == 10


@pytest.mark.alone
def test_nothing_grows() -> None:
    ends = Ends().negotiate()
    tensor = random_bytes(64 * MIB)
    for number in range(300):
        if number == 20:
            torch.cuda.synchronize()
            before, segments = torch.cuda.mem_get_info()[0], ends.lane.statistics().segments
            files = len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))
        (result,) = ends.take(ends.ask("echo", ends.put(tensor)))
    assert torch.equal(result, tensor + 1)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= before - 256 * MIB  # a segment more at each end
    assert ends.lane.statistics().segments <= segments + 2
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))) <= (files[0] + 8, files[1])
    ends.lane.close()  # each end frees what the other one has closed
    ends.ask("close")
    ends.close()
    assert ends.lane.statistics().segment_bytes == 0


def test_expandable_segments() -> None:
    ends = Ends(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True").negotiate()
    tensor = random_bytes(5 * MIB)
    (result,) = ends.take(ends.ask("echo", ends.put(tensor)))
    assert torch.equal(result, tensor + 1)
    ends.close()


def test_a_peer_that_does_not_use_cuda_says_nothing() -> None:
    ends = Ends(CUDA_VISIBLE_DEVICES="")
    for _ in range(3):
        assert not put(ends.lane, torch.ones(1, device=GPU), [])
        assert decoded(ends.ask("talk", encoded(ends.lane, []))).lane == ()
    ends.close()


def test_two_workers_of_one_process_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    one, other = (DeviceLane(CUDA, name, os.getpid(), LIMIT) for name in ("other", "one"))
    assert not put(one, torch.ones(1, device=GPU), [])
    other.heard(one.to_say())
    eventually(lambda: bool(one.heard(other.to_say()) or one._refused or one._accepted))
    assert one._refused
    one.close()
    other.close()
    eventually(janitor_is_idle)
    assert "through host memory" in caplog.text
    assert torch.ones(10, device=GPU).sum().item() == 10  # CUDA's error is not left for torch to find


def test_capture_of_a_graph(shared: Ends) -> None:
    tensor = torch.ones(1000, dtype=torch.uint8, device=GPU)
    large = torch.ones(65 * MIB, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    messages: list[bytes] = []
    with torch.cuda.graph(graph):
        with pytest.raises(EncodeError, match="while a CUDA graph is captured"):
            put(shared.lane, tensor, [])
        # Another thread goes on, and the capture does, too; though memory is allocated for a size that is new.
        other = threading.Thread(target=lambda: messages.append(shared.put(large)))
        other.start()
        other.join(PATIENCE)
        doubled = tensor * 2
    graph.replay()
    torch.cuda.synchronize()
    assert bool((doubled == 2).all())
    assert shared.ask("take_and_sum", messages[0]) == [65 * MIB]


@pytest.mark.alone
def test_no_memory_goes_by_the_host(shared: Ends) -> None:
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 256 * MIB, dtype=torch.uint8, device=GPU)
    assert not put(shared.lane, hog[: 300 * MIB], [])
    assert shared.lane._pools[0]._no_memory_until > 0  # not the limit
    del hog
    torch.cuda.empty_cache()
    assert torch.ones(10, device=GPU).sum().item() == 10
    assert shared.ask("take_and_sum", shared.put(torch.ones(10, dtype=torch.uint8, device=GPU))) == [10]
