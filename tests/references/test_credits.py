"""The table of references alone: messages in a given order, and peers that lie. See random_references.py."""

from __future__ import annotations

import logging
from random import Random

import pytest
from random_references import Handle, Message, Node, World

from telegrad import errors
from telegrad.messages import Drop, Envelope, Hold, Kind, Lent, Return

A, B, C = range(3)


@pytest.fixture
def world() -> World:
    world = World(Random(0))
    for id in (A, B, C):
        world.nodes[id] = Node(id, world)
    return world


def nodes(world: World) -> tuple[Node, Node, Node]:
    return world.nodes[A], world.nodes[B], world.nodes[C]


def deliver(world: World, source: Node, to: Node) -> None:
    """The next message of a pair is read."""
    to.read(source.id, world.queues[source.id, to.id].popleft())


def run_tasks(node: Node) -> None:
    while node.tasks:
        node.tasks.pop(0)()


def decode(node: Node) -> Message:
    message, _ = node.arrived.pop(0)
    node.handle(message, decode=True, fail=False)
    return message


def create(source: Node, owner: Node) -> Handle:
    entry = source.references.new(owner.id)
    assert source.send(owner.id, (), creates=entry.id)
    return Handle(source, entry)


def test_a_handle_that_dies_before_its_creation_is_read(world):
    a, _, _ = nodes(world)
    handle = create(a, a)
    id = handle.entry.id
    a.send(A, [handle.entry])
    handle.drop()
    run_tasks(a)
    assert id in a.references._owned, "its messages are in flight"
    deliver(world, a, a)
    deliver(world, a, a)
    decode(a)  # the creation has run
    decode(a)
    run_tasks(a)
    assert a.references._owned[id].is_set
    assert a.handles[0].entry is a.references._owned[id]
    a.handles[0].drop()
    world.drain()
    assert not a.references._owned


def test_a_creation_of_ones_own_that_is_let_go_at_once_leaves_nothing(world):
    a, _, _ = nodes(world)
    create(a, a).drop()
    world.drain()
    assert not a.references._owned


@pytest.mark.parametrize("owner", [A, B])
def test_a_creation_that_was_handed_over_leaves_nothing(world, owner):
    """The write of it timed out, and it arrives all the same: its caller lets go of the handle, and forgets nothing."""
    a = world.nodes[A]
    entry = a.references.new(owner)
    a.send(owner, (), creates=entry.id)
    a.references.let_go(entry)
    world.drain()
    for node in world.nodes.values():
        assert not node.references._owned
        assert not node.references._held


def test_a_message_that_comes_before_the_one_that_creates_what_it_lends(world):
    a, b, c = nodes(world)
    handle = create(b, a)
    b.send(C, [handle.entry])
    deliver(world, b, c)
    decode(c)
    c.send(A, [c.handles[0].entry])  # before c has told a of its handle, and before a has read b's creation
    deliver(world, c, a)
    decode(a)
    assert a.handles[0].entry.id == handle.entry.id
    world.drain()
    assert a.references._owned[handle.entry.id].is_set
    for left in (handle, *a.handles, *c.handles):
        left.drop()
    world.drain()
    assert not a.references._owned


def test_a_value_that_is_let_go_before_it_is_created_can_be_lent_again(world):
    a, b, c = nodes(world)
    handle = create(b, a)  # which is in flight until the end

    def lend() -> None:
        b.send(C, [handle.entry])
        deliver(world, b, c)
        decode(c)
        run_tasks(c)
        deliver(world, c, a)  # its Hold
        run_tasks(a)
        deliver(world, a, b)  # the Return

    lend()
    c.handles[0].drop()
    run_tasks(c)
    deliver(world, c, a)  # the Drop
    lend()
    handle.drop()
    world.drain()
    assert handle.entry.id in a.references._owned, "c has a handle"
    world.check()


def test_a_drop_never_overtakes_the_hold_before_it(world):
    a, b, c = nodes(world)
    handle = create(b, a)
    deliver(world, b, a)
    decode(a)
    b.send(C, [handle.entry])
    deliver(world, b, c)
    decode(c)
    hold = c.tasks.pop(0)
    c.handles[0].drop()
    run_tasks(c)  # counts that the handle has died
    assert not world.queues.get((C, A)), "the owner would hear of a credit that it has not counted yet"
    hold()
    run_tasks(c)
    assert [type(m.body) for m in world.queues[C, A]] == [Hold, Drop]
    world.drain()
    world.check()


