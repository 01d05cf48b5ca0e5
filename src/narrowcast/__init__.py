"""narrowcast: low-precision training for PyTorch that compiles."""

from . import custom_recipes, dynamo, nn, recipe, state
from ._device import (
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from ._version import __version__
from .formats import DType
from .nn import Linear
from .quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .recipe import DelayedScalingRequest, QuantizerRequest
from .roles import QuantizerRole
from .state import (
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    quantized_model_init,
)
from .tensors import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)

__all__ = [
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "__version__",
    "autocast",
    "checkpoint",
    "custom_recipes",
    "dynamo",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "nn",
    "prepare_for_saving",
    "quantized_model_init",
    "recipe",
    "restore_from_func_ctx",
    "restore_from_saved",
    "state",
]
