"""Masks: rules from plain facts and token positions that say which keys a query sees, for every backend.

A :class:`MaskRule` describes a call (padding, causal, a window, and which diagonal they count from). A
:class:`Geometry` is where each token stands: its position in its sequence, which sequence, and whether it is a token at
all. Both together say whether query i sees key j, whatever the format: a padded batch has one sequence per row, packed
tokens (``thd``) are one row of many sequences. :func:`hidden_pairs` says it with a tensor of all pairs; FlexAttention
asks pair by pair (``flex.py``); what needs neither goes to PyTorch's kernels as ``is_causal``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import not_among, shown

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
_SPELLINGS = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}


class OptionNames(NamedTuple):
    """What the module that the user made calls the options of an attention, for messages."""

    attn_mask_type: str = "attn_mask_type"
    window_size: str = "window_size"
    attention_mask: str = "attention_mask"
    qkv_format: str = "qkv_format"


ATTENTION_NAMES = OptionNames()


@dataclass(frozen=True)
class MaskRule:
    """The rule of a mask type, a window and a diagonal.

    Args:
        name: the mask type.
        padding, arbitrary: whether a mask of tokens, or of pairs, belongs to it.
        window: keys seen to the left and right of the diagonal, -1 without bound; (-1, 0) is causal.
        bottom_right: the diagonal ends at the last query and key, instead of beginning at the first ones.
        names: of the options that a call was made with.
    """

    name: str
    padding: bool
    arbitrary: bool
    window: tuple[int, int]
    bottom_right: bool
    names: OptionNames = field(default=ATTENTION_NAMES, compare=False)

    @property
    def bounded(self) -> bool:
        """Whether it depends on where a key stands from the diagonal."""
        return self.window != (-1, -1)


def mask_rule(
    attn_mask_type: str,
    window_size: tuple[int, int] | None = None,
    bottom_right_diagonal: bool | None = None,
    *,
    names: OptionNames = ATTENTION_NAMES,
) -> MaskRule:
    """Return the rule of a mask type.

    Args:
        attn_mask_type: one of ``MASK_TYPES``; "padding,causal" and "causal,padding" are "padding_causal".
        window_size: (left, right), -1 for no bound; a causal type sees nothing on the right, whatever is given.
        bottom_right_diagonal: which diagonal window, ALiBi and a causal mask count from; None: as the type says, top
            left for "causal" and "padding_causal", bottom right for the others.
        names: what the caller calls the arguments.

    Raises:
        ValueError: an unknown type, or a window that is not two ints from -1 on.
    """
    name = _SPELLINGS.get(attn_mask_type, attn_mask_type) if isinstance(attn_mask_type, str) else None
    if name is None or name not in MASK_TYPES:
        raise ValueError(f"{names.attn_mask_type} is {not_among(attn_mask_type, MASK_TYPES)}")
    sides = (-1, -1) if window_size is None else window_size
    window = tuple(sides) if isinstance(sides, (tuple, list)) else ()
    if len(window) != 2 or any(not isinstance(side, int) or side < -1 for side in window):
        raise ValueError(
            f"{names.window_size} is {shown(window_size)}; give (left, right), each an int, -1 for no bound"
        )
    if "causal" in name:
        window = (window[0], 0)
    if bottom_right_diagonal is None:
        bottom_right_diagonal = name not in ("causal", "padding_causal")
    return MaskRule(name, "padding" in name, name == "arbitrary", window, bottom_right_diagonal, names)


@dataclass
class Tokens:
    """The positions of the queries, or of the keys.

    Args:
        position: (b or 1, s) ints, each token's place in its sequence.
        sequence: (1, s) ints, each token's sequence; None if every row is one.
        valid: (b or 1, s) bools, whether there is a token; None if there is one everywhere.
        length: (b) ints, tokens of each sequence; None if they are all ``s``.
        moved: whether the position of a token may be another than its index in the tensor.
    """

    position: Tensor
    sequence: Tensor | None = None
    valid: Tensor | None = None
    length: Tensor | None = None
    moved: bool = False


@dataclass
class Geometry:
    """The tokens of both sides.

    Args:
        shift: how far the diagonal lies to the right of the top left one: an int or a scalar; or (b, 1), or (1, s_q)
            of packed tokens.
    """

    q: Tokens
    kv: Tokens
    shift: int | Tensor = 0


def rows(length: int, device: torch.device) -> Tokens:
    """Return sequences that fill their rows."""
    return Tokens(torch.arange(length, device=device)[None])


def padded_rows(length: int, masked_out: Tensor | None, cu_seqlens: Tensor | None) -> Tokens:
    """Return sequences in rows of ``length``.

    Args:
        masked_out: (b, 1, 1, length) bools, True where there is no token.
        cu_seqlens: (b + 1); read where ``masked_out`` is None: the first tokens of each row.
    """
    if masked_out is not None:
        valid = ~masked_out[:, 0, 0]
        return Tokens(rows(length, valid.device).position, None, valid, valid.sum(-1))
    assert cu_seqlens is not None
    lengths = cu_seqlens.diff()
    position = rows(length, cu_seqlens.device).position
    return Tokens(position, None, position < lengths[:, None], lengths)


def packed(total: int, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> Tokens:
    """Return sequences one after the other.

    Args:
        total: tokens, padding included.
        cu_seqlens: (b + 1) sums of their lengths.
        cu_seqlens_padded: where each begins; None: where the last one ended.
    """
    lengths = cu_seqlens.diff()
    begins = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    index = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(begins[1:].contiguous(), index, right=True).clamp(max=lengths.shape[0] - 1)
    position = index - begins[sequence]
    return Tokens(position[None], sequence[None], (position < lengths[sequence])[None], lengths, True)


def geometry(q: Tokens, kv: Tokens, rule: MaskRule, length_q: int, length_kv: int) -> Geometry:
    """Return both sides, and the diagonal that the rule counts from; the lengths are those of the rows."""
    if not rule.bottom_right:
        return Geometry(q, kv, 0)
    if q.length is None or kv.length is None:
        return Geometry(q, kv, length_kv - length_q)
    shift = kv.length - q.length
    return Geometry(q, kv, shift[q.sequence] if q.sequence is not None else shift[:, None])


def distances(places: Geometry) -> Tensor:
    """Return (b or 1, s_q, s_kv): how far each key is to the right of the query's diagonal."""
    shift = places.shift if isinstance(places.shift, int) else places.shift[:, :, None]
    return places.kv.position[:, None, :] - places.q.position[:, :, None] - shift


