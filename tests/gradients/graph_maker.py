"""Makes random programs for graph_programs.py.

It runs a program in thought while it makes it: which value wants a gradient, which is a scalar, and what an async
call may see of what others keep. Whatever it makes is a valid program. Its choices come from one `Random`, so a
seed makes a program again, and hypothesis can shrink one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from graph_numbers import with_random_numbers
from graph_programs import (
    PACKINGS,
    Body,
    Call,
    Checkpoint,
    Hook,
    Keep,
    Leaf,
    Module,
    Nest,
    Op,
    Pass,
    Program,
    Retain,
    Step,
    Take,
    UseLeaf,
    Wait,
)

UNARY = ("sin", "tanh", "scale", "flip", "sum", "clone", "view", "unbind", "sort")
BINARY = ("add", "sub", "mul")
CUSTOM = ("custom", "custom", "custom-x", "custom-y", "custom-u", "custom-uy")
MOST_WORKERS = 6


@dataclass
class Value:
    """What is known of a value before the program runs."""

    grad: bool
    scalar: bool
    changeable: bool = False  # nothing depends on its content: it may be changed in place
    leaf: bool = False
    shared: bool = False  # several names for one received tensor: which hooks it has would depend on that
    large: bool = False  # of another shape than others: no operation takes it together with them


@dataclass
class Made:
    """A call that was made in a frame, with the places of its arguments and results."""

    number: int
    inputs: tuple[int, ...]
    results: list[Value]
    outputs: tuple[int, ...] = ()  # none before it was waited for
    kept: dict[int, list[tuple[int, Value]]] = field(default_factory=dict)  # what an async one keeps


Kept = dict[int, list[tuple[int, Value]]]  # worker -> what is kept there, as far as a frame may know


class Draft:
    """A frame that is being written."""

    def __init__(self, worker: int, values: list[Value], kept: Kept, depth: int, grad: bool = True) -> None:
        self.worker = worker
        self.values = values
        self.kept = kept
        self.depth = depth
        self.grad = grad
        self.steps: list[Step] = []
        self.calls: list[Made] = []
        self.waiting: list[Made] = []

    def add(self, step: Step, *values: Value) -> tuple[int, ...]:
        """Writes a step, and gives the places of what it makes."""
        self.steps.append(step)
        start = len(self.values)
        if not self.grad:
            values = tuple(Value(v.leaf and v.grad, v.scalar, leaf=v.leaf, large=v.large) for v in values)
        self.values.extend(values)
        return tuple(range(start, len(self.values)))


class Maker:
    MODULE_AND_CHECKPOINT = (2, 1)  # how often they are chosen

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.failing = self.chance(0.02)  # a function raises in the backward pass
        self.workers = rng.randint(2, MOST_WORKERS)
        self.left = rng.randint(4, 13)  # steps, counted over all bodies
        self.leaves: list[Leaf] = []
        self.bodies: list[Body | None] = []
        self.numbers = 0
        self.contexts = 1
        # In anomaly mode torch itself hangs when two threads are the first to use a leaf at the same time: a node that
        # is made then runs Python code, with the leaf's mutex held. So there are no async calls.
        self.anomaly = not self.failing and self.chance(0.03)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    # -- the whole ----------------------------------------------------------------------------------------

    def program(self) -> Program:
        self.bodies.append(None)
        draft = Draft(0, [], {w: [] for w in range(self.workers)}, 0)
        self.use_leaf(draft)
        nests = self.chance(0.08)
        while self.left > 0:
            if nests and self.chance(0.3):
                nests = False
                self.contexts += 1
                draft.add(Nest())
            self.step(draft)
        while draft.waiting:
            self.wait(draft)
        if self.failing:
            self.fail(draft)
        passes = self.passes(draft)
        self.bodies[0] = Body(0, tuple(draft.steps), ())
        bodies = tuple(body for body in self.bodies if body is not None)
        return Program(self.workers, tuple(self.leaves), bodies, passes, self.anomaly)

    def passes(self, draft: Draft) -> tuple[Pass, ...]:
        into = "grad" if self.chance(0.1) else "context"
        count = 2 if self.chance(0.12) else 1
        made = []
        for i in range(count):
            worker, roots = 0, [self.root(draft) for _ in range(self.rng.choice((1, 1, 1, 2, 3)))]
            elsewhere = [w for w in range(1, self.workers) if self.kept_with_grad(draft, w)]
            if elsewhere and not self.failing and self.chance(0.15):
                worker = self.rng.choice(elsewhere)
                there = self.kept_with_grad(draft, worker)
                roots = self.rng.sample(there, self.rng.randint(1, min(2, len(there))))
            seeds = tuple(None if v.scalar and self.chance(0.7) else 0.5 + 0.25 * i for i, (_, v) in enumerate(roots))
            context = self.rng.randrange(self.contexts) if worker == 0 else self.contexts - 1
            retain = i + 1 < count or self.chance(0.1)
            made.append(Pass(worker, context, tuple(slot for slot, _ in roots), seeds, retain, into))
        return tuple(made)

    def kept_with_grad(self, draft: Draft, worker: int) -> list[tuple[int, Value]]:
        return [(slot, v) for slot, v in draft.kept[worker] if v.grad and not v.leaf]

    def root(self, draft: Draft) -> tuple[int, Value]:
        """A value to start from, kept on worker 0: one that there is, or a sum of many."""
        able = [i for i, v in enumerate(draft.values) if v.grad and not v.leaf]
        if able and not self.failing and self.chance(0.3):
            chosen = able[-1 - min(self.rng.randrange(len(able)), 2)] if self.chance(0.5) else self.rng.choice(able)
        else:
            with_grad = [i for i, v in enumerate(draft.values) if v.grad]
            count = self.rng.randint(1, min(5, len(with_grad)))
            chosen_from = set(self.rng.sample(with_grad, count)) | ({able[-1]} if able else set())
            (chosen,) = draft.add(Op("total", tuple(sorted(chosen_from))), Value(True, True))
        return self.keep_value(draft, chosen)

    def fail(self, draft: Draft) -> None:
        """A function that fails in the backward pass, here or far away, on the way to every root."""
        if self.chance(0.5):
            self.add_failing(draft)
        else:
            self.left += 2
            self.call(draft, failing=True)

    def add_failing(self, draft: Draft) -> None:
        i = self.any(draft, grad=True)
        (x,) = self.use(draft, i)
        draft.add(Op("custom-!", (i, i), self.number()), Value(True, x.scalar), Value(True, x.scalar))

    # -- one step -----------------------------------------------------------------------------------------

    def step(self, draft: Draft) -> None:
        self.left -= 1
        choices: list[tuple[int, Callable[[Draft], None]]] = [
            (7, self.op),
            (2, self.use_leaf),
            (2, self.custom),
            (2, self.hook),
            (1, self.retain),
            (1, self.change),
        ]
        if draft.grad:
            if draft.depth < 3:
                choices.append((12 if draft.depth == 0 else 4, self.call))
            module, checkpoint = self.MODULE_AND_CHECKPOINT
            choices += [(module, self.module), (checkpoint, self.checkpoint), (2 if draft.depth else 1, self.keep)]
            if draft.kept[draft.worker]:
                choices.append((4, self.take))
            if any(self.can_skip(draft, made) for made in draft.calls):
                choices.append((5, self.skip))
            if draft.waiting:
                choices.append((4, self.wait))
        self.rng.choices([c for _, c in choices], [w for w, _ in choices])[0](draft)

    def any(self, draft: Draft, *, grad: bool = False) -> int:
        """The place of a value, a late one rather than an early one."""
        able = [
            i
            for i, v in enumerate(draft.values)
            if not self.is_table(draft, i) and not v.large and (v.grad or not grad)
        ]
        if not able:
            self.use_leaf(draft)
            return len(draft.values) - 1
        return able[-1 - min(self.rng.randrange(len(able)), self.rng.randrange(len(able)))]

    def is_table(self, draft: Draft, i: int) -> bool:
        return draft.values[i].leaf and draft.values[i].scalar  # no leaf is a scalar: this marks tables

    def use(self, draft: Draft, *places: int) -> list[Value]:
        for i in places:
            draft.values[i].changeable = False
        return [draft.values[i] for i in places]

    def op(self, draft: Draft) -> None:
        if self.chance(0.35):
            self.unary(draft, self.any(draft))
        elif self.chance(0.1):
            inputs = tuple(self.any(draft) for _ in range(3))
            values = self.use(draft, *inputs)
            draft.add(Op("stack", inputs), Value(any(v.grad for v in values), False))
        else:
            self.binary(draft, self.any(draft), self.any(draft))

    def unary(self, draft: Draft, i: int) -> None:
        (x,) = self.use(draft, i)
        name = "detach" if self.chance(0.06) else self.rng.choice(UNARY)
        if x.scalar and name in ("flip", "unbind", "sort", "view"):
            name = "sin"
        if name == "view":
            draft.add(Op("view", (i,)), Value(x.grad, False))
        elif name == "unbind":
            draft.add(Op("unbind", (i,)), *(Value(x.grad, True) for _ in range(3)))
        else:
            scalar = x.scalar or name == "sum"
            changeable = name in ("scale", "clone")
            draft.add(Op(name, (i,)), Value(x.grad and name != "detach", scalar, changeable))

    def binary(self, draft: Draft, i: int, j: int, around: int | None = None) -> None:
        x, y = self.use(draft, i, j)
        name = self.rng.choice(BINARY)
        value = Value(x.grad or y.grad, x.scalar and y.scalar, name != "mul")
        draft.add(Op(name, (i, j), around=around), value)

    def custom(self, draft: Draft) -> None:
        i, j = self.any(draft), self.any(draft)
        x, y = self.use(draft, i, j)
        scalar = x.scalar and y.scalar
        grad = x.grad or y.grad
        draft.add(Op(self.rng.choice(CUSTOM), (i, j), self.number()), Value(grad, scalar), Value(grad, scalar))

    def change(self, draft: Draft) -> None:
        able = [i for i, v in enumerate(draft.values) if v.changeable]
        if not able or not draft.grad:
            return self.op(draft)
        self.change_value(draft, self.rng.choice(able))

    def change_value(self, draft: Draft, i: int) -> None:
        (x,) = self.use(draft, i)
        draft.add(Op("change", (i,)), Value(x.grad, x.scalar, shared=True, large=x.large))

    def use_leaf(self, draft: Draft) -> None:
        here = [n for n, leaf in enumerate(self.leaves) if leaf.worker == draft.worker]
        if here and (len(here) > 2 or self.chance(0.7)):
            number = self.rng.choice(here)
        else:
            number = self.new_leaf(draft.worker)
        self.bring(draft, number)

    def bring(self, draft: Draft, number: int) -> None:
        """A leaf, and of a table something that is made of it."""
        if self.leaves[number].kind != "table":
            draft.add(UseLeaf(number), Value(not self.leaves[number].frozen, False, leaf=True))
        else:
            (table,) = draft.add(UseLeaf(number), Value(True, True, leaf=True))
            draft.add(Op(self.rng.choice(("sparse", "rows")), (table,)), Value(True, False))

    def new_leaf(self, worker: int, kind: str = "") -> int:
        kind = kind or self.rng.choices(("plain", "parameter", "table"), (5, 3, 1))[0]
        factor = self.rng.choice((1.0, 2.0)) if self.chance(0.15) else None
        self.leaves.append(Leaf(worker, kind, factor, post=self.chance(0.1)))
        return len(self.leaves) - 1

    def module(self, draft: Draft) -> None:
        here = [n for n, leaf in enumerate(self.leaves) if leaf.worker == draft.worker and leaf.kind == "module"]
        number = self.rng.choice(here) if here and self.chance(0.5) else self.new_leaf(draft.worker, "module")
        i = self.any(draft, grad=True)
        self.use(draft, i)
        draft.add(Module(number, i), Value(True, False))

    def checkpoint(self, draft: Draft) -> None:
        reentrant = self.chance(0.5)
        inputs = (self.any(draft, grad=True), self.any(draft))
        values = self.use(draft, *inputs)
        within = Draft(draft.worker, [Value(v.grad, v.scalar) for v in values], {}, 9)
        if self.chance(0.7):
            self.leaf_within(within, reentrant)
        self.binary(within, self.any(within), self.any(within))
        if self.chance(0.3):
            self.custom(within)
        else:
            self.op(within)
        value = within.values[-1]
        if not value.grad:  # what needs no gradient would come out of a reentrant one as if it did
            self.binary(within, 0, len(within.values) - 1)
            value = within.values[-1]
        draft.add(Checkpoint(inputs, tuple(within.steps), reentrant), Value(True, value.scalar))

    def leaf_within(self, within: Draft, reentrant: bool) -> None:
        """A leaf inside a checkpoint. A reentrant one is differentiated on its own, and a leaf's hooks then run
        once more; on how often in all, the order of the engine decides. So it gets a leaf that has none."""
        if not reentrant:
            return self.use_leaf(within)
        self.leaves.append(Leaf(within.worker))
        self.bring(within, len(self.leaves) - 1)

    # -- hooks --------------------------------------------------------------------------------------------

    def hooked(self, draft: Draft) -> int | None:
        able = [i for i, v in enumerate(draft.values) if v.grad and not v.leaf and not v.shared]
        return self.rng.choice(able) if able else None

    def hook(self, draft: Draft) -> None:
        i = self.hooked(draft)
        if i is None:
            return self.op(draft)
        self.use(draft, i)
        draft.add(Hook(i, self.number(), 1.5 if self.chance(0.4) else None))

    def retain(self, draft: Draft) -> None:
        i = self.hooked(draft)
        if i is None:
            return self.op(draft)
        self.use(draft, i)
        draft.add(Retain(i, self.number()))

    # -- what is kept -------------------------------------------------------------------------------------

    def keep(self, draft: Draft) -> None:
        self.keep_value(draft, self.any(draft))

    def keep_value(self, draft: Draft, i: int) -> tuple[int, Value]:
        (value,) = self.use(draft, i)
        slot = self.number()
        draft.add(Keep(i, slot))
        draft.kept[draft.worker].append((slot, value))
        return slot, value

    def take(self, draft: Draft) -> None:
        slot, value = self.rng.choice(draft.kept[draft.worker])
        taken = Value(value.grad, value.scalar, leaf=value.leaf, shared=True, large=value.large)
        (i,) = draft.add(Take(slot), taken)
        if self.chance(0.6) and not taken.large:
            self.binary(draft, self.any(draft), i)

    # -- calls --------------------------------------------------------------------------------------------

    def call(self, draft: Draft, failing: bool = False) -> None:
        others = [w for w in range(self.workers) if w != draft.worker]
        to = draft.worker if self.chance(0.15) else self.rng.choice(others)
        inputs = self.inputs(draft)
        grad = failing or not self.chance(0.04)
        later = not failing and not self.anomaly and self.chance(0.3)
        # Received tensors are the receiver's own; a tensor that is sent twice arrives as one.
        sent_values = [draft.values[i] for i in inputs]
        given = [Value(grad and v.grad, v.scalar, large=v.large) for v in sent_values]
        for value, shared in zip(given, self.shared(draft, inputs), strict=True):
            value.shared = shared
            value.changeable = grad and not shared
        kept = {w: list(there) for w, there in draft.kept.items()} if later else draft.kept
        number, body, results = self.number(), *self.body(to, given, kept, draft.depth + 1, grad, failing)
        made = Made(number, inputs, results)
        packing = self.rng.choice(PACKINGS) if self.chance(0.3) else "tuple"
        step = Call(number, to, body, inputs, packing, later, grad)
        if later:
            made.kept = {w: [k for k in there if k not in draft.kept[w]] for w, there in kept.items()}
            draft.add(step)
            draft.waiting.append(made)
        else:
            made.outputs = draft.add(step, *results)
            draft.calls.append(made)
            if not failing and self.chance(0.25) and self.can_skip(draft, made):
                self.skip(draft)

        sent = [i for i in inputs if draft.values[i].changeable]
        if sent and not failing and draft.grad and self.chance(0.1):
            self.change_value(draft, self.rng.choice(sent))  # what was sent stays as it was

    def inputs(self, draft: Draft) -> tuple[int, ...]:
        """What is sent with a call."""
        return tuple(self.any(draft) for _ in range(self.rng.choice((0, 1, 1, 1, 2, 2, 3))))

    def shared(self, draft: Draft, sent: tuple[int, ...]) -> list[bool]:
        """Says of each tensor of a message whether it may be there more than once."""
        values, times = [draft.values[i] for i in sent], Counter(sent)
        leaves = sum(v.leaf for v in values)
        return [times[i] > 1 or v.shared or (v.leaf and leaves > 1) for i, v in zip(sent, values, strict=True)]

    def wait(self, draft: Draft) -> None:
        made = draft.waiting.pop(self.rng.randrange(len(draft.waiting)))
        made.outputs = draft.add(Wait(made.number), *made.results)
        draft.calls.append(made)
        for worker, kept in made.kept.items():
            draft.kept[worker].extend(kept)

    def can_skip(self, draft: Draft, made: Made) -> bool:
        """Whether an argument can be used beside a result."""
        return bool(self.can_join(draft, made.inputs) and self.can_join(draft, made.outputs))

    def can_join(self, draft: Draft, places: tuple[int, ...]) -> list[int]:
        return [i for i in places if draft.values[i].grad and not draft.values[i].large]

    def skip(self, draft: Draft) -> None:
        made = self.rng.choice([m for m in draft.calls if self.can_skip(draft, m)])
        i = self.rng.choice(self.can_join(draft, made.inputs))
        j = self.rng.choice(self.can_join(draft, made.outputs))
        self.binary(draft, i, j, around=made.number)

    def body(
        self, worker: int, given: list[Value], kept: Kept, depth: int, grad: bool, failing: bool
    ) -> tuple[int, list[Value]]:
        """Writes a body; gives its number and what a caller gets from it."""
        number = len(self.bodies)
        self.bodies.append(None)
        draft = Draft(worker, given, kept, depth, grad)
        self.receive(draft, tuple(range(len(given))))
        if not given or self.chance(0.5):
            self.use_leaf(draft)
        if grad and kept[worker] and self.chance(0.6):
            self.take(draft)
        for _ in range(self.rng.randint(0, 3)):
            if self.left > 0:
                self.step(draft)
        if not grad:  # what it gives and keeps must have been made without a graph
            self.binary(draft, self.any(draft), self.any(draft))
        elif self.chance(0.4):
            self.keep(draft)
        while draft.waiting:
            self.wait(draft)
        if failing:
            self.add_failing(draft)
        outputs = self.outputs(draft, failing)
        values = [draft.values[i] for i in outputs]
        for i in outputs:
            draft.values[i].changeable = False
        packing = self.rng.choice(PACKINGS) if self.chance(0.3) else "tuple"
        self.bodies[number] = Body(worker, tuple(draft.steps), outputs, packing)
        results = []
        for value, shared in zip(values, self.shared(draft, outputs), strict=True):
            results.append(Value(value.grad, value.scalar, not shared, shared=shared, large=value.large))
        return number, results

    def receive(self, draft: Draft, places: tuple[int, ...]) -> None:
        """What is done at once with what a message has brought."""

    def outputs(self, draft: Draft, failing: bool) -> tuple[int, ...]:
        last = len(draft.values) - 1
        if failing or not draft.grad:
            return (last,)
        if self.chance(0.05):
            return ()
        first = last if self.chance(0.7) and not self.is_table(draft, last) else self.any(draft)
        return (first, *(self.any(draft) for _ in range(self.rng.choice((0, 0, 0, 1, 1, 2)))))


def make_program(rng: Random) -> Program:
    """A random program. A few have a function that raises in every backward pass."""
    return with_random_numbers(Maker(rng).program(), rng)
