"""Norms row by row: sums over rows and the elementwise step as device functions, and the kernels that do both.

A warp takes a row at a time: 256 lanes, eight of a row's elements per thread, are 16-byte loads of bf16 and the lanes
of ``reference.reduction.row_sum``, so a lane's sum stays in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codecs import magnitude, product, reciprocal, round_to_dtype, to_float32, to_float32_for
from .reduction import fold_lanes


@triton.jit
def normalize(x, mean, rstd, gamma, beta, LAYER_NORM: tl.constexpr, BIAS: tl.constexpr):
    """Return ``((x - mean) * rstd) * gamma + beta`` of fp32 tensors that broadcast; RMSNorm reads no mean."""
    if LAYER_NORM:
        x = x - mean
    y = product(x * rstd, gamma)
    if BIAS:
        y = y + beta
    return y


@triton.jit
def _load_vector(pointer, column, K):
    """Return entries of a weight or bias; with ``column`` of a tile's whole shape they arrive in the tile's layout."""
    return to_float32(tl.load(pointer + column, mask=column < K, other=0.0))


@triton.jit
def load_gamma(weight_ptr, column, K, ZERO_CENTERED: tl.constexpr):
    gamma = _load_vector(weight_ptr, column, K)
    if ZERO_CENTERED:
        gamma = gamma + 1.0
    return gamma


@triton.jit
def _load_affine(weight_ptr, bias_ptr, column, K, ZERO_CENTERED: tl.constexpr, BIAS: tl.constexpr):
    """Return entries of gamma and beta; without a bias the second are not read."""
    gamma = load_gamma(weight_ptr, column, K, ZERO_CENTERED)
    beta = gamma
    if BIAS:
        beta = _load_vector(bias_ptr, column, K)
    return gamma, beta


@triton.jit
def _load_chunks(
    x_ptr,
    residual_ptr,
    base,
    column,
    here,
    K,
    RESIDUAL: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return consecutive chunks of the rows at ``base``, summed with the residual, in their dtype."""
    ONCE: tl.constexpr = "evict_first" if RESIDUAL else ""  # later passes read the sum
    chunks = ()
    for j in tl.static_range(UNROLL):
        offsets = column + j * column.shape[1]
        inside = here & (offsets < K)
        x = tl.load(x_ptr + base + offsets, mask=inside, other=0.0, eviction_policy=ONCE)
        if RESIDUAL:
            residual = tl.load(residual_ptr + base + offsets, mask=inside, other=0.0, eviction_policy=ONCE)
            x = round_to_dtype(to_float32(x) + to_float32(residual), x.dtype)
        chunks = chunks + (x,)
    return chunks


@triton.jit
def row_mean(lanes, K):
    total = fold_lanes(lanes)
    return tl.div_rn(total, tl.full(total.shape, K, tl.float32))


