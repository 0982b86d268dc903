"""Leaf gradients: taken out of torch's engine before they reach `.grad`, and added up as AccumulateGrad would.

Capture        of one engine call: prehooks on the leaves' nodes take what would go to `.grad`
GradientTable  of one context (or of one pass): the gradient of each leaf
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import WeakTensorRef
from ..errors import GradientError

Leaf = torch.Tensor


class GradientTable:
    """Gradients by leaf. Not locked: whoever shares it locks."""

    def __init__(self) -> None:
        self._gradients: dict[Leaf, torch.Tensor] = {}
        self._events: dict[Leaf, Any] = {}  # recorded on the stream where a device's gradient was made

    def __len__(self) -> int:
        return len(self._gradients)

    def add(self, leaf: Leaf, gradient: torch.Tensor) -> None:
        """Adds to what is there. The gradient is the table's from now on."""
        self._gradients[leaf] = accumulated(self._gradients.get(leaf), gradient)
        if not gradient.is_cpu:
            self._record(leaf)

    def _record(self, leaf: Leaf) -> None:
        device = self._gradients[leaf].device
        if device.type != "meta":
            self._events[leaf] = torch.accelerator.current_stream(device).record_event()

    def take_over(self, other: GradientTable) -> None:
        """Adds all of another table, which is empty after it."""
        other.wait_for_events()
        for leaf, gradient in other._gradients.items():
            self.add(leaf, gradient)
        other.clear()

    def add_to_leaves(self) -> None:
        """Adds every gradient to its leaf's `.grad`, and empties the table."""
        self.wait_for_events()
        with _touching_grad:
            for leaf, gradient in self._gradients.items():
                turn = _turns.get(leaf)
                if turn is not None and turn.is_taken:
                    turn.to_add.append(gradient)
                else:
                    leaf.grad = accumulated(leaf.grad, gradient)
        self.clear()

    def replace(self, leaf: Leaf, gradient: torch.Tensor) -> None:
        self._gradients[leaf] = gradient
        if not gradient.is_cpu:
            self._record(leaf)

    def get(self, leaf: Leaf) -> torch.Tensor | None:
        self._wait_for(self._events.get(leaf))
        return self._gradients.get(leaf)

    def copy(self) -> dict[Leaf, torch.Tensor]:
        """The gradients, once they are there on the caller's streams."""
        self.wait_for_events()
        return dict(self._gradients)

    def wait_for_events(self) -> None:
        for event in self._events.values():
            self._wait_for(event)

    def _wait_for(self, event: Any) -> None:
        if event is not None:
            torch.accelerator.current_stream(event.device).wait_event(event)

    def clear(self) -> None:
        self._gradients.clear()
        self._events.clear()


