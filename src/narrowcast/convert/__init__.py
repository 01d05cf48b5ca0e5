"""Models that exist already: their layers become low-precision ones in place, and turn back, with a receipt."""

from .convert import convert, revert
from .receipt import GemmRecord, Memory, Receipt
from .recording import RanGemm, RanGemms

__all__ = ["GemmRecord", "Memory", "RanGemm", "RanGemms", "Receipt", "convert", "revert"]
