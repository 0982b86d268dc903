"""What is there for good once it was used, and so comes before any look for leaks."""

from __future__ import annotations

import io

import pytest

from telegrad import profiler


@pytest.fixture(scope="session")
def fonts_are_open() -> None:
    """matplotlib keeps them open."""
    slice_ = {"ph": "X", "cat": "run", "name": "f", "pid": 1, "tid": 1, "ts": 0, "dur": 1}
    profiler.draw(profiler.Trace([slice_]), io.BytesIO())
