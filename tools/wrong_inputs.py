"""Call public functions with wrong inputs, and list crashes and messages that name neither the value nor the remedy.

    python tools/wrong_inputs.py                # everything
    python tools/wrong_inputs.py Linear recipe  # names that contain a word

Each call is a valid one of ``calls()`` with one argument replaced by a wrong value. A crash is an error that the
library did not raise itself. What is accepted is not listed: many arguments take None or a number of another type.
What needs a GPU (``make_graphed_callables``) or a process group (``distributed.shard``) is not asked.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import narrowcast as nc
from narrowcast._checks import shown

SOURCE = str(Path(nc.__file__).parent)
WRONG: tuple[Any, ...] = (
    None,
    "misspelled",
    -1,
    0,
    2.5,
    math.nan,
    object(),
    [1, "two"],
    torch.tensor(3.0),
    torch.ones(2, 3, dtype=torch.int64),
    torch.complex64,
    np.zeros((3, 70)),
    torch.ones(101, 99),
    [0.5] * 1000,
    {f"layers.{number}.weight": torch.ones(3) for number in range(70)},
    "long" * 50,
)
LONGEST = 300
REMEDY = re.compile(
    r"\b(use|uses|takes?|give|pass|must|needs?|has|leave|add|call|assign|choose|expected|accepts?|set|make|one of"
    r"|fields)\b"
)
X = torch.randn(32, 64)
_FOLDER = tempfile.TemporaryDirectory(prefix="wrong_inputs")
SCRATCH = Path(_FOLDER.name)
FRESH, CONVERTED = object(), object()
FUNCTION = type(lambda: None)
EXCEPTIONS = {
    "distributed.ColwiseParallel": "the constructor is that of PyTorch's style of the same name",
    "distributed.RowwiseParallel": "the constructor is that of PyTorch's style of the same name",
    "distributed.SequenceParallel": "the constructor is that of PyTorch's style of the same name",
}
"""Whose answers are not the library's own, and why."""
Calls = Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]


def _layer(make: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Return a function that makes the layer and calls it with its keywords."""

    def run(**kwargs: Any) -> Any:
        return make(*args, **options)(**kwargs)

    run.__name__ = f"{make.__name__}.forward"
    return run


def _enter(make: Callable[..., Any]) -> Callable[..., Any]:
    def run(**kwargs: Any) -> None:
        with make(**kwargs):
            nc.Linear(64, 64, device="cpu")(X)

    run.__name__ = make.__name__
    return run


def _step(make: Callable[..., Any]) -> Callable[..., Any]:
    def run(**kwargs: Any) -> None:
        layer = torch.nn.Linear(64, 64)
        kwargs.setdefault("params", layer.parameters())
        optimizer = make(**kwargs)
        layer(X).sum().backward()
        optimizer.step()

    run.__name__ = make.__name__
    return run


def _every_option(make: Callable[..., Any], **required: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The call with its defaults written out, so that each of them is replaced."""
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.default is not parameter.empty and name not in required
    }
    options = {
        name: value
        for name, value in options.items()
        if type(value).__name__ != "_HAS_DEFAULT_FACTORY_CLASS" and not name.startswith("_")
    }
    return make, {**options, **required}


