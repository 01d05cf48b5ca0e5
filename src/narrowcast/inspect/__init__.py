"""Looking into a training: what quantizing does to each operand, and which layer's precision costs the most."""

from .bisect import Bisection, LayerError, bisect
from .watch import Record, Watch, watch

__all__ = ["Bisection", "LayerError", "Record", "Watch", "bisect", "watch"]
