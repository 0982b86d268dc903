"""Programs whose autograd graph crosses workers, as data, and what runs one worker's part of them.

A program is run twice, by the same code: by workers that call each other, and in one thread with plain
autograd (random_graphs.py). Only the `Wire` differs: how tensors get from one worker to another.

    Program ── bodies ── steps            what is to be done; made by graph_maker.py
    Place                                 one worker's part of a run: its leaves, what calls keep there
    Frame                                 one call of a body: its values, in the order in which they were made

A step names values by their place in the frame. What a call keeps on its worker has a number that is written
once, so a program gives the same result however its calls interleave.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIZE = 3  # of every vector
ROWS = 4  # of a table of vectors

# The devices that leaves lie on in turn, and that some operations move tensors between: "cpu,cuda". Empty: the CPU.
# "twin" is a device for tests, without a GPU: see twin.py.
DEVICES = tuple(filter(None, os.environ.get("TELEGRAD_GRAPH_DEVICES", "").split(",")))
if "twin" in DEVICES:
    import twin  # noqa: F401
# Whether each worker computes on a stream of its own.
STREAMS = bool(os.environ.get("TELEGRAD_GRAPH_STREAMS"))

# Whether a hook that is called with None counts. torch calls the hooks of all outputs of a node that runs, and the
# tensors of one message are the outputs of one node.
NOTE_EMPTY = True


# -- what a program is made of ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """A tensor that wants a gradient. `factor`: its hook multiplies the gradient; `post`: it has a
    post-accumulate hook; `on_node`: hooks on its AccumulateGrad node."""

    worker: int
    kind: str = "plain"  # "parameter", "module" (of a module with hooks), "table" (gradients may be sparse)
    factor: float | None = None
    post: bool = False
    on_node: bool = False
    frozen: str = ""  # "always", or "later": once the forward pass is over

    @property
    def has_hooks(self) -> bool:
        return self.factor is not None or self.post or self.on_node


@dataclass(frozen=True)
class UseLeaf:
    leaf: int

    def run(self, frame: Frame) -> None:
        frame.values.append(frame.place.leaves[self.leaf])


@dataclass(frozen=True)
class Take:
    """Brings a kept value into the frame."""

    slot: int

    def run(self, frame: Frame) -> None:
        frame.values.append(frame.place.kept[self.slot])


@dataclass(frozen=True)
class Keep:
    """Keeps a value on this worker, for later calls."""

    value: int
    slot: int

    def run(self, frame: Frame) -> None:
        assert self.slot not in frame.place.kept
        frame.place.kept[self.slot] = frame.values[self.value]


@dataclass(frozen=True)
class Op:
    """A local operation. `around`: the call whose argument and result it joins."""

    name: str
    inputs: tuple[int, ...]
    number: int = 0  # of a custom function
    around: int | None = None

    def run(self, frame: Frame) -> None:
        given = [frame.values[i] for i in self.inputs]
        if DEVICES:
            given = [x.to(given[0].device) for x in given]
        made = OPS[self.name](frame.place, self.number, *given)
        if DEVICES and self.name in MOVING:
            made = made.to(DEVICES[len(frame.values) % len(DEVICES)])
        frame.values.extend(made if isinstance(made, tuple) else (made,))
        if self.around is not None:
            frame.place.wire.on_skip(self.around, frame.values[-1])


@dataclass(frozen=True)
class Module:
    """Calls the module that a leaf belongs to."""

    leaf: int
    input: int

    def run(self, frame: Frame) -> None:
        given = _no_leaf(frame.values[self.input])
        frame.values.append(frame.place.modules[self.leaf](given.to(frame.place.leaves[self.leaf].device)))


@dataclass(frozen=True)
class Checkpoint:
    """Runs steps that are run again in the backward pass. Their first values are the inputs."""

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    reentrant: bool
    preserves: bool = False  # the state of torch's generator

    @property
    def calls(self) -> bool:
        return any(isinstance(step, Call) for step in self.steps)

    def run(self, frame: Frame) -> None:
        place = frame.place  # and not the frame, which has what is made here: a circle that nothing would end

        def inner(*tensors: Tensor) -> Tensor:
            within = Frame(place, list(tensors))
            for step in self.steps:
                step.run(within)
            return within.values[-1]

        given = [frame.values[i] for i in self.inputs]
        made = checkpoint(inner, *given, use_reentrant=self.reentrant, preserve_rng_state=self.preserves)
        frame.values.append(made)


@dataclass(frozen=True)
class Hook:
    """A hook on a tensor, which notes what it sees and may change it."""

    value: int
    number: int
    factor: float | None

    def run(self, frame: Frame) -> None:
        tensor = frame.values[self.value]
        if tensor.requires_grad:
            tensor.register_hook(frame.place.hook(f"hook {self.number}", self.factor))


@dataclass(frozen=True)
class Retain:
    value: int
    number: int

    def run(self, frame: Frame) -> None:
        tensor = frame.values[self.value]
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
            frame.place.retained[self.number] = tensor


@dataclass(frozen=True)
class Call:
    """A call of a body on a worker, maybe this one. An async one has its results at its Wait."""

    number: int
    to: int
    body: int
    inputs: tuple[int, ...]
    packing: str
    later: bool = False
    grad: bool = True

    def run(self, frame: Frame) -> None:
        given = [frame.values[i] for i in self.inputs]
        place = frame.place
        with torch.set_grad_enabled(self.grad):
            if self.later:
                frame.pending[self.number] = place.wire.call_async(place.worker, self, given)
            else:
                frame.values.extend(place.wire.call(place.worker, self, given))


@dataclass(frozen=True)
class Wait:
    """Waits for an async call."""

    call: int

    def run(self, frame: Frame) -> None:
        frame.values.extend(frame.pending.pop(self.call)())


@dataclass(frozen=True)
class Nest:
    """Enters one more context, which stays open until the program's end."""

    def run(self, frame: Frame) -> None:
        frame.place.wire.nest()


