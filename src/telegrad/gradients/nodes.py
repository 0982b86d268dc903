"""The nodes that telegrad puts into torch's graph.

    Sends   its inputs are the tensors of a message that are no leaves. It never runs: it keeps where they lead
    Recv    its output is a tensor of a received message: its backward sends the gradient away
    Wait    in front of the tensors of a message, for one pass: its backward waits for their gradients, and gives them
    Beacon  stands by itself and runs first: it tells which pass an engine call belongs to

What leads to a tensor that was not used must not run, though another tensor of the same message was used. So a Wait
leads to those that were used, and no others; and each tensor that was received has a node of its own: a Recv, or a copy
of torch's in front of one.

The nodes hold numbers only, never the pass or the context. torch holds them where the garbage collector cannot look,
so a cycle through them would live for ever. `running` asks the engine which pass a backward belongs to.
"""

from __future__ import annotations

import os
import threading
from _thread import allocate_lock
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from .._torch import (
    DisableTorchFunctionSubclass,
    are_saved_tensors_hooks_enabled,
    bind_apply,
    current_graph_task_id,
    is_in_tls,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    run_backward,
    stash_in_tls,
)
from ..errors import GradientError
from ..messages import LogEntry
from ..options import LEAST_COPIED, MOST_COPIED
from ..primitives import current

if TYPE_CHECKING:
    from .engine_call import EngineCall

# Note [sequence numbers]
# Of all nodes that are ready the engine takes the one with the highest number first. AccumulateGrad has the highest
# that there is, and so has the Beacon, which is ready before any other: of two that are equal the engine takes the one
# first that has been there longer. A lower one would not do: a device's thread may have a leaf of the CPU's ready
# before the thread of the engine call comes to the Beacon, and its gradient would not be known for the pass's.
_FIRST = 2**64 - 1
_SOON = 2**62  # of Recvs: a gradient that is there goes out before anything else is computed


# By torch's own number of the engine call. The numbers are the process's, and so is this; its single operations
# are atomic. An entry is there only while its engine call runs.
_running: dict[int, EngineCall] = {}
# By thread: an engine call that has begun there, and whose Beacon has not run yet. A device's nodes, which torch runs
# on a thread of their own, may come before it; they wait. Not for the Beacons of other engine calls: torch may have
# these begin on the very thread that would wait. torch hands a thread's keys on to all threads that run its engine
# calls, so each thread that makes any has one (_key). Empty where there are no devices.
_before_beacon: dict[int, threading.Lock] = {}  # each held until then
_LONGEST_START = 60.0  # seconds; the engine counts dependencies before it runs the first node


class _Thread(threading.local):
    starting: EngineCall | None = None  # that this thread is about to begin


_thread = _Thread()


def running() -> EngineCall | None:
    """Returns the engine call that this code runs in; None outside of passes."""
    task = current_graph_task_id()
    if task < 0:
        return None
    call = _running.get(task)
    if call is None and _before_beacon:
        own = threading.get_ident()
        for thread, begun in list(_before_beacon.items()):
            if thread != own and is_in_tls(_key(thread)):
                if begun.acquire(timeout=_LONGEST_START):
                    begun.release()
        call = _running.get(task)
    return call


def _key(thread: int) -> str:
    return f"telegrad: thread {thread}"


current.engine_pass = running


def starting(call: EngineCall) -> None:
    """Says which engine call this thread is about to begin. It must start from the Beacon, too."""
    call.before, _thread.starting = _thread.starting, call
    call.thread = threading.get_ident()
    if call.has_devices:
        if not is_in_tls(key := _key(call.thread)):
            stash_in_tls(key, None)
        begun = allocate_lock()
        begun.acquire()
        _before_beacon[call.thread] = begun


def _has_begun(thread: int) -> None:
    if (begun := _before_beacon.pop(thread, None)) is not None:
        begun.release()


def _in_child() -> None:
    """Forgets, in a fork, the engine calls of threads that are not there."""
    _running.clear()
    _before_beacon.clear()


