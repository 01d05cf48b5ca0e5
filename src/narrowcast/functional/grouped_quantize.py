"""Operators that quantize groups: the tokens of every expert, the experts' weights, each as if it were alone.

How the groups lie in the buffers is the *layout*; its row-wise and its column-wise operand are two buffers or one:

========  =====================================  ================================================================
layout    operand                                of
========  =====================================  ================================================================
tensor    codes, scale_inv (G,)                  per-tensor FP8: rows as they come, transposed codes with every group
                                                 at a multiple of 16; weights (G, N, K) and (G, K, N)
padded    codes, scales                          block formats: the quantization of the matrix whose groups are padded
                                                 to 128 rows, so that no block lies in two groups
split     one buffer of bytes                    every other quantizer: NVFP4, high precision and hybrids as one of the
                                                 layouts above would have them, one buffer after the other; the rest
                                                 group after group, each group's buffers
========  =====================================  ================================================================

The sizes of the buffers depend on the number of rows and groups alone. Only groups after groups, and what runs decoded
one by one, read the splits on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..formats import padded_rows, round_up
from ._library import QUANTIZER, define
from ._producers import STATE, describe, encode
from .grouped_decoded import ALIGNMENT, blocks_of_groups, dequantized_rows
from .grouped_places import Direction
from .numerics import computed_by, numerics_for
from .quantizer_value import QuantizerValue


def operand_of(buffers: list[Tensor], layout: str, columnwise: bool) -> list[Tensor]:
    """Return the operand of one direction from the result of an operator of this file; traceable."""
    if layout == "tensor":
        return [buffers[-2] if columnwise else buffers[0], buffers[-1]]
    count = 1 if layout == "split" else 2
    return buffers[-count:] if columnwise else buffers[:count]


class _GroupedNumerics:
    """Numerics whose ``float8`` functions work on groups, for quantizers, which know of no groups.

    ``scale``, ``amax``: (G,), used instead of the one slot that a delayed quantizer reads. ``keep_amax``: return the
    amaxes of current scaling after the buffers.
    """

    def __init__(
        self,
        numerics: Any,
        splits: Tensor | None,
        groups: int,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        keep_amax: bool = False,
    ):
        self.numerics, self.splits, self.groups = numerics, splits, groups
        self.scale, self.amax, self.keep_amax = scale, amax, keep_amax

    @property
    def float8(self) -> _GroupedNumerics:
        """The numerics themselves: in an attribute they would keep themselves, and their tensors, alive."""
        return self

    def quantize_current(self, x: Tensor, fmt: Any, **options: Any) -> list[Tensor]:
        options |= {"groups": self.groups, "alignment": ALIGNMENT["tensor"], "keep_amax": self.keep_amax}
        return self.numerics.quantize_current(x, self.splits, fmt, **options)

    def quantize(
        self, x: Tensor, scale: Tensor, fmt: Any, *, amax: Tensor | None, **options: Any
    ) -> list[Tensor]:
        return self.numerics.quantize(
            x, self.splits, self.scale, fmt, amax=self.amax, alignment=ALIGNMENT["tensor"], **options
        )


class _PaddedNumerics:
    """Numerics whose NVFP4 takes an amax for each group, of ``blocks`` of 128 rows, for its quantizer's ``_encode``."""

    def __init__(self, numerics: Any, blocks: Tensor, groups: int):
        self.numerics, self.groups = numerics, (blocks, groups)

    @property
    def nvfp4(self) -> _PaddedNumerics:
        """The numerics themselves, as :attr:`_GroupedNumerics.float8`."""
        return self

    def quantize(self, x: Tensor, **options: Any) -> list[Tensor]:
        supported = self.numerics is reference or self.numerics.nvfp4.supports(**options)
        numerics = self.numerics if supported else reference
        return numerics.nvfp4.quantize(x, groups=self.groups, **options)


def _slots_of_groups(state: Tensor | None, quantizer: Any, groups: int) -> Tensor | None:
    """Return the part of a delayed quantizer's slot in its state (slots * groups,); None for others."""
    if state is None or not quantizer._is_delayed():
        return None
    return state[quantizer.slot * groups : (quantizer.slot + 1) * groups]


