"""Cross entropy over a vocabulary that is split over processes, and over one whose logits are never made whole."""

from .cross_entropy import parallel_cross_entropy
from .linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy", "parallel_cross_entropy"]
