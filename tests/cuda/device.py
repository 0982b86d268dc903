"""The device that tests run on: "cuda", or what the environment variable TELEGRAD_TEST_DEVICE says: "twin" where there
is no GPU (tests/gradients/twin.py). Only tests that name it DEVICE run on both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

DEVICE = os.environ.get("TELEGRAD_TEST_DEVICE", "cuda")


def delay() -> None:
    """Keeps the current stream busy for some milliseconds."""
    if DEVICE == "cuda":
        torch.cuda._sleep(10_000_000)


@contextlib.contextmanager
def on_side_stream() -> Iterator[None]:
    """Makes a new stream the current one, behind what was queued before and in front of what is queued after."""
    if DEVICE != "cuda":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
