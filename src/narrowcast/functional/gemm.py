"""``narrowcast::gemm`` and ``gemm_accumulate_``: the three GEMMs of a linear layer on quantized operands.

Both operands arrive with the contraction along their last dim, so every GEMM is ``left @ right.T``:

=======  ===================  =====================  =========
kind     left                 right                  result
=======  ===================  =====================  =========
fprop    input, rowwise       weight, rowwise        [M, N]
dgrad    grad_output, rowwise weight, columnwise     [M, K]
wgrad    grad_output, column  input, columnwise      [N, K]
=======  ===================  =====================  =========

On a CPU, and on a GPU under emulation, operands are decoded to values that are exact in the compute dtype
and multiplied with fp32 accumulation. Otherwise ``torch.nn.functional.scaled_mm`` reads the payload as it is.

A bias is rounded to the dtype of the result and added to the fp32 product before the one rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.torch_version import TorchVersion

from .. import _device, kernels, reference
from .._tracing import can_overwrite
from ..upstream import opaque
from ..upstream.compiler import may_choose_gemms
from ..upstream.cuda import scaled_mm, scaled_mm_in_blocks
from ._library import QUANTIZER, define
from .numerics import numerics_for
from .quantizer_value import GemmOperand, NativeOperand, QuantizerValue
from .swizzle import swizzle_scales

COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
_SCALING = {
    "1x128": [ScalingType.BlockWise1x128.value],
    "128x128": [ScalingType.BlockWise128x128.value],
}
# scaled_mm's names for tiled scales, and their dtype; NVFP4 has a tensor scale above the block scales.
_TILED = {
    "1x32": ([ScalingType.BlockWise1x32], torch.float8_e8m0fnu),
    "1x16": ([ScalingType.BlockWise1x16, ScalingType.TensorWise], torch.float8_e4m3fn),
}
_NATIVE_PAIRS = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("row", "tensor"),
    ("tensor", "row"),
    ("1x128", "1x128"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
    ("plain", "plain"),
)


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
    left_columnwise, right_columnwise = COLUMNWISE.get(kind) or gemm_directions(kind)
    if left_quantizer._multiplies:
        out = left_quantizer._multiply(kind, left, right, right_quantizer, bias, dtype, fast_accumulation)
        return out[:rows, :columns].to(dtype).contiguous()
    if emulate or not left[0].is_cuda:
        directions = left_columnwise, right_columnwise
        x, y, scales = decoded_operands(
            left, left_quantizer, right, right_quantizer, directions, rows, columns
        )
        if scales is None and x.dtype == dtype != torch.float32:
            return _multiply_plain(x, y, bias, dtype)
        out = x @ y.t() if x.dtype == torch.float32 else torch.mm(x, y.t(), out_dtype=torch.float32)
        if scales is not None:
            out.mul_(scales[0][:, None] * scales[1])
        return (out if bias is None else out.add_(bias.to(dtype))).to(dtype)
    a = left_quantizer._native_operand(left, left_columnwise)
    b = right_quantizer._native_operand(right, right_columnwise)
    # only decoded values can be rotated back
    turns = left_quantizer._rotates or right_quantizer._rotates
    alike = not turns or (
        left_quantizer._rotation(left_columnwise) == right_quantizer._rotation(right_columnwise)
    )
    if a is None or b is None or not (alike and _multiplies_natively(a, b)):
        raise RuntimeError(no_native_gemm("GEMM", left_quantizer, right_quantizer))
    return multiply_native(a, b, bias, dtype, rows, columns, fast_accumulation)


def _is_library_gemm(*arguments: Any) -> bool:
    """Return whether a graph may hold the product as the library's GEMM, with the bits that eager code has.

    An emulated one would be fused with its scaling, and while it tunes GEMMs the compiler takes kernels of its own.
    MXFP8 and NVFP4, whose scales are bytes, stay whole: their dtypes were never compiled on a GPU that multiplies them.
    """
    if any(isinstance(argument, QuantizerValue) and argument._multiplies for argument in arguments):
        return False
    left: Any = next(argument for argument in arguments if isinstance(argument, (list, tuple)))
    if len(left) > 1 and left[1].dtype == torch.uint8:
        return False
    # a product of nothing reads nothing: the casts, which collect amaxes, would be dead code
    if not left[0].numel():
        return False
    return not arguments[-1] and not may_choose_gemms()


def _gemm_fake(kind: str, left: list[Tensor], *arguments: Any) -> Tensor:
    gemm_directions(kind)
    dtype, rows, columns = arguments[4:7]
    return left[0].new_empty((rows, columns), dtype=dtype)


gemm = define(
    f"gemm(str kind, Tensor[] left, {QUANTIZER} left_quantizer, Tensor[] right, {QUANTIZER} right_quantizer, "
    "Tensor? bias, ScalarType dtype, SymInt rows, SymInt columns, bool fast_accumulation, bool emulate) -> Tensor",
    _gemm,
    _gemm_fake,
    inlined=_is_library_gemm,
)
"""Multiply two quantized operands; ``rows`` x ``columns`` is the logical result, padding is cut away.

