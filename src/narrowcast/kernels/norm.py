"""LayerNorm and RMSNorm: their launches, and the kernels of their gradients.

    forward   xhat = (x - mean) rstd,  y = xhat gamma + beta          (``norm_rows.py``)
    backward  dx = (g gamma - xhat c1 - c2) rstd                      c1 = mean(xhat g gamma), c2 = mean(g gamma)
              dgamma = sum over rows of g xhat,  dbeta = sum over rows of g

The mean, and with it c2, is missing from RMSNorm. The backward is two passes: the first reduces each row to c1 and
c2, and adds up the gradients of gamma and beta for the rows of a tile, which ``reduction.py`` folds in a fixed order;
the second computes dx by element. So the second may also be the source of a quantization (``fused_producers.py``): dx
then never goes to memory in high precision. Sums are taken in an order that depends on shapes alone, so that the
reference has it, too.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._checks import not_among
from .._device import HIGH_PRECISION
from ..formats import cdiv
from .codecs import magnitude, product, round_to_dtype, to_float32
from .graph_amax import keep_amax, takes_amax
from .launch import TENSOR, Launch, Launcher, beside, check_device, contiguous, remembered
from .norm_rows import load_gamma, norm_kept_kernel, norm_kernel, row_mean
from .reduction import column_sum, fold_rows

LANES = 256
ROWS = 4
TILE_ROWS = 8
GRADIENT_ROWS = 8  # rows of a warp that sums the gradient of gamma
UNROLL = 4  # chunks of a row that are requested at once
KEPT_CHUNKS = range(9, 17)  # chunks of a row that a warp keeps in registers: fewer or more were not measured
PROGRAMS = 1024  # at most; a cast program reads the amax partials of all at once
REREAD_BYTES = 32 * 2**20  # rows in work that are read again should still be in L2
NORMALIZATIONS = ("LayerNorm", "RMSNorm")


@triton.jit
def norm_gradient(g, x, mean, rstd, gamma, c1, c2, LAYER_NORM: tl.constexpr):
    """Return gradient with respect to ``x`` from that of the result, in fp32 tensors that broadcast."""
    if LAYER_NORM:
        projection = product((x - mean) * rstd, c1) + c2
    else:
        projection = product(x * rstd, c1)
    return product(product(g, gamma) - projection, rstd)


@triton.jit
def _tile_position(K, TILE_ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return row indices [TILE_ROWS], 64 bits, and column indices [TILE_ROWS, LANES] of this program."""
    column_tiles = tl.cdiv(K, LANES)
    tile = tl.program_id(0) // column_tiles
    row = tile.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = (tl.program_id(0) - tile * column_tiles) * LANES + tl.arange(0, LANES)
    return row, tl.broadcast_to(column[None, :], [TILE_ROWS, LANES])


@triton.jit
def _load_rows(pointer, row, M):
    """Return one value per row, as a column."""
    return tl.load(pointer + row, mask=row < M, other=0.0)[:, None]


