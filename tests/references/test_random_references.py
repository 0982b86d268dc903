"""A value lives if and only if a handle to it does: random programs. See random_references.py."""

from __future__ import annotations

from collections import Counter

import pytest
from random_references import STEPS, check_program

PROGRAMS = 4_000
BLOCK = 1_000


@pytest.mark.parametrize("first", range(0, PROGRAMS, BLOCK))
def test_a_value_lives_if_and_only_if_a_handle_does(first: int) -> None:
    did: Counter[str] = Counter()
    for seed in range(first, first + BLOCK):
        did += check_program(seed)
    assert did["values left"] > BLOCK
    assert 0 < did["excused"] < did["values left"]
    assert all(did[step] >= BLOCK / 10 for step in STEPS), did
