"""``ShardReceipt``: the decision of ``shard`` about each parameter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter and how it is gathered.

    Attributes:
        reason: why it is gathered in high precision, "" if it is gathered quantized.
        bytes: bytes of one gather over all ranks.
        plain_bytes: the same in high precision, in the dtype of computation.
    """

    name: str
    shape: tuple[int, ...]
    reason: str
    bytes: int
    plain_bytes: int

    @property
    def quantized(self) -> bool:
        """Whether its codes are gathered."""
        return not self.reason


@dataclass(frozen=True)
class ShardReceipt:
    """The parameters of a model sharded over ``ranks`` ranks; prints as a table."""

    parameters: tuple[ShardedParameter, ...]
    ranks: int

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a gather of all parameters."""
        return sum(one.bytes for one in self.parameters)

    @property
    def plain_bytes(self) -> int:
        """Bytes of that gather without quantization."""
        return sum(one.plain_bytes for one in self.parameters)

    def __str__(self) -> str:
        rows = [
            (one.name, "x".join(map(str, one.shape)), one.reason or "quantized") for one in self.parameters
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {how}" for name, shape, how in rows]
        share = self.gathered_bytes / max(self.plain_bytes, 1)
        total = (
            f"{self.gathered_bytes / 1e6:.1f} MB per gather, {share:.2f} of {self.plain_bytes / 1e6:.1f} MB"
        )
        return "\n".join([*lines, f"{total}, over {self.ranks} ranks"])