def encode_groups(
    tensors: list[Any],
    splits: Tensor | None,
    quantizer: QuantizerValue,
    layout: str,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    keep_amax: bool = False,
    numerics: Any = None,
    gated: bool = False,
) -> list[Tensor]:
    """Quantize rows (T, K) in groups, or weights, G of (N, K) or one (G, N, K), without splits.

    Args:
        numerics: whose source the rows are; None: they are a tensor.
        gated: that source is a gated activation, or its gradient.
    """
    x = stack(tensors) if splits is None else tensors[0]
    groups = x.shape[0] if splits is None else splits.shape[0]
    if numerics is None:
        numerics = numerics_for(x)
    elif layout == "split" or (layout == "tensor" and not gated):  # no kernel computes these on the way in
        x = numerics.fused_producers.materialize(x)
    if layout == "split" and _has_places(quantizer):
        return _encode_arenas(x, splits, quantizer, seed)
    if layout == "tensor":
        scales, amaxes = (_slots_of_groups(state, quantizer, groups) for state in (scale, amax))
        amaxes = None if amaxes is None else amaxes.view(-1)
        of_groups = numerics.grouped_gated if gated else numerics.grouped_quantize
        parts, numerics = [x], _GroupedNumerics(of_groups, splits, groups, scales, amaxes, keep_amax)
    elif layout == "padded":
        parts = [_padded(x, splits, quantizer, numerics)]
        if quantizer._takes_groups:
            numerics = _PaddedNumerics(numerics, blocks_of_groups(x, splits), groups)
    else:
        sizes = _sizes(x, splits)
        parts = x.reshape(-1, x.shape[-1]).split(sizes)[:groups]
    seeds = [seed + group if seed is not None and group else seed for group in range(len(parts))]
    # one after the other: the split layout copies each group's buffers to where they stay
    encoded = (
        encode(part, quantizer, own, scale, amax, numerics)
        for part, own in zip(parts, seeds, strict=True)
        if layout != "split" or part.numel()
    )
    return _place(encoded, x, sizes[:groups], quantizer) if layout == "split" else next(encoded)


def _has_places(quantizer: Any) -> bool:
    """Return whether the device finds the groups of every direction in the split layout."""
    return all(quantizer._of_groups(columnwise) is not None for columnwise in quantizer._directions())


def _encode_arenas(x: Tensor, splits: Tensor | None, quantizer: Any, seed: Tensor | None) -> list[Tensor]:
    """Return an arena of each direction, which holds the buffers that the direction's own quantizer makes of groups."""
    operands: dict[bool, list[Tensor]] = {}
    if quantizer._takes_groups:  # both directions in one pass
        made = encode_groups([x], splits, quantizer, "padded", seed)
        named = dict(zip(quantizer._describe_buffers((1, 1), x.dtype), made, strict=True))
        for columnwise in quantizer._directions():
            names = quantizer._format_layout().attributes(columnwise)
            operands[columnwise] = [named[name] for name in names]
    else:
        for columnwise in quantizer._directions():
            source = x
            if columnwise and quantizer._reads_decoded_rows():
                rows = operands.get(False) or _encode_direction(x, splits, quantizer, False, seed)
                source = _decoded(rows, x, splits, *quantizer._of_groups(False))
            operands[columnwise] = _encode_direction(source, splits, quantizer, columnwise, seed)
    shape, groups = tuple(x.shape), x.shape[0] if splits is None else splits.shape[0]
    arenas = []
    for columnwise, operand in operands.items():
        direction = Direction("split", quantizer, columnwise, x.shape[-1], x.dtype)
        arena = x.new_zeros(direction.arena_bytes(shape, groups), dtype=torch.uint8)
        for view, buffer in zip(direction.opened([arena], shape, groups)[1], operand, strict=True):
            view.copy_(buffer)
        arenas.append(arena)
    return arenas


