"""Who is connected with whom: dials that cross, incarnations that were lost, names that move on. No sockets: the tests
decide what each dial meets, and when."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest
from torch.distributed import HashStore

from telegrad import errors
from telegrad.messages import MAX_WORKER_ID, MIN_OBSERVER_ID, PROBE_ID, Hello, Member
from telegrad.options import Options
from telegrad.rendezvous.group import Group, this_host
from telegrad.runtime.peers import Peers
from telegrad.runtime.shutdown import _RollCall
from telegrad.transport.base import Connection, CrossingError, Frames
from telegrad.transport.inproc import Hub
from telegrad.transport.unix import bind_unseen
from telegrad.worker import Worker

PATIENCE = 20.0
GROUP = "g"


class FakeConnection(Connection):
    transport = "fake"

    def __init__(self, peer: Hello) -> None:
        super().__init__(peer, None)  # type: ignore[arg-type]  # nothing is read here
        self.disposed = False

    def dispose(self) -> None:
        self.disposed = True

    def abort(self, reason: str = "closed") -> None:
        self.disposed = True

    def write(self, frames: Frames, timeout: float | None = None, before_waiting: object = None) -> int:
        return 0

    def receive(self) -> list[Frames]:
        return []

    def open(self) -> None: ...
    def statistics(self) -> None: ...


class FakeTransport:
    """Dials end as the test says: with a connection, unless `dials` has something for one."""

    name = "fake"

    def __init__(self) -> None:
        self.dialled: list[Hello] = []
        self.dials: list[Callable[[Hello], Connection | None]] = []

    def connect(self, address: str, hello: Hello, timeout: float) -> Connection:
        self.dialled.append(hello)
        found = self.dials.pop(0)(hello) if self.dials else None
        return found or FakeConnection(Hello(GROUP, hello.to, self.names.get(hello.to, f"w{hello.to}")))


class FakeGroup:
    """A store that counts how often it is asked."""

    def __init__(self) -> None:
        self.members_by: dict[str | int, Member] = {}
        self.names: dict[int, str] = {}  # that the workers themselves tell
        self.asked = 0

    def join(self, id: int, name: str = "") -> Member:
        member = Member(id, name or f"w{id}", (f"fake://{id}",), "here")
        self.members_by[id] = self.members_by[member.name] = member
        self.names[id] = member.name
        return member

    def find(self, to: str | int, *_: object) -> Member | None:
        self.asked += 1
        return self.members_by.get(to)

    def members(self, *_: object) -> list[Member]:
        return [m for key, m in self.members_by.items() if isinstance(key, int)]


class Fake:
    """The peers of a worker, in a group that the test makes up."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.group, self.transport, self.adopted = FakeGroup(), FakeTransport(), []
        self.transport.names = self.group.names
        options = Options(connect_timeout=PATIENCE)
        self.peers = Peers(
            Hello(GROUP, id, f"w{id}"), "here", self.group, [self.transport], options, self.adopted.append
        )
        for other in range(10):
            self.group.join(other)

    def hello_from(self, id: int, name: str = "") -> Hello:
        return Hello(GROUP, id, name or f"w{id}", to=self.id)

    def accept(self, id: int) -> Connection:
        """A peer has dialled, and has confirmed the connection."""
        hello = self.hello_from(id)
        self.peers._answer(hello)
        connection = FakeConnection(hello)
        self.peers._adopt(connection)
        return connection


def refused(hello: Hello) -> None:
    raise CrossingError("mine is coming")


def unanswered(hello: Hello) -> None:
    raise errors.ConnectError("connection refused")


# -- fencing ----------------------------------------------------------------------------------------------


def test_an_incarnation_that_was_lost_is_refused_with_the_reason():
    here = Fake(1)
    connection = here.accept(3)
    assert here.peers.drop(connection)
    with pytest.raises(errors.ConnectError) as caught:
        here.peers._answer(here.hello_from(3))
    assert type(caught.value) is errors.ConnectError
    assert "this worker has lost its connection with worker 'w3' (id 3)" in str(caught.value)
    assert "has dropped what it held for it; start it again to get a new id" in str(caught.value)
    assert here.accept(4) is here.peers.connection_with(4), "others are not touched"


