"""Attention to a KV cache: the new tokens are kept, and their queries see all that is kept of their sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import shown
from .._tracing import can_remember, warn
from .kv_cache import InferenceParams
from .masks import MaskRule


def check_cached(rule: MaskRule, layer_number: int | None, packed_inputs: bool) -> int:
    """Check a call with a KV cache, and return the number of its layer.

    Raises:
        ValueError: no padding mask, inputs packed in one tensor, or a layer without a number.
    """
    if not rule.padding:
        raise ValueError(
            f"{rule.names.attn_mask_type} is {shown(rule.name)} with inference_params; sequences in a KV cache "
            "differ in length, use 'padding_causal' or 'padding'"
        )
    if packed_inputs:
        raise ValueError(
            "qkv_layer or kv_layer with inference_params; give query_layer, key_layer and value_layer"
        )
    if layer_number is None:
        raise ValueError("inference_params needs a layer_number, which names the layer in the cache")
    return layer_number


def extended(
    params: InferenceParams, layer_number: int, q: Tensor, k: Tensor, v: Tensor, qkv_format: str
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Keep new keys and values, and return what attention is computed of; it has no gradients.

    Args:
        q, k, v: in ``qkv_format``, of the new tokens.
    Returns:
        queries (batch, s, h, d), keys and values (batch, tokens, groups, d) of the whole sequences, the sums
        of the lengths of both.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        warn(
            "inference_params with gradients enabled: none flow through attention with a KV cache; run under "
            "torch.no_grad() or inference_mode()"
        )
        q, k, v = q.detach(), k.detach(), v.detach()
    if can_remember() and not params.has_layer(layer_number):
        params.allocate_memory(layer_number, k, v)
    keys, values, pages = params.step(layer_number, k, v, qkv_format)
    if pages is not None:
        keys, values = params.convert_paged_to_nonpaged(layer_number)
    if qkv_format == "sbhd":
        q = q.transpose(0, 1)
    elif qkv_format == "thd":
        q = q[params.token_of(q.shape[0])]
    return q, keys.to(q.dtype), values.to(q.dtype), (params.cu_seqlens_q, params.cu_seqlens_kv)


def in_format(params: InferenceParams, out: Tensor, qkv_format: str, tokens: int) -> Tensor:
    """Return the output (batch, s, heads * d) in a format, with zeros if there is no token."""
    if qkv_format == "sbhd":
        return out.transpose(0, 1)
    if qkv_format == "bshd":
        return out
    row, place, valid = params.places(tokens, True)
    return out[row, place.clamp(max=out.shape[1] - 1)].masked_fill(~valid[:, None], 0.0)
