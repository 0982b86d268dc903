"""The state of a backward pass, with no threads and no processes: every order of every event.

The states are finite, so all sequences of events, however long, are tried by following each event from each
state that can be reached, until nothing new comes. What has happened so far (the `Seen`) is part of the state.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from telegrad.gradients.backward_pass import (
    ABORT,
    COMMIT,
    DROP,
    FINISH,
    REPORT,
    START,
    WAKE,
    BackwardPass,
    Failed,
    Late,
    Outcome,
    Part,
    ProtocolViolationError,
    State,
)

ROOT, A, B, STRANGER = 0, 1, 2, 9
FIRST, LAST, UNKNOWN = 10, 20, 30  # messages that a part has sent, in that order; and one that it has not


class CrashError(RuntimeError):
    """What went wrong somewhere."""


BROKEN = CrashError("broken")


# -- one worker's part, by hand ----------------------------------------------------------------------------


def test_a_part_from_begin_to_end():
    part = Part()
    assert part.on_begin({LAST, FIRST}) is None
    assert part.order == (FIRST, LAST)
    assert part.on_gradients(FIRST) is None  # the engine has nothing to do before the last Send has its own
    assert part.on_gradients(LAST) is START
    assert part.on_local_end() is REPORT
    assert part.on_end("") is COMMIT
    assert part.state is State.FINISHED and part.is_over


def test_the_engine_starts_with_the_last_send_and_is_woken_for_the_others():
    part = Part()
    part.on_begin([FIRST, LAST])
    assert part.on_gradients(LAST) is START
    assert part.on_gradients(FIRST) is WAKE


def test_gradients_that_come_before_the_begin_are_kept():
    part = Part()
    assert part.on_gradients(LAST) is None
    assert part.on_gradients(FIRST) is None
    assert part.state is State.EARLY
    assert part.on_begin([FIRST, LAST]) is START
    assert part.arrived == {FIRST, LAST}


def test_a_root_starts_at_once_and_so_does_a_part_with_nothing_to_wait_for():
    assert Part(is_root=True).on_begin([FIRST]) is START
    assert Part().on_begin([]) is START


@pytest.mark.parametrize("begun_first", [True, False])
def test_gradients_of_a_send_that_takes_no_part_are_refused(begun_first):
    part = Part()
    events = [lambda: part.on_begin([FIRST, LAST]), lambda: part.on_gradients(UNKNOWN)]
    for event in events if begun_first else reversed(events):
        outcome = event()
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, ProtocolViolationError)
    assert f"message {UNKNOWN}" in str(outcome.error)


def test_gradients_that_come_twice_are_refused():
    part = Part()
    part.on_begin([FIRST, LAST])
    part.on_gradients(FIRST)
    outcome = part.on_gradients(FIRST)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, ProtocolViolationError)
    assert f"message {FIRST} came twice" in str(outcome.error)


def test_gradients_that_come_twice_before_the_begin_are_refused():
    part = Part()
    part.on_gradients(FIRST)
    outcome = part.on_gradients(FIRST)
    assert isinstance(outcome, Failed)
    assert "came twice" in str(outcome.error)
    assert part.on_begin([FIRST]) is None
    assert part.state is State.REPORTED


def test_a_pass_that_is_begun_twice_fails():
    part = Part()
    part.on_begin([FIRST])
    assert isinstance(part.on_begin([FIRST]), Failed)
    assert part.state is State.REPORTED


def test_an_abort_before_the_begin_leaves_a_part_that_never_begins():
    part = Part()
    part.on_gradients(FIRST)
    assert part.on_end("the deadline") is DROP
    assert part.on_begin([FIRST]) == Late("the begin of a pass")
    assert part.on_gradients(LAST) == Late(f"the gradients of message {LAST}")


def test_the_end_of_a_pass_that_is_not_done_here_drops_what_it_has_gathered():
    part = Part()
    part.on_begin([FIRST])
    part.on_gradients(FIRST)
    assert part.on_end("") is DROP
    assert part.state is State.ABORTED
    assert part.on_local_end() is None  # the engine ends later, and nobody wants to hear of it


def test_a_part_that_has_failed_is_never_committed():
    part = Part()
    part.on_begin([10])
    part.on_gradients(10)
    part.on_local_end(ValueError("broken"))
    assert part.on_end("") is DROP
    assert part.state is State.ABORTED


def test_the_loss_of_a_worker_matters_until_the_report():
    lost = ConnectionError("gone")
    part = Part()
    part.on_begin([10])
    assert part.on_lost(lost) == Failed(lost)
    part = Part()
    part.on_begin([10])
    part.on_gradients(10)
    part.on_local_end()
    assert part.on_lost(lost) is None
    assert part.on_end("") is COMMIT


# -- one worker's part, every sequence ---------------------------------------------------------------------


@dataclass(frozen=True)
class SeenOfPart:
    """What a part was told and what it has answered so far."""

    begun: bool = False
    over: bool = False
    failed: str = ""  # the first failure
    starts: int = 0
    reports: tuple[str, ...] = ()
    dropped: bool = False  # the engine was interrupted, and what was gathered has gone
    commits: int = 0
    came: frozenset[int] = frozenset()  # gradients that were in time
    at_start: frozenset[int] = frozenset()  # those that the engine found when it started
    woken: frozenset[int] = frozenset()


PART_EVENTS: dict[str, Callable[[Part], Outcome]] = {
    "begin": lambda part: part.on_begin([LAST, FIRST]),
    "gradients of the first": lambda part: part.on_gradients(FIRST),
    "gradients of the last": lambda part: part.on_gradients(LAST),
    "gradients of an unknown": lambda part: part.on_gradients(UNKNOWN),
    "done": lambda part: part.on_local_end(),
    "failure": lambda part: part.on_local_end(BROKEN),  # of users' code, or the loss of a peer
    "finished": lambda part: part.on_end(""),
    "abort": lambda part: part.on_end("aborted"),  # or the release of the context, or the loss of the root
}
MESSAGES = {
    "gradients of the first": FIRST,
    "gradients of the last": LAST,
    "gradients of an unknown": UNKNOWN,
}


def after(seen: SeenOfPart, part: Part, was: Part, event: str, outcome: Outcome) -> SeenOfPart:
    """What was seen, with one more event. Asserts all that must hold of it."""
    is_late = isinstance(outcome, Late)
    if seen.over:
        assert outcome is None or is_late, "nothing is done after the end"
        assert part.state is was.state
        return seen
    if event == "begin" and not seen.begun and not seen.failed:
        seen = replace(seen, begun=True)
    if (message := MESSAGES.get(event)) is not None and not is_late:
        assert not seen.reports, "gradients after the report are late"
        seen = replace(seen, came=seen.came | {message})
    if outcome is START:
        assert seen.begun and not seen.reports
        assert was.is_root or LAST in seen.came, "it would only wait"
        seen = replace(seen, starts=seen.starts + 1, at_start=seen.came)
    elif outcome is WAKE:
        assert seen.starts == 1 and not seen.reports
        assert message is not None and message in seen.came and message not in seen.woken | seen.at_start
        seen = replace(seen, woken=seen.woken | {message})
    elif outcome is REPORT:
        assert event == "done"
        seen = replace(seen, reports=(*seen.reports, "done"))
    elif isinstance(outcome, Failed):
        assert event != "done"
        text = str(outcome.error)
        seen = replace(seen, reports=(*seen.reports, text), failed=seen.failed or text, dropped=True)
    elif outcome is DROP:
        seen = replace(seen, dropped=True)
    elif outcome is COMMIT:
        assert event == "finished" and seen.reports == ("done",)
        seen = replace(seen, commits=seen.commits + 1)
    elif is_late:
        assert seen.reports
    else:
        assert outcome is None
    if event in ("finished", "abort"):
        seen = replace(seen, over=True)
    assert seen.starts <= 1
    assert len(seen.reports) <= 1 or (seen.reports[0] == "done" and len(seen.reports) == 2)
    assert seen.commits <= (part.state is State.FINISHED)
    assert part.is_over == seen.over
    if seen.failed or (seen.over and not seen.commits):
        assert seen.dropped, "the engine must not be left waiting, nor its sums kept"
    if seen.begun and not seen.reports and not seen.over:
        assert bool(seen.starts) == (part.is_root or LAST in seen.came)
        if seen.starts:
            assert seen.came == seen.at_start | seen.woken, "the engine hears of all that has come"
    return seen


def every_part_reached(is_root: bool) -> Iterator[tuple[Part, SeenOfPart]]:
    start = (Part(is_root=is_root), SeenOfPart())
    known, waiting = {(repr(start[0]), start[1])}, deque([start])
    while waiting:
        part, seen = waiting.popleft()
        yield part, seen
        for name, event in PART_EVENTS.items():
            if name == "done" and not seen.starts:
                continue  # only an engine that was started ends
            changed = copy.deepcopy(part)
            now = after(seen, changed, part, name, event(changed))
            if (repr(changed), now) not in known:
                known.add((repr(changed), now))
                waiting.append((changed, now))


@pytest.mark.parametrize("is_root", [False, True])
def test_every_sequence_of_events_of_a_part(is_root):
    reached = list(every_part_reached(is_root))
    assert {part.state for part, _ in reached} == set(State) - ({State.WAITING} if is_root else set())
    assert any(seen.commits for _, seen in reached)
    assert any(seen.woken for _, seen in reached)
    # In each of them an abort ends it.
    for part, seen in reached:
        if not seen.over:
            assert part.on_end("aborted") is DROP
        assert part.is_over


def test_every_order_of_begin_and_gradients_starts_the_engine_once_and_loses_nothing():
    for order in itertools.permutations(["begin", *list(MESSAGES)[:2]]):
        part, seen = Part(), SeenOfPart()
        for name in order:
            was = copy.deepcopy(part)
            seen = after(seen, part, was, name, PART_EVENTS[name](part))
        assert seen.starts == 1
        assert seen.at_start | seen.woken == {FIRST, LAST}
        assert part.on_local_end() is REPORT


# -- the root's view, by hand ------------------------------------------------------------------------------


def test_a_pass_is_done_when_everybody_is():
    state = BackwardPass(ROOT, [A, B])
    assert state.on_report(B, None) is None
    assert state.on_report(ROOT, None) is None
    assert state.missing == {A}
    assert state.on_report(A, None) is FINISH
    assert state.others == (A, B)


def test_a_pass_with_no_other_worker():
    for participants in ([], [ROOT]):
        state = BackwardPass(ROOT, participants)
        assert state.on_report(ROOT, None) is FINISH
        assert state.others == ()


def test_the_first_failure_wins():
    state = BackwardPass(ROOT, [A, B])
    assert state.on_report(B, BROKEN) is ABORT
    assert (state.error, state.worker) == (BROKEN, B)
    late = state.on_report(A, ValueError("second"))
    assert isinstance(late, Late) and "worker 1" in late.what and "second" in late.what
    assert state.on_lost(A, BROKEN) is None
    assert state.on_failure(BROKEN) is None
    assert state.on_report(ROOT, None) is None
    assert (state.error, state.worker) == (BROKEN, B)


def test_the_loss_of_a_participant_fails_the_pass_and_that_of_another_worker_does_not():
    state = BackwardPass(ROOT, [A, B])
    assert state.on_lost(STRANGER, BROKEN) is None
    assert state.on_report(A, None) is None
    # Also one that has reported: whether its gradients count there is known to nobody any more.
    assert state.on_lost(A, BROKEN) is ABORT
    assert (state.error, state.worker) == (BROKEN, A)


def test_a_deadline_is_the_roots_own_failure():
    state = BackwardPass(ROOT, [A])
    assert state.on_failure(TimeoutError("late")) is ABORT
    assert state.worker == ROOT


# -- the root's view, every sequence -----------------------------------------------------------------------


@dataclass(frozen=True)
class SeenOfRoot:
    reported: frozenset[int] = frozenset()
    told: tuple[str, ...] = ()
    completes: int = 0


def root_events() -> dict[str, tuple[Callable[[BackwardPass], Outcome], BaseException | None, int]]:
    """By name: the event, the error that it brings, and whose it is."""
    events: dict[str, Any] = {}
    for worker in (ROOT, A, B, STRANGER):
        error = CrashError(f"worker {worker} failed")
        lost = CrashError(f"worker {worker} is lost")
        events[f"done {worker}"] = (lambda s, w=worker: s.on_report(w, None), None, worker)
        if worker != STRANGER:
            events[f"failed {worker}"] = (lambda s, w=worker, e=error: s.on_report(w, e), error, worker)
        if worker != ROOT:
            events[f"lost {worker}"] = (lambda s, w=worker, e=lost: s.on_lost(w, e), lost, worker)
    for what in ("the deadline", "the release of the context", "shutdown"):
        ended = CrashError(what)
        events[what] = (lambda s, e=ended: s.on_failure(e), ended, ROOT)
    return events


def test_every_sequence_of_events_of_the_root():
    events = root_events()
    start = (BackwardPass(ROOT, [A, B]), SeenOfRoot())
    known, waiting = set(), deque([start])
    finished = failed = 0
    while waiting:
        state, seen = waiting.popleft()
        for name, (event, error, worker) in events.items():
            now_state = copy.copy(state)
            now_state.missing = set(state.missing)
            outcome = event(now_state)
            now = seen
            if name.startswith("done") and not seen.completes:
                now = replace(now, reported=now.reported | {worker})
            matters = error is not None and name != f"lost {STRANGER}"
            if seen.completes:
                assert isinstance(outcome, Late) if name.startswith("failed") else outcome is None, "these are logged"
                assert (now_state.error, now_state.worker) == (state.error, state.worker), "the first one wins"
            elif matters:
                assert outcome is ABORT
                assert (now_state.error, now_state.worker) == (error, worker)
                now = replace(now, told=(*now.told, "abort"), completes=now.completes + 1)
                failed += 1
            elif now.reported >= {ROOT, A, B}:
                assert outcome is FINISH and now_state.error is None
                now = replace(now, told=(*now.told, "finish"), completes=now.completes + 1)
                finished += 1
            else:
                assert outcome is None
            assert now.completes <= 1 and len(now.told) <= 1
            assert now_state.is_over == bool(now.completes)
            key = (frozenset(now_state.missing), now_state.is_over, repr(now_state.error), now)
            if key not in known:
                known.add(key)
                waiting.append((now_state, now))
    assert finished and failed


# -- root and parts together, every order of delivery ------------------------------------------------------

#      root ──gradients──▶ A ──gradients──▶ B        Each reports to the root, and the root has the last word.


@dataclass
class World:
    """Three workers and what is on its way between them. What one worker sends another arrives in order."""

    root: BackwardPass = field(default_factory=lambda: BackwardPass(ROOT, [A, B]))
    parts: dict[int, Part] = field(default_factory=lambda: {ROOT: Part(is_root=True), A: Part(), B: Part()})
    channels: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    engines: frozenset[int] = frozenset()  # that run
    committed: frozenset[int] = frozenset()
    failing: int = -1  # the worker whose engine will fail
    result: tuple[Any, ...] = ()

    def copy(self) -> World:
        root = copy.copy(self.root)
        root.missing = set(root.missing)
        parts = {w: copy.deepcopy(p) for w, p in self.parts.items()}
        return replace(self, root=root, parts=parts, channels=dict(self.channels))

    def key(self) -> str:
        channels = sorted((route, queue) for route, queue in self.channels.items() if queue)
        root = (sorted(self.root.missing), self.root.is_over)
        return repr((root, self.parts, channels, sorted(self.engines), sorted(self.committed), self.result))

    def send(self, source: int, target: int, *message: Any) -> None:
        route = (source, target)
        self.channels[route] = (*self.channels.get(route, ()), message)

    def deliver(self, route: tuple[int, int]) -> None:
        message, *rest = self.channels[route]
        self.channels[route] = tuple(rest)
        source, target = route
        part = self.parts[target]
        match message:
            case ("begin", sends):
                self.follow(target, part.on_begin(sends))
            case ("gradients", send):
                self.follow(target, part.on_gradients(send))
            case ("report", error):
                self.follow_root(self.root.on_report(source, BROKEN if error else None))
            case ("end", aborted):
                self.follow(target, part.on_end(aborted))

    def end_engine(self, worker: int) -> None:
        """Its engine has done its work: gradients are on their way to the next, and it ends."""
        self.engines -= {worker}
        if worker == self.failing:
            self.follow(worker, self.parts[worker].on_local_end(BROKEN))
            return
        if worker in (ROOT, A):
            self.send(worker, worker + 1, "gradients", 10 * (worker + 1))
        self.follow(worker, self.parts[worker].on_local_end())

    def follow(self, worker: int, outcome: Outcome) -> None:
        if outcome is START:
            self.engines |= {worker}
        elif outcome is DROP or isinstance(outcome, Failed):
            self.engines -= {worker}
        elif outcome is COMMIT:
            self.committed |= {worker}
        if outcome is REPORT or isinstance(outcome, Failed):
            error = None if outcome is REPORT else outcome.error
            if worker == ROOT:
                self.follow_root(self.root.on_report(ROOT, error))
            else:
                self.send(worker, ROOT, "report", error is not None)

    def follow_root(self, outcome: Outcome) -> None:
        if outcome is FINISH or outcome is ABORT:
            assert not self.result
            self.tell(self.root.others, "" if outcome is FINISH else "aborted")
            self.result = ("done",) if outcome is FINISH else ("failed", self.root.worker)

    def tell(self, workers: tuple[int, ...], aborted: str) -> None:
        self.follow(ROOT, self.parts[ROOT].on_end(aborted))
        for worker in workers:
            self.send(ROOT, worker, "end", aborted)

    def steps(self) -> Iterator[Callable[[World], None]]:
        for route, queue in self.channels.items():
            if queue:
                yield lambda world, route=route: world.deliver(route)
        for worker in self.engines:
            yield lambda world, worker=worker: world.end_engine(worker)


@pytest.mark.parametrize("interrupted_by", ["nothing", "the deadline", "the loss of B"])
@pytest.mark.parametrize("failing", [-1, ROOT, A, B])
def test_a_pass_ends_the_same_on_every_worker_in_every_order_of_delivery(failing, interrupted_by):
    world = World(failing=failing)
    world.send(ROOT, A, "begin", (10,))
    world.send(ROOT, B, "begin", (20,))
    world.follow(ROOT, world.parts[ROOT].on_begin([]))
    known, waiting = {world.key()}, deque([world])
    results = set()
    while waiting:
        world = waiting.popleft()
        steps = list(world.steps())
        if not steps:
            assert world.result, "nothing is on its way, and the pass has not ended"
            results.add(world.result)
            assert all(part.is_over for part in world.parts.values())
            if world.result == ("done",):
                assert world.committed == {ROOT, A, B}
            else:
                assert not world.committed, "a failed pass leaves nothing"
        if interrupted_by == "the deadline":
            steps.append(lambda world: world.follow_root(world.root.on_failure(BROKEN)))
        elif interrupted_by == "the loss of B":
            steps.append(lambda world: world.follow_root(world.root.on_lost(B, BROKEN)))
        for step in steps:
            following = world.copy()
            step(following)
            if following.key() not in known:
                known.add(following.key())
                waiting.append(following)
    # A failure upstream of which nothing comes is the only result there is; the others can be overtaken.
    own = {("done",)} if failing < 0 else {("failed", failing)}
    other = {"nothing": set(), "the deadline": {("failed", ROOT)}, "the loss of B": {("failed", B)}}
    assert results == own | other[interrupted_by]
