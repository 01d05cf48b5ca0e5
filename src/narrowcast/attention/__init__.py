"""Attention: formats, masks, the choice of a backend from static facts, rotary embeddings, KV caches, saved codes.

What modules add to it, parameters and options, is in ``nn``.
"""

from .arguments import (
    BIAS_TYPES,
    SOFTMAX_TYPES,
    Masks,
    check_not_there,
    groups_of,
    masks_of,
    one_of,
    padding_read,
    separate,
)
from .backends import Switches
from .cached import check_cached, extended, in_format
from .context_parallel import context_parallel
from .core import Lengths, attend
from .formats import FORMATS, check_tensors, checked_format, sequence_length
from .kv_cache import InferenceParams, KVCacheManager
from .masks import MASK_TYPES, MaskRule, OptionNames, mask_rule, standard_slopes
from .rope import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
    check_angles,
)
from .scores import Scores

__all__ = [
    "BIAS_TYPES",
    "FORMATS",
    "MASK_TYPES",
    "SOFTMAX_TYPES",
    "InferenceParams",
    "KVCacheManager",
    "Lengths",
    "MaskRule",
    "Masks",
    "OptionNames",
    "RotaryPositionEmbedding",
    "Scores",
    "Switches",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    "attend",
    "check_angles",
    "check_cached",
    "check_not_there",
    "check_tensors",
    "checked_format",
    "context_parallel",
    "extended",
    "groups_of",
    "in_format",
    "mask_rule",
    "masks_of",
    "one_of",
    "padding_read",
    "separate",
    "sequence_length",
    "standard_slopes",
]