def _encode_direction(
    x: Tensor, splits: Tensor | None, quantizer: Any, columnwise: bool, seed: Tensor | None
) -> list[Tensor]:
    own, layout = quantizer._of_groups(columnwise)
    return encode_groups([x], splits, own, layout, seed if own._is_stochastic() else None)


def _decoded(operand: list[Tensor], x: Tensor, splits: Tensor | None, quantizer: Any, layout: str) -> Tensor:
    """Return what row-wise buffers of ``x`` decode to, in its shape and dtype."""
    if splits is not None:
        return dequantized_rows(operand, quantizer, layout, splits, x.dtype, list(x.shape))
    groups, rows, columns = x.shape
    members = Direction(layout, quantizer, False, columns, x.dtype).groups_of(operand, [rows] * groups)
    decoded = [quantizer._decode(numerics_for(x), buffers, False, x.dtype) for buffers in members]
    return torch.stack([values[:rows, :columns] for values in decoded])


def _sizes(x: Tensor, splits: Tensor | None) -> list[int]:
    """Return the rows of every group, on the host, and then those that belong to none."""
    if splits is None:
        return [x.shape[1]] * x.shape[0]
    sizes = reference.grouped_quantize.extents(splits, x.shape[0], 1)[0]
    return [*sizes, x.shape[0] - sum(sizes)]


def _padded(x: Any, splits: Tensor | None, quantizer: QuantizerValue, numerics: Any) -> Any:
    """Return the matrix whose groups start at multiples of 128 rows; a source, if the kernels find its rows."""
    alignment = ALIGNMENT["padded"]
    if splits is None:
        missing = -x.shape[1] % alignment
        return (F.pad(x, (0, 0, 0, missing)) if missing else x).reshape(-1, x.shape[2])
    rows = padded_rows(x.shape[0], splits.shape[0], alignment)
    source = numerics.grouped_sources.rows_of_groups(x, splits, rows)
    return source if quantizer._takes_sources else numerics.fused_producers.materialize(source)


def _place(encoded: Iterator[list[Tensor]], x: Tensor, sizes: list[int], quantizer: Any) -> list[Tensor]:
    """Return the buffers of the groups that have rows, in one arena per direction."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    arenas, places = [], []
    for columnwise in quantizer._directions():
        direction = Direction("split", quantizer, columnwise, columns, x.dtype)
        arena = x.new_zeros(direction.arena_bytes((rows, columns), len(sizes)), dtype=torch.uint8)
        arenas.append(arena)
        places.append((direction, direction.split_arena(arena, sizes)))
    for group, size in enumerate(sizes):
        if not size * columns:
            continue
        names = quantizer._describe_buffers((size, columns), x.dtype)
        by_name = dict(zip(names, next(encoded), strict=True))
        for direction, views in places:
            for name, view in zip(direction.described(size), views[group], strict=True):
                view.copy_(by_name[name])
    return arenas


def _describe(
    like: Tensor, shape: tuple[int, ...], groups: int, quantizer: Any, layout: str, dtype: torch.dtype
) -> list[Tensor]:
    """Empty buffers as ``encode_groups`` gives them for rows (T, K), or weights (G, N, K), of that dtype."""
    columns = shape[-1]
    directions = [Direction(layout, quantizer, side, columns, dtype) for side in quantizer._directions()]
    for direction in directions if len(shape) == 2 else ():
        direction.check_graph(like)
    if layout == "split":
        return [like.new_empty(one.arena_bytes(shape, groups), dtype=torch.uint8) for one in directions]
    if layout == "padded":
        padded = groups * round_up(shape[1], 128) if len(shape) == 3 else padded_rows(shape[0], groups, 128)
        return describe(like, (padded, columns), dtype, quantizer)
    codes = [like.new_empty(*one.shapes(shape, groups)[0][:1], dtype=torch.uint8) for one in directions]
    return [*codes, like.new_empty((groups,), dtype=torch.float32)]


def empty_weights(weights: Tensor, quantizer: Any, layout: str) -> list[Tensor]:
    """Return uninitialized buffers of weights (G, N, K), as :data:`grouped_quantize_weights` fills them."""
    return _describe(weights, tuple(weights.shape), weights.shape[0], quantizer, layout, weights.dtype)


def _grouped_quantize_fake(
    x: Tensor, splits: Tensor, quantizer: QuantizerValue, layout: str, *state: Tensor | None
) -> list[Tensor]:
    return _describe(x, tuple(x.shape), splits.shape[0], quantizer, layout, x.dtype)


grouped_quantize = define(
    f"grouped_quantize(Tensor x, Tensor splits, {QUANTIZER} quantizer, str layout, {STATE}) -> Tensor[]",
    lambda x, splits, quantizer, layout, *state: encode_groups([x], splits, quantizer, layout, *state),
    _grouped_quantize_fake,
    lowered=lambda x, splits, quantizer, layout, *_: layout != "split",
)
"""Quantize the groups of rows of ``x``, each as if it were alone.

