"""``moe_permute`` and its kin: tokens grouped by expert, and the experts' results given back to the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import is_one_of, positive, shape_of, shown, tensor, tensors, whole
from .._device import HIGH_PRECISION
from .._tracing import warn_of_old_name
from ..formats import round_up
from ..functional import moe_departures, moe_positions
from .quantized import check_movable, is_quantized
from .rows import Permute, PermuteProbs, Unpermute, kept, row_map_of_indices, row_map_of_mask

MAP_TYPES = ("mask", "index")


def moe_permute(
    inp: Any,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Any, Tensor]:
    """Copy every token to each of its experts: the rows of expert 0, then of expert 1, each in the order of tokens.

    Nothing is read back from the device.

    Args:
        inp: (T, K), dtype of 1, 2 or 4 bytes, differentiable in bf16, fp16 and fp32; or a quantized tensor whose rows
            have scales of their own or one for all, which keeps its format (row-wise only; in eager code).
        routing_map: with "mask" int32 or bool (T, E), not zero where a token goes to an expert; with "index" int32
            (T, topk), the experts of each token, -1 for none.
        num_out_tokens: rows of the result; copies beyond are dropped, missing ones are zero. Must be positive with
            "mask", unless there are no tokens; with "index" 0 or less means ``T * topk``.
        max_token_num: taken for compatibility; nothing is allocated ahead here.
        map_type: "mask" or "index".

    Returns:
        The rows (num_out_tokens, K), and what :func:`moe_unpermute` needs: int32 of the shape of ``routing_map``, the
        row of each copy, -1 for none.

    Errors are raised before any kernel runs.

    Raises:
        ValueError: another ``map_type``, a map or input of another shape or dtype, ``num_out_tokens`` that is not
            positive with "mask".
        TypeError: an argument of another type, or a quantized input whose rows share scales.
        RuntimeError: a quantized input in compiled code.
    """
    if is_one_of(map_type, ("mask",)):
        row_map, positions, _ = checked_places(inp, routing_map, num_out_tokens, "moe_permute")
    else:
        _check(inp, "moe_permute")
        _check_map(routing_map, map_type, inp.shape[0])
        whole(num_out_tokens=num_out_tokens)
        rows = num_out_tokens if num_out_tokens > 0 else routing_map.numel()
        row_map = kept(row_map_of_indices(routing_map), rows)
        positions = moe_positions(row_map, rows)
    return Permute.apply(inp, row_map, positions), row_map


def moe_permute_with_probs(
    inp: Any, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Any, Tensor, Tensor]:
    """Copy every token, and its router's weight, to each of its experts.

    Args:
        inp: as in :func:`moe_permute`.
        probs: (T, E), any floating dtype; differentiable.
        routing_map: int32 or bool (T, E), not zero where a token goes to an expert.
        num_out_tokens: rows of the results, positive.

    Returns:
        The rows (num_out_tokens, K); their weights (num_out_tokens,) in the dtype of ``probs``, 0 for rows that no
        token has; the row map for :func:`moe_unpermute`.

    Errors are raised before any kernel runs.

    Raises:
        ValueError: as :func:`moe_permute`, or ``probs`` of another shape than the map.
    """
    row_map, positions, _ = checked_places(inp, routing_map, num_out_tokens, "moe_permute_with_probs")
    _check_probs(probs, routing_map)
    return Permute.apply(inp, row_map, positions), PermuteProbs.apply(probs, row_map, positions), row_map


def moe_permute_and_pad_with_probs(
    inp: Any,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor | Sequence[int],
    align_size: int,
    *,
    num_out_tokens: int | None = None,
) -> tuple[Any, Tensor, Tensor, Tensor | None, Tensor]:
    """Copy every token, and its router's weight, to each of its experts, whose rows are padded with zeros.

    How many rows that makes is read from the device once, where ``tokens_per_expert`` is there. Nothing is read with
    ``num_out_tokens``, which a CUDA graph needs.

    Args:
        inp, probs, routing_map: as in :func:`moe_permute_with_probs`.
        tokens_per_expert: (E,), tokens of each expert: integers, a tensor on any device or a list.
        align_size: what the rows of each expert become a multiple of.
        num_out_tokens: rows of the results; what lies beyond is dropped. None: as many as there are. No routing of
            ``topk`` experts per token needs more than ``T * topk + E * (align_size - 1)``.

    Returns:
        The rows (R, K), zero in the padding; their weights (R,), zero there; the row map, without the padding;
        ``pad_offsets`` int32 (E,), what padding adds to the rows of each expert, or None if nothing is padded
        (known in eager code without ``num_out_tokens``); ``target_tokens`` int64 (E,), the padded
        ``tokens_per_expert``, on the device of ``inp``.

    Errors are raised before any kernel runs.

    Raises:
        ValueError: as :func:`moe_permute_with_probs`; no ``tokens_per_expert``, another number of them; an
            ``align_size`` or a ``num_out_tokens`` that is not positive.
    """
    name = "moe_permute_and_pad_with_probs"
    _check(inp, name)
    _check_map(routing_map, "mask", inp.shape[0])
    _check_probs(probs, routing_map)
    positive(align_size=align_size)
    if num_out_tokens is not None:
        _check_rows(num_out_tokens, inp.shape[0])
    _check_tokens(tokens_per_expert, routing_map.shape[1])
    rows, padded, tokens = _extent(tokens_per_expert, align_size, num_out_tokens, inp.device)
    target = (tokens + (align_size - 1)) // align_size * align_size
    row_map, offsets = row_map_of_mask(routing_map), None
    moved = row_map
    if padded:
        missing = target - tokens
        offsets = (missing.cumsum(0) - missing).to(torch.int32)
        moved = _padded(row_map, offsets)
    moved = kept(moved, rows)
    row_map = torch.where(moved < 0, -1, row_map)
    positions = moe_positions(moved, rows)
    out, out_probs = Permute.apply(inp, moved, positions), PermuteProbs.apply(probs, moved, positions)
    return out, out_probs, row_map, offsets, target


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Sum the rows of every token, optionally weighted.

    The sum is computed in fp32, in the order of the map's columns, and rounded once.

    Args:
        inp: (R, K), bf16, fp16 or fp32; differentiable.
        row_id_map: as the permutation returned it, int32 (T, E) or (T, topk).
        merging_probs: weights of the rows, in the shape of ``row_id_map``, any floating dtype; differentiable.
        restore_shape: shape of the result; None: (T, K).
        map_type: "mask" or "index", as for the permutation.
        probs: the former name of ``merging_probs``; it warns.
        pad_offsets: as the padding permutation returned it.

    Returns:
        (T, K), or ``restore_shape``, in the dtype of ``inp``.

    Errors are raised before any kernel runs.

    Raises:
        ValueError: the ``map_type`` is unknown, shapes do not fit, or both ``probs`` and ``merging_probs`` are given.
        TypeError: the input is quantized, so its rows cannot be added, or has another dtype.
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("both probs and merging_probs are given; probs is the former name, leave it out")
        warn_of_old_name("probs is now merging_probs")
        merging_probs = probs
    if is_quantized(inp):
        raise TypeError("moe_unpermute adds rows up, which quantized ones cannot; pass inp.dequantize()")
    tensors(inp=inp, row_id_map=row_id_map)
    if inp.dtype not in HIGH_PRECISION:
        raise TypeError(f"moe_unpermute got {inp.dtype}; use bfloat16, float16 or float32")
    _check_type(map_type)
    if inp.dim() != 2 or row_id_map.dim() != 2 or row_id_map.dtype != torch.int32:
        raise ValueError(
            f"inp has shape {shape_of(inp)} and row_id_map is {row_id_map.dtype} of shape "
            f"{shape_of(row_id_map)}; pass rows (R, K) and the map that the permutation returned"
        )
    if merging_probs is not None:
        _check_probs(merging_probs, row_id_map)
    if pad_offsets is not None:
        tensor("pad_offsets", pad_offsets)
        if map_type != "mask" or pad_offsets.shape != row_id_map.shape[1:]:
            raise ValueError(
                f"pad_offsets has shape {shape_of(pad_offsets)} with map_type={shown(map_type)} and a map of shape "
                f"{shape_of(row_id_map)}; pass what moe_permute_and_pad_with_probs returned"
            )
        row_id_map = _padded(row_id_map, pad_offsets)
    shape = (row_id_map.shape[0], inp.shape[1])
    if restore_shape is not None and (
        not isinstance(restore_shape, (tuple, list))
        or not all(isinstance(size, (int, torch.SymInt)) for size in restore_shape)
    ):
        raise TypeError(
            f"restore_shape is {shown(restore_shape)}; pass the sizes of the result, such as {shape}"
        )
    if restore_shape is not None and (
        restore_shape[-1] != shape[1] or torch.Size(restore_shape).numel() != shape[0] * shape[1]
    ):
        raise ValueError(
            f"restore_shape is {tuple(restore_shape)}; the tokens of this map are {shape}, pass that"
        )
    out = Unpermute.apply(inp, merging_probs, kept(row_id_map, inp.shape[0]))
    return out if restore_shape is None else out.view(tuple(restore_shape))


def checked_places(
    inp: Any, routing_map: Tensor, num_out_tokens: int, name: str, ranks: int = 1, capacity: int | None = None
) -> tuple[Tensor, ...]:
    """Return the row map of a mask, its inverse, and rows that are sent to each expert.

    Args:
        inp, routing_map, num_out_tokens: as in :func:`moe_permute`.
        name: of the caller, for errors.
        ranks, capacity: as of ``moe_departures``; without a capacity all places are in a row.

    Raises:
        As :func:`moe_permute`.
    """
    _check(inp, name)
    _check_map(routing_map, "mask", inp.shape[0])
    _check_rows(num_out_tokens, inp.shape[0])
    if capacity is None:
        ranks, capacity = 1, num_out_tokens
    return moe_departures(routing_map, ranks, capacity, num_out_tokens)


def _padded(row_map: Tensor, offsets: Tensor) -> Tensor:
    return torch.where(row_map < 0, -1, row_map + offsets)


def _extent(
    tokens: Tensor | Sequence[int], align_size: int, given: int | None, device: torch.device
) -> tuple[int, bool, Tensor]:
    """Return rows of a padded result, whether there may be padding, and the tokens of the experts on the device."""
    if not isinstance(tokens, Tensor):
        total = sum(round_up(count, align_size) for count in tokens)
        padded = given is not None or total != sum(tokens)
        return (
            (total if given is None else given),
            padded,
            torch.tensor(tokens, dtype=torch.int64, device=device),
        )
    if given is not None:
        return given, True, tokens.to(device, torch.int64, non_blocking=True)
    missing = -tokens.long() % align_size
    if torch.compiler.is_compiling():
        rows = (tokens + missing).sum().item()
        torch._check(rows >= 0)
        return int(rows), True, tokens.to(device, torch.int64, non_blocking=True)
    total, more = torch.stack([tokens.sum(), missing.sum()]).tolist()
    return total + more, more > 0, tokens.to(device, torch.int64, non_blocking=True)


def _check(inp: Any, name: str) -> None:
    if is_quantized(inp):
        check_movable(inp, name)
    else:
        tensor("inp", inp)
    if len(inp.shape) != 2:
        raise ValueError(f"{name} got an input of shape {shape_of(inp)}; pass tokens (T, K)")


def _check_type(map_type: str) -> None:
    if not is_one_of(map_type, MAP_TYPES):
        raise ValueError(f"map_type is {shown(map_type)}; use 'mask' or 'index'")


def _check_map(routing_map: Tensor, map_type: str, tokens: int) -> None:
    _check_type(map_type)
    tensor("routing_map", routing_map)
    dtypes = (torch.int32, torch.bool) if map_type == "mask" else (torch.int32,)
    if routing_map.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"routing_map is {routing_map.dtype}; with map_type={shown(map_type)} pass {wanted}")
    if routing_map.dim() != 2 or routing_map.shape[0] != tokens:
        wanted = "E" if map_type == "mask" else "topk"
        raise ValueError(f"routing_map has shape {shape_of(routing_map)}; pass ({tokens}, {wanted})")


def _check_rows(num_out_tokens: int, tokens: int) -> None:
    whole(num_out_tokens=num_out_tokens)
    if num_out_tokens <= 0 and not (num_out_tokens == 0 and tokens == 0):
        raise ValueError(
            f"num_out_tokens is {num_out_tokens}; give the rows of the result, such as tokens times topk"
        )


def _check_probs(probs: Tensor, routing_map: Tensor) -> None:
    tensor("probs", probs)
    if probs.shape != routing_map.shape or not probs.is_floating_point():
        raise ValueError(
            f"the probabilities are {probs.dtype} of shape {shape_of(probs)}; pass floating ones of shape "
            f"{shape_of(routing_map)}"
        )


def _check_tokens(tokens: Tensor | Sequence[int] | None, experts: int) -> None:
    if isinstance(tokens, Tensor):
        fits = tokens.shape == (experts,) and not tokens.is_floating_point()
    else:
        counts = tokens if isinstance(tokens, (tuple, list)) else ()
        fits = len(counts) == experts and all(isinstance(count, (int, torch.SymInt)) for count in counts)
    if not fits:
        raise ValueError(
            f"tokens_per_expert is {shown(tokens)}; give the number of tokens of {experts} experts"
        )