def calls() -> Calls:
    """Yield name, function and valid keywords."""
    cpu = {"device": "cpu"}
    layers: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (nc.Linear, {"in_features": 64, "out_features": 64, **cpu}),
        (nc.LayerNormLinear, {"in_features": 64, "out_features": 64, **cpu}),
        (nc.LayerNormMLP, {"hidden_size": 64, "ffn_hidden_size": 64, **cpu}),
        (nc.GroupedLinear, {"num_gemms": 2, "in_features": 64, "out_features": 64, **cpu}),
        (nc.LayerNorm, {"normalized_shape": 64, **cpu}),
        (nc.RMSNorm, {"normalized_shape": 64, **cpu}),
        (nc.DotProductAttention, {"num_attention_heads": 2, "kv_channels": 32}),
        (nc.MultiheadAttention, {"hidden_size": 64, "num_attention_heads": 2, **cpu}),
        (
            nc.TransformerLayer,
            {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 2, **cpu},
        ),
        (nc.Fp8Padding, {"num_gemms": 2}),
        (nc.Fp8Unpadding, {"num_gemms": 2}),
        (nc.InferenceParams, {"max_batch_size": 2, "max_sequence_length": 8}),
        (nc.RotaryPositionEmbedding, {"dim": 32}),
    ]
    for make, required in layers:
        yield make.__name__, *_every_option(make, **required)
    qkv = {name: torch.randn(8, 2, 2, 32) for name in ("query_layer", "key_layer", "value_layer")}
    forwards: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (_layer(nc.Linear, 64, 64, **cpu), {"inp": X, "is_first_microbatch": None}),
        (_layer(nc.LayerNormLinear, 64, 64, **cpu), {"inp": X}),
        (_layer(nc.LayerNormMLP, 64, 64, **cpu), {"inp": X}),
        (_layer(nc.GroupedLinear, 2, 64, 64, **cpu), {"inp": X, "m_splits": [16, 16]}),
        (_layer(nc.LayerNorm, 64, **cpu), {"inp": X}),
        (_layer(nc.RMSNorm, 64, **cpu), {"inp": X}),
        (
            _layer(nc.DotProductAttention, 2, 32),
            {**qkv, "attention_mask": None, "attn_mask_type": "causal", "qkv_format": "sbhd"},
        ),
        (_layer(nc.MultiheadAttention, 64, 2, **cpu), {"hidden_states": X.view(8, 4, 64)}),
        (_layer(nc.TransformerLayer, 64, 64, 2, **cpu), {"hidden_states": X.view(8, 4, 64)}),
    ]
    for run, kwargs in forwards:
        yield run.__name__, run, kwargs
    for name in nc.recipe.__all__:
        if name.endswith("Scaling") or name in ("QParams", "MMParams"):
            make = getattr(nc.recipe, name)
            yield f"recipe.{name}", *_every_option(make)
    quantizers: list[tuple[Any, dict[str, Any]]] = [
        (nc.Float8CurrentScalingQuantizer, {"fp8_dtype": nc.DType.kFloat8E4M3}),
        (nc.Float8BlockQuantizer, {"fp8_dtype": nc.DType.kFloat8E4M3, "rowwise": True, "columnwise": True}),
        (nc.MXFP8Quantizer, {"fp8_dtype": nc.DType.kFloat8E4M3}),
        (nc.NVFP4Quantizer, {}),
        (nc.MXFP6Quantizer, {}),
        (nc.MXFP4Quantizer, {}),
        (
            nc.Float8Quantizer,
            {"scale": torch.ones(1), "amax": torch.zeros(1), "fp8_dtype": nc.DType.kFloat8E4M3},
        ),
    ]
    for make, required in quantizers:
        yield make.__name__, *_every_option(make, **required)
        if make is not nc.Float8Quantizer:
            quantizer = make(**required)
            yield f"{make.__name__}.quantize", quantizer.quantize, {"tensor": torch.randn(128, 128)}
    for name in ("FusedAdam", "FusedSGD"):
        make = getattr(nc.optimizers, name)
        yield f"optimizers.{name}", _step(make), {**_every_option(make)[1], "lr": 0.1}
        yield f"optimizers.{name}", make, {"params": [torch.nn.Parameter(X.clone())], "lr": 0.1}
    yield "autocast", _enter(nc.autocast), _every_option(nc.autocast)[1]
    yield "quantized_model_init", _enter(nc.quantized_model_init), _every_option(nc.quantized_model_init)[1]
    linear = nc.Linear(64, 64, device="cpu")
    yield "checkpoint", lambda function: nc.checkpoint(function, X), {"function": linear}
    yield (
        "checkpoint",
        lambda **kwargs: nc.checkpoint(linear, X, **kwargs),
        {
            "use_reentrant": False,
            "distribute_saved_activations": False,
            "get_rng_state_tracker": None,
            "tp_group": None,
        },
    )
    yield (
        "get_cpu_offload_context",
        *_every_option(nc.get_cpu_offload_context, enabled=True, num_layers=1, model_layers=2),
    )
    rope = {"t": torch.randn(8, 2, 2, 32), "freqs": nc.RotaryPositionEmbedding(32)(8)}
    yield "apply_rotary_pos_emb", *_every_option(nc.apply_rotary_pos_emb, **rope)
    qkv_freqs = nc.RotaryPositionEmbedding(32)(8)
    fused = {"qkv": torch.randn(8, 2, 2, 96), "q_freqs": qkv_freqs, "k_freqs": qkv_freqs}
    fused |= {"qkv_split_arg_list": [32, 32, 32]}
    yield "apply_fused_qkv_rotary_pos_emb", *_every_option(nc.apply_fused_qkv_rotary_pos_emb, **fused)
    for room in (_operations, _losses, _mixtures, _multi_tensor, _whole_models, _parallel):
        yield from room()


