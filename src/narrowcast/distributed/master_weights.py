"""Optimizers that share master weights out: each rank writes its shard of fp32 into the codes of a quantized weight.

Codes depend on scales, and a scale on all elements of its group, which several ranks may hold. So ranks agree on the
largest magnitude of every group first. Then a rank quantizes the whole matrix with its shard in place, zeros elsewhere,
and the agreed magnitude put on one element of others in every group: scales come out as those of the whole, and its
own codes with them, by the very operator that quantizes weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import a_kind, shown, typed
from .._checks import tensor as tensor_given
from ..layers.described import ParameterRecord, describe_tensor, how_stored
from ..quantizers import Float8Quantizer, Quantizer
from ..reference.layout import group_max
from ..tensors import QuantizedTensor


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: Tensor) -> None:
    """Move the row-wise codes of a quantized tensor into another buffer, such as a slice of a common one.

    Args:
        tensor: the quantized tensor, which keeps its values.
        new_raw_data: uint8, as many bytes as the codes, on their device; overwritten.
    Raises:
        TypeError: ``tensor`` is not quantized.
        RuntimeError: it has no row-wise codes.
        ValueError: the buffer does not fit or is not contiguous.
    """
    _check_tensor(tensor, "replace_raw_data")
    name = tensor._ROWWISE_BUFFERS[0]
    codes = getattr(tensor, name)
    if codes is None:
        raise RuntimeError(f"replace_raw_data: {shown(tensor)} has no row-wise codes")
    tensor_given("new_raw_data", new_raw_data)
    given = (new_raw_data.dtype, new_raw_data.numel(), new_raw_data.device)
    if given != (codes.dtype, codes.numel(), codes.device) or not new_raw_data.is_contiguous():
        raise ValueError(
            f"new_raw_data is {new_raw_data.dtype} {tuple(new_raw_data.shape)} on {new_raw_data.device}; give "
            f"contiguous {codes.dtype} of {codes.numel()} elements on {codes.device}"
        )
    buffer = new_raw_data.detach().view(codes.shape)
    buffer.copy_(codes)
    setattr(tensor, name, buffer)


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[Tensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any = None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write this rank's shards of the master weights into quantized weights, as if quantizing the full weight.

    Afterwards every rank has the full scales, but only its shard of the codes. Gather ``_data`` or ``_rowwise_data``
    (and ``_columnwise_data`` of MXFP8), then call :func:`post_all_gather_processing`. It needs one collective for all
    weights, and temporarily a plain copy of every weight.

    A weight that FSDP2 shards is written in its shard and needs no gather. Scales common to all shards are computed
    over the ranks of its mesh.

    Args:
        model_weights: matrices (N, K) of per-tensor FP8, 128x128 tiles, MXFP8, or NVFP4 in 16x16 tiles; sharded by
            FSDP2, of any format.
        master_weights: this rank's consecutive elements of each, fp32 of any shape; None if it has none. They are
            rounded to the weight's dtype first, as for a layer that is not stored quantized.
        start_offsets: index of the first of these elements in the weight, counted over its rows; None with None.
        group: the ranks that share the master weights; None is the default group, or this process alone.
        fsdp_shard_model_weights: destinations of the shard's codes: per weight a uint8 tensor of its elements, for
            MXFP8 one per direction; None writes into the weight.
        manual_post_all_gather_processing: accepted; you always call it for weights of which no rank holds the whole.
    Raises:
        ValueError: lists differ in length, a shard is outside its weight or differs from FSDP2's rows, the codes of a
            format's shard depend on more than the amax of its groups, or a shard of 4-bit codes begins or ends within a
            byte.
        TypeError: a weight is not quantized.
    """
    shards = fsdp_shard_model_weights or [None] * len(model_weights)
    lengths = {len(some) for some in (model_weights, master_weights, start_offsets, shards)}
    if len(lengths) > 1:
        raise ValueError(
            f"got {len(model_weights)} model_weights, {len(master_weights)} master_weights, {len(start_offsets)} "
            f"start_offsets and {len(shards)} fsdp_shard_model_weights; give one of each per weight"
        )
    parts = []
    for weight, master, start, into in zip(model_weights, master_weights, start_offsets, shards):
        _check_tensor(weight, "quantize_master_weights")
        record = describe_tensor(weight)
        if record.mesh is not None:
            _write_shard(record, master, start, into)
            continue
        parts.append(_Part(_checked(weight, master, start), _placed(weight, master, start), start or 0, into))
    agreed = _reduce([amax for part in parts for amax in _largest(part)], group)
    for part in parts:
        _write(part, [agreed.pop(0) for _ in _groups(part.weight._quantizer)])


cast_master_weights_to_fp8 = quantize_master_weights