Args:
    x: (T, K), fp32, bf16 or fp16; the groups one after the other.
    splits: int32 or int64 (G,) on the device of ``x``: rows of each group.
    layout: "tensor", "padded" or "split", as the quantizer's format needs.
    seed: int64[1] for stochastic rounding; group ``g`` takes ``seed + g``.
    scale, amax: fp32 (slots * G,); a delayed quantizer's slot says which G entries are the operand's.

Returns:
    The buffers of the layout; :func:`operand_of` finds the operands in them.

Raises:
    ValueError: a delayed quantizer without ``scale``.
"""


def describe_rows(
    like: Tensor,
    rows: int,
    columns: int,
    splits: Tensor,
    quantizer: QuantizerValue,
    layout: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return empty buffers as :func:`encode_groups` gives them for rows."""
    return _describe(like, (rows, columns), splits.shape[0], quantizer, layout, dtype)


def _encode_coded(
    codes: Tensor,
    scales: Tensor,
    e5m2: bool,
    splits: Tensor,
    quantizer: QuantizerValue,
    layout: str,
    dtype: torch.dtype,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> list[Tensor]:
    """Quantize rows from codes."""
    numerics = numerics_for(codes)
    source = numerics.block_scaled_rows.source(codes, scales, e5m2, dtype)
    return encode_groups([source], splits, quantizer, layout, seed, scale, amax, numerics=numerics)


def _quantize_coded_fake(
    codes: Tensor,
    scales: Tensor,
    e5m2: bool,
    splits: Tensor,
    quantizer: QuantizerValue,
    layout: str,
    dtype: torch.dtype,
    *state: Tensor | None,
) -> list[Tensor]:
    return describe_rows(scales, *codes.shape, splits, quantizer, layout, dtype)  # type: ignore[arg-type]


grouped_quantize_coded = define(
    f"grouped_quantize_coded(Tensor codes, Tensor scales, bool e5m2, Tensor splits, {QUANTIZER} quantizer, "
    f"str layout, ScalarType dtype, {STATE}) -> Tensor[]",
    _encode_coded,
    _quantize_coded_fake,
)
""":data:`grouped_quantize` of rows that are there as codes of FP8; block formats decode them in registers.

Row-wise codes in blocks of 128 mean what they meant before, column-wise ones too but for what underflows: scales are
powers of two.

Args:
    codes, scales, e5m2: as ``reference.block_scaled_rows.rows`` takes them.
    dtype: of the values that were quantized.
"""


def _quantize_weights_fake(
    weights: list[Tensor], quantizer: QuantizerValue, layout: str, *state: Tensor | None
) -> list[Tensor]:
    shape = _stacked_shape(weights)
    return _describe(weights[0], shape, shape[0], quantizer, layout, weights[0].dtype)


grouped_quantize_weights = define(
    f"grouped_quantize_weights(Tensor[] weights, {QUANTIZER} quantizer, str layout, {STATE}) -> Tensor[]",
    lambda weights, quantizer, layout, *state: encode_groups(weights, None, quantizer, layout, *state),
    _quantize_weights_fake,
)
"""As :data:`grouped_quantize` for G matrices (N, K), or for one (G, N, K) that holds them all."""


def _keeping_amax_fake(weights: list[Tensor], quantizer: QuantizerValue) -> list[Tensor]:
    shape = _stacked_shape(weights)
    amax = weights[0].new_empty((shape[0],), dtype=torch.float32)
    return [*_describe(weights[0], shape, shape[0], quantizer, "tensor", weights[0].dtype), amax]


grouped_quantize_keeping_amax = define(
    f"grouped_quantize_keeping_amax(Tensor[] weights, {QUANTIZER} quantizer) -> Tensor[]",
    lambda weights, quantizer: encode_groups(weights, None, quantizer, "tensor", keep_amax=True),
    _keeping_amax_fake,
)
"""As :data:`grouped_quantize_weights` in the tensor layout under current scaling, and max|w| of each weight, fp32 (G,).

Given as ``amax`` without ``scale`` that spares a later call its pass.
"""


grouped_column_sum = define(
    "grouped_column_sum(Tensor x, Tensor splits) -> Tensor",
    computed_by("grouped_quantize", "column_sum"),
    lambda x, splits: x.new_empty((splits.shape[0], x.shape[1]), dtype=torch.float32),
)
"""Sums over the rows of every group of ``x`` (T, K): fp32 (G, K)."""


def _splits_on_device(like: Tensor, sizes: list[int]) -> Tensor:
    if not like.is_cuda or not sizes:
        return torch.tensor(sizes, dtype=torch.int64, device=like.device)
    # as arguments of a kernel: a copy from the host could not be captured in a CUDA graph
    splits = torch.zeros(len(sizes), dtype=torch.int64, device=like.device)
    torch._foreach_add_(splits.unbind(0), sizes)
    return splits


splits_on_device = define(
    "splits_on_device(Tensor like, SymInt[] sizes) -> Tensor",
    _splits_on_device,
    lambda like, sizes: like.new_empty((len(sizes),), dtype=torch.int64),
)
"""The rows of each group, int64 (G,) on the device of ``like``; nothing is copied there from the host."""


def stack(tensors: list[Tensor]) -> Tensor:
    """Return G equal tensors as one, without a copy where they lie one after the other in memory."""
    first = tensors[0]
    if len(tensors) == 1:
        return first if first.dim() == 3 else first.unsqueeze(0)
    if not are_adjacent(tensors):
        return torch.stack(tensors)
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def are_adjacent(tensors: list[Tensor]) -> bool:
    """Whether equal tensors lie one after the other in memory."""
    first = tensors[0]
    size, place, start = first.numel(), first.untyped_storage().data_ptr(), first.storage_offset()
    return all(
        tensor.is_contiguous()
        and tensor.untyped_storage().data_ptr() == place
        and tensor.storage_offset() == start + index * size
        for index, tensor in enumerate(tensors)
    )


def _stacked_shape(weights: list[Tensor]) -> tuple[int, ...]:
    first = weights[0]
    return tuple(first.shape) if first.dim() == 3 else (len(weights), *first.shape)


def _join_weights(buffers: list[Tensor], quantizer: Any, layout: str, *described: Any) -> list[Tensor]:
    columnwise, groups, rows, columns, dtype = described
    direction = Direction(layout, quantizer, columnwise, columns, dtype)
    return direction.joined([list(buffers[at::groups]) for at in range(groups)], rows)


def _join_weights_fake(buffers: list[Tensor], quantizer: Any, layout: str, *described: Any) -> list[Tensor]:
    columnwise, groups, rows, columns, dtype = described
    direction = Direction(layout, quantizer, columnwise, columns, dtype)
    return direction.empty(buffers[0], (groups, rows, columns))


join_weights = define(
    f"join_weights(Tensor[] buffers, {QUANTIZER} quantizer, str layout, bool columnwise, int groups, int rows, "
    "int columns, ScalarType dtype) -> Tensor[]",
    _join_weights,
    _join_weights_fake,
)
"""One direction's operand of G weights (N, K) quantized one by one; :meth:`Direction.groups_of` takes it apart.

Args:
    buffers: the first buffer of every weight, the second of every weight, and so on.
    dtype: of what was quantized.
"""
