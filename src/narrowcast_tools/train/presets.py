"""Settings by name: the shapes of known models, with a batch and a learning rate that suit them."""

import math
from dataclasses import replace

from .config import ModelConfig, TrainConfig
from .names import one_of

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

# Sized so that its eager runs take minutes on two CPU cores and still learn visibly. The learning
# rate is below the fastest one: there, a change of the last bit moves the final loss by as much as a recipe does.
DEMO = TrainConfig(
    steps=240,
    batch_size=8,
    seq_len=128,
    lr=1e-3,
    warmup=40,
    eval_every=30,
    eval_batches=8,
    save_every=30,
    model=ModelConfig(dim=128, layers=2, heads=4, kv_heads=2, hidden=352),
)
# Shows that every recipe learns, in little time. Losses still fall steeply: gaps are larger than in the full demo.
QUICK = replace(DEMO, steps=40, batch_size=4, lr=2e-3, warmup=8, eval_every=10, eval_batches=4, save_every=20)
# Of a CPU core with AVX-512, as in benchmarks/results/LOG.md.
DEMO_TIME, QUICK_TIME = "four minutes", "half a minute"


def find_preset(name: str) -> TrainConfig:
    """Return the settings of a preset.

    Raises:
        SettingsError: the name is unknown.
    """
    return PRESETS[one_of(PRESETS, name, "--preset")]


def fitting_warmup(start: TrainConfig, steps: int | None) -> int:
    """Return the warmup of a preset for another number of steps: of fewer at most a sixth, as `with_steps` has."""
    return start.warmup if steps is None or steps >= start.steps else min(start.warmup, max(0, steps // 6))


def fitting_evaluations(start: TrainConfig, steps: int | None) -> int:
    """Return the steps between evaluations of a preset for another number of steps: at least ten evaluations."""
    return start.eval_every if steps is None else min(start.eval_every, max(1, steps // 10))


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the settings for another number of steps, with a warmup and evaluations that fit into it."""
    every = max(1, steps // 8)
    return replace(config, steps=steps, warmup=max(0, steps // 6), eval_every=every, save_every=every)
