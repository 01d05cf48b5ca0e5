"""F4: a GEMM's output scaled and added to an extra input in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...recipe import Recipe
from ..basic.basic_linear import BasicLinear
from ..basic.moves import AddExtraInput, ConstantScale
from ..op import FusibleOperation
from .linear_run import ForwardLinearRun, exactly
from .pattern import Fusion, Match, Matched, NearMiss


class ForwardLinearScaleAdd(ForwardLinearRun):
    """``y = scale * (x w^T) + extra``, product and sum rounded together; the extra input is never written to."""

    def finished(self, out: Tensor, extra: Tensor) -> Tensor:
        scale: float = self.basic_ops[1].scale  # type: ignore[assignment]
        return torch.add(extra, out, alpha=scale)


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, BasicLinear, ConstantScale, AddExtraInput):
        return None
    linear: Any = ops[start]
    last: Any = ops[start + 2]
    if linear.parallel.mode == "row":
        return NearMiss(
            "the layer is row-parallel: factor and extra input come behind the sum over processes"
        )
    if not last.in_place:
        return NearMiss("AddExtraInput has in_place=False")
    return Match(3)


FORWARD_LINEAR_SCALE_ADD = Fusion("ForwardLinearScaleAdd", "forward", _match, ForwardLinearScaleAdd)
