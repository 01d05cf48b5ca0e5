"""LoRA of rank 16 with PEFT on layers of the 8B shape of Llama: bf16, and frozen weights that are stored quantized.

The layers are compiled one by one and share one graph, the last norm and the loss are others; ``eager`` runs them as
they are. A step is forward, backward and AdamW on the adapters, timed as a loop issues it; contenders take turns.
Adapters are in bf16, but where the name says fp32, PEFT's default. ``fused`` is ``nc.fuse_adapters``, ``apart``
without products in the GEMMs; ``head`` quantizes the frozen head, too. ``--mixture`` takes layers of the shape of
Qwen3-30B-A3B, with adapters on attention, and experts by ``grouped_mm`` in bf16. The vocabulary is an eighth of the
model's, so that the head has the share that it has beside 32 layers. ``replayed`` is the whole step in a CUDA graph,
for bf16, too.
``--profile NAME`` prints where the GPU's time goes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_huggingface import parameter_bytes, step_on_words
from harness import RECIPES, Row, captured, parser, report, seconds_of

import narrowcast as nc

SIZES: dict[str, dict[str, int]] = {
    "cuda": {
        "vocab_size": 16032,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "cpu": {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
MIXTURES: dict[str, dict[str, int]] = {
    "cuda": {
        "vocab_size": 16032,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "cpu": {
        "vocab_size": 128,
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
STEPS = 5  # of a turn
BATCH = {"cuda": (4, 2048), "cpu": (2, 32)}
# name -> (recipe, how weights are stored)
BASES = {
    "bf16": ("", ""),
    "current, stored": ("current", "stored"),
    "delayed, stored": ("delayed", "stored"),
    "block, stored": ("block", "stored"),
    "current, nvfp4": ("current", "nvfp4"),
    "current, mxfp4": ("current", "mxfp4"),
}
CONTENDERS = [
    *[f"{base}, {how}" for base in ("bf16", "current, stored") for how in ("eager", "fp32", "fp32, fused")],
    *BASES,
    *[f"{base}, fused" for base in BASES],
    "current, stored, fused, head",
    "delayed, stored, fused, head",
    *[f"{name}, replayed" for name in ("bf16", "bf16, fused", "current, stored", "current, nvfp4, fused")],
    *[f"{base}, stored, fused{how}, replayed" for base in ("current", "delayed") for how in ("", ", head")],
]


def make(name: str, device: str, mixture: bool) -> Any:
    import peft
    import transformers
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    # While a graph is captured, Transformers makes a tensor of the causal mask; else a flag says it, as here always.
    for modeling in (modeling_llama, modeling_qwen3_moe):
        modeling.create_causal_mask = lambda *_, **__: None
    base = next(base for base in BASES if name.startswith(base))
    recipe, weights = BASES[base]
    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    with torch.device(device):
        if mixture:
            options["experts_implementation"] = "grouped_mm" if device == "cuda" else "eager"
            sparse = transformers.Qwen3MoeConfig(**MIXTURES[device], **options)
            model: Any = transformers.Qwen3MoeForCausalLM(sparse).to(torch.bfloat16)
        else:
            dense = transformers.LlamaConfig(**SIZES[device], **options)
            model = transformers.LlamaForCausalLM(dense).to(torch.bfloat16)
    model.requires_grad_(False)
    if recipe:
        nc.convert(model, RECIPES[recipe](), heads="head" in name, weights=weights)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if mixture else "all-linear"
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets)
    model = peft.get_peft_model(model, adapters, autocast_adapter_dtype="fp32" in name)
    if "fused" in name:
        nc.fuse_adapters(model)
    if "apart" in name:
        for module in model.modules():
            vars(module).pop("adds_in_gemm", None)
    return model


def step_of(name: str, device: str, mixture: bool) -> tuple[Any, Callable[[], torch.Tensor]]:
    """Return a model and what makes one step of it."""
    model, cuda = make(name, device, mixture), device == "cuda"
    if "eager" not in name:
        backend, base = "inductor" if cuda else "aot_eager", model.base_model.model
        for layer in base.model.layers:
            layer.compile(backend=backend)
        base.model.norm.compile(backend=backend)
        base.loss_function = torch.compile(base.loss_function, backend=backend)
    words = SIZES[device]["vocab_size"], BATCH[device]
    return model, step_on_words(model, *words, device, capturable=cuda and "replayed" in name)


def prepare(name: str, options: argparse.Namespace) -> tuple[Row, Callable[[], object]]:
    """Warm a contender up; return what is known of it then, and what makes one step."""
    device, cuda = options.device, options.device == "cuda"
    gc.collect()
    before = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model, step = step_of(name, device, options.mixture)
    begin = time.perf_counter()
    losses = [step().item() for _ in range(6)]
    warm_up = time.perf_counter() - begin
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
    layers: Any = model.base_model.model.model.layers
    frozen = sum(parameter_bytes(layer) for layer in layers)
    frozen -= sum(p.nbytes for p in layers.parameters() if p.requires_grad)
    row: Row = {"contender": name, "frozen_mib": frozen / 2**20, "peak_gib": peak, "loss_after_6": losses[-1]}
    row |= {"warm_up_seconds": warm_up, "layers": len(layers)}
    row |= {"model": "mixture" if options.mixture else "dense"}
    if not (cuda and "replayed" in name):
        return row, step
    replay = captured(step)
    return row, lambda: (replay(), step)  # with what the graph reads


def profile(step: Callable[[], object]) -> None:
    """Print where the GPU's time of a step goes."""
    steps = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    print(f"GPU {sum(e.self_device_time_total for e in found) / steps / 1e3:.2f} ms a step")
    for event in found[:40]:
        total = event.self_device_time_total / steps / 1e3
        print(f"{total:8.3f} ms {event.count / steps:6.1f}x  {event.key[:110]}", flush=True)


def measure(options: argparse.Namespace) -> list[Row]:
    device = options.device
    torch._dynamo.config.recompile_limit = 4 * len(CONTENDERS)  # a graph of each contender is kept
    prepared = {}
    for name in CONTENDERS:
        if options.only in name and (not options.names or name in options.names):
            prepared[name] = prepare(name, options)
            print(prepared[name][0], flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(options.repeats):
        for name, (_, step) in prepared.items():
            step()  # what another one's turn left in caches
            seconds[name].append(seconds_of(step, STEPS, device))
    tokens = BATCH[device][0] * BATCH[device][1]
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    rows = []
    for name, (row, step) in prepared.items():
        row |= {"ms": middle[name] * 1e3, "tokens_per_second": tokens / middle[name]}
        yardstick = "bf16, replayed" if "replayed" in name else "bf16"
        row["share_of_bf16"] = middle[name] / middle[yardstick] if yardstick in middle else "not in this run"
        print(row, flush=True)
        rows.append(row)
        if options.profile == name:
            profile(step)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--names", nargs="*", default=(), help="contenders by their whole names")
    options.add_argument("--mixture", action="store_true", help="layers of a mixture of experts")
    options.add_argument("--profile", default="", help="a contender whose kernels are printed")
    chosen = options.parse_args()
    report("lora", measure(chosen), chosen)


if __name__ == "__main__":
    main()