def test_a_lost_incarnation_is_not_reached_dialled_or_looked_up():
    here = Fake(1)
    _, connection = here.peers.reach(3, PATIENCE)
    here.peers.drop(connection)
    asked, dialled = here.group.asked, len(here.transport.dialled)
    for to in (3, here.group.members_by[3], here.group.members_by[3]):
        with pytest.raises(errors.PeerLostError, match=r"worker 'w3' \(id 3\) is gone: this worker has lost its"):
            here.peers.reach(to, PATIENCE)
    assert (here.group.asked, len(here.transport.dialled)) == (asked, dialled)
    with pytest.raises(errors.PeerLostError, match="start it again to get a new id"):
        here.peers.reach("w3", PATIENCE)
    assert len(here.transport.dialled) == dialled


def test_a_name_finds_the_next_incarnation():
    here = Fake(1)
    _, connection = here.peers.reach("w3", PATIENCE)
    here.peers.drop(connection)
    here.group.join(11, "w3")
    peer, _ = here.peers.reach("w3", PATIENCE)
    assert peer.member.id == 11


def test_a_connection_that_is_dropped_twice_is_news_once():
    here = Fake(1)
    connection = here.accept(3)
    assert here.peers.drop(connection)
    assert not here.peers.drop(connection)


def test_observers_and_probes_come_again():
    here = Fake(1)
    for _ in range(2):
        connection = FakeConnection(here.hello_from(MIN_OBSERVER_ID))
        here.peers._answer(connection.peer)
        here.peers._adopt(connection)
        assert here.peers.drop(connection)
        probe = FakeConnection(here.hello_from(PROBE_ID))
        here.peers._answer(probe.peer)
        here.peers._adopt(probe)
        assert probe.disposed
    assert len(here.adopted) == 2


def test_an_observer_reaches_a_worker_again_that_it_has_lost():
    here = Fake(MIN_OBSERVER_ID)
    for _ in range(2):
        _, connection = here.peers.reach(3, PATIENCE)
        here.peers.drop(connection)
    assert len(here.transport.dialled) == 2


@pytest.mark.parametrize("id", [0, 1, 7, 8, MAX_WORKER_ID])
def test_every_id_can_be_fenced(id):
    here = Fake(9)
    here.peers.drop(here.accept(id))
    assert [other for other in range(MAX_WORKER_ID + 1) if here.peers.is_lost(other)] == [id]
    assert not here.peers.is_lost(-1) and not here.peers.is_lost(MAX_WORKER_ID + 1)


# -- one connection per pair ------------------------------------------------------------------------------


def test_the_lower_id_refuses_a_dial_that_crosses_its_own():
    here = Fake(1)

    def meet(hello: Hello) -> None:
        with pytest.raises(CrossingError, match="'w1' is connecting to worker 'w2' .*and has the lower id"):
            here.peers._answer(here.hello_from(2))

    here.transport.dials.append(meet)
    _, connection = here.peers.reach(2, PATIENCE)
    assert here.adopted == [connection]


def test_the_higher_id_takes_the_dial_that_crosses_its_own():
    here = Fake(2)
    taken = []

    def meet(hello: Hello) -> None:
        taken.append(here.accept(1))
        refused(hello)

    here.transport.dials.append(meet)
    _, connection = here.peers.reach(1, PATIENCE)
    assert here.adopted == taken == [connection]
    assert len(here.transport.dialled) == 1


def test_a_dial_that_was_refused_for_another_waits_for_that_one():
    here = Fake(2)
    taken = []

    def meet(hello: Hello) -> None:
        hello = here.hello_from(1)
        here.peers._answer(hello)  # the peer has its answer, and has not confirmed yet
        threading.Thread(target=confirm, args=(hello,)).start()
        refused(hello)

    def confirm(hello: Hello) -> None:
        taken.append(FakeConnection(hello))
        here.peers._adopt(taken[0])

    here.transport.dials.append(meet)
    _, connection = here.peers.reach(1, PATIENCE)
    assert [connection] == taken
    assert len(here.transport.dialled) == 1


