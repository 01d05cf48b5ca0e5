"""``WireReceipt``: the bytes and the error of each wire of a ``MoEDispatch``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._table import aligned
from .moe_exchange import Wire, decode, encode


@dataclass(frozen=True)
class WireCost:
    """A wire, the bytes that it carries per row, and what they lose.

    Attributes:
        format: of the codes; the rows' dtype if they are sent as they are.
        plain_bytes: bytes of a row that is sent as it is.
        error: ``||decoded - rows|| / ||rows||``, in fp32; 0 for rows sent as they are.
    """

    wire: str
    format: str
    bytes_per_row: int
    plain_bytes: int
    error: float

    @property
    def share(self) -> float:
        """Bytes relative to rows sent as they are."""
        return self.bytes_per_row / self.plain_bytes


@dataclass(frozen=True)
class WireReceipt:
    """The wires of a ``MoEDispatch``, measured on rows; prints as a table."""

    wires: tuple[WireCost, ...]

    def __str__(self) -> str:
        rows = [("wire", "format", "bytes per row", "of plain", "error")]
        rows += [
            (one.wire, one.format, str(one.bytes_per_row), f"{one.share:.3f}", f"{one.error:.2e}")
            for one in self.wires
        ]
        return "\n".join(aligned(rows, frozenset((2, 3, 4))))


def wire_cost(name: str, wire: Wire, rows: Tensor) -> WireCost:
    """Return what a wire carries of rows (R, K), and what it loses."""
    parts = encode(rows, wire)
    carried = sum(part.numel() * part.element_size() for part in parts) // len(rows)
    decoded = decode(parts, wire, rows.shape[1], rows.dtype).float()
    plain = rows.float()
    norms = [torch.linalg.vector_norm(one) for one in (decoded - plain, plain)]
    lost, size = torch.stack(norms).tolist()
    kind = str(rows.dtype).removeprefix("torch.") if wire.quantizer is None else type(wire.quantizer).__name__
    return WireCost(name, kind, carried, rows.shape[1] * rows.element_size(), lost / size if size else lost)
