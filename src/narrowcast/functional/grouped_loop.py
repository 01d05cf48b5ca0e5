"""Groups one after the other as the library's FP8 GEMM: fastest for large groups whose sizes the host knows.

A kernel for all groups at once keeps the GPU busy however small the groups are. Where one group fills it alone, the
library's GEMM of that group is the faster one, above all in the pairs that its grouped GEMM does not take. Each
product is exactly that of a ``Linear`` which has the group for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import FLOAT8_BLOCK, FLOAT8_BLOCK_SCALE_ALIGNMENT, round_up
from .gemm import multiply_native
from .quantizer_value import NativeOperand

PRODUCTS = {"fprop": 3e10, "dgrad": 1.5e10, "dgrad in blocks": 3e10, "wgrad": 1.5e10}
"""Multiplications of an average group from which on the loop is taken: then the GPU needs longer for a group than the
host for starting it. The kernel's fprop accumulates fast and is harder to beat; with block scales on its rows, the host
also starts a copy of every group's scales."""

ROW_MULTIPLE = 16  # of what the library takes


class GroupedOperand(NamedTuple):
    """What kernels and library read of the groups of an operand.

    ``codes``: rows of groups (T or P, contraction); columns of groups (rows, P); weights (G, rows, contraction).
    ``scale``: (G,), or of ``block`` rows x 128 each: (row blocks, contraction blocks), of weights with G before.
    """

    codes: Tensor
    scale: Tensor
    block_scaled: bool
    block: int


def prefers_loop(
    kind: str,
    a: GroupedOperand,
    b: GroupedOperand,
    sizes: list[int],
    out_features: int,
    in_features: int,
) -> bool:
    """Whether groups of these sizes are multiplied one by one.

    Args:
        kind: "fprop", "dgrad" or "wgrad". a, b: its operands. sizes: rows of every group.
    """
    if a.block_scaled and (a.block, b.block) != (1, 1 if kind == "wgrad" else FLOAT8_BLOCK):
        return False
    multiple = FLOAT8_BLOCK if a.block_scaled else ROW_MULTIPLE
    filled = [size for size in sizes if size]
    if not filled or out_features % multiple or in_features % multiple:
        return False
    least = PRODUCTS["dgrad in blocks" if a.block_scaled and kind == "dgrad" else kind]
    return sum(filled) / len(filled) * out_features * in_features >= least


def multiply_in_loop(
    kind: str,
    a: GroupedOperand,
    b: GroupedOperand,
    sizes: list[int],
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    alignment: int,
    fast_accumulation: bool,
) -> Tensor:
    """The product of every group, (T, columns) or (G, N, K); zero where there is nothing to multiply.

    Args:
        a, b: operands of the kind's directions. sizes: rows of every group.
        bias: (G, N) or None. shape: of the result. alignment: that groups start at where they are padded.
    """
    out = a.codes.new_empty(shape, dtype=dtype)
    if not a.block_scaled:
        a, b = (operand._replace(scale=_aligned(operand.scale)) for operand in (a, b))
    start = padded = 0
    for group, size in enumerate(sizes):
        place = out[group] if kind == "wgrad" else out[start : start + size]
        if size == 0:
            place.zero_()
            continue
        if kind == "wgrad":
            left, right = (
                _columns_of(operand, group, padded, round_up(size, alignment)) for operand in (a, b)
            )
        else:
            left = _rows_of(a, group, padded if a.block_scaled else start, size)
            right = _weight_of(b, group)
        own = None if bias is None else bias[group]
        # with block scales the library wants whole 16 rows: what is more goes into memory of its own first
        direct = not a.block_scaled or place.shape[0] % ROW_MULTIPLE == 0
        into = place if direct else None
        rows, columns = place.shape
        product = multiply_native(left, right, own, dtype, rows, columns, fast_accumulation, into)
        if not direct:
            place.copy_(product)
        start, padded = start + size, padded + round_up(size, alignment)
    if kind != "wgrad":
        out[start:].zero_()
    return out


def _aligned(scale: Tensor) -> Tensor:
    """The scales of the groups where the library can read each by itself: it takes none but at 16 bytes."""
    return scale.unsqueeze(1).expand(-1, 4).contiguous()[:, 0]


def _rows_of(operand: GroupedOperand, group: int, start: int, size: int) -> NativeOperand:
    if not operand.block_scaled:
        return NativeOperand(operand.codes[start : start + size], operand.scale[group : group + 1], "tensor")
    at = slice(start, start + round_up(size, ROW_MULTIPLE))  # groups are padded to 128 rows
    scale = operand.scale[at].t().contiguous().t()
    return NativeOperand(operand.codes[at], scale, "1x128")


def _columns_of(operand: GroupedOperand, group: int, start: int, size: int) -> NativeOperand:
    codes = operand.codes[:, start : start + size]
    if not operand.block_scaled:
        return NativeOperand(codes, operand.scale[group : group + 1], "tensor")
    blocks = slice(start // FLOAT8_BLOCK, (start + size) // FLOAT8_BLOCK)
    return NativeOperand(codes, operand.scale[:, blocks], "1x128")


def _weight_of(operand: GroupedOperand, group: int) -> NativeOperand:
    codes = operand.codes[group]
    if not operand.block_scaled:
        return NativeOperand(codes, operand.scale[group : group + 1], "tensor")
    scale = operand.scale[group]
    missing = -scale.shape[1] % FLOAT8_BLOCK_SCALE_ALIGNMENT
    scale = F.pad(scale, (0, missing)) if missing else scale.contiguous()
    return NativeOperand(codes, scale.t(), "128x128")