def test_a_dial_waits_while_the_peers_own_is_being_accepted():
    here = Fake(1)
    hello = here.hello_from(2)
    here.peers._answer(hello)
    found = []
    thread = threading.Thread(target=lambda: found.append(here.peers.reach(2, PATIENCE)[1]))
    thread.start()
    connection = FakeConnection(hello)
    here.peers._adopt(connection)
    thread.join(PATIENCE)
    assert found == [connection]
    assert not here.transport.dialled


def test_a_handshake_that_fails_half_way_leaves_the_way_free():
    here = Fake(1)
    hello = here.hello_from(2)
    here.peers._answer(hello)
    with pytest.raises(CrossingError, match="has a connection with worker 'w2'"):
        here.peers._answer(here.hello_from(2))
    with pytest.raises(errors.PeerLostError, match="did not answer in time"):
        here.peers.reach(2, 0.01)
    here.peers._take_back(hello)
    here.peers._take_back(hello)
    assert not here.peers.is_lost(2)
    here.peers._answer(here.hello_from(2))  # the peer may try again
    here.peers._take_back(hello)  # the end of an old handshake is not the end of a new one
    with pytest.raises(CrossingError):
        here.peers._answer(here.hello_from(2))


def test_a_peer_that_dies_while_its_dial_is_waited_for():
    here = Fake(2)
    here.transport.dials += [refused, unanswered]
    with pytest.raises(errors.PeerLostError, match="cannot be reached: connection refused"):
        here.peers.reach(1, PATIENCE)


def test_a_peer_that_gives_its_own_dial_up():
    here = Fake(2)
    here.transport.dials += [refused, refused]
    here.peers.reach(1, PATIENCE)
    assert len(here.transport.dialled) == 3


def test_a_dial_that_never_comes_is_waited_for_until_the_timeout():
    here = Fake(2)
    here.transport.dials += [refused] * 1000
    with pytest.raises(errors.PeerLostError, match="mine is coming"):
        here.peers.reach(1, 0.05)
    here.transport.dials.clear()
    here.peers.reach(1, PATIENCE)


def test_an_interrupted_dial_leaves_the_way_free():
    here = Fake(1)

    def interrupt(hello: Hello) -> None:
        raise KeyboardInterrupt

    here.transport.dials.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        here.peers.reach(2, PATIENCE)
    here.peers.reach(2, PATIENCE)


def test_a_second_connection_under_a_live_id_is_refused():
    here = Fake(1)
    connection = here.accept(3)
    with pytest.raises(CrossingError, match=r"has a connection with worker 'not w3' \(id 3\) already"):
        here.peers._answer(here.hello_from(3, "not w3"))
    stray = FakeConnection(here.hello_from(3))
    here.peers._adopt(stray)
    assert stray.disposed and not here.peers.drop(stray)
    assert here.peers.connection_with(3) is connection
    assert not here.peers.is_lost(3)


@pytest.mark.parametrize("id", [1, MAX_WORKER_ID + 1])
def test_an_id_that_no_peer_can_have_is_refused(id):
    with pytest.raises(errors.ConnectError, match="no worker that could connect to worker 'w1'"):
        Fake(1).peers._answer(Hello(GROUP, id, "w1", to=1))


