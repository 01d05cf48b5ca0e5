"""The k3-KL of log-probabilities between a trainer and Transformers' own FP8 execution, on the same tokens.

    python benchmarks/bench_engine_kl.py --save

A Llama with ``nc.serving.forward_like`` takes two optimizer steps and is exported; Transformers loads the files and
runs them itself. ``execution`` says how: `finegrained-fp8` and `scaled_mm` (``use_optimized_inference=True``) quantize
inputs and multiply codes; `decoded`, the default for compressed-tensors, multiplies decoded inputs and weights.
``--kernels`` names a folder with the module that Transformers would load from the Hub, for a machine that reaches none.
``tokens_equal`` is the share of tokens with the same bits. It needs Transformers and compressed-tensors.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from harness import Row, parser, report
from torch import Tensor

import narrowcast as nc

CONFIGS: dict[str, dict[str, int]] = {
    "256 wide": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "2048 wide": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
    },
}
CASES = (
    ("hf-fp8-block128", "finegrained-fp8", "transformers"),
    ("fp8-channel", "scaled_mm", "transformers"),
    ("fp8-tensor", "scaled_mm", "transformers"),
    ("fp8-channel", "decoded", "compressed-tensors"),
    ("fp8-tensor", "decoded", "compressed-tensors"),
)
"""The format, how Transformers executes it, and the engine whose forward the trainer has."""
TRAINERS = (
    ("library", None, 8),
    ("batch-invariant", "batch-invariant", 8),
    ("batch-invariant, one process", "batch-invariant", 1),
)
"""Its order of sums: the last is that of Triton kernels that sum along a whole contraction."""


def trained(transformers: Any, shape: dict[str, int], engine: str, format: str, words: Tensor) -> Any:
    """A Llama after two optimizer steps with the engine's forward."""
    torch.manual_seed(0)
    sizes = {**shape, "num_key_value_heads": shape["num_attention_heads"] // 2, "vocab_size": 4096}
    config = transformers.LlamaConfig(**sizes)
    # not .to(torch.bfloat16), which would round the frequencies of rotary embeddings, too
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(words.device)
    nc.convert(model, nc.recipe.Float8CurrentScaling(), skip="lm_head")
    nc.serving.forward_like(model, engine, format=format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def log_probabilities(model: Any, words: Tensor) -> Tensor:
    """Return those of the words, each given those before it."""
    logits = model(input_ids=words, use_cache=False).logits.double()
    return logits.log_softmax(-1)[:, :-1].gather(-1, words[:, 1:, None])


def loaded(transformers: Any, model: Any, format: str, execution: str) -> Any:
    """The model as Transformers loads it."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": model.device}
    if execution == "scaled_mm":
        options["quantization_config"] = transformers.CompressedTensorsConfig(use_optimized_inference=True)
    served_as = format if execution == "finegrained-fp8" else "compressed-tensors"
    with tempfile.TemporaryDirectory() as folder:
        path = nc.export(model, f"{folder}/out", format=served_as).path
        return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


def rows_of(transformers: Any, name: str, case: tuple[str, str, str], device: str) -> Iterator[Row]:
    """One row per order of sums of the trainer."""
    words = torch.randint(4096, (8, 128), generator=torch.Generator().manual_seed(1)).to(device)
    format, execution, like = case
    model = trained(transformers, CONFIGS[name], like, format, words)
    engine = loaded(transformers, model, format, execution)
    # frequencies that were computed on a CPU and on a GPU differ in their last bits
    engine.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq)
    found = log_probabilities(engine, words)
    for trainer, mode, processes in TRAINERS:
        nc.set_deterministic(mode, processes=processes)
        own = log_probabilities(model, words)
        nc.set_deterministic(None)
        d = found - own
        yield {
            "model": name,
            "format": format,
            "execution": execution,
            "trainer": trainer,
            "k3_kl": (d.exp() - d - 1).mean().item(),
            "largest_difference": d.abs().max().item(),
            "tokens_equal": (d == 0).double().mean().item(),
        }


def use_kernels(folder: str) -> None:
    """Let Transformers take the module in a folder for the one that it would load from the Hub."""
    sys.path.insert(0, folder)
    finegrained: Any = importlib.import_module("transformers.integrations.finegrained_fp8")
    module = importlib.import_module("finegrained_fp8_kernels")
    finegrained._FINEGRAINED_FP8 = finegrained.FineGrainedFP8(module.matmul_2d, None, None)


def measure(chosen: argparse.Namespace) -> list[Row]:
    """All models and formats whose names contain ``--only``."""
    transformers = importlib.import_module("transformers")
    if chosen.kernels:
        use_kernels(chosen.kernels)
    rows: list[Row] = []
    for name in CONFIGS:
        for case in CASES:
            if chosen.only in f"{name} {' '.join(case)}":
                rows += [
                    {**row, "transformers": transformers.__version__}
                    for row in rows_of(transformers, name, case, chosen.device)
                ]
                print(rows[-3:], flush=True)
    return rows


def main() -> None:
    """Measure and report, where there is a GPU."""
    options = parser(__doc__)
    options.add_argument(
        "--kernels", help="folder of the module finegrained_fp8_kernels, which has matmul_2d"
    )
    report("engine_kl", measure(chosen := options.parse_args()), chosen)


if __name__ == "__main__":
    main()
