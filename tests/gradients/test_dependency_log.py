"""The log: which sent tensor depends on which others, and what each connection has carried of it."""

from __future__ import annotations

import random

import pytest

from telegrad.errors import GradientError
from telegrad.gradients.dependency_log import Log, MissingEntryError, flatten_groups, useful
from telegrad.messages import LogEntry

CONTEXT, OTHER = 1000, 2000


def entry(id: int, *depends_on: int, context: int = CONTEXT) -> LogEntry:
    return LogEntry(id, context, depends_on)


#      1 ◀── 2 ◀── 4 ◀── 6        7 (nothing)
#       ▲         /
#        ╰── 3 ◀─╯
CHAIN = [entry(1), entry(2, 1), entry(3, 1), entry(4, 2, 3), entry(6, 4), entry(7)]


def new_log() -> Log:
    return Log(lambda context: True)


@pytest.fixture
def log() -> Log:
    log = new_log()
    log.merge(CHAIN, None)
    return log


def ids(entries) -> list[int]:
    return sorted(e.id for e in entries)


# -- closure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ([], []),
        ([1], [1]),
        ([3], [1, 3]),
        ([6], [1, 2, 3, 4, 6]),
        ([2, 7], [1, 2, 7]),
        ([4, 4], [1, 2, 3, 4]),
    ],
)
def test_the_closure_is_all_that_is_upstream(log, of, expected):
    found = log.closure(of)
    assert sorted(found) == expected
    assert all(found[id].id == id for id in found)


def test_the_closure_of_something_unknown_names_it(log):
    log.merge([entry(8, 5, 7)])
    with pytest.raises(MissingEntryError) as caught:
        log.closure([8])
    assert caught.value.id == 5


def test_the_closure_goes_through_groups(log):
    log.merge([entry(-1, 2, 7)])
    log.merge([entry(9, -1)])
    assert sorted(log.closure([9])) == [-1, 1, 2, 7, 9]


def test_a_closure_is_as_deep_as_it_is():
    log = new_log()
    log.merge([entry(n, *([n - 1] if n > 1 else [])) for n in range(1, 50_001)], None)
    assert len(log.closure([50_000])) == 50_000


# -- what a connection carries -----------------------------------------------------------------------------


def test_a_connection_carries_each_entry_once(log):
    assert ids(log.entries_for("wire", [4])) == [1, 2, 3, 4]
    log.written("wire", log.entries_for("wire", [4]))
    assert log.entries_for("wire", [4]) == []
    assert ids(log.entries_for("wire", [6, 7])) == [6, 7]


def test_entries_count_as_carried_only_when_they_were_written(log):
    first, second = log.entries_for("wire", [2]), log.entries_for("wire", [3])
    assert ids(first) == [1, 2]
    assert ids(second) == [1, 3]  # it may overtake the first
    log.written("wire", second)
    assert ids(log.entries_for("wire", [2])) == [2]


def test_connections_know_nothing_of_each_other(log):
    log.written("wire", log.entries_for("wire", [6]))
    assert ids(log.entries_for("after a reconnect", [6])) == [1, 2, 3, 4, 6]


def test_what_a_connection_has_brought_does_not_go_back_on_it():
    log = new_log()
    log.merge(CHAIN[:2], "wire")
    log.merge([entry(10, 2)], None)
    assert ids(log.entries_for("wire", [10])) == [10]
    assert ids(log.entries_for("another wire", [10])) == [1, 2, 10]


def test_an_entry_that_comes_over_two_connections_is_known_by_both():
    log = new_log()
    log.merge([entry(1)], "one")
    log.merge([entry(1)], "two")
    assert len(log) == 1
    assert log.entries_for("one", [1]) == log.entries_for("two", [1]) == []
    assert ids(log.entries_for("three", [1])) == [1]


def test_the_walk_ends_at_what_is_known_there(log):
    # A worker that has 4 has all that is upstream of it: 1, 2 and 3 are not looked at.
    log.written("wire", [CHAIN[3]])
    assert ids(log.entries_for("wire", [6])) == [6]
    # But 3 by itself was not said to be known.
    assert ids(log.entries_for("wire", [3])) == [1, 3]


def test_entries_of_a_context_that_has_ended_are_left_out(log):
    log.merge([entry(20, context=OTHER), entry(21, 20, 2)], None)
    log.release(OTHER)
    assert ids(log.entries_for("wire", [21])) == [1, 2, 21]
    log.written("wire", [entry(20, context=OTHER)])  # which was released while it was on its way
    assert 20 not in log


