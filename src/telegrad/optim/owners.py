"""The owners of the parameters that an optimizer, or a function that clips, is given; and one call to each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import rpc
from ..errors import GradientError, OptimizerError
from ..primitives import current
from ..rref import RRef
from .owner import ELSEWHERE, HERE
from .remote_tensor import RemoteTensor


@dataclass
class Owner:
    """A worker that has parameters."""

    id: int
    name: str
    places_by_group: dict[int, list[int]]  # of its parameters, among all; by the number of their group
    handle: RRef[Any] | None = None  # to its LocalOptimizer
    version: int = 0  # of the options that it has

    @property
    def groups(self) -> list[int]:
        return list(self.places_by_group)

    @property
    def places(self) -> list[int]:
        return [place for places in self.places_by_group.values() for place in places]


def groups_of(given: Any) -> tuple[list[dict[str, Any]], bool]:
    """Returns groups, each with a list of "params"; and whether they were given as one plain list."""
    if isinstance(given, torch.Tensor | RRef | Mapping | str):
        raise TypeError(f"parameters are given as a list, or as a list of dicts, not as a {type(given).__name__}")
    items = list(given)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    is_plain = not isinstance(items[0], dict)
    groups = [{"params": items}] if is_plain else [dict(item) for item in items]
    for group in groups:
        if "params" not in group:
            raise ValueError(f"a parameter group needs 'params'; this one has {sorted(group)}")
        params = group["params"]
        params = [params] if isinstance(params, RRef | torch.Tensor) else list(params)
        named = [item for item in params if isinstance(item, tuple)]
        if named:
            if len(named) != len(params):
                raise ValueError("all parameters of a group have names, or none has")
            group["param_names"] = [name for name, _ in named]
            params = [param for _, param in named]
        group["params"] = params
    return groups, is_plain


def handles_of(groups: list[dict[str, Any]]) -> list[RRef[Any]]:
    """Returns the RRefs of all parameters: those of this process get one."""
    return [_handle(param, place) for group in groups for place, param in enumerate(group["params"])]


def _handle(param: Any, place: int) -> RRef[Any]:
    if isinstance(param, RRef):
        return param
    if isinstance(param, RemoteTensor):
        return param.rref
    if isinstance(param, torch.Tensor):
        return RRef(param)
    raise TypeError(
        f"parameters must be tensors of this process, RRefs, or those of a RemoteModule; number {place} is a "
        f"{type(param).__name__}"
    )


def owners_of(groups: list[dict[str, Any]], handles: Sequence[RRef[Any]]) -> list[Owner]:
    """Returns the owners of the parameters, by the handles of these."""
    owners: dict[int, Owner] = {}
    numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
    for place, (number, rref) in enumerate(zip(numbers, handles, strict=True)):
        id = rref.entry.owner
        owner = owners.get(id) or owners.setdefault(id, Owner(id, rref.owner_name(), {}))
        owner.places_by_group.setdefault(number, []).append(place)
    return list(owners.values())


def on_owners(what: str, owners: Sequence[Owner], function: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Calls a function on each owner, all at the same time, each with its arguments. Waits for all of them, also if
    some fail."""
    errors: dict[str, BaseException] = {}
    found: list[Any] = []
    last = len(owners) - 1
    for place, (owner, its) in enumerate(zip(owners, arguments, strict=True)):
        try:  # the last one without a future: this thread reads its answer, and meanwhile those of the others
            found.append((rpc.rpc_sync if place == last else rpc.rpc_async)(owner.id, function, its))
        except Exception as error:
            found.append(None)
            errors[owner.name] = error
    for place in range(last):
        if owners[place].name not in errors:
            try:
                found[place] = found[place].wait()
            except Exception as error:
                errors[owners[place].name] = error
    if errors:
        done = [owner.name for owner in owners if owner.name not in errors]
        raise OptimizerError(what, errors, done) from next(iter(errors.values()))
    return found


def check_place(found: Collection[int], context_id: int | None) -> None:
    """
    Args:
        found: where the owners had gradients.
        context_id: of the context whose gradients were taken; None: those in `.grad`.

    Raises:
        GradientError: they had none in that place, but in the other one.
    """
    if ELSEWHERE not in found or HERE in found:
        return
    if context_id is None:
        open_id = current.current_context_id()
        raise GradientError(
            f"no parameter has a gradient in `.grad`, and nothing was changed; in context {open_id} some have one: "
            "give its id, as in step(context_id) and telegrad.optim.clip_grad_norm_(context_id, ...)"
        )
    raise GradientError(
        f"no parameter has a gradient in context {context_id}, and nothing was changed; in `.grad`, where "
        "loss.backward() puts them, some have one: leave out the context's id, or call zero_grad() if they are old"
    )
