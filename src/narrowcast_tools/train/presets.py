"""Settings by name: the shapes of known models, with a batch and a learning rate that suit them."""

import math
from dataclasses import replace

from narrowcast._checks import not_among

from .config import ModelConfig, TrainConfig
from .errors import SettingsError

_1B = TrainConfig(
    steps=1000,
    batch_size=4,
    seq_len=2048,
    lr=3e-4,
    warmup=100,
    eval_every=100,
    eval_batches=4,
    save_every=500,
    model=ModelConfig(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192),
)

PRESETS = {
    "tiny": TrainConfig(),
    # GPT-2 small's width and depth with a feed-forward layer of three matrices. Its 125M parameters come with a
    # vocabulary of some 50,000 tokens; on bytes it has 85M.
    "125m": replace(
        _1B,
        steps=1500,
        batch_size=8,
        seq_len=1024,
        lr=6e-4,
        eval_batches=8,
        model=ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, hidden=2048),
    ),
    "1b": _1B,
    # Four of the 32 blocks of an 8B Llama, which is what fits one GPU with its optimizer and shows the same speed.
    "8b-slice": replace(_1B, model=ModelConfig(dim=4096, layers=4, heads=32, kv_heads=8, hidden=14336)),
    # Fine-tuning of all weights on one GPU of 80 GB or more.
    "8b": replace(
        _1B,
        batch_size=1,
        seq_len=8192,
        lr=1e-5,
        warmup=20,
        clip=math.inf,
        save_every=0,
        optimizer="fused-stochastic",
        chunked_loss=True,
        saved_activations="fp8",
        step_in_backward=True,
        model=ModelConfig(
            dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=128256, rope_theta=500_000.0
        ),
    ),
}


def find_preset(name: str) -> TrainConfig:
    """Return the settings of a preset.

    Raises:
        SettingsError: the name is unknown.
    """
    if name not in PRESETS:
        raise SettingsError(f"--preset is {not_among(name, PRESETS)}")
    return PRESETS[name]
