"""The device lane on a simulated machine: what is put arrives as it was, memory is used again only when both devices
are done with it, and every death, failure and refusal leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest
import torch
from device_pair import (
    GPU,
    MIB,
    PATIENCE,
    Pair,
    Thread,
    alive,
    bytes_of,
    eventually,
    janitor_is_idle,
    over_the_wire,
    pairs,
    put,
)
from jumping_clock import JumpingClock
from simulated_cuda import no_memory

from telegrad.errors import ConnectionClosedError, DecodeError, EncodeError, ProtocolError
from telegrad.messages import Answer, Placed
from telegrad.primitives import interrupts
from telegrad.transport import device, device_board, device_mappings
from telegrad.transport.cuda import Cuda, CudaError
from telegrad.transport.device_board import ARRIVED, FREE, NAMED, PLACES_END, READ, Board
from telegrad.transport.device_mappings import Arrived
from telegrad.transport.device_pool import IDLE, SLAB, SLOT

MakePair = Callable[..., Pair]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_PATIENCE", 0.5)
    monkeypatch.setattr(device_mappings, "_UNTAKEN", 0.2)


@pytest.fixture
def make() -> Iterator[MakePair]:
    with pairs() as make:
        yield make


@pytest.fixture
def pair(make: MakePair) -> Pair:
    return make().negotiate()


# -- right ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_all_that_is_put_arrives_as_it_was(seed: int) -> None:
    """Random sizes, layouts and streams, overwritten after the put, taken in any order, on slow devices."""
    rng = random.Random(seed)
    with pairs(slowest=0.002, seed=seed) as make:
        pair = make().negotiate()
        sides, sides_b = ([cuda.new_stream() for _ in range(3)] for cuda in (pair.cuda, pair.cuda_b))
        waiting, checks = [], []
        for number in range(120):
            size = rng.choice([0, 1, rng.randrange(SLOT), SLOT, SLOT + 1, rng.randrange(3 * MIB)])
            tensor = bytes_of(size, number)
            if size >= 6 and rng.random() < 0.3:
                tensor = tensor[: size - size % 6].view(-1, 6).t()
            expected = tensor.contiguous().flatten().clone()
            with pair.cuda.using(rng.choice(sides)):
                placed: list[Placed] = []
                if not put(pair.a, tensor, placed):
                    continue  # the pool is full
                pair.cuda.fill(tensor, 0)
            waiting.append((pair.deliver(*placed)[0], expected))
            rng.shuffle(waiting)
            while len(waiting) > rng.randrange(6):
                arrived, expected = waiting.pop()
                with pair.cuda_b.using(rng.choice(sides_b)):
                    checks.append((pair.take(arrived), expected))
        for arrived, expected in waiting:
            checks.append((pair.take(arrived), expected))
        pair.cuda_b.synchronize()
        assert len(checks) > 50
        assert all(torch.equal(got, expected) for got, expected in checks)


def test_a_tensor_may_be_overwritten_after_the_put(pair: Pair) -> None:
    tensor = torch.full((100,), 7, dtype=torch.uint8)
    side = pair.cuda.new_stream()
    pair.cuda.streams[side].running.clear()
    with pair.cuda.using(side):
        placed = pair.put(tensor)
        pair.cuda.fill(tensor, 9)
    pair.cuda.streams[side].running.set()
    result = pair.take(pair.deliver(placed)[0])
    pair.settle()
    assert tensor.tolist() == [9] * 100
    assert result.tolist() == [7] * 100


def test_memory_is_used_again_only_after_the_byte_and_the_event(pair: Pair) -> None:
    first = pair.put(bytes_of(10))
    pair.settle()
    second = pair.put(bytes_of(10))
    assert second.place != first.place  # the event is done, and the byte says no
    stream = pair.cuda_b.stream(0)
    pair.cuda_b.streams[stream].running.clear()
    result = pair.take(pair.deliver(first)[0])
    assert pair.state(first) == READ
    third = pair.put(bytes_of(10))
    assert third.place not in (first.place, second.place)  # the byte says yes, and the event is not done
    pair.cuda_b.streams[stream].running.set()
    pair.settle()
    assert torch.equal(result, bytes_of(10))
    assert first.place in {pair.put(bytes_of(10)).place for _ in range(2)}


def test_take_waits_for_a_slow_copy(pair: Pair) -> None:
    stream = pair.cuda.streams[pair.cuda.stream(0)]
    stream.running.clear()
    (arrived,) = pair.deliver(pair.put(bytes_of(1000)))
    taking = Thread(lambda: pair.take(arrived))
    taking.join(0.05)
    assert taking.is_alive()
    assert pair.cuda_b.calls["copy"] == 0  # nothing was given to a stream that would wait
    stream.running.set()
    result = taking.outcome()
    pair.settle()
    assert torch.equal(result, bytes_of(1000))
    counts = pair.b.statistics()
    assert counts.waits == 1 and 0.04 < counts.wait_seconds < 10


def test_what_was_never_taken_goes_back(pair: Pair) -> None:
    placed = pair.put(bytes_of(10)), pair.put(bytes_of(3 * MIB))
    arrived = pair.deliver(*placed)
    assert [pair.state(one) for one in placed] == [ARRIVED, ARRIVED]
    gc.disable()
    try:
        del arrived
        assert [pair.state(one) for one in placed] == [FREE, FREE]
    finally:
        gc.enable()
    pair.settle()
    assert pair.put(bytes_of(10)).place in (placed[0].place, placed[0].place - 1)
    assert pair.put(bytes_of(3 * MIB)).place == placed[1].place
    assert pair.cuda_b.calls["open_memory"] == 1  # of the offer


def test_what_the_collector_finds_goes_back_in_any_order() -> None:
    board = Board.make()
    seen = Board.open(os.getpid(), board.fd, board.token)
    board.close()
    place = SimpleNamespace(id=100)
    circle = [board, Arrived(None, board, place, 10)]  # the board came first, and is finalised first
    circle.append(circle)
    assert seen.bytes[100] == ARRIVED
    del board, circle
    gc.collect()
    assert seen.bytes[100] == FREE


def test_what_was_never_sent_is_taken_back(pair: Pair) -> None:
    placed = pair.put(bytes_of(3 * MIB))
    assert placed.fresh is not None
    pair.a.take_back([placed])
    pair.settle()
    again = pair.put(bytes_of(3 * MIB, 1))
    assert again.place == placed.place
    assert again.fresh is not None  # the peer does not know it yet
    result = pair.take(pair.deliver(again)[0])
    pair.settle()
    assert torch.equal(result, bytes_of(3 * MIB, 1))


def test_a_place_is_introduced_once(pair: Pair) -> None:
    fresh = 0
    for number in range(10):
        placed = pair.put(bytes_of(3 * MIB, number))
        fresh += placed.fresh is not None
        result = pair.take(pair.deliver(placed)[0])
        pair.settle()
        assert torch.equal(result, bytes_of(3 * MIB, number))
    assert fresh == 1
    assert pair.cuda_b.calls["open_memory"] == 2  # that of the offer, and this


def test_another_device_gets_a_copy(pair: Pair) -> None:
    (arrived,) = pair.deliver(pair.put(bytes_of(50)))
    result = arrived.take(torch.device("cuda", 3), None, alive)
    assert result.simulated_device == 3
    assert torch.equal(result, bytes_of(50))


def test_both_directions_and_several_devices(make: MakePair) -> None:
    pair = make(at_b=("GPU-1", "GPU-0"))  # the same two, by other numbers
    tensors = [bytes_of(100, number) for number in range(2)]
    tensors[0].simulated_device, tensors[1].simulated_device = 0, 1
    for lane in (pair.a, pair.b):
        for tensor in tensors:
            assert not put(lane, tensor, [])
    for _ in range(50):
        pair.b.heard(over_the_wire([], pair.a).lane)
        pair.a.heard(over_the_wire([], pair.b).lane)
        pair.settle()
    for sender, receiver in ((pair.a, pair.b), (pair.b, pair.a)):
        placed: list[Placed] = []
        assert all(put(sender, tensor, placed) for tensor in tensors)
        results = [arrived.take(GPU, None, alive) for arrived in receiver.arrived(placed)]
        pair.settle()
        assert all(map(torch.equal, results, tensors))
        assert receiver._mappings.devices == {0: 1, 1: 0}


def test_many_threads(make: MakePair) -> None:
    pair = make().negotiate()
    pair.machine.slowest = 2e-4

    def echo(thread: int) -> bool:
        rng = random.Random(thread)
        right = True
        with pair.cuda.using(pair.cuda.new_stream()), pair.cuda_b.using(stream := pair.cuda_b.new_stream()):
            for number in range(40):
                tensor = bytes_of(rng.choice([10, SLOT, 2 * MIB]), number)
                placed: list[Placed] = []
                if put(pair.a, tensor, placed):
                    result = pair.take(pair.b.arrived(placed)[0])
                    pair.cuda_b.streams[stream].synchronize()
                    right &= torch.equal(result, tensor)
        return right

    threads = [Thread(lambda thread=thread: echo(thread)) for thread in range(6)]
    assert all(thread.outcome() for thread in threads)
    counts, counts_b = pair.a.statistics(), pair.b.statistics()
    assert (counts.puts, counts.bytes_put) == (counts_b.takes, counts_b.bytes_taken)
    assert counts.puts > 100


def test_nothing_grows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_mappings, "_SPIN", 0.0)  # a simulated stream needs the interpreter lock
    tensor, large = bytes_of(1000), bytes_of(3 * MIB)
    for number in range(10_000):
        pair.send(large if number % 100 == 0 else tensor)
        if number % 40 == 0:
            pair.settle()
    counts = pair.a.statistics()
    assert counts.puts == 10_000
    assert counts.segments <= 3 and counts.segment_bytes <= 12 * MIB
    assert len(pair.cuda.events) <= 64 and len(pair.b._mappings._places) <= 64


# -- limits and idleness ----------------------------------------------------------------------------------


def test_a_full_pool_sends_by_the_host_until_something_comes_back(make: MakePair) -> None:
    pair = make(limit=SLAB + 8 * MIB).negotiate()
    first, _ = pair.put(bytes_of(4 * MIB)), pair.put(bytes_of(4 * MIB))
    assert not put(pair.a, bytes_of(4 * MIB), [])
    assert not put(pair.a, bytes_of(16 * MIB), [])  # larger than the limit
    assert put(pair.a, bytes_of(10), [])  # there is room in the slab
    pair.take(pair.deliver(first)[0])
    pair.settle()
    assert pair.put(bytes_of(4 * MIB)).place == first.place
    assert pair.a.statistics().segment_bytes == SLAB + 8 * MIB


def test_full_slabs_are_followed_by_others_up_to_the_limit(make: MakePair) -> None:
    pair = make(limit=2 * SLAB).negotiate()
    placed: list[Placed] = []
    while put(pair.a, bytes_of(SLOT), placed):
        pass
    assert len({one.place for one in placed}) == len(placed) == 2 * SLAB // SLOT - (pair.state(placed[0]) == FREE)


def test_free_memory_of_another_size_makes_room(make: MakePair, jumping_clock: JumpingClock) -> None:
    pair = make(limit=SLAB + 8 * MIB).negotiate()
    placed = [pair.put(bytes_of(4 * MIB)) for _ in range(2)]
    for arrived in pair.deliver(*placed):
        pair.take(arrived)
    del arrived
    pair.settle()
    assert not put(pair.a, bytes_of(8 * MIB), [])
    pair.a.tick()
    again = pair.put(bytes_of(4 * MIB))
    assert again.place in {one.place for one in placed}  # what was used a moment ago is not given up
    pair.a.take_back([again])
    pair.settle()
    jumping_clock.jump(2)

    def has_room() -> bool:
        pair.b.tick()
        eventually(janitor_is_idle)
        pair.a.tick()
        eventually(janitor_is_idle)
        return put(pair.a, bytes_of(8 * MIB), [])

    eventually(has_room)
    assert pair.a.statistics().segment_bytes == SLAB + 8 * MIB


def test_idle_memory_goes_back_when_the_peer_has_closed_it(pair: Pair, jumping_clock: JumpingClock) -> None:
    busy = pair.put(bytes_of(100))
    pair.send(bytes_of(4 * MIB))
    pair.settle()
    jumping_clock.jump(IDLE - 1)
    pair.a.tick()
    eventually(janitor_is_idle)
    assert pair.cuda.calls["free"] == 0
    assert pair.a.statistics().segments == 2
    jumping_clock.jump(2)
    pair.a.tick()
    eventually(janitor_is_idle)
    assert pair.cuda.calls["free"] == 0  # the peer has it open
    assert pair.b.statistics().mappings == 2
    pair.b.tick()
    eventually(janitor_is_idle)
    assert pair.b.statistics().mappings == 1
    pair.a.tick()
    eventually(janitor_is_idle)
    assert pair.cuda.calls["free"] == 1
    assert pair.a.statistics().segments == 1  # that of the message that is still out
    result = pair.take(pair.deliver(busy)[0])
    again = pair.send(bytes_of(4 * MIB, 1))
    pair.settle()
    assert torch.equal(result, bytes_of(100)) and torch.equal(again, bytes_of(4 * MIB, 1))


def test_numbers_are_used_again_after_idle_drops(pair: Pair, jumping_clock: JumpingClock) -> None:
    numbers = set()
    for _ in range(20):
        placed = pair.put(bytes_of(4 * MIB))
        numbers.add(placed.place)
        pair.a.take_back([placed])
        pair.settle()
        jumping_clock.jump(IDLE + 1)
        for lane in (pair.a, pair.b, pair.a):
            lane.tick()
            eventually(janitor_is_idle)
    assert len(numbers) <= 2  # that of the offer was given back, too


def test_no_memory_is_asked_for_once_more_after_torch_has_given_back_its_own(
    pair: Pair, jumping_clock: JumpingClock
) -> None:
    pair.cuda.fail["malloc"] = [no_memory()]
    assert put(pair.a, bytes_of(4 * MIB), [])
    assert pair.cuda.caches_released == 1
    pair.cuda.fail["malloc"] = [no_memory(), no_memory()]
    jumping_clock.stop()
    for _ in range(5):
        assert not put(pair.a, bytes_of(8 * MIB), [])
    assert pair.cuda.caches_released == 2  # not with every message
    jumping_clock.jump(2)
    assert put(pair.a, bytes_of(8 * MIB), [])


# -- deaths, deadlines, failures --------------------------------------------------------------------------


def test_the_deadline(pair: Pair) -> None:
    pair.cuda.streams[pair.cuda.stream(0)].running.clear()
    placed = pair.put(bytes_of(100))
    (arrived,) = pair.deliver(placed)
    with pytest.raises(TimeoutError, match="worker 'a' did not finish copying its tensor in time"):
        pair.take(arrived, 0.01)
    assert pair.state(placed) == FREE
    assert pair.put(bytes_of(100)).place != placed.place  # its event is not done


def test_a_deadline_that_has_passed_takes_what_is_there(pair: Pair) -> None:
    (arrived,) = pair.deliver(pair.put(bytes_of(100)))
    pair.settle()
    assert pair.take(arrived, -1).nbytes == 100


def test_the_sender_dies_before_its_copy_is_done(pair: Pair) -> None:
    stream = pair.cuda.streams[pair.cuda.stream(0)]
    stream.running.clear()
    (arrived,) = pair.deliver(pair.put(bytes_of(100)))
    is_alive = True
    taking = Thread(lambda: arrived.take(GPU, None, lambda: is_alive))
    taking.join(0.02)
    pair.cuda.kill()
    stream.running.set()
    taking.join(0.02)
    assert taking.is_alive()  # it is only known by its connection
    is_alive = False
    with pytest.raises(ConnectionClosedError, match="the connection with worker 'a' ended before"):
        taking.outcome()
    assert pair.cuda_b.calls["copy"] == 0


def test_the_sender_dies_after_its_copy_is_done(pair: Pair) -> None:
    (arrived,) = pair.deliver(pair.put(bytes_of(100)))
    pair.settle()
    pair.cuda.kill()
    result = arrived.take(GPU, None, lambda: False)
    pair.settle()
    assert torch.equal(result, bytes_of(100))


@pytest.mark.parametrize("when", ["before it reads", "when it has read", "in its copy", "after its copy"])
def test_the_receiver_dies(pair: Pair, when: str) -> None:
    placed = pair.put(bytes_of(3 * MIB))
    if when != "before it reads":
        (arrived,) = pair.deliver(placed)
        if when == "in its copy":
            pair.cuda_b.streams[pair.cuda_b.stream(0)].running.clear()
        if when in ("in its copy", "after its copy"):
            pair.take(arrived)
    if when == "after its copy":
        pair.settle()
    pair.cuda_b.kill()
    pair.a._peer_pid = 0  # which is no process
    pair.a.close()
    eventually(janitor_is_idle)
    assert pair.cuda.allocated == {}  # though in one case the event will never be done


def test_memory_is_freed_only_after_our_own_copies(pair: Pair) -> None:
    pair.cuda_b.kill()
    stream = pair.cuda.streams[pair.cuda.stream(0)]
    stream.running.clear()
    pair.put(bytes_of(3 * MIB))
    pair.a.close()
    pair.a._peer_pid = 0  # which is no process
    time.sleep(0.1)
    assert len(pair.cuda.allocated) == 1
    stream.running.set()
    eventually(janitor_is_idle)
    assert pair.cuda.allocated == {}


def test_mappings_are_closed_only_after_our_own_copies(pair: Pair) -> None:
    stream = pair.cuda_b.streams[pair.cuda_b.stream(0)]
    stream.running.clear()
    result = pair.send(bytes_of(3 * MIB))
    pair.b.close()
    time.sleep(0.05)
    assert len(pair.cuda_b.opened) == 1  # that of the offer is closed
    stream.running.set()
    eventually(janitor_is_idle)
    assert pair.cuda_b.opened == {}
    assert torch.equal(result, bytes_of(3 * MIB))


def test_a_copy_into_our_memory_that_never_ends(
    pair: Pair, jumping_clock: JumpingClock, caplog: pytest.LogCaptureFixture
) -> None:
    stream = pair.cuda.streams[pair.cuda.stream(0)]
    stream.running.clear()
    pair.put(bytes_of(3 * MIB))
    pair.b.close()
    pair.a.close()
    eventually(lambda: pair.cuda_b.opened == {})
    jumping_clock.jump(100)
    eventually(janitor_is_idle)
    assert "4194304 bytes of device memory stay allocated: a copy into them never ended" in caplog.text
    stream.running.set()
    pair.settle()
    assert pair.a._tidy()


def test_a_copy_out_of_the_peers_memory_that_never_ends(
    pair: Pair, jumping_clock: JumpingClock, caplog: pytest.LogCaptureFixture
) -> None:
    stream = pair.cuda_b.streams[pair.cuda_b.stream(0)]
    stream.running.clear()
    pair.send(bytes_of(3 * MIB))
    pair.b.close()
    eventually(lambda: len(pair.cuda_b.opened) == 1)
    jumping_clock.jump(100)
    eventually(janitor_is_idle)
    assert "device memory of worker 'a' stays open: a copy out of it never ended" in caplog.text
    stream.running.set()
    pair.settle()
    assert pair.b._tidy()


def test_closing_in_every_state(make: MakePair) -> None:
    """Closed by one end or the other, first, with messages in all states."""
    for first in "ab":
        fresh = make()
        getattr(fresh, first).close()
        offered = make()
        assert not put(offered.a, bytes_of(1), [])
        getattr(offered, first).close()
        heard = make()
        assert not put(heard.a, bytes_of(1), [])
        heard.b.heard(heard.a.to_say())
        getattr(heard, first).close()
        pair = make().negotiate()
        placed = [pair.put(bytes_of(size)) for size in (0, 10, 3 * MIB, 4 * MIB)]
        arrived = pair.deliver(*placed[1:])
        pair.take(arrived[0])
        getattr(pair, first).close()
        getattr(pair, first).close()
        if first == "a":
            with pytest.raises(ConnectionClosedError):
                pair.put(bytes_of(1))
            pair.a.take_back([placed[0]])
            result = pair.take(arrived[1])  # the memory stays until the other end has closed it
            pair.settle()
            assert torch.equal(result, bytes_of(3 * MIB))
        del arrived


def test_what_has_arrived_can_be_taken_after_the_end(
    pair: Pair, jumping_clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_mappings, "_UNTAKEN", 50.0)
    monkeypatch.setattr(device, "_PATIENCE", 100.0)
    arrived = pair.deliver(*[pair.put(bytes_of(3 * MIB, number)) for number in range(3)])
    pair.settle()
    pair.a.close()
    pair.b.close()
    time.sleep(0.05)  # the janitor has looked
    result = arrived[0].take(GPU, None, lambda: False)
    pair.settle()
    assert torch.equal(result, bytes_of(3 * MIB))
    pair.cuda_b.fail["open_memory"] = [CudaError("CUDA error: invalid resource handle", 400)]
    with pytest.raises(ConnectionClosedError):
        pair.take(arrived[1])
    jumping_clock.jump(51)
    eventually(janitor_is_idle)
    with pytest.raises(ConnectionClosedError):
        pair.take(arrived[2])


def test_a_lane_that_is_closed_while_a_thread_waits(pair: Pair) -> None:
    pair.cuda.streams[pair.cuda.stream(0)].running.clear()
    (arrived,) = pair.deliver(pair.put(bytes_of(100)))
    taking = Thread(lambda: arrived.take(GPU, None, alive))
    taking.join(0.02)
    pair.b.close()
    with pytest.raises(ConnectionClosedError):
        taking.outcome()
    eventually(janitor_is_idle)
    assert pair.cuda_b.opened == {}
    pair.a.close()
    time.sleep(0.05)
    assert pair.cuda.allocated  # the peer has closed it, and our own copy into it is not done


def test_ctrl_c_while_it_waits(pair: Pair) -> None:
    pair.cuda.streams[pair.cuda.stream(0)].running.clear()
    placed = pair.put(bytes_of(100))
    (arrived,) = pair.deliver(placed)
    interrupts.install(pair)
    try:
        pressing = Thread(lambda: time.sleep(0.05) or os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            pair.take(arrived)
        pressing.outcome()
    finally:
        interrupts.uninstall(pair)
    assert pair.state(placed) == FREE


@pytest.mark.parametrize("method", ["is_done", "malloc", "event", "export_memory", "export_event"])
def test_a_failure_of_the_sender(pair: Pair, method: str) -> None:
    if method == "is_done":
        pair.a.take_back([pair.put(bytes_of(4 * MIB))])
        pair.settle()
    pair.cuda.fail[method] = [CudaError("CUDA error: an illegal memory access was encountered", 700)]
    with pytest.raises(EncodeError, match="a tensor on cuda:0 .*'b'.*CUDA error: an illegal memory access"):
        put(pair.a, bytes_of(4 * MIB), [])
    result = pair.send(bytes_of(4 * MIB))
    pair.settle()
    assert torch.equal(result, bytes_of(4 * MIB))
    assert pair.a.statistics().segment_bytes <= SLAB + 8 * MIB


@pytest.mark.parametrize("method", ["copy", "record"])
def test_a_failure_of_the_sender_after_its_message(pair: Pair, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """The receiver knows of the tensor by then, and hears that it does not come; and so does the log."""
    pair.cuda.fail[method] = [CudaError("CUDA error: an illegal memory access was encountered", 700)]
    placed = pair.put(bytes_of(4 * MIB))
    (arrived,) = pair.deliver(placed)
    with pytest.raises(DecodeError, match="worker 'a' could not copy its tensor from cuda:0.*its log"):
        pair.take(arrived)
    eventually(lambda: bool(caplog.records))
    assert [record.getMessage() for record in caplog.records] == [
        "a tensor on cuda:0 did not get to worker 'b': CUDA error: an illegal memory access was encountered"
    ]
    assert pair.a.statistics().puts == 0
    assert pair.put(bytes_of(4 * MIB, 1)).place != placed.place  # the copy may run, and nothing says when it ends
    result = pair.send(bytes_of(4 * MIB))
    pair.settle()
    assert torch.equal(result, bytes_of(4 * MIB))


@pytest.mark.parametrize("method", ["copy", "record"])
def test_an_interrupt_between_a_message_and_its_copies(pair: Pair, method: str) -> None:
    """A handler of a signal's may raise anywhere. The peer must not wait for what does not come."""
    placed: list[Placed] = []
    for number in range(3):
        assert pair.a.reserve(bytes_of(100, number), placed)
    pair.a.fill(placed[:1])
    pair.cuda.fail[method] = [SystemExit(1)]
    with pytest.raises(SystemExit):
        pair.a.fill(placed[1:])
    arrived = pair.deliver(*placed)
    first = pair.take(arrived[0])
    for one in arrived[1:]:
        with pytest.raises(DecodeError, match="worker 'a' could not copy its tensor"):
            pair.take(one)
    pair.settle()
    assert torch.equal(first, bytes_of(100))
    again = [pair.put(bytes_of(100)).place for _ in range(3)]
    assert placed[0].place in again and placed[1].place not in again and placed[2].place in again


