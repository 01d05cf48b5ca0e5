"""Checks of attention's arguments, before anything is computed."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .._checks import is_one_of, not_among, shape_of, shown, tensor
from .._tracing import host_reads, warn
from .formats import sequence_length
from .masks import MaskRule

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")

Masks = Tensor | tuple[Tensor, Tensor] | None


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if not is_one_of(value, known):
        raise ValueError(f"{name} is {not_among(value, known)}")


def check_not_there(**options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={shown(value)} is not supported by this module; leave it out")


def groups_of(heads: int, tp_size: int) -> str:
    """Return what ``num_gqa_groups`` may be, for a message."""
    counts = [str(n) for n in range(tp_size, min(heads, 1024) + 1, tp_size) if heads % n == 0]
    return f"num_gqa_groups may be {', '.join(counts)}" if counts else "change num_attention_heads or tp_size"


def separate(
    q: Tensor | None, k: Tensor | None, v: Tensor | None, qkv: Tensor | None, kv: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, of which two or three may come in one tensor."""
    if qkv is None and kv is None:
        if q is None or k is None or v is None:
            raise ValueError(
                "give query_layer, key_layer and value_layer, or qkv_layer, or query_layer and kv_layer"
            )
        return q, k, v
    if (qkv is not None and (kv is not None or q is not None)) or k is not None or v is not None:
        raise ValueError(
            "qkv_layer comes alone, and kv_layer with query_layer alone; leave the other tensors out"
        )
    name, whole, count = ("qkv_layer", qkv, 3) if qkv is not None else ("kv_layer", kv, 2)
    assert whole is not None
    if dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim is {dim}; it must be -3 or -2")
    if whole.dim() not in (4, 5) or whole.shape[dim] != count or whole.stride(-1) != 1:
        raise ValueError(
            f"{name} has shape {shape_of(whole)} and strides {whole.stride()}; it must have one dim more than its "
            f"format, of size {count} at {dim}, and its last dim contiguous"
        )
    parts = whole.unbind(dim)
    if qkv is not None:
        return parts[0], parts[1], parts[2]
    if q is None:
        raise ValueError("kv_layer needs query_layer beside it")
    return q, parts[0], parts[1]