def accumulated(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """The sum, by AccumulateGrad's rules: into the old one where that can be, out of place for a gradient that is
    itself to be differentiated, and the dense term first in a mixed sum."""
    if old is None:
        return new
    if old.requires_grad or new.requires_grad:
        with torch.enable_grad():
            return old + new
    with torch.no_grad():
        if old.is_sparse and not new.is_sparse:
            return new + old
        if old.is_inference() and not torch.is_inference_mode_enabled():
            return old + new
        return old.add_(new)


def _references(gradients: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """How often a prehook's gradient is held, in torch and in Python."""
    gradient = gradients[0]
    return gradient._use_count(), sys.getrefcount(gradient)  # type: ignore[attr-defined]


@functools.cache
def _references_of_free_one() -> tuple[int, int]:
    """The same of a gradient that only the engine holds. Versions of torch differ. Not when this module is imported:
    the engine's first call starts threads, and CUDA, which no process may do that is forked after it."""
    found = []
    with torch.enable_grad(), torch.inference_mode(False):
        leaf = torch.zeros(1, requires_grad=True)
        loss = leaf * 2
        node: Any = loss.grad_fn
        node.next_functions[0][0].register_prehook(lambda gradients: found.append(_references(gradients)))
        loss.backward()
    return found[0]


# Two threads must never touch one leaf's `.grad` at the same time: not even to read it is safe in torch. Held for a
# moment only. Reentrant: a finaliser may run in it.
_touching_grad = threading.RLock()

# Note [post-accumulate hooks]
# They run inside of AccumulateGrad and look at the leaf's `.grad`. So for a leaf that has any, `.grad` is set aside
# by the prehook, the gradient goes its usual way, and what is in `.grad` after the hooks is taken. Passes take turns
# with a leaf. What is to be added to its `.grad` meanwhile is added when that is put back.


class _Turn:
    __slots__ = ("free", "is_taken", "to_add")

    def __init__(self) -> None:
        self.free = threading.Lock()  # not reentrant: a device's thread may take it and the pass's give it back
        self.is_taken = False
        self.to_add: list[torch.Tensor] = []


_turns: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by leaf
_making_turns = threading.RLock()  # guards _turns
_LONGEST_HOOK = 60.0  # seconds


def _turn_of(leaf: Leaf) -> _Turn:
    with _making_turns:
        turn: _Turn | None = _turns.get(leaf)
        if turn is None:
            turn = _turns[leaf] = _Turn()
        return turn


# Note [averaged leaves]
# DistributedDataParallel takes a gradient out of `.grad` once the leaf's node has run, and puts the average over all of
# its processes there when the engine call ends; also for leaves that this pass does not reach. So for all leaves of
# such a module `.grad` is set aside before the engine call, nothing is taken during it, and what is in `.grad` then is
# the gradient.
_averaged: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by leaf: all leaves of its module, weakly


def leaves_are_averaged(leaves: Iterable[Leaf]) -> None:
    """Says that these are the leaves of one DistributedDataParallel."""
    together = WeakIdKeyDictionary()
    for leaf in leaves:
        together[leaf] = None
        _averaged[leaf] = together


class Capture:
    """Takes the gradients of leaves while one engine call runs. `is_ours` says whether it is that call which runs:
    other threads may run backward through the same leaves."""

    def __init__(self, is_ours: Callable[[], bool]) -> None:
        self._is_ours = is_ours
        self._free = _references_of_free_one()
        # Guards the gradients: device threads of the engine add at the same time. Reentrant: a finaliser may run in it.
        self._lock = threading.RLock()
        self._cleanup: list[Callable[[], None]] = []
        # By address: gradients that several hold. The last of them must not take it for its own: a Function or a hook
        # that has handed it out may have kept the address.
        self._shared: dict[int, Any] = {}
        self.gradients = GradientTable()

    def watch(self, nodes: Iterable[Any], is_ours: Callable[[], bool] | None = None) -> None:
        """`nodes` are the leaves' AccumulateGrad nodes."""
        ours = is_ours or self._is_ours
        averaged: dict[int, Leaf] = {}
        for node in nodes:
            leaf = node.variable
            if _averaged and leaf in _averaged:
                averaged.update((id(other), other) for other in _averaged[leaf])
            elif leaf._post_accumulate_grad_hooks:
                self._watch_with_hooks(node, leaf, ours)
            else:
                handle = node.register_prehook(self._taker(leaf, ours))
                self._cleanup.append(handle.remove)
        for key in sorted(averaged):  # in one order in all passes: each waits for its turn
            self._set_aside(averaged[key])

    def _set_aside(self, leaf: Leaf) -> None:
        """See Note [averaged leaves]."""
        turn = _turn_of(leaf)
        if not turn.free.acquire(timeout=_LONGEST_HOOK):
            raise GradientError(f"another pass had a leaf of a DistributedDataParallel for over {_LONGEST_HOOK:.0f} s")
        with _touching_grad:
            aside, leaf.grad = leaf.grad, None
            turn.is_taken = True

        def take() -> None:
            with _touching_grad:
                gradient, leaf.grad = leaf.grad, aside
                turn.is_taken = False
                while turn.to_add:
                    leaf.grad = accumulated(leaf.grad, turn.to_add.pop())
            turn.free.release()
            if gradient is not None:
                self._add(leaf, gradient.clone() if gradient._is_view() else gradient)

        self._cleanup.append(take)

    def _taker(self, leaf: Leaf, is_ours: Callable[[], bool]) -> Callable[[Any], Any]:
        def take(gradients: tuple[torch.Tensor, ...]) -> Any:
            if not is_ours():
                return None
            if gradients[0] is not None:
                is_free = _references(gradients) == self._free  # asked first: to name it is to hold it
                if not is_free:
                    self._note_shared(gradients[0])
                elif self._shared:
                    is_free = not self._was_shared(gradients[0])
                self._add(leaf, _own(gradients[0], leaf, is_free))
            return (None,)

        return take

    def _note_shared(self, gradient: torch.Tensor) -> None:
        if gradient.layout is torch.strided:
            self._shared[gradient.data_ptr()] = WeakTensorRef(gradient)

    def _was_shared(self, gradient: torch.Tensor) -> bool:
        if gradient.layout is not torch.strided:
            return False
        found = self._shared.get(gradient.data_ptr())
        return found is not None and not found.expired()

    def _add(self, leaf: Leaf, gradient: torch.Tensor) -> None:
        with self._lock:
            self.gradients.add(leaf, gradient)

    def _watch_with_hooks(self, node: Any, leaf: Leaf, is_ours: Callable[[], bool]) -> None:
        """See Note [post-accumulate hooks]."""
        turn = _turn_of(leaf)
        aside: list[torch.Tensor | None] = []  # not empty while it is our turn

        def before(gradients: Any) -> Any:
            if is_ours():
                if not turn.free.acquire(timeout=_LONGEST_HOOK):
                    raise GradientError(f"another pass ran the hooks of a leaf for over {_LONGEST_HOOK:.0f} s")
                with _touching_grad:
                    aside.append(leaf.grad)
                    leaf.grad = None
                    turn.is_taken = True
            return None

        def after(*_: Any) -> Any:
            if aside and is_ours():
                gradient = leaf.grad
                put_back()
                if gradient is not None:
                    self._add(leaf, gradient)
            return None

        def put_back() -> None:
            if not aside:
                return
            try:
                with _touching_grad:
                    turn.is_taken = False
                    leaf.grad = aside.pop()
                    while turn.to_add:
                        leaf.grad = accumulated(leaf.grad, turn.to_add.pop())
            finally:
                turn.free.release()

        self._cleanup.append(put_back)  # where a hook raised, `after` was not called
        for handle in (node.register_prehook(before), node.register_hook(after)):
            self._cleanup.append(handle.remove)

    def close(self) -> None:
        """Takes no more."""
        for undo in self._cleanup:
            undo()
        self._cleanup.clear()


def _in_child() -> None:
    """In a fork: the threads that held these, or had their turn with a leaf, are not there."""
    global _touching_grad, _making_turns
    _touching_grad, _making_turns = threading.RLock(), threading.RLock()
    _turns.clear()


os.register_at_fork(after_in_child=_in_child)


def _own(gradient: torch.Tensor, leaf: Leaf, is_free: bool) -> torch.Tensor:
    """The gradient as the table's own: itself where nobody else holds it and it lies in memory as the leaf does,
    else a copy."""
    if gradient.requires_grad:
        return gradient  # it is to be differentiated, and so never changed in place
    gradient = gradient.detach()
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient if is_free and _is_plain(gradient) else gradient.clone()
    if is_free and (gradient.stride() == leaf.stride() or (leaf.is_contiguous() and gradient.is_contiguous())):
        return gradient
    with torch.no_grad():
        return torch.empty_like(leaf, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _is_plain(gradient: torch.Tensor) -> bool:
    """Whether more can be added to it in place: the parts of a sparse one may be expanded."""
    if gradient.layout is not torch.sparse_coo:
        return True
    return gradient._indices().is_contiguous() and gradient._values().is_contiguous()
