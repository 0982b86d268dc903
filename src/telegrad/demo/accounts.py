"""What each worker has done so far, as it says itself."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from dataclasses import dataclass

from ..cluster.local import LocalCluster
from ..primitives.current import current_worker

KIB = 1024


@dataclass(frozen=True)
class Account:
    """One worker's part: since it started, or between two looks at it."""

    name: str
    pid: int
    calls: int  # that it has served
    messages: int  # that it has sent
    bytes_to: dict[str, int]  # sent, by peer
    bytes_from: dict[str, int]
    cpu_seconds: float
    memory: int  # the most that the process has had, in bytes

    def since(self, before: Account) -> Account:
        """What was done after an earlier look."""
        return Account(
            self.name,
            self.pid,
            self.calls - before.calls,
            self.messages - before.messages,
            _less(self.bytes_to, before.bytes_to),
            _less(self.bytes_from, before.bytes_from),
            self.cpu_seconds - before.cpu_seconds,
            self.memory,
        )


def account() -> Account:
    """That of the worker on which it runs."""
    statistics = current_worker().statistics()
    bytes_to: Counter[str] = Counter()
    bytes_from: Counter[str] = Counter()
    for key, connection in statistics.connections.items():
        peer = key.rpartition("#")[0]
        if peer != statistics.name:
            bytes_to[peer] += connection.bytes_out
            bytes_from[peer] += connection.bytes_in
    return Account(
        statistics.name,
        os.getpid(),
        statistics.calls_served,
        sum(connection.messages_out for connection in statistics.connections.values()),
        dict(bytes_to),
        dict(bytes_from),
        time.process_time(),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
    )


def accounts(cluster: LocalCluster, timeout: float = 20.0) -> list[Account]:
    """Those of all workers, the caller's own first."""
    asked = [cluster.worker.call_async(name, account, timeout=timeout) for name in cluster.names]
    return [account(), *(future.wait() for future in asked)]


def _less(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {peer: count - before.get(peer, 0) for peer, count in now.items()}
