"""Random distributed graphs give what local autograd gives. See random_graphs.py.

More of them: scripts/random-graphs COUNT. One of them: scripts/random-graphs 1 --first SEED.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import random_graphs
from graph_maker import make_program
from graph_reference import run_locally
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import SHARES, Party, check_graph, check_graphs, compare

from telegrad.gradients import waits

GRAPHS = 5_000  # half of them by a process of their own
BLOCK = 500


@pytest.fixture(scope="module")
def other_half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process that checks the second half of the graphs meanwhile."""
    output = tmp_path_factory.mktemp("random_graphs") / "output"
    command = [sys.executable, random_graphs.__file__, str(GRAPHS // 2), "--first", str(GRAPHS // 2)]
    with open(output, "wb") as file:
        process = subprocess.Popen([*command, "--processes", "1"], stdout=file, stderr=subprocess.STDOUT)
    yield process, output
    process.kill()
    process.wait()


@pytest.mark.parametrize("first", range(0, GRAPHS // 2, BLOCK))
def test_equals_local_autograd(first: int, other_half: object) -> None:
    traits = check_graphs(range(first, first + BLOCK))
    assert traits["graphs"] == BLOCK
    for trait in SHARES:
        assert traits[trait] >= 0.1 * BLOCK, trait


def test_equals_local_autograd_in_the_other_half(other_half: tuple[subprocess.Popen, Path]) -> None:
    process, output = other_half
    code = process.wait(timeout=100)
    said = output.read_text()
    assert code == 0, said
    assert f"{GRAPHS // 2:,} graphs" in said


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(rng=st.randoms(use_true_random=False))
def test_hypothesis_finds_no_difference(party: Party, rng: Random) -> None:
    check_graph(party, make_program(rng))


@pytest.fixture
def party() -> Iterator[Party]:
    with Party() as party:
        yield party
        party.check_nothing_is_left()


@pytest.mark.parametrize("plain", [False, True])
def test_reversed_waits_hang_or_differ(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    """The check can fail: the order in which a worker waits for its gradients matters."""
    order = waits.wait_order
    monkeypatch.setattr(waits, "wait_order", lambda messages: order(messages)[::-1])
    with Party(timeout=0.5, plain=plain) as party:
        for seed in range(300):
            program = make_program(Random(seed))
            traits: Counter[str] = Counter()
            expected = run_locally(program, traits=traits, plain=plain)
            actual = party.run(program, seed)
            if actual.error is not None and expected.error is None:
                assert "timeout" in str(actual.error)
                assert traits["hangs with the Waits reversed"], f"seed {seed}: {program}"
                return
            compare(expected, actual, program if plain else None)
    pytest.fail("none of 300 graphs minded the order of the Waits")


def test_the_reference_and_its_model_agree() -> None:
    """A program gives the same twice; and no order but one can hang in the model."""
    for seed in range(100):
        program = make_program(Random(seed))
        traits: Counter[str] = Counter()
        once, again = run_locally(program, traits=traits), run_locally(program)
        if once.error is None:
            compare(once, again)
        else:
            assert str(once.error) == str(again.error)
        assert traits["graphs"] == 1