def test_a_capture_that_began_since_the_place_was_reserved(pair: Pair) -> None:
    placed: list[Placed] = []
    assert pair.a.reserve(bytes_of(100), placed)
    pair.cuda.capturing = True
    pair.a.fill(placed)
    pair.cuda.capturing = False
    with pytest.raises(DecodeError, match="worker 'a' could not copy its tensor"):
        pair.take(pair.deliver(*placed)[0])
    result = pair.send(bytes_of(100, 1))
    pair.settle()
    assert torch.equal(result, bytes_of(100, 1))


def test_a_message_may_arrive_before_its_tensors_are_copied(pair: Pair) -> None:
    """It is written first. What is in its places from other messages must not be taken for them."""
    tensors = [bytes_of(100, 1), bytes_of(3 * MIB, 2)]
    for tensor in tensors:
        pair.send(tensor)
    pair.settle()
    for round in range(3):
        for tensor in tensors:
            tensor += 1
        placed: list[Placed] = []
        assert all(pair.a.reserve(tensor, placed) for tensor in tensors)
        arrived = pair.deliver(*placed)
        taking = Thread(lambda arrived=arrived: [pair.take(one) for one in arrived])
        taking.join(0.03)
        assert taking.is_alive()
        if round == 1:
            stream = pair.cuda.streams[pair.cuda.stream(0)]
            stream.running.clear()
        pair.a.fill(placed)
        if round == 1:
            taking.join(0.03)
            assert taking.is_alive()  # they are queued, and not done
            stream.running.set()
        results = taking.outcome()
        pair.settle()
        assert all(torch.equal(result, tensor) for result, tensor in zip(results, tensors, strict=True))


