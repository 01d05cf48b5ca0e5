"""``narrowcast::grouped_gemm``: the three GEMMs of G linear layers, each on its own rows, as one operator.

=======  ===============================  ==============================  ===========
kind     left                             right                           result
=======  ===============================  ==============================  ===========
fprop    input, rowwise                   weights, rowwise                [T, N]
dgrad    grad_output, rowwise             weights, columnwise             [T, K]
wgrad    grad_output, columnwise          input, columnwise               [G, N, K]
=======  ===============================  ==============================  ===========

Operands lie as ``grouped_quantize`` left them. On a CPU, and on a GPU under emulation, every group is
multiplied as ``narrowcast::gemm`` would multiply it. Otherwise one Triton kernel multiplies all groups; nothing waits
for the splits. It adds up products of the same codes in fp32, in another order: last bits differ, as they do between
the library's own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels, reference
from ..formats import FLOAT8_BLOCK
from ._library import QUANTIZER, define
from .batch_invariant import gemm_batch_invariant
from .gemm import gemm, gemm_directions, no_native_gemm
from .grouped_decoded import (
    ALIGNMENT,
    Decoded,
    dequantized_rows,
    dequantized_weights,
    group_of_row,
    padded_rows_of_groups,
    rows_of_groups,
    weights_of_groups,
)
from .grouped_places import Direction
from .grouped_quantize import stack
from .numerics import numerics_for
from .quantizer_value import QuantizerValue

_BLOCK_OF = {"1x128": 1, "128x128": 128}


class _Native(NamedTuple):
    """The data of a grouped operand that kernels and library read.

    ``codes``: rows of groups (T or P, contraction); columns of groups (rows, P); weights (G, rows, contraction).
    ``scale``: (G,), or of ``block`` rows x 128 each: (row blocks, contraction blocks), of weights with G before.
    """

    codes: Tensor
    scale: Tensor
    block_scaled: bool
    block: int


class _Operand(NamedTuple):
    """One direction's buffers of groups, as ``grouped_quantize`` left them; ``dtype``: of what was quantized."""

    buffers: list[Tensor]
    quantizer: QuantizerValue
    layout: str
    dtype: torch.dtype

    def is_decoded(self) -> bool:
        """Return whether the device decodes all groups at once."""
        return self.layout != "split"

    def is_plain(self) -> bool:
        """Return whether the values were not quantized at all."""
        return self.quantizer._format_layout().native == "plain"

    def opened(self, columnwise: bool, shape: tuple[int, ...], groups: int) -> _Operand:
        """Return the operand of rows (T, K) or weights (G, N, K) out of its arena, if it is in one."""
        direction = Direction(self.layout, self.quantizer, columnwise, shape[-1], self.dtype)
        inner, buffers = direction.opened(self.buffers, shape, groups)
        return _Operand(buffers, inner.quantizer, inner.layout, self.dtype)

    def rows(self, splits: Tensor, group: Tensor, columns: int, dtype: torch.dtype) -> Decoded:
        return rows_of_groups(self.buffers, self.quantizer, self.layout, splits, group, columns, dtype)

    def by_group(self, columnwise: bool, sizes: list[int], columns: int) -> list[list[Tensor]]:
        direction = Direction(self.layout, self.quantizer, columnwise, columns, self.dtype)
        return direction.groups_of(self.buffers, sizes)


class _Sizes(NamedTuple):
    """T, N and K."""

    rows: int
    out_features: int
    in_features: int

    def of_result(self, kind: str, groups: int) -> tuple[int, ...]:
        if kind == "wgrad":
            return groups, self.out_features, self.in_features
        return self.rows, self.out_features if kind == "fprop" else self.in_features

    def columns_of_left(self, kind: str) -> int:
        return self.in_features if kind == "fprop" else self.out_features

    def of_right(self, kind: str, groups: int) -> tuple[int, ...]:
        if kind == "wgrad":
            return self.rows, self.in_features
        return groups, self.out_features, self.in_features


