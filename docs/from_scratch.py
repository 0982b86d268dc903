"""Autograd across workers, from scratch.

A forward pass may leave its worker: it sends tensors to another one, which computes with them and sends others back.
torch's graph ends where its worker ends. So what a loss was computed from is spread over several graphs, and between
them lie messages. This file is the whole idea of how telegrad goes back through them, with threads for workers and
queues for the network. It uses torch and nothing of telegrad. Read it from top to bottom, then run it:

    python docs/from_scratch.py

The picture to keep in mind is one call from `a` to `b`:

    worker a        x ──> Send                        Recv ──> loss
                           :                           ^
                           v                           :
    worker b             Recv ──> f(x) ─────────────> Send

Backward, a Recv sends the gradients that reach it, and a Send hands on those that arrive. Differentiation itself is
left to torch's engine, with one call of it on each worker. What has to be found out is for which Sends to wait: a
result that was not used gets no gradient, and a worker that waits for one waits for ever.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

PATIENCE = 10.0  # seconds; no worker waits longer for an answer or a gradient, so a mistake ends in an error

MessageId = tuple[str, int]  # the sender's name and a number: ("b", 3) was sent by b, after ("b", 2)
Log = dict[MessageId, set[MessageId]]  # for each message, the messages that it was computed from

here = threading.local()  # here.worker, here.running: whose thread this is, and which pass it runs


# ---- 1. The two ends of a message, as nodes of the graph -------------------------------------------------


class Send(Function):
    """The sender's end. It takes in the tensors that are sent and gives a token, by which a pass reaches it."""

    @staticmethod
    def forward(ctx: Any, message: MessageId, *sent: Tensor) -> Tensor:
        ctx.message = message
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *here.running.arrived[ctx.message]  # part 4 sees to it that they have arrived


