"""Mixtures of experts: which experts a token goes to, and the tokens' way to them and back."""

from .balance import (
    HEALTH,
    moe_capacity,
    moe_drop_tokens,
    moe_router_logits,
    moe_update_expert_bias_,
    moe_z_loss,
    router_health,
)
from .permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_unpermute,
)
from .router import (
    QBHistogramMode,
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from .sorting import moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs

__all__ = [
    "HEALTH",
    "QBHistogramMode",
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "moe_capacity",
    "moe_drop_tokens",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_router_logits",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "moe_update_expert_bias_",
    "moe_z_loss",
    "router_health",
]
