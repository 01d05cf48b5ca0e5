"""LoRA on quantized bases: the loss after training, and what each way of merging leaves of it.

A small Llama learns the pages of docs/, then adapters learn the sources. `recovery` is the share of what the adapters
gained on held-out text that is there after merging: 1 if the merged model has the loss of the trained one, 0 if it has
that of the base. `same_argmax` is the share of tokens after which both models expect the same next one. Needs
Transformers and PEFT.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Row, parser, report
from torch import Tensor

import narrowcast as nc
from narrowcast.convert.adapters import base_copy, merged_copy

ROOT = Path(__file__).parents[1]
BASES: dict[str, tuple[Any, Any]] = {
    "bf16": (None, None),
    "current, stored": (nc.recipe.Float8CurrentScaling(), "stored"),
    "current, nvfp4": (nc.recipe.Float8CurrentScaling(), "nvfp4"),
    "block, mxfp4": (nc.recipe.Float8BlockScaling(), "mxfp4"),
}
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
BATCH, TOKENS = 4, 64


def batches(folder: str, ending: str, count: int, seed: int) -> Iterator[Tensor]:
    files = sorted((ROOT / folder).rglob(f"*.{ending}"))
    text = torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - TOKENS, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + TOKENS] for start in starts])


def new_model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


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


def measure(options: argparse.Namespace) -> list[Row]:
    import peft

    learned = new_model()
    train(learned, batches("docs", "md", options.base_steps, 1), 2e-3)
    held_out = list(batches("src/narrowcast", "py", options.evaluated, 3))
    rows: list[Row] = []
    for base, (recipe, weights) in BASES.items():
        for against in ("beside", "kept", "new"):
            if options.only not in f"{base}, {against}" or (recipe is None and against != "beside"):
                continue
            model = new_model()
            model.load_state_dict(learned.state_dict())
            model.bfloat16().requires_grad_(False)
            if recipe is not None:
                nc.convert(model, recipe, weights=weights)
            torch.manual_seed(1)
            lora: Any = peft.get_peft_model(
                model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            )
            if against != "beside":
                nc.train_merged(lora, scales=against)  # type: ignore[arg-type]
            train(lora, batches("src/narrowcast", "py", options.steps, 2), 1e-3)
            loss, words = evaluate(lora, held_out)
            loss_of_base, _ = evaluate(base_copy(lora), held_out)
            row: Row = {
                "base": base,
                "trained": against,
                "steps": options.steps,
                "parameters": lora.num_parameters(),
            }
            row |= {"tokens": words.numel(), "loss_base": loss_of_base, "loss": loss}
            for scales in ("kept", "new"):
                loss_merged, words_merged = evaluate(merged_copy(lora, scales), held_out)
                same = (words_merged == words).float().mean().item()
                recovery = (loss_of_base - loss_merged) / (loss_of_base - loss)
                merged = {
                    "scales": scales,
                    "loss_merged": loss_merged,
                    "recovery": recovery,
                    "same_argmax": same,
                }
                rows.append(row | merged)
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--base-steps", type=int, default=300)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--evaluated", type=int, default=40, help="batches of held-out text")
    chosen = options.parse_args()
    report("lora_merge", measure(chosen), chosen)


if __name__ == "__main__":
    main()