os.register_at_fork(after_in_child=_in_child)


def ended(call: EngineCall) -> None:
    """Forgets this thread's engine call, which is over."""
    _thread.starting, call.before = call.before, None
    if _before_beacon:
        _has_begun(call.thread)
    _running.pop(call.task, None)


def _on_beacon(gradients: Any) -> Any:
    """Runs before the Beacon, the first node of an engine call."""
    call = _thread.starting
    if call is not None and call.task < 0:
        call.task = current_graph_task_id()
        _running[call.task] = call
        if _before_beacon:
            _has_begun(call.thread)
    return (None,)  # nothing is behind it


_TOKEN = torch.zeros((), device="cpu")
_NONE: list[int] = []


class Sends(torch.autograd.Function):
    # Note [what stands for a tensor that was sent]
    # The tensor may be changed in place later, and lead elsewhere. A saved tensor leads to where the tensor did: where
    # hooks pack and unpack it, torch keeps that apart from its values. So these hooks keep no values, and what is
    # unpacked is a token that leads there, for a Wait.
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return _TOKEN.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError("the Sends of a message were run")


class Recv(torch.autograd.Function):
    # Note [the anchor of a Recv]
    # Its outputs require grad only if an input does, so there is one: a leaf of its own. With it torch can also be
    # told to run this Recv and not that one (autograd.grad(inputs=[anchor, ...])). The tensors themselves are no inputs
    # but come in a tuple: an input that is returned as it is would be a view, and refuse in-place changes.
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, ids: Any, message: int, places: Any, count: int, context: int, tensors: Any
    ) -> Any:
        ctx.ids = ctx.members = ids  # of its tensors; and what a walk finds at each: outside of contexts their Pasts
        ctx.message = message
        ctx.places = places  # of its tensors among those of the message that require grad
        ctx.count = count  # of these
        ctx.context = context
        ctx.materialize_grads = False
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call = _running.get(current_graph_task_id()) or running()
        if call is None:
            raise GradientError(
                f"a backward pass reached a tensor received from another worker (message {ctx.message}, context "
                f"{ctx.context}) and cannot go on there. Use telegrad.autograd.backward(context_id, [loss]) instead of "
                "loss.backward(), or detach() what was received"
                if ctx.context
                else f"a backward pass reached a tensor received from another worker (message {ctx.message}), and "
                "cannot go on there: it was begun by C++ code, or on a worker with Options(plain=False), or that has "
                "shut down. Begin it with loss.backward() or torch.autograd.grad(), or detach() what was received"
            )
        call.post(ctx, gradients)
        return None, None, None, None, None, None, None


