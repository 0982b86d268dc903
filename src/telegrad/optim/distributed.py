"""DistributedOptimizer: one optimizer of torch's on each owner of parameters, and one message to each for a step.

    optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

The gradients stay where they are: an owner takes those in `.grad` there; with `step(context_id)` those of the context,
which never go through `.grad`: see Note [twins] in owner.py, which is the owner's part. Options that the caller changes
in `param_groups`, as a learning rate, go along with the next message.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .._torch import tree_leaves
from ..errors import HandedOverError, OptimizerError, TelegradError
from ..messages import Envelope, Forget, Kind
from ..primitives import clock
from ..primitives.current import current_worker
from ..rref import RRef
from ..runtime.pending import limit_here
from . import owner as remote
from .owner import NO_OPTIONS, News, Options
from .owners import Owner, check_place, groups_of, handles_of, on_owners, owners_of
from .remote_tensor import check_no_pass

__all__ = ["DistributedOptimizer", "OptimizerError"]

_CLEAR = int(Kind.CLEAR)


class DistributedOptimizer(Optimizer):
    """Steps parameters on the workers that own them, each with an optimizer of `optimizer_class` there.

    Args:
        optimizer_class: a class of torch.optim, or another subclass of its Optimizer.
        params_rref: the parameters: tensors of this process, RRefs, and what `parameters()` of a RemoteModule or of a
            module around one gives, in any mixture; or pairs of a name and one of these; or dicts, each a group with
            such "params" and options of its own.
        args, kwargs: the class's other arguments.

    torch's learning rate schedulers work on it: `param_groups` holds the options, with the "params" as given.
    Steps may be made by several threads, and by several trainers for the same parameters: an owner makes one at a
    time.

    Raises:
        TypeError, ValueError: the class or the parameters are not what is needed.
        OptimizerError: it could not be created on some owners, which it names.
    """

    def __init__(self, optimizer_class: type[Optimizer], params_rref: Any, *args: Any, **kwargs: Any) -> None:
        _check_class(optimizer_class)
        groups, is_plain = groups_of(params_rref)
        self._class = optimizer_class
        self._is_built = False
        handles = handles_of(groups)
        self._owners = owners_of(groups, handles)
        self._owner_ids = [owner.id for owner in self._owners]
        given = [{k: v for k, v in group.items() if k not in NO_OPTIONS} for group in groups]

        def arguments(owner: Owner) -> tuple[Any, ...]:
            parts = [(given[g], [handles[place] for place in places]) for g, places in owner.places_by_group.items()]
            return optimizer_class, parts, is_plain, args, kwargs

        found = on_owners(
            f"creating {optimizer_class.__name__}", self._owners, remote.create, [*map(arguments, self._owners)]
        )
        defaults: Options = {}
        for owner, (handle, its_defaults, its_options) in zip(self._owners, found, strict=True):
            owner.handle = handle
            defaults = defaults or its_defaults
            for number, options in zip(owner.groups, its_options, strict=True):
                groups[number] = {**options, **groups[number]}
        for group in groups:
            for name, value in defaults.items():  # of a group without parameters
                group.setdefault(name, value)
        super().__init__(groups, defaults)
        self._is_built = True
        self._lock = threading.Lock()  # guards the two below
        self._version = 0  # counts the changes of options
        self._known = [_Known(group) for group in self.param_groups]

    @property
    def remote_optimizers(self) -> list[RRef[Any]]:
        """Handles to the optimizers on the owners."""
        return [owner.handle for owner in self._owners if owner.handle is not None]

    def step(self, context_id: Any = None, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes one step on every owner, all at the same time, with the gradients in `.grad` there.

        Parameters that have no gradient stay as they are.

        Args:
            context_id: takes the gradients of an autograd context instead.
            closure: called first, once, as by an optimizer of torch's; what it returns is returned. It may come first.

        Raises:
            UnknownContextError: there is no such context here. Nothing was done.
            GradientError: there are no gradients in the place that was chosen, but in the other one: in `.grad` or in
                the context. Or a backward pass still runs, in a hook of which this is. Nothing was done.
            OptimizerError: it failed on some owners, which it names. Those in `done` have stepped.
        """
        if callable(context_id):
            context_id, closure = None, context_id
        if context_id is not None:
            if not isinstance(context_id, int):
                raise TypeError(f"step() takes the id of an autograd context, not a {type(context_id).__name__}")
            current_worker().contexts.get(context_id)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if context_id is None:
            self._check_no_pass("step()")
        check_place(self._call(remote.step, None, context_id), context_id)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `.grad` of every parameter on its owner. Gradients of contexts are not there.

        Does not wait for owners on this host: all that is sent to one of them after this, by whomever, comes after it
        there.

        Raises:
            OptimizerError: it failed on some owners, which it names.
        """
        self._check_no_pass("zero_grad()")
        worker = current_worker()
        handles: list[Any] = [owner.handle for owner in self._owners]
        if set_to_none and all(map(worker.calls.peers.is_near, self._owner_ids)):
            limit = limit_here(None, worker.options.rpc_timeout)
            deadline = None if limit is None else clock.now() + limit
            try:
                for handle in handles:
                    if handle.is_owner():
                        remote.zero_grad(handle.entry.id, True)
                    else:
                        envelope = Envelope(_CLEAR, worker.new_message_id(), handle.entry.id)
                        left = None if deadline is None else max(0.0, deadline - clock.now())
                        worker.post(handle.entry.owner, envelope, Forget(()), left, None)
                return
            except TelegradError as error:  # what follows says why
                if isinstance(error, HandedOverError) and error.interrupt is not None:
                    raise error.interrupt from None
        on_owners(
            f"zero_grad of {self._class.__name__}",
            self._owners,
            remote.zero_grad,
            [(handle.entry.id, set_to_none) for handle in handles],
        )

    def unscale(self, factor: torch.Tensor, allow_fp16: bool) -> bool:
        """Multiplies `.grad` of every parameter on its owner. Returns whether all are finite. For GradScaler."""
        self._check_no_pass("unscaling")
        return all(self._call(remote.unscale, None, factor, allow_fp16))

    def state_dict(self) -> dict[str, Any]:
        """The state of all owners' optimizers, as one optimizer of torch's would have it that had all parameters
        in its own process: each can load what the other has saved."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        parts = self._call(remote.state_dict)
        numbers = iter(range(sum(len(group["params"]) for group in self.param_groups)))
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
        state: dict[Any, Any] = {}
        for owner, (its_state, its_options) in zip(self._owners, parts, strict=True):
            places = owner.places
            for key, value in its_state.items():
                # A key that is no number belongs to no parameter; the owners are taken to agree on it.
                state[places[key] if isinstance(key, int) else key] = value
            for number, options in zip(owner.groups, its_options, strict=True):
                groups[number].update(options)
        found = {"state": dict(sorted(state.items(), key=_numbers_first)), "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state, saved by this class or by an optimizer of torch's with the same parameters.

        Raises:
            ValueError: its groups are not those of this optimizer.
            OptimizerError: it failed on some owners, which it names. Those in `done` have it.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_dict["param_groups"]
        sizes, saved_sizes = ([len(group["params"]) for group in g] for g in (self.param_groups, saved))
        if sizes != saved_sizes:
            raise ValueError(
                f"loaded state dict has parameter groups of these sizes: {saved_sizes}; those of the optimizer "
                f"are {sizes}"
            )
        keys = [key for group in saved for key in group["params"]]
        state = state_dict["state"]
        of_none = {key: value for key, value in state.items() if key not in set(keys)}

        def arguments(owner: Owner) -> tuple[Any, ...]:
            mine = {n: state[keys[place]] for n, place in enumerate(owner.places) if keys[place] in state}
            options = [{k: v for k, v in saved[g].items() if k not in NO_OPTIONS} for g in owner.groups]
            return {**mine, **of_none}, options

        self._call(remote.load_state_dict, arguments)
        with self._lock:
            for number, (group, new) in enumerate(zip(self.param_groups, saved, strict=True)):
                kept = {name: group[name] for name in NO_OPTIONS if name in group}
                self.param_groups[number] = {**copy.deepcopy({**new, "params": None}), **kept}
            self._known = [_Known(group) for group in self.param_groups]
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once it is made: the owners have their optimizers by then."""
        if self._is_built:
            raise NotImplementedError(
                "a DistributedOptimizer takes no further groups: make a new one with all of them, and give it the "
                "old one's state_dict() if need be"
            )
        self.param_groups.append(param_group)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DistributedOptimizer cannot be sent or copied; send the RRefs, and make one where it is needed"
        )

    def _check_no_pass(self, what: str) -> None:
        check_no_pass(what, self._owner_ids)

    def _call(
        self, function: Any, arguments: Callable[[Owner], tuple[Any, ...]] | None = None, *args: Any
    ) -> list[Any]:
        """Calls a function on each owner, for its LocalOptimizer, with the options that have changed; and with these
        arguments, or others for each."""
        with self._lock:
            changed = [known for known in self._known if known.may_have_changed()]
            if changed:
                looks = [known.look(self._version + 1) for known in changed]
                self._version += any(looks)
            version = self._version
            news = [None if owner.version == version else self._news_locked(owner) for owner in self._owners]
        what = "the step" if function is remote.step else function.__name__
        found = on_owners(
            f"{what} of {self._class.__name__}",
            self._owners,
            function,
            [
                (owner.handle.entry.id, version, its, *(args if arguments is None else arguments(owner)))  # type: ignore[union-attr]
                for owner, its in zip(self._owners, news, strict=True)
            ],
        )
        with self._lock:  # where it failed the next message says it again, and no harm is done
            for owner in self._owners:
                owner.version = max(owner.version, version)
        return found

    def _news_locked(self, owner: Owner) -> News:
        return [
            (place, name, value)
            for place, group in enumerate(owner.groups)
            for name, value in self._known[group].since(owner.version)
        ]


class _Known:
    """The options of a group as they were last looked at. It keeps copies: some are changed in place."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._values = {k: copy.deepcopy(v) for k, v in group.items() if k not in NO_OPTIONS}
        self._changed: dict[str, int] = {}  # in which version
        self._note()

    def _note(self) -> None:
        self._all = {name: self._values.get(name, value) for name, value in self._group.items()}
        self._has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(self._values))

    def may_have_changed(self) -> bool:
        """Compares all at once: says no where look() would find nothing."""
        return self._has_tensors or self._group != self._all

    def look(self, version: int) -> bool:
        """Whether something has changed."""
        found = False
        for name, value in self._group.items():
            if name not in NO_OPTIONS and not _is_same(self._values.get(name, self), value):
                self._values[name] = copy.deepcopy(value)
                self._changed[name] = version
                found = True
        self._note()
        return found

    def since(self, version: int) -> list[tuple[str, Any]]:
        return [(name, self._values[name]) for name, changed in self._changed.items() if changed > version]


# -- before anything is sent -------------------------------------------------------------------------------


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"a class of torch.optim is needed, such as torch.optim.SGD; not {optimizer_class!r}")
    _, *parameters = inspect.signature(optimizer_class.step).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if needed:
        raise TypeError(
            f"{optimizer_class.__name__}.step() needs {needed}: it computes the loss itself, again and again, which "
            "cannot be done where the parameters are. Choose a class that steps with the gradients alone"
        )


def _is_same(old: Any, new: Any) -> bool:
    if old is new and not isinstance(new, torch.Tensor):
        return True
    if type(old) is not type(new):
        return False
    try:
        return torch.equal(old, new) if isinstance(new, torch.Tensor) else bool(old == new)
    except Exception:
        return False  # they cannot be compared: the new one is sent


def _numbers_first(item: tuple[Any, Any]) -> tuple[bool, Any]:
    key = item[0]
    return (False, key) if isinstance(key, int) else (True, str(key))
