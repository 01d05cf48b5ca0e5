"""LoRA of rank 16 with PEFT on layers of the 8B shape of Llama: bf16, and frozen weights that are stored quantized.

The layers are compiled one by one and share one graph, the loss is another; ``eager`` runs them as they are. A step is
forward, backward and AdamW on the adapters, timed as a loop issues it. Adapters are in bf16, but where the name says
fp32, PEFT's default. ``fused`` is ``nc.fuse_adapters``, ``apart`` without products in the GEMMs. The vocabulary is an
eighth of the model's, so that the head has the share that it has beside 32 layers.
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
from bench_huggingface import parameter_bytes
from harness import RECIPES, Row, parser, report, seconds_of

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
]


def make(name: str, device: str) -> Any:
    import peft
    import transformers

    base = next(base for base in BASES if name.startswith(base))
    recipe, weights = BASES[base]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES[device], attn_implementation="sdpa", use_cache=False)
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.requires_grad_(False)
    if recipe:
        nc.convert(model, RECIPES[recipe](), skip="lm_head", weights=weights)
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = peft.get_peft_model(model, adapters, autocast_adapter_dtype="fp32" in name)
    if "fused" in name:
        nc.fuse_adapters(model)
    if "apart" in name:
        for module in model.modules():
            vars(module).pop("adds_in_gemm", None)
    return model


def step_of(name: str, device: str) -> tuple[Any, Callable[[], torch.Tensor]]:
    """Return a model and what makes one step of it."""
    model, cuda = make(name, device), device == "cuda"
    if "eager" not in name:
        backend, base = "inductor" if cuda else "aot_eager", model.base_model.model
        for layer in base.model.layers:
            layer.compile(backend=backend)
        base.loss_function = torch.compile(base.loss_function, backend=backend)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda)
    words = torch.randint(0, SIZES[device]["vocab_size"], BATCH[device], device=device)

    def step() -> torch.Tensor:
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


def run(name: str, options: argparse.Namespace, wait: Callable[[], object] = lambda: None) -> Row:
    """Return the row of a contender; ``wait`` is called between its warm-up and its times."""
    device, cuda = options.device, options.device == "cuda"
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, step = step_of(name, device)
    begin = time.perf_counter()
    losses = [step().item() for _ in range(6)]
    warm_up = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    wait()
    seconds = statistics.median(seconds_of(step, 5, device) for _ in range(options.repeats))
    layers: Any = model.base_model.model.model.layers
    frozen = sum(parameter_bytes(layer) for layer in layers)
    frozen -= sum(p.nbytes for p in layers.parameters() if p.requires_grad)
    tokens = BATCH[device][0] * BATCH[device][1]
    row: Row = {"contender": name, "ms": seconds * 1e3, "tokens_per_second": tokens / seconds}
    row |= {"frozen_mib": frozen / 2**20, "peak_gib": peak, "loss_after_6": losses[-1]}
    row |= {"warm_up_seconds": warm_up}
    if name == options.profile:
        profile(step)
    return row


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
    rows = []
    for name in CONTENDERS:
        if options.only in name:
            rows.append(run(name, options))
            print(rows[-1], flush=True)
    return compared(rows)


def compared(rows: list[Row]) -> list[Row]:
    """Add each contender's time over bf16's to the rows."""
    times = {str(row["contender"]): float(str(row["ms"])) for row in rows}
    for row in rows:
        own = times[str(row["contender"])]
        row["share_of_bf16"] = own / times["bf16"] if "bf16" in times else "not in this run"
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--profile", default="", help="a contender whose kernels are printed")
    chosen = options.parse_args()
    report("lora", measure(chosen), chosen)


if __name__ == "__main__":
    main()
