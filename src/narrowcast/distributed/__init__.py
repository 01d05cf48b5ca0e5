"""Many ranks: sharding that gathers quantized weights, experts on other ranks than their tokens."""

from .moe_dispatch import MoEDispatch
from .shard import shard
from .shard_receipt import ShardedParameter, ShardReceipt

__all__ = ["MoEDispatch", "ShardReceipt", "ShardedParameter", "shard"]
