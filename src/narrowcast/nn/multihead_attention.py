"""``MultiheadAttention``: projections of a low-precision recipe around attention in high precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .._checks import flags, is_one_of, positive, shape_of, shown, tensor, text
from .._keywords import refuse_keywords
from ..attention import (
    InferenceParams,
    OptionNames,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
    check_angles,
    checked_format,
    groups_of,
    sequence_length,
)
from ..attention.formats import dims_of
from ..layers import parameter_device
from ..layers.neutral import AttentionOptions, check_neutral
from ..layers.parameters import parameter_dtype
from ..layers.tensor_parallel import ranks_of
from ..recipe import Recipe
from .dot_product_attention import DotProductAttention
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .qk_norm import qk_norms

if TYPE_CHECKING:
    from typing_extensions import Unpack

RotaryEmbedding = Tensor | tuple[Tensor, Tensor]


class _Rotation(NamedTuple):
    """Angles of queries and keys, sums of their lengths where tokens are packed, and what both share."""

    angles: tuple[Tensor, Tensor]
    cu_seqlens: tuple[Tensor | None, Tensor | None]
    how: dict[str, Any]


class OfParts(nn.Module):
    """Base of modules whose parameters are those of their children."""

    def reset_parameters(self) -> None:
        """Initialize parameters and state where they are; on the meta device nothing."""
        for child in self.children():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()  # type: ignore[operator]

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give the parts the process group of their tensor parallelism, where it was not known before."""
        for child in self.children():
            if isinstance(child, DotProductAttention):
                child.tp_group = tp_group
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)  # type: ignore[operator]


