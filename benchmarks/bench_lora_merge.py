"""LoRA on quantized bases: the loss after training, and what each way of merging leaves of it.

A small Llama learns the pages of docs/, then adapters learn nine tenths of the sources; the last tenth is held out. A
seed decides the adapters and the order of what they learn. `recovery` is the share of what the adapters
gained on held-out text that is there after merging: 1 if the merged model has the loss of the trained one, 0 if it has
that of the base. `same_argmax` is the share of tokens after which both models expect the same next one. Needs
Transformers and PEFT.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Row, parser, report
from torch import Tensor

import narrowcast as nc
from narrowcast.convert.adapters import base_copy

ROOT = Path(__file__).parents[1]
BASES: dict[str, tuple[Any, Any]] = {
    "bf16": (None, None),
    "current, stored": (nc.recipe.Float8CurrentScaling(), "stored"),
    "current, nvfp4": (nc.recipe.Float8CurrentScaling(), "nvfp4"),
    "block, mxfp4": (nc.recipe.Float8BlockScaling(), "mxfp4"),
}
CONFIG = {
    "cpu": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3},
    "cuda": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4},
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BATCH = {"cpu": (4, 64), "cuda": (16, 256)}
RATES = {"cpu": (2e-3, 1e-3), "cuda": (3e-4, 3e-4)}  # of the base and of adapters
EVALUATED = 10_240  # tokens at least


def text_of(folder: str, ending: str, device: str) -> Tensor:
    files = sorted((ROOT / folder).rglob(f"*.{ending}"))
    return torch.tensor(list(b"\n".join(file.read_bytes() for file in files)), device=device)


def batches(text: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    rows, tokens = BATCH[text.device.type]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - tokens, (rows,), generator=generator).tolist()
        yield torch.stack([text[start : start + tokens] for start in starts])


def new_model(device: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=256, **CONFIG[device], **HEADS)
    return transformers.LlamaForCausalLM(config).to(device)


def train(model: Any, data: Iterator[Tensor], rate: float) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, rate)
    for words in data:
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Any, held_out: list[Tensor]) -> tuple[float, Tensor]:
    """Return the loss and the most likely next token of every token."""
    found = [model(input_ids=words, labels=words) for words in held_out]
    loss = sum(one.loss.item() for one in found) / len(found)
    return loss, torch.cat([one.logits.argmax(-1).flatten() for one in found])


def adapted(learned: Any, base: str, seed: int, device: str) -> Any:
    """Return the learned model, stored as ``base`` says, with new adapters."""
    import peft

    recipe, weights = BASES[base]
    model = new_model(device)
    model.load_state_dict(learned.state_dict())
    model.bfloat16().requires_grad_(False)
    if recipe is not None:
        nc.convert(model, recipe, weights=weights)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def measure(options: argparse.Namespace) -> list[Row]:
    device = options.device
    of_base, of_adapters = RATES[device]
    learned = new_model(device)
    train(learned, batches(text_of("docs", "md", device), options.base_steps, 1), of_base)
    sources = text_of("src/narrowcast", "py", device)
    seen, unseen = sources[: len(sources) * 9 // 10], sources[len(sources) * 9 // 10 :]
    rows, tokens = BATCH[device]
    held_out = list(batches(unseen, -(-EVALUATED // (rows * tokens)), 3))
    found: list[Row] = []
    for base, against, seed in itertools.product(BASES, ("beside", "kept", "new"), range(options.seeds)):
        merged_bf16 = base == "bf16" and against != "beside"
        if options.only not in f"{base}, {against}" or merged_bf16 or (seed and against != "beside"):
            continue
        lora = adapted(learned, base, 1 + seed, device)
        if against != "beside":
            nc.train_merged(lora, scales=against)  # type: ignore[arg-type]
        train(lora, batches(seen, options.steps, 2 + 10 * seed), of_adapters)
        loss, words = evaluate(lora, held_out)
        loss_of_base, _ = evaluate(base_copy(lora), held_out)
        row: Row = {"base": base, "trained": against, "seed": seed, "steps": options.steps}
        row |= {
            "parameters": lora.num_parameters(),
            "tokens": words.numel(),
            "loss_base": loss_of_base,
            "loss": loss,
        }
        for scales in ("kept", "new"):
            merged_model = nc.merge_adapters(copy.deepcopy(lora), scales)  # type: ignore[arg-type]
            loss_merged, words_merged = evaluate(merged_model, held_out)
            same = (words_merged == words).float().mean().item()
            recovery = (loss_of_base - loss_merged) / (loss_of_base - loss)
            merged = {"scales": scales, "loss_merged": loss_merged, "recovery": recovery, "same_argmax": same}
            found.append(row | merged)
            print(found[-1], flush=True)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--base-steps", type=int, default=300)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--seeds", type=int, default=1, help="of adapters beside the weight")
    chosen = options.parse_args()
    report("lora_merge", measure(chosen), chosen)


if __name__ == "__main__":
    main()
