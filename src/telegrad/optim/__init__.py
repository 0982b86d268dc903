"""Optimizers over the parameters of several workers: what telegrad has in place of torch.distributed.optim."""

from .clipping import clip_grad_norm_
from .distributed import DistributedOptimizer, OptimizerError
from .grad_scaler import GradScaler

__all__ = ["DistributedOptimizer", "GradScaler", "OptimizerError", "clip_grad_norm_"]
