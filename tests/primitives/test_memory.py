"""What a process gives back of its memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

import telegrad
from telegrad import rpc
from telegrad.primitives.memory import reclaim


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_below_a_block() -> tuple[int, int]:
    """Frees 64 MiB of blocks behind which one is still used; resident bytes before and after reclaim()."""
    text = b"x" * (64 << 10)
    blocks = [bytearray(text) for _ in range(1025)]
    del blocks[:-1]
    before = resident()
    reclaim()
    return before, resident()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can be told")
def test_free_memory_goes_back_to_the_system(server):
    with telegrad.LocalCluster(["a"], server=server):
        before, after = rpc.rpc_sync("a", free_below_a_block)
        assert before - after > 48 << 20, f"{before >> 20} MiB, and then {after >> 20}"
