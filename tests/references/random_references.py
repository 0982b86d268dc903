"""Random programs over the tables of references of several workers, with no threads and no transport.

Workers are `References` with a scripted host. Messages lie in one queue for each ordered pair of workers: those of a
pair arrive in order, those of different pairs in any. What a host is asked to run lies in a list, and is run in any
order, as threads may do. A program is a seed: it makes values, creates them elsewhere, sends handles on, drops them,
has messages that are never decoded and writes that fail, and kills workers. Then everything that is in flight
arrives, and a value must be in its owner's table if and only if a live worker has a handle to it.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from telegrad.errors import PeerLostError, ValueGoneError
from telegrad.events import logger
from telegrad.messages import COUNTER_BITS, Envelope, Kind
from telegrad.primitives.futures import Future
from telegrad.references.table import Arrival, Entry, References

NAMES = "abcd"


class Handle:
    """Stands for an RRef. It dies when the program says so."""

    def __init__(self, node: Node, entry: Entry) -> None:
        self.node, self.entry = node, entry
        node.handles.append(self)

    def drop(self) -> None:
        self.node.handles.remove(self)
        self.node.references.let_go(self.entry)


@dataclass
class Message:
    envelope: Envelope
    body: Any = None  # of a control message


class Node:
    """A worker: its table of references, and the host of that."""

    def __init__(self, id: int, world: World) -> None:
        self.id, self.name, self.world = id, NAMES[id], world
        self.handles: list[Handle] = []
        self.tasks: list[Callable[[], None]] = []  # for threads of the worker
        self.arrived: list[tuple[Message, Arrival]] = []  # messages that were read, and neither decoded nor dropped
        self.knows_lost: set[int] = set()
        self._ids = itertools.count((id << COUNTER_BITS) + 1)
        self.references = References(id, self.name, self)

    # As the references' host:

    def post(self, to: int, envelope: Envelope, body: Any, timeout: None, context: None) -> None:
        if to in self.knows_lost:
            raise PeerLostError(f"worker {to} is gone")
        if self.references.let_go_here or self.references.to_go_back:
            self.references.outgoing(envelope, (), to)
        self.world.write(self.id, to, Message(envelope, body))

    def submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def later(self, seconds: float, task: Callable[[], None]) -> Callable[[], None]:
        return lambda: self.tasks.append(task)

    def new_message_id(self) -> int:
        return next(self._ids)

    def name_of(self, worker_id: int) -> str:
        return NAMES[worker_id] if 0 <= worker_id < len(NAMES) else f"with id {worker_id}"

    # As a worker:

    def send(self, to: int, entries: Iterable[Entry], *, creates: int = 0, written: bool = True) -> bool:
        """Sends handles; whether the message was sent."""
        envelope = Envelope(Kind.CALL, self.new_message_id(), creates=creates)
        self.references.outgoing(envelope, entries, to)
        if not written or to in self.knows_lost:
            self.references.not_written(envelope, to)
            return False
        self.world.write(self.id, to, Message(envelope))
        return True

    def read(self, sender: int, message: Message) -> None:
        envelope = message.envelope
        arrival = self.references.incoming(envelope, sender)
        if message.body is not None:
            task = self.references.on_message(sender, message.body)
            if task is not None:
                self.tasks.append(task)
        else:
            self.arrived.append((message, arrival))

    def handle(self, message: Message, *, decode: bool, fail: bool) -> None:
        """Decodes a message that was read, or drops it; and runs what creates a value."""
        if decode:
            for lent in message.envelope.lent:
                try:
                    Handle(self, self.references.take(lent.rref, lent.owner))
                except ValueGoneError:
                    assert lent.rref in self.world.excused, f"{lent} is gone, and no lender was lost"
        if message.envelope.creates:
            if fail:
                self.references.set_error(message.envelope.creates, ValueError("it cannot be created"))
            else:
                self.references.set_value(message.envelope.creates, object())


@dataclass
class World:
    random: Random
    nodes: dict[int, Node] = field(default_factory=dict)  # those that live
    queues: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    # A worker that dies takes its loans with it. The owner may not have heard of the borrower yet: such a value may
    # be gone although there is a handle, whose use says so.
    excused: set[int] = field(default_factory=set)
    asked: list[tuple[int, Any]] = field(default_factory=list)  # the owners of values, and the futures of these
    slow: set[tuple[int, int]] = field(default_factory=set)  # pairs whose messages arrive after all else
    busy: int = -1  # the worker whose threads run what they are asked to after all else
    did: Counter[str] = field(default_factory=Counter)

    def write(self, source: int, to: int, message: Message) -> None:
        if to not in self.dead:  # else it is written, and never read
            self.queues.setdefault((source, to), deque()).append(message)

    # -- steps -----------------------------------------------------------------------------------------

    def any_node(self) -> Node:
        return self.random.choice(list(self.nodes.values()))

    def make(self) -> None:
        node = self.any_node()
        Handle(node, node.references.own(object()))

    def create(self) -> None:
        node, to = self.any_node(), self.any_node().id
        entry = node.references.new(to)
        if node.send(to, self._some(node), creates=entry.id, written=self.random.random() < 0.9):
            handle = Handle(node, entry)
            if self.random.random() < 0.3:  # a temporary one, or of a call that timed out while it was written
                handle.drop()
        else:
            node.references.forget(entry)

    def send(self) -> None:
        node, to = self.any_node(), self.any_node().id
        node.send(to, self._some(node), written=self.random.random() < 0.85)

    def _some(self, node: Node) -> list[Entry]:
        count = min(len(node.handles), self.random.choice((0, 1, 1, 2, 3)))
        return [handle.entry for handle in self.random.sample(node.handles, count)]

    def drop(self) -> None:
        node = self.any_node()
        if node.handles:
            self.random.choice(node.handles).drop()

    def ask(self) -> None:
        """A worker that has a handle asks the owner for the value; its call may come before what creates that."""
        node = self.any_node()
        if not node.handles:
            return
        entry = self.random.choice(node.handles).entry
        id, owner = entry.id, self.nodes.get(entry.owner)
        if owner is None:
            return
        try:
            self.asked.append((owner.id, owner.references.fetch(id)))
        except ValueGoneError:
            assert id in self.excused, f"value {id} is gone, and no lender was lost"
        except (ValueError, PeerLostError):
            pass  # its creation failed

    def kill(self) -> None:
        node = self.any_node()
        if len(self.nodes) < 3 or len(self.dead) == 2:
            return
        del self.nodes[node.id]
        self.dead.add(node.id)
        self.excused.update(entry.id for entry, _ in node.references._loans.values())
        for (source, to), queue in self.queues.items():
            if to == node.id:
                queue.clear()
            elif source == node.id:  # what was still in a buffer of the sender is lost
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()

    # -- what happens by itself ------------------------------------------------------------------------

    def go_on(self) -> bool:
        """One of the things that are under way goes on; whether there was any."""
        ways: list[Callable[[], None]] = []
        at_last: list[Callable[[], None]] = []
        for (source, to), queue in self.queues.items():
            if queue and to in self.nodes:
                found = at_last if (source, to) in self.slow else ways
                found.append(lambda s=source, t=to, q=queue: self.nodes[t].read(s, q.popleft()))
        for node in self.nodes.values():
            if node.tasks:
                found = at_last if node.id == self.busy else ways
                found.append(lambda n=node: n.tasks.pop(self.random.randrange(len(n.tasks)))())
            if node.arrived:
                ways.append(lambda n=node: self._handle(n))
            ways.extend(lambda n=node, d=d: self._notice(n, d) for d in self._noticeable(node))
        ways = ways or at_last
        if ways:
            self.random.choice(ways)()
        return bool(ways)

    def _handle(self, node: Node) -> None:
        message, _ = node.arrived.pop(self.random.randrange(len(node.arrived)))
        node.handle(message, decode=self.random.random() < 0.8, fail=self.random.random() < 0.2)

    def _noticeable(self, node: Node) -> list[int]:
        return [dead for dead in self.dead - node.knows_lost if not self.queues.get((dead, node.id))]

    def _notice(self, node: Node, dead: int) -> None:
        node.knows_lost.add(dead)
        node.references.on_lost(dead, NAMES[dead])

    def drain(self) -> None:
        while self.go_on():
            pass

    # -- the invariant ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Once nothing is in flight."""
        handles: dict[int, set[int]] = {}  # by value: the workers that have one
        for node in self.nodes.values():
            for handle in node.handles:
                handles.setdefault(handle.entry.id, set()).add(node.id)
        for node in self.nodes.values():
            table = node.references
            assert set(table._held) == {h.entry.id for h in node.handles if h.entry.owner != node.id}
            assert not table._loans, "on loan for ever"
            assert not table.let_go_here and not table.to_go_back, "not settled"
            for id, entry in table._owned.items():
                assert id in handles, f"value {id} lives, and no handle does: {entry.handles}, {entry.credits}"
                assert not entry.waiting, "somebody waits for ever"
                held = {w: self.nodes[w].references._held[id].credits for w in handles[id] - {node.id}}
                assert entry.credits == held, f"value {id}: credits {entry.credits}, held {held}"
                assert entry.handles == sum(h.entry is entry for h in node.handles)
            for handle in {h for n in self.nodes.values() for h in n.handles if h.entry.owner == node.id}:
                id = handle.entry.id
                assert id in table._owned or id in self.excused, f"value {id} is gone, and a handle lives"
        for owner, found in self.asked:
            assert owner in self.dead or not isinstance(found, Future) or found.done(), "no answer"


