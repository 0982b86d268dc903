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
    Abort,
    BackwardPass,
    Commit,
    Complete,
    Discard,
    Finish,
    Interrupt,
    Late,
    Part,
    ProtocolViolationError,
    Report,
    Start,
    State,
    Wake,
)

ROOT, A, B, STRANGER = 0, 1, 2, 9
FIRST, LAST, UNKNOWN = 10, 20, 30  # messages that a part has sent, in that order; and one that it has not


class CrashError(RuntimeError):
    """What went wrong somewhere."""


BROKEN = CrashError("broken")


# -- one worker's part, by hand ----------------------------------------------------------------------------


def test_a_part_from_begin_to_end():
    part = Part()
    assert part.on_begin({LAST, FIRST}) == []
    assert part.sends == (FIRST, LAST)
    assert part.on_gradients(FIRST) == []  # the engine has nothing to do before the last Send has its own
    assert part.on_gradients(LAST) == [Start()]
    assert part.on_local_end() == [Report(None)]
    assert part.on_end("") == [Commit()]
    assert part.state is State.FINISHED and part.is_over


def test_the_engine_starts_with_the_last_send_and_is_woken_for_the_others():
    part = Part()
    part.on_begin([FIRST, LAST])
    assert part.on_gradients(LAST) == [Start()]
    assert part.on_gradients(FIRST) == [Wake(FIRST)]


def test_gradients_that_come_before_the_begin_are_kept():
    part = Part()
    assert part.on_gradients(LAST) == []
    assert part.on_gradients(FIRST) == []
    assert part.state is State.EARLY
    assert part.on_begin([FIRST, LAST]) == [Start()]
    assert part.arrived == {FIRST, LAST}


def test_a_root_starts_at_once_and_so_does_a_part_with_nothing_to_wait_for():
    assert Part(is_root=True).on_begin([FIRST]) == [Start()]
    assert Part().on_begin([]) == [Start()]


@pytest.mark.parametrize("begun_first", [True, False])
def test_gradients_of_a_send_that_takes_no_part_are_refused(begun_first):
    part = Part()
    events = [lambda: part.on_begin([FIRST, LAST]), lambda: part.on_gradients(UNKNOWN)]
    for event in events if begun_first else reversed(events):
        instructions = event()
    interrupt, discard, report = instructions
    assert (interrupt, discard) == (Interrupt(), Discard())
    assert isinstance(report.error, ProtocolViolationError)
    assert f"message {UNKNOWN}" in str(report.error)


def test_gradients_that_come_twice_are_refused():
    part = Part()
    part.on_begin([FIRST, LAST])
    part.on_gradients(FIRST)
    *_, report = part.on_gradients(FIRST)
    assert isinstance(report.error, ProtocolViolationError)
    assert f"message {FIRST} came twice" in str(report.error)


def test_gradients_that_come_twice_before_the_begin_are_refused():
    part = Part()
    part.on_gradients(FIRST)
    *_, report = part.on_gradients(FIRST)
    assert "came twice" in str(report.error)
    *_, refused = [*part.on_begin([FIRST]), None]
    assert refused is None and part.state is State.REPORTED


def test_a_pass_that_is_begun_twice_fails():
    part = Part()
    part.on_begin([FIRST])
    assert part.on_begin([FIRST])[:2] == [Interrupt(), Discard()]
    assert part.state is State.REPORTED


def test_an_abort_before_the_begin_leaves_a_part_that_never_begins():
    part = Part()
    part.on_gradients(FIRST)
    assert part.on_end("the deadline") == [Interrupt(), Discard()]
    assert part.on_begin([FIRST]) == [Late("the begin of a pass")]
    assert part.on_gradients(LAST) == [Late(f"the gradients of message {LAST}")]


def test_the_end_of_a_pass_that_is_not_done_here_drops_what_it_has_gathered():
    part = Part()
    part.on_begin([FIRST])
    part.on_gradients(FIRST)
    assert part.on_end("") == [Interrupt(), Discard()]
    assert part.state is State.ABORTED
    assert part.on_local_end() == []  # the engine ends later, and nobody wants to hear of it