def test_groups_travel_with_what_names_them(log):
    log.merge([entry(-5, 2, 3), entry(30, -5)], None)
    assert ids(log.entries_for("wire", [30])) == [-5, 1, 2, 3, 30]


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_holds_a_tensor_holds_everything_behind_it(seed):
    """Workers that send each other random tensors: no worker ever misses an entry."""
    rng = random.Random(seed)
    logs = [new_log() for _ in range(4)]
    holds: list[list[int]] = [[] for _ in logs]
    truth: dict[int, set[int]] = {}  # what is behind each tensor, itself included
    for id in range(1, 200):
        source, target = rng.sample(range(4), 2)
        depends_on = rng.sample(holds[source], min(len(holds[source]), rng.randrange(4)))
        wire = frozenset((source, target))
        own = entry(id, *depends_on)
        logs[source].merge([own], None)
        carried = logs[source].entries_for(wire, depends_on)
        if rng.random() < 0.1:
            continue  # it was not written
        logs[source].written(wire, [own, *carried])
        logs[target].merge([own, *carried], wire)
        holds[target].append(id)
        truth[id] = {id}.union(*(truth[d] for d in depends_on))
        for log, held in zip(logs, holds, strict=True):
            for tensor in held[-3:]:
                assert log.closure([tensor]).keys() == truth[tensor]


# -- the end of a context ----------------------------------------------------------------------------------


def test_entries_live_as_long_as_their_context(log):
    log.merge([entry(20, 6, context=OTHER)])
    assert len(log) == 7
    log.release(CONTEXT)
    assert len(log) == 1 and 20 in log and 6 not in log._entries
    with pytest.raises(MissingEntryError):
        log.closure([20])
    log.release(OTHER)
    assert len(log) == 0
    log.release(OTHER)  # any number of times
    log.release(3000)  # also one that was never heard of


def test_what_comes_after_the_end_of_its_context_is_not_taken():
    live = {CONTEXT, OTHER}
    log = Log(live.__contains__)
    log.merge([entry(1)])
    live.remove(CONTEXT)
    log.release(CONTEXT)
    log.merge([entry(2, 1), entry(20, context=OTHER)], "wire")
    log.merge([entry(3)])
    assert len(log) == 1 and 20 in log


# -- what leads to a source --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({1}, {1, 2, 3, 4, 6}),
        ({2}, {2, 4, 6}),
        ({7}, {7}),
        ({6}, {6}),
        (set(), set()),
        ({3, 7}, {3, 4, 6, 7}),
    ],
)
def test_useful_is_what_leads_to_a_source(log, sources, expected):
    assert useful(log.closure([6, 7]), sources.__contains__) == expected


def test_groups_are_no_sources_but_lead_to_them():
    entries = {e.id: e for e in (entry(1), entry(2), entry(-1, 1, 2), entry(3, -1), entry(4, 2))}
    asked = []

    def is_source(id: int) -> bool:
        asked.append(id)
        return id == 1

    assert useful(entries, is_source) == {1, -1, 3}
    assert sorted(asked) == [1, 2, 3, 4]  # each once, and never a group


def test_useful_is_as_deep_as_it_is():
    entries = {n: entry(n, *([n - 1] if n > 1 else [])) for n in range(1, 20_001)}
    assert len(useful(entries, lambda id: id == 1)) == 20_000
    assert useful(dict(reversed(entries.items())), lambda id: id == 20_000) == {20_000}


@pytest.mark.parametrize("seed", range(5))
def test_useful_against_brute_force(seed):
    rng = random.Random(seed)
    entries = {}
    for n in range(1, 60):
        id = -n if rng.random() < 0.2 else n
        entries[id] = entry(id, *rng.sample(sorted(entries), min(len(entries), rng.randrange(4))))
    sources = {id for id in entries if id > 0 and rng.random() < 0.1}
    log = new_log()
    log.merge(entries.values(), None)
    expected = {id for id in entries if sources & log.closure([id]).keys()}
    assert useful(entries, sources.__contains__) == expected


def test_groups_are_flattened():
    entries = {e.id: e for e in (entry(-1, 1, 2), entry(-2, -1, 3), entry(-3, -2, -1, 4), entry(1, -2))}
    assert flatten_groups([-3, 9], entries) == {1, 2, 3, 4, 9}  # through groups, not through tensors
    assert flatten_groups([1], entries) == {1}
    assert flatten_groups([], entries) == set()


def test_useful_refuses_a_history_in_a_circle():
    """What other workers tell is not believed to end."""
    entries = {1: entry(1, 3), 2: entry(2, 1), 3: entry(3, 2)}
    with pytest.raises(GradientError, match="goes in a circle"):
        useful(entries, lambda id: False)