def _grouped_gemm(
    kind: str,
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    left_layout: str,
    left_dtype: torch.dtype,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    right_layout: str,
    right_dtype: torch.dtype,
    splits: Tensor,
    biases: list[Tensor],
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    in_features: int,
    fast_accumulation: bool,
    emulate: bool,
    covered: bool = False,
) -> Tensor:
    whole = _Sizes(rows, out_features, in_features)
    a = _Operand(left, left_quantizer, left_layout, left_dtype)
    b = _Operand(right, right_quantizer, right_layout, right_dtype)
    a, b = _opened(kind, a, b, whole, splits.shape[0])
    bias = _stacked(biases)
    if left[0].is_cuda and a.is_decoded() and b.is_decoded() and (emulate or (a.is_plain() and b.is_plain())):
        return _multiply_decoded(kind, a, b, splits, bias, dtype, whole)
    if emulate or not left[0].is_cuda:
        how = fast_accumulation, emulate
        return _multiply_each(kind, a, b, splits, bias, dtype, whole, lambda *group: gemm(*group, *how))
    return _multiply_native(kind, a, b, splits, bias, dtype, whole, fast_accumulation, covered)


def _opened(
    kind: str, left: _Operand, right: _Operand, whole: _Sizes, groups: int
) -> tuple[_Operand, _Operand]:
    """Return both operands out of their arenas."""
    left_columnwise, right_columnwise = gemm_directions(kind)
    rows = whole.rows, whole.columns_of_left(kind)
    return left.opened(left_columnwise, rows, groups), right.opened(
        right_columnwise, whole.of_right(kind, groups), groups
    )


def _grouped_gemm_fake(kind: str, left: list[Tensor], *arguments: Any) -> Tensor:
    operands = _Operand(left, *arguments[:3]), _Operand(*arguments[3:7])
    for one, columnwise in zip(operands, gemm_directions(kind), strict=True):
        Direction(one.layout, one.quantizer, columnwise, 0, one.dtype).check_graph(left[0])
    splits, _, dtype, *sizes = arguments[7:13]
    return left[0].new_empty(_Sizes(*sizes).of_result(kind, splits.shape[0]), dtype=dtype)


_PRODUCT = (
    f"str kind, Tensor[] left, {QUANTIZER} left_quantizer, str left_layout, ScalarType left_dtype, "
    f"Tensor[] right, {QUANTIZER} right_quantizer, str right_layout, ScalarType right_dtype, Tensor splits, "
    "Tensor[] biases, ScalarType dtype, SymInt rows, SymInt out_features, SymInt in_features"
)

grouped_gemm = define(
    f"grouped_gemm({_PRODUCT}, bool fast_accumulation, bool emulate, bool covered=False) -> Tensor",
    _grouped_gemm,
    _grouped_gemm_fake,
)
"""Multiply the groups of two quantized operands.

Args:
    kind: "fprop", "dgrad" or "wgrad".
    left, right: operands of the kind's directions, as ``operand_of`` finds them; with quantizer, layout and the dtype
        of what was quantized.
    splits: int32 or int64 (G,) on the operands' device: rows of each group. Rows beyond their sum become zero.
    biases: G of (N,), or one (G, N), or none; in fprop alone.
    dtype: of the result.
    rows, out_features, in_features: T, N, K.
    fast_accumulation: let per-tensor FP8 accumulate in the tensor cores' short registers.
    emulate: on a GPU, decode and multiply in bf16. Only groups after groups read the splits on the host. A bf16 product
        is rounded before scales and bias.
    covered: nothing reads rows beyond the sum of the splits; they may stay as the memory was.

Returns:
    (T, N), (T, K) or (G, N, K) of ``dtype``; the weight gradient of an empty group is zero.

Raises:
    ValueError: another ``kind``. RuntimeError: the pair of formats has no native grouped GEMM and ``emulate`` is off.
"""


def _in_order(kind: str, *arguments: Any) -> Tensor:
    operands, (splits, biases, dtype), (*sizes, most) = arguments[:8], arguments[8:11], arguments[11:]
    whole = _Sizes(*sizes)
    a, b = _opened(kind, _Operand(*operands[:4]), _Operand(*operands[4:]), whole, splits.shape[0])
    multiply = lambda *group: gemm_batch_invariant(*group, most, 1)  # noqa: E731
    return _multiply_each(kind, a, b, splits, _stacked(biases), dtype, whole, multiply)


