"""Random distributed graphs: each is run by workers and, once more, in one thread with plain autograd.

    program = make_program(Random(seed))
    expected = run_locally(program)
    with Party() as party:
        compare(expected, party.run(program))

What must be equal: the gradient of every leaf in every context, `.grad` of leaves and of tensors that retain it,
what every hook and every custom function saw and how often, how many gradient messages went from whom to whom, and how
many random numbers were drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import gc
import itertools
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from types import TracebackType
from typing import Any

import torch
from graph_maker import MOST_WORKERS, make_program
from graph_programs import DEVICES, Call, Pass, Place, Program, pack, unpack
from graph_reference import Outcome, ask, counts_no_messages, run_locally
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from wide_maker import make_wide_program

import telegrad
from telegrad import autograd, rpc
from telegrad.events import Event
from telegrad.primitives import current

_PLACES: dict[tuple[int, int], Place] = {}  # (run, worker) -> that worker's part of the run
_ASKED: dict[int, list[Any]] = {}  # by run, in plain mode: what grad() gave
_run_numbers = itertools.count(1)


def serve(run: int, worker: int, body: int, packing: str, arguments: Any) -> Any:
    """What a call runs on the worker that is called."""
    results = _PLACES[run, worker].run(body, unpack(arguments))
    return pack(results, packing)


class Carried(Exception):
    """Brings the results of a call."""


def serve_raising(*arguments: Any) -> None:
    """The same, and gives the results as an exception does."""
    raise Carried(serve(*arguments))


def run_pass(run: int, worker: int, number: int, context: int, timeout: float) -> None:
    """A backward pass, from the worker that it starts on."""
    place = _PLACES[run, worker]
    each = place.program.passes[number]
    with place.stream(()):
        roots, seeds = place.roots(each)
    if not context:
        roots, seeds = asking(run, place, each, roots, seeds, torch.autograd.grad, plain=True)
        torch.autograd.backward(roots, seeds, retain_graph=each.retain)
        return
    grad = partial(autograd.grad, context, timeout=timeout)
    roots, seeds = asking(run, place, each, roots, seeds, grad, plain=False)
    autograd.backward(
        context,
        roots,
        each.retain,
        grad_tensors=None if all(s is None for s in seeds) else seeds,
        timeout=timeout,
        into=each.into,
    )


def asking(
    run: int, place: Place, each: Pass, roots: list[Tensor], seeds: list[Any], grad: Callable[..., Any], *, plain: bool
) -> tuple[list[Tensor], list[Any]]:
    """Calls grad() where that is to come before the pass. Returns the roots of the pass, and their gradients."""
    asked, more = ask(place, each, roots, seeds, grad, plain=plain)
    _ASKED.setdefault(run, []).extend(asked)
    return roots + more, seeds + [None] * len(more)


class RemoteWire:
    """Calls go to other workers. `contexts` are those that the program has entered. `raises`: results come in
    exceptions."""

    def __init__(
        self, run: int, program: Program, names: Sequence[str], plain: bool = False, raises: bool = False
    ) -> None:
        self.raises = raises
        self.run = run
        self.plain = plain
        self.program = program
        self.names = names
        self.contexts: list[int] = []
        self.open = contextlib.ExitStack()

    def call(self, caller: int, call: Call, tensors: list[Tensor]) -> Sequence[Tensor]:
        args = self._arguments(call, tensors)
        if not self.raises:
            return unpack(rpc.rpc_sync(self.names[call.to], serve, args=args))
        try:
            rpc.rpc_sync(self.names[call.to], serve_raising, args=args)
        except Carried as carried:
            return unpack(carried.args[0])
        raise AssertionError("the call returned")

    def call_async(self, caller: int, call: Call, tensors: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
        args = self._arguments(call, tensors)
        future = rpc.rpc_async(self.names[call.to], serve_raising if self.raises else serve, args=args)

        def results() -> Sequence[Tensor]:
            try:
                return unpack(future.wait())
            except Carried as carried:
                return unpack(carried.args[0])

        return results

    def _arguments(self, call: Call, tensors: list[Tensor]) -> tuple[Any, ...]:
        packing = self.program.bodies[call.body].packing
        return self.run, call.to, call.body, packing, pack(tensors, call.packing)

    def nest(self) -> None:
        if not self.plain:
            self.contexts.append(self.open.enter_context(autograd.context()))

    def on_skip(self, call: int, value: Tensor) -> None:
        pass


def warm_up() -> None:
    """torch imports much when the first checkpoint is made, which takes seconds."""
    for reentrant in (False, True):
        checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=reentrant)


class Party:
    """In-process workers that run programs, one after the other.

    Args:
        disturb: the share of programs in which messages are held up at random, and threads switched often. In others
            results come in exceptions; and passes begin on threads of their own, beside others that run passes, too.
        timeout: how many seconds a backward pass may take.
        plain: without contexts, by torch's own backward(). A quarter of the passes come after grad().
    """

    def __init__(self, *, disturb: float = 0.3, timeout: float = 30.0, plain: bool = False) -> None:
        self.plain = plain
        self.timeout = timeout
        self._disturb = disturb
        self._rng = Random(0)
        self._delays = self.in_threads = self.raises = False
        self._undo = contextlib.ExitStack()
        # Guards the four below: threads of all workers note what they see.
        self._noting = threading.Lock()
        self._sent: list[tuple[int, int, str]] = []  # gradients: from, to, of which Send
        self._received: list[tuple[int, int, str]] = []
        self._on_the_way: Counter[tuple[int, int, str]] = Counter()  # sent, and not yet seen to be received
        self._forgotten: dict[int, int] = {}  # by worker: messages with lower ids do not count any more
        self.names = [f"w{i}" for i in range(MOST_WORKERS)]
        self._left_by_torch: dict[str, Counter[str]] = {}

    def __enter__(self) -> Party:
        warm_up()
        self._switch_interval = sys.getswitchinterval()
        self._undo.callback(sys.setswitchinterval, self._switch_interval)
        first, *others = self.names
        options = telegrad.Options(backward_timeout=self.timeout)
        cluster = telegrad.LocalCluster(others, transport="inproc", driver=first, options=options)
        self._undo.enter_context(cluster)
        self._workers = list(cluster._in_process)
        for number, worker in enumerate(self._workers):
            self._undo.callback(worker.events.subscribe(self._subscriber(number)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
        self._workers.clear()

    def _subscriber(self, number: int) -> Callable[[Event], None]:
        def see(event: Event) -> None:
            if event.phase != "started" or event.stage not in ("send", "receive"):
                return
            if event.kind == "gradients":
                peer = self.names.index(event.peer)
                with self._noting:
                    for message in event.detail.split()[2:]:  # "of message 1 2 3"
                        if self._is_forgotten(message):
                            pass
                        elif event.stage == "send":
                            self._sent.append((number, peer, message))
                        else:
                            self._received.append((peer, number, message))
            if self._delays and self._rng.random() < 0.25:
                time.sleep(self._rng.random() ** 4 * 0.002)

        return see

    def _is_forgotten(self, id: str) -> bool:
        """Whether these are gradients of a message that was sent before a pass failed."""
        message = int(id)
        return message < self._forgotten.get(message >> 48, 0)

    @contextlib.contextmanager
    def on(self, worker: int) -> Iterator[None]:
        """Code that runs on a worker."""
        token = current.worker_var.set(self._workers[worker])
        try:
            yield
        finally:
            current.worker_var.reset(token)

    def run(self, program: Program, seed: int = 0) -> Outcome:
        """Runs a program. `seed` is for what holds its messages up."""
        outcome = Outcome()
        run = next(_run_numbers)
        self._rng.seed(seed)
        self._delays = self._rng.random() < self._disturb
        # torch hangs in anomaly mode where two threads are the first to use a leaf: see graph_maker.py.
        self.in_threads = self._rng.random() < self._disturb / 2 and not program.anomaly
        self.raises = self._rng.random() < self._disturb / 2
        wire = RemoteWire(run, program, self.names, self.plain, self.raises)
        places = [Place(program, worker, wire) for worker in range(program.workers)]
        _PLACES.update({(run, place.worker): place for place in places})
        sys.setswitchinterval(self._rng.choice((1e-5, 1e-3)) if self._delays else self._switch_interval)
        if "twin" in DEVICES:
            import twin

            twin.set_delay(self._rng.choice((0, 0, 0, 100, 1000)))
        try:
            with torch.autograd.set_detect_anomaly(program.anomaly), wire.open:
                wire.nest()
                if program.seed is not None:
                    telegrad.manual_seed(program.seed)
                places[0].run(0, [])
                for place in places:
                    place.freeze()
                self._run_passes(wire, outcome)
                self._collect(wire, places, outcome)
        finally:
            outcome.asked = _ASKED.pop(run, [])
            for place in places:
                del _PLACES[run, place.worker]
                place.clear()
            if outcome.error is not None:
                self._forget_messages(leaks=self.plain)
        return outcome

    def _forget_messages(self, *, leaks: bool) -> None:
        """After a pass has failed: which of its messages went is not known, and some may go only now. `leaks`: torch
        itself keeps nodes of a failed pass in the queue of its thread, and the hooks of a module whose backward has not
        run; outside of contexts these keep the graph."""
        try:
            self.check_nothing_is_left(0.2 if leaks else 5.0, messages=False)
        except AssertionError:
            if not leaks:
                raise
            self._left_by_torch = self._counts()
        finally:
            with self._noting:
                self._forgotten = {worker.id: worker.new_message_id() for worker in self._workers}
                for noted in (self._sent, self._received, self._on_the_way):
                    noted.clear()

    def _run_passes(self, wire: RemoteWire, outcome: Outcome) -> None:
        for number, each in enumerate(wire.program.passes):
            context = 0 if self.plain else wire.contexts[each.context]
            arguments = (wire.run, each.worker, number, context, self.timeout)
            try:
                if each.worker == 0:
                    if self.in_threads:
                        outcome.messages = None  # those of the passes beside it are among them
                        self._run_in_thread(*arguments)
                    else:
                        run_pass(*arguments)
                else:
                    rpc.rpc_sync(self.names[each.worker], run_pass, args=arguments)
            except (RuntimeError, ValueError) as error:
                outcome.error = error.with_traceback(None)  # whose frames have the roots
                outcome.failed_on = each.worker
                return
            with self._noting:
                sent = Counter(self._sent)
                self._sent.clear()
            if _ASKED.get(wire.run) or counts_no_messages(wire.program):
                outcome.messages = None  # those of grad() are among them
                with self._noting:
                    self._on_the_way += sent
                continue
            assert max(sent.values(), default=1) == 1, f"gradients went more than once: {sent}"
            if self.in_threads:
                outcome.messages = None
            if outcome.messages is not None:
                outcome.messages += Counter((sender, receiver) for sender, receiver, _ in sent)
            with self._noting:
                self._on_the_way += sent

    def _run_in_thread(self, *arguments: Any) -> None:
        """Runs a pass on a thread of its own, while another one runs passes through the same workers."""
        with ThreadPoolExecutor(2) as pool:
            over = threading.Event()
            beside = pool.submit(self._run_beside, over)
            try:
                with autograd.enter(arguments[3]) if arguments[3] else contextlib.nullcontext():
                    pool.submit(contextvars.copy_context().run, run_pass, *arguments).result()
            finally:
                over.set()
            beside.result()

    def _run_beside(self, over: threading.Event) -> None:
        while True:
            x = torch.ones(2, dtype=torch.float64, requires_grad=True)
            with contextlib.nullcontext(0) if self.plain else autograd.context() as context:
                y = x
                for name in self.names[1:3]:
                    y = rpc.rpc_sync(name, torch.mul, args=(y, x))
                if self.plain:
                    y.sum().backward()
                    found = x.grad
                else:
                    autograd.backward(context, [y.sum()], timeout=self.timeout)
                    found = autograd.get_gradients(context)[x]
            assert torch.equal(found, torch.full_like(x, 3.0)), f"beside: {found}"
            if over.is_set():
                return

    def _collect(self, wire: RemoteWire, places: list[Place], outcome: Outcome) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if outcome.error is not None:  # else `.grad` is complete when backward() has returned
            self._wait_for_passes()  # others may still be in a hook, with the leaf's `.grad` set aside
        for place in places:
            number_of = {id(leaf): number for number, leaf in place.leaves.items()}
            for i, context in enumerate(wire.contexts):
                with self.on(place.worker):
                    for leaf, gradient in gradients_here(context).items():
                        outcome.gradients[i, number_of[id(leaf)]] = gradient
            outcome.fields |= {n: leaf.grad for n, leaf in place.leaves.items() if leaf.grad is not None}
            if outcome.error is None:
                outcome.retained |= {n: tensor.grad for n, tensor in place.retained.items()}
                outcome.seen |= place.seen
        if wire.program.seed is not None and outcome.error is None:
            outcome.next_numbers = [float(torch.rand(()))]  # one generator for all workers

    def _wait_for_passes(self, within: float = 5.0) -> None:
        deadline = time.monotonic() + within
        while any(worker.engine.busy for worker in self._workers):
            assert time.monotonic() < deadline, "a failed pass still runs"
            time.sleep(1e-4)

    def _counts(self) -> dict[str, Counter[str]]:
        """What each worker has."""
        found = {}
        for number, name in enumerate(self.names):
            with self.on(number):
                found[name] = Counter(dict(counts(autograd.debug_info())))
        return found

    def check_nothing_is_left(self, within: float = 5.0, *, messages: bool = True) -> None:
        """After the contexts have ended, everywhere. What was sent has been received, once.

        Raises:
            AssertionError: it says what is left.
        """
        deadline = time.monotonic() + within
        while True:
            left: dict[str, Any] = {
                name: dict(found - self._left_by_torch.get(name, Counter())) for name, found in self._counts().items()
            }
            if messages:
                with self._noting:
                    received = Counter(self._received)
                left["not received"] = dict(self._on_the_way - received)
                left["received and not sent"] = dict(received - self._on_the_way)
            left = {where: what for where, what in left.items() if what}
            if not left:
                self._received.clear()
                self._on_the_way.clear()
                return
            assert time.monotonic() < deadline, f"left behind: {left}"
            threading.Event().wait(0.001)


def gradients_here(context: int) -> dict[Tensor, Tensor]:
    """The gradients of this worker; none where it has never heard of the context."""
    try:
        return autograd.get_gradients(context)
    except RuntimeError as error:
        if "context" not in str(error):
            raise
        return {}


def counts(info: Any, of: str = "") -> Iterator[tuple[str, int]]:
    """The numbers in what debug_info() says."""
    if isinstance(info, dict):
        for name, value in info.items():
            yield from counts(value, f"{of} {name}".strip())
    elif isinstance(info, (list, tuple, set, frozenset)):
        yield of, len(info)
    elif isinstance(info, (int, str)) and str(info).isdigit():
        yield of, int(info)


# -- comparing --------------------------------------------------------------------------------------------


def compare(expected: Outcome, actual: Outcome, plain: Program | None = None) -> None:
    """Compares what came of a program, in plain mode if it is given.

    Raises:
        AssertionError: says what differs.
    """
    if expected.error is not None:
        assert actual.error is not None, f"no error, where locally there is {expected.error!r}"
        assert str(expected.error) in str(actual.error), f"{actual.error!r} instead of {expected.error!r}"
    elif actual.error is not None:
        raise AssertionError(f"the pass failed: {actual.error!r}") from actual.error
    _compare("gradients (context, leaf)", expected.gradients, actual.gradients)
    if expected.error is None:
        _compare(".grad of leaf", expected.fields, actual.fields)
        if not expected.hooks_differ:
            _compare("retained", expected.retained, actual.retained)
            _compare("seen", expected.seen, actual.seen, alike=same_in_any_order)
        assert actual.next_numbers == expected.next_numbers, "the generators have another state"
        _compare("grad()", dict(enumerate(expected.asked)), dict(enumerate(actual.asked)))
        assert None in (expected.messages, actual.messages) or actual.messages == expected.messages, (
            f"gradient messages from, to: {dict(actual.messages)} instead of {dict(expected.messages)}"
        )
    elif plain:  # at the root it is as torch leaves it
        here = {n for n, leaf in enumerate(plain.leaves) if leaf.worker == actual.failed_on}
        fields = [{n: g for n, g in outcome.fields.items() if n not in here} for outcome in (expected, actual)]
        _compare(".grad of leaf after a failed pass", *fields)
    else:
        assert not actual.fields, f".grad of leaves {actual.fields} after a failed pass"


def _compare(
    what: str,
    expected: dict[Any, Any],
    actual: dict[Any, Any],
    alike: Callable[[Any, Any], bool] = lambda one, other: same(one, other),
) -> None:
    missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    assert not missing and not extra, f"{what}: {sorted(missing)} are missing, {sorted(extra)} should not be there"
    for key, value in expected.items():
        assert alike(value, actual[key]), f"{what} {key}: {actual[key]} instead of {value}"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = one.to_dense(), other.to_dense()
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-11)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other is None


def same_in_any_order(some: list[Any], others: list[Any]) -> bool:
    left = list(others)
    for one in some:
        found = next((i for i, other in enumerate(left) if same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


# Programs that change in place what torch itself needs unchanged: some 2 of 100,000.
_REFUSALS = ("modified by an inplace operation", "has been modified inplace")
REFUSED = "refused by torch itself"


def check_graph(party: Party, program: Program, seed: int = 0, traits: Counter[str] | None = None) -> None:
    """Runs a program in both ways and compares. `seed` is for what holds its messages up.

    Raises:
        AssertionError: it says what differs, and in which program.
    """
    try:
        try:
            expected = run_locally(program, traits=traits, plain=party.plain)
        except RuntimeError as error:
            if not any(text in str(error) for text in _REFUSALS):
                raise
            if traits is not None:
                traits[REFUSED] += 1
            return
        actual = party.run(program, seed)
        if traits is not None:
            traits["results in exceptions"] += party.raises
            traits["passes on threads of their own, beside others"] += party.in_threads
        compare(expected, actual, program if party.plain else None)
    except Exception as error:
        error.add_note(f"seed {seed}: {program}")
        raise


def check_graphs(seeds: range, *, plain: bool = False, wide: bool = False) -> Counter[str]:
    """Runs the programs of many seeds, and counts what their graphs have. `wide`: those of wide_maker.py.

    Raises:
        AssertionError: about the first that differs.
    """
    traits: Counter[str] = Counter()
    with Party(plain=plain) as party:
        for seed in seeds:
            program = make_wide_program(Random(seed), plain=plain) if wide else make_program(Random(seed))
            check_graph(party, program, seed, traits)
            if seed % 20 == 0:
                party.check_nothing_is_left()
        party.check_nothing_is_left()
    return traits


# -- the command ------------------------------------------------------------------------------------------

# What at least a tenth of all graphs have.
SHARES = ("unused Sends", "a worker with several active Sends", "a skip connection around a call")
BLOCK = 500  # graphs that one party runs


def run_block(seeds: range) -> tuple[Counter[str], str]:
    """In a process of its own: what the graphs have, and what went wrong."""
    torch.set_num_threads(1)
    try:
        if plain := bool(os.environ.get("TELEGRAD_GRAPH_PLAIN")):
            gc.disable()  # nothing may be left to it
        return check_graphs(seeds, plain=plain, wide=bool(os.environ.get("TELEGRAD_GRAPH_WIDE"))), ""
    except Exception:
        return Counter(), traceback.format_exc()


def run_blocks(blocks: list[range], processes: int) -> Iterator[tuple[Counter[str], str]]:
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run_block, blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares random distributed graphs with local autograd.")
    parser.add_argument("count", type=int, nargs="?", default=5_000, help="how many graphs (default: 5,000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the seed of the first (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once (default: one per CPU)")
    parser.add_argument(
        "--devices", default="", metavar="NAMES", help='of leaves, in turn, such as "cpu,cuda" or "cpu,twin"'
    )
    parser.add_argument("--streams", action="store_true", help="each worker computes on a stream of its own")
    parser.add_argument("--plain", action="store_true", help="without contexts, by torch's own backward()")
    parser.add_argument("--wide", action="store_true", help="with large modules and messages of many tensors")
    given = parser.parse_args()
    os.environ["TELEGRAD_GRAPH_WIDE"] = "1" if given.wide else ""
    os.environ["TELEGRAD_GRAPH_PLAIN"] = "1" if given.plain else ""
    os.environ["TELEGRAD_GRAPH_DEVICES"] = given.devices  # for the processes below
    os.environ["TELEGRAD_GRAPH_STREAMS"] = "1" if given.streams else ""
    last = given.first + given.count
    blocks = [range(first, min(first + BLOCK, last)) for first in range(given.first, last, BLOCK)]
    started = time.monotonic()
    traits: Counter[str] = Counter()
    for found, problem in run_blocks(blocks, min(given.processes, len(blocks))):
        if problem:
            print(problem)
            return 1
        traits += found
        if sys.stdout.isatty():
            print(f"\r{traits['graphs']:,} of {given.count:,}", end="", flush=True)
    graphs = traits.pop("graphs")
    seconds = time.monotonic() - started
    print(f"\r{graphs:,} graphs, all equal to local autograd, in {seconds:.0f} s; of these have")
    for trait, count in traits.most_common():
        print(f"{count / graphs:7.1%}  {trait}")
    return 0


if __name__ == "__main__":
    import random_graphs  # what is called on workers must be found by this name

    sys.exit(random_graphs.main())
