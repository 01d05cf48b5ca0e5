"""Named shapes: the tensors that linear layers of known models quantize."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A matrix ``rows`` x ``columns`` and what it is in a model; activations have one row per token."""

    name: str
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"

    @property
    def elements(self) -> int:
        return self.rows * self.columns


HIDDEN = (Shape("llama3-8b hidden", 16384, 4096), Shape("llama3-70b hidden", 16384, 8192))
FFN = (Shape("llama3-8b ffn", 16384, 14336), Shape("llama3-70b ffn", 16384, 28672))
TENSORS = (
    Shape("llama3-8b hidden, 8k tokens", 8192, 4096),
    HIDDEN[0],
    FFN[0],
    Shape("llama3-8b up", 14336, 4096),
)