def test_a_loan_of_a_value_whose_owner_is_gone_is_none(world):
    a, b, c = nodes(world)
    handle = create(b, a)
    world.drain()
    del world.nodes[A]
    world.dead.add(A)
    world.drain()
    b.send(C, [handle.entry])
    assert not b.references._loans
    world.drain()
    with pytest.raises(errors.PeerLostError):
        c.post(A, Envelope(Kind.HOLD, 1), Hold(1, 1), None, None)


# -- peers that lie ----------------------------------------------------------------------------------------


@pytest.fixture
def lent(world, caplog):
    """A value of a, to which b and c have handles."""
    a = world.nodes[A]
    handle = Handle(a, a.references.own("value"))
    a.send(B, [handle.entry])
    a.send(C, [handle.entry])
    world.drain()
    handle.drop()
    world.drain()
    entry = a.references._owned[handle.entry.id]
    assert (entry.handles, entry.credits) == (0, {B: 1, C: 1})
    caplog.set_level(logging.WARNING)
    return entry


@pytest.mark.parametrize("count", [0, -1000, 2, 5])
@pytest.mark.parametrize("way", ["message", "envelope"])
def test_a_peer_gives_back_no_more_than_it_has(world, lent, caplog, count, way):
    a = world.nodes[A]
    for peer in (C, 77):
        if way == "message":
            a.references.on_message(peer, Drop(((lent.id, count),)))
        else:
            a.references.incoming(Envelope(Kind.CALL, 1, dropped=((lent.id, count),)), peer)
    assert lent.credits == {B: 1, C: 1}
    world.drain()
    assert f"worker 'c' (id 2) gives back {count} credits for the value {lent.id} of worker 'a'" in caplog.text
    for handle in [*world.nodes[B].handles, *world.nodes[C].handles]:
        handle.drop()
    world.drain()
    assert lent.id not in a.references._owned


@pytest.mark.parametrize("liar", [C, 77])
def test_a_loan_is_ended_by_the_owner_only(world, lent, caplog, liar):
    b = world.nodes[B]
    b.send(C, [b.handles[0].entry])
    (loan,) = b.references._loans
    b.references.on_message(liar, Return(loan, C))
    assert set(b.references._loans) == {loan}
    world.drain()
    assert f"ends the loan of value {lent.id}" in caplog.text


def test_a_loan_to_another_worker_is_not_ended_by_a_hold_of_a_third(world, lent, caplog):
    """d says that it was lent what b has lent to c."""
    a, b, _ = nodes(world)
    b.send(C, [b.handles[0].entry])
    (loan,) = b.references._loans
    liar = 3
    task = a.references.on_message(liar, Hold(lent.id, loan))
    task()
    deliver(world, a, b)
    assert set(b.references._loans) == {loan}
    world.drain()
    assert "ends the loan" in caplog.text


def test_a_hold_of_a_value_that_never_was_counts_for_nothing(world, lent, caplog):
    a = world.nodes[A]
    before = dict(a.references._owned)
    assert a.references.on_message(B, Hold(lent.id, 12345)) is None  # a loan by a itself, the owner
    world.drain()
    assert "the owner, has lent it" in caplog.text
    task = a.references.on_message(B, Hold(99, (C << 48) + 1))  # an id that a has never given to a value
    task()
    assert a.references._owned == before
    assert lent.credits == {B: 1, C: 1}


def test_a_value_is_created_only_under_an_id_of_its_creator(world):
    a = world.nodes[A]
    with pytest.raises(errors.ProtocolError, match="creates the value"):
        a.references.incoming(Envelope(Kind.CALL, 1, creates=(B << 48) + 5), C)
    assert not a.references._owned


def test_a_message_from_another_that_says_it_is_from_oneself(world, lent):
    """A peer that took this worker's own id must not bring credits below zero."""
    a = world.nodes[A]
    arrival = a.references.incoming(Envelope(Kind.CALL, 1, lent=(Lent(lent.id, A),)), A)
    del arrival
    run_tasks(a)
    assert lent.credits == {B: 1, C: 1}
