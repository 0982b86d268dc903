"""An owner's part of a DistributedOptimizer: one of torch's optimizers, on parameters of this worker.

create               makes a LocalOptimizer, which the caller has a handle to
step, state_dict     and the like: a message for the LocalOptimizer of a handle
norms, scale, clamp  the gradients in `.grad` or of a context, for the functions that clip
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import autograd
from ..errors import GradientError
from ..gradients import adding
from ..primitives import current
from ..primitives.current import current_worker
from ..rref import RRef, value_here
from .stepping import optimizer_works

Options = dict[str, Any]  # of a parameter group, without its parameters
News = list[tuple[int, str, Any]]  # options that the caller has changed: group of the owner, name, value
NO_OPTIONS = ("params", "param_names")
NOWHERE, HERE, ELSEWHERE = range(3)  # see _where
_SAME_TOGETHER = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # to the last bit, one by one or not

# Note [twins]
# torch's optimizers take gradients from `.grad`. But those of a context are not there, and `.grad` of a parameter may
# change at any time: other trainers run backward. So an optimizer has a twin of each parameter: another tensor on the
# same memory, with the same version counter, and a `.grad` of its own.


class LocalOptimizer:
    """The optimizer of one DistributedOptimizer on one owner. It works alone: see stepping.py."""

    def __init__(
        self,
        cls: type[Optimizer],
        groups: list[tuple[Options, list[Any]]],
        is_plain: bool,
        args: Any,
        kwargs: Any,
    ) -> None:
        values = [[_parameter(rref) for rref in rrefs] for _, rrefs in groups]
        self._params = list({id(param): param for group in values for param in group}.values())
        twins = {id(param): _twin(param) for param in self._params}
        self._twins = list(twins.values())
        self._addresses = _addresses_of(self._twins)
        parts: list[Any] = [
            {**options, "params": [twins[id(param)] for param in group]}
            for (options, _), group in zip(groups, values, strict=True)
        ]
        self.optimizer = cls(parts[0]["params"] if is_plain else parts, *args, **kwargs)
        self._version = 0  # of the options

    def options(self) -> list[Options]:
        return [{k: v for k, v in g.items() if k not in NO_OPTIONS} for g in self.optimizer.param_groups]

    def adopt(self, version: int, news: News | None) -> None:
        # Two steps of one trainer may come here in another order than they were sent in.
        if news and version > self._version:
            for group, name, value in news:
                self.optimizer.param_groups[group][name] = value
            self._version = version

    @property
    def params(self) -> list[torch.Tensor]:
        return self._params

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        """Makes a step with these gradients of the parameters."""
        twins, addresses = self._twins, _addresses_of(self._params)
        if addresses != self._addresses:  # a parameter has got other memory, as by Module.to()
            for place, address in enumerate(addresses):
                if address != self._addresses[place]:
                    self._renew(place)
            self._addresses = addresses
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        # The parameters of a group are taken together, where the user has not said how: fewer calls.
        groups: list[Options] = []
        if type(self.optimizer) in _SAME_TOGETHER:
            groups = [group for group in self.optimizer.param_groups if _is_open(group)]
        for group in groups:
            group["foreach"] = True
        try:
            self.optimizer.step()
        finally:
            for group in groups:
                group["foreach"] = None
            for twin in twins:
                twin.grad = None
            after = _addresses_of(twins)
            if after != addresses:
                for place, address in enumerate(after):
                    if address != addresses[place]:
                        self._params[place].data = twins[place].data  # the optimizer gave it other memory
                        self._renew(place)
                self._addresses = after

    def _renew(self, place: int) -> None:
        old, new = self._twins[place], _twin(self._params[place])
        self._twins[place] = new
        state = self.optimizer.state
        if old in state:
            state[new] = state.pop(old)
        for group in self.optimizer.param_groups:
            group["params"] = [new if twin is old else twin for twin in group["params"]]


@contextlib.contextmanager
def _alone(id: int, version: int, news: News | None, *, steps: bool = False) -> Iterator[LocalOptimizer]:
    """The optimizer of that handle, with the options that the caller has changed. While it is entered no other
    optimizer of this worker steps."""
    local: LocalOptimizer = value_here(id)
    with optimizer_works(steps=steps):
        local.adopt(version, news)
        yield local


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
    params = value_here(id).params
    gradients: list[torch.Tensor | None] = []
    if context_id is None:
        settle()
    else:  # before the lock: this may wait for the end of a pass
        gradients = _in_context(context_id, params)
    with _alone(id, version, news, steps=True) as local:
        if context_id is None:
            gradients = grads(params)
        elif any(
            group.get("nesterov") for group in local.optimizer.param_groups
        ):  # which may be added to them in place
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        local.step(gradients)
    return _where(gradients, context_id, params)


@torch.no_grad()
def unscale(id: int, version: int, news: News | None, factor: torch.Tensor, allow_fp16: bool) -> bool:
    """Returns whether all gradients are finite."""
    settle()
    with _alone(id, version, news) as local:
        all_values = [_values(gradient) for gradient in grads(local.params) if gradient is not None]
        if not allow_fp16 and any(values.dtype is torch.float16 for values in all_values):
            raise ValueError("Attempting to unscale FP16 gradients.")
        finite = [torch.isfinite(values).all() for values in all_values]
        for values in all_values:
            values.mul_(factor.to(values.device))
    return all(bool(flag) for flag in finite)


def zero_grad(id: int, version: int, news: News | None, set_to_none: bool) -> None:
    settle()
    with _alone(id, version, news) as local:
        clear(local.params, set_to_none)


def state_dict(id: int, version: int, news: News | None) -> tuple[dict[Any, Any], list[Options]]:
    with _alone(id, version, news) as local:
        # Copied before the next step, which changes it in place.
        return copy.deepcopy(local.optimizer.state_dict()["state"]), copy.deepcopy(local.options())


def load_state_dict(id: int, version: int, news: News | None, state: dict[Any, Any], options: list[Options]) -> None:
    with _alone(id, version, news) as local:
        groups = local.optimizer.state_dict()["param_groups"]
        new = [{**o, "params": group["params"]} for o, group in zip(options, groups, strict=True)]
        local.optimizer.load_state_dict({"state": state, "param_groups": new})


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


def clear(params: Iterable[torch.Tensor], set_to_none: bool) -> None:
    """Takes the gradients off, or replaces them by zeros."""
    with adding.touching_grad:
        for param in params:
            param.grad = None if param.grad is None or set_to_none else torch.zeros_like(param.grad)


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


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Returns what is to be changed in place."""
    return gradient._values() if gradient.is_sparse else gradient


@torch.no_grad()
def norms(context_id: int | None, rrefs: list[RRef[Any]], norm_type: float) -> tuple[list[torch.Tensor | None], int]:
    """Returns also where gradients were."""
    norms: list[torch.Tensor | None] = []
    params, gradients = _gradients(context_id, rrefs)
    for gradient in gradients:
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce().values()
        norms.append(None if gradient is None else torch.linalg.vector_norm(gradient, norm_type).cpu())
    return norms, _where(gradients, context_id, params)


@torch.no_grad()
def scale(context_id: int | None, rrefs: list[RRef[Any]], factor: torch.Tensor) -> None:
    for param, gradient in zip(*_gradients(context_id, rrefs), strict=True):
        if gradient is None:
            continue
        if context_id is None:
            _values(gradient).mul_(factor.to(gradient.device))
        else:  # Not in place: others may hold it.
            autograd.update_gradient(context_id, param, lambda g: g * factor.to(g.device))


@torch.no_grad()
def clamp(rrefs: list[RRef[Any]], limit: float) -> int:
    """Returns where gradients were."""
    params, gradients = _gradients(None, rrefs)
    for gradient in gradients:
        if gradient is not None:
            gradient.clamp_(-limit, limit)
    return _where(gradients, None, params)
