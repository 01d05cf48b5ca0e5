"""Many ranks: sharding that gathers quantized weights, tensor-parallel styles, experts on other ranks."""

from typing import TYPE_CHECKING, Any

from .checkpoint import load_checkpoint, save_checkpoint
from .moe_dispatch import MoEDispatch
from .shard import shard
from .shard_receipt import ShardedParameter, ShardReceipt

if TYPE_CHECKING:
    from .parallel_styles import ColwiseParallel, RowwiseParallel, SequenceParallel

_STYLES = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel")

__all__ = [
    "ColwiseParallel",
    "MoEDispatch",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardReceipt",
    "ShardedParameter",
    "load_checkpoint",
    "save_checkpoint",
    "shard",
]


def __getattr__(name: str) -> Any:
    """The styles, when they are asked for: PyTorch's DTensor takes long to import."""
    if name not in _STYLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import parallel_styles

    return getattr(parallel_styles, name)