Args:
    kind: "fprop", "dgrad" or "wgrad"; says which direction of each operand was passed.
    left, right: the buffers of that direction, as ``rowwise_operand`` or ``columnwise_operand`` of a storage give them.
    bias: (columns,) or None.
    dtype: bf16, fp16 or fp32.
    fast_accumulation: let FP8 with scales of tensors or rows accumulate in the tensor cores' short registers.
    emulate: on a GPU, decode and multiply in bf16 or fp32.

Returns:
    (rows, columns) of ``dtype``, contiguous.

Raises:
    ValueError: another ``kind``. RuntimeError: the pair of formats has no native GEMM and ``emulate`` is off.

Numerics:
    ``RN_dtype(left @ right.T + RN_dtype(bias))``, product and sum in fp32.
"""


def _gemm_accumulate(
    kind: str,
    out: Tensor,
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    fast_accumulation: bool,
    emulate: bool,
) -> None:
    _check_accumulator(kind, out)
    operands = (left, left_quantizer, right, right_quantizer)
    rows, columns = out.shape
    out.add_(_gemm(kind, *operands, None, torch.float32, rows, columns, fast_accumulation, emulate))


def _gemm_accumulate_fake(kind: str, out: Tensor, *_: Any) -> None:
    _check_accumulator(kind, out)


# Before 2.13 the functionalization of a mutating operator replaces arguments that are callable, and quantizers are.
_GRAPHS_WRITE = TorchVersion(torch.__version__) >= "2.13" or not opaque.AVAILABLE

_accumulate_op = define(
    f"gemm_accumulate_(str kind, Tensor(a!) out, Tensor[] left, {QUANTIZER} left_quantizer, Tensor[] right, "
    f"{QUANTIZER} right_quantizer, bool fast_accumulation, bool emulate) -> ()",
    _gemm_accumulate,
    _gemm_accumulate_fake,
    inlined=_is_library_gemm,
)


def gemm_accumulate_(
    kind: str,
    out: Tensor,
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    fast_accumulation: bool,
    emulate: bool,
) -> None:
    """Add the product of two quantized operands to ``out`` in place, as a weight gradient accumulates.

    Args:
        kind, left, right, fast_accumulation, emulate: as :data:`gemm` takes them.
        out: (rows, columns) fp32 or bf16, any strides; padding of the operands is cut to it.

    Raises:
        ValueError: another ``kind``, or an ``out`` that is no matrix or has another dtype.
        RuntimeError: the pair of formats has no native GEMM and ``emulate`` is off.

    Numerics:
        ``out = RN(out + left @ right.T)``, product and sum in fp32, one rounding to the dtype of ``out``.
    """
    operands = (left, left_quantizer, right, right_quantizer)
    if _GRAPHS_WRITE or can_overwrite():
        _accumulate_op(kind, out, *operands, fast_accumulation, emulate)
        return
    _check_accumulator(kind, out)
    out.add_(gemm(kind, *operands, None, torch.float32, *out.shape, fast_accumulation, emulate))


def gemm_directions(kind: str) -> tuple[bool, bool]:
    """Return whether the left and the right operand are column-wise.

    Raises:
        ValueError: another ``kind`` than the three.
    """
    if kind not in COLUMNWISE:
        raise ValueError(f"kind is {kind!r}; use one of {list(COLUMNWISE)}")
    return COLUMNWISE[kind]


def _check_accumulator(kind: str, out: Tensor) -> None:
    gemm_directions(kind)
    if out.dim() != 2:
        raise ValueError(f"out has shape {tuple(out.shape)}; accumulate into a matrix (rows, columns)")
    if out.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out is {out.dtype}; accumulate into torch.float32 or torch.bfloat16")


def _multiplies_natively(a: NativeOperand, b: NativeOperand) -> bool:
    if a.scaling in _TILED:
        available = _device.is_mxfp8_available if a.scaling == "1x32" else _device.is_nvfp4_available
        e5m2 = a.data.dtype == b.data.dtype == torch.float8_e5m2
        return a.scaling == b.scaling and not e5m2 and bool(available())
    left, right = a.data.dtype is torch.float8_e5m2, b.data.dtype is torch.float8_e5m2
    # block scaling takes E4M3 alone, scales of tensors and rows E5M2 on one side
    refused = (left and right) or (a.scaling not in ("tensor", "row") and (left or right))
    if "row" in (a.scaling, b.scaling):
        refused = refused or not (kernels.AVAILABLE and _device.is_fp8_available())
    return (a.scaling, b.scaling) in _NATIVE_PAIRS and not refused


def decoded_operands(
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    columnwise: tuple[bool, bool],
    rows: int,
    columns: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return both operands of ``rows`` x ``columns`` decoded, in one dtype and of one contraction, and two scales.

    Their product multiplies the fp32 result, once: that of a row, or one for all, and that of a column, or one; None
    for 1.
    """
    numerics = numerics_for(left[0])
    compute = torch.bfloat16 if left[0].is_cuda else torch.float32
    a = left_quantizer._gemm_operand(numerics, left, columnwise[0], compute)
    b = right_quantizer._gemm_operand(numerics, right, columnwise[1], compute)
    if left_quantizer._rotates or right_quantizer._rotates:
        rotations = left_quantizer._rotation(columnwise[0]), right_quantizer._rotation(columnwise[1])
        if rotations[0] != rotations[1]:  # alike, they cancel in the product
            a, b = _unrotated(a, rotations[0]), _unrotated(b, rotations[1])
    # operands may be zero-padded to different lengths, and to more rows than the result has
    contraction = min(a.values.shape[1], b.values.shape[1])
    x, y = a.values[:rows, :contraction], b.values[:columns, :contraction]
    if x.dtype != y.dtype:
        x, y = x.float(), y.float()
    if a.scale is None and b.scale is None:
        return x, y, None
    scales = [
        x.new_ones(1, dtype=torch.float32) if one is None else one.view(-1) for one in (a.scale, b.scale)
    ]
    return x, y, (scales[0][:rows], scales[1][:columns])


