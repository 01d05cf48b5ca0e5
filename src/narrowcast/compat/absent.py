"""Transformer Engine's names that are absent, each with its replacement or the reason."""

from __future__ import annotations

PAGE = 'the page "From Transformer Engine"'
EXTENSION = "transformer_engine_torch"  # Transformer Engine's C++ extension, a top-level module

_USERBUFFERS = "there are no userbuffers; leave the ub_* options out"
_MULTI_TENSOR = "use torch.optim's fused optimizers or narrowcast.optimizers.FusedAdam"
_NEWTON_SCHULZ = "use torch.optim.Muon"
_SCALES = (
    "layers own their scales, which optimizer.step() renews; use narrowcast.reduce_delayed_scaling, "
    "narrowcast.renew_delayed_scaling"
)
_CPP = "it belongs to Transformer Engine's C++ extension; narrowcast's operators are torch.ops.narrowcast.*"
_OWN_GEMM = "a quantizer has no GEMM of its own; derive one whose codes are decoded for the GEMM"
_DPA = "attention runs in high precision; use the factories of narrowcast.custom_recipes for the layers"
_BACKENDS = "use narrowcast.DotProductAttention; NVTE_FLASH_ATTN and the others like it choose its backend"
_ATTENTION = "only softmax attention is here; use another library's module"
_EXPERTS = "use narrowcast.distributed.MoEDispatch, which works over torch.distributed"
_GROUPED = "grouped layers take every recipe and dtype; leave the check out"
_FUSED_MLP = "narrowcast.ops.Sequential fuses a grouped MLP itself; explain(recipe) shows how"
_CACHE = "use narrowcast.InferenceParams(is_paged=...)"

# from names to what the error says behind "is not there"
ABSENT: dict[str, str] = {
    "initialize_ub": _USERBUFFERS,
    "destroy_ub": _USERBUFFERS,
    "get_ub": _USERBUFFERS,
    "UserBufferQuantizationMode": _USERBUFFERS,
    "UserbuffersForwardLinear": _USERBUFFERS,
    "UserbuffersBackwardLinear": _USERBUFFERS,
    "multi_tensor_adam_fp8": _MULTI_TENSOR,
    "newton_schulz": _NEWTON_SCHULZ,
    "newton_schulz_tp": _NEWTON_SCHULZ,
    "CusolverMpCtx": _NEWTON_SCHULZ,
    "GatedDeltaNetAttention": _ATTENTION,
    "GatedDeltaNet2Attention": _ATTENTION,
    "GatedDeltaProductAttention": _ATTENTION,
    "linear_attention": _ATTENTION,
    "FusedMLAQUpProjFunction": _ATTENTION,
    "FusedMLAQUpProjRopeQuant": _ATTENTION,
    "ScaledTanhSReLU": "use narrowcast.ops.ScaledSReLU, which does not bound its result, or an operation of your own",
    "GroupedMLP_CuTeGEMMGLU": _FUSED_MLP,
    "GroupedMLP_CuTeGEMMUnary": _FUSED_MLP,
    "is_module_grouped_tensor_path_supported": _GROUPED,
    "is_op_fuser_grouped_tensor_path_supported": _GROUPED,
    "require_nccl_ep": _EXPERTS,
    "ep": _EXPERTS,
    "mark_qb_bin_bounds_validated": "bounds on a GPU are not checked; leave the call out",
    "NonPagedKVCacheManager": _CACHE,
    "PagedKVCacheManager": _CACHE,
    "distributed_weight": "use narrowcast.distributed.shard; a weight's own gathering has no place in a layer",
    "dynamo": "every layer and operation compiles with fullgraph=True as it is",
    "triton": "narrowcast's kernels are torch.ops.narrowcast.*; hyper-connections are not here",
    "CPLoadBalancingStrategy": "DotProductAttention.set_context_parallel_group shares sequences by all-gather",
    "get_workspace": _CPP,
    "get_dummy_wgrad": _CPP,
    "prepare_te_modules_for_fsdp": "narrowcast.distributed.shard takes layers as they are; saved activations are not "
    'scattered, give the recipe saved_activations="fp8"',
    "symmetric_all_reduce": "use torch.distributed.all_reduce",
    "custom_gemm": _OWN_GEMM,
    "gemm": _OWN_GEMM,
    "GEMMType": _OWN_GEMM,
    "nvfp4_linear_fp8_dpa_factory": _DPA,
    "nvfp4_linear_mxfp8_dpa_factory": _DPA,
    "FusedRoPEFunc": "use narrowcast.apply_rotary_pos_emb",
    "te_translation_table": "quantized layers have no ONNX form; use narrowcast.export",
    "FP8GlobalState": _SCALES,
    "quantization_state": _SCALES,
    "get_meta_tensor_key": _SCALES,
    "get_fwd_bwd_key": _SCALES,
    "get_unique_autocast_key": _SCALES,
    "add_fp8_tensors_to_global_buffer": _SCALES,
    "is_graph_capturing": "ask torch.cuda.is_current_stream_capturing()",
    "set_skip_fp8_weight_update_tensor": "use narrowcast.make_graphed_callables(cache_quantized_params=True)",
    "get_skip_fp8_weight_update_tensor": "use narrowcast.make_graphed_callables(cache_quantized_params=True)",
    "start_offload": "use narrowcast.get_cpu_offload_context, which starts the copies itself",
    "set_offloading_param": "use narrowcast.get_cpu_offload_context; narrowcast.mark_not_offload excludes tensors",
    "mark_activation_offload": "use narrowcast.get_cpu_offload_context; narrowcast.mark_not_offload excludes tensors",
    "backends": _BACKENDS,
    "FusedAttention": _BACKENDS,
    "FlashAttention": _BACKENDS,
    "UnfusedDotProductAttention": _BACKENDS,
    "autocast_enter": "use narrowcast.autocast",
    "autocast_exit": "use narrowcast.autocast",
    "debug": "use narrowcast.watch and narrowcast.bisect",
    "cpp_extensions": _CPP,
    "te_onnx_extensions": "quantized layers have no ONNX form; use narrowcast.export",
    "jax": "narrowcast is for PyTorch",
}


def why_absent(owner: str, name: str) -> str:
    """Return the text of the error for a name that ``owner`` does not have."""
    unknown = _CPP if owner == EXTENSION else "no name of narrowcast's answers to it"
    reason = ABSENT.get(name, unknown)
    return f"{owner}.{name} is not there under narrowcast: {reason} ({PAGE} lists every name)"