def post_all_gather_processing(model_weights: QuantizedTensor | Sequence[QuantizedTensor]) -> None:
    """Make the column-wise data of weights after their row-wise codes were gathered.

    Per-tensor FP8 and formats of square tiles transpose the codes. MXFP8 needs nothing, since both directions were
    gathered. Plain tensors stay.

    Raises:
        RuntimeError: a format cannot make column-wise data from row-wise data.
    """
    weights = [model_weights] if isinstance(model_weights, Tensor) else model_weights
    if not isinstance(weights, (list, tuple)):
        raise TypeError(f"model_weights is {typed(weights)}; pass weights in a list")
    for weight in weights:
        if how_stored(weight) == "codes" and not weight.get_usages()["columnwise"]:
            weight.update_usage(columnwise_usage=True)


class _Part(NamedTuple):
    """A weight, the magnitudes and places of this rank's elements, the first of them, and where codes go.

    ``values``: (N, K) in the weight's dtype with zeros outside the shard; None if the rank has none.
    """

    weight: QuantizedTensor
    values: tuple[Tensor, int] | None
    start: int
    into: Any


def _write_shard(record: ParameterRecord, master: Tensor | None, start: int | None, into: Any) -> None:
    """Write this rank's rows of a weight that FSDP2 shards."""
    own = record.held
    first = record.parts[0].offset[0] * own.shape[1]
    size = None if master is None else master.numel()
    if master is None or (size, start) != (own.numel(), first) or into is not None:
        raise ValueError(
            f"a master weight of {size} elements at start_offset={start} is not this rank's shard of a weight that "
            f"FSDP2 shards; give its {own.numel()} elements and {first}, and no fsdp_shard_model_weights"
        )
    own.clear_high_precision_init_val()
    own.quantize_(master.detach().view(own.shape).to(own.dtype))


def _check_tensor(weight: Any, function: str) -> None:
    if how_stored(weight) != "codes":
        raise TypeError(
            f"{function} got {a_kind(weight)}; give quantized tensors, as quantized_model_init makes"
        )


def _checked(weight: Any, master: Tensor | None, start: int | None) -> QuantizedTensor:
    quantizer = weight._quantizer
    if weight.dim() != 2 or not _groups(quantizer):
        raise ValueError(
            f"quantize_master_weights cannot write shards of {a_kind(weight)} {tuple(weight.shape)} by "
            f"{shown(quantizer)}; per-tensor FP8, 128x128 tiles, MXFP8 and NVFP4 in 16x16 tiles without rotation, "
            "stochastic rounding or 4over6 can"
        )
    if (master is None) != (start is None):
        raise ValueError(
            f"a master weight is {shown(master)} with start_offset={start}; give both or neither"
        )
    if master is not None and not 0 <= start <= start + master.numel() <= weight.numel():  # type: ignore[operator]
        raise ValueError(
            f"a shard of {master.numel()} elements at start_offset={start} does not lie in a weight of "
            f"{weight.numel()}"
        )
    packed = master is not None and _per_byte(weight) == 2
    if packed and (weight.shape[1] % 16 or start % 2 or master.numel() % 2):  # type: ignore[operator,union-attr]
        raise ValueError(
            f"a shard of {master.numel()} elements at start_offset={start} begins or ends within a byte of two "  # type: ignore[union-attr]
            f"codes, or within the padding of {weight.shape[1]} columns; use even shards and a multiple of 16 columns"
        )
    return weight


def _per_byte(weight: QuantizedTensor) -> int:
    """Return codes that share a byte: two where row-wise data are half as wide as the weight."""
    return 2 if weight.rowwise_operand()[0].shape[-1] < weight.shape[-1] else 1


def _placed(weight: Tensor, master: Tensor | None, start: int | None) -> tuple[Tensor, int] | None:
    if master is None or not master.numel():
        return None
    values = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    values.view(-1)[start : start + master.numel()] = master.detach().reshape(-1).to(values)  # type: ignore[operator]
    return values, master.numel()


def _groups(quantizer: Any) -> list[tuple[bool, tuple[int, int]]]:
    """Return (whether it is column-wise, (rows, columns) of the elements that share a scale), of each direction to
    write.

    (0, 0): all elements. Empty for formats whose shards cannot be written.
    """
    if (
        quantizer._is_stochastic()
        or getattr(quantizer, "with_rht", False)
        or getattr(quantizer, "nvfp4_use_4over6", False)
    ):
        return []
    layout = quantizer._format_layout()
    if layout.native == "1x32" and not quantizer.with_2d_quantization:
        return [(False, (1, 32)), (True, (32, 1))]
    if layout.native == "1x32":
        return [(False, (32, 32)), (True, (32, 32))]
    if layout.native == "1x16" and quantizer.with_2d_quantization:
        return [(False, (16, 16))]
    return [(False, layout.scale_group)] if layout.native in ("tensor", "128x128") else []


