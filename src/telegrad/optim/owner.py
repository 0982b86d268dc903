"""An owner's part of a DistributedOptimizer: one of torch's optimizers, on parameters of this worker.

create               makes a LocalOptimizer, which the caller has a handle to
step, state_dict     and the like: a message for the LocalOptimizer of a handle
norms, scale, clamp  the gradients in `.grad` or of a context, for the functions that clip
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch import (
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    foreach_norm,
    group_by_kind,
    unscale_together,
)
from ..errors import GradientError
from ..gradients import adding
from ..primitives import current
from ..primitives.current import current_worker
from ..primitives.interrupts import critical
from ..rref import RRef, value_here
from .stepping import stepping_of

Options = dict[str, Any]  # of a parameter group, without its parameters
News = list[tuple[int, str, Any]]  # options that the caller has changed: group of the owner, name, value
Norms = tuple[torch.Tensor | None, list[bool], int]
NO_OPTIONS = ("params", "param_names")
NOWHERE, HERE, ELSEWHERE = range(3)  # see _where
_SAME_TOGETHER = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # to the last bit, one by one or not
_NUMBERS = ("lr", "betas", "momentum", "weight_decay")  # options that only count for what is computed, unless 0
_is_sparse = torch.Tensor.is_sparse.__get__  # type: ignore[attr-defined]

# Note [twins]
# torch's optimizers take gradients from `.grad`. But those of a context are not there, and `.grad` of a parameter may
# change at any time: other trainers run backward. So an optimizer has a twin of each parameter: another tensor on the
# same memory, with the same version counter, and a `.grad` of its own.


class LocalOptimizer(adding.Clearable):
    """The optimizer of one DistributedOptimizer on one owner. Between begin() and end() no other one of its worker is
    at work: see stepping.py."""

    def __init__(
        self,
        cls: type[Optimizer],
        groups: list[tuple[Options, list[Any]]],
        is_plain: bool,
        args: Any,
        kwargs: Any,
    ) -> None:
        values = [[_parameter(rref) for rref in rrefs] for _, rrefs in groups]
        self.params = list({id(param): param for group in values for param in group}.values())
        twins = {id(param): _twin(param) for param in self.params}
        self._twins = list(twins.values())
        self._addresses = _addresses_of(self._twins)
        parts: list[Any] = [
            {**options, "params": [twins[id(param)] for param in group]}
            for (options, _), group in zip(groups, values, strict=True)
        ]
        self._optimizer = cls(parts[0]["params"] if is_plain else parts, *args, **kwargs)
        self._version = 0  # of the options
        self._stepping = stepping_of(current_worker())
        self._kept: list[Gathered] | None = None  # see Note [what a step gathers]
        self._are_there: list[bool] = []  # by parameter: whether the step that gathered them had a gradient for it
        self._open: list[Options] = []  # groups, in that step: see _is_open

    @property
    def optimizer(self) -> Optimizer:
        """torch's optimizer. Whoever asks for it may change what is in it."""
        self._kept = None
        return self._optimizer

    def options(self) -> list[Options]:
        return [{k: v for k, v in g.items() if k not in NO_OPTIONS} for g in self._optimizer.param_groups]

    @property
    def adds_to_gradients(self) -> bool:
        return any(group.get("nesterov") for group in self._optimizer.param_groups)

    def begin(self, version: int, news: News | None, *, steps: bool = False) -> None:
        """Waits until no other optimizer of this worker is at work, and takes options that the caller has changed."""
        self._stepping.begin(steps=steps)
        # Two steps of one trainer may come here in another order than they were sent in.
        if news and version > self._version:
            for number, name, value in news:
                group = self._optimizer.param_groups[number]
                if not (name in _NUMBERS and _is_number(value) and bool(value) == bool(group.get(name))):
                    self._kept = None
                group[name] = value
            self._version = version

    def end(self) -> None:
        self._stepping.release()

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        """Makes a step with these gradients of the parameters."""
        addresses = _addresses_of(self.params)
        if self._kept is not None and addresses == self._addresses:
            given = [gradient for gradient in gradients if gradient is not None]
            if [gradient is not None for gradient in gradients] == self._are_there and not any(map(_is_sparse, given)):
                self._step_with(_giver(self._kept, given))
                return
        self._kept = None
        if addresses != self._addresses:  # a parameter has got other memory, as by Module.to()
            for place, address in enumerate(addresses):
                if address != self._addresses[place]:
                    self._renew(place)
            self._addresses = addresses
        twins = self._twins
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        gathered: list[Gathered] = []
        try:
            if type(self._optimizer) in _SAME_TOGETHER:
                self._open = [group for group in self._optimizer.param_groups if _is_open(group)]
                self._step_with(_gatherer(self._optimizer, gathered))
            else:
                self._optimizer.step()
        finally:
            for twin in twins:
                twin.grad = None
            after = _addresses_of(twins)
            if after != addresses:
                for place, address in enumerate(after):
                    if address != addresses[place]:
                        self.params[place].data = twins[place].data  # the optimizer gave it other memory
                        self._renew(place)
                self._addresses = after
        if after == addresses and gathered and _can_be_kept(gathered, gradients):
            self._kept, self._are_there = gathered, [gradient is not None for gradient in gradients]

    def _step_with(self, gather: Callable[..., Any]) -> None:
        """Makes a step with the parameters of a group taken together, where the user has not said how: fewer calls."""
        own = self._optimizer.__dict__
        own["_init_group"] = gather
        for group in self._open:
            group["foreach"] = True
        try:
            self._optimizer.step()
        finally:
            for group in self._open:
                group["foreach"] = None
            del own["_init_group"]

    def _renew(self, place: int) -> None:
        old, new = self._twins[place], _twin(self.params[place])
        self._twins[place] = new
        state = self._optimizer.state
        if old in state:
            state[new] = state.pop(old)
        for group in self._optimizer.param_groups:
            group["params"] = [new if twin is old else twin for twin in group["params"]]


