"""The section on memory: many echoes of 64 MiB must leave both processes, and shared memory, as they were.

Read in the driver, from /proc, after the 10th echo (pools are filled by then) and after the last.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.callee import MIB, echo, process_id, tensor_of
from benchmarks.figures import Repeats, Section, Session
from benchmarks.tables import Grid

NBYTES = 64 * MIB
NOISE_MIB = 4.0
"""Growth below this, a sixteenth of one tensor, is the allocators' and counts as none."""
SETTLE_S = 0.5

Readings = dict[str, float]
"""What is read -> MiB."""


@dataclass(frozen=True)
class Memory:
    backend: str
    early: int
    echoes: int
    before: Readings
    after: Readings


def measure_memory(session: Session) -> Memory:
    tensor = tensor_of(NBYTES)
    rpc, peer = session.backend.rpc, session.peer
    pids = {"driver": os.getpid(), "peer": rpc.rpc_sync(peer, process_id)}

    def echo_times(count: int) -> Readings:
        for _ in range(count):
            rpc.rpc_sync(peer, echo, args=(tensor,))
        return _settled_readings(pids)

    early, echoes = session.repeats.warmup, session.repeats.count
    before = echo_times(early)
    return Memory(session.backend.name, early, echoes, before, after=echo_times(echoes - early))


def _settled_readings(pids: dict[str, int]) -> Readings:
    """Buffers go back to their pools shortly after the call that used them has returned."""
    gc.collect()
    time.sleep(SETTLE_S)
    readings = {
        f"{who}: {what}": mib
        for who, pid in pids.items()
        for what, mib in _fields(Path(f"/proc/{pid}/smaps_rollup"), ("Rss", "Pss", "Pss_Shmem")).items()
    }
    return readings | {"machine: Shmem": _fields(Path("/proc/meminfo"), ("Shmem",))["Shmem"]}


def _fields(path: Path, names: tuple[str, ...]) -> Readings:
    """MiB, from lines such as `Rss:    1234 kB`; the first line of smaps_rollup is a range of addresses."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0][:-1]: int(words[1]) / 1024 for words in lines if words[0][:-1] in names}


def render_memory(memory: Memory) -> str:
    growth = {what: memory.after[what] - memory.before[what] for what in memory.before}
    rows = [
        (what, f"{memory.before[what]:.1f}", f"{memory.after[what]:.1f}", f"{growth[what]:+.1f}") for what in growth
    ]
    header = ("MiB", f"after echo {memory.early}", f"after echo {memory.echoes}", "growth")
    grown = [what for what, mib in growth.items() if mib >= NOISE_MIB]
    verdict = f"growth of {', '.join(grown)}: goal missed" if grown else f"none (all below {NOISE_MIB:g} MiB): met"
    return (
        f"{memory.backend}, {memory.echoes} echoes of {NBYTES // MIB} MiB. Growth after echo {memory.early}: "
        f"{verdict}. Shmem is the whole machine's, other programs' included.\n\n{Grid(header, rows).markdown()}"
    )


SECTION = Section(
    name="memory",
    title="Memory",
    measure=measure_memory,
    render=render_memory,
    repeats=Repeats(count=1000, warmup=10),
)
