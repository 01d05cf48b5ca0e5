"""F2: the bias added where the GEMM ends, an extra input to its output in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...recipe import Recipe
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.moves import AddExtraInput
from ..op import FusibleOperation
from .linear_run import ForwardLinearRun, added, exactly, may_add
from .pattern import Fusion, Matched


class ForwardLinearBiasAdd(ForwardLinearRun):
    """``y = (x w^T + bias) + extra``; the extra input itself is never written to."""

    def finished(self, out: Tensor, extra: Tensor) -> Tensor:
        return added(out, extra)


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if exactly(ops, start, BasicLinear, Bias, AddExtraInput):
        return may_add(ops, start, 3)
    return may_add(ops, start, 2) if exactly(ops, start, BasicLinear, AddExtraInput) else None


FORWARD_LINEAR_BIAS_ADD = Fusion("ForwardLinearBiasAdd", "forward", _match, ForwardLinearBiasAdd)
