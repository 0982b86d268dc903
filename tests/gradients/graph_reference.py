"""What plain autograd makes of a program of graph_programs.py, in one thread: the reference.

A call is a call, and each tensor of a message goes through a node of its own, `Identity`. Which of these nodes a
backward pass reaches tells which tensors get gradients, and so how many messages must go from whom to whom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from graph_numbers import generators, number_traits
from graph_programs import Call, Checkpoint, Hook, Op, Pass, Place, Program, Take, steps_of
from torch import Tensor
from wide_programs import wide_traits

RECEIVED_TOGETHER = 4  # tensors, at least
Seen = dict[str, list[tuple[Tensor | None, ...]]]


@dataclass
class Outcome:
    """What came of a run."""

    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (context, leaf) -> gradient
    fields: dict[int, Tensor] = field(default_factory=dict)  # leaf -> .grad, where there is one
    retained: dict[int, Tensor | None] = field(default_factory=dict)
    seen: Seen = field(default_factory=dict)
    messages: Counter[tuple[int, int]] | None = field(default_factory=Counter)  # gradients from a worker to a worker
    asked: list[tuple[Tensor | None, ...]] = field(default_factory=list)  # in plain mode: what grad() gave
    # Tensors that are received together have one Recv, and grad() runs all that leads to it: hooks there run, too,
    # where only others of these tensors lead to the inputs. And torch runs the hooks of a root that leads to none, but
    # only of a single root: beside a Beacon it is not.
    hooks_differ: bool = False
    next_numbers: list[float] = field(default_factory=list)  # that the generators would give now
    error: BaseException | None = None
    failed_on: int = -1  # the worker that had begun the pass


# -- the reference: one thread, plain autograd ------------------------------------------------------------


class Identity(torch.autograd.Function):
    """A message, as a node of a local graph: copies go in one direction, gradients in the other."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


@dataclass
class Sent:
    """A message whose tensors want gradients: the two ends are the same nodes here."""

    call: int
    request: bool
    sender: int
    receiver: int
    nodes: list[Any]


