"""The memory and the descriptors this process can still get, for the texts of errors; and memory that it gives back."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
from pathlib import Path

_MIB = 1 << 20
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
_NO_DESCRIPTOR = "no file descriptor for a message"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation or a mapping failed for lack of memory, and of nothing else."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def describe_failure(nbytes: int) -> str:
    """Describes an allocation that failed, of a message of `nbytes`, and the memory that is left. Never raises."""
    try:
        return f"no memory for a message of {nbytes} bytes ({_left()})"
    except (OSError, ValueError, IndexError, MemoryError):
        return "no memory for a message"


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether this process has as many descriptors as it may."""
    return isinstance(error, OSError) and error.errno == errno.EMFILE


def describe_lost_descriptor(nbytes: int) -> str:
    """Describes a message of `nbytes` in shared memory, whose descriptor did not get through, and says what to do."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{_NO_DESCRIPTOR} of {nbytes} bytes in shared memory: its process has as many open files as it may, {most}; "
        "raise that limit (ulimit -n), or close some"
    )


def with_advice(failure: str, advice: str) -> str:
    """Adds what to do to the description of a failed allocation; that of a lost descriptor says it already."""
    return failure if failure.startswith(_NO_DESCRIPTOR) else f"{failure}; {advice}"


def reclaim() -> None:
    """Frees what only cycles keep, and gives free memory back to the system. Takes up to tenths of a second, in most of
    which no other thread runs Python."""
    if gc.isenabled():
        gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)


def _left() -> str:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in [*lines, "MemAvailable: 0"] if line.startswith("MemAvailable:"))
    text = f"available on this machine: {available >> 10} MiB"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        text += f"; left of this process's address space (ulimit -v): {max(0, limit - used) // _MIB} MiB"
    return text
