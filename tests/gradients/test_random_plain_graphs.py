"""Random distributed graphs without contexts, by torch's own backward() and grad(). See random_graphs.py."""

from __future__ import annotations

import gc

import pytest
from random_graphs import check_graphs

GRAPHS = 2_500
BLOCK = 500


@pytest.mark.parametrize("first", range(100_000, 100_000 + GRAPHS, BLOCK))
def test_equals_local_autograd(first: int) -> None:
    """Nothing is left to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        traits = check_graphs(range(first, first + BLOCK), plain=True)
    finally:
        gc.enable()
    assert traits["graphs"] == BLOCK
