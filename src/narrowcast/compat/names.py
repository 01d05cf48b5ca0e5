"""Table of Transformer Engine's modules and this library's names in each."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .. import (
    _device,
    attention,
    custom_recipes,
    distributed,
    graphs,
    losses,
    moe,
    nn,
    offload,
    ops,
    optimizers,
    quantizers,
    recipe,
    roles,
    state,
    tensors,
)
from ..formats import DType
from ..quantizers.arguments import TORCH_DTYPES
from . import base, collectives, context_parallel, dtypes, global_state, graph, recompute
from .onnx import onnx_export

Names = dict[str, Any]


def _of(room: ModuleType, *names: str) -> Names:
    return {name: getattr(room, name) for name in names}


_RECIPE = _of(
    recipe,
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
)
_LINEAR = _of(nn, "GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear")
_MODULE = {**_LINEAR, **_of(nn, "Fp8Padding", "Fp8Unpadding", "LayerNorm", "RMSNorm")}
_BASE = _of(base, "TransformerEngineBaseModule")
_USERBUFFERS = _of(base, "is_ub_initialized", "using_cublasmp_backend")
_ROPE = _of(attention, "RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb")
_ATTENTION = {
    **_ROPE,
    **_of(nn, "DotProductAttention", "MultiheadAttention"),
    **_of(attention, "InferenceParams"),
}
_AVAILABLE = _of(
    _device, "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available"
)
_DEVICE = _of(_device, "get_cudnn_version", "get_device_compute_capability", "is_bf16_available")
_GLU = _of(ops, "deinterleave_glu_tensor", "interleave_glu_tensor")
_RECIPE_STATES = (
    "RecipeState",
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
)
_AUTOCAST = _of(
    state, "autocast", "fp8_autocast", "fp8_model_init", "get_default_recipe", "quantized_model_init"
)
_QUANTIZATION = {
    **_RECIPE,
    **_AVAILABLE,
    **_of(_device, "get_device_compute_capability"),
    **_of(state, *_RECIPE_STATES),
    **_AUTOCAST,
    "get_default_fp8_recipe": state.get_default_recipe,
    **_of(recipe, "DelayedScalingRequest", "QuantizerRequest", "get_align_size_for_quantization"),
    **_of(roles, "QuantizerRole"),
    **_of(dtypes, "get_fp4_te_dtype", "get_fp8_max", "get_fp8_te_dtype", "get_fp8_torch_dtype"),
    **_of(
        global_state,
        "FP8GlobalStateManager",
        "check_fp8_block_scaling_support",
        "check_fp8_support",
        "check_mxfp8_support",
        "check_nvfp4_support",
    ),
}
_DISTRIBUTED = {
    **_of(
        state,
        "CudaRNGStatesTracker",
        "checkpoint",
        "in_fp8_activation_recompute_phase",
        "is_fp8_activation_recompute_enabled",
    ),
    **_of(recompute, "activation_recompute_forward"),
    **_of(
        collectives,
        "allreduce",
        "gather_along_first_dim",
        "get_distributed_rank",
        "get_distributed_world_size",
        "reduce_scatter_along_first_dim",
        "set_tensor_model_parallel_attributes",
    ),
}
_MASTER_WEIGHTS = _of(
    distributed,
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
)
_FUSED = _of(
    ops.fused,
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
)
_OFFLOAD = _of(offload, "ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload")
_PERMUTATION = _of(
    moe,
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
)
_ROUTER = _of(
    moe,
    "QBHistogramMode",
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
)
_LOSS = _of(losses, "parallel_cross_entropy")
_GRAPH = _of(graphs, "make_graphed_callables")
_EXPORT = {"onnx_export": onnx_export, "is_in_onnx_export_mode": lambda: False}
_SAVING = _of(tensors, "prepare_for_saving", "restore_from_func_ctx", "restore_from_saved")
_QUANTIZED = {
    **_of(tensors, "QuantizedTensor", "QuantizedTensorStorage"),
    **_of(quantizers, "Quantizer"),
    **_SAVING,
}
_FLOAT8 = {
    **_of(tensors, "Float8Tensor", "Float8TensorStorage"),
    **_of(quantizers, "Float8CurrentScalingQuantizer", "Float8Quantizer"),
}
_MXFP8 = {**_of(tensors, "MXFP8Tensor", "MXFP8TensorStorage"), **_of(quantizers, "MXFP8Quantizer")}
_NVFP4 = {**_of(tensors, "NVFP4Tensor", "NVFP4TensorStorage"), **_of(quantizers, "NVFP4Quantizer")}
_BLOCK = {
    **_of(tensors, "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"),
    **_of(quantizers, "Float8BlockQuantizer"),
}
_HYBRID = {
    **_of(tensors, "HybridQuantizedTensor", "HybridQuantizedTensorStorage"),
    **_of(quantizers, "HybridQuantizer"),
}
_IDENTITY = {
    **_of(tensors, "IdentityTensor", "IdentityTensorStorage"),
    **_of(quantizers, "IdentityQuantizer"),
}
_GROUPED = _of(tensors, "GroupedTensor", "GroupedTensorStorage")
_TENSOR = {**_QUANTIZED, **_FLOAT8, **_MXFP8, **_NVFP4, **_BLOCK, **_HYBRID, **_IDENTITY, **_GROUPED}
_STORAGE = {name: value for name, value in _TENSOR.items() if name.endswith("Storage")}
_CONTEXT_PARALLEL = _of(
    context_parallel,
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "pad_thd_sequences_for_cp",
)
_CONSTANTS = {
    "DType": DType,
    "TE_DType": dict(TORCH_DTYPES),
    "TE_DType_To_Torch": dict(dtypes.TE_DTYPE_TO_TORCH),
    "AttnMaskTypes": attention.MASK_TYPES,
    "AttnBiasTypes": attention.BIAS_TYPES,
    "GemmParallelModes": ("row", "column", None),
    "MXFP8_BLOCK_SCALING_SIZE": 32,
    "NVFP4_BLOCK_SCALING_SIZE": 16,
    "dist_group_type": torch.distributed.ProcessGroup if torch.distributed.is_available() else object,
}
_FACTORIES = _of(
    custom_recipes,
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
)
_MIXTURES = _of(
    custom_recipes,
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
)
_BY_LAYER = _of(custom_recipes, "nvfp4_linear_mxfp8_grouped_linear_factory")
_OPS = {**_of(ops, *(name for name in ops.__all__ if name not in ("basic", "fused"))), **_FUSED}
_FUSIBLE = _of(ops, "BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext")
_FUSIONS = _of(
    ops,
    "OperationFuser",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
)
_PYTORCH = {
    **_MODULE,
    **_ATTENTION,
    **_of(nn, "TransformerLayer"),
    **_PERMUTATION,
    **_AVAILABLE,
    **_DEVICE,
    **_GLU,
    **_AUTOCAST,
    **_of(roles, "QuantizerRole"),
    **_of(recipe, "DelayedScalingRequest", "QuantizerRequest"),
    **_of(state, "CudaRNGStatesTracker", "checkpoint"),
    **_GRAPH,
    **_OFFLOAD,
    **_LOSS,
    "onnx_export": onnx_export,
    **_TENSOR,
    "DType": DType,
}

# what stands in transformer_engine.<key>; every one is a package, so that a name it lacks can say why
MODULES: dict[str, Names] = {
    "": _of(collectives, "is_nccl_ep_available"),
    "common": {},
    "common.recipe": _RECIPE,
    "pytorch": _PYTORCH,
    "pytorch.attention": _ATTENTION,
    "pytorch.attention.dot_product_attention": _of(nn, "DotProductAttention"),
    "pytorch.attention.dot_product_attention.context_parallel": _CONTEXT_PARALLEL,
    "pytorch.attention.dot_product_attention.dot_product_attention": _of(nn, "DotProductAttention"),
    "pytorch.attention.inference": _of(attention, "InferenceParams", "KVCacheManager"),
    "pytorch.attention.multi_head_attention": _of(nn, "MultiheadAttention"),
    "pytorch.attention.rope": _ROPE,
    "pytorch.constants": _CONSTANTS,
    "pytorch.cpu_offload": _OFFLOAD,
    "pytorch.cross_entropy": _LOSS,
    "pytorch.custom_recipes": {**_FACTORIES, **_MIXTURES, **_BY_LAYER},
    "pytorch.custom_recipes.quantization_factory_examples": _BY_LAYER,
    "pytorch.custom_recipes.quantizer_factories": _FACTORIES,
    "pytorch.custom_recipes.quantizer_factory_zoo": {**_MIXTURES, **_BY_LAYER},
    "pytorch.distributed": _DISTRIBUTED,
    "pytorch.export": _EXPORT,
    "pytorch.float8_tensor": _FLOAT8,
    "pytorch.fp8": _QUANTIZATION,
    "pytorch.graph": {
        **_GRAPH,
        **_of(graph, "restore_fp8_tensors", "save_fp8_tensors", "set_capture_end", "set_capture_start"),
    },
    "pytorch.module": {**_MODULE, **_BASE},
    "pytorch.module.base": {**_BASE, **_USERBUFFERS},
    "pytorch.module.fp8_padding": _of(nn, "Fp8Padding"),
    "pytorch.module.fp8_unpadding": _of(nn, "Fp8Unpadding"),
    "pytorch.module.grouped_linear": _of(nn, "GroupedLinear"),
    "pytorch.module.layernorm": _of(nn, "LayerNorm"),
    "pytorch.module.layernorm_linear": _of(nn, "LayerNormLinear"),
    "pytorch.module.layernorm_mlp": _of(nn, "LayerNormMLP"),
    "pytorch.module.linear": _of(nn, "Linear"),
    "pytorch.module.rmsnorm": _of(nn, "RMSNorm"),
    "pytorch.ops": _OPS,
    "pytorch.ops.basic": _of(ops.basic, *ops.basic.__all__),
    "pytorch.ops.basic.basic_linear": _of(ops, "BasicLinear"),
    "pytorch.ops.basic.bias": _of(ops, "Bias"),
    "pytorch.ops.basic.l2normalization": _of(ops, "L2Normalization"),
    "pytorch.ops.fused": {**_FUSED, **_of(ops, "register_backward_fusion", "register_forward_fusion")},
    "pytorch.ops.fuser": _FUSIONS,
    "pytorch.ops.linear": _of(ops, "Linear"),
    "pytorch.ops.op": _FUSIBLE,
    "pytorch.ops.sequential": _of(ops, "Sequential"),
    "pytorch.optimizers": _of(optimizers, *optimizers.__all__),
    "pytorch.optimizers.fused_adam": _of(optimizers, "FusedAdam"),
    "pytorch.optimizers.fused_sgd": _of(optimizers, "FusedSGD"),
    "pytorch.optimizers.multi_tensor_apply": _of(optimizers, "MultiTensorApply", "multi_tensor_applier"),
    "pytorch.permutation": _PERMUTATION,
    "pytorch.quantization": _QUANTIZATION,
    "pytorch.quantized_tensor": _QUANTIZED,
    "pytorch.router": _ROUTER,
    "pytorch.tensor": _TENSOR,
    "pytorch.tensor.float8_blockwise_tensor": _BLOCK,
    "pytorch.tensor.float8_tensor": _FLOAT8,
    "pytorch.tensor.grouped_tensor": _GROUPED,
    "pytorch.tensor.hybrid_tensor": _HYBRID,
    "pytorch.tensor.identity_tensor": _IDENTITY,
    "pytorch.tensor.mxfp8_tensor": _MXFP8,
    "pytorch.tensor.nvfp4_tensor": _NVFP4,
    "pytorch.tensor.quantized_tensor": _QUANTIZED,
    "pytorch.tensor.storage": _STORAGE,
    "pytorch.tensor.storage.float8_blockwise_tensor_storage": _of(tensors, "Float8BlockwiseQTensorStorage"),
    "pytorch.tensor.storage.float8_tensor_storage": _of(tensors, "Float8TensorStorage"),
    "pytorch.tensor.storage.hybrid_tensor_storage": _of(tensors, "HybridQuantizedTensorStorage"),
    "pytorch.tensor.storage.identity_tensor_storage": _of(tensors, "IdentityTensorStorage"),
    "pytorch.tensor.storage.grouped_tensor_storage": _of(tensors, "GroupedTensorStorage"),
    "pytorch.tensor.storage.mxfp8_tensor_storage": _of(tensors, "MXFP8TensorStorage"),
    "pytorch.tensor.storage.nvfp4_tensor_storage": _of(tensors, "NVFP4TensorStorage"),
    "pytorch.tensor.utils": _MASTER_WEIGHTS,
    "pytorch.transformer": _of(nn, "TransformerLayer"),
    "pytorch.utils": {**_DEVICE, **_GLU, **_of(dtypes, "canonicalize_dtype"), **_of(graph, "make_weak_ref")},
}

# the C++ extension works on raw buffers: only the names that users of its layers import
EXTENSION_NAMES: Names = {"DType": DType}