# Note [what a step gathers]
# In each step torch's optimizers go through a group's parameters (_init_group) and gather lists: those with a gradient,
# the gradients, and what the state has for each. All but the gradients are the same objects the next time, so they are
# kept, and the next step is given them: as long as the same parameters have dense gradients, and until their memory,
# the state or an option changes that _init_group may look at.

Gathered = tuple[list[torch.Tensor], list[list[Any]], Any]  # of a group: twins, lists of the state, what was returned


def _gatherer(optimizer: Any, gathered: list[Gathered]) -> Callable[..., Any]:
    """Has torch gather, and notes it."""

    def gather(group: Options, params: list[Any], gradients: list[Any], *states: list[Any]) -> Any:
        found = type(optimizer)._init_group(optimizer, group, params, gradients, *states)
        gathered.append((list(params), [list(state) for state in states], found))
        return found

    return gather


def _giver(kept: list[Gathered], gradients: list[torch.Tensor]) -> Callable[..., Any]:
    """Gives what was kept, group by group, with these gradients."""
    groups, rest = iter(kept), iter(gradients)

    def give(_: Options, params: list[Any], gradients: list[Any], *states: list[Any]) -> Any:
        its_params, its_states, found = next(groups)
        params.extend(its_params)
        gradients.extend(islice(rest, len(its_params)))
        for state, its in zip(states, its_states, strict=True):
            state.extend(its)
        return found

    return give


def _can_be_kept(gathered: list[Gathered], gradients: list[torch.Tensor | None]) -> bool:
    """Whether the next step would gather the same: not where a state is yet to be made, nor where a parameter is twice
    in its group."""
    given = [gradient for gradient in gradients if gradient is not None]
    return (
        sum(len(params) for params, _, _ in gathered) == len(given)
        and not any(gradient.is_sparse for gradient in given)
        and all(value is not None for _, states, _ in gathered for state in states for value in state)
    )


def _parameter(rref: RRef[Any]) -> torch.Tensor:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{rref} refers to a {type(value).__name__}; an optimizer needs a tensor")
    if nn.parameter.is_lazy(value):
        raise ValueError("a lazy parameter has no values before the first forward: call its module once before this")
    if not (value.is_leaf or value.retains_grad):
        raise ValueError("can't optimize a non-leaf Tensor")
    return value


