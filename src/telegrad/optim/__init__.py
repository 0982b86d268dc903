"""Optimizers over the parameters of several workers: what telegrad has in place of torch.distributed.optim."""

from .distributed import DistributedOptimizer, OptimizerError, clip_grad_norm_

__all__ = ["DistributedOptimizer", "OptimizerError", "clip_grad_norm_"]
