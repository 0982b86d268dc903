"""How the cost of a pass grows: with the length of a chain, the width of a fan, and the number of workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module

import torch

from benchmarks.backends import TORCH, Backend
from benchmarks.figures import ALONE, Growth, Repeats, Samples, Session
from benchmarks.passes import Passes
from benchmarks.ports import meet_at_free_port
from benchmarks.programs import (
    SMALL_BYTES,
    Program,
    chain,
    chain_with_skips,
    fan,
    leaf_of,
    one_to_each,
)
from benchmarks.sampling import timed_by_size

DOUBLINGS = tuple(1 << power for power in range(9))
"""1 to 256."""
SKIPS = (50, 800)
OTHERS = {"telegrad": (1, 3, 7, 15, 31, 63), "torch": (1, 3, 7)}
"""Workers beside the driver. torch's come by spawn, at more than a second each: 63 would take minutes a round."""
OTHERS_WHEN_QUICK = (1, 3)

Time = Callable[[Passes], float]


def time_calls(
    session: Session, *, program: Callable[[int], Program], sizes: Sequence[int], time: Time, at_least: int
) -> Samples:
    return _time_sizes(session, session.peers, program, sizes, time, at_least)


def time_workers(session: Session) -> Samples:
    """Starts the workers itself, as many as the largest size has; a smaller one leaves some idle."""
    sizes = OTHERS_WHEN_QUICK if session.quick else OTHERS[session.backend.name]
    with _group(session.backend, max(sizes)) as peers:
        return _time_sizes(session, peers, _one_to_each, sizes, Passes.whole_seconds, at_least=16)


def _time_sizes(
    session: Session,
    peers: Sequence[str],
    program: Callable[[int], Program],
    sizes: Sequence[int],
    time: Time,
    at_least: int,
) -> Samples:
    leaf = leaf_of(SMALL_BYTES)
    passes = {size: Passes(session.backend, peers, program(size), leaf) for size in sizes}
    for one in passes.values():
        one.check()
    times = {size: partial(time, one) for size, one in passes.items()}
    return timed_by_size(times, session.repeats, at_least)


def _chain(length: int) -> Program:
    return partial(chain, length=length)


def _chain_with_skips(length: int) -> Program:
    return partial(chain_with_skips, length=length)


def _fan(width: int) -> Program:
    return partial(fan, width=width)


def _one_to_each(others: int) -> Program:
    return partial(one_to_each, others=others)


# -- groups of many workers --------------------------------------------------------------------------


@contextmanager
def _group(backend: Backend, others: int) -> Iterator[tuple[str, ...]]:
    """This process and so many others as workers; the names of the others."""
    torch.set_num_threads(1)
    peers = tuple(f"peer{rank}" for rank in range(1, others + 1))
    with _torch_group(others + 1) if backend == TORCH else import_module("telegrad").LocalCluster(peers):
        yield peers


@contextmanager
def _torch_group(workers: int) -> Iterator[None]:
    meet_at_free_port()
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=_serve, args=(rank, workers), daemon=True) for rank in range(1, workers)]
    for other in others:
        other.start()
    TORCH.join("driver", rank=0, world_size=workers, transport=None)
    yield
    TORCH.rpc.shutdown()
    for other in others:
        other.join()


def _serve(rank: int, workers: int) -> None:
    torch.set_num_threads(1)
    TORCH.join(f"peer{rank}", rank=rank, world_size=workers, transport=None)
    TORCH.rpc.shutdown()


# -- the growths -------------------------------------------------------------------------------------


def _skips(name: str, title: str, time: Time) -> Growth:
    return Growth(
        name=name,
        title=title,
        measure=partial(time_calls, program=_chain_with_skips, sizes=SKIPS, time=time, at_least=200),
        repeats=Repeats(count=3, warmup=1),
        unit="ms",
        of="calls",
        base=SKIPS[0],
        goal=1.2,
    )


GROWTHS = (
    Growth(
        name="chains",
        title="chains of calls",
        measure=partial(time_calls, program=_chain, sizes=DOUBLINGS, time=Passes.whole_seconds, at_least=32),
        repeats=Repeats(count=6, warmup=1),
        unit="ms",
        of="calls",
        base=16,
    ),
    Growth(
        name="fans",
        title="fans of async calls",
        measure=partial(time_calls, program=_fan, sizes=DOUBLINGS, time=Passes.whole_seconds, at_least=32),
        repeats=Repeats(count=8, warmup=1),
        unit="ms",
        of="calls",
        base=16,
    ),
    Growth(
        name="workers",
        title="2 to 64 workers, an async call to each",
        measure=time_workers,
        repeats=Repeats(count=8, warmup=2),
        unit="ms",
        of="other workers",
        base=7,
        setting=ALONE,
        remark=f"torch's side goes to {max(OTHERS['torch'])} others: it starts each by spawn, and 63 would take "
        "minutes. The workers share the machine's cores.",
    ),
    _skips("skips", "a chain behind skip connections", Passes.whole_seconds),
    _skips("skips-backward", "a chain behind skip connections: backward alone", Passes.backward_seconds),
)
