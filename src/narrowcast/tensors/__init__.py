"""Quantized tensors: bare storages for the library's own use, ``torch.Tensor`` wrappers for users."""

import torch

from . import named
from .block_scaled_rows import coded_rows, has_coded_rows, is_coded
from .dequantizing import DequantizedView, DequantizingTensor, plain
from .grouped import (
    GroupedTensor,
    GroupedTensorStorage,
    grouped_layout,
    grouped_storage_of,
    grouped_tensor_of,
    join_members,
    quantize_members,
    rebuild_grouped_tensor,
)
from .named import *  # noqa: F403  (the formats' storages and tensors, as its __all__ names them)
from .quantized_tensor import QuantizedTensor, plain_gradient, rebuild_quantized_tensor, storage_of
from .saving import (
    TensorOrQuantized,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
    saved_tensors,
)
from .sharding import dequantized, local, overwrite_unseen, spread_like
from .storage import QuantizedTensorStorage
from .transposing import transposed

_CLASSES = [getattr(named, name) for name in named.__all__]
_WRAPPERS = [cls for cls in _CLASSES if issubclass(cls, QuantizedTensor)]
torch.serialization.add_safe_globals(
    [rebuild_quantized_tensor, rebuild_grouped_tensor, DequantizedView, *_WRAPPERS]
)

__all__ = [
    "DequantizedView",
    "DequantizingTensor",
    "GroupedTensor",
    "GroupedTensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "TensorOrQuantized",
    "coded_rows",
    "dequantized",
    "grouped_layout",
    "grouped_storage_of",
    "grouped_tensor_of",
    "has_coded_rows",
    "is_coded",
    "join_members",
    "local",
    "overwrite_unseen",
    "plain",
    "plain_gradient",
    "prepare_for_saving",
    "quantize_members",
    "restore_from_func_ctx",
    "restore_from_saved",
    "saved_tensors",
    "spread_like",
    "storage_of",
    "transposed",
]
__all__ += named.__all__
