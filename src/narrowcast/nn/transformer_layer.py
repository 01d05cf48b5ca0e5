"""``TransformerLayer``: attention and feed-forward block with their residuals, as one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import flags, in_range, is_one_of, shape_of, shown, text
from .._keywords import refuse_keywords
from ..attention import InferenceParams, MaskRule, OptionNames, checked_format, mask_rule
from ..layers import parameter_device
from ..layers.neutral import TransformerOptions, check_neutral
from ..layers.parameters import parameter_dtype
from ..layers.tensor_parallel import ranks_of
from ..recipe import Recipe
from .layernorm_mlp import LayerNormMLP
from .multihead_attention import MultiheadAttention, OfParts, RotaryEmbedding
from .norm import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DropPath(nn.Module):
    """Stochastic depth: in training each sample of the batch is zeroed with a probability, the others scaled up.

    Huang et al., Deep Networks with Stochastic Depth, 2016.

    Args:
        rate: the probability.
        batch_dim: which dim of the input counts the samples; None if samples are packed one after the other, and
            then all are kept or dropped together.
    """

    def __init__(self, rate: float, batch_dim: int | None) -> None:
        super().__init__()
        self.rate, self.batch_dim = rate, batch_dim

    def forward(self, inp: Tensor) -> Tensor:
        """Any shape; the same."""
        if not self.training:
            return inp
        shape = [1] * inp.dim()
        if self.batch_dim is not None:
            shape[self.batch_dim] = inp.shape[self.batch_dim]
        return inp * F.dropout(torch.ones(shape, dtype=inp.dtype, device=inp.device), self.rate)

    def extra_repr(self) -> str:
        """Return options, as printed by the module."""
        return f"rate={self.rate}, batch_dim={self.batch_dim}"


SELF_NAMES = OptionNames("self_attn_mask_type", qkv_format="attn_input_format")
CROSS_NAMES = OptionNames(
    "enc_dec_attn_mask_type", "enc_dec_window_size", "enc_dec_attn_mask", "attn_input_format"
)


class TransformerLayer(OfParts):
    """A Transformer layer: self attention, cross attention in a decoder, and a feed-forward block.

    Norms precede each part, fused with the next GEMM, with residuals around the parts. All GEMMs run under the current
    recipe. Parameters have Transformer Engine's names, so its checkpoints load.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size, activation, activation_params: as in :class:`LayerNormMLP`.
        num_attention_heads, num_gqa_groups, kv_channels, attention_dropout, layer_number, fuse_qkv_params,
            qkv_weight_interleaved, rotary_pos_interleaved, qk_norm_type, qk_norm_eps, qk_norm_before_rope,
            softmax_type: as in :class:`MultiheadAttention`.
        layernorm_epsilon, normalization, zero_centered_gamma: of the norms.
        hidden_dropout: probability of dropping an element that is added to a residual, in training.
        init_method, output_layer_init_method: fill the weights of the inner and of the last GEMM of each part in place;
            default: normal with standard deviation 0.023.
        self_attn_mask_type, window_size, bottom_right_diagonal: of the self attention.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: of the cross attention.
        attn_input_format: "sbhd", "bshd" or "thd": (s, b, hidden_size), (b, s, hidden_size) or (tokens, hidden_size).
        apply_residual_connection_post_layernorm: the residual starts after the norm.
        output_layernorm: the self attention has no norm before it, and the layer's output has one.
        parallel_attention_mlp: attention and feed-forward block read the same input, and their outputs are added.
        layer_type: "encoder", or "decoder" with ``inter_attention``.
        drop_path_rate: probability of dropping a sample's addition to the residual, in training.
        bias: the linear layers have learned biases.
        params_dtype, dtype, device, fuse_wgrad_accumulation, recipe: as in :class:`Linear`.
        name: as in :class:`Linear`, before the names of the parts.
        tp_group, tp_size, sequence_parallel, set_parallel_mode, get_rng_state_tracker: passed to the parts.
        seq_length: with ``sequence_parallel``, the length of the full sequence, to check inputs.
        **options: Transformer Engine's other options, at the values that request nothing.
    Raises:
        ValueError: an unknown ``layer_type``, a rate outside [0, 1), ``parallel_attention_mlp`` with a decoder,
            ``apply_residual_connection_post_layernorm`` or ``output_layernorm``; and the parts' errors.
        NotImplementedError: an option of ``**options`` requests something.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        recipe: Recipe | str | None = None,
        **options: Unpack[TransformerOptions],
    ) -> None:
        super().__init__()
        check_neutral("TransformerLayer", options, TransformerOptions)
        self.layer_type, self.attn_input_format, self.hidden_dropout = (
            layer_type,
            attn_input_format,
            hidden_dropout,
        )
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        text(name=name)
        checked_format(attn_input_format, "attn_input_format")
        self._check_kind(drop_path_rate, apply_residual_connection_post_layernorm)
        ranks = ranks_of(tp_group, tp_size, set_parallel_mode, sequence_parallel)
        tp_group, tp_size, sequence_parallel = ranks
        self.local_length = seq_length // tp_size if sequence_parallel and seq_length else None
        place, kind = parameter_device(device), parameter_dtype(params_dtype, dtype)
        prefix = f"{name}." if name else ""
        shared: dict[str, Any] = dict(
            init_method=init_method, output_layer_init_method=output_layer_init_method, normalization=normalization,
            tp_group=tp_group, tp_size=tp_size, set_parallel_mode=set_parallel_mode, params_dtype=kind, device=place,
            sequence_parallel=sequence_parallel, get_rng_state_tracker=get_rng_state_tracker, bias=bias, recipe=recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, zero_centered_gamma=zero_centered_gamma,
            return_bias=not parallel_attention_mlp, return_layernorm_output=apply_residual_connection_post_layernorm,
        )  # fmt: skip
        attention: dict[str, Any] = dict(
            shared, num_gqa_groups=num_gqa_groups, layer_number=layer_number, qkv_format=attn_input_format,
            fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved, softmax_type=softmax_type,
            rotary_pos_interleaved=rotary_pos_interleaved, qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope, prefix=prefix,
        )  # fmt: skip
        self._add_attention(
            (hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon), attention,
            (self_attn_mask_type, window_size, bottom_right_diagonal),
            (enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal),
        )  # fmt: skip
        shared.update(
            activation=activation, activation_params=activation_params, name=prefix + "layernorm_mlp"
        )
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, layernorm_epsilon, **shared)
        self._add_output(hidden_size, layernorm_epsilon, drop_path_rate, shared)

    def _add_attention(
        self, sizes: tuple[Any, ...], options: dict[str, Any], own: tuple[Any, ...], cross: tuple[Any, ...]
    ) -> None:
        """Self attention, and in a decoder that to the encoder; ``own`` and ``cross`` are their masks."""
        names, prefix = ("attn_mask_type", "window_size", "bottom_right_diagonal"), options.pop("prefix")
        own_rule, cross_rule = mask_rule(*own, names=SELF_NAMES), mask_rule(*cross, names=CROSS_NAMES)
        self.self_attention = MultiheadAttention(
            *sizes,
            input_layernorm=not self.output_layernorm,
            name=f"{prefix}self_attention",
            **dict(zip(names, own)),
            **options,
        )
        _rename_options(self.self_attention, own_rule)
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                *sizes,
                input_layernorm=True,
                attention_type="cross",
                name=f"{prefix}inter_attention",
                **dict(zip(names, cross)),
                **options,
            )
            _rename_options(self.inter_attention, cross_rule)

    def _add_output(self, size: int, eps: float, drop_path_rate: float, shared: dict[str, Any]) -> None:
        """Add a part's output to the residual: stochastic depth, and the norm of the output."""
        batch_dim = {"sbhd": 1, "bshd": 0, "thd": None}[self.attn_input_format]
        self.drop_path = DropPath(drop_path_rate, batch_dim) if drop_path_rate else None
        if self.output_layernorm:
            norm_class = RMSNorm if shared["normalization"] == "RMSNorm" else LayerNorm
            names = ("params_dtype", "device", "zero_centered_gamma", "sequence_parallel")
            self.layernorm = norm_class(size, eps, **{name: shared[name] for name in names})

    def _check_kind(self, drop_path_rate: float, post_layernorm: bool) -> None:
        if not is_one_of(self.layer_type, ("encoder", "decoder")):
            raise ValueError(f"layer_type is {shown(self.layer_type)}; use 'encoder' or 'decoder'")
        flags(apply_residual_connection_post_layernorm=post_layernorm, output_layernorm=self.output_layernorm)
        flags(parallel_attention_mlp=self.parallel_attention_mlp)
        for label, rate in (("hidden_dropout", self.hidden_dropout), ("drop_path_rate", drop_path_rate)):
            in_range(label, rate, "use a probability in [0, 1)", below=1.0)
        if self.parallel_attention_mlp:
            for label, given in (
                ("layer_type='decoder'", self.layer_type == "decoder"),
                ("apply_residual_connection_post_layernorm", post_layernorm),
                ("output_layernorm", self.output_layernorm),
            ):
                if given:
                    raise ValueError(
                        f"parallel_attention_mlp=True does not go with {label}; leave one of them out"
                    )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
        **unknown: NoReturn,
    ) -> Tensor:
        """Apply the layer.

        Args:
            hidden_states: (s, b, hidden_size), (b, s, hidden_size) or (tokens, hidden_size), by ``attn_input_format``.
            attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal, rotary_pos_emb, inference_params:
                of the self attention, as in :class:`MultiheadAttention`; None uses the layer's own.
            encoder_output, enc_dec_*: of a decoder's cross attention.
            is_first_microbatch: as in :class:`Linear`.
            others: of both attentions, as in :class:`DotProductAttention`.
        Returns:
            The shape of ``hidden_states``.
        Raises:
            ValueError: with ``sequence_parallel`` another length than ``seq_length / tp_size``; and the parts' errors.
        """
        if unknown:
            refuse_keywords(self, unknown)
        if self.local_length is not None and hidden_states.shape[0] != self.local_length:
            raise ValueError(
                f"hidden_states has shape {shape_of(hidden_states)}; a rank's share of the sequence is "
                f"seq_length / tp_size = {self.local_length} rows"
            )
        if self.layer_type == "decoder" and encoder_output is None:
            raise ValueError(
                "encoder_output is missing with layer_type='decoder'; pass it, or use layer_type='encoder'"
            )
        both: dict[str, Any] = dict(
            is_first_microbatch=is_first_microbatch, checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, fast_zero_fill=fast_zero_fill,
            pad_between_seqs=pad_between_seqs,
        )  # fmt: skip
        attended, hidden_states = self._attended(
            self.self_attention, hidden_states, attention_mask, attn_mask_type=self_attn_mask_type,
            window_size=window_size, bottom_right_diagonal=bottom_right_diagonal, inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb, **both,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(hidden_states, is_first_microbatch)
            return hidden_states + self._dropped(attended[0] + mlp)
        if self.layer_type == "decoder":
            added, residual = self._addends(attended, hidden_states)
            hidden_states = residual + added
            attended, hidden_states = self._attended(
                self.inter_attention, hidden_states, enc_dec_attn_mask, encoder_output,
                attn_mask_type=enc_dec_attn_mask_type, window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, **both,
            )  # fmt: skip
        added, residual = self._addends(attended, hidden_states)
        # torch.autocast leaves the residual in fp32, and what is added to it, where that has a bias
        one_dtype = attended[0].dtype == added.dtype == residual.dtype
        if one_dtype and isinstance(self.layernorm_mlp, LayerNormMLP):
            *fed, hidden_states = self.layernorm_mlp(added, is_first_microbatch, residual=residual)
        else:
            hidden_states = residual + added
            fed = self.layernorm_mlp(hidden_states, is_first_microbatch)
        added, residual = self._addends(fed, hidden_states)
        out = residual + added
        return self.layernorm(out) if self.output_layernorm else out

    def _attended(
        self, part: nn.Module, hidden_states: Tensor, *given: Any, **named: Any
    ) -> tuple[Sequence[Any], Tensor]:
        """Return an attention's result and its input; the norm's backward adds the input's gradient as a residual."""
        if isinstance(part, MultiheadAttention) and not part.return_layernorm_output:
            *attended, hidden_states = part(hidden_states, *given, return_input=True, **named)
        else:
            attended = part(hidden_states, *given, **named)
        return (attended,) if isinstance(attended, Tensor) else attended, hidden_states

    def _addends(self, part: Sequence[Any], hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a part adds, and what it is added to: the part's input, or the norm's output if the part returned
        it.
        """
        out, bias, *normalized = part
        added = self._dropped(out if bias is None else out + bias)
        return added, normalized[0] if normalized else hidden_states

    def _dropped(self, added: Tensor) -> Tensor:
        """drop_path(dropout(added))"""
        if self.hidden_dropout:
            added = F.dropout(added, self.hidden_dropout, self.training)
        return added if self.drop_path is None else self.drop_path(added)


def _rename_options(attention: MultiheadAttention, rule: MaskRule) -> None:
    """Let an attention's messages call its options as this module does."""
    core = attention.core_attention
    attention._option_names, core._option_names, core._rule = rule.names, rule.names, rule