class Recv(Function):
    """The receiver's end. It gives the received tensors, and sends their gradients back where they came from.

    torch runs a node backward only if an input of it requires grad, and all of a Recv's inputs are on another
    worker. So it has a leaf of its own, the anchor, which never gets a gradient. The tensors come in inside
    the parcel, where torch does not look. So the outputs are new to it, and may be changed in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parcel: Parcel) -> tuple[Tensor, ...]:
        ctx.message = parcel.message
        ctx.set_materialize_grads(False)  # "no gradient" stays None, here and at the sender
        pairs = zip(parcel.tensors, parcel.tracked, strict=True)
        ctx.mark_non_differentiable(*[tensor for tensor, tracked in pairs if not tracked])
        return tuple(parcel.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        # It sends even if all gradients are None: the peer knows that this Recv is reached, and waits.
        copies = [None if gradient is None else gradient.clone() for gradient in gradients]
        here.worker.post(ctx.message[0], Gradients(here.running.id, ctx.message, copies))
        return None, None


# ---- 2. The log: what depends on what --------------------------------------------------------------------
#
# No worker sees the whole graph. But each can see, when it sends, from which of its Recvs the tensors were
# computed, and write down: "this message depends on those". Entries travel along with messages. So a worker
# that holds a received tensor also holds the log of everything behind it, and can say without asking the others
# which Sends a pass from there will reach.


def walk(*starts: Any) -> tuple[set[MessageId], list[Any]]:
    """The messages of all Recvs, and all leaves (AccumulateGrad nodes), behind these nodes of the local graph."""
    messages, leaves, seen = set(), [], set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() == 0:
            node._set_sequence_nr(1)  # a thread's first node has 0, which part 4 wants for itself
        if node.name() == "RecvBackward":
            messages.add(node.message)
        if node.name().endswith("AccumulateGrad"):
            leaves.append(node)
        todo.extend(behind for behind, _ in node.next_functions)
    return messages, leaves


def closure(log: Log, messages: set[MessageId]) -> Log:
    """The entries of these messages, of those that they depend on, and so on."""
    found: Log = {}
    todo = list(messages)
    while todo:
        message = todo.pop()
        if message not in found:
            found[message] = log[message]
            todo.extend(log[message])
    return found


# ---- 3. Messages and workers -----------------------------------------------------------------------------


class Parcel(NamedTuple):
    """Tensors on their way, as bare numbers: the graph stays behind."""

    message: MessageId
    tensors: list[Tensor]
    tracked: list[bool]  # which of them required grad at the sender
    log: Log


class Call(NamedTuple):
    function: Callable[..., Any]
    parcel: Parcel


class Reply(NamedTuple):
    call: MessageId
    parcel: Parcel


class Begin(NamedTuple):
    """To each worker that takes part in a pass: these Sends of yours will get their gradients."""

    pass_id: MessageId
    sends: list[MessageId]


class Gradients(NamedTuple):
    pass_id: MessageId
    message: MessageId
    gradients: list[Tensor | None]


class Done(NamedTuple):
    pass_id: MessageId
    error: Exception | None


class Worker:
    """A name, an inbox with a thread that reads it, and what a pass will need: the tokens and the log."""

    def __init__(self, name: str, group: dict[str, Worker]) -> None:
        self.name = name
        self.group = group
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.numbers = itertools.count()
        self.answers: dict[MessageId, queue.Queue[Reply]] = {}
        self.tokens: dict[MessageId, Tensor] = {}  # of every Send of this worker
        self.log: Log = {}
        self.passes: dict[MessageId, Pass] = {}
        threading.Thread(target=self.read, daemon=True).start()

    def post(self, to: str, message: Any) -> None:
        self.group[to].inbox.put(message)

    def read(self) -> None:
        """Sort what comes in. What may take long gets a thread of its own, so that reading never stops."""
        while (message := self.inbox.get()) is not None:
            match message:
                case Call():
                    threading.Thread(target=self.serve, args=(message,), daemon=True).start()
                case Reply():
                    self.answers.pop(message.call).put(message)
                case Begin():
                    threading.Thread(target=take_part, args=(self, message), daemon=True).start()
                case Gradients():
                    self.find_pass(message.pass_id).inbox.put(message)
                case Done():
                    self.find_pass(message.pass_id).done.put(message)

    def find_pass(self, pass_id: MessageId) -> Pass:
        # A gradient may overtake the Begin, and is kept. So whichever comes first makes the Pass.
        return self.passes.setdefault(pass_id, Pass(pass_id))

    def call(self, to: str, function: Callable[..., Any], *args: Tensor) -> Any:
        """Run `function(*args)` on another worker. Arguments and results are tensors."""
        parcel = self.pack(args)
        self.answers[parcel.message] = answer = queue.Queue()
        self.post(to, Call(function, parcel))
        results = self.unpack(answer.get(timeout=PATIENCE).parcel)
        return results[0] if len(results) == 1 else results

    def serve(self, call: Call) -> None:
        here.worker = self
        results = call.function(*self.unpack(call.parcel))
        parcel = self.pack((results,) if isinstance(results, Tensor) else results)
        self.post(call.parcel.message[0], Reply(call.parcel.message, parcel))

    def pack(self, tensors: tuple[Tensor, ...]) -> Parcel:
        """On the way out: put a Send onto the tensors, and an entry into the log."""
        message = (self.name, next(self.numbers))
        token = Send.apply(message, *tensors)
        self.tokens[message] = token
        self.log[message], _ = walk(token.grad_fn)
        copies = [tensor.detach().clone() for tensor in tensors]
        tracked = [tensor.requires_grad for tensor in tensors]
        # All that is behind this message goes with it. (telegrad leaves out what the peer has been sent before.)
        return Parcel(message, copies, tracked, closure(self.log, {message}))

    def unpack(self, parcel: Parcel) -> tuple[Tensor, ...]:
        """On the way in: merge the log, before any code can compute with the tensors."""
        self.log.update(parcel.log)
        anchor = torch.zeros((), requires_grad=True)
        return Recv.apply(anchor, parcel)


# ---- 4. The backward pass --------------------------------------------------------------------------------
#
# The worker that calls backward is the root. It walks from the loss to its Recvs and takes the closure over the
# log. That is the exact set of Sends that the pass will reach: the active ones. The root tells each worker its
# own, with one message to which it needs no answer, and starts. A message that was not used is in no set. Of
# one that was used in part, the other tensors get None.


def backward(worker: Worker, loss: Tensor) -> Pass:
    """Run a pass through all workers. Each keeps the gradients of its leaves under the id of the pass."""
    the_pass = worker.find_pass((worker.name, next(worker.numbers)))
    messages, _ = walk(loss.grad_fn)
    active: dict[str, list[MessageId]] = defaultdict(list)
    for message in closure(worker.log, messages):
        active[message[0]].append(message)
    sends_here = active.pop(worker.name, [])
    for name, sends in active.items():
        worker.post(name, Begin(the_pass.id, sends))
    run(worker, the_pass, sends_here, loss)
    for _ in active:
        done = the_pass.done.get(timeout=PATIENCE)
        if done.error is not None:
            raise RuntimeError("a worker failed in the backward pass") from done.error
    return the_pass


def take_part(worker: Worker, begin: Begin) -> None:
    """Take part in a pass that a Begin announced. Each worker reports to the root alone."""
    error = None
    try:
        run(worker, worker.find_pass(begin.pass_id), begin.sends)
    except Exception as failure:
        error = failure
    root = begin.pass_id[0]
    worker.post(root, Done(begin.pass_id, error))


def run(worker: Worker, the_pass: Pass, sends: list[MessageId], loss: Tensor | None = None) -> None:
    """A worker's part of a pass, as one call of torch's engine: from the loss, and from the active Sends.

    Why one call. A tensor may get gradients from several sides, as x does in `x + call("b", f, x)`, and what
    is behind it has to run once, on their sum. The engine sees to that, if it knows all sides when it starts.
    But then most gradients have not arrived yet. So something inside the call has to wait: the Waits.

    In which order. In the order of sending, a Wait is put onto each Send's token and the Wait before it. The
    engine comes to the last one first, and takes gradients in exactly the reverse of the order of sending.

    Why no worker waits for ever. Say all workers wait. Of the Sends waited for, take the one that was sent last,
    S. Its Recv, on some worker B, has not run, so B has not come to some Send that was computed from what that
    Recv received, and that was sent after S. B waits at that Send or at a later one. But S was the last.
    (With `reverse=True` in the sort below, the example `chain` is stuck.)
    """
    here.worker, here.running = worker, the_pass
    starts = [] if loss is None else [loss]
    tokens = [worker.tokens[send] for send in sorted(sends)]
    _, leaves = walk(*[start.grad_fn for start in starts + tokens])
    wait = None
    for token in tokens:
        wait = Wait.apply(token.grad_fn.message, token, wait)
        # Of all nodes that are ready, the engine takes the one with the highest number. Only Waits have 0. So
        # it waits when it has nothing else to do, and every Recv that can send its gradients has done so.
        wait.grad_fn._set_sequence_nr(0)
    if wait is not None:
        starts.append(wait)
    hooks = [leaf.register_prehook(the_pass.capture(leaf.variable)) for leaf in leaves]
    try:
        torch.autograd.backward(starts)
    finally:
        for hook in hooks:
            hook.remove()


class Wait(Function):
    """Where a pass waits for a Send's gradients. It has none to give: it is there for the order alone."""

    @staticmethod
    def forward(ctx: Any, message: MessageId, token: Tensor, earlier: Tensor | None) -> Tensor:
        ctx.message = message
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None]:
        here.running.wait_for(ctx.message)
        return None, None, None  # the engine runs what is behind a None all the same


