"""The other workers: finding them in the group, connecting to them, noticing that they are gone.

# Note [one connection per pair]
Two workers share one connection, which carries the messages of both: a message never overtakes another one. The
handshake decides. Per peer there is at most one of: a dial of this worker's, an answer to a dial of the peer's, a live
connection; all under `Peers._lock`. When two workers dial each other at once, the dial of the lower id stays. The lower
one refuses the other dial (CrossingError), whose dialler waits for the connection that is coming. It also dials again
now and then: the peer may have given its own dial up, or have died.

# Note [fencing]
A worker that loses its connection with a peer drops all that it held for it: the peer's contexts, its parts in the
peer's passes, the peer's credits, calls pending there. The peer may be alive and not know that. So the incarnation (the
id) is dead to this worker from then on: its dials are refused with the reason, and calls to it fail at once. A worker
that is started again has a new id.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import (
    ConnectError,
    NoRouteError,
    PeerLostError,
    RendezvousError,
    UnknownWorkerError,
    VersionError,
)
from ..events import logger
from ..messages import MAX_WORKER_ID, PROBE_ID, WORKER_BITS, Hello, Member, WorkerInfo
from ..options import Options
from ..primitives import clock
from ..primitives.waiter import Waiter
from ..rendezvous.group import Group, check_same_name
from ..transport.base import Connection, CrossingError, Listener, Transport
from .flow_control import Window
from .routes import dial

_GONE_NAMES = 1000  # of workers that are gone, kept for texts
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two dials of a worker whose own dial is coming


@dataclass(eq=False)
class Peer:
    """Another worker of the group, or this one itself."""

    member: Member
    window: Window
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
        # Guards all below; single lookups are atomic and go without it. Reentrant: a finaliser may run in it.
        self._lock = threading.RLock()
        self._waiting: list[Waiter] = []  # of threads that wait for a change
        self.known_peers: dict[str | int, Peer] = {}  # by id; by name the newest incarnation
        self._live: dict[int, Connection] = {}  # by id of the worker: the one connection with it
        self._connections: set[Connection] = set()  # the same, and those with observers
        self._dialling: set[int] = set()  # ids of workers that a thread of this one dials
        self._answered: dict[int, Hello] = {}  # by id: dials that were accepted, and have no connection yet
        self._fenced = bytearray(1 << WORKER_BITS - 3)  # a bit for each id: see Note [fencing]
        self._gone: OrderedDict[int, str] = OrderedDict()  # names of workers that are gone, the oldest first
        self._listeners: list[Listener] = []
        self._closed = False

    def know_self(self, member: Member, connection: Connection) -> None:
        """A worker is its own peer, over a connection that never ends before it does."""
        peer = Peer(member, Window(self._options.peer_byte_limit), connection)
        self.known_peers[member.id] = self.known_peers[member.name] = peer
        self._live[member.id] = connection

    # -- being found -----------------------------------------------------------------------------------

    def listen(self) -> tuple[str, ...]:
        """Listens on every transport; the addresses."""
        for transport in self._transports.values():
            self._listeners.append(transport.listen(self._answer, self._adopt, self._take_back))
        return tuple(listener.address for listener in self._listeners)

    def _answer(self, hello: Hello) -> Hello:
        """Accepts a dial, or raises to refuse it. A connection follows (`_adopt`), or a failure (`_take_back`)."""
        own = self._hello
        if hello.group != own.group:
            raise ConnectError(f"worker {own.name!r} belongs to another group")
        if hello.to != own.id:
            raise ConnectError(f"this is worker {own.name!r} with id {own.id}, not id {hello.to}")
        if hello.id >= 0:
            with self._lock:
                self._check_dial_locked(hello)
                self._answered[hello.id] = hello
        return own

    def _check_dial_locked(self, hello: Hello) -> None:
        own, them = self._hello, f"worker {hello.name!r} (id {hello.id})"
        if self._closed:
            raise ConnectError(f"worker {own.name!r} has shut down")
        if hello.id == own.id or hello.id > MAX_WORKER_ID:
            raise ConnectError(f"{them} is no worker that could connect to worker {own.name!r} (id {own.id})")
        if self.is_lost(hello.id):
            raise ConnectError(
                f"this worker has lost its connection with {them} and has dropped what it held for it; "
                "start it again to get a new id"
            )
        if hello.id in self._live or hello.id in self._answered:
            raise CrossingError(f"worker {own.name!r} has a connection with {them} already")
        if hello.id in self._dialling and own.id < hello.id:
            raise CrossingError(f"worker {own.name!r} is connecting to {them} itself, and has the lower id")

    def _take_back(self, hello: Hello) -> None:
        """The handshake of a dial that was accepted has failed."""
        with self._lock:
            if self._answered.get(hello.id) is hello:
                del self._answered[hello.id]
                self._notify()

    def _adopt(self, connection: Connection) -> None:
        """Takes over a connection, made or accepted."""
        hello = connection.peer
        with self._lock:
            welcome = not (self._closed or hello.is_probe or hello.id in self._live)
            if self._answered.get(hello.id) is hello:
                del self._answered[hello.id]
            if welcome:
                self._connections.add(connection)
                if hello.id >= 0:
                    self._live[hello.id] = connection
                    if (peer := self.known_peers.get(hello.id)) is not None and peer.member.name == hello.name:
                        peer.connection = connection
            self._notify()
        if not welcome:
            connection.dispose()
            return
        try:
            self._on_connection(connection)
        except BaseException:
            self.drop(connection)
            raise

    # -- finding others --------------------------------------------------------------------------------

    def find(self, to: str | int | WorkerInfo, timeout: float | None = None) -> Peer:
        """The peer of that name, id or WorkerInfo. The store is asked for one that has no connection yet, unless it is
        known by its id: a name may belong to a new incarnation by now. The store has `timeout` seconds (None: those of
        the start-up).

        Raises:
            UnknownWorkerError: there is none in the group.
            RendezvousError: the store does not answer in time.
            PeerLostError: nor does it, and this worker has lost its connection with the peer.
        """
        if not isinstance(to, str | int):  # a WorkerInfo, ours or torch's
            if not hasattr(to, "id"):
                raise UnknownWorkerError(f"a worker's name, id or WorkerInfo was expected, not {to!r}")
            to = int(to.id)
        peer = self.known_peers.get(to)
        if peer is not None and (peer.connection is not None or not isinstance(to, str)):
            return peer
        deadline = None if timeout is None else clock.now() + timeout
        try:
            member = self._group.find(to, timeout)
        except RendezvousError as error:
            with self._lock:
                gone = [id for id, name in self._gone.items() if to in (id, name)]
            if error.no_answer and gone:
                raise self._lost(gone[-1]) from error  # of the worker, which may have served the store
            raise
        if member is None:
            known = sorted(m.name for m in self._group.members(_left(deadline)))
            raise UnknownWorkerError(
                f"worker {to!r} is not in this group (known: {known}); check the name given to init_rpc()"
            )
        return self._know(member, by_name=isinstance(to, str))

    def known(self, to: str | int | WorkerInfo) -> Peer | None:
        """The peer of that name, id or WorkerInfo, if it is known here. Never blocks."""
        return self.known_peers.get(to if isinstance(to, str | int) else int(getattr(to, "id", PROBE_ID)))

    def name_of(self, id: int) -> str:
        """The name of a worker, also of one that has gone not too long ago. Never blocks."""
        if (connection := self._live.get(id)) is not None:
            return connection.peer.name
        if (peer := self.known_peers.get(id)) is not None:
            return peer.member.name
        return self._gone.get(id, f"with id {id}")

    def connection_with(self, id: int) -> Connection | None:
        """The connection with a worker, if there is one."""
        return self._live.get(id)

    def is_near(self, worker_id: int) -> bool:
        """Whether what is written to a worker can be read there at once: before what others write after it."""
        peer = self.known_peers.get(worker_id)
        return peer is not None and peer.connection is not None and peer.connection.transport != "tcp"

    def goes_by_lane(self, id: int, tensor: Tensor) -> bool:
        """Whether a tensor goes to a worker by device memory, so that sending it takes no time."""
        connection = self._live.get(id)
        return connection is not None and (lane := connection.device_lane) is not None and lane.accepts(tensor)

    def _know(self, member: Member, *, by_name: bool) -> Peer:
        with self._lock:
            peer = self.known_peers.get(member.id)
            if peer is None:
                connection = self._live.get(member.id)
                if connection is not None:
                    check_same_name(member, connection.peer.name)
                peer = Peer(member, Window(self._options.peer_byte_limit), connection)
            check_same_name(member, peer.member.name)
            if self.is_lost(member.id):
                return peer  # and nothing is kept of it
            self.known_peers[member.id] = peer
            if by_name:
                # Ids only grow: the newest incarnation has the highest.
                newest = self.known_peers.get(member.name)
                if newest is not None and newest.member.id > member.id:
                    return newest
                self.known_peers[member.name] = peer
            return peer

    def reach(self, to: str | int | WorkerInfo, timeout: float | None) -> tuple[Peer, Connection]:
        """The peer and a connection with it.

        Raises:
            UnknownWorkerError: there is none of that name.
            RendezvousError: the store does not answer in time, or has another name for the worker than itself.
            PeerLostError: it cannot be reached any more.
            VersionError: it speaks another wire version.
        """
        peer = self.known_peers.get(to) if isinstance(to, str | int) else None
        if peer is not None and peer.connection is not None:
            return peer, peer.connection
        deadline = None if timeout is None else clock.now() + timeout
        if peer is None:
            id = to if isinstance(to, str | int) else getattr(to, "id", "")
            if isinstance(id, int) and self.is_lost(id):
                raise self._lost(id)
            peer = self.find(to, timeout)
        try:
            return peer, self.connect(peer, _left(deadline))
        except PeerLostError:
            if not isinstance(to, str) or _left(deadline) == 0:
                raise
            # The name may belong to a new incarnation by now.
            again = self.find(to, _left(deadline))
            if again.member.id == peer.member.id:
                raise
            return again, self.connect(again, _left(deadline))

    def connect(self, peer: Peer, timeout: float | None) -> Connection:
        """The connection with a peer, made if there is none yet.

        Raises:
            RendezvousError: the store has another name for the worker than itself.
            PeerLostError: it cannot be reached any more.
            VersionError: it speaks another wire version.
        """
        connection = peer.connection
        if connection is not None:
            return connection
        limit = self._options.connect_timeout
        if timeout is not None:
            limit = max(0.0, min(timeout, limit))
        deadline, pause, member = clock.now() + limit, _FIRST_PAUSE, peer.member
        try:
            while (connection := self._begin_dial(peer, deadline)) is None:
                try:
                    connection = self._dial(member, self._hello, max(0.0, deadline - clock.now()))
                    self._adopt(connection)
                    check_same_name(member, connection.peer.name)
                except CrossingError:
                    if clock.now() >= deadline:
                        raise
                    crossing = True
                else:
                    crossing = False
                finally:
                    self._end_dial(member.id)
                if crossing:
                    self._await_other_dial(member.id, min(pause, deadline - clock.now()))
                    pause = min(2 * pause, _LONGEST_PAUSE)
            return connection
        except (ConnectError, RendezvousError) as error:
            self._forget(peer)
            if isinstance(error, RendezvousError):
                raise
            lost = PeerLostError(
                f"worker {member.name!r} (id {member.id}) cannot be reached: {error}; "
                "it has ended, or this machine cannot connect to it"
            )
            lost.worker_id = member.id
            raise lost from error

    def _begin_dial(self, peer: Peer, deadline: float) -> Connection | None:
        """Waits for the turn to dial; or gives the connection that is there by then."""
        id = peer.member.id
        while True:
            with self._lock:
                if (connection := self._live.get(id)) is not None:
                    check_same_name(peer.member, connection.peer.name)
                    peer.connection = connection
                    return connection
                if self.is_lost(id):
                    raise self._lost(id, peer.member.name)
                if self._closed:
                    raise ConnectError(f"worker {self._hello.name!r} has shut down")
                if id not in self._dialling and id not in self._answered:
                    self._dialling.add(id)
                    return None
                changed = Waiter()
                self._waiting.append(changed)
            left = deadline - clock.now()
            if left <= 0:
                raise ConnectError("it did not answer in time")
            changed.sleep(left)

    def _end_dial(self, id: int) -> None:
        with self._lock:
            self._dialling.discard(id)
            self._notify()

    def _await_other_dial(self, id: int, seconds: float) -> None:
        """Waits for the connection that a peer is making, or for any other change."""
        with self._lock:
            if id in self._live or id in self._answered or self._closed or self.is_lost(id):
                return
            changed = Waiter()
            self._waiting.append(changed)
        changed.sleep(seconds)

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            changed.set_done()

    def _dial(self, member: Member, hello: Hello, timeout: float) -> Connection:
        return dial(member, hello, self._host, self._transports, timeout)

    def is_alive(self, member: Member, timeout: float | None = None, *, if_silent: bool = False) -> bool:
        """Whether a worker answers at its addresses. One that cannot be asked is taken to live."""
        probe = Hello(self._hello.group, PROBE_ID, self._hello.name)
        try:
            self._dial(member, probe, self._options.connect_timeout if timeout is None else timeout).dispose()
        except (VersionError, NoRouteError):
            return True
        except ConnectError as error:
            return if_silent and error.__cause__ is not None
        return True

    # -- losing them -----------------------------------------------------------------------------------

    def drop(self, connection: Connection) -> bool:
        """Forgets a connection that has ended, and fences its peer; whether this was news."""
        id = connection.peer.id
        with self._lock:
            if connection not in self._connections:
                return False
            self._connections.discard(connection)
            if id >= 0:
                del self._live[id]
                self._note_gone_locked(id, connection.peer.name)
                if not self._hello.is_observer:  # which holds nothing, so it may come again
                    self._fenced[id >> 3] |= 1 << (id & 7)
            if (peer := self.known_peers.get(id)) is not None:
                self._forget(peer)
            self._notify()
        connection.dispose()
        return True

    def _forget(self, peer: Peer) -> None:
        """Forgets a peer, so that the next call looks again: the name may belong to a new incarnation by then."""
        with self._lock:
            peer.connection = None
            self._note_gone_locked(peer.member.id, peer.member.name)
            for key in (peer.member.id, peer.member.name):
                if self.known_peers.get(key) is peer:
                    del self.known_peers[key]

    def _note_gone_locked(self, id: int, name: str) -> None:
        self._gone[id] = name
        self._gone.move_to_end(id)
        if len(self._gone) > _GONE_NAMES:
            self._gone.popitem(last=False)

    def is_lost(self, id: int) -> bool:
        """Whether this worker has lost its connection with a worker. In a group of fixed size, the first to have a rank
        has it as its id."""
        return 0 <= id <= MAX_WORKER_ID and bool(self._fenced[id >> 3] >> (id & 7) & 1)

    def _lost(self, id: int, name: str = "") -> PeerLostError:
        return PeerLostError(
            f"worker {name or self.name_of(id)!r} (id {id}) is gone: this worker has lost its connection with it, and "
            "has dropped what it held for it; start it again to get a new id"
        )

    def bytes_in_flight(self) -> dict[str, int]:
        with self._lock:
            peers = set(self.known_peers.values())
        return {p.member.name: n for p in peers if (n := p.window.bytes_in_flight())}

    def connections(self) -> list[Connection]:
        with self._lock:
            return list(self._connections)

    def close(self) -> None:
        """Listens no more and ends all connections."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
            self._notify()
        for listener in self._listeners:
            try:
                listener.close()
            except OSError as error:
                logger.warning("closing the listener at %s failed: %s", listener.address, str(error))
        for connection in connections:
            connection.abort(f"worker {self._hello.name!r} has shut down")


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - clock.now())