@pytest.mark.parametrize("how", ["dropped", "late", "out of memory"])
def test_a_place_that_comes_back_before_it_is_filled(pair: Pair, how: str) -> None:
    placed: list[Placed] = []
    assert pair.a.reserve(bytes_of(3 * MIB, 1), placed)
    (arrived,) = pair.deliver(*placed)
    if how == "late":
        with pytest.raises(TimeoutError, match="worker 'a' did not finish copying"):
            pair.take(arrived, 0.01)
    elif how == "out of memory":
        pair.cuda_b.fail["empty"] = [torch.OutOfMemoryError("CUDA out of memory")]
        with pytest.raises(DecodeError, match="no memory"):
            pair.take(arrived)
    del arrived
    assert pair.state(placed[0]) == FREE
    other = pair.put(bytes_of(3 * MIB, 2))
    assert other.place != placed[0].place  # it is still to be filled
    pair.a.fill(placed)
    pair.settle()
    assert pair.put(bytes_of(3 * MIB, 3)).place == placed[0].place


def test_the_connection_ends_between_a_message_and_its_copy(pair: Pair) -> None:
    placed: list[Placed] = []
    assert pair.a.reserve(bytes_of(3 * MIB), placed)
    (arrived,) = pair.deliver(*placed)
    taking = Thread(lambda: pair.take(arrived))
    pair.a.close()
    pair.b.close()
    with pytest.raises(ConnectionClosedError, match="worker 'a'"):
        taking.outcome()
    time.sleep(0.05)
    assert pair.a.statistics().segment_bytes  # it is about to be filled: its memory is there
    pair.a.fill(placed)


