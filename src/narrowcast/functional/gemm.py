"""``narrowcast::gemm``: the three GEMMs of a linear layer on quantized operands.

Both operands arrive with the contraction along their last dim, so every GEMM is ``left @ right.T``:

=======  ===================  =====================  =========
kind     left                 right                  result
=======  ===================  =====================  =========
fprop    input, rowwise       weight, rowwise        [M, N]
dgrad    grad_output, rowwise weight, columnwise     [M, K]
wgrad    grad_output, column  input, columnwise      [N, K]
=======  ===================  =====================  =========

On CPU, and on a GPU when emulation is asked for, operands are decoded to values that are exact in the compute dtype
and multiplied with fp32 accumulation. Otherwise ``torch.nn.functional.scaled_mm`` reads the payload as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from ._library import QUANTIZER, define
from .quantizer_value import GemmOperand, NativeOperand, QuantizerValue

_COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
_SCALING = {
    "tensor": ScalingType.TensorWise,
    "1x128": ScalingType.BlockWise1x128,
    "128x128": ScalingType.BlockWise128x128,
}


def _gemm(
    kind: str,
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    fast_accumulation: bool,
    emulate: bool,
) -> Tensor:
    left_columnwise, right_columnwise = _COLUMNWISE[kind]
    on_cuda = left[0].is_cuda
    if not on_cuda or emulate:
        compute = torch.bfloat16 if on_cuda else torch.float32
        a = left_quantizer._gemm_operand(left, left_columnwise, compute)
        b = right_quantizer._gemm_operand(right, right_columnwise, compute)
        return _multiply_decoded(a, b, bias, dtype, rows, columns)
    a = left_quantizer._native_operand(left, left_columnwise)
    b = right_quantizer._native_operand(right, right_columnwise)
    if a is None or b is None:
        raise RuntimeError(_no_native_gemm(left_quantizer, right_quantizer))
    return _multiply_native(a, b, bias, dtype, rows, columns, fast_accumulation)


def _gemm_fake(
    kind: str,
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    fast_accumulation: bool,
    emulate: bool,
) -> Tensor:
    return left[0].new_empty((rows, columns), dtype=dtype)


gemm = define(
    f"gemm(str kind, Tensor[] left, {QUANTIZER} left_quantizer, Tensor[] right, {QUANTIZER} right_quantizer, "
    "Tensor? bias, ScalarType dtype, SymInt rows, SymInt columns, bool fast_accumulation, bool emulate) -> Tensor",
    _gemm,
    _gemm_fake,
)
"""Multiply two quantized operands; ``rows`` x ``columns`` is the logical result, padding is cut away."""


def _multiply_decoded(
    a: GemmOperand, b: GemmOperand, bias: Tensor | None, dtype: torch.dtype, rows: int, columns: int
) -> Tensor:
    """``a @ b.T`` of decoded operands: fp32 accumulation, scales, bias, one rounding to ``dtype``."""
    # operands may be zero-padded to different lengths, and to more rows than the result has
    contraction = min(a.values.shape[1], b.values.shape[1])
    left, right = a.values[:rows, :contraction], b.values[:columns, :contraction]
    if left.dtype != right.dtype:
        left, right = left.float(), right.float()
    if left.dtype == torch.float32:
        out = left @ right.t()
    else:
        out = torch.mm(left, right.t(), out_dtype=torch.float32)
    scale = _output_scale(a.scale, b.scale, rows, columns)
    if scale is not None:
        out.mul_(scale)
    if bias is not None:
        out.add_(bias.float())
    return out.to(dtype)


def _output_scale(a: Tensor | None, b: Tensor | None, rows: int, columns: int) -> Tensor | None:
    """Scale of the result from the operands': one element, (rows, 1) and (1, columns) as they come."""
    left = a if a is None or a.numel() == 1 else a[:rows]
    right = b if b is None or b.numel() == 1 else b[:columns].t()
    if left is None or right is None:
        return right if left is None else left
    return left * right


def _multiply_native(
    a: NativeOperand,
    b: NativeOperand,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    fast_accumulation: bool,
) -> Tensor:
    """``a @ b.T`` on the tensor cores, zero-padding what the library GEMM needs aligned."""
    if rows == 0 or columns == 0 or a.data.shape[1] == 0:
        out = a.data.new_zeros((rows, columns), dtype=dtype)
        return out if bias is None else out + bias.to(dtype)
    if a.scaling == "plain" and b.scaling == "plain":
        out = a.data @ b.data.t().to(a.data.dtype)
        return (out if bias is None else out + bias).to(dtype)
    per_tensor = a.scaling == b.scaling == "tensor"
    align = 16 if per_tensor else 128
    left, right = _pad_to(a.data, 16, align), _pad_to(b.data, 16 if per_tensor else 128, align)
    fused = bias.to(dtype) if bias is not None and per_tensor and dtype != torch.float32 else None
    out = F.scaled_mm(
        left,
        right.t(),
        _pad_scale(a, left),
        _SCALING[a.scaling],
        _pad_scale(b, right),
        _SCALING[b.scaling],
        bias=None if fused is None else _pad_bias(fused, right.shape[0]),
        output_dtype=dtype,
        use_fast_accum=fast_accumulation and per_tensor,
    )
    if bias is not None and fused is None:
        out = out[:, :columns] + bias.to(dtype)
    return out[:rows, :columns].contiguous()


def _pad_to(data: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    missing_rows, missing_columns = -data.shape[0] % row_multiple, -data.shape[1] % column_multiple
    if not missing_rows and not missing_columns:
        return data
    # fp8 code 0 is the value 0, and the byte view pads where fp8 itself cannot
    return F.pad(data.view(torch.uint8), (0, missing_columns, 0, missing_rows)).view(data.dtype)


def _pad_bias(bias: Tensor, columns: int) -> Tensor:
    return F.pad(bias, (0, columns - bias.shape[0])) if bias.shape[0] != columns else bias


def _pad_scale(operand: NativeOperand, padded: Tensor) -> Tensor:
    """Scales of the padded operand; block scales keep the outer-dim-major layout the GEMM asks for."""
    if operand.scaling == "tensor":
        return operand.scale
    stored = operand.scale.t()  # the buffer as the quantizer wrote it
    if operand.scaling == "1x128":  # (K/128, rows), rows padded to a multiple of 4 already
        missing = (0, padded.shape[0] - stored.shape[1])
    else:  # (rows/128, K/128 padded to 4)
        missing = (0, 0)
    return F.pad(stored, missing, value=1.0).t() if any(missing) else operand.scale


def _no_native_gemm(left: QuantizerValue, right: QuantizerValue) -> str:
    return (
        f"this GPU has no native GEMM for {type(left).__qualname__} x {type(right).__qualname__}; pass "
        "emulate=True to the recipe or set NARROWCAST_EMULATE=1 to run it emulated (decode to bf16, bf16 GEMM)"
    )
