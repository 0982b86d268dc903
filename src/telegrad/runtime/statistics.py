"""Counts of what a worker has done so far, and of what it is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..transport.base import ConnectionStatistics

if TYPE_CHECKING:
    from ..worker import Worker


@dataclass(frozen=True)
class Statistics:
    """A snapshot of one worker. Connections with observers are left out: they are not the group's."""

    name: str
    id: int
    calls_pending: int
    calls_served: int
    calls_being_served: int
    late_answers: int
    threads: int
    contexts: int
    passes: int
    bytes_in_flight: dict[str, int]
    connections: dict[str, ConnectionStatistics]

    @classmethod
    def of(cls, worker: Worker) -> Statistics:
        """Counts now. Never blocks for long."""
        with_peers = [c for c in worker._peers.connections() if not c.peer.is_observer]
        return cls(
            name=worker.name,
            id=worker.id,
            calls_pending=len(worker._pending),
            calls_served=worker._server.calls_served,
            calls_being_served=worker._server.being_served,
            late_answers=worker.calls.late_answers,
            threads=worker._threads.count,
            contexts=len(worker.contexts),
            passes=worker.engine.busy,
            bytes_in_flight=worker._peers.bytes_in_flight(),
            connections={f"{c.peer.name}#{n}": c.statistics() for n, c in enumerate(with_peers)},
        )
