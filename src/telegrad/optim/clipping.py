"""Clipping: one norm over the gradients of all owners.

Two messages to each owner: one asks for the norms, one scales. telegrad.nn.utils has the functions for `.grad`, with
the names and arguments of torch.nn.utils; clip_grad_norm_ here is for the gradients of a context.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch

from ..primitives.current import current_worker
from ..rref import RRef
from . import owner as remote
from .owners import Owner, check_place, groups_of, handles_of, on_owners, owners_of
from .remote_tensor import check_no_pass

__all__ = ["clip_grad_norm_"]

Param = torch.Tensor | RRef[Any]


def clip_grad_norm_(
    context_id: int,
    params: Param | Iterable[Param],
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
        GradientError: there are no gradients in the context, but in `.grad`.
        RuntimeError: the norm is infinite or no number, with `error_if_nonfinite`. Nothing was scaled.
        OptimizerError: it failed on some owners, which it names. Those in `done` have scaled theirs.
    """
    if not isinstance(context_id, int):
        raise TypeError(
            f"the id of an autograd context is needed, not a {type(context_id).__name__}; for gradients in `.grad` "
            "there is telegrad.nn.utils.clip_grad_norm_"
        )
    current_worker().contexts.get(context_id)
    return clip_norm(context_id, params, max_norm, norm_type, error_if_nonfinite)


def clip_norm(
    context_id: int | None,
    params: Param | Iterable[Param],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Does the same; without a context for the gradients in `.grad`."""
    handles, owners = _spread(params)
    if context_id is None:
        check_no_pass("clipping", [owner.id for owner in owners])

    def arguments(number: Any) -> list[tuple[Any, ...]]:
        return [(context_id, [handles[place] for place in owner.places], number) for owner in owners]

    parts = on_owners("the norm", owners, remote.norms, arguments(float(norm_type)))
    check_place([where for _, _, where in parts], context_id)
    found = [norms.cpu() for norms, _, _ in parts if norms is not None]  # a device map may take them to a GPU
    if not found:
        return torch.tensor(0.0)
    places = [p for owner, (_, there, _) in zip(owners, parts, strict=True) for p in compress(owner.places, there)]
    # In the order of the parameters, so that it is rounded as in one process.
    norms = torch.cat(found)[sorted(range(len(places)), key=places.__getitem__)]
    total: torch.Tensor = torch.linalg.vector_norm(norms, float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} of the gradients is non-finite ({total.item()}), so they "
            "cannot be clipped"
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if not factor >= 1.0:  # also where it is no number
        on_owners("scaling", owners, remote.scale, arguments(factor))
    return total


def clip_value(params: Param | Iterable[Param], limit: float) -> None:
    """Takes every element of the gradients in `.grad` into the range from -limit to limit."""
    handles, owners = _spread(params)
    check_no_pass("clipping", [owner.id for owner in owners])
    arguments = [([handles[place] for place in owner.places], float(limit)) for owner in owners]
    found = on_owners("clipping", owners, remote.clamp, arguments)
    check_place(found, None)


def _spread(params: Param | Iterable[Param]) -> tuple[list[RRef[Any]], list[Owner]]:
    items = [params] if isinstance(params, RRef | torch.Tensor) else list(params)
    if not items:
        return [], []
    groups, _ = groups_of(items)
    handles = handles_of(groups)
    return handles, owners_of(groups, handles)
