"""Train a Llama of Transformers, converted in place, and LoRA on frozen weights that are stored in FP8.

The model is made anew for every contender; its layers are compiled one by one, and share one graph.
Steps with AdamW are timed as a loop issues them, host included. The losses after the same steps stand beside the times.
``--only full`` and ``--only LoRA`` are the two halves.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import RECIPES, Row, parser, report, seconds_of
from torch import nn

import narrowcast as nc

SIZES: dict[str, dict[str, int]] = {
    "cuda": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "cpu": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
BATCH = {"cuda": (4, 2048), "cpu": (2, 32)}
# name -> (recipe, whether it trains adapters alone)
CONTENDERS: dict[str, tuple[str, bool]] = {
    "full, bf16": ("", False),
    **{f"full, {name}": (name, False) for name in RECIPES},
    "LoRA, bf16": ("", True),
    "LoRA, current, stored": ("current", True),
    "LoRA, block, stored": ("block", True),
}


def make(recipe: str, lora: bool, device: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES[device], attn_implementation="sdpa", use_cache=False)
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    if lora:
        model.requires_grad_(False)
    if recipe:
        nc.convert(model, RECIPES[recipe](), skip="lm_head", weights="stored" if lora else "plain")
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    return model


def parameter_bytes(model: nn.Module) -> int:
    total = 0
    for parameter in model.parameters():
        quantized = isinstance(parameter, (nc.QuantizedTensor, nc.GroupedTensor))
        parts: Any = parameter.get_data_tensors() if quantized else [parameter]
        total += sum(part.numel() * part.element_size() for part in parts if part is not None)
    return total


def step_on_words(
    model: Any, vocabulary: int, batch: tuple[int, int], device: str, capturable: bool = False
) -> Callable[[], torch.Tensor]:
    """Return a training step with AdamW on one batch of random words, which returns the loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda", capturable=capturable)
    words = torch.randint(0, vocabulary, batch, device=device)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def run(name: str, options: argparse.Namespace) -> Row:
    recipe, lora = CONTENDERS[name]
    device, cuda = options.device, options.device == "cuda"
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = make(recipe, lora, device)
    for layer in (model.base_model.model if lora else model).model.layers:
        layer.compile(backend="inductor" if cuda else "aot_eager")
    batch, length = BATCH[device]
    step = step_on_words(model, SIZES[device]["vocab_size"], (batch, length), device)
    begin = time.perf_counter()
    losses = [step().item() for _ in range(6)]
    warm_up = time.perf_counter() - begin
    seconds = statistics.median(seconds_of(step, 5, device) for _ in range(options.repeats))
    row: Row = {"contender": name, "ms": seconds * 1e3, "tokens_per_second": batch * length / seconds}
    row |= {"parameters_mib": parameter_bytes(model) / 2**20}
    row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0}
    row |= {"loss_after_6": losses[-1], "warm_up_seconds": warm_up}
    print(row, flush=True)
    return row


def measure(options: argparse.Namespace) -> list[Row]:
    rows = [run(name, options) for name in CONTENDERS if options.only in name]
    for row in rows:
        kind = str(row["contender"]).split(",")[0]
        base = next((float(str(one["ms"])) for one in rows if one["contender"] == f"{kind}, bf16"), None)
        row["share_of_bf16"] = float(str(row["ms"])) / base if base else "not in this run"
    return rows


def main() -> None:
    options = parser(__doc__).parse_args()
    report("huggingface", measure(options), options)


if __name__ == "__main__":
    main()
