"""Clocks that disagree are brought together, and no message goes back in time."""

from __future__ import annotations

import random

import pytest

from telegrad.profiler.clocks import Clock, Exchange, clock_of, exchange, settle
from telegrad.profiler.spans import End, Message


def test_the_middle_of_the_quickest_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    # There it is 100 s later. The answers take 4, 1 and 3 s; only the second takes as long there as back.
    times = iter([0.0, 4.0, 10.0, 11.0, 20.0, 23.0])
    answers = iter([101.0, 110.5, 122.9])
    monkeypatch.setattr("telegrad.profiler.clocks.time.perf_counter", lambda: next(times))
    assert exchange(lambda: next(answers), times=3) == Exchange(10.5, 100.0, 0.5)


def test_a_clock_that_goes_too_fast() -> None:
    """50 microseconds in each second, over ten minutes: 30 ms."""
    drift, offset = 50e-6, 1234.5

    def there(here: float) -> float:
        return here + offset + drift * here

    exchanges = [Exchange(at, there(at) - at, 20e-6) for at in (0.0, 600.0)]
    clock = clock_of(exchanges)
    for here in (0.0, 17.0, 300.0, 600.0, 700.0):
        assert clock.to_root(there(here)) == pytest.approx(here, abs=1e-6)
    assert clock_of([]) == Clock()
    # Within what the exchanges can be wrong by there is no drift to be seen.
    steady = clock_of([Exchange(0.0, 5.0, 30e-6), Exchange(9.0, 5.00001, 10e-6)])
    assert (steady.drift, steady.offset) == (0.0, 5.00001)


def messages_between(offsets: dict[str, float], count: int, seed: int) -> list[Message]:
    """Messages as clocks with these offsets see them: each takes 20 to 100 microseconds."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        sender, reader = chance.sample(sorted(offsets), 2)
        sent = chance.uniform(0, 1)
        read = sent + chance.uniform(20e-6, 100e-6)
        ends = End(sender, 1, sent + offsets[sender], 10), End(reader, 1, read + offsets[reader], 10)
        found.append(Message(number, "call", 0, *ends))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_message_goes_back_in_time(seed: int) -> None:
    chance = random.Random(seed)
    offsets = {"root": 0.0, **{name: chance.uniform(-5, 5) for name in "abcd"}}
    messages = messages_between(offsets, 300, seed)
    # The exchanges are wrong by up to 150 microseconds, which is more than a message takes.
    clocks = {
        name: Clock(offset + (chance.uniform(-150e-6, 150e-6) if name != "root" else 0.0), 150e-6)
        for name, offset in offsets.items()
    }
    assert any(clocks[m.sent.worker].to_root(m.sent.at) > clocks[m.read.worker].to_root(m.read.at) for m in messages)
    assert settle(clocks, messages, "root") == []
    assert clocks["root"].moved == 0.0
    for message in messages:
        sent = clocks[message.sent.worker].to_root(message.sent.at)
        assert sent <= clocks[message.read.worker].to_root(message.read.at) + 1e-9
    for clock in clocks.values():
        assert abs(clock.moved) <= 300e-6


def test_clocks_that_agree_are_left_alone() -> None:
    offsets = {"root": 0.0, "a": 3.0}
    clocks = {name: Clock(offset, 1e-6) for name, offset in offsets.items()}
    assert settle(clocks, messages_between(offsets, 50, 1), "root") == []
    assert clocks["a"].moved == 0.0


def test_what_cannot_be_is_said() -> None:
    """Each of two messages would have arrived before it was sent, whichever way the clocks are moved."""
    clocks = {"root": Clock(), "a": Clock()}
    there = Message(1, "call", 0, End("root", 1, 1.0, 1), End("a", 1, 0.9, 1))
    back = Message(2, "reply", 1, End("a", 1, 1.0, 1), End("root", 1, 0.95, 1))
    assert settle(clocks, [there, back], "root")