def _twin(param: torch.Tensor) -> torch.Tensor:
    """See Note [twins]."""
    twin = param.detach()
    if isinstance(param, nn.Parameter):
        twin = nn.Parameter(twin, param.requires_grad)
    else:
        twin.requires_grad_(param.requires_grad)
    twin.__dict__.update(param.__dict__)  # what users have written on it
    return twin


def _addresses_of(tensors: list[torch.Tensor]) -> list[int]:
    """Where their memory is: a twin keeps its memory, so the same address is the same memory. 0 for sparse ones."""
    try:
        return [*map(torch.Tensor.data_ptr, tensors)]
    except RuntimeError:
        return [tensor.data_ptr() if tensor.layout is torch.strided else 0 for tensor in tensors]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_number, value)))


def _is_open(group: Options) -> bool:
    """Whether it is left to torch how a step is made, and taking parameters together gives the same: not with options
    that are tensors, which it refuses, nor with Nesterov's momentum, which it adds to the gradients themselves."""
    return group["foreach"] is None and not (
        group.get("fused")
        or group.get("differentiable")
        or group.get("capturable")
        or group.get("nesterov")
        or any(isinstance(option, torch.Tensor) for option in (group["lr"], *group.get("betas", ())))
    )


def create(
    cls: type[Optimizer], groups: list[tuple[Options, list[Any]]], is_plain: bool, args: Any, kwargs: Any
) -> tuple[RRef[LocalOptimizer], Options, list[Options]]:
    local = LocalOptimizer(cls, groups, is_plain, args, kwargs)
    return RRef(local), local.optimizer.defaults, local.options()


def step(id: int, version: int, news: News | None, context_id: int | None) -> int:
    """Returns where gradients were: see _where."""
    local: LocalOptimizer = value_here(id)
    params = local.params
    gradients: list[torch.Tensor | None] = []
    if context_id is None:
        settle()
    else:  # before it begins: this may wait for the end of a pass
        gradients = _in_context(context_id, params)
    local.begin(version, news, steps=True)
    try:
        if context_id is None:
            gradients = grads(params)
        elif local.adds_to_gradients:  # in place
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        local.step(gradients)
    finally:
        local.end()
    return _where(gradients, context_id, params)


@torch.no_grad()
def unscale(id: int, version: int, news: News | None, factor: torch.Tensor, allow_fp16: bool) -> bool:
    """Returns whether all gradients are finite."""
    local: LocalOptimizer = value_here(id)
    settle()
    local.begin(version, news)
    try:
        groups = _by_kind(grads(local.params))
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype in groups):
            raise ValueError("Attempting to unscale FP16 gradients.")
        found = []
        for (device, _), gradients in groups.items():
            found.append(torch.zeros((), device=device))
            unscale_together(gradients, found[-1], factor.to(device))
    finally:
        local.end()
    return not any(bool(flag) for flag in found)


def zero_grad(id: int, set_to_none: bool) -> None:
    local: LocalOptimizer = value_here(id)
    settle()
    adding.clear(local.params, set_to_none)


def state_dict(id: int, version: int, news: News | None) -> tuple[dict[Any, Any], list[Options]]:
    local: LocalOptimizer = value_here(id)
    local.begin(version, news)
    try:  # copied before the next step, which changes it in place
        return copy.deepcopy(local.optimizer.state_dict()["state"]), copy.deepcopy(local.options())
    finally:
        local.end()


