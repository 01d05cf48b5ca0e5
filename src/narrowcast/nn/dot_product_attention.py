"""``DotProductAttention``: softmax(scale q k^T) v, in every format, with every mask, on PyTorch's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._checks import flags, in_range, positive, shape_of, shown
from .._keywords import refuse_keywords
from ..attention import (
    BIAS_TYPES,
    SOFTMAX_TYPES,
    Lengths,
    MaskRule,
    Masks,
    OptionNames,
    Scores,
    Switches,
    attend,
    check_cached,
    check_not_there,
    check_tensors,
    checked_format,
    context_parallel,
    extended,
    groups_of,
    in_format,
    mask_rule,
    masks_of,
    one_of,
    padding_read,
    separate,
    standard_slopes,
)
from ..functional.collectives import group_name
from ..layers import parameter_device, refuse_script
from ..layers.extra_state import EXTRA_STATE
from ..layers.tensor_parallel import NO_GROUP, Split
from ..state import checkpoint


class DotProductAttention(nn.Module):
    """out = softmax(scale * query key^T, masked) value, for each head.

    Args:
        num_attention_heads: heads of the queries, over all ``tp_size`` ranks.
        kv_channels: head dim, or (head dim of queries and keys, head dim of values).
        num_gqa_groups: heads of keys and values, a divisor of the queries' heads; default: as many.
        attention_dropout: probability that a weight is dropped in training.
        qkv_format: "sbhd" (s, b, h, d), "bshd" (b, s, h, d) or "thd" (tokens, h, d), with concatenated sequences.
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal" (also "padding,causal"), "causal_bottom_right",
            "padding_causal_bottom_right" or "arbitrary".
        window_size: (left, right) visible keys beside the diagonal, -1 for unbounded.
        bottom_right_diagonal: count window, causality and ALiBi from the diagonal that ends at the last query and key;
            None: by the mask type.
        sequence_parallel, tp_group, attention_type, layer_number: accepted, without effect on the computation.
        tp_size: ranks that split the heads.
        get_rng_state_tracker: returns the object whose ``fork()`` surrounds dropout, unless ``sequence_parallel``.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: as in ``set_context_parallel_group``.
        softmax_scale: default 1/sqrt(head dim of the keys).
        softmax_type: "vanilla"; "off-by-one" adds 1 to the denominator; "learnable" adds exp(softmax_offset) of each
            head, a parameter (1, h, 1, 1) in fp32 that starts at 0.
        return_max_logit: also return the largest score of each head (h) in the output's dtype.
        name: for messages.

    The module reads the allowed backends from ``NARROWCAST_FLASH_ATTN``, ``NARROWCAST_FUSED_ATTN``,
    ``NARROWCAST_UNFUSED_ATTN`` and ``NARROWCAST_ALLOW_NONDETERMINISTIC_ALGO`` when it is created.

    Raises:
        ValueError: a size is not positive, groups or ranks do not divide the heads, a name is unknown, or the window is
            not a pair of ints.
        NotImplementedError: context parallelism with another exchange than "all_gather".
    """

    __prepare_scriptable__ = refuse_script
    softmax_offset: Tensor | None
    _option_names = OptionNames()

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(kv_channels, (tuple, list)):
            kv_channels = (kv_channels, kv_channels)
        if len(kv_channels) != 2:
            raise ValueError(
                f"kv_channels is {shown(kv_channels)}; give one size, or those of keys and values"
            )
        of_keys, of_values = kv_channels
        self.kv_channels = (of_keys, of_values)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        positive(num_attention_heads=num_attention_heads, num_gqa_groups=groups, tp_size=tp_size)
        positive(key_channels=self.kv_channels[0], value_channels=self.kv_channels[1])
        if num_attention_heads % groups or num_attention_heads % tp_size or groups % tp_size:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} must be a multiple of num_gqa_groups={groups}, and both of "
                f"tp_size={tp_size}; {groups_of(num_attention_heads, tp_size)}"
            )
        one_of("attention_type", attention_type, ("self", "cross"))
        one_of("softmax_type", softmax_type, SOFTMAX_TYPES)
        flags(sequence_parallel=sequence_parallel, return_max_logit=return_max_logit)
        in_range("attention_dropout", attention_dropout, "it must be in [0, 1)", below=1.0)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads // tp_size, groups // tp_size
        self.attention_dropout, self.attention_type = attention_dropout, attention_type
        self.qkv_format, self.attn_mask_type = checked_format(qkv_format), attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self._rule = mask_rule(attn_mask_type, window_size, bottom_right_diagonal)
        self.softmax_scale = self.kv_channels[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.softmax_type, self.return_max_logit = softmax_type, return_max_logit
        self.layer_number, self.name, self.tp_group, self.tp_size = layer_number, name, tp_group, tp_size
        self.get_rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        self._switches = Switches.from_environment()
        offset = None
        if softmax_type == "learnable":
            shape = (1, self.num_attention_heads, 1, 1)
            offset = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=parameter_device(None)))
        self.register_parameter("softmax_offset", offset)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def extra_repr(self) -> str:
        """Return sizes and mask, as printed by the module."""
        return (
            f"num_attention_heads={self.num_attention_heads}, kv_channels={self.kv_channels}, "
            f"num_gqa_groups={self.num_gqa_groups}, qkv_format={shown(self.qkv_format)}, "
            f"attn_mask_type={shown(self.attn_mask_type)}, softmax_type={shown(self.softmax_type)}"
        )

    def _split_of(self, name: str) -> Split | None:
        """Return how ranks share the offsets of a learnable softmax: each has those of its heads."""
        group = NO_GROUP if self.tp_group is None else group_name(self.tp_group, "tp_group")
        return None if name != "softmax_offset" else Split(1, group, self.tp_size, "tensor")

    def reset_parameters(self) -> None:
        """Begin the offset of a learnable softmax at 0, where it is."""
        if self.softmax_offset is not None:
            nn.init.zeros_(self.softmax_offset)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load without Transformer Engine's quantizer state of FP8 attention."""
        own = {key: tensor for key, tensor in state_dict.items() if key != prefix + EXTRA_STATE}
        super()._load_from_state_dict(own, prefix, *args)

    def set_context_parallel_group(
        self,
        cp_group: Any = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Shard every sequence over the ranks of a group, with gathered keys and values.

        Each rank has two of 2·n chunks: rank r the chunks r and 2n - 1 - r. It works for sbhd and bshd without padding,
        arbitrary masks and biases.

        Args:
            cp_group: the group; None ends the sharding.
            cp_global_ranks, cp_stream: accepted, without effect.
            cp_comm_type: "all_gather".

        Raises:
            NotImplementedError: another exchange.
            TypeError: ``cp_group`` is not a group.
        """
        self._ranks = context_parallel(cp_group, cp_comm_type)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Masks = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: Callable[..., Tensor] | None = None,
        score_mod_bprop: Callable[..., Tensor] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        saves_codes: bool = False,
        **unknown: NoReturn,
    ) -> Any:
        """Compute the attention.

        Args:
            query_layer, key_layer, value_layer: in the format; fp16, bf16 or fp32, all three in one dtype.
            attention_mask: bools, True where masked out: (b, 1, 1, s) for padding types, or a pair of them for queries
                and keys; broadcastable to (b, h, s_q, s_kv) for "arbitrary". Others and thd ignore it with a warning.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal: override the module's own.
            cu_seqlens_q, cu_seqlens_kv: (b + 1) int32 sums of lengths: for thd, and instead of a padding mask.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: for thd, the start of each sequence, if there is padding between;
                ignored with a warning for other formats.
            max_seqlen_q, max_seqlen_kv: longest lengths, for thd; default: the number of tokens.
            checkpoint_core_attention: save only the inputs and recompute the attention in the backward.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
            core_attention_bias: (b or 1, h or 1, s_q, s_kv), added before or after scaling; has a gradient.
            alibi_slopes: (h) or (b, h) in fp32; default: those of ALiBi's paper.
            pad_between_seqs: whether there is padding between sequences; default: if ``cu_seqlens_q_padded`` is given.
            score_mod: ``score_mod(score, b, h, q, kv, **score_mod_tensors)`` of a scaled score, as in FlexAttention;
                PyTorch derives its backward. Not with a bias or dropout.
            qkv_layer: queries, keys and values in one tensor, with a dim of size 3 at ``qkv_interleave_dim`` -3 or -2.
            kv_layer: keys and values in one, with a dim of size 2, beside ``query_layer``.
            inference_params: a KV cache that stores the new keys and values. Queries see all cached tokens of their
                sequence. Needs a padding type, whose diagonal is then bottom right; no gradients flow through it.
            fast_zero_fill: accepted, without effect.
            saves_codes: a kernel of PyTorch keeps int8 codes for its backward.
        Returns:
            The format with heads and head dim in one: (s, b, h d_v), (b, s, h d_v) or (tokens, h d_v); zero if a query
            sees no key. With ``return_max_logit`` a tuple with the largest scores (h), which have no gradient.
        Raises:
            ValueError: shapes, masks, lengths or names do not fit, or no backend is left.
            TypeError: a dtype.
        """
        if unknown:
            refuse_keywords(self, unknown)
        splits = None if num_splits == 1 else num_splits
        bprop = {"score_mod_bprop": score_mod_bprop, "score_mod_bprop_tensors": score_mod_bprop_tensors}
        check_not_there(fp8_output=fp8_output, bf16_backward=bf16_backward, num_splits=splits, **bprop)
        fmt = self.qkv_format if qkv_format is None else checked_format(qkv_format)
        q, k, v = separate(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        check_tensors(q, k, v, fmt, self.num_attention_heads, self.num_gqa_groups, self.kv_channels)
        cached = inference_params is not None
        rule = self._rule_of(attn_mask_type, window_size, True if cached else bottom_right_diagonal)
        outer, tokens, cu_seqlens = fmt, q.shape[0], (cu_seqlens_q, cu_seqlens_kv)
        if cached:
            number = check_cached(rule, self.layer_number, qkv_layer is not None or kv_layer is not None)
            q, k, v, cu_seqlens = extended(inference_params, number, q, k, v, fmt)
            fmt, attention_mask = "bshd", None
        padded = padding_read((cu_seqlens_q_padded, cu_seqlens_kv_padded), fmt)
        masks, pairs = masks_of(attention_mask, rule, q, k, fmt, cu_seqlens, padded, pad_between_seqs)
        bias = (core_attention_bias_type, core_attention_bias, alibi_slopes)
        scores = self._scores(rule, pairs, fmt, bias, score_mod, score_mod_tensors, q.device)
        lengths = Lengths(masks, cu_seqlens, padded, (max_seqlen_q, max_seqlen_kv), cached)
        out, largest = self._core(q, k, v, fmt, scores, lengths, checkpoint_core_attention, saves_codes)
        if cached:
            out = in_format(inference_params, out, outer, tokens)
        return (out, largest) if self.return_max_logit else out

    def _scores(
        self,
        rule: MaskRule,
        masked_out: Tensor | None,
        fmt: str,
        bias: tuple[str, Tensor | None, Tensor | None],
        score_mod: Callable[..., Tensor] | None,
        tensors: dict[str, Tensor] | None,
        device: torch.device,
    ) -> Scores:
        """Return the operations on the scores; ``bias``: its type, the bias, and slopes of ALiBi."""
        scores = Scores(self.softmax_scale, rule, masked_out=masked_out)
        scores.dropout = self.attention_dropout if self.training else 0.0
        scores.sink = self._sink(device)
        scores.bias, scores.slopes = self._bias(*bias, device)
        if fmt == "thd" and scores.bias is not None:
            raise ValueError(
                f"{rule.names.qkv_format}='thd' has no matrix of pairs that core_attention_bias could be added to"
            )
        if score_mod is not None:
            if scores.dropout or bias[0] != "no_bias":
                raise ValueError(
                    "score_mod goes with neither bias, alibi nor dropout; do what they do in score_mod"
                )
            scores.score_mod, scores.tensors = score_mod, tensors or {}
        return scores

    def _core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fmt: str,
        scores: Scores,
        lengths: Lengths,
        recompute: bool,
        saves_codes: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the computation; with ``recompute`` it is done once more in the backward, which then saves nothing."""
        switches, max_logit = self._switches, self.return_max_logit
        saves_codes = saves_codes and not recompute
        tracker = self.get_rng_state_tracker if scores.dropout else None

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            with contextlib.nullcontext() if tracker is None else tracker().fork():
                return attend(q, k, v, fmt, scores, lengths, switches, max_logit, self._ranks, saves_codes)

        if recompute and torch.is_grad_enabled():
            return checkpoint(run, q, k, v, get_rng_state_tracker=tracker)
        return run(q, k, v)

    def _rule_of(
        self, attn_mask_type: str | None, window: tuple[int, int] | None, bottom_right: bool | None
    ) -> MaskRule:
        if attn_mask_type is None and window is None and bottom_right is None:
            return self._rule
        return mask_rule(
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            self.window_size if window is None else window,
            self.bottom_right_diagonal if bottom_right is None else bottom_right,
            names=self._option_names,
        )

    def _bias(
        self, kind: str, bias: Tensor | None, slopes: Tensor | None, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Bias after scaling, and slopes of ALiBi."""
        one_of("core_attention_bias_type", kind, BIAS_TYPES)
        if (bias is None) != (kind in ("no_bias", "alibi")):
            raise ValueError(
                f"core_attention_bias_type is {shown(kind)} and core_attention_bias is "
                f"{'not given' if bias is None else 'given'}; pre_scale_bias and post_scale_bias take one"
            )
        if kind != "alibi":
            if slopes is not None:
                raise ValueError(
                    f"alibi_slopes belong to core_attention_bias_type='alibi', not {shown(kind)}"
                )
            return bias if kind != "pre_scale_bias" or bias is None else bias * self.softmax_scale, None
        heads = self.num_attention_heads
        if slopes is None:
            return None, standard_slopes(heads, device)
        if slopes.shape[-1] != heads or slopes.dim() > 2 or slopes.dtype != torch.float32:
            raise ValueError(
                f"alibi_slopes has shape {shape_of(slopes)} in {slopes.dtype}; give ({heads},) or (batch, {heads}) "
                "in torch.float32"
            )
        return None, slopes

    def _sink(self, device: torch.device) -> Tensor | None:
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.num_attention_heads, dtype=torch.float32, device=device)
        return None if self.softmax_offset is None else self.softmax_offset.flatten()
