"""Devices in a pass: streams, and the engine's CPU thread.

# Note [streams]
A device works off what it is given in the order of a stream. torch's engine runs a node on the stream of its forward;
inside of its backward a gradient is ready on that stream, and on no other. What another stream is to use goes with an
event (`record`), which that stream waits for (`wait`), and is marked as used there, or the allocator would give its
memory away when the last reference goes. What is most often used on the same stream goes with the stream (`follow`).
Streams wait only for events of this process: of another one that dies they would wait for ever.

# Note [the pump]
A device's nodes run on a thread of torch's own. The CPU nodes behind them run on the thread of the engine call, which
may wait, in a Wait, for gradients that depend on these very nodes. So it runs a small engine call of its own now and
then: in it, torch works off the CPU nodes that are ready. torch goes by the gradients: a node that gets None runs on
the CPU's thread, whatever its device. So the graph (`mix_of`) tells only how often that is likely to be needed, and a
graph without any device does not need it at all.

# Note [an engine call inside of another]
While it waits for a device, torch has its thread work off what else is ready there: also the Wait of the engine call
around it. That would wait, above the inner call on the thread's stack, for gradients that depend on the inner one. So
beside devices the inner one has a thread of its own, for which nothing else is ready (`on_own_thread`).
But not inside of a node that torch runs on the thread of a device (`is_thread_of_torch`): the inner one needs that very
thread, and so runs on it, as any engine call does there. No Wait of the call around it is ready there.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from .._torch import run_backward
from ..primitives.torch_threads import prepared
from . import deep, nodes
from .nodes import AccumulateGrad
from .torch_modes import applied, current_modes

Event = Any  # torch.Event


def is_on_device(tensor: torch.Tensor | None) -> bool:
    """Says whether a device computes it, at a time of its own."""
    return tensor is not None and not tensor.is_cpu and not tensor.is_meta


def streams_of(tensors: Iterable[torch.Tensor | None]) -> list[torch.Stream]:
    """Returns the current stream of each device among the tensors'."""
    # As is_on_device() says, but without a call for each:
    devices = {tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu and not tensor.is_meta}
    return [torch.accelerator.current_stream(device) for device in devices]


class Ready(NamedTuple):
    """How the gradients of a message are there."""

    streams: list[torch.Stream]  # one for each device: they are ready on it
    are_apart: bool  # each in memory of its own

    @classmethod
    def of(cls, gradients: Sequence[torch.Tensor | None]) -> Ready | None:
        """None: none is on a device."""
        streams = streams_of(gradients)
        if not streams:
            return None
        given = [gradient for gradient in gradients if gradient is not None]
        if not all(type(gradient) is torch.Tensor and gradient.layout is torch.strided for gradient in given):
            return cls(streams, are_apart=False)  # a subclass may have no memory of its own
        are_apart = len(given) == 1 or len({g.untyped_storage().data_ptr() for g in given}) == len(given)
        return cls(streams, are_apart)


def record(tensors: Iterable[torch.Tensor | None]) -> list[Event]:
    """Records an event on the current stream of each device among the tensors'."""
    return [stream.record_event() for stream in streams_of(tensors)]


def wait(events: Iterable[Event], tensors: Iterable[torch.Tensor | None]) -> None:
    """Lets the current streams wait for the events, and marks the tensors as used on them."""
    for event in events:
        torch.accelerator.current_stream(event.device).wait_event(event)
    for tensor in tensors:
        if tensor is not None and is_on_device(tensor):
            mark_used(tensor)


def follow(streams: Iterable[torch.Stream], tensor: torch.Tensor) -> None:
    """Lets the current stream of a tensor's device wait for that one of these streams that the tensor is ready on;
    most often it is the same one."""
    for stream in streams:
        if stream.device == tensor.device:
            own = torch.accelerator.current_stream(tensor.device)
            if own != stream:
                own.wait_stream(stream)
                mark_used(tensor)


