"""Random distributed graphs with large modules, and with messages of many tensors that are used in part.

See random_graphs.py and wide_maker.py. More of them: scripts/random-graphs COUNT --wide, with --plain and without.
"""

from __future__ import annotations

import gc
from random import Random

import pytest
from graph_reference import run_locally
from random_graphs import check_graphs, compare
from wide_maker import make_wide_program

BLOCK = 250
SHARES = {
    "messages of more than 3 tensors": 0.5,
    "messages of more than 20 tensors": 0.15,
    "messages of more than 100 tensors": 0.02,
    "messages used in part": 0.5,
    "passes that use other parts of messages": 0.1,
    "hooks on received tensors that are not used": 0.3,
    "larger tensors among small ones": 0.3,
    "modules of more than 50 parameters": 0.03,
    "modules that share parameters": 0.02,
    "a parameter used twice in its module": 0.15,
    "frozen leaves": 0.05,
    "leaves frozen after the forward pass": 0.03,
    "hooks on nodes of leaves": 0.05,
    "no leaf with hooks": 0.3,
    "received tensors changed in place": 0.2,
    "tensors changed after they were sent": 0.1,
    "checkpoints around calls": 0.03,
    "grad() for some leaves": 0.15,
    "gradients of gradients": 0.07,
}


@pytest.mark.parametrize("plain", [False, True], ids=["context", "plain"])
def test_equals_local_autograd(plain: bool) -> None:
    """In plain mode nothing is left to the garbage collector."""
    gc.collect()
    if plain:
        gc.disable()
    try:
        traits = check_graphs(range(BLOCK), plain=plain, wide=True)
    finally:
        gc.enable()
    assert traits["graphs"] == BLOCK
    for trait, share in SHARES.items():
        assert traits[trait] >= share * BLOCK, trait
    assert bool(traits["reentrant checkpoints around calls"]) is plain


@pytest.mark.parametrize("plain", [False, True], ids=["context", "plain"])
def test_a_program_gives_the_same_twice(plain: bool) -> None:
    for seed in range(40):
        program = make_wide_program(Random(seed), plain=plain)
        assert program == make_wide_program(Random(seed), plain=plain)
        once, again = run_locally(program, plain=plain), run_locally(program, plain=plain)
        if once.error is None:
            compare(once, again)
        else:
            assert str(once.error) == str(again.error)
