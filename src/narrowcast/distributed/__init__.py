"""Many ranks: sharding that gathers quantized weights, tensor-parallel styles, experts on other ranks."""

import importlib
from typing import TYPE_CHECKING, Any

from .. import _keywords
from ..layers.described import ParameterRecord, describe_parameter, describe_parameters
from .clip import clip_grad_norm_
from .master_weights import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from .moe_dispatch import MoEDispatch
from .shard import shard
from .shard_receipt import ShardedParameter, ShardReceipt
from .wire_receipt import WireCost, WireReceipt

if TYPE_CHECKING:
    from .checkpoint import load_checkpoint, save_checkpoint
    from .expert_sharding import expert_parallel
    from .micro_pipeline import async_tensor_parallel
    from .parallel_styles import ColwiseParallel, RowwiseParallel, SequenceParallel

_STYLES = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel")
_LATER = {
    "async_tensor_parallel": "micro_pipeline",
    "expert_parallel": "expert_sharding",
    **dict.fromkeys(("load_checkpoint", "save_checkpoint"), "checkpoint"),
    **dict.fromkeys(_STYLES, "parallel_styles"),
}

__all__ = [
    "ColwiseParallel",
    "MoEDispatch",
    "ParameterRecord",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardReceipt",
    "ShardedParameter",
    "WireCost",
    "WireReceipt",
    "async_tensor_parallel",
    "cast_master_weights_to_fp8",
    "clip_grad_norm_",
    "describe_parameter",
    "describe_parameters",
    "expert_parallel",
    "load_checkpoint",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
    "save_checkpoint",
    "shard",
]


def __getattr__(name: str) -> Any:
    """Import on demand the parts that need PyTorch's DTensor or compiler, which take long to import."""
    if name not in _LATER:
        _keywords.refuse_attribute(__name__, name)
    value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = _keywords.checked(name, value)
    return globals()[name]