grouped_gemm_batch_invariant = define(
    f"grouped_gemm_batch_invariant({_PRODUCT}, int most) -> Tensor",
    _in_order,
    _grouped_gemm_fake,
)
"""Multiply the rows of every group as :data:`gemm_batch_invariant` does; it reads the splits on the host.

Args:
    kind, left, right, splits, biases, dtype, rows, out_features, in_features: as :data:`grouped_gemm` takes them.
    most: as of ``reference.batch_invariant.splits_of``.
"""


def _multiply_each(
    kind: str,
    left: _Operand,
    right: _Operand,
    splits: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    sizes: _Sizes,
    multiply: Callable[..., Tensor],
) -> Tensor:
    """Return group by group as a GEMM of two operands."""
    left_columnwise, right_columnwise = gemm_directions(kind)
    groups = splits.shape[0]
    extents, _, _ = reference.grouped_quantize.extents(splits, sizes.rows, 1)
    right_extents = extents if kind == "wgrad" else [sizes.out_features] * groups
    lefts = left.by_group(left_columnwise, extents, sizes.columns_of_left(kind))
    rights = right.by_group(right_columnwise, right_extents, sizes.in_features)

    out = left.buffers[0].new_zeros(sizes.of_result(kind, groups), dtype=dtype)
    for group, _, place in _places(out, kind, splits, sizes.rows):
        operands = lefts[group], left.quantizer, rights[group], right.quantizer
        own_bias = None if bias is None else bias[group]
        place.copy_(multiply(kind, *operands, own_bias, dtype, *place.shape))
    return out


def _multiply_decoded(
    kind: str,
    left: _Operand,
    right: _Operand,
    splits: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    sizes: _Sizes,
) -> Tensor:
    """Multiply decoded groups with the library's grouped GEMM; nothing reads the splits."""
    _, right_columnwise = gemm_directions(kind)
    shape = sizes.of_result(kind, splits.shape[0])
    if 0 in shape or 0 in (splits.shape[0], *sizes):
        return left.buffers[0].new_zeros(shape, dtype=dtype)
    exact = torch.bfloat16  # holds what is decoded with scales that are powers of two
    if kind == "wgrad":  # padded as their codes are, with zeros: rotated groups of rows stay whole
        a, b = (
            padded_rows_of_groups(one.buffers, one.quantizer, splits.shape[0], columns, exact)
            for one, columns in ((left, sizes.out_features), (right, sizes.in_features))
        )
        alignment = ALIGNMENT["padded"]
        padded = (splits + (alignment - 1)) // alignment * alignment
        out = _unrounded(kind, *_of_one_dtype(a.values, b.values), padded, torch.float32)
        out = out if a.scale is None else out * a.scale.unsqueeze(2)
        out = out if b.scale is None else out * b.scale.unsqueeze(1)
        return out.to(dtype)
    group = group_of_row(splits, sizes.rows)
    a = left.rows(splits, group, sizes.columns_of_left(kind), exact)
    shape = splits.shape[0], sizes.out_features, sizes.in_features
    b = weights_of_groups(right.buffers, right.quantizer, right.layout, right_columnwise, shape, exact)
    x, y = _of_one_dtype(a.values, b.values)
    if dtype == x.dtype == exact:
        out = _product(kind, x, y, splits, dtype).float()  # rounded by the library's GEMM
    else:
        out = _unrounded(kind, x, y, splits, torch.float32)
    out = out if a.scale is None else out * a.scale
    out = out if b.scale is None else out * F.pad(b.scale, (0, 0, 0, 1))[group]
    if bias is not None:
        out = out + F.pad(bias.to(dtype), (0, 0, 0, 1))[group]
    return torch.where((group < splits.shape[0]).unsqueeze(1), out, 0).to(dtype)