def _check_lengths(
    q: Tensor,
    k: Tensor,
    qkv_format: str,
    rule: MaskRule,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    padded: tuple[Tensor | None, Tensor | None],
    pad_between_seqs: bool | None,
) -> None:
    thd = qkv_format == "thd"
    if thd and not rule.padding:
        raise ValueError(
            f"{rule.names.attn_mask_type} is {shown(rule.name)}; {rule.names.qkv_format}='thd' takes padding types: "
            "padding, padding_causal or padding_causal_bottom_right"
        )
    if thd and (cu_seqlens[0] is None or cu_seqlens[1] is None):
        raise ValueError(
            f"{rule.names.qkv_format}='thd' needs cu_seqlens_q and cu_seqlens_kv, the sums of the sequences' lengths"
        )
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    for name, cu in zip(names, (*cu_seqlens, *padded)):
        if cu is None:
            continue
        if cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 2:
            raise TypeError(
                f"{name} is {cu.dtype} of shape {shape_of(cu)}; it must be torch.int32 of shape (batch + 1,)"
            )
        if not thd and cu.shape[0] != _batch(q, qkv_format) + 1:
            raise ValueError(
                f"{name} has {cu.shape[0]} entries, expected batch + 1 = {_batch(q, qkv_format) + 1}"
            )
        if host_reads(cu):
            _check_sums(name, cu.tolist(), k if "_kv" in name else q, qkv_format)
    if (cu_seqlens[0] is None) != (cu_seqlens[1] is None) or (padded[0] is None) != (padded[1] is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_kv come together, and so do cu_seqlens_*_padded")
    if thd and pad_between_seqs and padded[0] is None:
        raise ValueError("pad_between_seqs=True needs cu_seqlens_q_padded and cu_seqlens_kv_padded")


def _check_sums(name: str, sums: list[int], x: Tensor, qkv_format: str) -> None:
    """Check sums of lengths that the host has; a GPU is not waited for."""
    lengths = [end - begin for begin, end in itertools.pairwise(sums)]
    if sums[0] < 0 or min(lengths) < 0:
        raise ValueError(f"{name} is {shown(sums)}; sums of lengths begin at 0 and never decrease")
    tokens = sequence_length(x, qkv_format)
    if (sums[-1] if qkv_format == "thd" else max(lengths)) > tokens:
        what = "ends beyond" if qkv_format == "thd" else "has a sequence longer than"
        raise ValueError(
            f"{name} is {shown(sums)} and {what} the {tokens} tokens of the input; give its own lengths"
        )


def padding_read(
    padded: tuple[Tensor | None, Tensor | None], qkv_format: str
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``cu_seqlens_q_padded`` and ``cu_seqlens_kv_padded`` where the format reads them, else a pair of None."""
    if qkv_format != "thd" and (padded[0] is not None or padded[1] is not None):
        warn(
            f"cu_seqlens_q_padded and cu_seqlens_kv_padded are ignored: qkv_format={shown(qkv_format)} has its own "
            "padding behind each sequence; they are for 'thd'"
        )
        return None, None
    return padded


def _batch(q: Tensor, qkv_format: str) -> int:
    return q.shape[1] if qkv_format == "sbhd" else q.shape[0]


def masks_of(
    mask: Masks,
    rule: MaskRule,
    q: Tensor,
    k: Tensor,
    qkv_format: str,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    padded: tuple[Tensor | None, Tensor | None],
    pad_between_seqs: bool | None,
) -> tuple[tuple[Tensor | None, Tensor | None], Tensor | None]:
    """Return the padding masks of queries and keys, and the mask of an arbitrary type; lengths are checked besides.

    A mask that the type or the format does not read is ignored with a warning, as Transformer Engine ignores it.

    Raises:
        ValueError: lengths or masks that the mask's type or the format does not take, or that are missing.
        TypeError: their dtypes.
    """
    _check_lengths(q, k, qkv_format, rule, cu_seqlens, padded, pad_between_seqs)
    name = rule.names.attention_mask
    if mask is None:
        if rule.arbitrary or (rule.padding and cu_seqlens[0] is None):
            raise ValueError(
                f"{rule.names.attn_mask_type} is {shown(rule.name)} and {name} is None; give it, or cu_seqlens of a "
                "padding type"
            )
        return (None, None), None
    if not (rule.padding or rule.arbitrary) or qkv_format == "thd":
        warn(
            f"{name} is ignored: {rule.names.attn_mask_type}={shown(rule.name)} with "
            f"{rule.names.qkv_format}={shown(qkv_format)} reads none; leave it out, or choose 'arbitrary' or a padding "
            "type"
        )
        return (None, None), None
    given = mask if isinstance(mask, tuple) else (mask,)
    for part in given:
        tensor(name, part)
        if part.dtype != torch.bool:
            raise TypeError(f"{name} is {part.dtype}; it must be torch.bool, True where masked out")
    lengths = sequence_length(q, qkv_format), sequence_length(k, qkv_format)
    batch = _batch(q, qkv_format)
    if rule.arbitrary:
        wanted, shape = (batch, q.shape[-2], *lengths), given[0].shape
        fits = len(shape) == 4 and all(size in (1, whole) for size, whole in zip(shape, wanted))
        if len(given) != 1 or not fits:
            what = f"has shape {shape_of(given[0])}" if len(given) == 1 else f"is a tuple of {len(given)}"
            raise ValueError(
                f"{name} of {rule.names.attn_mask_type}='arbitrary' {what}; use one tensor (batch, heads, queries, "
                f"keys) of shape {tuple(map(int, wanted))}, dims may be 1"
            )
        return (None, None), given[0]
    both = given * 2 if len(given) == 1 else given
    for part, length in zip(both, lengths):
        if part.shape != (batch, 1, 1, length):
            raise ValueError(
                f"{name} has shape {shape_of(part)}, expected {(batch, 1, 1, length)}; queries and keys of "
                "different lengths need a pair of masks"
            )
    return (both[0], both[1]), None
