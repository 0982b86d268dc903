"""Segments: used again, given back, limited, and never changed under a holder's feet."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from telegrad.errors import ConnectionClosedError, ProtocolError
from telegrad.transport import shared_memory as shm
from telegrad.transport.shared_memory import (
    FILLED,
    FREE,
    LARGE,
    LENT,
    MAX_LENT,
    PAGE,
    Mappings,
    Memory,
    Segment,
    SegmentPool,
    aligned,
    capacity_for,
)

KIB, MIB = 1 << 10, 1 << 20


def passed_on(segment: Segment, mappings: Mappings, nbytes: int = 10) -> memoryview:
    """The segment at the receiver."""
    if not segment.passed_on:
        segment.passed_on = True
        mappings.adopt(segment.id, segment.capacity, os.dup(segment.fd))
        segment.close()
    return mappings.lend(segment.id, segment.capacity, nbytes)


def test_sizes():
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert [capacity_for(n) for n in (0, 1, 64 * KIB, 64 * KIB + 1, MIB)] == [
        64 * KIB, 64 * KIB, 64 * KIB, 128 * KIB, MIB
    ]  # fmt: skip


def test_a_segment_is_used_again_when_its_holder_lets_go():
    pool, mappings = SegmentPool(MIB, shared=True), Mappings()
    first = pool.take(100_000)
    first.view()[:5] = b"hello"
    held = passed_on(first, mappings)
    assert first.state == LENT
    assert bytes(held[:5]) == b"hello"
    tensor = torch.frombuffer(held[:8], dtype=torch.uint8)
    del held
    gc.collect()
    second = pool.take(100_000)
    assert second is not first  # a tensor lies on it
    del tensor
    assert first.state == FREE
    assert pool.take(90_000) is first
    pool.close()


def test_the_segment_used_last_is_taken_first():
    pool = SegmentPool(MIB, shared=False)
    segments = [pool.take(10) for _ in range(3)]
    for segment in segments:
        segment.mark(FREE)
    assert pool.take(10) is segments[2]
    segments[2].mark(FREE)
    segments[1].mark(FILLED)
    assert pool.take(10) is segments[2]
    assert pool.take(10) is segments[0]


def test_it_comes_back_from_any_thread():
    pool = SegmentPool(MIB, shared=False)
    held = [pool.lend(10)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.sizes() == (64 * KIB, 64 * KIB)


def test_at_most_so_many_bytes_are_kept_the_ones_used_last():
    pool = SegmentPool(MIB, shared=True)
    large = pool.take(4 * MIB)
    small = [pool.take(64 * KIB) for _ in range(20)]
    for segment in (large, *small):
        segment.mark(FREE)
    pool.tick()
    assert pool.sizes() == (MIB, MIB)
    assert pool.take(64 * KIB) is small[-1]
    assert not pool.dropped  # the peer never had any of them
    pool.close()


def test_a_new_segment_makes_room_for_itself():
    pool = SegmentPool(MIB, shared=True)
    pool.take(4 * MIB).mark(FREE)
    pool.take(64 * KIB)
    assert pool.sizes() == (64 * KIB, 0)
    pool.close()


def test_what_is_not_used_for_a_while_goes_back():
    pool, mappings = SegmentPool(MIB, shared=True), Mappings()
    held = passed_on(pool.take(10), mappings)
    pool.tick(idle=0)
    assert pool.sizes() == (64 * KIB, 0)
    del held
    pool.tick(idle=60)
    assert pool.sizes() == (64 * KIB, 64 * KIB)
    pool.tick(idle=0)
    assert pool.sizes() == (0, 0)
    assert pool.dropped
    assert pool.take_dropped() == [1]
    assert pool.take_dropped() == []
    mappings.forget([1, 99])
    with pytest.raises(ProtocolError, match="segment 1, which was never passed on"):
        mappings.lend(1, 64 * KIB, 10)


def test_a_closed_pool_gives_nothing_and_takes_nothing_away():
    pool = SegmentPool(MIB, shared=True)
    segment = pool.take(10)
    held = segment.lend()
    held[:5] = b"hello"
    pool.close()
    assert segment.fd == -1
    with pytest.raises(ConnectionClosedError):
        pool.take(10)
    with pytest.raises(ConnectionClosedError):
        pool.lend(10)
    assert bytes(held[:5]) == b"hello"
    del segment, pool
    held[:5] = b"still"
    assert bytes(held[:5]) == b"still"


def test_unread_bytes_are_counted_until_they_are_read():
    pool, mappings = SegmentPool(MIB, shared=True), Mappings()
    assert pool.has_room(10 * MIB, limit=MIB)  # alone a message always fits
    first = pool.take(700 * KIB)
    assert pool.has_room(300 * KIB, limit=MIB)
    assert not pool.has_room(400 * KIB, limit=MIB)
    held = passed_on(first, mappings)
    assert pool.has_room(MIB, limit=MIB)
    del held
    second = pool.take(700 * KIB)
    assert second is first
    assert not pool.has_room(400 * KIB, limit=MIB)
    second.mark(FREE)  # given back unsent
    assert pool.has_room(MIB, limit=MIB)
    pool.close()


def test_who_keeps_very_many_messages_gets_copies():
    pool, mappings = SegmentPool(64 * MIB, shared=True), Mappings()
    held = []
    for n in range(MAX_LENT + 10):
        segment = pool.take(10)
        segment.view()[:10] = b"%010d" % n
        held.append(passed_on(segment, mappings)[:10])
    assert pool.sizes() == ((MAX_LENT + 1) * 64 * KIB, 64 * KIB)  # the last one served all the copies
    assert [int(bytes(view)) for view in held] == list(range(MAX_LENT + 10))
    held[-1][:] = b"changed it"
    del held[0]
    segment = pool.take(10)
    view = passed_on(segment, mappings)
    assert segment.state == LENT  # there is room for one again
    del view
    pool.close()


def test_large_messages_are_not_copied_while_reading(monkeypatch):
    """All others wait meanwhile: a second for each 3 GB."""
    monkeypatch.setattr(shm, "MAX_LENT", 1)
    monkeypatch.setattr(shm, "MAX_LARGE_LENT", 3)
    pool, mappings = SegmentPool(64 * MIB, shared=True), Mappings()
    sizes = [LARGE, LARGE, LARGE - 1, LARGE, LARGE]
    segments = [pool.take(LARGE) for _ in sizes]
    held = [passed_on(segment, mappings, nbytes) for segment, nbytes in zip(segments, sizes, strict=True)]
    assert [segment.state for segment in segments] == [LENT, LENT, FREE, LENT, FREE]
    assert [len(view) for view in held[2::2]] == [LARGE - 1, LARGE]  # the copies
    del held[0]
    assert segments[0].state == FREE
    held.clear()
    pool.close()


def test_who_keeps_very_much_private_memory_gets_it_unpooled():
    pool = SegmentPool(64 * MIB, shared=False)
    held = [pool.lend(10) for _ in range(MAX_LENT + 10)]
    assert pool.sizes() == (MAX_LENT * 64 * KIB, 0)
    held.clear()
    assert pool.sizes() == (MAX_LENT * 64 * KIB, MAX_LENT * 64 * KIB)


def test_a_sealed_segment_keeps_its_size():
    segment = Segment(1, 64 * KIB, shared=True)
    for size in (0, 64 * KIB, 64 * KIB + 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    segment.close()
    segment.close()


def test_memory_that_the_system_does_not_have():
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Memory(1 << 60)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        SegmentPool(MIB, shared=False).lend(1 << 59)
    with pytest.raises(OSError, match="(File too large|Cannot allocate memory|Invalid argument)"):
        Segment(1, 1 << 62, shared=True)  # and its descriptor was closed


def test_pages_are_found_before_they_are_written_to(monkeypatch):
    asked = []
    monkeypatch.setattr(shm, "_madvise", lambda address, length, advice: asked.append(length) or 0)
    pool = SegmentPool(MIB, shared=True)
    for nbytes in (100_000, 90_000, 110_000):
        pool.take(nbytes).mark(FREE)
    assert asked == [100_000, 110_000 - 100_000 // PAGE * PAGE]
    pool.close()