def test_a_sticky_error_of_the_sender(pair: Pair) -> None:
    (arrived,) = pair.deliver(pair.put(bytes_of(100)))
    pair.settle()
    pair.cuda.sticky = "an illegal memory access was encountered"
    for _ in range(3):
        with pytest.raises(EncodeError, match="illegal memory access"):
            pair.put(bytes_of(10))
    assert pair.take(arrived).nbytes == 100
    assert pair.a.to_say() == ()


def test_after_a_sticky_error_memory_is_not_given_back_and_that_is_said_once(
    pair: Pair, jumping_clock: JumpingClock, caplog: pytest.LogCaptureFixture
) -> None:
    pair.cuda.sticky = "an illegal memory access was encountered"
    jumping_clock.jump(IDLE + 1)
    for _ in range(3):
        pair.a.tick()
        eventually(janitor_is_idle)
    assert [record.getMessage() for record in caplog.records] == [
        "device memory that worker 'b' shares is not given back: CUDA error: an illegal memory access was encountered"
    ]


@pytest.mark.parametrize("method", ["open_memory", "open_event", "is_done", "empty", "copy", "record"])
def test_a_failure_of_the_receiver(pair: Pair, method: str) -> None:
    placed = pair.put(bytes_of(4 * MIB))
    (arrived,) = pair.deliver(placed)
    error: Exception = CudaError("CUDA error: an illegal memory access was encountered", 700)
    if method == "empty":
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB")
    pair.cuda_b.fail[method] = [error]
    with pytest.raises(DecodeError, match="worker 'a'") as caught:
        pair.take(arrived)
    assert str(error) in str(caught.value) and "cuda:0" in str(caught.value)
    # A copy that may still run keeps its place.
    assert (pair.state(placed) == FREE) == (method not in ("copy", "record"))
    result = pair.send(bytes_of(4 * MIB, 1))
    pair.settle()
    assert torch.equal(result, bytes_of(4 * MIB, 1))


