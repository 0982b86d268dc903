"""Optimizers whose parameters are on other workers.

    DistributedOptimizer   one optimizer of torch's on each owner of parameters, and one message to each for a step
    clip_grad_norm_        one norm over the gradients of all owners

    optimizer = DistributedOptimizer(torch.optim.SGD, [rref, ...], lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)

The gradients stay where they are: an owner takes those of the context. They never go through `.grad`: see
Note [twins] in owner.py, which is the owner's part. Options that the caller changes in `param_groups`, as a learning
rate, go along with the next message.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .. import rpc
from ..errors import OptimizerError, TelegradError
from ..primitives.current import current_worker
from ..rref import RRef
from . import owner as remote
from .owner import NO_OPTIONS, News, Options

__all__ = ["DistributedOptimizer", "OptimizerError", "clip_grad_norm_"]


@dataclass
class _Owner:
    """A worker that has parameters."""

    id: int
    name: str
    places_by_group: dict[int, list[int]]  # of its parameters, among all; by the number of their group
    handle: RRef[Any] | None = None  # to its _LocalOptimizer
    version: int = 0  # of the options that it has

    @property
    def groups(self) -> list[int]:
        return list(self.places_by_group)

    @property
    def places(self) -> list[int]:
        return [place for places in self.places_by_group.values() for place in places]


class DistributedOptimizer(Optimizer):
    """Steps parameters on the workers that own them, each with an optimizer of `optimizer_class` there.

    Args:
        optimizer_class: a class of torch.optim, or another subclass of its Optimizer.
        params_rref: RRefs to the parameters; or pairs of a name and an RRef; or dicts, each a group with such
            "params" and options of its own.
        args, kwargs: the class's other arguments.

    torch's learning rate schedulers work on it: `param_groups` holds the options, with RRefs as "params".
    Steps may be made by several threads, and by several trainers for the same parameters: an owner makes one at a
    time.

    Raises:
        TypeError, ValueError: the class or the parameters are not what is needed.
        OptimizerError: it could not be created on some owners, which it names.
    """

    def __init__(self, optimizer_class: type[Optimizer], params_rref: Any, *args: Any, **kwargs: Any) -> None:
        _check_class(optimizer_class)
        groups, is_plain = _groups_of(params_rref)
        self._class = optimizer_class
        self._is_built = False
        self._owners = _owners_of(groups)
        given = [{k: v for k, v in group.items() if k not in NO_OPTIONS} for group in groups]
        handles = [rref for group in groups for rref in group["params"]]

        def arguments(owner: _Owner) -> tuple[Any, ...]:
            parts = [(given[g], [handles[place] for place in places]) for g, places in owner.places_by_group.items()]
            return optimizer_class, parts, is_plain, args, kwargs

        found = _on_owners(f"creating {optimizer_class.__name__}", self._owners, remote.create, arguments)
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

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Makes one step on every owner, all at the same time, with the gradients of an autograd context.

        Parameters that have no gradient in it stay as they are.

        Raises:
            UnknownContextError: there is no such context here. Nothing was done.
            OptimizerError: it failed on some owners, which it names. Those in `done` have stepped.
        """
        if not isinstance(context_id, int):
            raise TypeError(f"step() takes the id of an autograd context, not a {type(context_id).__name__}")
        current_worker().contexts.get(context_id)
        self._call(remote.step, lambda _: (context_id,))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `.grad` of every parameter on its owner. No step needs it: gradients of contexts are not there."""
        self._call(remote.zero_grad, lambda _: (set_to_none,))

    def state_dict(self) -> dict[str, Any]:
        """The state of all owners' optimizers, as one optimizer of torch's would have it that had all parameters
        in its own process: each can load what the other has saved."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        parts = self._call(remote.state_dict, lambda _: ())
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
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state, saved by this class or by an optimizer of torch's with the same parameters.

        Raises:
            ValueError: its groups are not those of this optimizer.
            OptimizerError: it failed on some owners, which it names. Those in `done` have it.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
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

        def arguments(owner: _Owner) -> tuple[Any, ...]:
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

    def _call(self, function: Any, arguments: Callable[[_Owner], tuple[Any, ...]]) -> list[Any]:
        """Calls a function on each owner, for its _LocalOptimizer, with the options that have changed."""
        with self._lock:
            version = self._version = self._version + 1
            looks = [known.look(version) for known in self._known]
            if not any(looks):
                version = self._version = version - 1
            news = {owner.id: self._news_locked(owner) for owner in self._owners}

        def all_arguments(owner: _Owner) -> tuple[Any, ...]:
            assert owner.handle is not None
            return owner.handle.entry.id, version, news[owner.id], *arguments(owner)

        what = "the step" if function is remote.step else function.__name__
        found = _on_owners(f"{what} of {self._class.__name__}", self._owners, function, all_arguments)
        with self._lock:  # where it failed the next message says it again, and no harm is done
            for owner in self._owners:
                owner.version = max(owner.version, version)
        return found

    def _news_locked(self, owner: _Owner) -> News | None:
        if owner.version == self._version:
            return None
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

    def look(self, version: int) -> bool:
        """Whether something has changed."""
        found = False
        for name, value in self._group.items():
            if name not in NO_OPTIONS and not _is_same(self._values.get(name, self), value):
                self._values[name] = copy.deepcopy(value)
                self._changed[name] = version
                found = True
        return found

    def since(self, version: int) -> list[tuple[str, Any]]:
        return [(name, self._values[name]) for name, changed in self._changed.items() if changed > version]