class Wait(torch.autograd.Function):
    # Note [why a Wait has sequence number 0]
    # Of the nodes that are ready the engine takes the one with the highest number first. So a Wait, with the lowest,
    # blocks only when there is nothing else to do. No other node of the pass may have 0: the walk sees to it.
    # Its inputs are leaves, what stands for other tensors, and the Wait before it: `given` has the ids of the first
    # ones, which get their gradients from it. `kept` has those of leaves that are no inputs: see Note [past the node of
    # a leaf] in waits.py.
    @staticmethod
    def forward(
        ctx: Any, messages: list[int], given: list[int], kept: list[int], *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.messages = messages
        ctx.given = given
        ctx.kept = kept
        ctx.rest = len(inputs) - len(given)
        return _TOKEN.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        call = _await(ctx.messages, None)
        if ctx.kept:
            call.keep(ctx.kept)
        return None, None, None, *map(call.take, ctx.given), *(gradient,) * ctx.rest


def _await(messages: list[int], limit: float | None) -> EngineCall:
    call = _running.get(current_graph_task_id()) or running()
    if call is None:
        raise GradientError(f"the Wait for message {messages[0]} was run outside of a backward pass")
    call.wait_for(messages, limit)
    return call


def _await_for_a_while(messages: list[int], limit: float, gradients: Any) -> None:
    """Runs before the node that make_wait_for_a_while() makes."""
    _await(messages, limit)


for _kind in (Recv, Wait):
    # torch's own `apply` of a node, in Python, first looks which of `backward` and `vjp` its Function has.
    _node: Any = _kind._backward_cls
    _node.apply = _kind.backward


# In graphs, profiles and anomaly mode these have the names that torch's own nodes have. A Wait stands for all that was
# sent in a message, as torch's send function does.
_recv_node: Any = Recv._backward_cls
_recv_node.__name__ = "torch::distributed::autograd::RecvRpcBackward"
_recv_node.came_from = None
_wait_node: Any = Wait._backward_cls
_wait_node.__name__ = "torch::distributed::autograd::SendRpcBackward"


def _is_of_same_message(one: Any, other: Any) -> bool:
    return one is other or (type(other) is type(one) and one.message == other.message)


# torch has one node for all that was received in a message, and programs compare nodes with ==. Sets and dictionaries
# tell ours apart: they ask the hash first, and that is each one's own.
_recv_node.__eq__ = _is_of_same_message
_recv_node.__hash__ = object.__hash__

# torch's Function.apply, without what it does for transforms (vmap and the like) that none of these nodes meets.
_apply_sends, _apply_recv, _apply_wait = (bind_apply(None, kind) for kind in (Sends, Recv, Wait))


def make_beacon() -> torch.Tensor:
    """Makes a Beacon, a node of torch's own that keeps nothing; returns its token. It can be used any number of times,
    by any thread."""
    return make_first(_on_beacon)


def make_first(prehook: Any) -> torch.Tensor:
    """Makes a node that stands by itself and runs before all others that are ready; returns its token."""
    return _make_node(_FIRST, prehook)


def _make_node(number: int, prehook: Any) -> torch.Tensor:
    with torch.enable_grad(), torch.inference_mode(False):
        token = torch.zeros((), device="cpu", requires_grad=True).clone()
    node: Any = token.grad_fn
    node._set_sequence_nr(number)
    node.register_prehook(prehook)
    return token


# Note [what a failed engine call leaves behind]
# Nodes that were ready when another one raised stay in the queue of their thread, and with them all that is behind
# them, until an engine call of that thread comes to them: if ever, for those with low numbers. So after a failure one
# is run that comes to all: its only node has the lowest number. The second time is for a Wait, which has the same
# number, and of two that are equal the engine takes the one first that has been there longer.
_LAST = _make_node(0, lambda gradients: (None,))


def drop_leftovers() -> None:
    """Drops the nodes that a failed engine call of this thread has left in its queue."""
    for _ in range(2):
        run_backward((_LAST,), (_TOKEN,), True, False, (), True, True)


# Note [copies]
# A Recv is Python code, when it is made and when it runs. Where a message has several small tensors, they have one Recv
# together, and what users get are copies of what it gives: a hook of one must not run where only another one was used.
# (So they are not copied by one _foreach operation, which has one node.) And so the Recv's own may share memory: see
# rebuild_gathered() in serialization/gathering.py.


def _small_ones(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the places of the tensors that can be copied together; none, where that would not pay."""
    places = [
        place
        for place, tensor in enumerate(tensors)
        if type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.nbytes <= MOST_COPIED
        and not tensor.is_conj()
        and not tensor.is_neg()
    ]
    return places if len(places) >= LEAST_COPIED else []


# For each saved tensor these are called: C functions. The first returns False.
_pack: Any = callable
_unpack: Any = (_TOKEN, _TOKEN).__getitem__


def make_sends(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Makes the Sends of inner tensors; returns its token, which keeps it (its object in Python does not, in torch
    2.11). The `next_functions` of a Sends are the edges of the tensors, and its `saved_tensors` stand for them: see
    Note [what stands for a tensor that was sent]."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return make_sends(tensors)
    if not are_saved_tensors_hooks_enabled():
        token: torch.Tensor = _apply_sends(*tensors)
        for saved in token.grad_fn._raw_saved_tensors:  # type: ignore[union-attr]
            saved.register_hooks(_pack, _unpack)
        return token
    push_saved_tensors_hooks(_pack, _unpack)
    try:
        return _apply_sends(*tensors)  # type: ignore[no-any-return]
    finally:
        pop_saved_tensors_hooks()


# Note [leaves and threads]
# torch makes a leaf's AccumulateGrad when an operation first needs it, under a lock of the leaf, and needs the
# interpreter lock in it (2.10 to 2.13 at least). Function.apply waits for the leaf's lock while it holds the
# interpreter lock: a deadlock, if two threads come to a leaf at the same time. Plain operations let the interpreter
# lock go first. So for a leaf that is to go into a Wait, one of these makes the node, and keeps it.
def alias_of(leaf: torch.Tensor) -> torch.Tensor | None:
    """Makes a view of a leaf, whose history keeps the leaf's own node; None for a sparse leaf, which has no views."""
    if leaf.layout is not torch.strided:
        return None
    if torch.is_grad_enabled() and type(leaf) is torch.Tensor and not torch.is_inference_mode_enabled():
        return leaf.view_as(leaf)
    with torch.inference_mode(False), torch.enable_grad(), DisableTorchFunctionSubclass():
        return leaf.view_as(leaf)


def make_recvs(
    message: int,
    sent: Sequence[LogEntry],
    context: int,
    tensors: Sequence[torch.Tensor],
    came_from: dict[str, str] | None = None,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Returns the tensors of a message, each with a Recv behind it; and the Recvs. `came_from` has the sender's devices
    by those of this worker, where a device map said where the tensors were to arrive."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return make_recvs(message, sent, context, tensors, came_from)
    received, recvs, count = list(tensors), [], len(tensors)
    parts: list[Sequence[int]] = [(place,) for place in range(count)]
    if count >= LEAST_COPIED and (together := _small_ones(tensors)):
        small = set(together)
        parts = [together, *(part for part in parts if part[0] not in small)]
    for places in parts:
        found = _apply_recv(
            torch.empty(0, device="cpu", requires_grad=True),
            tuple([sent[place].id for place in places]),
            message,
            places,
            count,
            context,
            tuple([tensors[place] for place in places]),
        )
        recv = found[0].grad_fn
        recv._set_sequence_nr(_SOON)
        if came_from is not None:
            recv.came_from = came_from
        recvs.append(recv)
        if len(places) > 1:
            found = [tensor.clone() for tensor in found]
        for place, tensor in zip(places, found, strict=True):
            received[place] = tensor
    return received, recvs


def make_wait(
    messages: list[int], given: list[int], inputs: list[torch.Tensor], kept: list[int] = _NONE
) -> torch.Tensor:
    """Makes a Wait; returns its token. The engine comes to it when there is nothing else to do.
    The caller has enabled grad mode, and disabled __torch_function__ of subclasses."""
    token: torch.Tensor = _apply_wait(messages, given, kept, *(inputs or (_LAST,)))
    token.grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]
    return token


def make_wait_for_a_while(messages: list[int], limit: float, wait: torch.Tensor) -> torch.Tensor:
    """Makes a node in front of a Wait, which waits for the same, but no longer than so many seconds; returns its token.
    The caller has enabled grad mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make_wait_for_a_while(messages, limit, wait)
    token = wait.clone()
    node: Any = token.grad_fn
    node._set_sequence_nr(0)
    node.register_prehook(partial(_await_for_a_while, messages, limit))
    return token


with torch.inference_mode(False):
    AccumulateGrad: type = type(
        torch.autograd.graph.get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node
    )
    with torch.enable_grad():
        CopyNode: type = type(torch.empty(0, device="cpu", requires_grad=True).clone().grad_fn)
RecvNode: Any = Recv._backward_cls
CheckpointNode: type = CheckpointFunction._backward_cls
