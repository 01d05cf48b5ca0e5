"""Call public functions with wrong inputs, and list crashes and messages that name neither the value nor the remedy.

    python tools/wrong_inputs.py                # everything
    python tools/wrong_inputs.py Linear recipe  # names that contain a word

Each call is a valid one of ``calls()`` with one argument replaced by a wrong value. A crash is an error that the
library did not raise itself. What is accepted is not listed: many arguments take None or a number of another type.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import narrowcast as nc

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
)
REMEDY = re.compile(
    r"\b(use|uses|takes?|give|pass|must|needs?|leave|add|call|assign|choose|expected|accepts?|set|make|one of|fields)\b"
)
X = torch.randn(32, 64)


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
        name: value for name, value in options.items() if type(value).__name__ != "_HAS_DEFAULT_FACTORY_CLASS"
    }
    return make, {**options, **required}


def calls() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
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
    logits = {"inp": torch.randn(4, 8, 16), "target": torch.zeros(4, 8, dtype=torch.int64)}
    yield (
        "parallel_cross_entropy",
        nc.parallel_cross_entropy,
        {
            **{
                name: value
                for name, value in _every_option(nc.parallel_cross_entropy)[1].items()
                if name != "_input"
            },
            **logits,
        },
    )
    moe = {"inp": X, "routing_map": torch.zeros(32, 2, dtype=torch.int32), "num_out_tokens": 64}
    yield "moe_permute", *_every_option(nc.moe_permute, **moe)
    router = {"logits": torch.randn(8, 4), "topk": 2, "use_pre_softmax": False, "num_groups": None}
    router |= {"group_topk": None, "scaling_factor": None, "score_function": "softmax", "expert_bias": None}
    yield "fused_topk_with_score_function", nc.fused_topk_with_score_function, router


def _named(value: Any, message: str) -> bool:
    """Whether a message shows the value, its type, its shape or its dtype."""
    words = [repr(value), str(value), type(value).__name__]
    if isinstance(value, torch.Tensor):
        words += [str(tuple(value.shape)), str(list(value.shape)), str(value.dtype), f"{value.dim()}-D"]
    return any(word in message for word in words)


def judge(function: Callable[..., Any], kwargs: dict[str, Any], name: str, value: Any) -> str:
    """Return what is wrong with the answer to a wrong value, or nothing."""
    if name == "device" and isinstance(value, int) and value == 0:  # the number of a GPU
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
        if not _named(value, str(error)) and not REMEDY.search(str(error)):
            return f"vague    {told}"
    return ""


def main(words: list[str]) -> int:
    found = asked = 0
    for title, function, kwargs in calls():
        if words and not any(word in title for word in words):
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
                    shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)[:20]
                    print(f"{title}({name}={shown}): {defect}")
    print(f"{found} of {asked} answers name neither the value nor the remedy, or are crashes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
