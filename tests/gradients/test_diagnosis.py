"""The error of a pass that a peer holds up says which Send on which worker is awaited from whom."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import os
import re
import signal
from typing import Any

import fault_programs as programs
import pytest
import torch
from fault_fixtures import fan, held_messages, trio, workers  # noqa: F401
from fault_programs import (
    PLACES,
    Fault,
    backward_error,
    check_nothing_is_left,
    forward,
    open_gate,
    soon,
    stop,
    stuck_error,
    wait_at_gate,
)

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.gradients.diagnosis import Awaited, PartState, explain


def sends_by_ends(context_id: int) -> dict[tuple[str, str], int]:
    """The messages of the chain, by sender and receiver."""
    return {(send.worker, send.peer): send.message for send in autograd.graph(context_id).sends}


def awaited_in(error: BaseException) -> list[tuple[int, str, str]]:
    """(message, sender, awaited from), in the order of the text."""
    found = re.findall(r"Send of message (\d+) on worker '(\w+)' from worker '(\w+)'", str(error))
    return [(int(message), sender, receiver) for message, sender, receiver in found]


# What is awaited while users' code of a place does not return, what explains the rest first.
HELD_UP = {
    "outer": [("driver", "b"), ("c", "b")],
    "last": [("b", "c"), ("driver", "b")],
    "inner": [("driver", "b")],
}


@pytest.mark.parametrize("place", HELD_UP)
def test_a_pass_whose_time_is_over(trio, place, jumping_clock):
    with autograd.context() as context_id:
        loss = forward(Fault(place, action=wait_at_gate))
        messages = sends_by_ends(context_id)
        error = stuck_error(jumping_clock, context_id, loss, place, len(HELD_UP[place]))
        assert awaited_in(error) == [(messages[ends], *ends) for ends in HELD_UP[place]], str(error)
        assert str(error).endswith(f"Worker {PLACES[place]!r} awaits nothing: the pass runs there.")
        rpc.rpc_sync(PLACES[place], open_gate, args=(place,))
    rpc.rpc_sync(PLACES[place], programs.forget_gates)
    check_nothing_is_left()


def test_a_worker_that_died(server):
    """b has noticed it as well, and says for what it waited."""
    with telegrad.LocalCluster(["b", "c"], server=server), autograd.context() as context_id:
        loss = forward(Fault("last", action=programs.die))
        messages = sends_by_ends(context_id)
        with soon():
            error = backward_error(context_id, loss)
        assert error.worker == "c"
        assert (messages["b", "c"], "b", "c") in awaited_in(error), str(error)
        assert "from worker 'c', which is gone" in str(error)
        assert type(error.__cause__) is errors.PeerLostError


def test_a_worker_that_does_not_answer(server):
    """The root says what it knows itself, and does not wait for long."""
    with telegrad.LocalCluster(["b"], server=server) as cluster, autograd.context() as context_id:
        loss = rpc.rpc_sync("b", programs.twice, args=(torch.ones(2, requires_grad=True),)).sum()
        messages = sends_by_ends(context_id)
        stop(cluster.pids["b"])
        try:
            error = backward_error(context_id, loss, timeout=0.2)
        finally:
            os.kill(cluster.pids["b"], signal.SIGCONT)
        assert awaited_in(error) == [(messages["driver", "b"], "driver", "b")], str(error)
        assert "What is awaited on 'b' is not known: nothing was heard from there." in str(error)


def test_gradients_that_are_on_their_way(workers, held_messages):
    """c has not begun, since b's gradients do not come: what it would start from is awaited."""
    held, release = held_messages(workers["b"], "gradients", to="c")
    with autograd.context() as context_id:
        loss = forward()
        messages = sends_by_ends(context_id)
        error = backward_error(context_id, loss, timeout=0.2)
        assert held.is_set()
        assert (messages["c", "b"], "c", "b") in awaited_in(error), str(error)
        release.set()
    check_nothing_is_left()


def test_a_pass_that_fails_by_itself_asks_nobody(workers):
    with autograd.context() as context_id:
        error = backward_error(context_id, forward(Fault("last")))
        assert str(error).endswith("boom at last (worker 'c', in a backward pass)")


def test_a_fan_names_the_branch_that_is_held_up(workers, jumping_clock):
    with autograd.context() as context_id:
        loss = fan((), (Fault("last", action=wait_at_gate),))
        error = stuck_error(jumping_clock, context_id, loss, "last", 1)
        assert [ends for _, *ends in awaited_in(error)] == [["driver", "c"]], str(error)
        open_gate("last")
    check_nothing_is_left()


# -- the text -------------------------------------------------------------------------------------------------------


def part(worker: int, *awaited: tuple[int, int], **more: Any) -> PartState:
    return PartState(worker, 9, (), tuple(Awaited(*a) for a in awaited), **more)


def text(*states: PartState, lost: set[int] = frozenset(), silent: set[int] = frozenset()) -> str:
    return explain(states, lost=lost, silent=silent, name_of=lambda id: f"w{id}")


def test_what_explains_the_rest_comes_first():
    assert text(part(0, (5, 1)), part(1, (6, 2)), part(2)) == (
        "Awaited: Send of message 6 on worker 'w1' from worker 'w2'; Send of message 5 on worker 'w0' from worker "
        "'w1'. "
        "Worker 'w2' awaits nothing: the pass runs there."
    )


def test_what_is_due_from_a_worker_that_is_gone_is_awaited_too():
    """Though something else is awaited before it, or the part had still other things to do."""
    due = (Awaited(7, 3), Awaited(6, 2))
    assert text(part(0, (8, 1), due=due), lost={3}) == (
        "Awaited: Send of message 7 on worker 'w0' from worker 'w3', which is gone; Send of message 8 on worker 'w0' "
        "from worker 'w1'."
    )
    assert text(part(0, due=due)) == "Worker 'w0' awaits nothing: the pass runs there."


def test_who_is_done_is_not_said_to_run():
    assert text(part(0), part(1, is_done=True), part(2, has_failed=True), part(3)) == (
        "Workers 'w0', 'w3' await nothing: the pass runs there."
    )


def test_a_long_list_is_cut():
    said = text(*[part(worker, (worker + 100, 99)) for worker in range(30)])
    assert said.count("Send of message") == 8
    assert said.endswith("; and 22 more.")


def test_nothing_to_say():
    assert text() == ""
    assert text(part(0, is_done=True)) == ""
