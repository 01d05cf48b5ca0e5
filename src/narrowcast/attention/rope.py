"""Rotary position embeddings: channels in pairs, each turned by an angle that grows with the token's position.

From RoFormer (Su and others, 2021). Pair i of d channels is turned by position * base^(-2i/d): its first channel
becomes x cos - y sin and its second y cos + x sin. A pair is channels i and i + d/2, or with
``interleaved`` 2i and 2i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import functional
from .._checks import (
    flags,
    in_range,
    is_one_of,
    not_among,
    numbers,
    positive,
    shape_of,
    shown,
    tensor,
    tensors,
    whole,
)
from .._device import default_device
from .._keywords import refuse_keywords
from .._tracing import host_reads, once_differentiable
from ..upstream.modules import keep_values, own_buffers
from .formats import FORMATS, dims_of
from .masks import packed


class RotaryPositionEmbedding(nn.Module):
    """The rotary angles of positions.

    Args:
        dim: channels of a head.
        rotary_percent: share of the channels that is rotated.
        seq_len_interpolation_factor: positions are divided by it.
        pretrained_max_position_embeddings: with the factor, positions are divided by the larger of the factor and
            ``max_seq_len / pretrained_max_position_embeddings``.
        rotary_base: base of the frequencies.
        interleaved: pair channels 2i and 2i + 1 instead of i and i + d/2.

    Raises:
        ValueError: the number of channels is odd or not positive.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        positive(dim=dim)
        in_range("rotary_percent", rotary_percent, "use a number above 0, 1.0 for all channels")
        turned = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if turned <= 0 or turned % 2:
            raise ValueError(
                f"dim={dim} with rotary_percent={rotary_percent} turns {turned} channels; they are turned in pairs, so "
                "choose an even number"
            )
        numbers(rotary_base=rotary_base)
        flags(interleaved=interleaved)
        if seq_len_interpolation_factor is not None:
            numbers(seq_len_interpolation_factor=seq_len_interpolation_factor)
        if pretrained_max_position_embeddings is not None:
            positive(pretrained_max_position_embeddings=pretrained_max_position_embeddings)
        self.interleaved, self.rotary_base = interleaved, rotary_base
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        exponents = torch.arange(0, turned, 2, dtype=torch.float32, device=default_device()) / turned
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryPositionEmbedding:
        """Keep the frequencies in fp32, whatever dtype the model around is cast to."""
        exact = dict(own_buffers(self))
        super()._apply(fn, recurse)
        keep_values(self, exact)
        return self

    def forward(self, max_seq_len: int, offset: int = 0, **unknown: NoReturn) -> Tensor:
        """Return angles of the positions from ``offset`` on: (max_seq_len, 1, 1, d) in fp32."""
        if unknown:
            refuse_keywords(self, unknown)
        whole(max_seq_len=max_seq_len, offset=offset)
        if max_seq_len < 0:
            raise ValueError(f"max_seq_len is {max_seq_len}; use the number of positions, 0 or more")
        position = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        factor, pretrained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None:
            longer = pretrained is not None and max_seq_len > pretrained * factor
            position = position / (max_seq_len / pretrained if longer and pretrained is not None else factor)
        angles = position[:, None] * self.inv_freq[None]
        if self.interleaved:
            angles = angles.repeat_interleave(2, -1)
        else:
            angles = torch.cat((angles, angles), -1)
        return angles[:, None, None, :]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first ``freqs.shape[-1]`` channels of queries or keys; the others pass unchanged.

    Args:
        t: (s, b, h, d), (b, s, h, d) or (tokens, h, d); bf16, fp16 or fp32.
        freqs: (s', 1, 1, d') angles of positions 0, 1, ...; no gradient.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: (b) ints, the position of each sequence's first token; default 0.
        interleaved: pair channels 2i and 2i + 1, as in ``freqs``.
        fused: one kernel, forward and backward, with the same bits.
        cu_seqlens: (b + 1) int32, for "thd": sums of the sequences' lengths, of all ranks together.
        cp_size, cp_rank: with context parallelism, ``t`` holds chunks ``cp_rank`` and ``2 cp_size - 1 - cp_rank`` of
            the ``2 cp_size`` chunks of each sequence.

    Returns:
        The shape of ``t``, computed in fp32 and rounded once. Positions beyond ``freqs`` raise unless the check must
        wait for a GPU; they then use the last angles.

    Raises:
        ValueError: the format is unknown, "thd" lacks ``cu_seqlens``, there are more positions than angles, shapes do
            not fit, or ``cp_rank`` is outside ``cp_size``.
    """
    flags(interleaved=interleaved, fused=fused)
    check_rotary(t, freqs, tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    positions = _within(
        freqs, token_positions(t, tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    )
    if not fused:
        return rotate(t, angles_of(t, freqs, positions, tensor_format), interleaved)
    rows, first = (t[None] if tensor_format == "thd" else t), tensor_format == "sbhd"
    turned = _Rotate.apply(rows, *_tables(freqs), positions, first, interleaved)
    return turned[0] if tensor_format == "thd" else turned


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    by_group: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values out of one tensor and rotate queries and keys, in one kernel.

    Args:
        qkv: (s, b, g, w), (b, s, g, w) or (tokens, g, w), contiguous: each group's queries, key and value.
        q_freqs, k_freqs: angles, as in ``apply_rotary_pos_emb``.
        qkv_split_arg_list: widths of queries, key and value in w; the second is the head dim of the first two.
        tensor_format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank: as in ``apply_rotary_pos_emb``.
        by_group: False if memory holds all queries of a token, then all its keys, then all its values.

    Returns:
        Queries (..., g w_q / w_k, w_k), keys (..., g, w_k) and values (..., g, w_v) in the format.

    Raises:
        ValueError: as in ``apply_rotary_pos_emb``; widths do not sum up to w, the second does not divide the first, or
            the tensor is not contiguous.
    """
    tensors(qkv=qkv, q_freqs=q_freqs, k_freqs=k_freqs)
    flags(interleaved=interleaved, by_group=by_group)
    if not isinstance(qkv_split_arg_list, (list, tuple)):
        raise TypeError(
            f"qkv_split_arg_list is {shown(qkv_split_arg_list)}; pass the widths of queries, key and value"
        )
    widths = list(qkv_split_arg_list)
    for width in widths:
        whole(qkv_split_arg_list=width)
    if not qkv.dim():
        raise ValueError(f"qkv has shape {shape_of(qkv)}, which is not {', '.join(tensor_format)}")
    if len(widths) != 3 or min(widths) <= 0 or sum(widths) != qkv.shape[-1] or widths[0] % widths[1]:
        raise ValueError(
            f"qkv_split_arg_list is {shown(widths)}; it must be the widths of queries, key and value in the "
            f"last dim of qkv, {qkv.shape[-1]}, the first a multiple of the second"
        )
    if not qkv.is_contiguous():
        raise ValueError(f"qkv has shape {shape_of(qkv)} and strides {qkv.stride()}; call contiguous() first")
    where = (tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    for freqs in (q_freqs, k_freqs):
        check_rotary(qkv[..., : widths[1]], freqs, *where)
    positions = token_positions(qkv, *where)
    positions = _within(k_freqs, _within(q_freqs, positions))
    rows, first = (qkv[None] if tensor_format == "thd" else qkv), tensor_format == "sbhd"
    of_keys = (None, None) if k_freqs is q_freqs else _tables(k_freqs)
    tables = (*_tables(q_freqs), *of_keys)
    q, k, v = _RotateQKV.apply(rows, *tables, positions, first, interleaved, widths, by_group)
    return (q[0], k[0], v[0]) if tensor_format == "thd" else (q, k, v)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        first: bool,
        interleaved: bool,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.how = (first, interleaved)
        return functional.rotate(x, cos, sin, positions, first, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin, positions = ctx.saved_tensors
        return functional.rotate(grad, cos, sin, positions, *ctx.how, True), None, None, None, None, None


class _RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_cos: Tensor,
        q_sin: Tensor,
        k_cos: Tensor | None,
        k_sin: Tensor | None,
        positions: Tensor | None,
        first: bool,
        interleaved: bool,
        widths: list[int],
        by_group: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q_cos, q_sin, k_cos, k_sin, positions)
        ctx.how = (first, interleaved, by_group)
        tables = _of_both(q_cos, q_sin, k_cos, k_sin)
        return functional.rotate_qkv(qkv, tables, positions, first, interleaved, widths, by_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *tables, positions = ctx.saved_tensors
        dqkv = functional.rotate_qkv_backward(list(grads), _of_both(*tables), positions, *ctx.how)
        return dqkv, None, None, None, None, None, None, None, None, None


def _of_both(q_cos: Any, q_sin: Any, k_cos: Any, k_sin: Any) -> list[Tensor]:
    """Return the tables of queries and keys, which share them if there are none of keys."""
    return [q_cos, q_sin, q_cos if k_cos is None else k_cos, q_sin if k_sin is None else k_sin]


def _tables(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (positions, channels) in fp32."""
    angles = freqs.detach().float()[:, 0, 0]
    return angles.cos(), angles.sin()


def check_rotary(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> None:
    """Check the arguments of ``apply_rotary_pos_emb``; raises as it says."""
    if not is_one_of(tensor_format, FORMATS):
        raise ValueError(f"tensor_format is {not_among(tensor_format, FORMATS)}")
    tensor("t", t)
    positive(cp_size=cp_size)
    whole(cp_rank=cp_rank)
    for label, given in (("start_positions", start_positions), ("cu_seqlens", cu_seqlens)):
        if given is not None:
            tensor(label, given)
    thd = tensor_format == "thd"
    if t.dim() != (3 if thd else 4):
        raise ValueError(
            f"t has shape {shape_of(t)}; tensor_format={shown(tensor_format)} takes {3 if thd else 4} dims: "
            f"{dims_of(tensor_format)}"
        )
    if thd and cu_seqlens is None:
        raise ValueError("tensor_format='thd' needs cu_seqlens, the sums of the sequences' lengths")
    length, batch = (t.shape[0], t.shape[1]) if tensor_format == "sbhd" else (t.shape[1], t.shape[0])
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank}; it must be from 0 to cp_size - 1 = {cp_size - 1}")
    check_angles(freqs, t.shape[-1], None if thd else length * cp_size)
    if thd:
        return
    if cp_size > 1 and length % 2:
        raise ValueError(
            f"t has {length} positions; with cp_size={cp_size} it holds two chunks of equal length"
        )
    if start_positions is not None and start_positions.shape != (batch,):
        raise ValueError(f"start_positions has shape {shape_of(start_positions)}, expected ({batch},)")


def check_angles(
    freqs: Tensor, channels: int, positions: int | None, names: tuple[str, str] = ("freqs", "t")
) -> None:
    """Check rotary angles.

    Args:
        channels: head dim of what they turn.
        positions: how many are read at least; None if that is not known here.
        names: what the caller calls the angles, and what they turn.
    """
    name, turned = names
    tensor(name, freqs)
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] % 2 or freqs.shape[-1] > channels:
        raise ValueError(
            f"{name} has shape {shape_of(freqs)}; it must be (positions, 1, 1, channels) with an even number of "
            f"channels, at most the {channels} of a head of {turned}"
        )
    if positions is not None and positions > freqs.shape[0]:
        raise ValueError(
            f"{turned} has {positions} positions and {name} angles for {freqs.shape[0]}; make more"
        )


def token_positions(
    t: Tensor,
    tensor_format: str,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor | None:
    """Return the position of each token: (b or 1, s), of packed ones (1, tokens); None if they count from zero in
    each row.
    """
    if tensor_format == "thd":
        assert cu_seqlens is not None
        tokens = packed(t.shape[0], cu_seqlens // cp_size, None)
        assert tokens.sequence is not None and tokens.length is not None
        position, length = tokens.position, tokens.length[tokens.sequence]
        start = None if start_positions is None else start_positions[tokens.sequence]
    elif cp_size == 1 and start_positions is None:
        return None
    else:
        length = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
        position = torch.arange(length, device=t.device)[None]
        start = None if start_positions is None else start_positions[:, None]
    if cp_size > 1:
        chunk = length // 2
        later = position + length * cp_size - (cp_rank + 1) * chunk - chunk
        position = torch.where(position < chunk, position + cp_rank * chunk, later)
    return position if start is None else position + start


def _within(freqs: Tensor, positions: Tensor | None) -> Tensor | None:
    """Return positions that have angles; if there is none, an error, or on a GPU and in graphs the last one."""
    if positions is None:
        return None
    last = freqs.shape[0] - 1
    if host_reads(positions) and positions.numel():
        highest = int(positions.max())
        if highest > last:
            raise ValueError(f"a token has position {highest} and freqs angles for {last + 1}")
    return positions.clamp(0, last)


def angles_of(t: Tensor, freqs: Tensor, positions: Tensor | None, tensor_format: str) -> Tensor:
    """Return the angles of each token, which broadcast to its heads: of sbhd (s, b or 1, 1, d'), and so on."""
    freqs = freqs.detach().float()
    if positions is None:
        return freqs[: t.shape[0]] if tensor_format == "sbhd" else freqs[: t.shape[1]].transpose(0, 1)
    angles = freqs[:, 0][positions]  # (b or 1, s, 1, d')
    if tensor_format == "thd":
        return angles[0]
    return angles.transpose(0, 1) if tensor_format == "sbhd" else angles


def rotate(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs of channels that have an angle.

    Args:
        t: (..., h, d).
        angles: broadcastable, (..., 1, d').
    """
    turned = angles.shape[-1]
    x = t[..., :turned].float()
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        across = torch.stack((-second, first), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        across = torch.cat((-second, first), -1)
    out = (x * angles.cos() + across * angles.sin()).to(t.dtype)
    return out if turned == t.shape[-1] else torch.cat((out, t[..., turned:]), -1)