class Pass:
    """One pass, as one worker sees it. Gradients of leaves are kept here: `.grad` is the user's."""

    def __init__(self, pass_id: MessageId) -> None:
        self.id = pass_id
        self.inbox: queue.Queue[Gradients] = queue.Queue()
        self.arrived: dict[MessageId, list[Tensor | None]] = {}
        self.leaves: dict[Tensor, Tensor] = {}
        self.done: queue.Queue[Done] = queue.Queue()  # for the root

    def wait_for(self, message: MessageId) -> None:
        while message not in self.arrived:
            came = self.inbox.get(timeout=PATIENCE)
            self.arrived[came.message] = came.gradients

    def capture(self, leaf: Tensor) -> Callable[[tuple[Tensor | None]], tuple[None]]:
        """A hook for just before `leaf.grad` is written: it takes the gradient away, and leaves None."""

        def prehook(gradients: tuple[Tensor | None]) -> tuple[None]:
            if gradients[0] is not None:
                self.leaves[leaf] = gradients[0]
            return (None,)

        return prehook


# ---- 5. Is it right? -------------------------------------------------------------------------------------
#
# Each example is run on three workers, beginning on a, and also as a local program, in which a call is just a
# call. Each worker has one weight, and only functions that run there use it.


def skip_connection(call: Callable[..., Any], weights: dict[str, Tensor]) -> Tensor:
    """x goes to b, and also past it. The sine is differentiated once, when both gradients are there."""
    x = weights["a"].sin()
    y = call("b", lambda x: x * weights["b"], x)
    y += 1.0  # a received tensor is like any other
    return (x * y).sum()