@triton.jit
def _row_statistics(
    x_ptr,
    residual_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    first,
    here,
    lane,
    M,
    K,
    eps,
    LAYER_NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return mean and reciprocal deviation of the rows from ``first`` on; stored, like their sums with the residual."""
    row = first + tl.arange(0, lane.shape[0])
    base = row[:, None] * K
    lanes = tl.zeros(lane.shape, tl.float32)
    k = 0
    while k < K:
        chunks = _load_chunks(x_ptr, residual_ptr, base, k + lane, here, K, RESIDUAL, UNROLL)
        for j in tl.static_range(UNROLL):
            if RESIDUAL:
                column = k + j * lane.shape[1] + lane
                tl.store(summed_ptr + base + column, chunks[j], mask=here & (column < K))
            value = to_float32(chunks[j])
            if LAYER_NORM:
                lanes += value
            else:
                lanes += product(value, value)
        k += UNROLL * lane.shape[1]
    mean = row_mean(lanes, K)
    variance = mean
    if RESIDUAL:
        tl.debug_barrier()  # from here on the sums are read, by whichever thread
    if LAYER_NORM:
        tl.store(mean_ptr + row, round_to_dtype(mean, tl.float32), mask=row < M)
        lanes = tl.zeros(lane.shape, tl.float32)
        k = 0
        while k < K:
            chunks = _load_chunks(summed_ptr, summed_ptr, base, k + lane, here, K, False, UNROLL)
            for j in tl.static_range(UNROLL):
                inside = here & (k + j * lane.shape[1] + lane < K)
                d = tl.where(inside, to_float32(chunks[j]) - mean[:, None], 0.0)
                lanes += product(d, d)
            k += UNROLL * lane.shape[1]
        variance = row_mean(lanes, K)
    rstd = reciprocal(tl.sqrt_rn(variance + tl.cast(eps, tl.float32)))
    tl.store(rstd_ptr + row, round_to_dtype(rstd, tl.float32), mask=row < M)
    return mean, rstd


@triton.jit(do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr"])
def norm_kept_kernel(
    x_ptr,
    residual_ptr,
    summed_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    y_ptr,
    K,
    eps,
    LAYER_NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    # One row, read once. It is widened again for each use, so that as many warps as can hold it fit.
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    base = row[:, None] * K
    lane = tl.arange(0, LANES)[None, :]
    chunks = _load_chunks(x_ptr, residual_ptr, base, lane, lane < LANES, K, RESIDUAL, CHUNKS)
    lanes = tl.zeros([1, LANES], tl.float32)
    for j in tl.static_range(CHUNKS):
        if RESIDUAL:
            tl.store(summed_ptr + base + j * LANES + lane, chunks[j], mask=j * LANES + lane < K)
        value = to_float32_for(chunks[j], "sum")
        if LAYER_NORM:
            lanes += value
        else:
            lanes += product(value, value)
    mean = row_mean(lanes, K)
    variance = mean
    if LAYER_NORM:
        tl.store(mean_ptr + row, round_to_dtype(mean, tl.float32))
        lanes = tl.zeros([1, LANES], tl.float32)
        for j in tl.static_range(CHUNKS):
            d = to_float32_for(chunks[j], "deviation") - mean[:, None]
            d = tl.where(j * LANES + lane < K, d, 0.0)
            lanes += product(d, d)
        variance = row_mean(lanes, K)
    rstd = reciprocal(tl.sqrt_rn(variance + tl.cast(eps, tl.float32)))
    tl.store(rstd_ptr + row, round_to_dtype(rstd, tl.float32))
    if WRITE:
        for j in tl.static_range(CHUNKS):
            column = j * LANES + lane
            gamma, beta = _load_affine(weight_ptr, bias_ptr, column, K, ZERO_CENTERED, BIAS)
            value = to_float32_for(chunks[j], "result")
            y = normalize(value, mean[:, None], rstd[:, None], gamma, beta, LAYER_NORM, BIAS)
            tl.store(y_ptr + base + column, round_to_dtype(y, chunks[j].dtype), mask=column < K)


@triton.jit(do_not_specialize_on_alignment=["bias_ptr", "mean_ptr", "rstd_ptr", "partials_ptr"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    summed_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    y_ptr,
    partials_ptr,
    M,
    K,
    eps,
    LAYER_NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    WRITE: tl.constexpr,
    AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.broadcast_to(tl.arange(0, LANES)[None, :], [ROWS, LANES])
    largest = tl.zeros([ROWS, LANES], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    while first < M:
        here = row < tl.minimum(M - first, ROWS).to(tl.int32)
        mean, rstd = _row_statistics(
            x_ptr, residual_ptr, summed_ptr, mean_ptr, rstd_ptr, first, here, lane, M, K, eps, LAYER_NORM, RESIDUAL,
            UNROLL,
        )  # fmt: skip
        if WRITE or AMAX:
            base = (first + row) * K
            k = 0
            while k < K:
                chunks = _load_chunks(summed_ptr, summed_ptr, base, k + lane, here, K, False, UNROLL)
                for j in tl.static_range(UNROLL):
                    column = k + j * LANES + lane
                    inside = here & (column < K)
                    gamma, beta = _load_affine(weight_ptr, bias_ptr, column, K, ZERO_CENTERED, BIAS)
                    value = to_float32(chunks[j])
                    y = normalize(value, mean[:, None], rstd[:, None], gamma, beta, LAYER_NORM, BIAS)
                    y = round_to_dtype(y, chunks[j].dtype)
                    if WRITE:
                        tl.store(y_ptr + base + column, y, mask=inside)
                    if AMAX:
                        largest = tl.maximum(largest, tl.where(inside, magnitude(y), 0.0))
                k += UNROLL * LANES
        first += tl.num_programs(0).to(tl.int64) * ROWS
    if AMAX:
        tl.store(partials_ptr + tl.program_id(0), tl.max(largest))
