"""F2: the bias added where the GEMM ends, an extra input to its output in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...recipe import Recipe
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.moves import AddExtraInput
from ..op import FusibleOperation
from .linear_run import ForwardLinearRun, added, exactly
from .pattern import Fusion, Match, Matched, NearMiss


class ForwardLinearBiasAdd(ForwardLinearRun):
    """``y = (x w^T + bias) + extra``; the extra input itself is never written to."""

    def finished(self, out: Tensor, extra: Tensor) -> Tensor:
        return added(out, extra)


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if exactly(ops, start, BasicLinear, Bias, AddExtraInput):
        length = 3
    elif exactly(ops, start, BasicLinear, AddExtraInput):
        length = 2
    else:
        return None
    linear: Any = ops[start]
    last: Any = ops[start + length - 1]
    if linear.parallel.mode == "row":
        return NearMiss("the layer is row-parallel: bias and extra input come behind the sum over processes")
    if not last.in_place:
        return NearMiss("AddExtraInput has in_place=False")
    return Match(length)


FORWARD_LINEAR_BIAS_ADD = Fusion("ForwardLinearBiasAdd", "forward", _match, ForwardLinearBiasAdd)