def _operations() -> Calls:
    """``nc.ops``: every operation, and a forward of several."""
    required: dict[str, dict[str, Any]] = {
        "Linear": {"in_features": 64, "out_features": 64, "device": "cpu"},
        "BasicLinear": {"in_features": 64, "out_features": 64, "device": "cpu"},
        "GroupedLinear": {"num_groups": 2, "in_features": 64, "out_features": 64, "device": "cpu"},
        "Bias": {"size": 64, "device": "cpu"},
        "LayerNorm": {"normalized_shape": 64, "device": "cpu"},
        "RMSNorm": {"normalized_shape": 64, "device": "cpu"},
        "ConstantScale": {"scale": 2.0},
        "Dropout": {"p": 0.5},
        "Reshape": {"shape": (-1, 64)},
    }
    for name in nc.ops.__all__:
        make = getattr(nc.ops, name)
        basic = isinstance(make, type) and issubclass(make, nc.ops.BasicOperation)
        if name in required or (basic and make is not nc.ops.BasicOperation):
            yield f"ops.{name}", *_every_option(make, **required.get(name, {}))
    linear = nc.ops.Linear(64, 64, device="cpu")
    yield "ops.Sequential", lambda operation: nc.ops.Sequential(operation), {"operation": linear}
    yield "ops.Sequential.forward", lambda inp: nc.ops.Sequential(linear, nc.ops.GELU())(inp), {"inp": X}
    yield "ops.OperationFuser", *_every_option(nc.ops.OperationFuser, ops=[linear])
    for name in ("register_forward_fusion", "register_backward_fusion", "unregister_fusion"):
        yield f"ops.{name}", _registered(getattr(nc.ops, name)), {"func": lambda ops, **kwargs: ops}
    glu = {"tensor": torch.randn(64, 4), "interleave_size": 32}
    yield "interleave_glu_tensor", nc.interleave_glu_tensor, glu
    yield "deinterleave_glu_tensor", nc.deinterleave_glu_tensor, glu