def _unrotated(operand: GemmOperand, rotation: int | None) -> GemmOperand:
    """Return an operand whose contraction is as it was before the quantizer rotated it, in fp32."""
    if rotation is None:
        return operand
    values = reference.hadamard.unrotate_rows(operand.values.float().t().contiguous(), rotation != 0)
    return operand._replace(values=values.t())


def multiply_native(
    a: NativeOperand,
    b: NativeOperand,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    fast_accumulation: bool,
) -> Tensor:
    """Return ``a @ b.T`` on the tensor cores, zero-padding what the library GEMM needs aligned; rows may be strided."""
    if rows == 0 or columns == 0 or a.data.shape[1] == 0:
        out = a.data.new_zeros((rows, columns), dtype=dtype)
        return out if bias is None else out + bias.to(dtype)
    if a.scaling == "plain":
        return _multiply_plain(a.data, b.data.to(a.data.dtype), bias, dtype)
    if "row" in (a.scaling, b.scaling):
        fused = _library_multiplies_rows(a, b, dtype)
        if fused:
            product = _multiply_by_rows(a, b, bias, dtype, fast_accumulation)
        else:
            kernel = numerics_for(a.data).batch_invariant.multiply_codes
            product = kernel(a.data, a.scale, b.data, b.scale, 1, dtype)
    elif a.scaling == "tensor":
        fused = bias is not None and dtype != torch.float32  # the library adds no bias to fp32
        product = _multiply_per_tensor(a, b, bias if fused else None, dtype, fast_accumulation)
    elif a.scaling in _TILED:
        fused, product = False, _multiply_in_tiles(a, b, dtype)
    elif _has_few_rows(a, b):
        fused, codes = True, (a.data.view(torch.uint8), a.scale.t(), b.data.view(torch.uint8), b.scale)
        product = kernels.few_rows.multiply_codes(*codes, bias, dtype)  # type: ignore[attr-defined]
    else:
        # Rounded before the bias: a product kept in fp32 for one rounding would take 1.7 times as long.
        fused, product = False, _multiply_in_blocks(a, b, dtype)
    out = product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()
    return out if bias is None or fused else out.add_(bias.to(dtype))


FEW_ROWS = 64
"""Rows up to which a kernel multiplies blocks: the library's GEMM takes up to three times as long with so few."""


def _has_few_rows(a: NativeOperand, b: NativeOperand) -> bool:
    in_blocks = (a.scaling, b.scaling) == ("1x128", "128x128")
    return (
        in_blocks and a.data.shape[0] <= FEW_ROWS and a.data.shape[1] == b.data.shape[1] and kernels.AVAILABLE
    )


