"""Clipping of gradients in `.grad` on all owners, with the names and arguments of torch.nn.utils.

The functions of torch.nn.utils change gradients of this process only. For those of a RemoteModule they raise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..optim.clipping import Param, clip_norm
from ..optim.clipping import clip_value as _clip_value

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


def clip_grad_norm_(
    parameters: Param | Iterable[Param],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales the gradients in `.grad` of these parameters, wherever they are, so that the norm of all of them together
    is at most `max_norm`. Returns the norm that they had.

    Args:
        parameters: tensors of this process, RRefs, and parameters of RemoteModules, in any mixture.
        foreach: is ignored; each owner chooses.

    Raises:
        RuntimeError: the norm is infinite or no number, with `error_if_nonfinite`. Nothing was scaled.
        OptimizerError: it failed on some owners, which it names. Those in `done` have scaled theirs.
    """
    return clip_norm(None, parameters, max_norm, norm_type, error_if_nonfinite)


def clip_grad_value_(parameters: Param | Iterable[Param], clip_value: float, foreach: bool | None = None) -> None:
    """Takes every element of the gradients in `.grad` into the range from -clip_value to clip_value, on all owners."""
    _clip_value(parameters, clip_value)