def test_a_part_that_has_failed_is_never_committed():
    part = Part()
    part.on_begin([10])
    part.on_gradients(10)
    part.on_local_end(ValueError("broken"))
    assert Commit() not in part.on_end("")
    assert part.state is State.ABORTED


def test_the_loss_of_a_worker_matters_until_the_report():
    lost = ConnectionError("gone")
    part = Part()
    part.on_begin([10])
    assert Report(lost) in part.on_lost(lost)
    part = Part()
    part.on_begin([10])
    part.on_gradients(10)
    part.on_local_end()
    assert part.on_lost(lost) == []
    assert part.on_end("") == [Commit()]


# -- one worker's part, every sequence ---------------------------------------------------------------------


@dataclass(frozen=True)
class SeenOfPart:
    """What a part was told and what it has answered so far."""

    begun: bool = False
    over: bool = False
    failed: str = ""  # the first failure
    starts: int = 0
    reports: tuple[str, ...] = ()
    interrupts: int = 0
    discarded: bool = False
    commits: int = 0
    came: frozenset[int] = frozenset()  # gradients that were in time
    at_start: frozenset[int] = frozenset()  # those that the engine found when it started
    woken: frozenset[int] = frozenset()


PART_EVENTS: dict[str, Callable[[Part], list[Any]]] = {
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


def after(seen: SeenOfPart, part: Part, was: Part, event: str, instructions: list[Any]) -> SeenOfPart:
    """What was seen, with one more event. Asserts all that must hold of it."""
    kinds = [type(i) for i in instructions]
    if seen.over:
        assert kinds in ([], [Late]), "nothing is done after the end"
        assert part.state is was.state
        return seen
    if event == "begin" and not seen.begun and not seen.failed:
        seen = replace(seen, begun=True)
    if (message := MESSAGES.get(event)) is not None and Late not in kinds:
        assert not seen.reports, "gradients after the report are late"
        seen = replace(seen, came=seen.came | {message})
    for instruction in instructions:
        match instruction:
            case Start():
                assert seen.begun and not seen.reports
                assert was.is_root or LAST in seen.came, "it would only wait"
                seen = replace(seen, starts=seen.starts + 1, at_start=seen.came)
            case Wake(message):
                assert seen.starts == 1 and not seen.reports
                assert message in seen.came and message not in seen.woken | seen.at_start
                seen = replace(seen, woken=seen.woken | {message})
            case Report(error):
                assert (error is None) == (event == "done")
                text = "" if error is None else str(error)
                seen = replace(seen, reports=(*seen.reports, text or "done"), failed=seen.failed or text)
            case Interrupt():
                seen = replace(seen, interrupts=seen.interrupts + 1)
            case Discard():
                seen = replace(seen, discarded=True)
            case Commit():
                assert event == "finished" and seen.reports == ("done",)
                seen = replace(seen, commits=seen.commits + 1)
            case Late():
                assert seen.reports
    if event in ("finished", "abort"):
        seen = replace(seen, over=True)
    assert seen.starts <= 1
    assert len(seen.reports) <= 1 or (seen.reports[0] == "done" and len(seen.reports) == 2)
    assert seen.commits <= (part.state is State.FINISHED)
    assert part.is_over == seen.over
    if seen.failed or (seen.over and not seen.commits):
        assert seen.discarded and seen.interrupts, "the engine must not be left waiting, nor its sums kept"
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
            assert part.on_end("aborted") == [Interrupt(), Discard()]
        assert part.is_over


def test_every_order_of_begin_and_gradients_starts_the_engine_once_and_loses_nothing():
    for order in itertools.permutations(["begin", *list(MESSAGES)[:2]]):
        part, seen = Part(), SeenOfPart()
        for name in order:
            was = copy.deepcopy(part)
            seen = after(seen, part, was, name, PART_EVENTS[name](part))
        assert seen.starts == 1
        assert seen.at_start | seen.woken == {FIRST, LAST}
        assert part.on_local_end() == [Report(None)]


# -- the root's view, by hand ------------------------------------------------------------------------------


def test_a_pass_is_done_when_everybody_is():
    state = BackwardPass(ROOT, [A, B])
    assert state.on_report(B, None) == []
    assert state.on_report(ROOT, None) == []
    assert state.missing == {A}
    assert state.on_report(A, None) == [Finish((A, B)), Complete(None)]


def test_a_pass_with_no_other_worker():
    assert BackwardPass(ROOT, []).on_report(ROOT, None) == [Finish(()), Complete(None)]
    assert BackwardPass(ROOT, [ROOT]).on_report(ROOT, None) == [Finish(()), Complete(None)]


def test_the_first_failure_wins():
    state = BackwardPass(ROOT, [A, B])
    assert state.on_report(B, BROKEN) == [Abort((A, B), "CrashError: broken"), Complete(BROKEN, B)]
    (late,) = state.on_report(A, ValueError("second"))
    assert isinstance(late, Late) and "worker 1" in late.what and "second" in late.what
    assert state.on_lost(A, BROKEN) == []
    assert state.on_failure(BROKEN) == []
    assert state.on_report(ROOT, None) == []


def test_the_loss_of_a_participant_fails_the_pass_and_that_of_another_worker_does_not():
    state = BackwardPass(ROOT, [A, B])
    assert state.on_lost(STRANGER, BROKEN) == []
    assert state.on_report(A, None) == []
    # Also one that has reported: whether its gradients count there is known to nobody any more.
    assert state.on_lost(A, BROKEN) == [Abort((A, B), "CrashError: broken"), Complete(BROKEN, A)]


def test_a_deadline_is_the_roots_own_failure():
    state = BackwardPass(ROOT, [A])
    assert state.on_failure(TimeoutError("late"))[-1].worker == ROOT


# -- the root's view, every sequence -----------------------------------------------------------------------


@dataclass(frozen=True)
class SeenOfRoot:
    reported: frozenset[int] = frozenset()
    told: tuple[str, ...] = ()
    completes: int = 0


def root_events() -> dict[str, tuple[Callable[[BackwardPass], list[Any]], BaseException | None, int]]:
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
            instructions = event(now_state)
            now = seen
            if name.startswith("done") and not seen.completes:
                now = replace(now, reported=now.reported | {worker})
            matters = error is not None and name != f"lost {STRANGER}"
            if seen.completes:
                assert [type(i) for i in instructions] in ([], [Late])
                assert bool(instructions) == name.startswith("failed"), "late failures are logged"
            elif matters:
                reason = f"CrashError: {error}"
                assert instructions == [Abort((A, B), reason), Complete(error, worker)], "the first one wins"
                now = replace(now, told=(*now.told, "abort"), completes=now.completes + 1)
                failed += 1
            elif now.reported >= {ROOT, A, B}:
                assert instructions == [Finish((A, B)), Complete(None)]
                now = replace(now, told=(*now.told, "finish"), completes=now.completes + 1)
                finished += 1
            else:
                assert instructions == []
            assert now.completes <= 1 and len(now.told) <= 1
            assert now_state.is_over == bool(now.completes)
            key = (frozenset(now_state.missing), now_state.is_over, now)
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

    def follow(self, worker: int, instructions: list[Any]) -> None:
        for instruction in instructions:
            match instruction:
                case Start():
                    self.engines |= {worker}
                case Interrupt():
                    self.engines -= {worker}
                case Report(error):
                    if worker == ROOT:
                        self.follow_root(self.root.on_report(ROOT, error))
                    else:
                        self.send(worker, ROOT, "report", error is not None)
                case Commit():
                    self.committed |= {worker}

    def follow_root(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            match instruction:
                case Finish(workers):
                    self.tell(workers, "")
                case Abort(workers, reason):
                    self.tell(workers, reason)
                case Complete(error, worker):
                    assert not self.result
                    self.result = ("failed", worker) if error is not None else ("done",)

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