def test_threads_that_want_a_peer_dial_once():
    here = Fake(1)
    entered, go = threading.Event(), threading.Event()

    def hold(hello: Hello) -> None:
        entered.set()
        assert go.wait(PATIENCE)

    here.transport.dials.append(hold)
    found = []
    threads = [threading.Thread(target=lambda: found.append(here.peers.reach(2, PATIENCE)[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert entered.wait(PATIENCE)
    go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 4 and len(set(found)) == 1
    assert len(here.transport.dialled) == 1


def test_closing_ends_the_wait_for_a_dial():
    here = Fake(2)
    here.peers._answer(here.hello_from(1))
    raised = []

    def reach() -> None:
        try:
            here.peers.reach(1, PATIENCE)
        except errors.PeerLostError as error:
            raised.append(error)

    thread = threading.Thread(target=reach)
    thread.start()
    began = time.monotonic()
    here.peers.close()
    thread.join(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2
    assert "has shut down" in str(raised[0])


@contextmanager
def two_workers(transport: str) -> Iterator[list[Worker]]:
    store, hub = HashStore(), Hub() if transport == "inproc" else None
    options = Options(connect_timeout=PATIENCE, transports=("unix" if hub else transport,))
    started: list[Worker] = []
    try:
        for name in ("one", "other"):
            started.append(Worker.start(name, Group(store, None, PATIENCE), options, hub=hub))
        yield started
    finally:
        for worker in started:
            worker.close(graceful=False)


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
def test_two_workers_that_dial_each_other_at_once_share_one_connection(transport, monkeypatch):
    with two_workers(transport) as workers:
        both = threading.Barrier(2)
        for worker in workers:
            dial, first = worker._peers._dial, [True]

            def dial_together(*args, dial=dial, first=first):
                if first and first.pop():
                    both.wait(PATIENCE)
                return dial(*args)

            monkeypatch.setattr(worker._peers, "_dial", dial_together)
        answers: dict[str, int] = {}

        def call(here: Worker, there: Worker) -> None:
            answers[here.name] = here.call(there.name, abs, (-1,))

        threads = [threading.Thread(target=call, args=pair) for pair in (workers, workers[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert answers == {"one": 1, "other": 1}
        assert [len(worker._peers.connections()) for worker in workers] == [1, 1]
        assert [len(worker.statistics().connections) for worker in workers] == [1, 1]


def test_an_address_in_the_store_that_is_none_is_an_unreachable_peer():
    with two_workers("tcp") as (one, other):
        strange = msgspec.structs.replace(other.member, addresses=("tcp://nowhere",), host="another")
        with pytest.raises(errors.ConnectError, match="tcp://nowhere"):
            one._peers._dial(strange, one._peers._hello, PATIENCE)


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
def test_a_connection_that_is_cut_ends_the_pair(transport):
    """Both live on, and neither takes the other for what it was: each has dropped what it held for it."""
    with two_workers(transport) as (one, other):
        assert one.call("other", abs, (-1,)) == 1
        one._peers.connection_with(other.id).abort("cut")
        deadline = time.monotonic() + PATIENCE
        while not (one._peers.is_lost(other.id) and other._peers.is_lost(one.id)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for here, there in ((one, other), (other, one)):
            for to in (there.name, there.id):
                with pytest.raises(errors.PeerLostError, match="has lost its connection with it"):
                    here.call(to, abs, (-1,))
            assert not here._peers.connections()
            hello = Hello(here.group.name, there.id, there.name, to=here.id)
            with pytest.raises(errors.ConnectError, match="has lost its connection with worker"):
                here._peers._answer(hello)


# -- names ------------------------------------------------------------------------------------------------


def test_an_old_incarnation_that_is_looked_up_does_not_get_the_name_back():
    here = Fake(1)
    old, new = here.group.join(10, "a"), here.group.join(11, "a")
    assert here.peers.find("a").member == new
    assert here.peers.find(old.id).member == old
    assert here.peers.find("a").member == new
    assert here.peers.reach("a", PATIENCE)[0].member == new


def test_an_old_incarnation_that_is_looked_up_first_does_not_take_the_name():
    here = Fake(1)
    here.group.join(10, "a")
    here.peers.find(10)
    here.group.join(11, "a")
    assert here.peers.find("a").member.id == 11


def test_a_name_that_was_looked_up_before_its_worker_died_moves_on():
    """Nothing was ever sent to the old one, so its end was not noticed."""
    here = Fake(1)
    here.group.join(10, "a")
    here.peers.find("a")
    here.group.join(11, "a")
    assert here.peers.find("a").member.id == 11


def test_nothing_grows_with_workers_that_come_and_go():
    here = Fake(1)
    known = len(here.peers.known_peers)
    for id in range(10, 3000):
        here.peers.drop(here.accept(id))
    assert here.peers.name_of(2999) == "w2999"
    assert here.peers.name_of(10) == "with id 10"
    assert len(here.peers._gone) <= 1000
    assert len(here.peers.known_peers) == known
    assert not here.peers._live and not here.peers._answered and not here.peers._connections


# -- shutdown ---------------------------------------------------------------------------------------------


def test_a_rank_that_died_before_anyone_met_it_holds_no_shutdown(caplog):
    store, options = HashStore(), Options(shutdown_timeout=PATIENCE)
    dead = Group(store, 3, PATIENCE)
    dead.claim("w2", dead.new_id(2), lambda _: False)
    dead.publish(Member(2, "w2", ("unix:///proc/0/fd/0",), this_host(), 2))
    errors_raised: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            Worker.start(f"w{rank}", Group(store, 3, PATIENCE), options, rank=rank).close()
        except BaseException as error:
            errors_raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    assert not errors_raised
    assert time.monotonic() - began < PATIENCE / 2
    assert caplog.messages.count("worker 'w2' (rank 2) has ended; its shutdown is not waited for") == 2
    dead.let_go()


def test_one_that_takes_the_place_of_one_that_has_left_is_waited_for():
    store = HashStore()
    worker = Worker.start("w1", Group(store, None, PATIENCE), rank=1)
    group = worker.group
    group.world_size = 3
    group.arrive("end", 1)
    others = Group(store, None, PATIENCE)
    left = Member(2, "w2", (), this_host(), 2)
    others.publish(left)
    others._ask(others._until(None), "set", "left/2", b"1")
    roll = _RollCall(worker, "end", None)
    assert not roll.is_complete() and roll.missing[0] == 0
    group.arrive("end", 0)
    others._published = b""
    others.publish(Member(3, "again", (), this_host(), 2))
    assert not roll.is_complete() and roll.missing == [2]
    others._ask(others._until(None), "set", "left/2", b"1")
    assert roll.is_complete(), "that one has left, too"
    others.publish(Member(3, "again", ("inproc://new",), this_host(), 2))
    assert not roll.is_complete() and roll.missing == [2]
    group.arrive("end", 2)
    assert roll.is_complete()
    group.world_size = None
    worker.close(graceful=False)
    others.let_go()


def test_a_worker_that_cannot_look_for_others_waits_for_them(monkeypatch):
    store, options = HashStore(), Options(shutdown_timeout=PATIENCE)
    starts = [partial(Worker.start, f"w{n}", Group(store, 2, PATIENCE), options, rank=n) for n in range(2)]
    late, looked = threading.Event(), threading.Event()

    def cannot_look(*_: object, **__: object) -> bool:
        looked.set()
        raise OSError(errno.EMFILE, "Too many open files")

    def leave_late() -> None:
        worker = starts[1]()
        assert looked.wait(PATIENCE)
        late.set()
        worker.close()

    other = threading.Thread(target=leave_late)
    other.start()
    worker = starts[0]()
    monkeypatch.setattr(worker._peers, "is_alive", cannot_look)
    worker.close()
    assert late.is_set()
    other.join(PATIENCE)


def test_a_worker_that_does_not_answer_in_time_may_be_busy():
    with two_workers("unix") as (one, _):
        sock, path_fd = bind_unseen()
        silent = Member(7, "busy", (f"unix:///proc/{os.getpid()}/fd/{path_fd}",), this_host())
        try:
            assert one._peers.is_alive(silent, 0.05, if_silent=True)
            assert not one._peers.is_alive(silent, 0.05)
        finally:
            sock.close()
            os.close(path_fd)
        assert not one._peers.is_alive(silent, 0.05, if_silent=True), "nothing is there any more"
