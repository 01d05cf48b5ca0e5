"""F4: a GEMM's output scaled and added to an extra input in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...recipe import Recipe
from ..basic.basic_linear import BasicLinear
from ..basic.moves import AddExtraInput, ConstantScale
from ..op import FusibleOperation
from .linear_run import ForwardLinearRun, exactly, may_add
from .pattern import Fusion, Matched


class ForwardLinearScaleAdd(ForwardLinearRun):
    """``y = scale * (x w^T) + extra``, product and sum rounded together; the extra input is never written to."""

    def finished(self, out: Tensor, extra: Tensor) -> Tensor:
        scale: float = self.basic_ops[1].scale  # type: ignore[assignment]
        return torch.add(extra, out, alpha=scale)


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    return may_add(ops, start, 3) if exactly(ops, start, BasicLinear, ConstantScale, AddExtraInput) else None


FORWARD_LINEAR_SCALE_ADD = Fusion("ForwardLinearScaleAdd", "forward", _match, ForwardLinearScaleAdd)