class MultiheadAttention(OfParts):
    """Multi-head attention: norm and QKV projection, attention, output projection.

    The projections run under the current recipe, the attention itself in the dtype of its operands. Parameters have
    Transformer Engine's names, so its checkpoints load.

    Args:
        hidden_size: size of the last dim of input and output.
        num_attention_heads: heads of the queries.
        kv_channels: channels of a head; default: ``hidden_size / num_attention_heads``.
        attention_dropout: probability of dropping an attention weight in training.
        layernorm_epsilon: added to the variance in the input norm.
        init_method, output_layer_init_method: fill the weights of the QKV and of the output projection in place;
            default: normal with standard deviation 0.023.
        layer_number: number of the layer, from 1; names it in a KV cache.
        attn_mask_type, window_size, bottom_right_diagonal, softmax_type: as in :class:`DotProductAttention`.
        num_gqa_groups: heads of keys and values; default: ``num_attention_heads``.
        fuse_wgrad_accumulation: as in :class:`Linear`; needs ``fuse_qkv_params``.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker: passed to the projections and the attention.
        set_parallel_mode: QKV is column-parallel, the output projection row-parallel.
        params_dtype, dtype: dtype of the parameters; default: torch's default dtype.
        return_bias: return the output projection's bias with the output instead of adding it.
        input_layernorm: normalize the input.
        return_layernorm_output: also return the normalized input, last.
        attention_type: "self", or "cross": keys and values come from ``encoder_output``.
        fuse_qkv_params: one parameter holds queries, keys and values; else three views of one buffer do, which is
            impossible on the meta device and with quantized parameters.
        qkv_weight_interleaved: rows of the fused weight are per group of heads (queries of the group, key, value); else
            (all queries, all keys, all values). Unfused parameters are never interleaved.
        normalization, zero_centered_gamma: of the input norm.
        bias: the projections have learned biases.
        qkv_format: "sbhd", "bshd" or "thd": (s, b, hidden_size), (b, s, hidden_size) or (tokens, hidden_size).
        rotary_pos_interleaved: the rotary embedding pairs neighboring channels instead of halves.
        qk_norm_type: None, "L2Normalization", "RMSNorm" or "LayerNorm", over the channels of each head of queries and
            keys.
        qk_norm_eps: epsilon of this norm.
        qk_norm_before_rope: normalize before the rotary embedding, else after it.
        device: device of the parameters; default: the accelerator, or the CPU without one.
        name: name of the layer in the quantizer roles of a custom recipe, before those of its projections.
        recipe: own recipe of the projections, or its name; an ``autocast`` overrides it.
        **options: Transformer Engine's other options, at the values that request nothing.
    Raises:
        ValueError: sizes are not positive or do not divide, an ``attention_type``, ``qkv_format``, ``qk_norm_type``,
            mask, softmax or normalization is unknown, or ``fuse_wgrad_accumulation`` lacks ``fuse_qkv_params``.
        NotImplementedError: an option of ``**options`` requests something.
    """

    _option_names = OptionNames()

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        recipe: Recipe | str | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        check_neutral("MultiheadAttention", options, AttentionOptions)
        flags(return_layernorm_output=return_layernorm_output, input_layernorm=input_layernorm)
        flags(qkv_weight_interleaved=qkv_weight_interleaved)
        text(name=name)
        _check_kind(attention_type, qkv_format, layer_number, fuse_wgrad_accumulation, fuse_qkv_params)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        ranks = ranks_of(tp_group, tp_size, set_parallel_mode, sequence_parallel)
        tp_group, tp_size, sequence_parallel = ranks
        channels = _head_channels(hidden_size, num_attention_heads, groups, kv_channels, tp_size)
        place, kind = parameter_device(device), parameter_dtype(params_dtype, dtype)
        self.hidden_size, self.kv_channels = hidden_size, channels
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads // tp_size, groups // tp_size
        self.attention_type, self.qkv_format, self.layer_number = attention_type, qkv_format, layer_number
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output and input_layernorm
        self.fuse_qkv_params, self.rotary_pos_interleaved = fuse_qkv_params, rotary_pos_interleaved
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.qk_norm_before_rope = qk_norm_before_rope
        shared: dict[str, Any] = dict(
            tp_group=tp_group, tp_size=tp_size, sequence_parallel=sequence_parallel,
            get_rng_state_tracker=get_rng_state_tracker,
        )  # fmt: skip
        projection: dict[str, Any] = dict(
            shared, bias=bias, params_dtype=kind, device=place, recipe=recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )  # fmt: skip
        norm: dict[str, Any] = dict(
            eps=layernorm_epsilon, normalization=normalization, zero_centered_gamma=zero_centered_gamma
        )
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        prefix = f"{name}." if name else ""
        self._add_inputs(
            prefix, dict(projection, init_method=init_method, parallel_mode=column), norm, num_attention_heads, groups
        )  # fmt: skip
        self.q_norm, self.k_norm = qk_norms(qk_norm_type, channels, qk_norm_eps, kind, place)
        with place:  # where it makes the offsets of its softmax
            self.core_attention = DotProductAttention(
                num_attention_heads, channels, num_gqa_groups=groups, attention_dropout=attention_dropout,
                qkv_format=qkv_format, attn_mask_type=attn_mask_type, window_size=window_size,
                bottom_right_diagonal=bottom_right_diagonal, layer_number=layer_number, attention_type=attention_type,
                softmax_type=softmax_type, **shared,
            )  # fmt: skip
        self.proj = Linear(
            num_attention_heads * channels, hidden_size, init_method=output_layer_init_method, return_bias=return_bias,
            parallel_mode=row, name=f"{prefix}proj", **projection,
        )  # fmt: skip

    def _add_inputs(
        self, prefix: str, column: dict[str, Any], norm: dict[str, Any], heads: int, groups: int
    ) -> None:
        """The projections before the attention, the first of them after the norm if there is one."""
        size, sizes = self.hidden_size, {"query": heads, "key": groups, "value": groups}
        rows = {kind: count * self.kv_channels for kind, count in sizes.items()}
        first = ("query", "key", "value") if self.attention_type == "self" else ("query",)
        label, short = ("qkv", "qkv") if self.attention_type == "self" else ("query", "q")
        split = None if self.fuse_qkv_params else {kind: rows[kind] for kind in first}
        total = sum(rows[kind] for kind in first)
        if self.input_layernorm:
            layer: Any = LayerNormLinear(
                size,
                total,
                return_layernorm_output=self.return_layernorm_output,
                parameters_split=split,
                name=f"{prefix}layernorm_linear_{short}",
                **norm,
                **column,
            )
            self.add_module(f"layernorm_{label}", layer)
        elif self.attention_type == "self":
            layer = self.qkv = Linear(
                size, total, parameters_split=split, name=f"{prefix}linear_qkv", **column
            )
        else:
            layer = self.query_layer = Linear(size, total, name=f"{prefix}linear_q", **column)
        self._note_blocks(layer, first)
        if self.attention_type == "cross":
            split = None if self.fuse_qkv_params else {kind: rows[kind] for kind in ("key", "value")}
            self.key_value = Linear(
                size, 2 * rows["key"], parameters_split=split, name=f"{prefix}linear_kv", **column
            )
            self._note_blocks(self.key_value, ("key", "value"))
        made: Any
        for child, made in self.named_children():
            made._module_name = prefix + child  # roles have Transformer Engine's names

    def _note_blocks(self, layer: Any, kinds: tuple[str, ...]) -> None:
        """Note that the rows of a fused weight are all queries, then all keys, then all values of this rank."""
        if self.fuse_qkv_params and not self.qkv_weight_interleaved:
            heads = {
                "query": self.num_attention_heads,
                "key": self.num_gqa_groups,
                "value": self.num_gqa_groups,
            }
            layer._row_blocks = {"weight": tuple(heads[kind] * self.kv_channels for kind in kinds)}

    def extra_repr(self) -> str:
        """Return sizes, as printed by the module."""
        return (
            f"hidden_size={self.hidden_size}, heads={self.num_attention_heads}, groups={self.num_gqa_groups}, "
            f"kv_channels={self.kv_channels}, {self.attention_type}, {self.qkv_format}"
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: RotaryEmbedding | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        return_input: bool = False,
        **unknown: NoReturn,
    ) -> Any:
        """Apply the layer.

        Args:
            hidden_states: (s, b, hidden_size), (b, s, hidden_size) or (tokens, hidden_size), by ``qkv_format``.
            encoder_output: the same of the encoder, for ``attention_type="cross"``.
            is_first_microbatch: as in :class:`Linear`.
            inference_params: the KV cache; self attention only, with a padding mask and without gradients.
            rotary_pos_emb: fp32 angles (s, 1, 1, d) for queries and keys, or a pair of them.
            return_input: return ``hidden_states``, too, as :class:`LayerNormLinear` does.
            others: as :class:`DotProductAttention` takes them; None is what the layer was made with.
        Returns:
            the shape of ``hidden_states``; with ``return_bias``, ``return_layernorm_output`` and ``return_input`` a
            tuple of output, bias, norm output and ``hidden_states``.
        Raises:
            ValueError: inputs that do not fit the format, ``encoder_output`` in self attention or missing in cross
                attention, a KV cache in cross attention or without ``layer_number``; and those of the parts.
        """
        if unknown:
            refuse_keywords(self, unknown)
        self._check_input(hidden_states, encoder_output, inference_params)
        first, rotation = is_first_microbatch, None
        if rotary_pos_emb is not None:
            of_query = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            of_key = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
            turned = [("hidden_states", hidden_states)] * 2
            if encoder_output is not None:
                turned[1] = "encoder_output", encoder_output
            rotation = self._rotation(rotary_pos_emb, turned, inference_params, of_query, of_key)
        packed = rotation is not None and self._rotates_packed(rotation)
        if self.attention_type == "self":
            query, key, value, beside = self._self_operands(
                hidden_states, first, rotation if packed else None, return_input
            )
        else:
            query, key, value, beside = self._cross_operands(
                hidden_states, encoder_output, first, return_input
            )
        if self.q_norm is not None and self.qk_norm_before_rope:
            query, key = self.q_norm(query), self.k_norm(key)  # type: ignore[misc]
        if rotation is not None and not packed:
            query, key = self._rotated(query, key, rotation)
        if self.q_norm is not None and not self.qk_norm_before_rope:
            query, key = self.q_norm(query), self.k_norm(key)  # type: ignore[misc]
        attend = functools.partial(
            self.core_attention,
            attention_mask=attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill,
            inference_params=inference_params,
            pad_between_seqs=pad_between_seqs,
        )
        others = core_attention_bias, alibi_slopes, inference_params
        context = self._attend(attend, (query, key, value), *others)
        out = self.proj(context, is_first_microbatch=first)
        if not beside:
            return out
        return (*out, *beside) if self.return_bias else (out, *beside)

    def _attend(self, attend: Callable[..., Tensor], parts: tuple[Tensor, ...], *others: object) -> Tensor:
        """Run the attention; it keeps codes for its backward if the recipe asks for them.

        Args:
            parts: queries, keys and values.
            others: what attention with codes does not take, each None if it is not given.
        """
        recipe = self.proj._recipe_in_force() if all(one is None for one in others) else None
        if recipe is None or recipe.saved_activations != "fp8":
            return attend(*parts)
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in parts)
        ours = type(self.core_attention) is DotProductAttention and self.core_attention._ranks is None
        return attend(*parts, saves_codes=True) if trains and ours else attend(*parts)

    def _check_input(
        self, hidden_states: Tensor, encoder_output: Tensor | None, inference_params: Any
    ) -> None:
        rank = 2 if self.qkv_format == "thd" else 3
        tensor("hidden_states", hidden_states)
        if hidden_states.dim() != rank or (encoder_output is not None and encoder_output.dim() != rank):
            other = "" if encoder_output is None else f", encoder_output {shape_of(encoder_output)}"
            raise ValueError(
                f"hidden_states has shape {shape_of(hidden_states)}{other}; with "
                f"{self._option_names.qkv_format}={shown(self.qkv_format)} each must have {rank} dims: "
                f"{dims_of(self.qkv_format.removesuffix('hd'))}, width {self.hidden_size}"
            )
        for name, x in (("hidden_states", hidden_states), ("encoder_output", encoder_output)):
            if x is not None and x.shape[-1] != self.hidden_size:
                raise ValueError(
                    f"{name} has shape {shape_of(x)}; its last dim must be hidden_size={self.hidden_size}"
                )
        cross = self.attention_type == "cross"
        if cross != (encoder_output is not None):
            raise ValueError(
                f"encoder_output is {'missing' if cross else 'given'} with "
                f"attention_type={shown(self.attention_type)}; cross attention needs it, self attention does not "
                "take it"
            )
        if inference_params is not None and (cross or self.layer_number is None):
            raise ValueError(
                "inference_params needs self attention and a layer_number, which names the layer in the cache; "
                f"attention_type is {shown(self.attention_type)}, layer_number is {shown(self.layer_number)}"
            )

    def _heads(self, x: Tensor) -> Tensor:
        """Return (*lead, heads * d) -> (*lead, heads, d)."""
        return x.unflatten(-1, (-1, self.kv_channels))

    def _projected(
        self, norm: str, linear: str, hidden_states: Tensor, first: bool | None, return_input: bool
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return what the first projection returns, of either name, and what is to be returned beside: norm output,
        input.
        """
        projection = getattr(self, norm if self.input_layernorm else linear)
        if return_input and isinstance(projection, LayerNormLinear):
            mixed, *beside = projection(hidden_states, is_first_microbatch=first, return_input=True)
            return mixed, beside
        mixed = projection(hidden_states, is_first_microbatch=first)
        mixed, beside = (mixed[0], mixed[1:]) if self.return_layernorm_output else (mixed, [])
        return mixed, [*beside, hidden_states] if return_input else beside

    def _self_operands(
        self, hidden_states: Tensor, first: bool | None, rotation: _Rotation | None, return_input: bool
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        """Query, key and value, each (*lead, heads, d), and what is returned beside the output.

        Args:
            rotation: of queries and keys that are turned while they are taken apart.
        """
        mixed, beside = self._projected("layernorm_qkv", "qkv", hidden_states, first, return_input)
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        per_group, size = heads // groups, self.kv_channels
        if rotation is not None:
            of_both, (cu_seqlens, _) = rotation.angles, rotation.cu_seqlens
            parts, widths = mixed.unflatten(-1, (groups, -1)), (per_group * size, size, size)
            turned = apply_fused_qkv_rotary_pos_emb(
                parts, *of_both, widths, cu_seqlens=cu_seqlens, by_group=self.qkv_weight_interleaved,
                **rotation.how,
            )  # fmt: skip
            return (*turned, beside)
        if self.qkv_weight_interleaved:
            parts = mixed.unflatten(-1, (groups, per_group + 2, size))
            query, key, value = parts.split((per_group, 1, 1), -2)
            return query.flatten(-3, -2), key.squeeze(-2), value.squeeze(-2), beside
        parts = self._heads(mixed)
        query, key, value = parts.split((heads, groups, groups), -2)
        return query, key, value, beside

    def _cross_operands(
        self, hidden_states: Tensor, encoder_output: Tensor | None, first: bool | None, return_input: bool
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        """Return the same, with keys and values of the encoder's output."""
        mixed = self.key_value(encoder_output, is_first_microbatch=first)
        if self.qkv_weight_interleaved:
            parts = mixed.unflatten(-1, (self.num_gqa_groups, 2 * self.kv_channels))
            key, value = parts.chunk(2, -1)
        else:
            key, value = self._heads(mixed).chunk(2, -2)
        query, beside = self._projected("layernorm_query", "query_layer", hidden_states, first, return_input)
        return self._heads(query), key, value, beside

    def _rotation(
        self,
        rotary_pos_emb: RotaryEmbedding,
        turned: Sequence[tuple[str, Tensor]],
        inference_params: InferenceParams | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
    ) -> _Rotation:
        """Return the rotary angles of queries and keys; with a KV cache, from the cached length on."""
        angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        for freqs, (name, x) in zip(angles, turned):
            length = None if self.qkv_format == "thd" else sequence_length(x, self.qkv_format)
            check_angles(freqs, self.kv_channels, length, ("rotary_pos_emb", name))
        start = None
        if inference_params is not None:
            start = inference_params.get_seqlens_pre_step()
            cu_seqlens_q = cu_seqlens_kv = inference_params.cu_seqlens_q
        if self.qkv_format != "thd":
            cu_seqlens_q = cu_seqlens_kv = None
        how: dict[str, Any] = dict(
            tensor_format=self.qkv_format, start_positions=start, interleaved=self.rotary_pos_interleaved
        )
        return _Rotation(angles, (cu_seqlens_q, cu_seqlens_kv), how)

    def _rotates_packed(self, rotation: _Rotation) -> bool:
        """Return whether queries and keys are turned where the projection has left them."""
        between = self.q_norm is not None and self.qk_norm_before_rope
        one_side = rotation.cu_seqlens[0] is rotation.cu_seqlens[1]
        return self.attention_type == "self" and one_side and not between

    def _rotated(self, query: Tensor, key: Tensor, rotation: _Rotation) -> tuple[Tensor, Tensor]:
        of_query, of_key = (
            apply_rotary_pos_emb(part, angles, cu_seqlens=cu_seqlens, fused=True, **rotation.how)
            for part, angles, cu_seqlens in zip((query, key), rotation.angles, rotation.cu_seqlens)
        )
        return of_query, of_key


def _check_kind(
    attention_type: str, qkv_format: str, layer_number: int | None, fuse_wgrad: bool, fuse_qkv: bool
) -> None:
    if not is_one_of(attention_type, ("self", "cross")):
        raise ValueError(f"attention_type is {shown(attention_type)}; use 'self' or 'cross'")
    checked_format(qkv_format)
    flags(fuse_wgrad_accumulation=fuse_wgrad, fuse_qkv_params=fuse_qkv)
    if layer_number is not None:
        positive(layer_number=layer_number)
    if fuse_wgrad and not fuse_qkv:
        raise ValueError(
            "fuse_wgrad_accumulation=True needs fuse_qkv_params=True: no parameter has the main_grad of the whole QKV "
            "weight"
        )


def _head_channels(hidden_size: int, heads: int, groups: int, kv_channels: int | None, tp_size: int) -> int:
    """Return channels of a head.

    Raises:
        ValueError: sizes that are not positive, or that do not divide each other.
    """
    positive(hidden_size=hidden_size, num_attention_heads=heads, num_gqa_groups=groups, tp_size=tp_size)
    if kv_channels is None:
        if hidden_size % heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not a multiple of num_attention_heads={heads}; change one of them, or "
                "give kv_channels, the width of a head"
            )
        kv_channels = hidden_size // heads
    positive(kv_channels=kv_channels)
    if heads % groups:
        raise ValueError(
            f"num_attention_heads={heads} is not a multiple of num_gqa_groups={groups}; {groups_of(heads, tp_size)}"
        )
    if heads % tp_size or groups % tp_size:
        raise ValueError(
            f"num_attention_heads={heads} and num_gqa_groups={groups} must be multiples of tp_size={tp_size}; "
            f"{groups_of(heads, tp_size)}"
        )
    return kv_channels
