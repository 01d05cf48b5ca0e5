"""Per-tensor FP8: cast with a given or a current scale, with the transpose from the same read; byte transpose.

A cast is limited by memory: two or four bytes per element in, one out, and one more for the transpose. A current
scale needs max|x| before the first code, which is a second read: ``_float8_amax_kernel`` writes one partial maximum per
program, and every program of the cast folds all of them itself, so that no third launch has to. Tensors of up to
``SMALL`` elements skip that launch, too: each program reads the whole tensor, which is in L2.

Two kernels cast. ``_float8_cast_kernel`` takes a flat run of elements if only the codes are requested.
``_float8_cast_tile_kernel`` takes tiles if rows and columns matter: for the transpose, sums over rows, and sources that
compute their element (``fused_producers.py``). A tile is held as four tensors, of every fourth row each. So four codes
of a column are one 32-bit word of the transpose (``tiles.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLOAT8_FORMATS, FLT_MAX, ElementFormat, cdiv
from .adam import parameter_of
from .codecs import (
    fp8_code,
    fp8_codes,
    magnitude,
    magnitude_of_four,
    magnitudes_of_tile,
    pack_codes,
    scaled_float32,
)
from .first_scale import ROWS_AT_ONCE, end_part, own_scales, raise_own_amax, rule_of, take_part, words_of
from .fused_producers import Source, convert, load_four_rows, pairs_tiles, source_of, store_column_sums
from .graph_amax import amax_parts_in_graph
from .launch import (
    TENSOR,
    Launch,
    Launcher,
    beside,
    check_device,
    check_input,
    contiguous,
    is_traced,
    remembered,
)
from .scaling import scale_from_amax
from .tiles import is_wide, load_tile, store_tile, store_transposed, tile_grid, tile_position

TILE_ROWS = 64
TILE_COLUMNS = 128
PAIRED_COLUMNS = 64  # columns of each half, for the gradient of a gated activation
FLAT_BLOCK = 8192
AMAX_BLOCK = 8192
_AMAX_BLOCK = tl.constexpr(AMAX_BLOCK)
AMAX_PROGRAMS = 1024  # at most; a cast program reads all their partial results at once
SMALL = 1 << 16
"""Elements up to which every program of a cast finds the amax of the whole tensor itself, and the host launches one
kernel instead of two. They are read out of L2: at most 4 us more of an H200, less than a launch costs the host."""


@triton.jit
def largest_magnitude(x_ptr, start, step, n, BLOCK: tl.constexpr):
    """Return max|x| of every ``step / BLOCK``-th block of a contiguous tensor, from ``start`` on; NaN ignored."""
    QUARTER: tl.constexpr = BLOCK // 4
    index = tl.arange(0, QUARTER)
    largest = tl.zeros([QUARTER], tl.float32)
    while start < n:
        left = tl.minimum(n - start, BLOCK).to(tl.int32)
        tile = x_ptr + start
        quarters = ()
        for j in tl.static_range(4):
            inside = index + j * QUARTER < left
            quarters = quarters + (tl.load(tile + j * QUARTER + index, mask=inside, other=0.0),)
        largest = tl.maximum(largest, magnitude_of_four(*quarters))
        start += step
    return tl.max(largest, axis=0)


@triton.jit
def _tensor_scale(
    scale_ptr,
    partials,
    x_ptr,
    n,
    epsilon,
    CURRENT: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Return the encoding scale: given, from the amax pass's partial maxima, or (0) from the full tensor."""
    if CURRENT:
        if PARTIALS == 0:
            start = tl.full([], 0, tl.int32)
            largest = largest_magnitude(x_ptr, start, _AMAX_BLOCK, n, _AMAX_BLOCK)
        else:
            index = tl.arange(0, PARTIALS)
            parts = tl.load(scale_ptr + index, mask=index < partials, other=0.0).to(tl.float32)
            largest = tl.max(parts, axis=0)
        return scale_from_amax(largest, epsilon, FP8_MAX, OVERFLOW, POWER_2)
    else:
        return tl.load(scale_ptr)


