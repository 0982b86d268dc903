from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from raw_peers import Raw, connection_over, socket_pair

from telegrad.options import Options
from telegrad.transport.lease import ReadLease
from telegrad.transport.poller import Poller
from telegrad.transport.stream import StreamConnection


class Made:
    """What a fixture made. It is emptied at the end: pytest holds on to fixtures for longer than the leak check."""

    def __init__(self) -> None:
        self.pollers: list[Poller] = []  # which no thread polls: these tests read for themselves
        self.leases: list[ReadLease] = []
        self.connections: list[StreamConnection] = []
        self.raw: list[Raw] = []

    def connection(self, sock, options: Options | None) -> StreamConnection:
        self.pollers.append(Poller())
        self.leases.append(ReadLease(self.pollers[-1]))
        self.leases[-1].try_take()
        self.connections.append(connection_over(sock, self.leases[-1], options))
        return self.connections[-1]

    def dispose(self) -> None:
        for connection in self.connections:
            connection.dispose()
        for raw in self.raw:
            raw.close()
        for lease in self.leases:
            lease.release()
            lease.close()
        for poller in self.pollers:
            poller.close()
        for made in (self.pollers, self.leases, self.connections, self.raw):
            made.clear()


@pytest.fixture
def facing() -> Iterator[Callable[..., tuple[StreamConnection, Raw]]]:
    """Makes a connection and the raw socket that it faces."""
    made = Made()

    def make(transport: str, options: Options | None = None) -> tuple[StreamConnection, Raw]:
        one, other = socket_pair(transport)
        made.raw.append(Raw(other))
        return made.connection(one, options), made.raw[-1]

    yield make
    made.dispose()


@pytest.fixture
def ends() -> Iterator[Callable[..., tuple[StreamConnection, StreamConnection]]]:
    """Makes two connected ends; `wrap` may put another socket under the first."""
    made = Made()

    def make(transport: str, options: Options | None = None, wrap=lambda sock: sock):
        one, other = socket_pair(transport)
        return made.connection(wrap(one), options), made.connection(other, options)

    yield make
    made.dispose()
