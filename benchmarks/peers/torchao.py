"""torchao where it is installed: its linear layers, and its Triton kernels that quantize, two for both directions.

Its MXFP8 casts need an sm_100 GPU, so they have no place beside ours on an H200.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor

float8: Any = None
with contextlib.suppress(ImportError):
    from torchao import float8

blockwise: Any = None
tensorwise: Any = None
with contextlib.suppress(ImportError):
    from torchao.prototype.blockwise_fp8_training import kernels as blockwise
    from torchao.prototype.float8nocompile.kernels import fp8_dynamic_tensorwise as tensorwise

AVAILABLE = blockwise is not None


def current_scale(x: Tensor) -> object:
    """Amax by atomics, then row-wise and transposed data from one read."""
    return tensorwise.hp_to_fp8_row_major_t_and_non_t(x, torch.float8_e4m3fn, linear_mm_config=None)


def block_1d(x: Tensor) -> object:
    """Blocks of 128 along the rows, and along the columns into transposed data."""
    return (
        blockwise.triton_fp8_blockwise_act_quant_lhs(x),
        blockwise.triton_fp8_blockwise_act_quant_transposed_lhs(x),
    )


def block_2d(x: Tensor) -> object:
    """Tiles of 128 x 128, in memory as the matrix and as its transpose."""
    return (
        blockwise.triton_fp8_blockwise_weight_quant_transposed_rhs(x),
        blockwise.triton_fp8_blockwise_weight_quant_rhs(x),
    )


def converted(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Copies of a module with FP8 linear layers, by the name of their recipe; none without torchao or off the GPU."""
    if float8 is None or not next(module.parameters()).is_cuda:
        return {}
    found: dict[str, torch.nn.Module] = {}
    for recipe in ("tensorwise", "rowwise"):
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        found[recipe] = float8.convert_to_float8_training(copy.deepcopy(module), config=config)
    return found