def _of_one_dtype(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return (left, right) if left.dtype == right.dtype else (left.float(), right.float())


def _places(out: Tensor, kind: str, splits: Tensor, rows: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Return the number, rows and place in the result of every group with rows."""
    extents, starts, _ = reference.grouped_quantize.extents(splits, rows, 1)
    for group, (start, size) in enumerate(zip(starts, extents)):
        if size:
            at = slice(start, start + size)
            yield group, at, out[group] if kind == "wgrad" else out[at]


def _stacked(biases: list[Tensor]) -> Tensor | None:
    """Return (G, N) from G biases or from one that holds them all; None without any."""
    if not biases:
        return None
    return biases[0] if biases[0].dim() == 2 else torch.stack(biases)


def _multiply_native(
    kind: str,
    left: _Operand,
    right: _Operand,
    splits: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    whole: _Sizes,
    fast_accumulation: bool,
    covered: bool = False,
) -> Tensor:
    """Multiply the codes directly."""
    left_columnwise, right_columnwise = gemm_directions(kind)
    a = _native(left, left_columnwise, 0)
    b = _native(right, right_columnwise, 0 if kind == "wgrad" else splits.shape[0])
    if a is None or b is None or a.block_scaled != b.block_scaled:
        raise RuntimeError(no_native_gemm("grouped GEMM", left.quantizer, right.quantizer))
    options: dict[str, Any] = {
        "left_block": a.block,
        "right_block": b.block,
        "dtype": dtype,
        "fast_accumulation": fast_accumulation,
    }
    if kind == "wgrad":
        options["alignment"] = ALIGNMENT["padded" if a.block_scaled else "tensor"]
        return kernels.grouped_gemm.contraction(a.codes, a.scale, b.codes, b.scale, splits, **options)
    columns = whole.out_features if kind == "fprop" else whole.in_features
    if whole.rows == 0 or columns == 0:
        return a.codes.new_zeros((whole.rows, columns), dtype=dtype)
    options |= {
        "alignment": ALIGNMENT["padded"] if a.block_scaled else 1,
        "rows": whole.rows,
        "columns": columns,
        "covered": covered,
    }
    return kernels.grouped_gemm.rows(a.codes, a.scale, b.codes, b.scale, splits, bias, **options)


def _native(operand: _Operand, columnwise: bool, weights: int) -> _Native | None:
    """Return the operand as the kernels read it, or None; ``weights``: how many, 0 for groups of rows."""
    quantizer = operand.quantizer
    if operand.layout == "split":
        return None
    if operand.layout == "tensor":
        codes, scale = operand.buffers
        native = quantizer._native_operand([codes.view(-1, codes.shape[-1]), scale], columnwise)
        return None if native is None else _Native(native.data.view(codes.shape), scale, False, 1)
    native = quantizer._native_operand(operand.buffers, columnwise)
    if native is None or native.scaling not in _BLOCK_OF:
        return None
    block = _BLOCK_OF[native.scaling]
    # the buffers of 1 x 128 blocks hold the contraction first, those of 128 x 128 tiles as the operand's matrix
    scale = native.scale if block == 1 else native.scale.t()
    codes = native.data
    if weights:
        dim = 1 if columnwise else 0  # column-wise data has the groups along the contraction
        size = codes.shape[dim] // weights
        blocks = size // (FLOAT8_BLOCK if columnwise else block)
        codes = codes.unflatten(dim, (weights, size))
        scale = scale.narrow(dim, 0, weights * blocks).unflatten(dim, (weights, blocks))
        if columnwise:
            codes, scale = codes.transpose(0, 1), scale.transpose(0, 1)
    return _Native(codes, scale, True, block)


def _mm_in_order(
    left: Tensor, right: list[Tensor], splits: Tensor, biases: list[Tensor], dtype: torch.dtype, most: int
) -> Tensor:
    weights = right[0].unbind(0) if right[0].dim() == 3 else right
    out, bias = left.new_zeros((left.shape[0], weights[0].shape[0]), dtype=dtype), _stacked(biases)
    multiply = numerics_for(left).batch_invariant.matmul
    parts = reference.batch_invariant.splits_of(left.shape[1], most)
    for group, at, place in _places(out, "fprop", splits, left.shape[0]):
        multiplied = multiply(left[at], weights[group], parts, None, dtype)
        place.copy_(multiplied if bias is None else multiplied.add_(bias[group].to(dtype)))
    return out


grouped_mm_batch_invariant = define(
    "grouped_mm_batch_invariant(Tensor left, Tensor[] right, Tensor splits, Tensor[] biases, ScalarType dtype, "
    "int most) -> Tensor",
    _mm_in_order,
    lambda left, right, splits, biases, dtype, most: left.new_empty(
        (left.shape[0], right[0].shape[-2]), dtype=dtype
    ),
)
"""Multiply the rows (T, K) of every group in high precision as :data:`gemm_batch_invariant` does; it reads the splits
on the host.

Args:
    left: (T, K) in the dtype of the weights.
    right: G of (N, K), or one (G, N, K).
    splits, biases: as :data:`grouped_gemm` takes them.
    dtype: of the result (T, N).
    most: as of ``reference.batch_invariant.splits_of``.
"""


def _grouped_mm(
    kind: str,
    left: Tensor,
    right: list[Tensor],
    splits: Tensor,
    biases: list[Tensor],
    covered: bool,
    dtype: torch.dtype,
) -> Tensor:
    gemm_directions(kind)
    if kind != "wgrad" and dtype != left.dtype:
        raise ValueError(f"dtype is {dtype} in {kind}; give that of left, {left.dtype}")
    if dtype != left.dtype and left.dtype != torch.float32:
        return _product(kind, left, right[0], splits, dtype)
    weights = right[0] if kind == "wgrad" else stack(right)
    bias = _stacked(biases)
    shape = _plain_shape(kind, left, right, splits)
    if not left.is_cuda or 0 in shape or 0 in left.shape:
        return _mm_each(kind, left, weights, splits, bias, shape).to(dtype)
    out = _product(kind, left, weights, splits, left.dtype)
    if kind == "wgrad":
        return out.to(dtype)
    if bias is not None or not covered:
        kernels.grouped_gemm.finish_rows_(out, splits, bias)
    return out


def _product(kind: str, left: Tensor, right: Tensor, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the library's grouped product; rows of no group are undefined.

    Args:
        left, right: as of ``grouped_mm``, the weights one (G, N, K).
        dtype: of the result: that of ``left``, or fp32, which is not rounded.
    """
    if dtype != left.dtype:
        return _unrounded(kind, left, right, splits, dtype)
    ends = splits.cumsum(0, dtype=torch.int32)
    multiple = 16 // left.element_size()
    a, b = _whole_pieces(left, multiple), right
    if kind == "wgrad":
        product = F.grouped_mm(a.t(), _whole_pieces(b, multiple), offs=ends)
        return product[:, : left.shape[1], : right.shape[1]].contiguous()
    # the contraction and the columns of the result in whole 16 bytes
    columns = b.shape[2] if kind == "dgrad" else b.shape[1]
    missing = -b.shape[1] % multiple, -b.shape[2] % multiple
    b = F.pad(b, (0, missing[1], 0, missing[0])) if any(missing) else _aligned(b)
    out = F.grouped_mm(a, b if kind == "dgrad" else b.transpose(-2, -1), offs=ends)
    return out if out.shape[1] == columns else out[:, :columns].contiguous()


def _unrounded(kind: str, left: Tensor, right: Tensor, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product as :func:`_product` does, rounded to ``dtype`` alone; the host reads no splits."""
    multiply = numerics_for(left).grouped_mm
    if kind == "wgrad":
        return multiply.contraction(left.contiguous(), right.contiguous(), splits, dtype)
    return multiply.rows(left.contiguous(), right.mT if kind == "dgrad" else right, splits, dtype)


def _whole_pieces(x: Tensor, multiple: int) -> Tensor:
    """Return rows as the library reads them, in pieces of 16 bytes: padded to a multiple of elements, and aligned."""
    missing = -x.shape[1] % multiple
    return F.pad(x, (0, missing)) if missing else _aligned(x)


def _aligned(x: Tensor) -> Tensor:
    from ..kernels.launch import is_aligned  # here, for Triton may be missing

    x = x.contiguous().view(-1).view(x.shape)  # with the strides of a dense tensor where a size is 1, too
    return x if is_aligned(x, 16) else x.clone()


def _mm_each(
    kind: str, left: Tensor, right: Tensor, splits: Tensor, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    """Return group by group as an ordinary linear layer."""
    out = left.new_zeros(shape)
    for group, at, place in _places(out, kind, splits, left.shape[0]):
        if kind == "wgrad":
            product = left[at].t() @ right[at]
        elif kind == "dgrad":
            product = left[at] @ right[group]
        else:
            product = F.linear(left[at], right[group], None if bias is None else bias[group])
        place.copy_(product)
    return out


def _plain_shape(kind: str, left: Tensor, right: list[Tensor], splits: Tensor) -> tuple[int, ...]:
    first = right[0]
    if kind == "wgrad":
        return splits.shape[0], left.shape[1], first.shape[1]
    return left.shape[0], first.shape[-1 if kind == "dgrad" else -2]


def _grouped_mm_fake(kind: str, left: Tensor, right: list[Tensor], splits: Tensor, *rest: Any) -> Tensor:
    gemm_directions(kind)
    return left.new_empty(_plain_shape(kind, left, right, splits), dtype=rest[-1])


grouped_mm = define(
    "grouped_mm(str kind, Tensor left, Tensor[] right, Tensor splits, Tensor[] biases, bool covered, "
    "ScalarType dtype) -> Tensor",
    _grouped_mm,
    _grouped_mm_fake,
)
"""The GEMMs of :data:`grouped_gemm` in high precision.

Args:
    kind: "fprop", "dgrad" or "wgrad".
    left: (T, K) in fprop, (T, N) otherwise.
    right: the weights, G of (N, K) or one (G, N, K); in wgrad the input (T, K) alone.
    splits, biases: as in :data:`grouped_gemm`. covered: the splits are known to sum to the rows.
    dtype: of the result; in fprop and dgrad that of ``left``. A weight gradient in fp32 is not rounded before.

Returns:
    (T, N), (T, K) or (G, N, K) of ``dtype``.

Raises:
    ValueError: another ``kind``, or a ``dtype`` that it does not give.
"""


def _grouped_dequantize(
    operand: list[Tensor],
    quantizer: QuantizerValue,
    layout: str,
    splits: Tensor | None,
    dtype: torch.dtype,
    shape: list[int],
) -> Tensor:
    groups = shape[0] if splits is None else splits.shape[0]
    direction, operand = Direction(layout, quantizer, False, shape[-1], dtype).opened(
        operand, tuple(shape), groups
    )
    how = direction.quantizer, direction.layout
    if direction.layout != "split":
        if splits is None:
            return dequantized_weights(operand, *how, dtype, shape)
        return dequantized_rows(operand, *how, splits, dtype, shape)
    if splits is None:
        sizes = [shape[1]] * groups
        starts = [shape[1] * group for group in range(groups)]
    else:
        sizes, starts, _ = reference.grouped_quantize.extents(splits, shape[0], 1)
    members = direction.groups_of(operand, sizes)
    if splits is None and members and quantizer._is_ours() and not quantizer._spans_rows():
        whole = [torch.cat(buffers) for buffers in zip(*members)]
        if [(tuple(one.shape), one.dtype) for one in whole] == list(direction.described(sum(sizes)).values()):
            return direction.quantizer._decode(numerics_for(whole[0]), whole, False, dtype).view(shape)
    out = operand[0].new_zeros(shape, dtype=dtype)
    rows = out.view(math.prod(shape[:-1]), shape[-1])
    for start, size, buffers in zip(starts, sizes, members):
        if size and shape[-1]:
            decoded = direction.quantizer._decode(numerics_for(buffers[0]), buffers, False, dtype)
            rows[start : start + size].copy_(decoded[:size, : shape[-1]])
    return out


grouped_dequantize = define(
    f"grouped_dequantize(Tensor[] operand, {QUANTIZER} quantizer, str layout, Tensor? splits, ScalarType dtype, "
    "SymInt[] shape) -> Tensor",
    _grouped_dequantize,
    lambda operand, quantizer, layout, splits, dtype, shape: operand[0].new_empty(shape, dtype=dtype),
)
"""Decode a row-wise operand of groups to (T, K), or without ``splits`` of weights to (G, N, K).

Splits of groups after groups are read on the host; ``dtype`` is the one that was quantized from.
"""
