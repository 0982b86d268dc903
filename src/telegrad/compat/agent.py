"""Agent: a Worker as torch's Python code expects an RPC agent.

torch's init_rpc() and shutdown() are Python around an agent in C++. They stay as they are: the backend registry has
`start` for TENSORPIPE, and the functions below take the places of those in C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.rpc.api as torch_api

from .. import autograd, messages
from ..errors import NotStartedError, RendezvousError, UnknownWorkerError
from ..options import Options
from ..primitives.current import current_worker, set_default_worker
from ..rendezvous.file import check_file_store
from ..rendezvous.group import Group, poll_until
from ..runtime.shutdown import meet
from ..worker import Worker

_NAME = re.compile(r"[A-Za-z0-9_:-]+")
_LONGEST_NAME = 128
_LAST_DROPS = 5.0  # seconds; credits that others returned before they came to the end may still be on their way


class Agent:
    """A worker, as torch's RpcAgent."""

    def __init__(self, worker: Worker, torch_options: Any) -> None:
        self.worker = worker
        self._torch_options = torch_options
        self._meetings = 0
        self.leaks: dict[int, list[str]] = {}  # at the end: values that others still have RRefs to
        self.measures_gil = False

    # torch's shutdown() asks for it. Groups of any kind end in the same way here: it need not say that it leaves.
    is_static_group = True

    def get_worker_info(self, worker: str | int | None = None) -> messages.WorkerInfo:
        try:
            return self.worker.info(worker)
        except UnknownWorkerError as error:
            raise UnknownWorkerError(f"could not find destination: {error}") from error

    def get_worker_infos(self) -> list[messages.WorkerInfo]:
        return self.worker.infos()

    def get_debug_info(self) -> dict[str, str]:
        """torch's keys: programs print them, and look at some."""
        now = self.worker.statistics()
        info = {
            "agent.num_pending_requests": now.calls_pending,
            "agent.thread_pool_size": self._torch_options.num_worker_threads,
            "agent.num_idle_threads": max(0, self._torch_options.num_worker_threads - now.calls_being_served),
            "agent.client_active_calls": now.calls_pending,
            "agent.server_active_calls": now.calls_being_served,
            "agent.server_active_async_calls": 0,
        }
        if self.measures_gil:
            info["agent.gil_average_wait_time_us"] = 0  # a worker's threads take the GIL once, not for each call
        return {key: str(value) for key, value in info.items()}

    def get_metrics(self) -> dict[str, str]:
        return self.get_debug_info()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Waits for the work in flight, everywhere."""
        self.worker.retire(timeout)
        if not torch_api._ignore_rref_leak and self.worker.group.world_size is not None:
            kept = self.worker.references.kept_for_others
            if not poll_until(lambda: not kept(), _LAST_DROPS):
                self.leaks = kept()
            meet(self.worker, "references_checked", 2 * _LAST_DROPS)  # a worker that leaves has no RRefs any more

    def sync(self) -> None:
        """Nothing waits to be sent: a call is written before it returns."""

    def shutdown(self) -> None:
        self.worker.close(graceful=False)

    def wait_for_all(self, timeout: float) -> None:
        self._meetings += 1
        meet(self.worker, f"meeting/{self._meetings}", timeout or None)

    def _get_backend_options(self) -> Any:
        return self._torch_options

    def _get_device_map(self, to: messages.WorkerInfo) -> dict[torch.device, torch.device]:
        found = self.worker.options.device_maps.get(to.name, {})
        return {torch.device(source): torch.device(target) for source, target in found.items()}


def _check_name(name: str) -> None:
    """torch's rules."""
    if not name:
        raise RuntimeError("Worker name must be non-empty.")
    if len(name) >= _LONGEST_NAME:
        raise RuntimeError(f"Worker name must be shorter than {_LONGEST_NAME} characters.")
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"Worker name must match [A-Za-z0-9-_:]*, but {name!r} does not.")


class _CheckedName(type):
    def __call__(cls, name: str, id: int) -> messages.WorkerInfo:
        _check_name(name)
        return messages.WorkerInfo(name, id)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, messages.WorkerInfo)


class WorkerInfo(metaclass=_CheckedName):
    """telegrad's WorkerInfo; where a program makes one itself, with torch's rules for names."""


# -- in the places of torch's C++ functions ---------------------------------------------------

_agents: WeakKeyDictionary[Worker, Agent] = WeakKeyDictionary()
_torch_options: Any = None  # of the default worker


def start_with(options: Options) -> Callable[..., Agent]:
    """The function that the backend registry calls to start an agent. `options` hold where torch's own say nothing."""

    def start(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> Agent:
        from torch.distributed.rpc import TensorPipeRpcBackendOptions

        global _torch_options
        if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
            raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
        _check_name(name)
        _torch_options = rpc_backend_options
        check_file_store(store)
        chosen = replace(options.with_those_of_torch(rpc_backend_options), strict_devices=True, plain=False)
        group = Group(store, world_size or None, options.init_timeout, removes_file=False)
        worker = Worker.start(name, group, chosen, rank=rank)
        set_default_worker(worker)
        return get_agent()

    return start


def is_set() -> bool:
    try:
        current_worker()
    except NotStartedError:
        return False
    return True


def get_agent() -> Agent:
    """The current worker's agent. A worker that is still starting up may serve calls already, which ask for it."""
    worker = current_worker()
    return _agents.setdefault(worker, Agent(worker, _torch_options))


def set_agent(agent: Any) -> None:
    raise NotImplementedError(
        f"telegrad starts its workers itself, and cannot use a {type(agent).__name__}: call init_rpc() with the "
        "TENSORPIPE backend, which stands for telegrad"
    )


def reset_agent() -> None:
    set_default_worker(None)


def get_timeout() -> float:
    return current_worker().options.rpc_timeout


def set_timeout(seconds: float) -> None:
    worker = current_worker()
    worker.options = replace(worker.options, rpc_timeout=float(seconds))


def wait_all_workers(timeout: float = 0) -> None:
    """Waits until every worker of the group has come here. The dead are not waited for."""
    agent = get_agent()
    try:
        agent.wait_for_all(timeout)
    except RendezvousError:
        torch_api.logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


def delete_all_handles(timeout: float = 0) -> None:
    """Ends all RRefs of this worker; values that no other worker has RRefs to go."""
    current_worker().references.let_all_go()


def destroy_references(ignore_leaks: bool) -> list[str]:
    """Raises, at the end of a worker, if others still have RRefs to its values and that is not to be ignored."""
    leaks = get_agent().leaks
    if leaks and not ignore_leaks:
        raise RuntimeError(
            "Leaking RRefs detected during shutdown: these values have RRefs on other workers:\n"
            + "\n".join(f"Leaking RRef {id} with holders {holders}" for id, holders in leaks.items())
        )
    return []


def reference_counts() -> dict[str, str]:
    """torch's keys."""
    counts = current_worker().references.statistics()
    return {
        "num_owner_rrefs": str(counts["shared"]),
        "num_forks": str(counts["credits"]),
        "num_pending_futures": str(counts["being_created"]),
        "num_pending_users": str(counts["unconfirmed"]),
        "num_pending_children": str(counts["on_loan"]),
    }


def debug_info() -> dict[str, Any]:
    return {**reference_counts(), **get_agent().get_debug_info(), **autograd._get_debug_info()}


def enable_gil_profiling(enabled: bool) -> None:
    get_agent().measures_gil = enabled


def nothing(*_: Any, **__: Any) -> None:
    """Does what torch's agent needs done and telegrad's does not."""
