"""Fusible operations: build a block from small ones, get fused kernels and one graph."""

from . import basic, fused
from .basic import *  # noqa: F403  (the operations, as its __all__ names them)
from .context import OperationContext
from .contract import FusibleOperation
from .fuser import OperationFuser
from .handover import ScaledOperand
from .linear import Linear
from .op import BasicOperation, CompositeOperation, FusedOperation
from .registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from .sequential import Sequential

__all__ = [
    "BasicOperation",
    "CompositeOperation",
    "FusedOperation",
    "FusibleOperation",
    "Linear",
    "OperationContext",
    "OperationFuser",
    "ScaledOperand",
    "Sequential",
    "basic",
    "fused",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "unregister_fusion",
]
__all__ += basic.__all__
