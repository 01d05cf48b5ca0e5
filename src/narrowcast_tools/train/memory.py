"""Estimate of a run's memory, which refuses a run that cannot fit before anything is allocated."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..hardware import RECIPES, find_optimizer
from ..plan.estimate import Layout, held
from ..plan.models import Model
from .config import RANDOM, ModelConfig, TrainConfig
from .errors import SettingsError, TrainingError
from .presets import PRESETS

FLOAT = 4
TOKEN = 8  # int64


def parameters_of(config: ModelConfig) -> int:
    """Return the number of parameters of a `Decoder`, without building it."""
    block = config.gemm_weights + 2 * config.dim  # and the norms
    tables = config.vocabulary * config.dim * (1 if config.tie_embeddings else 2)
    return config.layers * block + tables + config.dim


def bytes_of_weight(config: TrainConfig) -> float:
    """Return the bytes of a weight and its optimizer state, and of its gradient if a step keeps all."""
    weight, gradient, state = find_optimizer(config.optimizer)
    return weight + gradient * (not config.step_in_backward) + state


def expected_peak(config: TrainConfig) -> float | None:
    """Return the bytes that `narrowcast plan` expects at the peak of a step; None if it has no such recipe."""
    if config.recipe not in RECIPES:
        return None
    shape = config.model
    sizes = (shape.layers, shape.dim, shape.hidden, shape.heads, shape.kv_heads, shape.vocabulary)
    head_dim = shape.dim // shape.heads
    layout = Layout(
        1,
        config.tokens_per_step,
        config.seq_len,
        micro_batch=config.part_size,
        recompute=config.recompute,
        saved_fp8=config.saved_activations == "fp8" and config.recipe != "bf16",
        chunked_loss=config.chunked_loss,
        step_in_backward=config.step_in_backward,
        state=find_optimizer(config.optimizer),
    )
    return sum(held(Model("", *sizes, head_dim, head_dim), layout, config.recipe).values())


def require_memory(config: TrainConfig, ranks: int = 1, parts: int = 1) -> None:
    """Check the parts of a run that surely are in memory at once against what the machine has.

    Args:
        ranks: processes that share the parameters. Each builds the whole model before it keeps its part.
        parts: parts that a batch is split in among them.

    Raises:
        SettingsError: one part alone is larger than the memory of the device; the message names its options.
    """
    room = _memory_of(config.device)
    tokens = config.part_size * config.seq_len // parts
    wanted = (
        (
            "model with its optimizer",
            _bytes_of_model(config, ranks),
            "--dim, --hidden or --layers",
        ),
        (
            "scores of a batch",
            FLOAT * config.model.vocabulary * tokens * (not config.chunked_loss),
            "--batch-size or --seq-len",
        ),
        (
            "held-out batches",
            2 * TOKEN * config.tokens_per_step * config.eval_batches // parts,
            "--eval-batches or --batch-size",
        ),
    )
    for index, (what, size, options) in enumerate(wanted):
        if size > room:
            smaller = _largest_preset(room, ranks) if index == 0 and config.init == RANDOM else ""
            raise SettingsError(
                f"the {what} would take {_gigabytes(size)}, and this machine's {config.device} has "
                f"{_gigabytes(room)}; lower {options}{smaller}"
            )


def _largest_preset(room: float, ranks: int) -> str:
    """Return the advice to take the largest preset whose model fits; "" if none does."""
    sizes = {name: _bytes_of_model(preset, ranks) for name, preset in PRESETS.items()}
    fitting = [name for name in sizes if sizes[name] <= room]
    return f", or use --preset {max(fitting, key=sizes.__getitem__)}" if fitting else ""


def _bytes_of_model(config: TrainConfig, ranks: int) -> int:
    """Return the bytes of a model with its optimizer on a rank, which builds the model as a whole."""
    return int(max(FLOAT, bytes_of_weight(config) / ranks) * parameters_of(config.model))


@contextmanager
def memory_told(config: TrainConfig) -> Iterator[None]:
    """Re-raise torch's out-of-memory errors as ``TrainingError``.

    Raises:
        TrainingError: memory ran out; the message names the options that need less.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # For CPU memory only torch's message identifies the error.
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise TrainingError(
            f"{config.device} ran out of memory; lower --batch-size ({config.batch_size}), --seq-len or --dim, "
            "or give --recompute or --accumulate"
        ) from error


def _memory_of(device: str) -> int:
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return 2**63


def _gigabytes(size: int) -> str:
    return f"{size // 2**30:,} GiB"