def clip_grad_norm_(
    context_id: int,
    params: RRef[Any] | Iterable[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients that these parameters have in a context, so that the norm of all of them together, on
    all owners, is at most `max_norm`. Returns the norm that they had.

    The numbers are those of torch.nn.utils.clip_grad_norm_ in one process.

    Raises:
        UnknownContextError: there is no such context here.
        RuntimeError: the norm is infinite or no number, with `error_if_nonfinite`. Nothing was scaled.
        OptimizerError: it failed on some owners, which it names. Those in `done` have scaled theirs.
    """
    groups, _ = _groups_of([params] if isinstance(params, RRef) else params)
    current_worker().contexts.get(context_id)
    handles = [rref for group in groups for rref in group["params"]]
    owners = _owners_of(groups)

    def arguments(owner: _Owner, number: Any) -> tuple[Any, ...]:
        return context_id, [handles[place] for place in owner.places], number

    parts = _on_owners("the norm", owners, remote.norms, lambda owner: arguments(owner, float(norm_type)))
    by_place = {
        place: norm.cpu()  # a device map may take what comes from a CPU to a GPU
        for owner, norms in zip(owners, parts, strict=True)
        for place, norm in zip(owner.places, norms, strict=True)
        if norm is not None
    }
    if not by_place:
        return torch.tensor(0.0)
    # In the order of the parameters, so that it is rounded as in one process.
    norms = torch.stack([by_place[place] for place in sorted(by_place)])
    total: torch.Tensor = torch.linalg.vector_norm(norms, float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} of the gradients is non-finite ({total.item()}), so they "
            "cannot be clipped"
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if not factor >= 1.0:  # also where it is no number
        _on_owners("scaling", owners, remote.scale, lambda owner: arguments(owner, factor))
    return total


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


def _groups_of(given: Any) -> tuple[list[dict[str, Any]], bool]:
    """Groups, each with a list of RRefs; and whether they were given as one plain list."""
    if isinstance(given, torch.Tensor | RRef | Mapping | str):
        raise TypeError(f"parameters are given as a list of RRefs or of dicts, not as a {type(given).__name__}")
    items = list(given)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    is_plain = not isinstance(items[0], dict)
    groups = [{"params": items}] if is_plain else [dict(item) for item in items]
    for group in groups:
        if "params" not in group:
            raise ValueError(f"a parameter group needs 'params'; this one has {sorted(group)}")
        params = group["params"]
        params = [params] if isinstance(params, RRef) else list(params)
        named = [item for item in params if isinstance(item, tuple)]
        if named:
            if len(named) != len(params):
                raise ValueError("all parameters of a group have names, or none has")
            group["param_names"] = [name for name, _ in named]
            params = [rref for _, rref in named]
        for place, rref in enumerate(params):
            if not isinstance(rref, RRef):
                raise TypeError(
                    f"parameters must be RRefs; number {place} is a {type(rref).__name__}. For tensors of this "
                    "process use torch.optim itself, or RRef(tensor)"
                )
        group["params"] = params
    return groups, is_plain


def _owners_of(groups: list[dict[str, Any]]) -> list[_Owner]:
    owners: dict[int, _Owner] = {}
    place = 0
    for number, group in enumerate(groups):
        for rref in group["params"]:
            id = rref.entry.owner
            owner = owners.get(id) or owners.setdefault(id, _Owner(id, rref.owner_name(), {}))
            owner.places_by_group.setdefault(number, []).append(place)
            place += 1
    return list(owners.values())


def _on_owners(
    what: str, owners: Sequence[_Owner], function: Any, arguments: Callable[[_Owner], tuple[Any, ...]]
) -> list[Any]:
    """Calls a function on each owner, all at the same time. Waits for all of them, also if some fail."""
    futures: list[Any] = []
    errors: dict[str, BaseException] = {}
    for owner in owners:
        try:
            futures.append(rpc.rpc_async(owner.id, function, arguments(owner)))
        except TelegradError as error:
            futures.append(None)
            errors[owner.name] = error
    found = []
    for owner, future in zip(owners, futures, strict=True):
        try:
            found.append(None if future is None else future.wait())
        except Exception as error:
            errors[owner.name] = error
    if errors:
        done = [owner.name for owner in owners if owner.name not in errors]
        raise OptimizerError(what, errors, done) from next(iter(errors.values()))
    return found


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
