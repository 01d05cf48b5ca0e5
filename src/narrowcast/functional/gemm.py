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
from torch.torch_version import TorchVersion

from .. import kernels, reference
from .._checks import shown
from .._device import is_native
from .._tracing import can_overwrite
from ..upstream import opaque
from ..upstream.compiler import may_choose_gemms
from ..upstream.cuda import scaled_mm, scaled_mm_by_recipe
from ._library import QUANTIZER, define
from .native_products import PRODUCTS, NativeProduct
from .numerics import numerics_for
from .quantizer_value import GemmOperand, NativeOperand, QuantizerValue
from .swizzle import swizzle_scales

COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


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
    dissolved=_is_library_gemm,
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
    dissolved=_is_library_gemm,
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
        raise ValueError(f"kind is {shown(kind)}; use one of {list(COLUMNWISE)}")
    return COLUMNWISE[kind]


def _check_accumulator(kind: str, out: Tensor) -> None:
    gemm_directions(kind)
    if out.dim() != 2:
        raise ValueError(f"out has shape {tuple(out.shape)}; accumulate into a matrix (rows, columns)")
    if out.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out is {out.dtype}; accumulate into torch.float32 or torch.bfloat16")


def _multiplies_natively(a: NativeOperand, b: NativeOperand) -> bool:
    if a.scaling == b.scaling == "plain":
        return True
    product = PRODUCTS.get((a.scaling, b.scaling))
    if product is None or not is_native(product.format):
        return False
    if "row" in (a.scaling, b.scaling) and not kernels.AVAILABLE:
        return False
    e5m2 = [one.data.dtype is torch.float8_e5m2 for one in (a, b)]
    return not any(e5m2) or (product.e5m2 and not all(e5m2))


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
    product = PRODUCTS[a.scaling, b.scaling]
    fused = bias is not None and dtype in product.bias
    if "row" in (a.scaling, b.scaling) and not _takes_rows(product, a, b, dtype):
        fused = False
        kernel = numerics_for(a.data).batch_invariant.multiply_codes
        out = kernel(a.data, a.scale, b.data, b.scale, 1, dtype)
    elif _has_few_rows(a, b):
        fused, codes = True, (a.data.view(torch.uint8), a.scale.t(), b.data.view(torch.uint8), b.scale)
        out = kernels.few_rows.multiply_codes(*codes, bias, dtype)  # type: ignore[attr-defined]
    else:
        out = _multiply_scaled(product, a, b, bias if fused else None, dtype, fast_accumulation)
    if out.shape != (rows, columns):
        out = out[:rows, :columns].contiguous()
    # Rounded before the bias: a product kept in fp32 for one rounding would take 1.7 times as long.
    return out if bias is None or fused else out.add_(bias.to(dtype))


FEW_ROWS = 64
"""Rows up to which a kernel multiplies blocks: the library's GEMM takes up to three times as long with so few."""


def _has_few_rows(a: NativeOperand, b: NativeOperand) -> bool:
    in_blocks = (a.scaling, b.scaling) == ("1x128", "128x128")
    return (
        in_blocks and a.data.shape[0] <= FEW_ROWS and a.data.shape[1] == b.data.shape[1] and kernels.AVAILABLE
    )


def _takes_rows(product: NativeProduct, a: NativeOperand, b: NativeOperand, dtype: torch.dtype) -> bool:
    aligned = a.data.shape[1] % product.contraction == 0 and b.data.shape[0] % product.columns == 0
    return dtype in product.outputs and aligned


def _multiply_scaled(
    product: NativeProduct,
    a: NativeOperand,
    b: NativeOperand,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """Return ``a @ b.T`` of padded operands by the library; ``bias``: one that the library adds."""
    left = _padded_codes(a, product.rows, product.contraction)
    right = _padded_codes(b, product.columns, product.contraction)
    left_scales, right_scales = _scales(product, a, left), _scales(product, b, right)
    if bias is not None:
        bias = _pad_bias(bias.to(dtype), right.shape[0])
    if product.recipes is not None:
        recipes, swizzles = product.recipes, product.swizzles
        # F.scaled_mm calls this and doubles the CPU time
        return scaled_mm_by_recipe(
            left,
            right.t(),
            left_scales,
            recipes[0],
            swizzles,
            right_scales,
            recipes[1],
            swizzles,
            bias,
            dtype,
        )
    left_scale, right_scale = left_scales[0], right_scales[0]
    if "row" in (a.scaling, b.scaling):
        # one scale is repeated: Transformers runs this GEMM in these sizes, and its bits are those
        left_scale, right_scale = _per_row(left_scale, left), _per_row(right_scale, right).t()
    # the older of the library's two entries: F.scaled_mm takes a third more CPU time for the same GEMM
    return scaled_mm(
        left,
        right.t(),
        left_scale,
        right_scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast_accumulation and product.fast,
    )


_TILED = ("1x32", "1x16")
"""Scalings whose scales the library reads in tiles of 128 rows and 4 blocks."""


def _padded_codes(operand: NativeOperand, row_multiple: int, column_multiple: int) -> Tensor:
    padded = _pad_to(operand.data, row_multiple, column_multiple)
    # MXFP8's column-wise codes are a transposed view
    return padded.contiguous() if operand.scaling in _TILED else padded


def _scales(product: NativeProduct, operand: NativeOperand, padded: Tensor) -> list[Tensor]:
    """Return the scales of padded codes as the library reads them."""
    if operand.scaling in _TILED:
        scale = swizzle_scales(operand.scale).view(product.scale_dtype)
        return [scale] if operand.tensor_scale is None else [scale, operand.tensor_scale]
    # 1x128: (rows, K/128), rows padded to a multiple of 4 already; 128x128: padded as the GEMM wants it
    missing = padded.shape[0] - operand.scale.shape[0] if operand.scaling == "1x128" else 0
    return [F.pad(operand.scale.t(), (0, missing), value=1.0).t() if missing else operand.scale]


def _per_row(scale: Tensor, codes: Tensor) -> Tensor:
    return scale.view(-1, 1).expand(codes.shape[0], 1).contiguous()


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


def no_native_gemm(what: str, left: QuantizerValue, right: QuantizerValue) -> str:
    """Return the message for a pair of formats without a native GEMM; ``what``: "GEMM", or its kind."""
    return (
        f"this GPU has no native {what} for {type(left).__qualname__} x {type(right).__qualname__}; pass "
        "emulate=True to the recipe or set NARROWCAST_EMULATE=1 to run it emulated (decode to bf16, bf16 GEMM)"
    )
