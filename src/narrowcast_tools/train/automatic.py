"""`--recipe auto`: FP8 for layers of the sizes that it makes faster on this GPU, bfloat16 for the others."""

from dataclasses import replace

import torch

import narrowcast as nc

from .config import VOCABULARY, TrainConfig
from .model import Decoder
from .recipes import CHOICES, HEAD

RECIPE = "current"  # keeps no state, so that layers may differ in it
BLOCK = "blocks.0."


def choose(config: TrainConfig, *, alone: bool) -> tuple[TrainConfig, str]:
    """Return the settings with the recipe of `auto`, and the choice in words.

    Layers that lose are added to `keep_bf16`, so that the run's folder says what was chosen.

    Args:
        config: in bfloat16.
        alone: one process makes the run. Several would time their parts apart, and stay in bfloat16.
    """
    if config.device == "cpu":
        return config, (
            "auto: bf16; a CPU gains nothing from fewer bits, which it emulates; to compare: --recipe bf16,current"
        )
    native, reason = CHOICES[RECIPE].availability()
    if not native:
        return config, f"auto: bf16; {reason}"
    if config.recipe_table or not alone:
        option = "--parallel" if config.recipe_table == "" else "--recipe-table"
        return config, f"auto: bf16, since no layers are timed with {option}"
    shares = _shares(config)
    slower = [name for name, share in shares.items() if share > nc.policy.GAIN]
    told = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    told = f"time of a layer under {RECIPE}, relative to bf16: {told}"
    if len(slower) == len(shares):
        return config, f"auto: bf16; {told}"
    kept = [word for word in (config.keep_bf16, *(f"blocks.*.{name}" for name in slower)) if word]
    words = f"{RECIPE}, but bf16 for {', '.join(slower)}" if slower else RECIPE
    return replace(config, recipe=RECIPE, keep_bf16=",".join(kept)), f"auto: {words}; {told}"


def _shares(config: TrainConfig) -> dict[str, float]:
    """Return the time of each layer of a block under the recipe, relative to bfloat16; measured once per GPU."""
    shape = replace(
        config.model, layers=1, vocabulary=VOCABULARY
    )  # the embedding may be larger than all blocks
    block = Decoder(shape, config.seq_len).to(torch.bfloat16)
    rows, policy = config.part_size * config.seq_len, "auto-graphs" if config.graphs else "auto"
    recipe = CHOICES[RECIPE].recipe()  # type: ignore[misc]
    nc.set_recipe(block, {"": recipe, HEAD: None}, policy=policy, rows=rows)
    told = rows, str(torch.bfloat16), nc.recipe.recipes_to_json({"": recipe}), config.graphs
    times = {
        (one.out_features, one.in_features): one.recipe_ms / one.plain_ms
        for one in nc.policy.timings()
        if (one.rows, one.dtype, one.recipe, one.replayed) == told
    }
    layers = {name: module for name, module in block.named_modules() if isinstance(module, nc.Linear)}
    return {
        name.removeprefix(BLOCK): times[layer.out_features, layer.in_features]
        for name, layer in layers.items()
        if name.startswith(BLOCK)
    }
