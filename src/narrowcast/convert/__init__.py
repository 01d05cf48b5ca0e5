"""Models that exist already: their layers become low-precision ones in place, and turn back, with a receipt."""

from .adapters import fuse_adapters, merge_adapters, train_merged
from .convert import convert, revert
from .receipt import GemmRecord, Memory, NormRecord, Receipt, receipt
from .recording import RanGemm, RanGemms

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
]