@triton.jit
def _accumulate_amax(amax_ptr, previous, value):
    """Raise the amax to ``value``; non-negative floats order like their bits, so an integer maximum serves."""
    value = tl.maximum(value, 0.0)  # a maximum over nothing but NaN is NaN
    tl.atomic_max(
        amax_ptr.to(tl.pointer_type(tl.int32)),
        value.to(tl.int32, bitcast=True),
        mask=value > previous,
        sem="relaxed",  # nothing is published by it; a release would wait for this program's stores
    )


@triton.jit
def _emit_tile(
    xs,
    scale,
    data_ptr,
    transpose_ptr,
    sums_ptr,
    m0,
    k0,
    M,
    K,
    rows_left,
    columns_left,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SUMS: tl.constexpr,
    CURRENT: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Encode four interleaved rows and store their codes, the codes' transpose and the sums over the tile's rows."""
    row = tl.arange(0, xs[0].shape[0])[:, None] * 4
    column = tl.arange(0, xs[0].shape[1])[None, :]
    if SUMS:
        parts = sums_ptr + (m0 // 16 * K + k0)
        store_column_sums(parts, xs, K, rows_left, columns_left)
    codes = fp8_codes(xs, scale, E5M2, CURRENT)
    if ROWWISE:
        offsets = row * K + column
        data = data_ptr + (m0 * K + k0)
        store_tile(data, offsets, codes, row, column, K, rows_left, columns_left, EVEN)
    if COLUMNWISE:
        words = pack_codes(*codes)
        store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)


@triton.jit
def _own_scale(
    scale, unseen, words_ptr, operands, M, K, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SOURCE: tl.constexpr, FUNCTION: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    PAIRED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the scale of the amax of all tiles, instead of 0."""
    columns = tl.cdiv(width, TILE_COLUMNS)
    parts = (tl.cdiv(M, TILE_ROWS) * columns).to(tl.int32)
    part = take_part(words_ptr, 1)
    while part < parts:
        m = (part // columns).to(tl.int64) * TILE_ROWS
        k = (part % columns).to(tl.int64) * TILE_COLUMNS
        largest = tl.zeros([ROWS_AT_ONCE // 4, TILE_COLUMNS], tl.float32)
        left = tl.minimum(width - k, TILE_COLUMNS).to(tl.int32)
        for row in range(0, tl.minimum(M - m, TILE_ROWS).to(tl.int32), ROWS_AT_ONCE):
            below = tl.minimum(M - m - row, ROWS_AT_ONCE).to(tl.int32)
            xs, ys = load_four_rows(
                operands, m + row, k, K, below, left, ROWS_AT_ONCE, TILE_COLUMNS, SOURCE, FUNCTION, P0, P1, P2, PAIRED,
                EVEN,
            )  # fmt: skip
            largest = tl.maximum(largest, magnitudes_of_tile(xs, ys, PAIRED))
        raise_own_amax(words_ptr, tl.max(largest))
        end_part(words_ptr, 1)
        part = take_part(words_ptr, 1)
    return own_scales(scale, unseen, words_ptr, 1, parts, 0, None)


@triton.jit(
    do_not_specialize=["band_bits", "partials"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr", "scale_inv_ptr", "words_ptr"],
)
def _float8_cast_tile_kernel(
    operand_0, operand_1, operand_2, operand_3, operand_4, operand_5, operand_6, operand_7, scale_ptr, data_ptr,
    transpose_ptr, scale_inv_ptr, amax_ptr, words_ptr, sums_ptr, M, K, band_bits, partials, epsilon, unseen,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr, SUMS: tl.constexpr, CURRENT: tl.constexpr,
    FP8_MAX: tl.constexpr, OVERFLOW: tl.constexpr, POWER_2: tl.constexpr, PARTIALS: tl.constexpr, FIRST: tl.constexpr,
    SOURCE: tl.constexpr, FUNCTION: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    PAIRED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # FIRST: the scale of a tensor of which nothing was seen, for a scale of 0 (``first_scale.py``): its "own", or
    # "given" as ``unseen``; "": a scale of 0 is one.
    operands = (operand_0, operand_1, operand_2, operand_3, operand_4, operand_5, operand_6, operand_7)
    # The pass before, over all rows, ends at the last ones, so what L2 still holds is there: start there.
    REVERSE: tl.constexpr = CURRENT or SOURCE == "norm" or SOURCE == "norm_backward"
    tile_m, tile_k = tile_position(band_bits, REVERSE)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    width = K // 2 if PAIRED else K
    rows_left = tl.minimum(M - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(width - k0, TILE_COLUMNS).to(tl.int32)

    # The tile first: its latency covers that of what gives the scale. A tile that is computed takes registers, which a
    # scale that may be unknown needs before it.
    EARLY: tl.constexpr = FIRST != "own" or SOURCE == "tensor"
    if EARLY:
        xs, ys = load_four_rows(
            operands, m0, k0, K, rows_left, columns_left, TILE_ROWS, TILE_COLUMNS, SOURCE, FUNCTION, P0, P1, P2,
            PAIRED, EVEN,
        )  # fmt: skip
        if AMAX:
            previous = tl.load(amax_ptr)
    scale = _tensor_scale(
        scale_ptr, partials, operand_0, M * K, epsilon, CURRENT, FP8_MAX, OVERFLOW, POWER_2, PARTIALS
    )  # fmt: skip
    if FIRST == "given":
        scale = tl.where(scale == 0.0, tl.cast(unseen, tl.float32), scale)
    if FIRST == "own":
        if scale == 0.0:
            scale = _own_scale(
                scale, unseen, words_ptr, operands, M, K, width, TILE_ROWS, TILE_COLUMNS, SOURCE, FUNCTION, P0, P1, P2,
                PAIRED, EVEN,
            )  # fmt: skip
            if EARLY:  # once more, so that its registers are free until here
                xs, ys = load_four_rows(
                    operands, m0, k0, K, rows_left, columns_left, TILE_ROWS, TILE_COLUMNS, SOURCE, FUNCTION, P0, P1,
                    P2, PAIRED, EVEN,
                )  # fmt: skip
    if not EARLY:
        xs, ys = load_four_rows(
            operands, m0, k0, K, rows_left, columns_left, TILE_ROWS, TILE_COLUMNS, SOURCE, FUNCTION, P0, P1, P2,
            PAIRED, EVEN,
        )  # fmt: skip
        if AMAX:
            previous = tl.load(amax_ptr)
    if AMAX:
        _accumulate_amax(amax_ptr, previous, tl.max(magnitudes_of_tile(xs, ys, PAIRED)))
    _emit_tile(
        xs, scale, data_ptr, transpose_ptr, sums_ptr, m0, k0, M, K, rows_left, columns_left, E5M2, ROWWISE,
        COLUMNWISE, SUMS, CURRENT, EVEN, WORDS,
    )  # fmt: skip
    if PAIRED:
        _emit_tile(
            ys, scale, data_ptr, transpose_ptr, sums_ptr, m0, width + k0, M, K, rows_left, columns_left, E5M2,
            ROWWISE, COLUMNWISE, SUMS, CURRENT, EVEN, WORDS,
        )  # fmt: skip
    if (tile_m == 0) & (tile_k == 0):
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))


@triton.jit
def _load_flat(x_ptr, block, n, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block of a contiguous tensor, rounded as its source rounds; zeros after its end."""
    start = block.to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(n - start, BLOCK).to(tl.int32)
    return convert(tl.load(x_ptr + start + index, mask=inside, other=0.0), ROUNDED)


@triton.jit(
    do_not_specialize=["partials"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr", "scale_inv_ptr", "words_ptr"],
)
def _float8_cast_kernel(
    x_ptr, scale_ptr, data_ptr, transpose_ptr, scale_inv_ptr, amax_ptr, words_ptr, n, partials, epsilon, unseen,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr, CURRENT: tl.constexpr, FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr, POWER_2: tl.constexpr, PARTIALS: tl.constexpr, FIRST: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # No transposition: row-wise data only, or a single row or column, whose transpose has the same bytes.
    program = tl.program_id(0)
    if CURRENT:
        program = tl.num_programs(0) - 1 - program
    start = program.to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(n - start, BLOCK).to(tl.int32)
    if FIRST == "own":
        scale = tl.load(scale_ptr)
        if scale == 0.0:
            part = take_part(words_ptr, 1)
            while part < tl.num_programs(0):
                values = _load_flat(x_ptr, part, n, ROUNDED, BLOCK)
                raise_own_amax(words_ptr, tl.max(magnitude(values), axis=0))
                end_part(words_ptr, 1)
                part = take_part(words_ptr, 1)
            scale = own_scales(scale, unseen, words_ptr, 1, tl.num_programs(0), 0, None)
    x = _load_flat(x_ptr, program, n, ROUNDED, BLOCK)
    if AMAX:
        previous = tl.load(amax_ptr)
    if FIRST != "own":
        scale = _tensor_scale(
            scale_ptr, partials, x_ptr, n, epsilon, CURRENT, FP8_MAX, OVERFLOW, POWER_2, PARTIALS
        )  # fmt: skip
    if FIRST == "given":
        scale = tl.where(scale == 0.0, tl.cast(unseen, tl.float32), scale)
    if AMAX:
        _accumulate_amax(amax_ptr, previous, tl.max(magnitude(x), axis=0))
    code = fp8_code(scaled_float32(x, scale, CURRENT), E5M2)
    if ROWWISE:
        tl.store(data_ptr + start + index, code, mask=inside)
    if COLUMNWISE:
        tl.store(transpose_ptr + start + index, code, mask=inside)
    if program == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))


@triton.jit
def _float8_amax_kernel(x_ptr, partials_ptr, n, BLOCK: tl.constexpr):
    # Programs stride through the tensor together, so that its end is what the last reads leave in L2.
    program = tl.program_id(0)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    largest = largest_magnitude(x_ptr, program.to(tl.int64) * BLOCK, step, n, BLOCK)
    tl.store(partials_ptr + program, largest)


@triton.jit(do_not_specialize=["band_bits"])
def _float8_transpose_kernel(
    data_ptr,
    transpose_ptr,
    M,
    K,
    band_bits,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    row = tl.arange(0, TILE_ROWS // 4)[:, None] * 4
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    offsets = row * K + column
    matrix = tl.program_id(2).to(tl.int64) * M * K
    data = data_ptr + (matrix + m0 * K + k0)
    codes = load_tile(data, offsets, row, column, K, rows_left, columns_left, EVEN)
    words = pack_codes(*codes)
    store_transposed(transpose_ptr + matrix, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)


_cast_tile = Launcher(_float8_cast_tile_kernel, num_warps=4, undeclared=("amax_ptr", "words_ptr"))
_cast_stepped = Launcher(
    _float8_cast_tile_kernel, num_warps=16, undeclared=("amax_ptr", "words_ptr")
)  # more is in flight
_cast = Launcher(_float8_cast_kernel, num_warps=4, undeclared=("amax_ptr", "words_ptr"))
_amax = Launcher(_float8_amax_kernel, num_warps=4)
_transpose = Launcher(_float8_transpose_kernel, num_warps=4)


@remembered
def _cast_launch(
    shape: tuple[int, ...],
    constants: tuple[Any, ...],
    operands: int,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    given: tuple[bool, bool, bool],
    unseen: float,
    current: bool,
    power_2: bool,
    partials: int,
    epsilon: float,
) -> tuple[Launch, int, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the launch, how many operands it takes, and the shapes and strides of data and transpose.

    Args:
        shape, constants, operands: of the source.
        given: whether there are a scale, an amax and column sums.
        unseen: as of :func:`quantize`.
        partials: how many partial maxima the scale is.
    """
    M, K = math.prod(shape[:-1]), shape[-1]
    has_scale, has_amax, asks_sums = given
    first = rule_of(unseen)
    rule = (
        current, FLOAT8_FORMATS[fmt].max, FLT_MAX, power_2 and current, partials and 1 << (partials - 1).bit_length(),
        first,
    )  # fmt: skip
    outputs = (fmt == "e5m2", rowwise, columnwise, has_amax)
    there = (has_scale, rowwise, columnwise, True, has_amax, first == "own")
    pointers = [TENSOR if one else None for one in there]
    n, elementwise = M * K, constants[0] in ("tensor", "rounded")
    if n == 0 or (elementwise and not asks_sums and (not columnwise or M <= 1 or K <= 1)):
        operands, launcher = 1, _cast
        grid = (max(cdiv(n, FLAT_BLOCK), 1), 1, 1)
        arguments = [TENSOR, *pointers, n, partials, epsilon, unseen]
        options = (*outputs, *rule, constants[1] if elementwise else "", FLAT_BLOCK)
    else:
        launcher = _cast_stepped if constants[0] == "adam" else _cast_tile
        paired = pairs_tiles(constants, K, PAIRED_COLUMNS)
        width, columns = (K // 2, PAIRED_COLUMNS) if paired else (K, TILE_COLUMNS)
        grid, band_bits = tile_grid(cdiv(M, TILE_ROWS), cdiv(width, columns))
        even = M % TILE_ROWS == 0 and width % columns == 0
        sums = TENSOR if asks_sums else None
        absent = [None] * (8 - operands)
        arguments = [
            *[TENSOR] * operands, *absent, *pointers, sums, M, K, band_bits, partials, epsilon, unseen,
        ]  # fmt: skip
        options = (
            *outputs, asks_sums, *rule, *constants, paired, TILE_ROWS, columns, even, M % 4 == 0, is_wide(M, K),
        )  # fmt: skip
    launch = Launch(launcher, grid, arguments, options)
    return launch, operands, contiguous(shape), contiguous((K, *shape[:-1]))


def _run_cast(
    source: Source,
    scale: Tensor | None,
    fmt: ElementFormat,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    current: bool,
    power_2: bool,
    epsilon: float,
    unseen: float = 0.0,
) -> list[Tensor]:
    """Cast with ``scale``, or where ``current`` with the scale of the amax.

    That is of the partial maxima in ``scale``, or without them of the tensor, which is small then.
    """
    operands = source.operands
    like, sums = operands[0], None if source.column_sums is None else source.partial_sums()
    launch, count, rows, columns = _cast_launch(
        like, source.shape, source.constants, len(operands), fmt.name, rowwise, columnwise,
        (scale is not None, amax is not None, sums is not None),
        unseen, current, power_2, scale.numel() if current and scale is not None else 0, epsilon,
    )  # fmt: skip
    new, buffers = beside(like), []
    if source.out is not None:
        buffers = [*source.out]
    else:
        if rowwise:
            buffers.append(new(*rows, torch.uint8))
        if columnwise:
            buffers.append(new(*columns, torch.uint8))
        buffers.append(new((1,), (1,), torch.float32))
    tensors = [*operands[:count], *buffers] if scale is None else [*operands[:count], scale, *buffers]
    if amax is not None:
        tensors.append(amax)
    if unseen < 0.0:
        tensors.append(words_of(like))
    if sums is not None and sums.numel():  # an empty source has no sums
        tensors.append(sums)
    launch(tensors)
    return buffers


def quantize(
    x: Tensor | Source,
    scale: Tensor,
    fmt: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
    unseen: float = 0.0,
) -> list[Tensor]:
    """Compute ``reference.float8.quantize`` of a tensor or source, both directions and the amax from one read.

    Raises:
        ValueError: also a tensor the kernels cannot reach, or rank 0.
    """
    return _run_cast(source_of(x, 1), scale, fmt, rowwise, columnwise, amax, False, False, 0.0, unseen)


def quantize_current(
    x: Tensor | Source,
    fmt: ElementFormat,
    *,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
) -> list[Tensor]:
    """Compute ``reference.float8.quantize_current`` of a tensor or source, without synchronizing with the host.

    An amax pass and a cast pass; of a small tensor the cast pass alone.

    Raises:
        ValueError: also a tensor the kernels cannot reach, or rank 0.
    """
    source = source_of(x, 1)
    # All of the matrix must be seen before any of it can be encoded. An activation is written and read back; the
    # gradient of a gated one, twice as wide, is computed twice: that moves less, and takes no memory. Where the cast
    # pass finds the amax itself, to take it before would be a launch more.
    partial = source.amax_partials if amax is None else amax
    if source.constants[0] == "adam":
        source, partial = _stepped(source, fmt)
    if partial is None and not source.is_tensor:
        if math.prod(source.shape) <= SMALL:
            source = source.materialized()
        elif pairs_tiles(source.constants, source.shape[-1], PAIRED_COLUMNS):
            source = source.with_amax()
        elif source.is_activation:
            source = source.materialized_with_amax()
        else:
            source = source.materialized()
        partial = source.amax_partials
    if partial is None:
        x = source.operands[0]
        if x.numel() > SMALL:
            partial = amax_parts_in_graph(x) if is_traced(x) else amax_parts(x)
    return _run_cast(source, partial, fmt, rowwise, columnwise, None, True, power_2, float(epsilon))


def _stepped(source: Source, fmt: ElementFormat) -> tuple[Source, Tensor]:
    """Take a source's step of Adam; return the parameter with the source's buffers, and its amax from the same pass."""
    kept, source.out = source.out, None
    bound = source.empty((2,), torch.float32).fill_(0.0)
    _run_cast(source, bound[:1], fmt, False, False, bound[1:], False, False, 0.0)
    written = source_of(parameter_of(source), 1)
    written.out = kept
    return written, bound[1:]


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, fp32 (1,); NaN ignored, 0 of an empty one, as
    ``reference.scaling.amax``.
    """
    source = source_of(x, 1).materialized()
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    return amax_parts(source.operands[0]).amax().reshape(1)


def parts_of(count: int) -> int:
    """Return the length of :func:`amax_parts` of so many elements."""
    return min(cdiv(count, AMAX_BLOCK), AMAX_PROGRAMS)


def amax_parts(x: Tensor) -> Tensor:
    """Return the maxima of parts of a tensor, fp32; none for an empty one.

    Args:
        x: bf16, fp16 or fp32, any strides.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor the kernels cannot reach.
    """
    check_input(x, 0)
    x, n = x.contiguous(), x.numel()
    programs = parts_of(n)
    partials = beside(x)((programs,), (1,), torch.float32)
    if n:
        _amax_launch(x, n, programs)([x, partials])
    return partials


@remembered
def _amax_launch(n: int, programs: int) -> Launch:
    return Launch(_amax, (programs, 1, 1), [TENSOR, TENSOR, n], (AMAX_BLOCK,))


def transpose(data: Tensor, stacked: bool = False) -> Tensor:
    """Compute ``reference.float8.transpose`` of bytes.

    Raises:
        ValueError: a tensor the kernels cannot reach.
    """
    check_device(data)
    data = data.contiguous()
    matrices = data.shape[0] if stacked else 1
    lead, K = data.shape[int(stacked) : -1], data.shape[-1]
    M = math.prod(lead)
    result = torch.empty((*data.shape[: int(stacked)], K, *lead), dtype=torch.uint8, device=data.device)
    if M <= 1 or K <= 1 or not matrices:
        result.view(-1).copy_(data.view(-1))
        return result
    (x, y, _), band_bits = tile_grid(cdiv(M, TILE_ROWS), cdiv(K, TILE_COLUMNS))
    even = M % TILE_ROWS == 0 and K % TILE_COLUMNS == 0
    _transpose(
        (x, y, matrices),
        (data, result, M, K, band_bits),
        (TILE_ROWS, TILE_COLUMNS, even, M % 4 == 0, is_wide(M, K)),
    )
    return result
