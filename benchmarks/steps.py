"""The suite `steps`: what training models of many parameters costs, and what one leaf or one tensor more costs.

Beside torch, which trains in contexts, telegrad does so in contexts and plainly; beside both stands one process.

    trainers.py         training steps, checked against one process
    step_models.py      the models                    stages.py    where their parts live
    optimizer_steps.py  the optimizer alone
    leaves.py           leaves of a remote module     messages.py  tensors of a message
    cputime.py          processor time of all processes
    by_hand.py          a floor: the first of the models by hand, over sockets
"""

from __future__ import annotations

from functools import partial

from benchmarks import leaves, messages, optimizer_steps, profiling
from benchmarks.by_hand import time_by_hand
from benchmarks.figures import ALONE, Figure, Repeats, Session, Setting, Suite
from benchmarks.passes import WAYS
from benchmarks.step_models import Build, experts, gpt2, lstm, transformer
from benchmarks.trainers import CPU_BATCH, cpu_of_step, time_local_step, time_part, time_step, trainer

STEPS = Repeats(count=80, warmup=10)
BATCHES = Repeats(count=8, warmup=10)
"""Of CPU_BATCH steps each."""
PARTS = ("forward", "backward", "optimizer")
ON_2, ON_3 = Setting(workers=3), Setting(workers=4)


def _training(
    name: str,
    title: str,
    build: Build,
    setting: Setting,
    *,
    goal: float,
    cpu_goal: float | None = None,
    floors: tuple[str, ...] = (),
) -> tuple[Figure, ...]:
    """A step of a model, its wall time and the processor time of all processes, each way."""
    found = []
    for end, way, plain in WAYS:
        found.append(
            Figure(
                name=name + end,
                title=f"{title}: {way}",
                measure=partial(time_step, build=build, plain=plain),
                repeats=STEPS,
                unit="ms",
                goal=goal,
                setting=setting,
                floors=(f"local-{name}", *floors),
            )
        )
        found.append(
            Figure(
                name=f"{name}{end}-cpu",
                title=f"{title}: {way}, CPU of all",
                measure=partial(cpu_of_step, build=build, plain=plain),
                repeats=BATCHES,
                unit="ms",
                goal=cpu_goal,
                setting=setting,
            )
        )
    return tuple(found)


def _parts(name: str, title: str, build: Build, setting: Setting) -> tuple[Figure, ...]:
    return tuple(
        Figure(
            name=f"{name}-{what}{end}",
            title=f"{title}: {way}, {what} alone",
            measure=partial(time_part, build=build, plain=plain, part=part),
            repeats=STEPS,
            unit="ms",
            setting=setting,
        )
        for part, what in enumerate(PARTS)
        for end, way, plain in WAYS
    )


def _local_step(name: str, title: str, build: Build) -> Figure:
    measure = partial(time_local_step, build=build)
    return Figure(name=f"local-{name}", title=title, measure=measure, repeats=STEPS, unit="ms", setting=ALONE)


MODELS: tuple[tuple[str, str, Build], ...] = (
    ("transformer", "3 transformer layers on 3 workers", transformer),
    ("gpt2", "GPT-2 of 4 layers on 3 workers", gpt2),
    ("lstm", "LSTM on 2 workers", lstm),
    ("experts", "8 experts on 3 workers", experts),
)

BY_HAND = Figure(
    name="by-hand-transformer",
    title="by hand, over sockets, 3 transformer layers on 3 workers",
    measure=time_by_hand,
    repeats=STEPS,
    unit="ms",
    setting=ALONE,
)

FIGURES = (
    *_training(*MODELS[0], ON_3, goal=0.65, cpu_goal=0.7, floors=(BY_HAND.name,)),
    *_training(*MODELS[1], ON_3, goal=0.7),
    *_training(*MODELS[2], ON_2, goal=0.7),
    *_training(*MODELS[3], ON_3, goal=0.7),
    *optimizer_steps.FIGURES,
    *_parts(*MODELS[0], ON_3),
)

FLOORS = (
    *(_local_step(name, f"one process, {title}", build) for name, title, build in MODELS),
    BY_HAND,
    *optimizer_steps.FLOORS,
)


def profiled_step(session: Session) -> dict[str, profiling.Call]:
    return {"A training step of the transformer, plain": trainer(session, transformer, plain=True).step}


SUITE = Suite(
    name="steps",
    title="Training steps of models with many parameters: telegrad and torch.distributed",
    figures=FIGURES,
    growths=(*leaves.GROWTHS, *messages.GROWTHS),
    floors=FLOORS,
    sections=(profiling.section(profiled_step, Repeats(count=200, warmup=20), setting=ON_3),),
    remarks=(
        "All processes run on one host, started afresh for each round of each backend, with one torch thread each; "
        "the driver has the data and the loss.",
        "torch trains in contexts, telegrad both ways, as each row says. Plain: `loss.backward()`, `optimizer.step()` "
        "and `optimizer.zero_grad()`, the modules as telegrad.nn.RemoteModule. In contexts both sides run the same "
        "program, with RRefs to modules and parameters. The optimizer is AdamW.",
        "Before a model is measured it is trained for four steps, and its losses and parameters are compared with "
        "those of one process. Gradients of leaves and of tensors in a message are compared in the same way.",
        "All models are 64 wide. Transformer: a nn.TransformerEncoderLayer (12 parameters) on each worker, 4 x 32 "
        "tokens. GPT-2: 2, 1 and 1 layers on the workers; the driver has the embedding, of which the head shares the "
        "weights; 4 x 32 tokens. LSTM: a layer on each worker, the embedding with the first and the decoder with the "
        "second; 4 texts of 32 words in 4 pieces, with which both states travel. Experts: a router at the driver "
        "sends each of 128 tokens to two of eight, spread over the workers, by async calls.",
        "By hand: the transformer's step written for this one model, over a socket for each worker, with no calls, "
        "names or threads, and no fault handled (benchmarks/by_hand.py). Beside one process it shows what waking "
        "processes and moving bytes cost.",
        f"CPU of all: user and system time of all workers, from before the first of a batch of {CPU_BATCH} steps until "
        "after the last, for each step; what spins or is done later counts.",
        "The optimizer alone is SGD, over tensors that have their gradients. They, leaves, and tensors of a message "
        f"have {leaves.SIZE} elements.",
    ),
)