class Step(Protocol):
    """One of those above, of wide_programs.py or of graph_numbers.py."""

    def run(self, frame: Frame) -> None: ...


@dataclass(frozen=True)
class Body:
    """What a call runs: steps over its arguments. `packing` is of its results."""

    worker: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    packing: str = "tuple"


@dataclass(frozen=True)
class Pass:
    """A backward pass, from values kept on a worker. `seeds` are their gradients; None: a scalar's 1. Before it,
    grad() is called for the leaves `asks`; with `doubles` their gradients' squares are roots, too."""

    worker: int
    context: int  # 0 is the outermost one
    roots: tuple[int, ...]
    seeds: tuple[float | None, ...]
    retain: bool
    into: str
    asks: tuple[int, ...] = ()
    doubles: bool = False


@dataclass(frozen=True)
class Program:
    workers: int
    leaves: tuple[Leaf, ...]
    bodies: tuple[Body, ...]  # the first is the program's own, on worker 0
    passes: tuple[Pass, ...]
    anomaly: bool = False
    seed: int | None = None  # of the random numbers that it draws

    def __str__(self) -> str:
        lines = [f"program over {self.workers} workers{', anomaly mode' if self.anomaly else ''}, seed {self.seed}"]
        lines += [f"  leaf {i}: {leaf}" for i, leaf in enumerate(self.leaves)]
        for i, body in enumerate(self.bodies):
            lines.append(f"  body {i} on worker {body.worker}:")
            lines += [f"    {step}" for step in body.steps]
            lines.append(f"    gives {body.outputs} as {body.packing}")
        return "\n".join(lines + [f"  {each}" for each in self.passes])


def steps_of(program: Program) -> list[Step]:
    """All steps, those inside checkpoints too."""
    found = [step for body in program.bodies for step in body.steps]
    return found + [inner for step in found if isinstance(step, Checkpoint) for inner in step.steps]


# -- local operations -------------------------------------------------------------------------------------


