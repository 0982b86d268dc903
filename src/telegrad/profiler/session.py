"""profile: torch.profiler.profile for all workers that take part.

    start_trace   this worker records, and marks what it sends: callees join in (see recording.py)
    stop_trace    all participants stop, clocks are compared, the recordings are collected and put together

torch's class does the rest: the schedule, the steps, on_trace_ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.profiler_util import EventList

from ..errors import TelegradError
from ..events import logger
from ..messages import Session, Settings
from ..primitives.current import current_worker
from ..primitives.interrupts import critical, interruptible, run_all
from ..runtime.broadcast import ask
from ..runtime.recording import Part, ask_recorder
from ..runtime.torch_profiler import clock_offset
from ..worker import Worker
from .averages import function_events
from .clocks import Exchange, clock_of, exchange
from .summary import Summary
from .timeline import make_trace
from .trace import StrPath, Trace

PATIENCE = 30.0  # seconds for each answer of a worker; a dead one is known at once
_DROP_PATIENCE = 2.0  # to end a session that was interrupted
LONG_PATIENCE = 600.0  # to export and send what may be millions of events


class profile(torch.profiler.profile):
    """Records the work of this worker, and of every worker for it, as one timeline.

    The arguments are those of torch.profiler.profile, and so are `step()`, the schedule and `on_trace_ready`. A worker
    takes part from the first call or gradient on that it gets from a participant. At the end of each cycle `trace` has
    the work of all. `experimental_config` and `execution_trace_observer` hold on this worker only.

    A worker that dies meanwhile is in `trace.missing`; the rest is there. A process in which another profiler runs has
    no operators in the trace, which says so.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trace: Trace | None = None
        self._session: _Root | None = None
        self._known: set[int] = set()  # participants of the last cycle: they take part in the next one from its start
        self._accumulated: list[Trace] = []

    # -- beginning and ending: all of it, or nothing is left that records -------------------------------

    def __enter__(self) -> profile:
        try:
            with critical():
                interruptible(super().__enter__)
                return self  # from in here: an interrupt that was deferred raises at the end of the section
        except BaseException:
            run_all([self._abandon])
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            run_all([self._abandon])  # nothing, unless it was interrupted

    def start(self) -> None:
        """Begins as torch's does."""
        try:
            with critical():
                interruptible(super().start)
        except BaseException:
            run_all([self._abandon])
            raise

    def stop(self) -> None:
        """Ends as torch's does."""
        try:
            super().stop()
        finally:
            run_all([self._abandon])

    def _abandon(self) -> None:
        if self._session is not None:
            self._session.abandon()
            self._session = None

    # -- what torch's class calls, by the schedule -----------------------------------------------------

    def prepare_trace(self) -> None:
        """Has this worker take part, and the participants of the last cycle. Nothing counts yet; but workers join, and
        torch's profiler starts there.

        Raises:
            NotStartedError: this process has no worker.
            RuntimeError: this worker takes part in another worker's profile.
        """
        session = _Root(current_worker(), self._settings())
        session.check_free()
        self._session = session
        session.prepare(self._known)

    def start_trace(self) -> None:
        """Begins the part of the session that counts."""
        if self._session is None:
            self.prepare_trace()
        assert self._session is not None
        self._session.began = time.perf_counter()
        if self.execution_trace_observer:
            self.execution_trace_observer.start()

    def stop_trace(self) -> None:
        """Stops recording everywhere, and makes one trace of all recordings."""
        if self.execution_trace_observer:
            self.execution_trace_observer.stop()
        session = self._session
        if session is None:
            return
        self.trace = session.stop()
        self._session = None
        self._known = session.took_part
        if self.acc_events:
            self._accumulated.append(self.trace)

    def _settings(self) -> Settings:
        names = tuple(sorted(activity.name for activity in self.activities))
        return Settings(
            self.record_shapes, self.profile_memory, self.with_flops, self.with_stack, self.with_modules, names
        )  # fmt: skip

    # -- the result -------------------------------------------------------------------------------

    def _result(self) -> Trace:
        if self.trace is None:
            raise RuntimeError(
                "nothing was recorded yet: ask for it after the `with`, or in on_trace_ready; with a schedule, after "
                "the last active step of a cycle"
            )
        return self.trace

    def export_chrome_trace(self, path: StrPath, use_python_export: bool = False) -> None:
        """Writes the last cycle's timeline, for Perfetto (ui.perfetto.dev) or chrome://tracing; compressed if the name
        ends in `.gz`."""
        self._result().save(path)

    def summary(self) -> Summary:
        """The time of a step on each worker, by what it did, and the critical path."""
        return self._result().summary()

    def events(self, *, group_by_worker: bool = False) -> EventList:
        """The operators of all workers, as torch's FunctionEvents; with `group_by_worker`, each with its worker's id as
        `node_id`."""
        found: list[Any] = []
        for trace in self._accumulated or [self._result()]:
            ids = {said["pid"]: said["id"] for said in trace.about["workers"].values()}
            found += function_events(trace.events, ids, per_worker=group_by_worker)
        listed = EventList(found, use_device=self.use_device)
        listed._tree_built = True  # of each trace by itself
        return listed

    def key_averages(
        self,
        group_by_input_shape: bool = False,
        group_by_stack_n: int = 0,
        group_by_overload_name: bool = False,
        *,
        group_by_worker: bool = False,
    ) -> EventList:
        """Averages over the operators of all workers; with `group_by_worker`, each worker has its own, and the table a
        column with the worker's id."""
        listed = self.events(group_by_worker=group_by_worker)
        averaged = listed.key_averages(group_by_input_shape, group_by_stack_n, group_by_overload_name)
        return averaged  # type: ignore[no-any-return]