def unused_output(call: Callable[..., Any], weights: dict[str, Tensor]) -> Tensor:
    """One of b's two results is used. c gets a tensor that is used, but what it makes of it is not."""
    x = weights["a"].exp()
    used, _ = call("b", lambda x: (x * weights["b"], x.cos()), x)
    call("c", lambda y: y * weights["c"], used)
    return used.square().sum()


def chain(call: Callable[..., Any], weights: dict[str, Tensor]) -> Tensor:
    """Three times from a to b, from there to c, and back; each time also past them."""

    def on_b(x: Tensor) -> Tensor:
        y = x * weights["b"]
        return y + call("c", lambda y: torch.tanh(y * weights["c"]), y)

    x = weights["a"]
    for _ in range(3):
        x = x + torch.sin(call("b", on_b, x))
    return x.sum()


def compare(example: Callable[..., Tensor]) -> None:
    """Print a line of the table. Raise if a gradient is not that of local autograd."""
    torch.manual_seed(0)
    weights = {name: torch.randn(4, dtype=torch.float64, requires_grad=True) for name in "abc"}
    loss = example(lambda _, function, *args: function(*args), weights)
    expected = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)

    group: dict[str, Worker] = {}
    for name in weights:
        group[name] = Worker(name, group)
    here.worker = group["a"]
    loss = example(lambda *call: here.worker.call(*call), weights)
    the_pass = backward(group["a"], loss)

    passes = {name: worker.find_pass(the_pass.id) for name, worker in group.items()}
    sends = sum(len(worker.tokens) for worker in group.values())
    active = sum(len(part.arrived) for part in passes.values())
    line = f"{example.__name__:<16}{sends:>6}{active:>7}"
    for (name, weight), wanted in zip(weights.items(), expected, strict=True):
        got = passes[name].leaves.get(weight)
        if (got is None) != (wanted is None):
            raise AssertionError(f"{example.__name__}, worker {name}: {got} instead of {wanted}")
        if got is not None:
            torch.testing.assert_close(got, wanted)
        line += f"{'none':>10}" if got is None else f"{(got - wanted).abs().max().item():>10.1e}"
    print(line)
    for worker in group.values():
        worker.inbox.put(None)


if __name__ == "__main__":
    print("                 Sends active   difference from local autograd on a, b, c")
    for example in (skip_connection, unused_output, chain):
        compare(example)
    print("all gradients are equal")