class Custom(torch.autograd.Function):
    """sin(x) * y and x + y, with notes of each call. In `style`: "x" or "y" gets no gradient; "u":
    gradients that are undefined stay so; "!": fails."""

    @staticmethod
    def forward(ctx: Any, place: Place, number: int, style: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads("u" not in style)
        ctx.place, ctx.number, ctx.style = place, number, style
        place.note(f"function {number} forward")
        return torch.sin(x) * y, x + y

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, two: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        ctx.place.note(f"function {ctx.number} backward", one, two)
        if "!" in ctx.style:
            raise ValueError(f"function {ctx.number} fails")
        zero = torch.zeros_like(x + y)
        one = zero if one is None else one
        two = zero if two is None else two
        to_x = None if "x" in ctx.style else _as(one * torch.cos(x) * y + two, x)
        to_y = None if "y" in ctx.style else _as(one * torch.sin(x) + two, y)
        return None, None, None, to_x, to_y


def _as(gradient: Tensor, of: Tensor) -> Tensor:
    return gradient if gradient.shape == of.shape else gradient.sum()


def _custom(style: str) -> Callable[..., Any]:
    return lambda place, number, x, y: Custom.apply(place, number, style, _no_leaf(x), _no_leaf(y))


def _no_leaf(x: Tensor) -> Tensor:
    """torch deadlocks where two threads use a leaf for the first time, and one of them in a Function of Python's: see
    Note [leaves and threads] in nodes.py."""
    return x.view_as(x) if x.is_leaf and x.requires_grad else x


ROW_NUMBERS = torch.tensor([0, 2, 2])

# Values stay small: a product has a sine as one of its factors.
OPS: dict[str, Callable[..., Any]] = {
    "sin": lambda place, number, x: torch.sin(x),
    "tanh": lambda place, number, x: torch.tanh(x),
    "scale": lambda place, number, x: x * 1.25,
    "flip": lambda place, number, x: x.flip(0),
    "sum": lambda place, number, x: x.sum(),
    "clone": lambda place, number, x: x.clone(),
    "view": lambda place, number, x: x.view(-1),
    "detach": lambda place, number, x: x.detach(),
    "unbind": lambda place, number, x: torch.unbind(x),
    "sort": lambda place, number, x: torch.sort(x).values,
    "change": lambda place, number, x: x.mul_(0.75),
    "add": lambda place, number, x, y: x + y,
    "sub": lambda place, number, x, y: x - 0.5 * y,
    "mul": lambda place, number, x, y: torch.sin(x) * y,
    "stack": lambda place, number, *xs: torch.stack([x.sum() for x in xs]).sin(),
    "total": lambda place, number, *xs: torch.stack([x.sum() for x in xs]).sum(),
    "sparse": lambda place, number, t: nn.functional.embedding(ROW_NUMBERS.to(t.device), t, sparse=True).sum(0),
    "rows": lambda place, number, t: t.sin().sum(0),
    "custom": _custom(""),
    "custom-x": _custom("x"),
    "custom-y": _custom("y"),
    "custom-u": _custom("u"),
    "custom-uy": _custom("uy"),
    "custom-!": _custom("!"),
}


MOVING = ("sin", "scale", "add", "sub", "sum")  # with devices, the result goes to the next one


class Scaled(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


# -- one worker's part of a run ---------------------------------------------------------------------------


class Wire(Protocol):
    """How tensors get from one worker to another."""

    def call(self, caller: int, call: Call, tensors: list[Tensor]) -> Sequence[Tensor]: ...

    def call_async(self, caller: int, call: Call, tensors: list[Tensor]) -> Callable[[], Sequence[Tensor]]: ...

    def nest(self) -> None: ...

    def on_skip(self, call: int, value: Tensor) -> None: ...


def mark_used(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_cpu:
            tensor.record_stream(torch.accelerator.current_stream())


class Place:
    """One worker's part of a run. `generator`: of the reference; a worker draws from torch's own."""

    def __init__(self, program: Program, worker: int, wire: Wire, generator: torch.Generator | None = None) -> None:
        self.program = program
        self.worker = worker
        self.wire = wire
        self.leaves: dict[int, Tensor] = {}
        self.modules: dict[int, Scaled] = {}
        self.generator = generator
        self.drawn: dict[int, Tensor] = {}  # from it, by the number of the draw
        self.own_stream: Any = torch.Stream(DEVICES[-1]) if STREAMS else None
        self.kept: dict[int, Tensor] = {}
        self.retained: dict[int, Tensor] = {}
        self.nodes: list[Any] = []  # of leaves: who lets go of them loses their hooks
        self.hooked: set[str] = set()  # labels of hooks on what was received
        self.seen: dict[str, list[tuple[Tensor | None, ...]]] = {}  # what hooks and functions saw, by their label
        for number, leaf in enumerate(program.leaves):
            if leaf.worker == worker:
                self._make_leaf(number, leaf)

    def _make_leaf(self, number: int, leaf: Leaf) -> None:
        count = SIZE * ROWS if leaf.kind == "table" else SIZE
        value = torch.tensor([math.sin(1 + number + 2.3 * i) for i in range(count)], dtype=torch.float64)
        if leaf.kind == "table":
            value = value.view(ROWS, SIZE)
        if DEVICES and not ("twin" in DEVICES and leaf.kind == "table"):  # which has no sparse tensors
            value = value.to(DEVICES[number % len(DEVICES)])
        if leaf.kind == "module":
            self.modules[number] = module = Scaled(value)
            module.register_full_backward_hook(lambda _, inner, outer: self.note(f"module {number}", *inner, *outer))
            module.register_full_backward_pre_hook(lambda _, outer: self.note(f"module {number} before", *outer))
            tensor: Tensor = module.weight
        elif leaf.kind == "parameter":
            tensor = nn.Parameter(value)
        else:
            tensor = value.requires_grad_()
        if leaf.frozen == "always":
            tensor.requires_grad_(False)
        if leaf.on_node:
            self._watch_node(number, tensor)
        if leaf.factor is not None:
            tensor.register_hook(self.hook(f"leaf {number}", leaf.factor))
        if leaf.post:
            tensor.register_post_accumulate_grad_hook(lambda leaf: self.note(f"leaf {number} after", leaf.grad))
        self.leaves[number] = tensor

    def _watch_node(self, number: int, leaf: Tensor) -> None:
        def before(gradients: Sequence[Tensor | None]) -> Any:
            self.note(f"leaf {number} before", *gradients)
            return None if number % 2 or gradients[0] is None else (gradients[0] * 1.5,)

        node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
        node.register_prehook(before)
        node.register_hook(lambda inputs, outputs: self.note(f"leaf {number} behind"))
        self.nodes.append(node)

    def freeze(self) -> None:
        """The forward pass is over."""
        for number, leaf in self.leaves.items():
            if self.program.leaves[number].frozen:
                leaf.requires_grad_(False)

    def note(self, label: str, *tensors: Tensor | None) -> None:
        seen = tuple(None if t is None else t.detach().clone() for t in tensors)
        self.seen.setdefault(label, []).append(seen)

    def draw(self, number: int, like: Tensor) -> Tensor:
        """Draws random numbers. The reference gives a checkpoint that runs again those that it had before."""
        if self.generator is None:
            return torch.rand(like.shape, dtype=like.dtype)
        if number not in self.drawn:
            self.drawn[number] = torch.rand(like.shape, dtype=like.dtype, generator=self.generator)
        return self.drawn[number]

    def hook(self, label: str, factor: float | None) -> Callable[[Tensor | None], Tensor | None]:
        def see(gradient: Tensor | None) -> Tensor | None:
            if gradient is not None or NOTE_EMPTY:
                self.note(label, gradient)
            return None if factor is None or gradient is None else gradient * factor

        return see

    def run(self, body: int, tensors: list[Tensor]) -> list[Tensor]:
        """Runs a body, with these arguments."""
        chosen = self.program.bodies[body]
        assert chosen.worker == self.worker
        with self.stream(tensors):
            frame = Frame(self, tensors)
            for step in chosen.steps:
                step.run(frame)
            assert not frame.pending
            outputs = [frame.values[i] for i in chosen.outputs]
        if STREAMS:
            mark_used(outputs)
        return outputs

    @contextlib.contextmanager
    def stream(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A stream of its own, where that is asked for. What is outside waits for it, and it for what is outside."""
        if not STREAMS:
            yield
            return
        outside = torch.accelerator.current_stream()
        self.own_stream.wait_stream(outside)
        torch.accelerator.set_stream(self.own_stream)
        try:
            mark_used(tensors)
            yield
        finally:
            torch.accelerator.set_stream(outside)
        outside.wait_stream(self.own_stream)

    def clear(self) -> None:
        """Lets go of the graph. Hooks and functions know their place, and it knows tensors whose graph has them:
        nothing else would end that circle."""
        for held in (self.leaves, self.modules, self.kept, self.retained, self.nodes):
            held.clear()

    def roots(self, each: Pass) -> tuple[list[Tensor], list[Tensor | None]]:
        roots = [self.kept[slot] for slot in each.roots]
        seeds = [
            None if s is None else torch.full_like(r, s, requires_grad=False)
            for r, s in zip(roots, each.seeds, strict=True)
        ]
        return roots, seeds


@dataclass
class Frame:
    """One call of a body."""

    place: Place
    values: list[Tensor]

    def __post_init__(self) -> None:
        self.pending: dict[int, Callable[[], Sequence[Tensor]]] = {}


# -- how a message holds its tensors ----------------------------------------------------------------------


@dataclass
class Parcel:
    first: Tensor | None
    rest: list[Tensor]


PACKINGS = ("tuple", "list", "dict", "parcel")


def pack(tensors: list[Tensor], packing: str) -> Any:
    if packing == "tuple":
        return tuple(tensors)
    if packing == "list":
        return [list(tensors), len(tensors)]
    if packing == "dict":
        return {str(i): t for i, t in enumerate(tensors)}
    return Parcel(tensors[0] if tensors else None, tensors[1:])


def unpack(packed: Any) -> list[Tensor]:
    if isinstance(packed, tuple):
        return list(packed)
    if isinstance(packed, list):
        return list(packed[0])
    if isinstance(packed, dict):
        return list(packed.values())
    first, rest = (getattr(packed, each.name) for each in fields(packed))
    return [] if first is None else [first, *rest]
