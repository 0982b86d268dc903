"""GradScaler: torch's, for a DistributedOptimizer too."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from .distributed import DistributedOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, which can also unscale the gradients of a DistributedOptimizer, where they are: one message
    to each owner. If one of them has found a gradient that is not finite, no owner steps."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, DistributedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        is_finite = optimizer.unscale(inv_scale, allow_fp16)
        return {found_inf.device: torch.full_like(found_inf, 0.0 if is_finite else 1.0)}
