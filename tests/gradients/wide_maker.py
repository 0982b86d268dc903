"""Makes random programs with many tensors: large modules, and messages of up to 200 tensors that are used in part.

What graph_maker.py makes is in them, too. Sizes are skewed: most are small, so that many programs can be run.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from graph_maker import Draft, Maker, Value
from graph_numbers import with_random_numbers
from graph_programs import Body, Call, Checkpoint, Pass, Program, steps_of
from wide_programs import (
    LARGE,
    LARGEST_SMALL,
    SMALLEST_LARGE,
    Blend,
    ChangeAll,
    HookAll,
    Layers,
    RetainAll,
    Spread,
)

# How many, with weights
TENSORS = (((1, 3), 10), ((4, 8), 40), ((9, 20), 32), ((21, 60), 13), ((61, 200), 5))
PARAMETERS = (((1, 5), 40), ((6, 20), 38), ((21, 60), 16), ((61, 150), 4), ((151, 300), 2))


class WideMaker(Maker):
    """`plain`: for programs that run without contexts. Only there calls go inside of reentrant checkpoints."""

    MODULE_AND_CHECKPOINT = (7, 2)

    def __init__(self, rng: Random, *, plain: bool) -> None:
        super().__init__(rng)
        self.plain = plain
        self.left = rng.randint(3, 9)
        self.workers = rng.randint(2, 4)
        # One leaf with hooks of some kinds changes how all of its worker take their gradients.
        self.hooks = rng.choices(("none", "tensor", "any"), (5, 2, 3))[0]
        self.freezes = self.chance(0.3)
        self.modules: dict[int, list[tuple[int, ...]]] = {}

    def count(self, sizes: tuple[tuple[tuple[int, int], int], ...] = TENSORS) -> int:
        return self.rng.randint(*self.rng.choices([s for s, _ in sizes], [w for _, w in sizes])[0])

    def part(self, places: list[int]) -> tuple[int, ...]:
        """Some of these, in their order: all, one in ten, any, or all but one."""
        if not places:
            return ()
        way = self.rng.choice(("all", "tenth", "any", "any", "but one"))
        share = {"all": len(places), "tenth": -(-len(places) // 10), "but one": max(1, len(places) - 1)}
        return tuple(sorted(self.rng.sample(places, share.get(way) or self.rng.randint(1, len(places)))))

    # -- messages -----------------------------------------------------------------------------------------

    def inputs(self, draft: Draft) -> tuple[int, ...]:
        return self.message(draft) if self.chance(0.75) else super().inputs(draft)

    def outputs(self, draft: Draft, failing: bool) -> tuple[int, ...]:
        wide = draft.grad and not failing and self.chance(0.6)
        return self.message(draft) if wide else super().outputs(draft, failing)

    def message(self, draft: Draft) -> tuple[int, ...]:
        """Many tensors, some of which may be leaves, received ones, or there twice."""
        places = list(self.spread(draft, self.any(draft, grad=self.chance(0.9)), self.count()))
        if self.chance(0.3):
            others = [i for i in range(len(draft.values)) if not self.is_table(draft, i) and i not in places]
            places += self.rng.sample(others, min(len(others), self.rng.randint(1, 12)))
        if self.chance(0.15):
            places += self.rng.choices(places, k=self.rng.randint(1, 3))
        if self.chance(0.15):
            for _ in range(self.rng.randint(1, 8)):
                self.bring(draft, self.new_leaf(draft.worker, self.rng.choice(("plain", "parameter"))))
                places.append(len(draft.values) - 1)
        if self.chance(0.5):
            self.rng.shuffle(places)
        self.hook_some(draft, [i for i in places if self.can_hook(draft, i)], 0.1, received=False)
        return tuple(places)

    def spread(self, draft: Draft, i: int, count: int) -> tuple[int, ...]:
        (x,) = self.use(draft, i)
        way = self.rng.choices(("each", "rows", "unbind", "chain"), (5, 1, 1, 1))[0]
        large = self.rng.choice((0.0, 0.0, 0.1, 0.4, 1.0))
        kinds = (LARGE, LARGEST_SMALL, SMALLEST_LARGE)
        sizes = tuple(self.rng.choice(kinds) if self.chance(large) else 1 for _ in range(count))
        values = [
            Value(x.grad, x.scalar and size == 1, changeable=way == "each" or size > 1, large=size > 1)
            for size in sizes
        ]
        return draft.add(Spread(i, sizes, way), *values)

    def call(self, draft: Draft, failing: bool = False) -> None:
        made = len(draft.calls)
        super().call(draft, failing)
        call = next(step for step in reversed(draft.steps) if isinstance(step, Call))
        sent = sorted({i for i in call.inputs if draft.values[i].changeable})
        if sent and not failing and draft.grad and self.chance(0.3):
            self.change_all(draft, self.part(sent), sent=True)  # what was sent stays as it was
        if len(draft.calls) > made and not failing:
            self.receive(draft, draft.calls[-1].outputs)

    def wait(self, draft: Draft) -> None:
        super().wait(draft)
        self.receive(draft, draft.calls[-1].outputs)

    def receive(self, draft: Draft, places: tuple[int, ...]) -> None:
        """Hooks, changes in place, and sums of some of what has come."""
        apart = sorted(set(places))
        if not apart or not draft.grad:
            return
        hooked = [i for i in apart if self.can_hook(draft, i)]
        doings = ["hook", "retain", "change"]
        self.rng.shuffle(doings)
        for doing in doings:
            if doing == "hook":
                self.hook_some(draft, hooked, 0.4, received=True)
            elif doing == "retain" and hooked and self.chance(0.25):
                draft.add(RetainAll(self.part(hooked), self.number()))
            elif doing == "change" and self.chance(0.25):
                self.change_all(draft, self.part([i for i in apart if draft.values[i].changeable]), sent=False)
        for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
            self.blend(draft, self.part([i for i in apart if not self.is_table(draft, i)]))

    def can_hook(self, draft: Draft, i: int) -> bool:
        value = draft.values[i]
        return value.grad and not value.leaf and not value.shared

    def hook_some(self, draft: Draft, places: list[int], share: float, *, received: bool) -> None:
        if places and self.chance(share):
            factor = 1.5 if self.chance(0.4) else None
            draft.add(HookAll(self.part(sorted(set(places))), self.number(), factor, received))

    def change_all(self, draft: Draft, places: tuple[int, ...], *, sent: bool) -> None:
        if places:
            draft.add(ChangeAll(places, sent))

    def blend(self, draft: Draft, places: tuple[int, ...]) -> None:
        if places:
            values = self.use(draft, *places)
            draft.add(Blend(places, self.chance(0.5)), Value(any(v.grad for v in values), False))

    # -- leaves and modules -------------------------------------------------------------------------------

    def new_leaf(self, worker: int, kind: str = "") -> int:
        number = super().new_leaf(worker, kind)
        leaf = self.leaves[number]
        if self.hooks != "any":
            leaf = replace(leaf, post=False, factor=leaf.factor if self.hooks == "tensor" else None)
        elif self.chance(0.1):
            leaf = replace(leaf, on_node=True)
        self.leaves[number] = leaf
        return number

    def module(self, draft: Draft) -> None:
        if self.hooks == "any" and self.chance(0.25):
            return super().module(draft)
        made = self.modules.setdefault(draft.worker, [])
        leaves = self.rng.choice(made) if made and self.chance(0.35) else self.new_module(draft.worker)
        i = self.any(draft, grad=True)
        self.use(draft, i)
        draft.add(Layers(leaves, i), Value(True, False))

    def new_module(self, worker: int) -> tuple[int, ...]:
        made = self.modules[worker]
        leaves: list[int] = []
        for _ in range(self.count(PARAMETERS)):
            number = self.new_leaf(worker, "table" if self.chance(0.06) else "parameter")
            leaf = self.leaves[number]
            if self.freezes and leaf.kind == "parameter" and self.chance(0.25):
                self.leaves[number] = replace(leaf, frozen="always", post=False, factor=None, on_node=False)
            leaves.append(number)
        if made and self.chance(0.4):  # tied weights
            others = self.rng.choice(made)
            leaves += self.rng.sample(others, min(len(others), self.rng.randint(1, 10)))
        if self.chance(0.4):
            leaves += self.rng.choices(leaves, k=self.rng.randint(1, 10))
        if self.chance(0.5):
            self.rng.shuffle(leaves)
        made.append(tuple(leaves))
        return made[-1]

    # -- checkpoints around calls -------------------------------------------------------------------------

    def checkpoint(self, draft: Draft) -> None:
        if not self.chance(0.6):
            return super().checkpoint(draft)
        reentrant = self.plain and not self.failing and self.chance(0.4)
        inputs = (self.any(draft, grad=True), self.any(draft))
        values = self.use(draft, *inputs)
        within = Draft(draft.worker, [Value(v.grad, v.scalar) for v in values], {}, 9)
        sent = self.spread(within, 0, self.count())
        to = self.rng.randrange(self.workers)
        body, results = self.pure_body(to, [within.values[i] for i in sent])
        outputs = within.add(Call(self.number(), to, body, sent, "tuple"), *results)
        self.blend(within, self.part(list(outputs)))
        draft.add(Checkpoint(inputs, tuple(within.steps), reentrant), Value(True, False))

    def pure_body(self, worker: int, values: list[Value]) -> tuple[int, list[Value]]:
        """What may be run again: it keeps nothing, and its leaves have no hooks. Hooks of tensors are those of the
        graph that the pass goes through."""
        draft = Draft(worker, [replace(v) for v in values], {}, 9)
        places = list(range(len(values)))
        self.hook_some(draft, places, 0.3, received=True)
        self.blend(draft, self.part(places))
        number = self.new_leaf(worker, "parameter")
        self.leaves[number] = replace(self.leaves[number], factor=None, post=False, on_node=False)
        draft.add(Layers((number,), len(draft.values) - 1), Value(True, False))
        outputs = self.spread(draft, len(draft.values) - 1, self.count())
        self.bodies.append(Body(worker, tuple(draft.steps), outputs))
        return len(self.bodies) - 1, [replace(draft.values[i]) for i in outputs]

    # -- passes -------------------------------------------------------------------------------------------

    def program(self) -> Program:
        made = super().program()
        checkpoints = [step for step in steps_of(made) if isinstance(step, Checkpoint)]
        if not checkpoints and not self.failing and self.chance(0.15):
            able = [n for n, leaf in enumerate(made.leaves) if not leaf.has_hooks and not leaf.frozen]
            later = set(self.rng.sample(able, min(len(able), self.rng.randint(1, 5))))
            leaves = [replace(leaf, frozen="later") if n in later else leaf for n, leaf in enumerate(made.leaves)]
            made = replace(made, leaves=tuple(leaves))
        if self.failing or made.anomaly or any(step.reentrant for step in checkpoints):
            return made  # grad() and reentrant checkpoints: a limit of torch's
        return replace(made, passes=tuple(self.asking(each) for each in made.passes))

    def asking(self, each: Pass) -> Pass:
        able = [
            n
            for n, leaf in enumerate(self.leaves)
            if leaf.worker == each.worker and leaf.kind != "table" and not leaf.frozen
        ]
        if not able or not self.chance(0.3):
            return each
        return replace(each, asks=self.part(able), doubles=self.chance(0.5))

    def passes(self, draft: Draft) -> tuple[Pass, ...]:
        made = super().passes(draft)
        while len(made) < 4 and self.chance(0.35):
            made = (*(replace(each, retain=True) for each in made), *super().passes(draft))
        return made


def make_wide_program(rng: Random, *, plain: bool) -> Program:
    """A random program with many tensors."""
    return with_random_numbers(WideMaker(rng, plain=plain).program(), rng)
