"""LocalCluster: workers on this machine for as long as a `with` lasts.

    with telegrad.LocalCluster(["trainer", "ps"]) as cluster:
        cluster.call("ps", torch.add, 1, 2)

Works in a script without a `__main__` guard, under pytest and in a notebook, since the children never run
the caller's script: its functions travel to them by value (see by_value.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ..errors import ClusterError, TelegradError
from ..options import Options
from ..primitives import clock, current
from ..primitives.futures import Future
from ..primitives.interrupts import critical, install, run_all, uninstall
from ..primitives.text import check_name
from ..rendezvous.file import open_file_store
from ..rendezvous.group import Group, poll_until
from ..transport.inproc import Hub
from ..worker import Worker
from .forkserver import ForkServer, Job, import_path
from .seeding import checked, seed_of, seed_process


class _Seat(msgspec.Struct, frozen=True):
    """The arguments of run_child()."""

    name: str
    place: str  # the file of the group's store
    options: dict[str, Any]
    path: list[str]
    directory: str
    seed: int


class LocalCluster:
    """Workers with these names, and `worker`, one more for the caller, all connected with each other.

    Args:
        names: the workers' names.
        transport: "unix" (the default) or "tcp" for processes; "inproc" for workers in this process. Only with "tcp",
            or where `options` ask for it, do workers open TCP ports.
        driver: the name of the caller's own worker.
        options: telegrad's options, for all of them.
        server: a ForkServer to use; one of its own is started otherwise, which takes as long as importing torch.
        start_timeout: how many seconds starting may take.
        seed: the random numbers of each process follow from this and the worker's name; by default from the caller's
            `torch.initial_seed()` when the cluster starts. The caller's own generators stay as they are.

    While it is entered, the caller's worker is the current one, so `telegrad.rpc.rpc_sync` uses it.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        transport: str = "unix",
        driver: str = "driver",
        options: Options | None = None,
        server: ForkServer | None = None,
        start_timeout: float = 60.0,
        seed: int | None = None,
    ) -> None:
        if transport not in ("unix", "tcp", "inproc"):
            raise ValueError(f"transport is {transport!r}; choose 'unix', 'tcp' or 'inproc'")
        if transport == "inproc" and seed is not None:
            raise ValueError(
                "seed= is for workers with processes of their own; with transport='inproc' all share this process's "
                "generators: call torch.manual_seed()"
            )
        all_names = [driver, *names]
        for name in all_names:
            check_name(name)
        repeated = sorted({name for name in all_names if all_names.count(name) > 1})
        if repeated:
            raise ValueError(f"names must be unique; repeated: {repeated} (the caller's is {driver!r})")
        self.names = tuple(names)
        self._transport = transport
        self._driver = driver
        self._options = Options.of(options)
        if transport == "tcp":
            self._options = replace(self._options, transports=("tcp",))
        self._given_server = self._server = server
        self._start_timeout = start_timeout
        self._seed = None if seed is None else checked(seed)
        self._undo: list[Callable[[], Any]] = []  # how to end what was started, the newest first
        self._pids: dict[str, int] = {}
        self._address = ""
        self._worker: Worker | None = None
        self._in_process: list[Worker] = []

    @property
    def worker(self) -> Worker:
        """The caller's own worker."""
        if self._worker is None:
            raise ClusterError("the cluster is not running; use it inside `with telegrad.LocalCluster(...)`")
        return self._worker

    @property
    def pids(self) -> dict[str, int]:
        """The process of each worker (none with transport="inproc")."""
        return dict(self._pids)

    @property
    def address(self) -> str:
        """The address where the group meets, a file that no other user can reach, for `telegrad top` (empty with
        transport="inproc")."""
        return self._address

    def call(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function on a worker and returns its result."""
        return self.worker.call(to, function, args, kwargs)

    def call_async(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Runs a function on a worker and returns a future of its result."""
        return self.worker.call_async(to, function, args, kwargs)

    # -- starting and ending ---------------------------------------------------------------------------

    def __enter__(self) -> LocalCluster:
        self._undo[:] = [self._forget, partial(uninstall, self)]
        try:
            install(self)
            with critical():
                if self._transport == "inproc":
                    self._start_in_process()
                else:
                    self._start_processes()
                self._make_current()
                return self  # from in here: an interrupt that was deferred raises at the end of the section
        except BaseException:
            run_all(self._undo)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            run_all(self._undo)
        finally:
            run_all(self._undo)  # if an interrupt came before the other had begun

    def _at_end(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._undo.insert(0, partial(step, *args, **kwargs))

    def _forget(self) -> None:
        self._worker = None
        self._in_process.clear()
        self._pids.clear()
        self._address = ""

    def _remove(self, place: str, owner: int) -> None:
        if os.getpid() == owner:  # and no fork of it
            with contextlib.suppress(FileNotFoundError):  # the last worker to leave in good order has removed it
                os.unlink(place)

    def _make_current(self) -> None:
        token = current.worker_var.set(self._worker)

        def reset() -> None:
            try:
                current.worker_var.reset(token)
            except (ValueError, RuntimeError):
                # Left in another context than it was entered in, as notebooks and pytest do; or reset already.
                current.worker_var.set(None)

        self._at_end(reset)
        if current.default_worker() is None:
            self._at_end(current.set_default_worker, None)
            current.set_default_worker(self._worker)

    def _start_in_process(self) -> None:
        store, hub = HashStore(), Hub()
        for name in (self._driver, *self.names):
            worker = Worker.start(name, Group(store, None, self._start_timeout), self._options, hub=hub)
            self._at_end(worker.close, graceful=False)
            self._in_process.append(worker)
        self._worker = self._in_process[0]

    def _start_processes(self) -> None:
        deadline = clock.now() + self._start_timeout
        self._server = server = ForkServer() if self._given_server is None else self._given_server
        if server is not self._given_server:
            self._at_end(server.close)
        place = server.new_path()
        self._at_end(self._remove, place, os.getpid())
        self._address = f"file://{place}"
        group = Group(open_file_store(place), None, self._start_timeout)
        self._worker = Worker.start(self._driver, group, self._options)
        self._at_end(self._worker.close, graceful=False)
        options = asdict(self._options)
        seed = torch.initial_seed() if self._seed is None else self._seed
        seats = [_Seat(n, place, options, import_path(), os.getcwd(), seed_of(n, seed)) for n in self.names]
        child = "telegrad.cluster.local:run_child"
        jobs = [Job(seat.name, child, msgspec.msgpack.encode(seat)) for seat in seats]
        pids = server.spawn(jobs, max(0.0, deadline - clock.now()))
        self._pids = dict(zip(self.names, pids, strict=True))
        self._at_end(server.stop, pids, 2.0)
        self._wait_for_children(server, group, deadline)

    def _wait_for_children(self, server: ForkServer, group: Group, deadline: float) -> None:
        missing = set(self.names)

        def all_here() -> bool:
            missing.difference_update([name for name in missing if group.find(name) is not None])
            for name in missing:
                status = server.status(self._pids[name])
                if status is not None:
                    raise ClusterError(
                        f"worker {name!r} ended with status {status} before it joined; see its output above"
                    )
            return not missing

        if not poll_until(all_here, max(0.0, deadline - clock.now())):
            raise ClusterError(
                f"workers {sorted(missing)} did not join within {self._start_timeout:.0f} s; their output may say "
                "why, or raise start_timeout"
            )


def run_child(argument: bytes) -> None:
    """Runs a forked worker, which serves until SIGTERM."""
    seat = msgspec.msgpack.decode(argument, type=_Seat)
    sys.path[:] = seat.path
    with contextlib.suppress(OSError):
        os.chdir(seat.directory)
    torch.set_num_threads(1)
    seed_process(seat.seed)
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    store = open_file_store(seat.place)
    options = Options(**{**seat.options, "transports": tuple(seat.options["transports"])})
    worker = Worker.start(seat.name, Group(store, None, options.init_timeout), options)
    current.set_default_worker(worker)
    end.wait()
    with contextlib.suppress(TelegradError):
        worker.close(graceful=False)
