"""Leaf gradients: taken out of torch's engine before they reach `.grad`, and added up as AccumulateGrad would.

Capture        for one engine call: prehooks on the leaves' nodes take what would go to `.grad`
GradientTable  in a context, or in a pass: the gradient of each leaf
"""

from __future__ import annotations

import functools
import os
import threading
from _thread import RLock  # threading.RLock is Python code
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from sys import getrefcount
from typing import Any

import msgspec
import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import WeakTensorRef
from . import adding, devices
from .adding import accumulated
from .averaged import averaged

Leaf = torch.Tensor


class Replaced(msgspec.Struct, eq=False):
    """The `.grad` of a leaf before and after a pass: see Note [post-accumulate hooks]."""

    leaf: Leaf
    before: torch.Tensor | None
    version: int  # of `before`
    after: torch.Tensor | None
    change: torch.Tensor | None  # from the one to the other; `before` may be changed in place
    events: tuple[Any, ...] = ()

    def commit(self) -> None:
        """Makes it so, or adds the difference where `.grad` has changed meanwhile."""
        leaf, before = self.leaf, self.before
        if self.events:
            devices.wait(self.events, (self.after, self.change))
        if leaf.grad is before and (before is None or before._version == self.version):
            leaf.grad = self.after
        elif self.change is not None:
            leaf.grad = accumulated(leaf.grad, self.change)


class GradientTable(msgspec.Struct, eq=False):
    """Gradients by leaf. Not locked: users that share it lock."""

    # By the leaf's address, which is the leaf's as long as it is in here: torch's hash of a tensor is Python code.
    _found: dict[int, tuple[Leaf, torch.Tensor]] = msgspec.field(default_factory=dict)
    # Recorded on the stream where a device's gradient was made:
    _events: dict[int, Any] = msgspec.field(default_factory=dict)
    replaced: dict[int, Replaced] = msgspec.field(default_factory=dict)  # by the leaf's address

    @classmethod
    def of(cls, pairs: Sequence[tuple[Leaf, torch.Tensor]]) -> GradientTable:
        """Makes one of leaves and gradients, which are the table's from now on."""
        table = cls()
        found = table._found
        for pair in pairs:
            if id(pair[0]) not in found and pair[1].is_cpu:
                found[id(pair[0])] = pair
            else:
                table.add(*pair)
        return table

    def __len__(self) -> int:
        return len(self._found)

    def add(self, leaf: Leaf, gradient: torch.Tensor) -> None:
        """Adds to what is there. The gradient is the table's from now on."""
        key = id(leaf)
        old = self._found.get(key)
        if old is not None:
            if key in self._events:
                devices.wait((self._events[key],), (old[1],))
            gradient = accumulated(old[1], gradient)
        self.replace(leaf, gradient)

    def replace(self, leaf: Leaf, gradient: torch.Tensor) -> None:
        self._found[id(leaf)] = leaf, gradient
        if not (gradient.is_cpu or gradient.is_meta):
            self._events[id(leaf)] = torch.accelerator.current_stream(gradient.device).record_event()

    def take_over(self, other: GradientTable) -> None:
        """Adds all of another table, which is empty after it."""
        self.replaced.update(other.replaced)
        other.replaced = {}
        if not self._found:
            self._found, other._found = other._found, self._found
            self._events, other._events = other._events, self._events
            return
        other._wait_for_events()
        sums, found = adding.Sums(), self._found
        for key, (leaf, gradient) in other._found.items():
            if key not in found or key in self._events or not sums.take(found[key][1], gradient):
                self.add(leaf, gradient)
        sums.add_up()
        other.clear()

    def add_to_leaves(self) -> None:
        """Adds every gradient to its leaf's `.grad`, and empties the table."""
        self._wait_for_events()
        with adding.touching_grad:
            by_node: list[tuple[Leaf, torch.Tensor]] = []
            sums = adding.Sums()
            for leaf, gradient in self._found.values():
                turn = _turns.get(leaf) if _turns.data else None
                if turn is not None and turn.is_taken:
                    turn.to_add.append(gradient)
                elif adding.engine_calls and leaf not in averaged and adding.can_go_by_node(leaf, gradient):
                    by_node.append((leaf, gradient))
                elif (old := leaf.grad) is None:
                    leaf.grad = gradient
                elif not sums.take(old, gradient):
                    leaf.grad = accumulated(old, gradient)
            sums.add_up()
            if by_node:
                adding.add_by_nodes(by_node)
            for replaced in self.replaced.values():
                turn = _turns.get(replaced.leaf) if _turns.data else None
                if turn is not None and turn.is_taken:
                    turn.to_do.append(replaced)
                else:
                    replaced.commit()
        self.clear()

    def meet_others(self) -> bool:
        """Says whether a leaf of these has a `.grad` already. No, if an engine call may be adding to it now."""
        with adding.touching_grad:
            return not adding.engine_calls and (
                any(leaf.grad is not None for leaf, _ in self._found.values())
                or any(replaced.before is not None for replaced in self.replaced.values())
            )

    def get(self, leaf: Leaf) -> torch.Tensor | None:
        return self.get_all((leaf,))[0]

    def get_all(self, leaves: Iterable[Leaf]) -> list[torch.Tensor | None]:
        """Returns their gradients; None where there is none."""
        self._wait_for_events()
        found, none = self._found, (None, None)
        return [found.get(id(leaf), none)[1] for leaf in leaves]

    def copy(self) -> dict[Leaf, torch.Tensor]:
        """Returns the gradients, once they are there on the caller's streams."""
        if self._events:
            self._wait_for_events()
        return dict(self._found.values())

    def _wait_for_events(self) -> None:
        for key, event in self._events.items():
            devices.wait((event,), self._found[key][1:])

    def clear(self) -> None:
        self._found.clear()
        self._events.clear()
        self.replaced.clear()


