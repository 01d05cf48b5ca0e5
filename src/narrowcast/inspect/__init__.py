"""Tools to inspect training: quantization error of each operand, and the layer whose precision costs the most."""

from .bisect import Bisection, LayerError, bisect
from .router_record import RouterRecord
from .watch import Record, Watch, watch

__all__ = ["Bisection", "LayerError", "Record", "RouterRecord", "Watch", "bisect", "watch"]
