"""The keeper: a process that ends what a launcher has started, should the launcher be killed.

The kernel kills a launcher's own children with it (PR_SET_PDEATHSIG), but not what they have started. So the
launcher forks a keeper before anything else and tells it each process group. The keeper waits for the launcher's
end of the pipe to close; if it closes with no farewell, it kills the groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GROUP = struct.Struct("<i")
_FAREWELL = 0


class Keeper:
    """The launcher's side. To be made while the process has one thread."""

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._pipe)
                _keep(theirs)
            finally:
                os._exit(0)
        os.close(theirs)

    def add(self, group: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it; the run goes on without
            os.write(self._pipe, _GROUP.pack(group))

    def dismiss(self) -> None:
        """All is over, and nothing is left to be ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, _GROUP.pack(_FAREWELL))
        os.close(self._pipe)
        os.waitpid(self.pid, 0)


def _keep(pipe: int) -> None:
    os.setsid()  # Ctrl-C is for the launcher
    with contextlib.suppress(OSError):
        # Whoever reads the launcher's output must not wait for the end of this process.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
    groups: list[int] = []
    while len(word := os.read(pipe, _GROUP.size)) == _GROUP.size:
        (group,) = _GROUP.unpack(word)
        if group == _FAREWELL:
            return
        groups.append(group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def die_with(parent: int) -> None:
    """In a child, before it runs a program: the kernel kills it when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which may have been just now
        os._exit(1)


def adopt_orphans() -> None:
    """What children of this process leave behind becomes its own child, so it can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The processes whose parent this one is; none where the kernel does not say."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []
