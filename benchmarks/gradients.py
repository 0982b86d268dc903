"""The suite `gradients`: what a forward and a backward pass over several workers cost, and how that grows.

Figures run in the driver, with one peer, or as many as the title says, in other processes of the same host.
`programs.py` has the programs, `growth.py` the ones of growing size, `planning.py` what telegrad's walks over the local
graph cost.
"""

from __future__ import annotations

from functools import partial

from benchmarks import growth, planning, profiling
from benchmarks.callee import MIB
from benchmarks.figures import PAIR, Figure, Repeats, Session, Setting, Suite
from benchmarks.passes import Passes
from benchmarks.programs import (
    SMALL_BYTES,
    Program,
    chain,
    fan,
    leaf_of,
    one_to_each,
    remote_graph,
    there_and_back,
)
from benchmarks.sampling import timed, timed_by_itself

CHAINED = 10
AT_ONCE = 32
LARGE_BYTES = 16 * MIB
NODES = 1000


def time_whole(session: Session, *, program: Program, nbytes: int = SMALL_BYTES) -> list[float]:
    """One sample: from entering the context until it is left."""
    return timed(_passes(session, program, nbytes).whole, session.repeats)


def time_backward(session: Session, *, program: Program, nbytes: int = SMALL_BYTES) -> list[float]:
    """One sample: `backward` alone."""
    return timed_by_itself(_passes(session, program, nbytes).backward_seconds, session.repeats)


def _passes(session: Session, program: Program, nbytes: int) -> Passes:
    passes = Passes(session.backend, session.peers, program, leaf_of(nbytes))
    passes.check()
    return passes


def _figures(
    name: str,
    title: str,
    program: Program,
    repeats: Repeats,
    *,
    short: str,
    goal: float,
    unit: str = "ms",
    nbytes: int = SMALL_BYTES,
    setting: Setting = PAIR,
) -> tuple[Figure, Figure]:
    """The whole program, which has the goal, and its backward alone, with half as many samples."""
    half = Repeats(repeats.count // 2, repeats.warmup // 2)
    whole = partial(time_whole, program=program, nbytes=nbytes)
    backward = partial(time_backward, program=program, nbytes=nbytes)
    return (
        Figure(name=name, title=title, measure=whole, repeats=repeats, unit=unit, goal=goal, setting=setting),
        Figure(
            name=f"{name}-backward",
            title=f"{short}: backward alone",
            measure=backward,
            repeats=half,
            unit=unit,
            setting=setting,
        ),
    )


FIGURES = (
    *_figures(
        "one-call",
        "context, one call, backward, gradients",
        partial(chain, length=1),
        Repeats(count=500, warmup=100),
        short="one call",
        goal=0.25,
        unit="µs",
    ),
    *_figures(
        "chain-10",
        f"{CHAINED} chained calls, backward",
        partial(chain, length=CHAINED),
        Repeats(count=100, warmup=10),
        short=f"{CHAINED} chained calls",
        goal=0.25,
    ),
    *_figures(
        "async-32",
        f"{AT_ONCE} async calls in one context, backward",
        partial(fan, width=AT_ONCE),
        Repeats(count=60, warmup=10),
        short=f"{AT_ONCE} async calls",
        goal=0.35,
    ),
    *_figures(
        "to-3",
        "one async call to each of 3 workers, backward",
        partial(one_to_each, others=3),
        Repeats(count=200, warmup=40),
        short="3 workers",
        goal=0.85,
        setting=Setting(workers=4),
    ),
    *_figures(
        "to-7",
        "one async call to each of 7 workers, backward",
        partial(one_to_each, others=7),
        Repeats(count=200, warmup=40),
        short="7 workers",
        goal=1.0,
        setting=Setting(workers=8),
    ),
    *_figures(
        "call-16MiB",
        "one call with 16 MiB each way, backward",
        there_and_back,
        Repeats(count=40, warmup=20),
        short="16 MiB each way",
        goal=0.25,
        nbytes=LARGE_BYTES,
    ),
    *_figures(
        "graph-1000",
        f"one remote graph of {NODES:,} small nodes, backward",
        partial(remote_graph, nodes=NODES),
        Repeats(count=60, warmup=10),
        short=f"{NODES:,} nodes",
        goal=1.0,
    ),
)


def one_pass(session: Session) -> dict[str, profiling.Call]:
    """What the section "Where the time goes" profiles."""
    return {"Context, one call, backward, gradients": _passes(session, partial(chain, length=1), SMALL_BYTES).whole}


SUITE = Suite(
    name="gradients",
    title="What gradients across workers cost: telegrad and torch.distributed.autograd",
    figures=FIGURES,
    growths=growth.GROWTHS,
    sections=(
        planning.SECTION,
        profiling.section(one_pass, Repeats(count=1000, warmup=100)),
    ),
    remarks=(
        "Driver and peer are two processes of one host, started afresh for each round of each backend, with one "
        "torch thread each. Both sides run the same program, whose gradients are checked against local autograd's "
        "before it is timed.",
        "A sample is the whole program: context, calls, backward, gradients, and the end of the context; the "
        '"backward alone" is timed in passes of its own. Tensors are of 64 bytes unless the size is given.',
        "16 MiB go to the peer and come back in the forward pass, and their gradients the same way in the backward "
        "pass: 64 MiB in all.",
    ),
)
