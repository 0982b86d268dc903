"""Random graphs that draw random numbers: by workers that have a process each, and with numbers that are wrong.

There each worker has a stream of its own. In-process workers, as in test_random_graphs.py, share one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import random_graphs
import torch
from graph_maker import MOST_WORKERS, make_program
from graph_programs import Place, Program
from graph_reference import Outcome, run_locally, traits_of
from random_graphs import Party, RemoteWire, compare, gradients_here, run_pass

import telegrad
from telegrad import rpc

NAMES = [f"w{i}" for i in range(MOST_WORKERS)]
GRAPHS = 60


def drawing_programs() -> Iterator[Program]:
    """Several of their workers draw random numbers, and no function fails."""
    for seed in itertools.count():
        traits = traits_of(program := make_program(Random(seed)))
        if "random numbers on several workers" in traits and "a function that fails" not in traits:
            yield program


PROGRAMS = list(itertools.islice(drawing_programs(), GRAPHS))


# -- what a worker with a process of its own runs ---------------------------------------------------------


def begin(run: int, worker: int, program: Program, plain: bool) -> None:
    wire = RemoteWire(run, program, NAMES, plain)
    random_graphs._PLACES[run, worker] = Place(program, worker, wire)


def freeze(run: int, worker: int) -> None:
    random_graphs._PLACES[run, worker].freeze()


def run_one_pass(run: int, worker: int, *arguments: Any) -> list[Any]:
    run_pass(run, worker, *arguments)
    return random_graphs._ASKED.pop(run, [])


def end(run: int, worker: int, contexts: list[int]) -> Outcome:
    """Returns what the worker has found."""
    place = random_graphs._PLACES.pop((run, worker))
    number_of = {id(leaf): number for number, leaf in place.leaves.items()}
    found = Outcome(seen=place.seen, next_numbers=[float(torch.rand(()))])
    for i, context in enumerate(contexts):
        found.gradients |= {(i, number_of[id(leaf)]): g for leaf, g in gradients_here(context).items()}
    found.fields = {n: leaf.grad for n, leaf in place.leaves.items() if leaf.grad is not None}
    found.retained = {n: tensor.grad for n, tensor in place.retained.items()}
    place.clear()
    return found


def run_on_processes(run: int, program: Program, *, plain: bool) -> Outcome:
    """Runs a program on the workers of the cluster that is open."""

    def on(worker: int, function: Callable[..., Any], *arguments: Any) -> Any:
        if worker == 0:
            return function(run, 0, *arguments)
        return rpc.rpc_sync(NAMES[worker], function, args=(run, worker, *arguments))

    outcome, workers = Outcome(messages=None), range(program.workers)
    for worker in workers:
        on(worker, begin, program, plain)
    place = random_graphs._PLACES[run, 0]
    wire = place.wire
    assert isinstance(wire, RemoteWire)
    with torch.autograd.set_detect_anomaly(program.anomaly), wire.open:
        wire.nest()
        telegrad.manual_seed(program.seed or 0)
        place.run(0, [])
        for worker in workers:
            on(worker, freeze)
        for number, each in enumerate(program.passes):
            context = 0 if plain else wire.contexts[each.context]
            outcome.asked += on(each.worker, run_one_pass, number, context, 30.0)
        for worker in workers:
            found = on(worker, end, wire.contexts)
            outcome.next_numbers += found.next_numbers
            for field in ("gradients", "fields", "retained", "seen"):
                getattr(outcome, field).update(getattr(found, field))
    return outcome


PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["context", "plain"])


@PLAIN
def test_streams_follow_from_seed_and_name(server: telegrad.ForkServer, plain: bool) -> None:
    random_graphs.warm_up()
    with telegrad.LocalCluster(NAMES[1:], driver=NAMES[0], server=server):
        for run in range(GRAPHS):
            program = PROGRAMS[run]
            expected = run_locally(program, plain=plain, names=NAMES)
            compare(expected, run_on_processes(-run, program, plain=plain), program if plain else None)


@PLAIN
def test_other_numbers_are_noticed(plain: bool) -> None:
    """Another seed, and other names, give other gradients. Where something else draws, the generator tells."""
    differ = Counter[str]()
    with Party(plain=plain) as party:
        for program in PROGRAMS:
            expected = run_locally(program, plain=plain)
            actual = party.run(replace(program, seed=(program.seed or 0) + 1))
            differ["seed"] += not are_equal(expected, replace(actual, next_numbers=expected.next_numbers))

            named = run_locally(program, plain=plain, names=NAMES)
            actual = run_locally(program, plain=plain, names=[name.upper() for name in NAMES])
            differ["names"] += not are_equal(named, replace(actual, next_numbers=named.next_numbers))

            undo = party._workers[0].events.subscribe(lambda _: torch.rand(()))
            differ["drawn beside"] += not are_equal(expected, party.run(program))
            undo()
    assert differ["seed"] > 0.9 * GRAPHS
    assert differ["names"] >= 0.5 * GRAPHS  # worker 0 draws what it drew
    assert differ["drawn beside"] == GRAPHS


def are_equal(expected: Outcome, actual: Outcome) -> bool:
    try:
        compare(expected, actual)
    except AssertionError:
        return False
    return True