def test_capture_is_an_error_that_says_so(pair: Pair) -> None:
    (arrived,) = pair.deliver(pair.put(bytes_of(100)))
    pair.cuda.capturing = pair.cuda_b.capturing = True
    with pytest.raises(EncodeError, match="while a CUDA graph is captured"):
        put(pair.a, bytes_of(10), [])
    with pytest.raises(DecodeError, match="while a CUDA graph is captured"):
        pair.take(arrived)
    pair.cuda.capturing = pair.cuda_b.capturing = False
    pair.send(bytes_of(10))


def test_capture_before_anything_was_offered(make: MakePair) -> None:
    pair = make()
    pair.cuda.capturing = True
    with pytest.raises(EncodeError, match="while a CUDA graph is captured"):
        put(pair.a, bytes_of(10), [])
    assert pair.a.to_say() == ()
    pair.cuda.capturing = False
    pair.negotiate().send(bytes_of(10))


def test_a_tensor_is_taken_once(pair: Pair) -> None:
    (arrived,) = pair.deliver(pair.put(bytes_of(100)))
    pair.take(arrived)
    with pytest.raises(DecodeError, match="taken already"):
        pair.take(arrived)


# -- negotiation ------------------------------------------------------------------------------------------


def refused(pair: Pair, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    for _ in range(3):
        assert not put(pair.a, bytes_of(10), [])
    eventually(janitor_is_idle)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert caplog.records[0].threadName == "telegrad device memory", "the thread that hears of it may be reading"
    assert warnings[0].startswith("tensors on cuda:0 go to worker 'b' through host memory")
    assert reason in warnings[0]
    assert pair.cuda.allocated == pair.cuda_b.opened == {}
    assert pair.a.to_say() == pair.b.to_say() == ()


def test_refused_since_the_gpu_is_not_visible(make: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    refused(make(at_b=("GPU-7",)).negotiate(), caplog, "the GPU GPU-0 is not visible to the worker")


@pytest.mark.parametrize("method", ["open_memory", "open_event", "is_done", "read"])
def test_refused_since_cuda_says_no(make: MakePair, caplog: pytest.LogCaptureFixture, method: str) -> None:
    pair = make()
    pair.cuda_b.fail[method] = [CudaError("CUDA error: invalid device context", 201)]
    refused(pair.negotiate(), caplog, "invalid device context")


def test_refused_since_there_is_no_library(make: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    pair = make()
    pair.cuda_b.unavailable = "torch has loaded no libcudart"
    refused(pair.negotiate(), caplog, "no libcudart")


def test_not_offered_since_there_is_no_library_here(make: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    pair = make()
    pair.cuda.unavailable = "torch has loaded no libcudart"
    refused(pair.negotiate(), caplog, "no libcudart")


@pytest.mark.parametrize("method", ["malloc", "export_memory", "event", "write", "record"])
def test_not_offered_since_cuda_fails_here(make: MakePair, caplog: pytest.LogCaptureFixture, method: str) -> None:
    pair = make()
    pair.cuda.fail[method] = [CudaError("CUDA error: operation not supported", 801)]
    refused(pair.negotiate(), caplog, "operation not supported")


def test_refused_since_the_memory_shows_something_else(make: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    pair = make()
    assert not put(pair.a, bytes_of(1), [])
    pair.settle()
    (offer,) = pair.a.to_say()
    pair.b.heard([msgspec.structs.replace(offer, magic=bytes(32))])
    pair.a.heard(pair.b.to_say())
    refused(pair, caplog, "the opened memory shows something else")


def test_refused_since_the_copy_is_not_done_after_a_while(make: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    pair = make()
    stream = pair.cuda.streams[pair.cuda.side_stream(0)]
    stream.running.clear()
    Thread(lambda: time.sleep(1.0) or stream.running.set())
    refused(pair.negotiate(), caplog, "is not done after a while")


@pytest.mark.parametrize("change", ["process", "descriptor", "token", "kind", "place", "device"])
def test_refused_since_the_offer_cannot_be_followed(
    make: MakePair, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    pair = make()
    assert not put(pair.a, bytes_of(1), [])
    pair.settle()
    (offer,) = pair.a.to_say()
    reading, writing = os.pipe()
    reason = "No such file"
    if change == "process":
        pair.b._peer_pid = 0
    elif change == "descriptor":
        offer = msgspec.structs.replace(offer, board=1 << 20)
    elif change == "token":
        offer, reason = msgspec.structs.replace(offer, token=bytes(16)), "is another board"
    elif change == "kind":
        offer, reason = msgspec.structs.replace(offer, board=reading), "is no board"
    elif change == "place":
        placed = msgspec.structs.replace(offer.placed, place=PLACES_END)
        offer, reason = msgspec.structs.replace(offer, placed=placed), "makes no sense"
    elif change == "device":
        placed = msgspec.structs.replace(offer.placed, fresh=None)
        offer, reason = msgspec.structs.replace(offer, placed=placed), "makes no sense"
    pair.b.heard([offer])
    pair.a.heard(pair.b.to_say())
    os.close(reading)
    os.close(writing)
    refused(pair, caplog, reason)


def test_an_offer_waits_until_the_peer_uses_cuda(make: MakePair) -> None:
    pair = make()
    pair.cuda_b.ready = False
    assert not put(pair.a, bytes_of(1), [])
    pair.b.heard(over_the_wire([], pair.a).lane)
    pair.settle()
    assert pair.b.to_say() == ()
    assert pair.cuda_b.calls.total() == 0  # it pays nothing
    pair.cuda_b.ready = True
    pair.a.heard(pair.b.to_say())
    pair.send(bytes_of(10))


def test_an_offer_for_which_there_is_no_memory_is_made_later(make: MakePair, jumping_clock: JumpingClock) -> None:
    pair = make()
    pair.cuda.memory_limit = 0
    for _ in range(3):
        assert not put(pair.a, bytes_of(1), [])
    assert pair.a.to_say() == ()
    pair.cuda.memory_limit = 1 << 30
    jumping_clock.jump(2)
    pair.negotiate().send(bytes_of(10))


def test_what_was_not_said_is_said_again(make: MakePair) -> None:
    pair = make()
    assert not put(pair.a, bytes_of(1), [])
    said = pair.a.to_say()
    assert len(said) == 1
    pair.a.take_back([], said)
    pair.settle()
    pair.b.heard(pair.a.to_say())
    pair.a.heard(pair.b.to_say())
    pair.send(bytes_of(10))


# -- what a peer may send ---------------------------------------------------------------------------------


def test_places_that_make_no_sense(pair: Pair) -> None:
    placed = pair.put(bytes_of(100))
    fresh = placed.fresh or pair.put(bytes_of(3 * MIB)).fresh
    assert fresh is not None
    bad = {
        "never introduced": Placed(PLACES_END - 1, 10),
        "too long": msgspec.structs.replace(placed, nbytes=SLOT + 1),
        "negative": msgspec.structs.replace(placed, nbytes=-1),
        "no place": Placed(3, 10, fresh),
        "over the end": Placed(PLACES_END - 1, 10, msgspec.structs.replace(fresh, offset=fresh.size)),
        "before the beginning": Placed(PLACES_END - 1, 10, msgspec.structs.replace(fresh, offset=-1)),
        "no room": Placed(PLACES_END - 1, 0, msgspec.structs.replace(fresh, capacity=0)),
        "huge": Placed(PLACES_END - 1, 10, msgspec.structs.replace(fresh, size=1 << 60)),
        "short handle": Placed(PLACES_END - 1, 10, msgspec.structs.replace(fresh, memory=b"x")),
        "short event": Placed(PLACES_END - 1, 10, msgspec.structs.replace(fresh, event=b"x")),
        "other device": Placed(PLACES_END - 1, 10, msgspec.structs.replace(fresh, device=1)),
    }
    pair.a._places.board.bytes[PLACES_END - 1] = NAMED
    for what, one in bad.items():
        with pytest.raises(ProtocolError):
            pair.b.arrived([one])
            pytest.fail(what)
    arrived = pair.deliver(placed)
    with pytest.raises(ProtocolError, match="in use"):
        pair.deliver(msgspec.structs.replace(placed, fresh=None))
    with pytest.raises(ProtocolError, match="makes no sense"):
        pair.b.arrived([msgspec.structs.replace(placed, fresh=fresh)])
    assert pair.take(arrived[0]).nbytes == 100


def test_twice_in_one_message(pair: Pair) -> None:
    placed = pair.put(bytes_of(100))
    with pytest.raises(ProtocolError, match="in use"):
        pair.b.arrived([placed, msgspec.structs.replace(placed, fresh=None)])


def test_messages_before_an_offer(make: MakePair) -> None:
    pair = make()
    with pytest.raises(ProtocolError, match="no offer was accepted"):
        pair.b.arrived([Placed(64, 10)])
    with pytest.raises(ProtocolError, match="which was not made"):
        pair.a.heard([Answer(0)])


def test_offers_and_answers_twice(make: MakePair) -> None:
    pair = make()
    assert not put(pair.a, bytes_of(1), [])
    pair.settle()
    (offer,) = pair.a.to_say()
    pair.b.heard([offer])
    with pytest.raises(ProtocolError, match="offered before"):
        pair.b.heard([offer])
    with pytest.raises(ProtocolError, match="cannot be"):
        pair.b.heard([msgspec.structs.replace(offer, device=1 << 20)])
    (answer,) = pair.b.to_say()
    pair.a.heard([answer])
    with pytest.raises(ProtocolError, match="which was not made"):
        pair.a.heard([answer])
    pair.send(bytes_of(10))


# -- processes --------------------------------------------------------------------------------------------


def in_a_fork(check: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_janitor_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read give it jobs, and Thread.start() waits until the thread has begun."""
    done, go_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        assert go_on.wait(PATIENCE)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    janitor = device_board.janitor
    janitor.submit(lambda: done.set() is None)
    assert not done.is_set()
    go_on.set()
    assert done.wait(PATIENCE)
    eventually(janitor_is_idle)


def test_the_janitor_tries_again_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    done, tried = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        tried.set()
        raise RuntimeError("can't start new thread")

    janitor = device_board.janitor
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        janitor.submit(lambda: done.set() is None)
        assert tried.wait(PATIENCE)
        eventually(lambda: janitor._thread is None)
    with monkeypatch.context() as patch:
        patch.setattr(device_board, "start_new_thread", fail)
        janitor.submit(alive)
        assert janitor._thread is None
    janitor.submit(lambda: True)
    assert done.wait(PATIENCE)
    eventually(janitor_is_idle)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_touches_nothing(pair: Pair) -> None:
    taken, kept = pair.put(bytes_of(100)), pair.put(bytes_of(3 * MIB))
    arrived = pair.deliver(taken, kept)
    calls = pair.cuda.calls.total(), pair.cuda_b.calls.total()

    def check() -> None:
        with pytest.raises(ConnectionClosedError):
            pair.take(arrived[0])
        arrived.clear()
        with pytest.raises(ConnectionClosedError):
            pair.put(bytes_of(10))
        for lane in (pair.a, pair.b):
            lane.take_back([kept])
            lane.tick()
            assert lane.to_say() == ()
            lane.statistics()
            lane.close()
        assert janitor_is_idle()
        assert (pair.cuda.calls.total(), pair.cuda_b.calls.total()) == calls

    in_a_fork(check)
    assert [pair.state(one) for one in (taken, kept)] == [ARRIVED, ARRIVED]
    results = [pair.take(one) for one in arrived]
    pair.settle()
    assert torch.equal(results[0], bytes_of(100)) and torch.equal(results[1], bytes_of(3 * MIB))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_board_of_another_process() -> None:
    board = Board.make()
    number, token = board.fd, board.token

    def check() -> None:
        theirs = Board.open(os.getppid(), number, token)
        assert theirs.bytes[100] == NAMED
        theirs.bytes[100] = READ

    board.bytes[100] = NAMED
    in_a_fork(check)
    assert board.bytes[100] == READ
    board.close()
    with pytest.raises(FileNotFoundError):
        Board.open(os.getpid(), number, token)


def test_a_process_without_cuda_pays_nothing() -> None:
    cuda = Cuda()
    assert cuda.is_ready() == torch.cuda.is_initialized()
    if torch.version.cuda is None:
        with pytest.raises(CudaError, match="torch was built without CUDA"):
            cuda.load()