# Note [gradients that are held elsewhere]
# AccumulateGrad keeps a gradient without a copy if only the engine holds it, and so does Capture. No function of torch
# says so. But a gradient that a prehook gets, and that only the engine holds, has always the same two counts of
# references, in torch and in Python; one that anything else holds has others. Which counts these are depends on the
# version of torch. They are measured at the first use, and checked on two gradients that are held elsewhere. If the
# counts don't tell these apart, every gradient is copied.


def _references(gradients: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Counts how often a prehook's gradient is held, in torch and in Python."""
    gradient = gradients[0]
    return gradient._use_count(), getrefcount(gradient)  # type: ignore[attr-defined]


@functools.cache
def _free_references() -> tuple[int, int] | None:
    """Measures the counts of a gradient that only the engine holds; None if they are not to be relied on.

    Not when this module is imported: the engine's first call starts threads, and CUDA, which no process may do that is
    forked after it.
    """
    kept: list[Any] = []

    def measure(loss: torch.Tensor, keep: bool = False) -> tuple[int, int]:
        """The first gradient of a leaf that the engine comes to."""
        node: Any = loss.grad_fn
        if keep:
            node.register_hook(lambda inputs, outputs: kept.append(inputs))
        found: list[tuple[int, int]] = []
        for leaf_node, _ in node.next_functions:
            if leaf_node is not None:
                leaf_node.register_prehook(lambda gradients: found.append(_references(gradients)))
        loss.backward()
        return found[0]

    def leaf() -> torch.Tensor:
        return torch.zeros(1, device="cpu", requires_grad=True)

    with torch.enable_grad(), torch.inference_mode(False):
        free = measure(leaf() * 2)
        held = (measure(leaf() * 2, keep=True), measure(leaf() + leaf()))
        is_reliable = free == measure(leaf() * 2) and free not in held
    return free if is_reliable else None


def own(gradient: torch.Tensor, leaf: Leaf, is_free: bool) -> torch.Tensor:
    """Returns the gradient as the table's own: itself where nothing else holds it and it lies in memory as the leaf
    does, else a copy."""
    if gradient.requires_grad:
        return gradient  # it is to be differentiated, and so never changed in place
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        # More can be added to a sparse one in place only if its parts are not expanded.
        parts = (gradient._indices(), gradient._values()) if gradient.layout is torch.sparse_coo else ()
        stays, is_alike = is_free and all(part.is_contiguous() for part in parts), True
    else:
        is_alike = gradient.stride() == leaf.stride()
        stays = is_free and (is_alike or (leaf.is_contiguous() and gradient.is_contiguous()))
    if stays:
        return gradient.detach() if gradient._is_view() else gradient
    if is_alike:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


# Note [post-accumulate hooks]
# They run inside of AccumulateGrad and look at the leaf's `.grad`. So for a leaf that has any, `.grad` is set aside
# by the prehook, the gradient goes its usual way, and what is in `.grad` after the hooks is taken. Passes take turns
# with a leaf. What is to be added to its `.grad` meanwhile is added when that is put back. In a plain backward() the
# hooks see the accumulated `.grad`, as they do locally: a copy takes its place meanwhile, and what has become of the
# copy replaces it when the pass is done everywhere.

# Note [averaged leaves]
# DistributedDataParallel takes a gradient out of `.grad` once the leaf's node has run, and puts the average over all of
# its processes there when the engine call ends; also for leaves that this pass does not reach. So for all leaves of
# such a module `.grad` is set aside before the engine call, nothing is taken during it, and what is in `.grad` then is
# the gradient.


class _Turn:
    """A pass's turn with the `.grad` of a leaf, which is set aside meanwhile."""

    def __init__(self) -> None:
        self.free = threading.Lock()  # not reentrant: a device's thread may take it and the pass's give it back
        self._holder: Capture | None = None
        self._aside: torch.Tensor | None = None
        self.to_add: list[torch.Tensor] = []
        self.to_do: list[Replaced] = []

    @property
    def is_taken(self) -> bool:
        return self._holder is not None

    def is_of(self, holder: Capture) -> bool:
        return self._holder is holder

    def begin(self, leaf: Leaf, holder: Capture, shown: dict[int, Replaced] | None = None) -> None:
        """Sets `.grad` aside. With `shown`, which has what came of turns before in the same pass, a copy stays."""
        if not self.free.acquire(blocking=False):
            what = f"a leaf of shape {tuple(leaf.shape)}"
            holder.take(self.free, f"another pass runs the hooks of {what}, or has it in a DistributedDataParallel")
        with adding.touching_grad:
            self._aside, leaf.grad = leaf.grad, None
            self._holder = holder
            if shown is not None:
                earlier = shown.get(id(leaf))
                base = self._aside if earlier is None else earlier.after
                if base is not None:
                    leaf.grad = base if base.requires_grad else base.detach().clone()

    def end_shown(self, leaf: Leaf, holder: Capture, earlier: Replaced | None) -> Replaced | None:
        """Puts `.grad` back, if it is this holder's turn, and returns what is to replace it. `earlier` is what came of
        turns before in the same pass."""
        if self._holder is not holder:
            return None
        before, after = self._aside, leaf.grad
        version = 0 if before is None else before._version
        base = before if earlier is None else earlier.after
        if after is not None and after._is_view():  # DistributedDataParallel's may be a part of its buffer
            after = after.clone()
        # Before the turn ends: what has waited for that is added to `before` itself.
        change = after if after is None or base is None else after - base
        self.end(leaf, holder)
        if earlier is not None:
            before, version = earlier.before, earlier.version
            if change is not None and earlier.change is not None:
                change = earlier.change + change
        events = () if after is None or after.is_cpu else tuple(devices.record((after,)))
        return Replaced(leaf, before, version, after, change, events)

    def end(self, leaf: Leaf, holder: Capture) -> torch.Tensor | None:
        """Puts `.grad` back, if it is this holder's turn, and returns what was there during it."""
        if self._holder is not holder:
            return None
        try:
            with adding.touching_grad:
                gradient, leaf.grad = leaf.grad, self._aside
                self._holder = self._aside = None
                while self.to_add:
                    leaf.grad = accumulated(leaf.grad, self.to_add.pop())
                while self.to_do:
                    self.to_do.pop().commit()
        finally:
            self.free.release()
        return gradient


_turns: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by leaf
_making_turns = threading.RLock()  # guards _turns


def _turn_of(leaf: Leaf) -> _Turn:
    with _making_turns:
        turn: _Turn | None = _turns.get(leaf)
        if turn is None:
            turn = _turns[leaf] = _Turn()
        return turn


class Capture:
    """Takes the gradients of leaves while one engine call runs. `is_ours` says whether it is that call which runs:
    other threads may run backward through the same leaves. `take` takes a lock that another pass holds, or raises.
    `shows`: hooks see the accumulated `.grad`."""

    def __init__(self, is_ours: Callable[[], bool], take: Callable[[Any, str], object], *, shows: bool = False) -> None:
        self.shows = shows
        self.take = take
        self._is_ours = is_ours
        self._free = _free_references()
        # Guards the gradients: device threads of the engine add at the same time. Reentrant: a finaliser may run in it.
        self._lock = RLock()
        self._cleanup: list[Callable[[], object]] = []
        # By address: gradients that several hold. The last of them must not take it for its own: a Function or a hook
        # that has handed it out may have kept the address.
        self._shared: dict[int, Any] = {}
        self.gradients = GradientTable()

    def watch(self, nodes: Iterable[Any]) -> None:
        """Takes what comes to these AccumulateGrad nodes."""
        together: dict[int, Leaf] = {}
        for node in nodes:
            leaf = node.variable
            if averaged.data and leaf in averaged:
                together.update((id(other), other) for other in averaged[leaf])
            elif leaf._post_accumulate_grad_hooks:
                self._watch_with_hooks(node, leaf)
            else:
                self._cleanup.append(node.register_prehook(partial(self._take, leaf)).remove)
        if together:
            self.watch_averaged(together)

    def watch_averaged(self, together: dict[int, Leaf]) -> None:
        """Takes what is averaged for these leaves, by their addresses, when the engine call ends."""
        for key in sorted(together):  # in one order in all passes: each waits for its turn
            leaf = together[key]
            turn = _turn_of(leaf)
            if not turn.is_of(self):
                turn.begin(leaf, self, self.gradients.replaced if self.shows else None)
                self._cleanup.append(partial(self._end_turn, turn, leaf))

    def _take(self, leaf: Leaf, gradients: tuple[torch.Tensor, ...]) -> Any:
        if not self._is_ours():
            return None
        if gradients[0] is not None and leaf.requires_grad:  # it may have been frozen since its forward
            is_free = _references(gradients) == self._free  # asked first: to name it is to hold it
            gradient = gradients[0]
            if (self._shared or not is_free) and gradient.layout is torch.strided:
                is_free = self._is_unshared(gradient, is_free)
            kept = own(gradient, leaf, is_free)
            with self._lock:
                self.gradients.add(leaf, kept)
        return (None,)

    def keep(self, leaf: Leaf, gradient: torch.Tensor, *, is_free: bool) -> None:
        """Takes a gradient that does not go through the leaf's node. `is_free`: nothing else holds its memory."""
        if leaf.requires_grad:  # it may have been frozen since its forward
            kept = own(gradient, leaf, is_free)
            with self._lock:
                self.gradients.add(leaf, kept)

    def _is_unshared(self, gradient: torch.Tensor, is_free: bool) -> bool:
        address = gradient.data_ptr()
        if not is_free:
            self._shared[address] = WeakTensorRef(gradient)
            return False
        found = self._shared.get(address)
        return found is None or bool(found.expired())

    def _watch_with_hooks(self, node: Any, leaf: Leaf) -> None:
        turn = _turn_of(leaf)

        def before(gradients: Any) -> None:
            if self._is_ours():
                turn.begin(leaf, self, self.gradients.replaced if self.shows else None)

        def after(*_: Any) -> None:
            if not self._is_ours():
                return
            if self.shows:
                if (replaced := turn.end_shown(leaf, self, self.gradients.replaced.get(id(leaf)))) is not None:
                    self.gradients.replaced[id(leaf)] = replaced
            elif (gradient := turn.end(leaf, self)) is not None:
                self._add(leaf, gradient)

        self._cleanup.append(partial(turn.end, leaf, self))  # where a hook raised, `after` was not called
        for handle in (node.register_prehook(before), node.register_hook(after)):
            self._cleanup.append(handle.remove)

    def _end_turn(self, turn: _Turn, leaf: Leaf) -> None:
        if self.shows:
            if (replaced := turn.end_shown(leaf, self, None)) is not None:
                self.gradients.replaced[id(leaf)] = replaced
        elif (gradient := turn.end(leaf, self)) is not None:
            self._add(leaf, gradient.clone() if gradient._is_view() else gradient)

    def _add(self, leaf: Leaf, gradient: torch.Tensor) -> None:
        with self._lock:
            self.gradients.add(leaf, gradient)

    def take_over(self, other: Capture) -> None:
        with self._lock:
            self.gradients.take_over(other.gradients)

    def at_close(self, undo: Callable[[], object]) -> None:
        self._cleanup.append(undo)

    def close(self) -> None:
        """Takes no more."""
        cleanup, self._cleanup = self._cleanup, []
        for undo in cleanup:
            undo()


def _in_child() -> None:
    """In a fork: the threads that held it, or had their turn with a leaf, are not there."""
    global _making_turns
    _making_turns = threading.RLock()
    _turns.clear()


os.register_at_fork(after_in_child=_in_child)