def _multiply_per_tensor(
    a: NativeOperand,
    b: NativeOperand,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    left, right = a.data, b.data
    if left.shape[1] % 16 or right.shape[0] % 16:
        # the library takes any number of rows on the left: a ragged batch is not copied
        left, right = _pad_to(left, 1, 16), _pad_to(right, 16, 16)
    # the older of the library's two entries: F.scaled_mm takes a third more CPU time for the same GEMM
    return scaled_mm(
        left,
        right.t(),
        a.scale,
        b.scale,
        bias=None if bias is None else _pad_bias(bias.to(dtype), right.shape[0]),
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )


def _library_multiplies_rows(a: NativeOperand, b: NativeOperand, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and a.data.shape[1] % 16 == 0 and b.data.shape[0] % 16 == 0


def _multiply_by_rows(
    a: NativeOperand, b: NativeOperand, bias: Tensor | None, dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """A scale per row, repeated where there is one: in these sizes the GEMM that Transformers runs, with its bits."""
    left, right = (one.scale.view(-1, 1).expand(one.data.shape[0], 1).contiguous() for one in (a, b))
    return scaled_mm(
        a.data,
        b.data.t(),
        left,
        right.t(),
        bias=None if bias is None else bias.to(dtype),
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )


def _multiply_in_blocks(a: NativeOperand, b: NativeOperand, dtype: torch.dtype) -> Tensor:
    left, right = _pad_to(a.data, 16, 128), _pad_to(b.data, 128, 128)
    scales = [_pad_scale(a, left)], [_pad_scale(b, right)]
    recipes = _SCALING[a.scaling], _SCALING[b.scaling]
    # F.scaled_mm calls this and doubles the CPU time
    return scaled_mm_in_blocks(
        left, right.t(), scales[0], recipes[0], [], scales[1], recipes[1], [], None, dtype
    )


def _multiply_in_tiles(a: NativeOperand, b: NativeOperand, dtype: torch.dtype) -> Tensor:
    """MXFP8 or NVFP4, as GPUs of compute capability 10 multiply them: written to PyTorch's checks, never run on one."""
    recipe, _ = _TILED[a.scaling]
    return F.scaled_mm(
        _padded_codes(a),
        _padded_codes(b).t(),
        _scales_in_tiles(a),
        recipe,
        _scales_in_tiles(b),
        recipe,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=dtype,
    )


def _padded_codes(operand: NativeOperand) -> Tensor:
    """Return codes in rows of the contraction, to multiples of 32 both ways; MXFP8's column-wise ones are copied for
    it.
    """
    return _pad_to(operand.data, 32, 32 if operand.scaling == "1x32" else 16).contiguous()


def _scales_in_tiles(operand: NativeOperand) -> list[Tensor]:
    """Return scales in the order that the GEMM reads; they are padded already, to 128 rows and 4 blocks."""
    scale = swizzle_scales(operand.scale).view(_TILED[operand.scaling][1])
    return [scale] if operand.tensor_scale is None else [scale, operand.tensor_scale]


def _multiply_plain(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T`` of high-precision matrices, rounded once."""
    if dtype == a.dtype:
        return F.linear(a, b, None if bias is None else bias.to(dtype))
    out = a @ b.t() if a.dtype == torch.float32 else torch.mm(a, b.t(), out_dtype=torch.float32)
    return out.to(dtype) if bias is None else _add_bias(out, bias, dtype)


def _add_bias(product: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``RN_dtype(product + RN_dtype(bias))`` of an fp32 product, in one pass."""
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    return torch.add(product, bias.to(dtype), out=out)


def _pad_to(data: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    missing_rows, missing_columns = -data.shape[0] % row_multiple, -data.shape[1] % column_multiple
    if not missing_rows and not missing_columns:
        return data
    # fp8 code 0 is the value 0, and the byte view pads where fp8 itself cannot
    return F.pad(data.view(torch.uint8), (0, missing_columns, 0, missing_rows)).view(data.dtype)


def _pad_bias(bias: Tensor, columns: int) -> Tensor:
    return F.pad(bias, (0, columns - bias.shape[0])) if bias.shape[0] != columns else bias


def _pad_scale(operand: NativeOperand, padded: Tensor) -> Tensor:
    """Return block scales of the padded operand, in the GEMM's outer-dim-major layout."""
    # 1x128: (rows, K/128), rows padded to a multiple of 4 already; 128x128: padded as the GEMM wants it
    missing = padded.shape[0] - operand.scale.shape[0] if operand.scaling == "1x128" else 0
    return F.pad(operand.scale.t(), (0, missing), value=1.0).t() if missing else operand.scale


def no_native_gemm(what: str, left: QuantizerValue, right: QuantizerValue) -> str:
    """Return the message for a pair of formats without a native GEMM; ``what``: "GEMM", or its kind."""
    return (
        f"this GPU has no native {what} for {type(left).__qualname__} x {type(right).__qualname__}; pass "
        "emulate=True to the recipe or set NARROWCAST_EMULATE=1 to run it emulated (decode to bf16, bf16 GEMM)"
    )
