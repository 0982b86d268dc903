"""The suite `calls`: what one call costs, from an empty one to 64 MiB there and back.

Each figure here runs in the driver, with one peer in another process of the same host.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import floors, memory, profiling, startup
from benchmarks.callee import MIB, echo, empty, tensor_of
from benchmarks.figures import PAIR_ALL_OVER_TCP, PAIR_OVER_TCP, Figure, Repeats, Session, Setting, Suite
from benchmarks.sampling import timed

CALLS_IN_FLIGHT = 500

# torch needs the long warm-up: each of its threads has memory of its own to map, and its first dozens of
# echoes of 16 MiB take two and three times as long as later ones.
SMALL = Repeats(count=2000, warmup=200)
MIB_1 = Repeats(count=200, warmup=100)
MIB_16 = Repeats(count=100, warmup=60)
MIB_16_FIRST = Repeats(count=40, warmup=3)  # before all that: what a program sees that has just started
MIB_64 = Repeats(count=20, warmup=10)


def time_empty_calls(session: Session) -> list[float]:
    return timed(partial(session.backend.rpc.rpc_sync, session.peer, empty), session.repeats)


def time_echoes(session: Session, *, nbytes: int) -> list[float]:
    tensor = tensor_of(nbytes)
    call = partial(session.backend.rpc.rpc_sync, session.peer, echo, args=(tensor,))
    returned = call()
    if not torch.equal(returned, tensor):
        raise AssertionError(f"{session.backend.name} returned other bytes than it was sent ({nbytes} bytes)")
    del returned
    return timed(call, session.repeats)


def time_calls_in_flight(session: Session) -> list[float]:
    """One sample is the time for all of them: from the first `rpc_async` until `wait_all` returns."""
    rpc_async, peer = session.backend.rpc.rpc_async, session.peer

    def all_at_once() -> None:
        torch.futures.wait_all([rpc_async(peer, empty) for _ in range(CALLS_IN_FLIGHT)])

    return timed(all_at_once, session.repeats)


def time_calls_to_each(session: Session) -> list[float]:
    """One sample is one async call to each of the peers, until all are answered."""
    rpc_async = session.backend.rpc.rpc_async

    def one_to_each() -> None:
        for future in [rpc_async(peer, empty) for peer in session.peers]:
            future.wait()

    return timed(one_to_each, session.repeats)


FIGURES = (
    Figure(
        name="empty",
        title="empty call",
        measure=time_empty_calls,
        repeats=SMALL,
        goal=0.25,
        floors=("unix-spin", "unix-block"),
    ),
    Figure(
        name="echo-64B",
        title="echo 64 B",
        measure=partial(time_echoes, nbytes=64),
        repeats=SMALL,
        goal=0.25,
        floors=("unix-spin", "unix-block"),
    ),
    Figure(
        name="echo-1MiB",
        title="echo 1 MiB",
        measure=partial(time_echoes, nbytes=MIB),
        repeats=MIB_1,
        goal=0.30,
        floors=("memcpy-1MiB",),
    ),
    Figure(
        name="echo-16MiB-first",
        title="echo 16 MiB, the first 40",
        measure=partial(time_echoes, nbytes=16 * MIB),
        repeats=MIB_16_FIRST,
        unit="ms",
        floors=("memcpy-16MiB",),
    ),
    Figure(
        name="echo-16MiB",
        title="echo 16 MiB",
        measure=partial(time_echoes, nbytes=16 * MIB),
        repeats=MIB_16,
        unit="ms",
        goal=0.25,
        floors=("memcpy-16MiB",),
    ),
    Figure(
        name="echo-64MiB",
        title="echo 64 MiB",
        measure=partial(time_echoes, nbytes=64 * MIB),
        repeats=MIB_64,
        unit="ms",
        goal=0.25,
        floors=("memcpy-64MiB",),
    ),
    Figure(
        name="async-500",
        title=f"{CALLS_IN_FLIGHT} async calls in flight",
        measure=time_calls_in_flight,
        repeats=Repeats(count=10, warmup=2),
        unit="ms",
        goal=0.40,
    ),
    Figure(
        name="to-3",
        title="an async call to each of 3 workers",
        measure=time_calls_to_each,
        repeats=Repeats(count=500, warmup=100),
        setting=Setting(workers=4),
    ),
    Figure(
        name="to-7",
        title="an async call to each of 7 workers",
        measure=time_calls_to_each,
        repeats=Repeats(count=500, warmup=100),
        setting=Setting(workers=8),
    ),
    Figure(
        name="tcp-64B",
        title="TCP: echo 64 B",
        measure=partial(time_echoes, nbytes=64),
        repeats=SMALL,
        goal=0.35,
        setting=PAIR_OVER_TCP,
        floors=("tcp-spin", "tcp-block"),
    ),
    Figure(
        name="tcp-16MiB",
        title="TCP: echo 16 MiB",
        measure=partial(time_echoes, nbytes=16 * MIB),
        repeats=MIB_16,
        unit="ms",
        goal=0.50,
        setting=PAIR_OVER_TCP,
        floors=("tcp-spin-16MiB", "tcp-block-16MiB"),
    ),
    Figure(
        name="tcp-all-16MiB",
        title="TCP, tensors too: echo 16 MiB",
        measure=partial(time_echoes, nbytes=16 * MIB),
        repeats=MIB_16,
        unit="ms",
        setting=PAIR_ALL_OVER_TCP,
        floors=("tcp-spin-16MiB", "tcp-block-16MiB"),
    ),
    startup.FIGURE,
)

SUITE = Suite(
    name="calls",
    title="What a call costs: telegrad and torch.distributed.rpc",
    figures=FIGURES,
    floors=floors.FLOORS,
    sections=(memory.SECTION, profiling.SECTION),
    remarks=(
        "Driver and peer are two processes of one host, started afresh for each round of each backend, with one "
        "torch thread each. An echo is there and back; its result is freed outside the timed part.",
        'TCP: telegrad with `Options(transports=("tcp",))`, torch with `_transports=["uv"]`. That holds only torch\'s '
        "messages to TCP: on one host it moves the bytes of tensors by `cma`, one process reading the other's "
        'memory. "Tensors too" adds `_channels=["basic"]`, so that torch\'s tensors go over TCP as telegrad\'s do.',
        "A floor is no goal: the ping-pongs carry 64 bytes with no pickling, no threads and no Python objects, "
        "and memcpy is one copy, where an echo that leaves each side its own tensor needs two or more.",
    ),
)