def load_state_dict(id: int, version: int, news: News | None, state: dict[Any, Any], options: list[Options]) -> None:
    local: LocalOptimizer = value_here(id)
    local.begin(version, news)
    try:
        optimizer = local.optimizer
        groups = optimizer.state_dict()["param_groups"]
        new = [{**o, "params": group["params"]} for o, group in zip(options, groups, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": new})
    finally:
        local.end()


# -- gradients ---------------------------------------------------------------------------------------------


def settle() -> None:
    """Waits for the last word on passes whose gradients go to `.grad` here: it may come later than a call of a third
    worker."""
    parts = current_worker().engine.parts
    if parts.passes:
        parts.settle(None)


def _in_context(context_id: int, params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the gradients of parameters in a context. None, if no message of it has come: its forward did not go
    through this worker."""
    worker = current_worker()
    if worker.contexts.find(context_id) is None and not worker.contexts.was_released(context_id):
        return [None] * len(params)
    gradients: list[torch.Tensor | None] = worker.engine.gradients_of(context_id, params)
    if worker.contexts.get(context_id).went_into_grad and all(gradient is None for gradient in gradients):
        raise GradientError(
            f"the backward pass of context {context_id} has put its gradients into `.grad` on worker {worker.name!r} "
            "(into='grad'), and the context has none: leave out the context's id, and call zero_grad() after the step"
        )
    return gradients


def grads(params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    with adding.touching_grad:
        return [param.grad for param in params]


def _where(gradients: Iterable[torch.Tensor | None], context_id: int | None, params: Sequence[torch.Tensor]) -> int:
    """Says where gradients are: in the place that was taken; else in the other one, `.grad` or the context that the
    caller is in; or nowhere."""
    if any(gradient is not None for gradient in gradients):
        return HERE
    if context_id is not None:
        others = grads(params)
    else:
        worker, open_id = current_worker(), current.current_context_id()
        others = worker.engine.gradients_of(open_id, params) if worker.contexts.find(open_id) is not None else []
    return ELSEWHERE if any(gradient is not None for gradient in others) else NOWHERE


def _gradients(
    context_id: int | None, rrefs: Iterable[RRef[Any]]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Returns the parameters, and their gradients in a context or in `.grad`."""
    params = [_parameter(rref) for rref in rrefs]
    if context_id is None:
        settle()
        return params, grads(params)
    return params, _in_context(context_id, params)


def _by_kind(gradients: list[torch.Tensor | None]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Returns what is to be changed in place, by device and dtype."""
    values = [gradient for gradient in gradients if gradient is not None]
    if any(map(_is_sparse, values)):
        values = [gradient._values() if gradient.is_sparse else gradient for gradient in values]
    return {kind: its for kind, ((its,), _) in group_by_kind([values], False).items()} if values else {}


@torch.no_grad()
def norms(context_id: int | None, rrefs: list[RRef[Any]], norm_type: float) -> Norms:
    """Returns the norms of the gradients, on the CPU; which parameters have one; and where gradients were."""
    params, gradients = _gradients(context_id, rrefs)
    given = [gradient for gradient in gradients if gradient is not None]
    if any(map(_is_sparse, given)):
        given = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in given]
    found: torch.Tensor | None = None
    if given:
        if any(gradient.device != given[0].device for gradient in given):
            found = torch.stack([torch.linalg.vector_norm(gradient, norm_type).cpu() for gradient in given])
        else:
            found = torch.stack(foreach_norm(given, norm_type)).cpu()
    return found, [gradient is not None for gradient in gradients], _where(gradients, context_id, params)


@torch.no_grad()
def scale(context_id: int | None, rrefs: list[RRef[Any]], factor: torch.Tensor) -> None:
    params, gradients = _gradients(context_id, rrefs)
    if context_id is None:
        for (device, _), its in _by_kind(gradients).items():
            foreach_mul_(its, factor.to(device))
        return
    found = [(param, gradient) for param, gradient in zip(params, gradients, strict=True) if gradient is not None]
    factors = {device: factor.to(device) for device in {gradient.device for _, gradient in found}}
    # Not in place: others may hold them.
    scaled = [(param, gradient * factors[gradient.device]) for param, gradient in found]
    if scaled:
        context = current_worker().contexts.get(context_id)
        with critical(), context.lock:
            for param, gradient in scaled:
                context.gradients.replace(param, gradient)


@torch.no_grad()
def clamp(rrefs: list[RRef[Any]], limit: float) -> int:
    """Returns where gradients were."""
    params, gradients = _gradients(None, rrefs)
    for its in _by_kind(gradients).values():
        foreach_clamp_min_(its, -limit)
        foreach_clamp_max_(its, limit)
    return _where(gradients, None, params)