def hidden_pairs(places: Geometry, rule: MaskRule, masked_out: Tensor | None) -> Tensor | None:
    """Return (b or 1, h or 1, s_q, s_kv) bools, True where a query does not see a key; None if all see all.

    Args:
        masked_out: of an arbitrary mask, broadcastable to all pairs, True where masked out.
    """
    parts = []
    if rule.bounded:
        distance = distances(places)
        left, right = rule.window
        if right >= 0:
            parts.append((distance > right)[:, None])
        if left >= 0:
            parts.append((distance < -left)[:, None])
    q, kv = places.q, places.kv
    if q.sequence is not None and kv.sequence is not None:
        parts.append((q.sequence[:, :, None] != kv.sequence[:, None, :])[:, None])
    if q.valid is not None:
        parts.append(~q.valid[:, None, :, None])
    if kv.valid is not None:
        parts.append(~kv.valid[:, None, None, :])
    if masked_out is not None:
        parts.append(masked_out)
    if not parts:
        return None
    hidden = parts[0]
    for part in parts[1:]:
        hidden = hidden | part
    return hidden


def standard_slopes(heads: int, device: torch.device) -> Tensor:
    """Return (heads) in fp32, as ALiBi's paper gives them (Press, Smith, Lewis: Train Short, Test Long, 2022).

    2^(-8/n), 2^(-16/n) and so on for n heads, a power of two; of other numbers, those of the power below, then every
    second one of the power above.
    """
    below = 2 ** math.floor(math.log2(heads))
    # computed where they are read: a list would be copied to the GPU at every call, which also no CUDA graph may
    first = torch.arange(1, below + 1, dtype=torch.float32, device=device) * (-8.0 / below)
    others = (2 * torch.arange(heads - below, dtype=torch.float32, device=device) + 1) * (-4.0 / below)
    return torch.exp2(torch.cat((first, others)))


def alibi_bias(places: Geometry, slopes: Tensor) -> Tensor:
    """Return (b or 1, h, s_q, s_kv) in fp32: minus slope times distance from the diagonal.

    Args:
        slopes: (h), or (b, h) for slopes of each sequence.
    """
    if slopes.dim() == 1:
        by_query = slopes[None, :, None, None]
    elif places.q.sequence is not None:
        by_query = slopes[places.q.sequence].transpose(1, 2)[..., None]
    else:
        by_query = slopes[:, :, None, None]
    return -by_query * distances(places).abs()[:, None]