class LocalWire:
    """A call is a call. `per_tensor`: each tensor of a message is a node of its own. `names`: of workers with a process
    each, for what they draw."""

    def __init__(self, program: Program, per_tensor: bool, names: Sequence[str] = ()) -> None:
        self.program = program
        self.per_tensor = per_tensor
        self.places = [Place(program, i, self, generator) for i, generator in enumerate(generators(program, names))]
        self.sent: list[Sent] = []
        self._alive: list[Any] = []
        self.skips: list[tuple[int, Any]] = []

    def call(self, caller: int, call: Call, tensors: list[Tensor]) -> Sequence[Tensor]:
        arguments = self.carry(call.number, True, caller, call.to, tensors)
        results = self.places[call.to].run(call.body, arguments)
        return self.carry(call.number, False, call.to, caller, results)

    def call_async(self, caller: int, call: Call, tensors: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
        results = self.call(caller, call, tensors)
        return lambda: results

    def carry(self, call: int, request: bool, sender: int, receiver: int, tensors: list[Tensor]) -> list[Tensor]:
        apart = {id(t): t for t in tensors}  # a tensor that is sent twice arrives as one
        wanting = [t for t in apart.values() if t.requires_grad and torch.is_grad_enabled()]
        arrived = {key: t.detach().clone() for key, t in apart.items()}
        groups = [[t] for t in wanting] if self.per_tensor else [wanting] if wanting else []
        nodes = []
        for group in groups:
            copies = Identity.apply(*group)
            arrived.update(zip(map(id, group), copies, strict=True))
            nodes.append(copies[0].grad_fn)
            # torch 2.11 lets go of a Python node with the last tensor behind it, though we hold the node.
            self._alive.append(torch.autograd.graph.get_gradient_edge(copies[0]))
        if nodes:
            self.sent.append(Sent(call, request, sender, receiver, nodes))
        return [arrived[id(t)] for t in tensors]

    def nest(self) -> None:
        pass

    def on_skip(self, call: int, value: Tensor) -> None:
        self.skips.append((call, value.grad_fn))


class Graph:
    """What a pass over a local graph reaches."""

    def __init__(self, wire: LocalWire, roots: list[Tensor]) -> None:
        self._wire = wire
        self._message = {node: i for i, sent in enumerate(wire.sent) for node in sent.nodes}
        self.reached = self._reach([root.grad_fn for root in roots], through_messages=True)
        self.active = [i for i, s in enumerate(wire.sent) if any(n in self.reached for n in s.nodes)]

    def _reach(self, starts: Sequence[Any], *, through_messages: bool) -> set[Any]:
        reached = set()
        todo = [node for node in starts if node is not None]
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                if through_messages or node not in self._message:
                    todo += [following for following, _ in node.next_functions if following is not None]
        return reached

    def messages(self) -> Counter[tuple[int, int]]:
        """How many gradients go from whom to whom: one for each active Send, back to its sender."""
        return Counter((s.receiver, s.sender) for s in (self._wire.sent[i] for i in self.active))

    def traits(self) -> set[str]:
        sent = self._wire.sent
        senders = Counter(sent[i].sender for i in self.active)
        sizes = [len(sent[i].nodes) for i in self.active]
        used = [sum(node in self.reached for node in sent[i].nodes) for i in self.active]
        requests = {sent[i].call for i in self.active if sent[i].request}
        found = set()
        if len(self.active) < len(sent):
            found.add("unused Sends")
        if any(count > 1 for count in senders.values()):
            found.add("a worker with several active Sends")
        if any(call in requests and node in self.reached for call, node in self._wire.skips):
            found.add("a skip connection around a call")
        if any(sent[i].sender == sent[i].receiver for i in self.active):
            found.add("an active message to oneself")
        for least in (3, 20, 100):
            if any(size > least for size in sizes):
                found.add(f"messages of more than {least} tensors")
        if any(count < size for count, size in zip(used, sizes, strict=True)):
            found.add("messages used in part")
        if self.hangs(reverse=True):
            found.add("hangs with the Waits reversed")
        return found

    def hangs(self, *, reverse: bool) -> bool:
        """Whether a pass would wait for ever, if each worker took the gradients of its Sends in the order of
        sending (or its reverse, which is what a pass must do).

        A Send's gradient comes once its Recv has run; that has run once the later Sends that depend on it have been
        taken there; and a worker takes one after the other. A circle of these hangs.
        """
        waits_for: dict[int, list[int]] = defaultdict(list)
        last: dict[int, int] = {}
        for i in self.active if reverse else reversed(self.active):
            sender = self._wire.sent[i].sender
            if sender in last:
                waits_for[i].append(last[sender])
            last[sender] = i
            starts = [n for node in self._wire.sent[i].nodes for n, _ in node.next_functions]
            for node in self._reach(starts, through_messages=False) & self._message.keys():
                waits_for[self._message[node]].append(i)
        done: set[int] = set()
        left = set(self.active)
        while left:
            free = {i for i in left if done.issuperset(waits_for[i])}
            if not free:
                return True
            done |= free
            left -= free
        return False


def run_locally(
    program: Program,
    *,
    per_tensor: bool = True,
    traits: Counter[str] | None = None,
    plain: bool = False,
    names: Sequence[str] = (),
) -> Outcome:
    """What plain autograd makes of a program. What the graph has is counted in `traits`. `plain`: all gradients go to
    `.grad`, where they add up. `names`: of workers that have a process each, which random numbers depend on."""
    outcome = Outcome()
    wire = LocalWire(program, per_tensor, names)
    found: set[str] = set()
    with torch.autograd.set_detect_anomaly(program.anomaly):
        wire.places[0].run(0, [])
        for place in wire.places:
            place.freeze()
        parts: list[set[Any]] = []
        for each in program.passes:
            place = wire.places[each.worker]
            roots, seeds = place.roots(each)
            graph = Graph(wire, roots)
            assert not graph.hangs(reverse=False)
            if traits is not None:
                found |= graph.traits()
                parts.append({node for sent in wire.sent for node in sent.nodes if node in graph.reached})
            try:
                asked, more = ask(place, each, roots, seeds, torch.autograd.grad, plain=plain)
                outcome.asked += asked
                roots, seeds = roots + more, seeds + [None] * len(more)
                torch.autograd.backward(roots, seeds, retain_graph=each.retain)
            except ValueError as error:
                outcome.error = error
                break
            if asked:
                outcome.messages = None
                is_alone = len(roots) == 1 and all(x is None for x in asked[-1])
                if is_alone or any(len(sent.nodes) >= RECEIVED_TOGETHER for sent in wire.sent):
                    outcome.hooks_differ = True
            if counts_no_messages(program):
                outcome.messages = None
            if outcome.messages is not None:
                outcome.messages += graph.messages()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # no stream waits for leaves inside of reentrant checkpoints
            if plain:
                for other in wire.places:
                    outcome.fields |= {
                        n: leaf.grad.clone() for n, leaf in other.leaves.items() if leaf.grad is not None
                    }
            else:
                _take_gradients(wire, each, outcome)
    if outcome.error is None:
        for place in wire.places:
            outcome.retained |= {n: tensor.grad for n, tensor in place.retained.items()}
            outcome.seen |= place.seen
        used = dict.fromkeys(place.generator for place in wire.places if place.generator is not None)
        outcome.next_numbers = [float(torch.rand((), generator=generator)) for generator in used]
    if traits is not None:
        if any(label not in place.seen for place in wire.places for label in place.hooked):
            found.add("hooks on received tensors that are not used")
        if any(one - other for one in parts for other in parts):
            found.add("passes that use other parts of messages")
        traits.update(found | traits_of(program))
        traits["graphs"] += 1
    for place in wire.places:
        place.clear()
    return outcome


def ask(
    place: Place, each: Pass, roots: list[Tensor], seeds: list[Any], grad: Callable[..., Any], *, plain: bool
) -> tuple[list[tuple[Tensor | None, ...]], list[Tensor]]:
    """Before some of the passes: grad() for leaves that the worker has. In plain mode also where the pass does not say
    so, for all of them. Returns what it gave; and what are roots of the pass besides."""
    program = place.program
    if each.asks:
        inputs = [place.leaves[n] for n in each.asks]
    elif plain:
        never = {"reentrant checkpoints", "a function that fails"}  # the first is a limit of torch's grad()
        if (len(program.leaves) + each.roots[0]) % 4 or never & traits_of(program) or program.anomaly:
            return [], []
        inputs = [leaf for _, leaf in sorted(place.leaves.items())]
    else:
        return [], []
    inputs = [leaf for leaf in inputs if leaf.requires_grad]
    if not inputs:
        return [], []
    options = {"create_graph": True} if each.doubles else {}
    found = grad(roots, inputs, seeds, retain_graph=True, allow_unused=True, **options)
    more = [x.square().sum() for x in found if x is not None and x.requires_grad and x.layout is torch.strided]
    return [tuple(None if x is None else x.detach() for x in found)], more


def counts_no_messages(program: Program) -> bool:
    """Whether some messages are made while a pass is under way, and belong to one inside of it."""
    return any(isinstance(step, Checkpoint) and step.reentrant and step.calls for step in steps_of(program))


def _take_gradients(wire: LocalWire, each: Pass, outcome: Outcome) -> None:
    """What a pass brought goes to its context or to `.grad`. In between `.grad` is empty: a hook that runs after
    accumulation sees what its own pass has brought."""
    for place in wire.places:
        for number, leaf in place.leaves.items():
            if leaf.grad is not None:
                table: dict[Any, Tensor] = outcome.gradients if each.into == "context" else outcome.fields
                key = (each.context, number) if each.into == "context" else number
                table[key] = _sum(table[key], leaf.grad) if key in table else leaf.grad
                leaf.grad = None


def _sum(one: Tensor, other: Tensor) -> Tensor:
    return other + one if one.is_sparse else one + other  # torch adds a sparse one to a dense one only


def traits_of(program: Program) -> set[str]:
    """What can be seen of a program without running it."""
    steps = steps_of(program)
    calls = [step for step in steps if isinstance(step, Call)]
    nested = any(isinstance(step, Call) for body in program.bodies[1:] for step in body.steps)
    checks: dict[str, bool] = {
        "nested calls": nested,
        "async calls": any(call.later for call in calls),
        "calls without grad mode": any(not call.grad for call in calls),
        "values kept for later calls": any(isinstance(step, Take) for step in steps),
        "several roots": any(len(each.roots) > 1 for each in program.passes),
        "gradients given for the roots": any(seed for each in program.passes for seed in each.seeds),
        "several passes": len(program.passes) > 1,
        "a pass from another worker": any(each.worker for each in program.passes),
        "nested contexts": any(type(step).__name__ == "Nest" for step in steps),
        "custom functions": any(isinstance(step, Op) and step.name.startswith("custom") for step in steps),
        "hooks on tensors": any(isinstance(step, Hook) for step in steps),
        "hooks on leaves": any(leaf.factor or leaf.post for leaf in program.leaves),
        "modules with hooks": any(leaf.kind == "module" for leaf in program.leaves),
        "sparse gradients": any(isinstance(step, Op) and step.name == "sparse" for step in steps),
        "changes in place": any(isinstance(step, Op) and step.name == "change" for step in steps),
        "checkpoints": any(isinstance(step, Checkpoint) and not step.reentrant for step in steps),
        "reentrant checkpoints": any(isinstance(step, Checkpoint) and step.reentrant for step in steps),
        "anomaly mode": program.anomaly,
        "a function that fails": any(isinstance(step, Op) and step.name == "custom-!" for step in steps),
    }
    checks |= wide_traits(program) | number_traits(program)
    return {name for name, there in checks.items() if there}