class _Warnings(logging.Handler):
    """What is logged as a lie of a peer. These peers do not lie."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


STEPS = ("make", "create", "create", "send", "send", "send", "drop", "drop", "ask", "kill")


def check_program(seed: int) -> Counter[str]:
    """Runs the program of that seed; what it did."""
    random = Random(seed)
    world = World(random)
    count = random.randint(2, 4)
    for id in range(count):
        world.nodes[id] = Node(id, world)
    if random.random() < 0.5:
        world.slow.add((random.randrange(count), random.randrange(count)))
    if random.random() < 0.5:
        world.busy = random.randrange(count)
    warnings = _Warnings()
    logger.addHandler(warnings)
    try:
        lively = random.random()  # how much happens between two steps of the program
        for _ in range(random.randint(5, 40)):
            step = random.choice(STEPS)
            if step == "kill" and random.random() < 0.8:
                continue
            getattr(world, step)()
            world.did[step] += 1
            while random.random() < lively and world.go_on():
                pass
        world.drain()
        world.check()
        world.did["values left"] += sum(len(node.references._owned) for node in world.nodes.values())
        world.did["excused"] += len(world.excused)
        for node in world.nodes.values():
            for handle in list(node.handles):
                handle.drop()
        world.drain()
        world.check()
        for node in world.nodes.values():
            assert not node.references._owned
            assert not node.references._held
        assert not warnings.texts
    except BaseException as error:
        error.add_note(f"in the program with the seed {seed}")
        raise
    finally:
        logger.removeHandler(warnings)
    return world.did
