"""A refresh of a server's weights: what ``nc.serving.weights`` takes to make every tensor of a model, and its bytes.

Each tensor is copied into memory that stays, as an engine's ``load_weights`` does, so that the time is a refresh
without the transport. The peers copy the bf16 weights: what moves without quantization. The default shapes are the 8B
Llama on a GPU, and two small blocks on a CPU. `peak_mib` is what is allocated beyond the model and the copies, at most.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from harness import Row, parser, report
from torch import Tensor, nn

import narrowcast as nc

SHAPES = {
    "8B": {"hidden": 4096, "inner": 14336, "kv": 1024, "layers": 32, "words": 128256},
    "small": {"hidden": 256, "inner": 640, "kv": 128, "layers": 2, "words": 1000},
}
FORMATS: dict[str, tuple[str, Any]] = {
    "bf16": ("bf16", None),
    "hf-fp8-block128": ("hf-fp8-block128", nc.recipe.Float8BlockScaling),
    "compressed-tensors, per tensor": ("compressed-tensors", nc.recipe.Float8CurrentScaling),
    "mxfp8": ("mxfp8", lambda: nc.recipe.MXFP8BlockScaling(emulate=True)),
    "nvfp4": ("nvfp4", lambda: nc.recipe.NVFP4BlockScaling(emulate=True)),
}


def model_of(shape: dict[str, int], device: str) -> nn.Module:
    """The linear layers, norms, embedding and head of a Llama, in bf16."""
    hidden, inner, kv = shape["hidden"], shape["inner"], shape["kv"]
    sizes = {"q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv), "o": (hidden, hidden)}
    sizes |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}

    def block() -> nn.ModuleDict:
        linears = {f"{name}_proj": nn.Linear(*size, bias=False, **like) for name, size in sizes.items()}
        return nn.ModuleDict({**linears, "norm": nn.RMSNorm(hidden, **like)})

    like: Any = {"device": device, "dtype": torch.bfloat16}
    return nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(shape["words"], hidden, **like),
            "layers": nn.ModuleList(block() for _ in range(shape["layers"])),
            "lm_head": nn.Linear(hidden, shape["words"], bias=False, **like),
        }
    )


def refresh(model: nn.Module, format: str, held: dict[str, Tensor]) -> None:
    """Copy every served tensor over the one of its name."""
    for name, tensor in nc.serving.weights(model, format):
        held[name].copy_(tensor)


def timed(model: nn.Module, format: str, held: dict[str, Tensor], device: str) -> tuple[float, float]:
    """Seconds of one refresh, and MiB allocated meanwhile; 0 where the device does not count them."""
    gc.collect()
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    refresh(model, format, held)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return seconds, peak / 2**20


def measure(options: argparse.Namespace) -> list[Row]:
    name = options.shape or ("8B" if options.device == "cuda" else "small")
    rows: list[Row] = []
    for contender, (format, recipe) in FORMATS.items():
        if options.only not in contender:
            continue
        model = model_of(SHAPES[name], options.device)
        if recipe is not None:
            nc.convert(model, recipe(), skip="lm_head", blocks=True)
        held = {key: tensor.clone() for key, tensor in nc.serving.weights(model, format)}
        runs = [timed(model, format, held, options.device) for _ in range(max(options.repeats // 4, 2))][1:]
        quantized = [value.nbytes for key, value in held.items() if "_proj" in key]
        rows.append(
            {
                "shape": name,
                "format": contender,
                "tensors": len(held),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "bytes": sum(value.nbytes for value in held.values()),
                "bytes_of_layers": sum(quantized),
                "ms": 1e3 * statistics.median(seconds for seconds, _ in runs),
                "peak_mib": max(peak for _, peak in runs),
            }
        )
        del model, held
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES, help="default: 8B on a GPU, small on a CPU")
    chosen = options.parse_args()
    torch.manual_seed(0)
    report("serving_weights", measure(chosen), chosen)


if __name__ == "__main__":
    main()
