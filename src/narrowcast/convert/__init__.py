"""Models that exist already: their layers become low-precision ones in place, and turn back, with a receipt."""

from .adapters import fuse_adapters, merge_adapters, train_merged
from .convert import convert, revert
from .receipt import GemmRecord, Memory, NormRecord, Receipt, receipt
from .recording import RanGemm, RanGemms
from .weights_map import weights_map

__all__ = [
    "GemmRecord",
    "Memory",
    "NormRecord",
    "RanGemm",
    "RanGemms",
    "Receipt",
    "convert",
    "fuse_adapters",
    "merge_adapters",
    "receipt",
    "revert",
    "train_merged",
    "weights_map",
]