def _registered(register: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that registers a fusion and leaves none behind."""

    def run(func: Any) -> None:
        if register is nc.ops.unregister_fusion and func.__class__ is FUNCTION:
            nc.ops.register_forward_fusion(func)
        register(func)
        if register is not nc.ops.unregister_fusion:
            nc.ops.unregister_fusion(func)

    return run


def _losses() -> Calls:
    logits = {"inp": torch.randn(4, 8, 16), "target": torch.zeros(4, 8, dtype=torch.int64)}
    yield "parallel_cross_entropy", *_every_option(nc.parallel_cross_entropy, **logits)
    head = {"hidden": X, "weight": torch.randn(16, 64), "target": torch.zeros(32, dtype=torch.int64)}
    yield "linear_cross_entropy", *_every_option(nc.linear_cross_entropy, **head)


def _mixtures() -> Calls:
    """``nc.moe``."""
    chosen = torch.zeros(32, 2, dtype=torch.int32)
    mask = torch.zeros(32, 4, dtype=torch.bool)
    mask[:, :2] = True
    probs = torch.rand(32, 4) * mask
    moe = nc.moe
    by_index = {"inp": X, "routing_map": chosen, "num_out_tokens": 64, "map_type": "index"}
    yield "moe_permute", *_every_option(moe.moe_permute, **by_index)
    yield "moe_permute", *_every_option(moe.moe_permute, inp=X, routing_map=mask, num_out_tokens=64)
    by_mask = {"inp": X, "probs": probs, "routing_map": mask}
    yield "moe_permute_with_probs", *_every_option(moe.moe_permute_with_probs, **by_mask, num_out_tokens=64)
    padded = {**by_mask, "tokens_per_expert": [32, 32, 0, 0], "align_size": 16}
    yield "moe_permute_and_pad_with_probs", *_every_option(moe.moe_permute_and_pad_with_probs, **padded)
    permuted, rows = moe.moe_permute(X, mask, num_out_tokens=64)
    back = {"inp": permuted, "row_id_map": rows, "restore_shape": (32, 64)}
    yield "moe_unpermute", *_every_option(moe.moe_unpermute, **back)
    chunks = {"inp": X, "split_sizes": [20, 12], "sorted_index": [1, 0]}
    yield "moe_sort_chunks_by_index", moe.moe_sort_chunks_by_index, chunks
    yield (
        "moe_sort_chunks_by_index_with_probs",
        moe.moe_sort_chunks_by_index_with_probs,
        {**chunks, "probs": torch.rand(32)},
    )
    router = {"logits": torch.randn(8, 4), "topk": 2}
    yield "fused_topk_with_score_function", *_every_option(moe.fused_topk_with_score_function, **router)
    scores = {**router, "score_function": "softmax"}
    yield (
        "fused_compute_score_for_moe_aux_loss",
        *_every_option(moe.fused_compute_score_for_moe_aux_loss, **scores),
    )
    loss = {"probs": torch.rand(8, 4), "tokens_per_expert": torch.tensor([4, 4, 4, 4]), "total_num_tokens": 8}
    yield "fused_moe_aux_loss", moe.fused_moe_aux_loss, {**loss, "num_experts": 4, "topk": 2, "coeff": 0.1}
    yield "MoERouter", *_every_option(nc.MoERouter, hidden_size=64, num_experts=4, topk=2)
    yield "moe_router_logits", *_every_option(nc.moe_router_logits, x=X, weight=torch.randn(4, 64))
    yield "moe_z_loss", nc.moe_z_loss, {"logits": router["logits"], "coeff": 0.1}
    share = {"tokens": 32, "topk": 2, "num_experts": 4, "capacity_factor": 1.0}
    yield "moe_capacity", *_every_option(nc.moe_capacity, **share)
    dropped = {"probs": probs, "routing_map": mask, "capacity": 4}
    yield "moe_drop_tokens", *_every_option(nc.moe_drop_tokens, **dropped)
    moved = {"expert_bias": torch.zeros(4), "tokens_per_expert": torch.ones(4), "rate": 0.1}
    yield "moe_update_expert_bias_", nc.moe_update_expert_bias_, moved


def _multi_tensor() -> Calls:
    """The list operations of ``nc.optimizers``."""
    every = nc.optimizers
    flag = torch.zeros(1, dtype=torch.int32)

    def lists(count: int) -> list[list[torch.Tensor]]:
        return [[torch.ones(8)] for _ in range(count)]

    begin = {"chunk_size": 1024, "noop_flag": flag}
    yield "optimizers.MultiTensorApply", every.MultiTensorApply, {"chunk_size": 1024}
    norm = {**begin, "tensor_lists": lists(1), "per_tensor": False}
    yield "optimizers.multi_tensor_l2norm", every.multi_tensor_l2norm, norm
    scale = {**begin, "tensor_lists": lists(2), "scale": 0.5}
    yield "optimizers.multi_tensor_scale", every.multi_tensor_scale, scale
    adam: dict[str, Any] = {**begin, "tensor_lists": lists(4), "lr": 0.1, "beta1": 0.9, "beta2": 0.99}
    adam |= {"epsilon": 1e-8, "step": 1, "mode": 0, "bias_correction": 1, "weight_decay": 0.1}
    yield "optimizers.multi_tensor_adam", every.multi_tensor_adam, adam
    sgd: dict[str, Any] = {**begin, "tensor_lists": lists(3), "weight_decay": 0.0, "momentum": 0.9}
    sgd |= {"dampening": 0.0, "lr": 0.1, "nesterov": False, "first_run": True, "wd_after_momentum": False}
    yield "optimizers.multi_tensor_sgd", every.multi_tensor_sgd, {**sgd, "scale": 1.0}


def _whole_models() -> Calls:
    """What takes a model: conversion, recipes, inspection, graphs, saving for serving."""

    def plain() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

    def on_a_model(run: Callable[..., Any], **required: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The call, on a new model each time unless the model is what is wrong."""
        options = _every_option(run, **required)[1]
        options.pop("model", None)

        def call(model: Any = None, **kwargs: Any) -> Any:
            return run(plain() if model is FRESH else converted() if model is CONVERTED else model, **kwargs)

        return call, {"model": FRESH if run in (nc.convert, nc.load_quantized) else CONVERTED, **options}

    def converted() -> torch.nn.Module:
        return nc.convert(plain(), "current")

    folder = SCRATCH
    yield "convert", *on_a_model(nc.convert, recipe="current")
    yield "revert", *on_a_model(nc.revert)
    yield "receipt", *on_a_model(nc.receipt)
    yield "set_recipe", *on_a_model(nc.set_recipe, recipe="block")
    yield "get_recipes", *on_a_model(nc.get_recipes)
    yield "watch", *on_a_model(nc.watch)
    yield "bisect", *on_a_model(nc.bisect, batch=X, loss=lambda y: y.square().mean())
    yield "export", *on_a_model(nc.export, path=folder / "exported", format="compressed-tensors")
    nc.export(converted(), folder / "whole", format="compressed-tensors")
    yield "load_quantized", *on_a_model(nc.load_quantized, path=folder / "whole")
    program = torch.export.export(plain(), (X,))
    yield "decompose", *_every_option(nc.decompose, program=program)
    yield "mark_not_offload", lambda tensor: nc.mark_not_offload(tensor), {"tensor": X.clone()}
    yield "prepare_for_saving", lambda tensor: nc.prepare_for_saving(tensor), {"tensor": X}


def _parallel() -> Calls:
    """What of ``nc.distributed`` runs in one process."""
    where = nc.distributed
    folder = SCRATCH
    for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        yield f"distributed.{name}", *_every_option(getattr(where, name))
    weight = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).quantize(torch.randn(32, 32))
    raw = {"tensor": weight, "new_raw_data": torch.empty(32, 32, dtype=torch.uint8)}
    yield "distributed.replace_raw_data", where.replace_raw_data, raw
    yield (
        "distributed.post_all_gather_processing",
        where.post_all_gather_processing,
        {"model_weights": [weight]},
    )
    saving = {"model": torch.nn.Linear(8, 8), "path": folder / "saved"}
    yield "distributed.save_checkpoint", *_every_option(where.save_checkpoint, **saving)
    yield "distributed.load_checkpoint", *_every_option(where.load_checkpoint, **saving)
    yield "distributed.MoEDispatch", *_every_option(where.MoEDispatch, num_experts=4)