@triton.jit(do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr", "c1_ptr", "c2_ptr", "partials_ptr"])
def _norm_backward_kernel(
    x_ptr,
    grad_ptr,
    residual_grad_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    c1_ptr,
    c2_ptr,
    dx_ptr,
    partials_ptr,
    M,
    K,
    LAYER_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AMAX: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    row, column = _tile_position(K, TILE_ROWS, LANES)
    inside = (row < M)[:, None] & (column < K)
    offsets = row[:, None] * K + column
    x = to_float32(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    g = to_float32(tl.load(grad_ptr + offsets, mask=inside, other=0.0))
    gamma = load_gamma(weight_ptr, column, K, ZERO_CENTERED)
    rstd = _load_rows(rstd_ptr, row, M)
    c1 = _load_rows(c1_ptr, row, M)
    mean = rstd
    c2 = c1
    if LAYER_NORM:
        mean = _load_rows(mean_ptr, row, M)
        c2 = _load_rows(c2_ptr, row, M)
    dx = norm_gradient(g, x, mean, rstd, gamma, c1, c2, LAYER_NORM)
    if RESIDUAL:
        dx = dx + to_float32(tl.load(residual_grad_ptr + offsets, mask=inside, other=0.0))
    dx = round_to_dtype(dx, dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + offsets, dx, mask=inside)
    if AMAX:
        largest = tl.max(tl.where(inside, magnitude(dx), 0.0))
        tl.store(partials_ptr + tl.program_id(0), tl.maximum(largest, 0.0))  # tl.max of only NaN is NaN


@triton.jit
def _gradient_terms(x, g, mean, rstd, gamma, inside, LAYER_NORM: tl.constexpr):
    """Return ``grad``, ``grad * xhat``, ``xhat * wdy`` and ``wdy``, zero outside the matrix."""
    xhat = to_float32(x)
    if LAYER_NORM:
        xhat = xhat - mean
    xhat = xhat * rstd
    g = to_float32(g)
    wdy = product(g, gamma)
    weighted, projected = product(g, xhat), product(xhat, wdy)
    return g, tl.where(inside, weighted, 0.0), tl.where(inside, projected, 0.0), wdy


@triton.jit
def _load_statistics(mean_ptr, rstd_ptr, row, M, LAYER_NORM: tl.constexpr):
    rstd = _load_rows(rstd_ptr, row, M)
    if LAYER_NORM:
        return _load_rows(mean_ptr, row, M), rstd
    return rstd, rstd


@triton.jit
def _store_row_mean(pointer, lanes, row, M, K):
    tl.store(pointer + row, round_to_dtype(row_mean(lanes, K), tl.float32), mask=row < M)


@triton.jit(do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr", "c1_ptr", "c2_ptr"])
def _norm_gradient_statistics_kernel(
    x_ptr,
    grad_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    c1_ptr,
    c2_ptr,
    dweight_ptr,
    dbias_ptr,
    M,
    K,
    LAYER_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, M, LAYER_NORM)
    c1 = tl.zeros([ROWS, LANES], tl.float32)
    c2 = c1
    k = 0
    while k < K:
        column = k + lane
        offsets = row[:, None] * K + column[None, :]
        inside = (row < M)[:, None] & (column < K)[None, :]
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        g = tl.load(grad_ptr + offsets, mask=inside, other=0.0)
        gamma = load_gamma(weight_ptr, column, K, ZERO_CENTERED)[None, :]
        g, weighted, projected, wdy = _gradient_terms(x, g, mean, rstd, gamma, inside, LAYER_NORM)
        c1 += projected
        # a thread has all rows of its columns: these sums stay in registers
        tl.store(dweight_ptr + tile * K + column, fold_rows(weighted), mask=column < K)
        if LAYER_NORM:
            c2 += wdy
            tl.store(dbias_ptr + tile * K + column, fold_rows(g), mask=column < K)
        k += LANES
    _store_row_mean(c1_ptr, c1, row, M, K)
    if LAYER_NORM:
        _store_row_mean(c2_ptr, c2, row, M, K)


_norm = Launcher(norm_kernel, num_warps=4)
_kept = Launcher(norm_kept_kernel, num_warps=1)
_backward = Launcher(_norm_backward_kernel, num_warps=4)
_gradient_statistics = Launcher(_norm_gradient_statistics_kernel, num_warps=1)


# A tensor as a launch depends on it; None for one that is not there.
_Kind = tuple[tuple[int, ...], torch.dtype] | None


def _kind(x: Tensor | None) -> _Kind:
    return None if x is None else (x.shape, x.dtype)


def _sizes(x: _Kind) -> tuple[int, int]:
    """Return rows and columns of the matrix behind ``x``; refuses what the kernels cannot read."""
    shape, dtype = x  # type: ignore[misc]
    if dtype not in HIGH_PRECISION:
        raise TypeError(
            f"norms take {' or '.join(map(str, HIGH_PRECISION))}, got {dtype}; cast the input first"
        )
    if not shape:
        raise ValueError("norms need a last dim, got a tensor of rank 0")
    return math.prod(shape[:-1]), shape[-1]


def _check(
    expected: tuple[int, ...], *, dtypes: tuple[torch.dtype, ...] = HIGH_PRECISION, **tensors: _Kind
) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        shape, dtype = tensor
        if shape != expected:
            raise ValueError(f"{name} has shape {tuple(shape)}, expected {tuple(expected)}")
        if dtype not in dtypes:
            raise ValueError(f"{name} is {dtype}, expected {' or '.join(map(str, dtypes))}")


@remembered
def _statistics_launch(
    x: _Kind,
    residual: _Kind,
    weight: _Kind,
    bias: _Kind,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
    amax_partials: bool,
    writes: bool,
) -> tuple[Launch | None, int, int, bool]:
    """Return the launch, how many rows there are, how many partials it takes, and whether it writes them.

    None if there are no rows. Raises as :func:`statistics`.
    """
    M, K = _sizes(x)
    shape, dtype = x  # type: ignore[misc]
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"unknown normalization {not_among(normalization, NORMALIZATIONS)}")
    _check(shape, dtypes=(dtype,), residual=residual)
    _check((K,), **{"the norm's weight": weight, "the norm's bias": bias})
    if weight is None and (amax_partials or writes):
        raise ValueError("amax_partials needs the weight, got None; pass the norm's weight and bias")
    layer_norm, rereads = normalization == "LayerNorm", amax_partials or writes
    programs = min(cdiv(M, ROWS), PROGRAMS)
    if layer_norm or rereads:
        in_work = ROWS * K * dtype.itemsize
        programs = min(programs, max(REREAD_BYTES // max(in_work, 1), PROGRAMS // 4))
    if not programs:
        return None, M, 0, False
    options = (layer_norm, residual is not None, zero_centered_gamma, bias is not None, writes)
    chunks = cdiv(K, LANES)
    if chunks in KEPT_CHUNKS and dtype.itemsize == 2 and (layer_norm or rereads) and not amax_partials:
        arguments, constants = [*[TENSOR] * 8, K, float(eps)], (*options, LANES, chunks)
        return Launch(_kept, (M, 1, 1), arguments, constants), M, programs, False
    unroll = 2 * UNROLL if rereads else UNROLL
    launch = Launch(
        _norm,
        (programs, 1, 1),
        [*[TENSOR] * 9, M, K, float(eps)],
        (*options, amax_partials, ROWS, LANES, unroll),
    )
    return launch, M, programs, True


def statistics(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    normalization: str,
    residual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    amax_partials: bool = False,
    into: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute ``reference.norm.statistics``, and if asked the result of ``normalized`` or its largest magnitudes.

    Args:
        weight, bias, zero_centered_gamma: of the norm, used for ``amax_partials`` and ``into``.
        amax_partials: also return maxima over parts of the magnitudes of ``normalized``'s result, NaN ignored.
        into: where to write ``normalized``'s result, contiguous, of shape and dtype of ``x``.

    Returns:
        with ``amax_partials`` also fp32 (programs,), one value at least and 1024 at most; the largest is the amax.

    Raises:
        ValueError: also a tensor the kernels cannot reach, or ``amax_partials`` without a weight.
    """
    check_device(x)
    launch, M, programs, takes_partials = _statistics_launch(
        x, _kind(x), _kind(residual), _kind(weight), _kind(bias), eps, normalization, zero_centered_gamma,
        amax_partials, into is not None,
    )  # fmt: skip
    x = x.contiguous()
    new = beside(x)
    summed = None if residual is None else torch.empty_like(x)
    mean = new((M,), (1,), torch.float32) if normalization == "LayerNorm" else None
    rstd = partials = new((M,), (1,), torch.float32)
    if amax_partials:
        # The kernel writes no partial where no program runs.
        partials = new((programs,), (1,), torch.float32) if launch is not None else rstd.new_zeros(1)
    if launch is not None:
        # An absent tensor passes another one: the constants keep the kernel from touching it.
        scale = x if weight is None else weight.contiguous()
        tensors = [
            x,
            x if residual is None else residual.contiguous(),
            x if summed is None else summed,  # read again
            scale,
            scale if bias is None else bias.contiguous(),
            rstd if mean is None else mean,
            rstd,
            x if into is None else into,
        ]
        launch([*tensors, partials] if takes_partials else tensors)
    return (summed, mean, rstd, partials) if amax_partials else (summed, mean, rstd)


def normalized(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Compute ``reference.norm.normalized``."""
    x = x.contiguous()
    y = torch.empty_like(x)
    summed, mean, rstd = statistics(
        x, weight, bias, eps=eps, normalization=normalization, residual=residual,
        zero_centered_gamma=zero_centered_gamma, into=y,
    )  # fmt: skip
    return y, summed, mean, rstd  # type: ignore[return-value]


@remembered
def _gradient_launch(
    grad: _Kind, x: _Kind, weight: _Kind, mean: _Kind, rstd: _Kind, zero_centered_gamma: bool
) -> tuple[Launch | None, int, int, int]:
    """Return the launch, the rows, the columns, and the tiles of rows; None without rows. Raises as
    :func:`gradient_statistics`.
    """
    M, K = _sizes(x)
    _check(x[0], grad=grad)  # type: ignore[index]
    _check((K,), weight=weight)
    _check((M,), dtypes=(torch.float32,), mean=mean, rstd=rstd)
    tiles = cdiv(M, GRADIENT_ROWS)
    if not tiles:
        return None, M, K, 0
    constants = (mean is not None, zero_centered_gamma, GRADIENT_ROWS, LANES)
    launch = Launch(_gradient_statistics, (tiles, 1, 1), [*[TENSOR] * 9, M, K], constants)
    return launch, M, K, tiles


def gradient_statistics(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Compute ``reference.norm.gradient_statistics``, from one read of ``grad`` and ``x``.

    Raises:
        ValueError: also a tensor the kernels cannot reach.
    """
    check_device(x)
    launch, M, K, tiles = _gradient_launch(
        x, _kind(grad), _kind(x), _kind(weight), _kind(mean), _kind(rstd), zero_centered_gamma
    )
    x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
    new = beside(x)
    c1, dweight = new((M,), (1,), torch.float32), new((tiles, K), (K or 1, 1), torch.float32)
    c2 = dbias = None
    if mean is not None:
        c2, dbias = new((M,), (1,), torch.float32), new((tiles, K), (K or 1, 1), torch.float32)
    if launch is not None:
        rows = (rstd if mean is None else mean, rstd, c1, c1 if c2 is None else c2)
        launch([x, grad, weight, *rows, dweight, dweight if dbias is None else dbias])
    return c1, c2, column_sum(dweight, dtype), None if dbias is None else column_sum(dbias, dtype)


@remembered
def _backward_launch(
    grad: _Kind,
    x: _Kind,
    weight: _Kind,
    mean: _Kind,
    rstd: _Kind,
    c1: _Kind,
    c2: _Kind,
    residual_grad: _Kind,
    zero_centered_gamma: bool,
    amax: bool,
) -> tuple[Launch | None, int, tuple[tuple[int, ...], ...]]:
    """Return the launch, how many programs it has, and the shape and strides of the result; None without elements.

    Raises as :func:`backward`.
    """
    M, K = _sizes(x)
    shape, _ = x  # type: ignore[misc]
    _check(shape, grad=grad, residual_grad=residual_grad)
    _check((K,), weight=weight)
    _check((M,), dtypes=(torch.float32,), mean=mean, rstd=rstd, c1=c1, c2=c2)
    programs, layout = cdiv(M, TILE_ROWS) * cdiv(K, LANES), contiguous(shape)
    if not programs:
        return None, 0, layout
    options = (mean is not None, zero_centered_gamma, residual_grad is not None, amax)
    constants = (*options, TILE_ROWS, LANES)
    return Launch(_backward, (programs, 1, 1), [*[TENSOR] * 10, M, K], constants), programs, layout


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    c1: Tensor,
    c2: Tensor | None,
    *,
    zero_centered_gamma: bool,
    residual_grad: Tensor | None = None,
) -> Tensor:
    """Compute ``reference.norm.backward``.

    Raises:
        ValueError: also a tensor the kernels cannot reach.
    """
    check_device(x)
    amax = takes_amax(x)
    launch, programs, layout = _backward_launch(
        x, _kind(grad), _kind(x), _kind(weight), _kind(mean), _kind(rstd), _kind(c1), _kind(c2), _kind(residual_grad),
        zero_centered_gamma, amax,
    )  # fmt: skip
    x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
    new = beside(x)
    dx = new(*layout, x.dtype)
    if launch is not None:
        other = x if residual_grad is None else residual_grad.contiguous()
        rows = (rstd if mean is None else mean, rstd, c1, c1 if c2 is None else c2)
        partials = new((programs,), (1,), torch.float32) if amax else dx
        launch([x, grad, other, weight, *rows, dx, partials])
        if amax:
            keep_amax(dx, partials)
    return dx
