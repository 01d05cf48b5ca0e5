"""Quantized tensors: bare storages for the library's own use, ``torch.Tensor`` wrappers for users."""

import torch

from .dequantizing import DequantizedView, DequantizingTensor
from .grouped import (
    GroupedTensor,
    GroupedTensorStorage,
    grouped_layout,
    grouped_storage_of,
    quantize_members,
    rebuild_grouped_tensor,
)
from .named import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP4Tensor,
    MXFP4TensorStorage,
    MXFP6Tensor,
    MXFP6TensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
)
from .quantized_tensor import QuantizedTensor, plain_gradient, rebuild_quantized_tensor, storage_of
from .saving import (
    TensorOrQuantized,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
    saved_tensors,
)
from .sharding import dequantized, local, overwrite_unseen
from .storage import QuantizedTensorStorage
from .transposing import transposed

_WRAPPERS = (
    Float8Tensor,
    Float8BlockwiseQTensor,
    MXFP8Tensor,
    MXFP6Tensor,
    MXFP4Tensor,
    NVFP4Tensor,
    HybridQuantizedTensor,
    IdentityTensor,
)
torch.serialization.add_safe_globals([rebuild_quantized_tensor, rebuild_grouped_tensor, *_WRAPPERS])

__all__ = [
    "DequantizedView",
    "DequantizingTensor",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "GroupedTensor",
    "GroupedTensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP4Tensor",
    "MXFP4TensorStorage",
    "MXFP6Tensor",
    "MXFP6TensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "TensorOrQuantized",
    "dequantized",
    "grouped_layout",
    "grouped_storage_of",
    "local",
    "overwrite_unseen",
    "plain_gradient",
    "prepare_for_saving",
    "quantize_members",
    "restore_from_func_ctx",
    "restore_from_saved",
    "saved_tensors",
    "storage_of",
    "transposed",
]
