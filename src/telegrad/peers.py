"""The other workers: finding them in the group, connecting to them, noticing that they are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from .config import Options
from .errors import ConnectError, NoRouteError, PeerLostError, UnknownWorkerError, VersionError
from .events import logger
from .messages import PROBE_ID, Hello, Member, WorkerInfo
from .pending import Window
from .rendezvous import Group
from .routes import addresses_to_dial, why_none
from .transport.base import Connection, Listener, Transport


@dataclass(eq=False)
class Peer:
    """Another worker of the group, or this one itself."""

    member: Member
    window: Window
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while connecting
    connection: Connection | None = None

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.member.name, self.member.id)


class Peers:
    def __init__(
        self,
        hello: Hello,
        host: str,
        group: Group,
        transports: Sequence[Transport],
        options: Options,
        on_connection: Callable[[Connection], None],
    ) -> None:
        self._hello = hello
        self._host = host
        self._group = group
        self._transports = {transport.name: transport for transport in transports}
        self._options = options
        self._on_connection = on_connection
        self._lock = threading.Lock()  # guards the three below
        self._known: dict[str | int, Peer] = {}  # by name and by id
        self._connections: set[Connection] = set()
        self._names: dict[
            int, str
        ] = {}  # by id, of all that were ever known; its single operations are atomic
        self._lost: set[int] = set()  # ids of workers that closed a connection or whose process died
        self._listeners: list[Listener] = []
        self._closed = False

    def know_self(self, member: Member, connection: Connection) -> None:
        """A worker is its own peer, over a connection that never ends before it does."""
        self._know(member).connection = connection

    # -- being found -----------------------------------------------------------------------------------

    def listen(self) -> tuple[str, ...]:
        """Listens on every transport; the addresses."""
        for transport in self._transports.values():
            self._listeners.append(transport.listen(self._answer, self._adopt))
        return tuple(listener.address for listener in self._listeners)

    def _answer(self, hello: Hello) -> Hello:
        if hello.group != self._hello.group:
            raise ConnectError(f"worker {self._hello.name!r} belongs to another group")
        if hello.to != self._hello.id:
            raise ConnectError(
                f"this is worker {self._hello.name!r} with id {self._hello.id}, not id {hello.to}"
            )
        return self._hello

    def _adopt(self, connection: Connection) -> None:
        """Takes over a connection, made or accepted."""
        if connection.peer.is_probe:
            connection.dispose()
            return
        self._names[connection.peer.id] = connection.peer.name
        with self._lock:
            closed = self._closed
            self._connections.add(connection)
            peer = self._known.get(connection.peer.id)
            if peer is not None and peer.connection is None:
                peer.connection = connection
        if closed:
            connection.dispose()
            return
        self._on_connection(connection)

    # -- finding others --------------------------------------------------------------------------------

    def find(self, to: str | int | WorkerInfo, timeout: float | None = None) -> Peer:
        """The peer of that name, id or WorkerInfo. The store is asked for one that is not known yet; it has `timeout`
        seconds (None: those of the start-up).

        Raises:
            UnknownWorkerError: there is none in the group.
            RendezvousError: the store does not answer in time.
        """
        peer = self._known.get(to) if isinstance(to, str | int) else None
        if peer is not None:
            return peer
        if not isinstance(to, str | int):  # a WorkerInfo, ours or torch's
            if not hasattr(to, "id"):
                raise UnknownWorkerError(f"a worker's name, id or WorkerInfo was expected, not {to!r}")
            return self.find(int(to.id), timeout)
        member = self._group.find(to, timeout)
        if member is None:
            known = sorted(m.name for m in self._group.members(timeout))
            raise UnknownWorkerError(
                f"worker {to!r} is not in this group (known: {known}); check the name given to init_rpc()"
            )
        return self._know(member)

    def known(self, to: str | int | WorkerInfo) -> Peer | None:
        """The peer of that name, id or WorkerInfo, if it is known here. Never blocks."""
        return self._known.get(to if isinstance(to, str | int) else int(getattr(to, "id", PROBE_ID)))

    def name_of(self, id: int) -> str:
        """The name of a worker that was ever known here, also when it is gone. Never blocks."""
        return self._names.get(id, f"with id {id}")

    def connection_with(self, id: int) -> Connection | None:
        """The connection with a worker, if there is one."""
        peer = self._known.get(id)
        return None if peer is None else peer.connection

    def _know(self, member: Member) -> Peer:
        self._names[member.id] = member.name
        with self._lock:
            peer = self._known.get(member.id)
            if peer is None:
                peer = Peer(member, Window(self._options.peer_byte_limit))
                for connection in self._connections:
                    if connection.peer.id == member.id:
                        peer.connection = connection
            self._known[member.id] = self._known[member.name] = peer
            return peer

    def reach(self, to: str | int | WorkerInfo, timeout: float | None) -> tuple[Peer, Connection]:
        """The peer and a connection with it.

        Raises:
            UnknownWorkerError: there is none of that name.
            RendezvousError: the store does not answer in time.
            PeerLostError: it cannot be reached any more.
            VersionError: it speaks another wire version.
        """
        peer = self._known.get(to) if isinstance(to, str | int) else None
        if peer is None:
            peer = self.find(to, timeout)
        if peer.connection is not None:
            return peer, peer.connection
        try:
            return peer, self.connect(peer, timeout)
        except PeerLostError:
            # The name may belong to a new incarnation by now.
            again = self.find(to, timeout)
            if again.member.id == peer.member.id:
                raise
            return again, self.connect(again, timeout)

    def connect(self, peer: Peer, timeout: float | None) -> Connection:
        """The connection with a peer, made if there is none yet.

        Raises:
            PeerLostError: it cannot be reached any more.
            VersionError: it speaks another wire version.
        """
        connection = peer.connection
        if connection is not None:
            return connection
        limit = (
            self._options.connect_timeout if timeout is None else min(timeout, self._options.connect_timeout)
        )
        if not peer.lock.acquire(timeout=max(limit, 0.0)):
            raise PeerLostError(f"worker {peer.member.name!r} did not answer within {limit:.1f} s")
        try:
            if peer.connection is not None:
                return peer.connection
            connection = self._connect(peer.member, self._hello, limit)
            with self._lock:
                peer.connection = connection
            self._adopt(connection)
            return connection
        except ConnectError as error:
            self._forget(peer)
            raise PeerLostError(
                f"worker {peer.member.name!r} (id {peer.member.id}) cannot be reached: {error}; "
                "it has ended, or this machine cannot connect to it"
            ) from error
        finally:
            peer.lock.release()

    def _connect(self, member: Member, hello: Hello, timeout: float) -> Connection:
        to_it = msgspec.structs.replace(hello, to=member.id)
        errors: list[str] = []
        for address in addresses_to_dial(member, self._host, self._transports):
            try:
                return self._transports[address.partition(":")[0]].connect(address, to_it, timeout)
            except (VersionError, NoRouteError):
                raise
            except ConnectError as error:
                errors.append(str(error))
        if not errors:
            raise NoRouteError(why_none(member, self._host, self._transports))
        raise ConnectError("; ".join(errors))

    def is_alive(self, member: Member) -> bool:
        """Whether a worker answers at its addresses. One that cannot be asked is taken to live."""
        probe = Hello(self._hello.group, PROBE_ID, self._hello.name)
        try:
            self._connect(member, probe, self._options.connect_timeout).dispose()
        except (VersionError, NoRouteError):
            return True
        except ConnectError:
            return False
        return True

    # -- losing them -----------------------------------------------------------------------------------

    def drop(self, connection: Connection) -> bool:
        """Forgets a connection that has ended; whether this was news."""
        with self._lock:
            if connection not in self._connections:
                return False
            self._connections.discard(connection)
            self._lost.add(connection.peer.id)
            peer = self._known.get(connection.peer.id)
        if peer is not None and peer.connection is connection:
            self._forget(peer)
        connection.dispose()
        return True

    def _forget(self, peer: Peer) -> None:
        """The next one who wants it looks again: the name may belong to a new incarnation by then."""
        with self._lock:
            peer.connection = None
            for key in (peer.member.id, peer.member.name):
                if self._known.get(key) is peer:
                    del self._known[key]

    def is_lost(self, rank: int) -> bool:
        """Whether a rank of a group of fixed size is known to have died."""
        return rank in self._lost

    def bytes_in_flight(self) -> dict[str, int]:
        with self._lock:
            peers = set(self._known.values())
        return {p.member.name: n for p in peers if (n := p.window.bytes_in_flight())}

    def connections(self) -> list[Connection]:
        with self._lock:
            return list(self._connections)

    def close(self) -> None:
        """Listens no more and ends all connections."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for listener in self._listeners:
            try:
                listener.close()
            except OSError as error:
                logger.warning("closing the listener at %s failed: %s", listener.address, error)
        for connection in connections:
            connection.abort(f"worker {self._hello.name!r} has shut down")