def _largest(part: _Part) -> list[Tensor]:
    """Return the amax of this rank's elements in every group, fp32, by direction; NaN counts as largest."""
    found = []
    rows, columns = part.weight.shape
    for _, (high, wide) in _groups(part.weight._quantizer):
        size = (1, 1) if not high else (-(-rows // high), -(-columns // wide))
        if part.values is None:
            found.append(torch.zeros(size, dtype=torch.float32, device=part.weight.device))
        elif not high:
            found.append(part.values[0].abs().amax().float().view(1, 1))
        else:
            found.append(group_max(part.values[0].abs().float(), high, wide))
    return found


def _reduce(found: list[Tensor], group: Any) -> list[Tensor]:
    distributed = torch.distributed
    if not found or not (distributed.is_available() and distributed.is_initialized()):
        return found
    packed = torch.cat([amax.flatten() for amax in found])
    distributed.all_reduce(packed, op=distributed.ReduceOp.MAX, group=group)
    parts = packed.split([amax.numel() for amax in found])
    return [part.view(amax.shape) for part, amax in zip(parts, found)]


def _write(part: _Part, agreed: list[Tensor]) -> None:
    weight, quantizer = part.weight, part.weight._quantizer
    weight.clear_high_precision_init_val()
    own = _largest(part)
    wrote_columns = False
    for (columnwise, tile), mine, every in zip(_groups(quantizer), own, agreed):
        if columnwise and not weight.get_usages()["columnwise"]:
            continue
        wrote_columns |= columnwise
        buffers = _quantized(part, quantizer, columnwise, tile, mine, every)
        names = weight._COLUMNWISE_BUFFERS if columnwise else weight._ROWWISE_BUFFERS
        codes, *rest = buffers
        for name, buffer in zip(names[1:], rest, strict=True):
            getattr(weight, name).copy_(buffer)
        if part.values is not None:
            _copy_shard(part, codes, getattr(weight, names[0]), columnwise)
    if isinstance(quantizer, Float8Quantizer):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, agreed[0].view(-1)))
    weight._mark_written()
    if not wrote_columns and weight.get_usages()["columnwise"]:
        alone = part.values is not None and part.values[1] == weight.numel()
        weight.update_usage(columnwise_usage=False)
        if alone:
            weight.update_usage(columnwise_usage=True)


def _quantized(
    part: _Part, quantizer: Any, columnwise: bool, tile: tuple[int, int], mine: Tensor, every: Tensor
) -> list[Tensor]:
    """Return codes of the shard and scales of the whole: of the shard with the magnitudes of others in their places."""
    weight = part.weight
    values = (
        part.values[0] if part.values else torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    )
    one: Quantizer = quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise)
    if not isinstance(quantizer, Float8Quantizer):
        values = _with_others(values, part, tile, mine, every)
    operand = one.quantize(values)
    buffers: list[Tensor] = operand.columnwise_operand() if columnwise else operand.rowwise_operand()
    return buffers


def _with_others(values: Tensor, part: _Part, tile: tuple[int, int], mine: Tensor, every: Tensor) -> Tensor:
    """Return the values, and in groups where others have the largest magnitude, that on one element which is theirs."""
    rows, columns = values.shape
    high, wide = tile if tile[0] else (rows, columns)
    count = 0 if part.values is None else part.values[1]
    shard = range(part.start, part.start + count)
    place = _first_of_others((rows, columns), shard, (high, wide), values.device).view(-1)
    wanted = ((every > mine) | (every.isnan() & ~mine.isnan())).view(-1)
    place, magnitude = place[wanted], every.reshape(-1)[wanted]
    filled = values.clone()
    filled.view(-1)[place] = magnitude.to(values.dtype)
    return filled


def _first_of_others(shape: tuple[int, int], shard: range, tile: tuple[int, int], device: Any) -> Tensor:
    """Return the index of each group's first element outside a shard; the number of elements if there is none.

    Args:
        shape: (N, K) of the weight.
        shard: consecutive elements, counted over its rows.
        tile: of a group.
    """
    (rows, columns), (high, wide) = shape, tile
    none = rows * columns
    left = torch.arange(0, columns, wide, device=device)
    row = torch.arange(0, none, columns, device=device).unsqueeze(1)
    begin, end = row + left, row + (left + wide).clamp(max=columns)
    # the first element of each row of a group, or the one after the shard
    behind = torch.where(end > shard.stop, shard.stop, none)
    first = torch.where((begin >= shard.start) & (begin < shard.stop), behind, begin)
    first = F.pad(first, (0, 0, 0, -rows % high), value=none)
    return first.view(-1, high, len(left)).amin(1)


def _copy_shard(part: _Part, codes: Tensor, own: Tensor, columnwise: bool) -> None:
    assert part.values is not None
    per_byte = _per_byte(part.weight)
    where = slice(part.start // per_byte, (part.start + part.values[1]) // per_byte)
    into = part.into[columnwise] if isinstance(part.into, (tuple, list)) else part.into
    target = own.view(-1)[where] if into is None else into.view(torch.uint8).view(-1)
    target.copy_(codes.view(torch.uint8).reshape(-1)[where])