def _named(value: Any, message: str) -> bool:
    """Whether a message shows the value, its type, its shape or its dtype."""
    words = [type(value).__name__]
    if isinstance(value, torch.Tensor):
        words += [str(tuple(value.shape)), str(list(value.shape)), str(value.dtype), f"{value.dim()}-D"]
    return any(word in message for word in words) or any(
        text in message for text in (shown(value), repr(value), str(value))
    )


def judge(function: Callable[..., Any], kwargs: dict[str, Any], name: str, value: Any) -> str:
    """Return what is wrong with the answer to a wrong value, or nothing."""
    here = Path.cwd()
    os.chdir(SCRATCH)  # a text is a path, too
    try:
        return _judge(function, kwargs, name, value)
    finally:
        os.chdir(here)


def _judge(function: Callable[..., Any], kwargs: dict[str, Any], name: str, value: Any) -> str:
    if name == "device" and isinstance(value, int) and value == 0:  # the number of a GPU
        return ""
    if name == "batch" and isinstance(value, dict):  # the keywords of the user's model
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**{**kwargs, name: value})
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else ""
        told = f"{type(error).__name__}: {text[:150]}"
        raised = last.filename.startswith(SOURCE) and str(last.line).startswith("raise")
        if not raised:
            return f"crash    {told} ({Path(last.filename).name}:{last.lineno})"
        if len(str(error)) > LONGEST:
            return f"{len(str(error))} characters: {told}"
        if not _named(value, str(error)) and not REMEDY.search(str(error)):
            return f"vague    {told}"
    return ""


def main(words: list[str]) -> int:
    found = asked = 0
    for title, function, kwargs in calls():
        if title in EXCEPTIONS or (words and not any(word in title for word in words)):
            continue
        try:
            function(**kwargs)
        except Exception as error:
            print(f"{title}: the valid call raises {type(error).__name__}: {error}")
            found += 1
            continue
        for name in kwargs:
            for value in WRONG:
                asked += 1
                if defect := judge(function, kwargs, name, value):
                    found += 1
                    print(f"{title}({name}={shown(value)}): {defect}", flush=True)
    print(f"{found} of {asked} answers name neither the value nor the remedy, or are crashes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
