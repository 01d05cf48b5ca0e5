"""F3: the bias added where the GEMM ends. Its name is the upstream project's, which has no activation in it either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...recipe import Recipe
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..op import FusibleOperation
from .linear_run import ForwardLinearRun, exactly
from .pattern import Fusion, Match, Matched, NearMiss


class ForwardLinearBiasActivation(ForwardLinearRun):
    """``y = x w^T + bias``, rounded once where the GEMM can."""


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, BasicLinear, Bias):
        return None
    linear: Any = ops[start]
    if linear.parallel.mode == "row":
        return NearMiss("the layer is row-parallel: its bias comes behind the sum over processes")
    if linear.weight.dtype not in (torch.float16, torch.bfloat16):
        return NearMiss(f"the weight is {linear.weight.dtype}; the GEMM adds a bias in fp16 and bf16")
    return Match(2)


FORWARD_LINEAR_BIAS_ACTIVATION = Fusion(
    "ForwardLinearBiasActivation", "forward", _match, ForwardLinearBiasActivation
)