def mark_used(tensor: torch.Tensor) -> None:
    """Marks a tensor as used on the current stream of its device."""
    if tensor.layout is torch.strided:
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    elif tensor.layout is torch.sparse_coo:
        for part in (tensor._indices(), tensor._values()):
            mark_used(part)


class Mix(enum.Enum):
    """What the nodes of a graph run on."""

    NO_DEVICE = enum.auto()
    DEVICE_ONLY = enum.auto()  # as far as the graph tells, no CPU node is behind one that a device runs
    BOTH = enum.auto()


def mix_of(starts: Iterable[Any]) -> Mix:
    """Says what runs behind these nodes. Leaves do not count: nothing is behind them."""
    stack = [node for node in starts if node is not None]
    seen = set(stack)
    found = Mix.NO_DEVICE
    while stack and found is not Mix.BOTH:
        node = stack.pop()
        on_device = not _on_cpu(node)
        if on_device:
            found = Mix.DEVICE_ONLY
        for next, _ in node.next_functions:
            if next is None or type(next) is AccumulateGrad:
                continue
            if on_device and (_on_cpu(next) or isinstance(node, BackwardCFunction)):  # which may return None
                found = Mix.BOTH
                break
            if next not in seen:
                seen.add(next)
                stack.append(next)
    if len(seen) > deep.DEEP:
        deep.brace(seen)
    return found


def _on_cpu(node: Any) -> bool:
    """Says whether torch runs a node on the CPU's thread: it goes by the devices of the gradients that come in."""
    metadata: Sequence[Any] = node._input_metadata
    return all(entry.device.type == "cpu" for entry in metadata)


def pump() -> None:
    """Has torch work off the CPU nodes that are ready, on the thread of an engine call that waits."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    _pass_through(torch.device(device.type, torch.accelerator.current_device_index()))


def drain(leaves: Iterable[Any]) -> None:
    """After an engine call has failed: waits until the threads of devices run none of its nodes any more. torch leaves
    them at the node that they are at, and has them run none after it."""
    for device in {leaf.variable.device for leaf in leaves}:
        if device.type != "cpu":
            _pass_through(device)


def _pass_through(device: torch.device) -> None:
    """Runs a small engine call that goes through the thread of a device."""
    leaf, result, one = _small_graph(device)
    run_backward((result,), (one,), True, False, (leaf,), True, False)


@functools.cache
def _small_graph(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.enable_grad(), torch.inference_mode(False):
        leaf = torch.zeros((), device=device, requires_grad=True)
        return leaf, leaf * 1, torch.ones_like(leaf).detach()


def is_thread_of_torch() -> bool:
    """Says, inside of an engine call, whether this is the thread of a device. If the call is none of ours: one that
    Python has not started."""
    if (call := nodes.running()) is not None:
        return call.thread != threading.get_ident()
    return torch.cuda.is_initialized() and isinstance(threading.current_thread(), threading._DummyThread)


def on_own_thread(function: Callable[[], Any]) -> Any:
    """Runs a function on a new thread, with this one's streams and modes, and waits for it."""
    found: list[Any] = []
    errors: list[BaseException] = []
    streams = [torch.accelerator.current_stream(device) for device in range(torch.accelerator.device_count())]
    device = torch.accelerator.current_device_index() if streams else 0
    modes = current_modes()

    def run() -> None:
        try:
            for stream in streams:
                if stream.stream_id or stream.device_index == device:  # another's default stream is there
                    torch.accelerator.set_stream(stream)
            if streams:
                torch.accelerator.set_device_index(device)
            with applied(modes):
                found.append(function())
        except BaseException as error:
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=prepared(context.run, run), name="telegrad-engine", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException as interrupt:  # Ctrl-C: what runs there is not left behind, unless there is a second one
        errors.insert(0, interrupt)
        thread.join()
    if errors:
        error = errors[0]
        errors.clear()
        try:
            raise error
        finally:
            del error  # its traceback has this frame: only the collector would find the two
    return found.pop()
