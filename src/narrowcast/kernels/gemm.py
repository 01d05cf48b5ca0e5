"""FP8 GEMMs that add to their output: ``out += left @ right.T`` in one launch, for weight gradients.

Both operands are K-major: rows of codes whose last dim is the contraction. Programs stay on their multiprocessor and
take tile after tile of the output, tiles of a few tile rows together, so that operands are found in L2.

On Hopper the tensor cores accumulate FP8 in registers of about 14 bits. Unless fast accumulation is asked for, their
partial sums are added to fp32 registers every ``PROMOTION`` of the contraction; with block scales they are scaled there
first.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLOAT8_BLOCK, cdiv
from .codecs import round_pair_to_bfloat16, to_float32
from .launch import INTERPRETING, Launcher, check_device

TILE_M = 128
TILE_N = 128
FAST_TILE_N = 256  # without a second accumulator for the promotion there are registers for twice the columns
TILE_K = 128
GROUP = 8
PROMOTION = 128

INTERPRETED_PROGRAMS = 3
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _tile_origin(tile, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of an output tile; consecutive tiles run down ``GROUP`` tile rows first."""
    tile_rows = tl.cdiv(M, TILE_M)
    per_group = GROUP * tl.cdiv(N, TILE_N)
    first = (tile // per_group) * GROUP
    height = tl.minimum(tile_rows - first, GROUP)
    inside = tile % per_group
    return (first + inside % height) * TILE_M, (inside // height) * TILE_N


@triton.jit
def _row_pointers(pointer, start, rows, K, SIZE: tl.constexpr, TILE_K: tl.constexpr):
    """Pointers to the first ``TILE_K`` elements of ``SIZE`` rows; rows past the end repeat the last one."""
    row = tl.minimum(start + tl.arange(0, SIZE), rows - 1).to(tl.int64)
    return pointer + row[:, None] * K + tl.arange(0, TILE_K)[None, :]


@triton.jit
def _load_codes(pointers, left, EVEN_K: tl.constexpr, TILE_K: tl.constexpr):
    """Codes of one step; what lies past the contraction reads as zero."""
    if EVEN_K:
        return tl.load(pointers)
    return tl.load(pointers, mask=tl.arange(0, TILE_K)[None, :] < left, other=0.0)


@triton.jit
def _add_to(
    out_ptr, product, m0, n0, M, N, stride, TILE_M: tl.constexpr, TILE_N: tl.constexpr, EMULATE: tl.constexpr
):
    """Add a tile of fp32 values to the output, rounding once to its dtype."""
    row = m0 + tl.arange(0, TILE_M)[:, None]
    column = n0 + tl.arange(0, TILE_N)[None, :]
    inside = (row < M) & (column < N)
    target = out_ptr + (row.to(tl.int64) * stride + column)
    total = to_float32(tl.load(target, mask=inside, other=0.0), EMULATE) + product
    if EMULATE and out_ptr.dtype.element_ty == tl.bfloat16:
        # The interpreter's conversion truncates; a value that is a bf16 already survives it.
        total, _ = round_pair_to_bfloat16(total, total, EMULATE)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["left_scale_ptr", "right_scale_ptr"])
def _accumulate_kernel(
    out_ptr,
    left_ptr,
    right_ptr,
    left_scale_ptr,
    right_scale_ptr,
    M,
    N,
    K,
    stride,
    EVEN_K: tl.constexpr,
    PROMOTION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    scale = tl.load(left_scale_ptr) * tl.load(right_scale_ptr)
    tiles = tl.cdiv(M, TILE_M) * tl.cdiv(N, TILE_N)
    steps = tl.cdiv(K, TILE_K)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        m0, n0 = _tile_origin(tile, M, N, TILE_M, TILE_N, GROUP)
        left = _row_pointers(left_ptr, m0, M, K, TILE_M, TILE_K)
        right = _row_pointers(right_ptr, n0, N, K, TILE_N, TILE_K)
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for step in tl.range(0, steps):
            a = _load_codes(left, K - step * TILE_K, EVEN_K, TILE_K)
            b = _load_codes(right, K - step * TILE_K, EVEN_K, TILE_K)
            total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=PROMOTION)
            left += TILE_K
            right += TILE_K
        _add_to(out_ptr, total * scale, m0, n0, M, N, stride, TILE_M, TILE_N, EMULATE)


@triton.jit(do_not_specialize_on_alignment=["left_scale_ptr", "right_scale_ptr"])
def _accumulate_block_kernel(
    out_ptr,
    left_ptr,
    right_ptr,
    left_scale_ptr,
    right_scale_ptr,
    M,
    N,
    K,
    stride,
    left_scale_stride,
    right_scale_stride,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    tiles = tl.cdiv(M, TILE_M) * tl.cdiv(N, TILE_N)
    steps = tl.cdiv(K, TILE_K)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        m0, n0 = _tile_origin(tile, M, N, TILE_M, TILE_N, GROUP)
        left = _row_pointers(left_ptr, m0, M, K, TILE_M, TILE_K)
        right = _row_pointers(right_ptr, n0, N, K, TILE_N, TILE_K)
        left_scale = left_scale_ptr + tl.minimum(m0 + tl.arange(0, TILE_M), M - 1)
        right_scale = right_scale_ptr + tl.minimum(n0 + tl.arange(0, TILE_N), N - 1)
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for step in tl.range(0, steps):
            a = _load_codes(left, K - step * TILE_K, EVEN_K, TILE_K)
            b = _load_codes(right, K - step * TILE_K, EVEN_K, TILE_K)
            scale_a = tl.load(left_scale)
            scale_b = tl.load(right_scale)
            partial = tl.dot(a, tl.trans(b))
            total = tl.fma(partial * scale_a[:, None], scale_b[None, :], total)
            left += TILE_K
            right += TILE_K
            left_scale += left_scale_stride
            right_scale += right_scale_stride
        _add_to(out_ptr, total, m0, n0, M, N, stride, TILE_M, TILE_N, EMULATE)


_accumulate = Launcher(_accumulate_kernel, num_warps=8, num_stages=4)
_accumulate_block = Launcher(_accumulate_block_kernel, num_warps=8, num_stages=4)


def accumulate_(
    out: Tensor,
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    *,
    fast_accumulation: bool,
) -> None:
    """Add the product of two per-tensor scaled FP8 matrices to ``out``.

    Args:
        out: (M, N) fp32 or bf16, rows contiguous; M, N may be less than the operands have rows.
        left: (>= M, K) float8_e4m3fn or float8_e5m2, contiguous.
        left_scale: fp32, one element.
        right: (>= N, K), as ``left``.
        right_scale: fp32, one element.
        fast_accumulation: leave sums in the tensor cores' registers over the whole contraction.

    Raises:
        ValueError: a tensor the kernel cannot reach, another dtype or layout, or sizes that do not fit.

    Numerics:
        ``out = RN(out + RN(sum * RN(left_scale * right_scale)))``, the sum in fp32 in the order of the hardware.
    """
    if not _check(out, left, right):
        return
    (M, N), K = out.shape, left.shape[1]
    columns = FAST_TILE_N if fast_accumulation else TILE_N
    promotion = None if fast_accumulation else PROMOTION
    _accumulate(
        _grid(out, columns),
        (out, left, right, left_scale, right_scale, M, N, K, out.stride(0)),
        (K % TILE_K == 0, promotion, TILE_M, columns, TILE_K, GROUP, INTERPRETING),
    )


def accumulate_block_(
    out: Tensor,
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    *,
    fast_accumulation: bool = False,
) -> None:
    """Add the product of two FP8 matrices with scales per 1 x 128 of the contraction to ``out``.

    Args:
        out: (M, N) fp32 or bf16, rows contiguous; M, N may be less than the operands have rows.
        left: (>= M, K) float8_e4m3fn or float8_e5m2, contiguous.
        left_scale: fp32 (>= M, cdiv(K, 128)), columns contiguous, as the quantizer's buffer transposed.
        right, right_scale: as of ``left``, with N for M.
        fast_accumulation: ignored; every 128 of the contraction are promoted to be scaled.

    Raises:
        ValueError: a tensor the kernel cannot reach, another dtype or layout, or sizes that do not fit.

    Numerics:
        For each 128 of the contraction in turn ``total = fma(RN(sum * left_scale), right_scale, total)``; then
        ``out = RN(out + total)``.
    """
    for name, scale, data in (("left_scale", left_scale, left), ("right_scale", right_scale, right)):
        blocks = cdiv(data.shape[1], FLOAT8_BLOCK)
        if scale.dim() != 2 or scale.stride(0) != 1 or scale.shape[1] < blocks:
            raise ValueError(
                f"{name} has shape {tuple(scale.shape)} and strides {scale.stride()}; give the transposed view of "
                f"a (blocks, rows) buffer with {blocks} blocks"
            )
    if not _check(out, left, right):
        return
    (M, N), K = out.shape, left.shape[1]
    scale_strides = left_scale.stride(1), right_scale.stride(1)
    _accumulate_block(
        _grid(out, TILE_N),
        (out, left, right, left_scale, right_scale, M, N, K, out.stride(0), *scale_strides),
        (K % TILE_K == 0, TILE_M, TILE_N, TILE_K, GROUP, INTERPRETING),
    )


def _check(out: Tensor, left: Tensor, right: Tensor) -> bool:
    """Refuse what the kernels cannot read; whether there is anything to add."""
    check_device(out)
    if out.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out is {out.dtype}; accumulate into torch.float32 or torch.bfloat16")
    if out.dim() != 2 or out.stride(1) != 1:
        raise ValueError(
            f"out has shape {tuple(out.shape)} and strides {out.stride()}; give a matrix with contiguous rows"
        )
    for name, data, rows in (("left", left, out.shape[0]), ("right", right, out.shape[1])):
        if data.dtype not in _FP8:
            raise ValueError(f"{name} is {data.dtype}; give torch.float8_e4m3fn or torch.float8_e5m2")
        if data.dim() != 2 or not data.is_contiguous() or data.shape[0] < rows:
            raise ValueError(
                f"{name} has shape {tuple(data.shape)} and strides {data.stride()}; give a contiguous matrix of "
                f"at least {rows} rows"
            )
    if left.shape[1] != right.shape[1]:
        raise ValueError(
            f"left and right contract over {left.shape[1]} and {right.shape[1]} elements; pad the shorter one"
        )
    return out.numel() > 0 and left.shape[1] > 0


def _grid(out: Tensor, columns: int) -> tuple[int, int, int]:
    tiles = cdiv(out.shape[0], TILE_M) * cdiv(out.shape[1], columns)
    return (min(tiles, _programs(out.device)), 1, 1)


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS  # few, so that a program takes several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count
