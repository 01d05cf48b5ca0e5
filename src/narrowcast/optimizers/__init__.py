"""Optimizers for what ``torch.optim`` has no answer to: quantized parameters, and state in few bits."""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
