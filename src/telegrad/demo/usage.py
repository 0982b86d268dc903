"""The usage of each worker so far: calls, messages, bytes, processor time and memory."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from dataclasses import dataclass, replace

from ..cluster.local import LocalCluster
from ..primitives.current import current_worker


@dataclass(frozen=True)
class Usage:
    """One worker's usage: since it started, or between two looks at it."""

    name: str
    pid: int
    calls: int  # served
    messages: int  # sent
    bytes_to: Counter[str]  # by peer
    bytes_from: Counter[str]
    cpu_seconds: float
    memory: int  # the most that the process has had, in bytes

    @property
    def sent(self) -> int:
        return self.bytes_to.total()

    def since(self, before: Usage) -> Usage:
        """Returns the usage after an earlier look."""
        return replace(
            self,
            calls=self.calls - before.calls,
            messages=self.messages - before.messages,
            bytes_to=self.bytes_to - before.bytes_to,
            bytes_from=self.bytes_from - before.bytes_from,
            cpu_seconds=self.cpu_seconds - before.cpu_seconds,
        )


def usage() -> Usage:
    """Returns the usage of the worker on which it runs."""
    statistics = current_worker().statistics()
    messages, bytes_to, bytes_from = 0, Counter[str](), Counter[str]()
    for key, connection in statistics.connections.items():
        peer = key.rpartition("#")[0]
        messages += connection.messages_out
        if peer != statistics.name:
            bytes_to[peer] += connection.bytes_out
            bytes_from[peer] += connection.bytes_in
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Usage(
        statistics.name,
        os.getpid(),
        statistics.calls_served,
        messages,
        bytes_to,
        bytes_from,
        time.process_time(),
        memory,
    )


def all_usages(cluster: LocalCluster, timeout: float = 20.0) -> list[Usage]:
    """Returns the usage of all workers, the caller's own first."""
    asked = [cluster.worker.call_async(name, usage, timeout=timeout) for name in cluster.names]
    return [usage(), *(future.wait() for future in asked)]