class _Root:
    """One session, at the worker that began it."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker = worker
        self._session = Session(worker.new_message_id(), settings)
        self.took_part: set[int] = set()  # known at the end
        # By participant. Its single operations are atomic: an interrupt must not leave a lock taken.
        self._exchanges: dict[int, list[Exchange]] = {}
        self._asked: set[int] = set()  # to take part from the start
        self._missing: dict[str, str] = {}
        self.began = time.perf_counter()

    def check_free(self) -> None:
        if self._worker.recorder.session is not None:
            raise RuntimeError(
                f"worker {self._worker.name!r} takes part in another profile already; end that one first"
            )

    def prepare(self, known: Iterable[int]) -> None:
        recorder = self._worker.recorder
        recorder.on_joined = self._on_joined
        self._asked = set(known)
        started, _ = self._ask(known, "start", self._session)  # the others have left since the last cycle
        for worker in started:
            self._on_joined(worker)
        recorder.start(self._session)

    def _on_joined(self, worker: int) -> None:
        """Notes a participant. Its clock is compared at once: it may drift until the end."""
        found: list[Exchange] = []
        if worker != self._worker.id and self._exchanges.setdefault(worker, found) is found:
            self._compare(worker)

    def _compare(self, worker: int) -> None:
        try:
            found = exchange(lambda: self._worker.call(worker, ask_recorder, ("clock",), timeout=PATIENCE))
        except TelegradError as error:
            logger.info("the clock of worker %d could not be compared: %s", worker, str(error))
            return
        self._exchanges.setdefault(worker, []).append(found)

    def stop(self) -> Trace:
        ended = time.perf_counter()
        recorder, id = self._worker.recorder, self._session.id
        recorder.hold(id)
        parts: list[Part] = []
        asked: set[int] = {self._worker.id}
        while new := self._participants(parts) - asked:
            asked |= new
            here = self._ask_all(new, "hold", id)
            for worker in here:
                self._compare(worker)
            found = self._ask_all(here, "collect", id)
            parts += [part for part in found.values() if part is not None]
        recorder.on_joined = None
        own = recorder.collect(id)
        parts.sort(key=lambda part: part.id)
        if own is not None:
            parts.insert(0, own)
        self.took_part = {part.id for part in parts} - {self._worker.id}
        clocks = {part.worker: clock_of(self._exchanges.get(part.id, [])) for part in parts}
        events, about = make_trace(parts, clocks, self._worker.name, self.began, ended, self._missing)
        return Trace(events, about, base_ns=int(self.began * 1e9) + clock_offset())

    def abandon(self) -> None:
        """Ends the session without a trace, here and at its participants."""
        recorder, id = self._worker.recorder, self._session.id
        others = self._participants([]) | self._asked
        if recorder.on_joined == self._on_joined:
            recorder.on_joined = None
        recorder.drop(id)
        ask(self._worker, others - {self._worker.id}, ask_recorder, ("drop", id), _DROP_PATIENCE)

    def _participants(self, parts: list[Part]) -> set[int]:
        """The participants that are known by now: they said so, or a participant has sent them something."""
        own = self._worker.recorder.sent_to
        return set(self._exchanges).union(own, *(part.sent_to for part in parts))

    def _ask(self, workers: Iterable[int], method: str, argument: Any) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Calls a method of each worker's Recorder, of all at once: (answers, errors)."""
        return ask(self._worker, workers, ask_recorder, (method, argument), LONG_PATIENCE)

    def _ask_all(self, workers: Iterable[int], method: str, argument: Any) -> dict[int, Any]:
        answers, errors = self._ask(workers, method, argument)
        self._missing.update({self._worker.name_of(worker): str(error) for worker, error in errors.items()})
        return answers
