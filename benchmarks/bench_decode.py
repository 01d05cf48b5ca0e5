"""Tokens per second of decoding with a KV cache: the layers of a 1B Llama, a step compiled with CUDA graphs.

A step is `InferenceParams.pre_step` and one token of every sequence through 16 layers; embedding and head are left out.
The FP8 rows have quantized parameters (`nc.quantized_model_init`), half the bytes to read. `eager` is not compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, parser, report
from torch import Tensor, nn

import narrowcast as nc

CASES: dict[str, Callable[[], nc.recipe.Recipe | None]] = {
    "bf16": lambda: None,
    "current": nc.recipe.Float8CurrentScaling,
    "block": nc.recipe.Float8BlockScaling,
}


class Layers(nn.Module):
    """Layers with a rotary embedding, (b, s, hidden)."""

    def __init__(self, shape: argparse.Namespace) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nc.TransformerLayer(
                shape.hidden, shape.ffn, shape.heads, shape.groups, hidden_dropout=0.0, attention_dropout=0.0,
                normalization="RMSNorm", activation="swiglu", bias=False, fuse_qkv_params=True,
                attn_input_format="bshd", self_attn_mask_type="padding_causal", layer_number=number + 1,
                params_dtype=torch.bfloat16, device=shape.device,
            )
            for number in range(shape.layers)
        )  # fmt: skip
        rope = nc.RotaryPositionEmbedding(shape.hidden // shape.heads, rotary_base=5e5).to(shape.device)
        self.register_buffer("angles", rope(shape.longest))

    def forward(self, x: Tensor, params: nc.InferenceParams) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, inference_params=params)
        return x


@torch.no_grad()
def tokens_per_second(
    model: Layers, run: Callable[..., Tensor], batch: int, chosen: Any
) -> tuple[float, float]:
    """Of the median step, and the milliseconds it takes."""
    params = nc.InferenceParams(
        batch, chosen.longest, device=chosen.device, is_paged=chosen.paged, page_size=64
    )
    prompt = dict.fromkeys(range(batch), chosen.prompt)
    params.pre_step(prompt)
    factory = {"device": chosen.device, "dtype": torch.bfloat16}
    model(torch.randn(batch, chosen.prompt, chosen.hidden, **factory), params)
    x, times = torch.randn(batch, 1, chosen.hidden, **factory), []
    for index in range(chosen.repeats + 5):
        begin = time.perf_counter()
        params.pre_step(dict.fromkeys(prompt, 1))
        run(x, params)
        if chosen.device == "cuda":
            torch.cuda.synchronize()
        if index >= 5:
            times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return batch / median, median * 1e3


def measure(chosen: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name, build in CASES.items():
        recipe = build()
        torch.manual_seed(0)
        with torch.no_grad(), nc.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            model = nc.set_recipe(Layers(chosen), recipe).eval()
        for form in ("eager", "compiled"):
            if chosen.only not in f"{name}, {form}" or (chosen.skip_compile and form == "compiled"):
                continue
            for batch in chosen.batches:
                torch.compiler.reset()
                run = (
                    torch.compile(model, fullgraph=True, mode="reduce-overhead")
                    if form == "compiled"
                    else model
                )
                rate, ms = tokens_per_second(model, run, batch, chosen)
                row: Row = {
                    "contender": f"{name}, {form}",
                    "batch": batch,
                    "ms": round(ms, 3),
                    "tokens/s": round(rate),
                }
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    options = parser(__doc__)
    sizes = {
        "hidden": 2048,
        "ffn": 8192,
        "heads": 32,
        "groups": 8,
        "layers": 16,
        "longest": 1024,
        "prompt": 128,
    }
    for name, size in sizes.items():
        options.add_argument(f"--{name}", type=int, default=size)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    options.add_argument("--paged", action="store_true")
    chosen = options.parse_args()
    where: Row = {"cache": "paged" if chosen.paged else "contiguous"} | {n: getattr(chosen, n) for n in sizes}
    report("decode", [{**where, **row} for row in measure(chosen)], chosen)


if __name__ == "__main__":
    main()
