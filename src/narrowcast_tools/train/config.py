"""Settings of a run's model and training, checked when they are made; without PyTorch, as `names` says."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from ..hardware import OPTIMIZERS
from .errors import SettingsError
from .names import one_of, recipe_name

VOCABULARY = 256  # bytes, the tokens without a tokenizer
RANDOM = "random"  # --init without a folder


def _require(ok: bool, option: str, value: object, fix: str) -> None:
    if not ok:
        raise SettingsError(f"{option} is {str(value).removesuffix('.0')}; {fix}")


def _require_count(config: object, name: str) -> None:
    value = getattr(config, name)
    _require(value > 0, option_of(name), value, "it must be at least 1")
    _require(value < 2**63, option_of(name), value, "it must be below 2^63")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder.

    Args:
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; `dim / heads` must be even (rotary pairs).
        kv_heads: key and value heads; divides `heads`.
        hidden: width of the gated feed-forward layer.
        tie_embeddings: share the embedding table with the output head.
        vocabulary: tokens that the model knows.
        rope_theta: base of the rotary position embedding.

    Raises:
        SettingsError: a size is not positive or does not divide as above.
    """

    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 704
    tie_embeddings: bool = False
    vocabulary: int = VOCABULARY
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "hidden", "vocabulary"):
            _require_count(self, name)
        _require(
            self.dim % (2 * self.heads) == 0,
            "--dim",
            self.dim,
            f"it must be a multiple of {2 * self.heads} (twice --heads {self.heads}, rotary pairs)",
        )
        _require(
            self.heads % self.kv_heads == 0,
            "--kv-heads",
            self.kv_heads,
            f"it must divide --heads {self.heads}",
        )

    @property
    def gemm_weights(self) -> int:
        """Weights of the linear layers of a block."""
        key_values = 2 * self.kv_heads * (self.dim // self.heads)
        return self.dim * (2 * self.dim + key_values + 3 * self.hidden)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run, and how often it saves.

    Args:
        recipe: a name of `recipes.CHOICES`.
        recipe_table: JSON from patterns of layer names to recipes, laid over `recipe`; see `recipes.recipe_table`.
        head_recipe: the recipe of the output head, a name of `recipes.CHOICES`.
        keep_bf16: patterns of layers that stay in bfloat16, separated by commas; laid over all of these.
        emulate: run a recipe without native kernels on an accelerator.
        device: `cpu` or `cuda`; see `resolve_device`.
        compile: run the model through `torch.compile(fullgraph=True)`.
        by_block: compile one block, which serves as all of them, and not the whole model.
        graphs: replay CUDA graphs of the compiled step.
        steps: optimizer steps of the whole run; the learning rate's decay ends there.
        batch_size: sequences of a step.
        accumulate: parts that the batch of a step is run in, one after the other; divides `batch_size`.
        recompute: keep only the input of each block for the backward, and run the block again there.
        seq_len: tokens of a sequence.
        lr: peak learning rate.
        warmup: steps of linear warmup.
        weight_decay: AdamW's decay, on matrices only.
        clip: largest global gradient norm.
        seed: seeds the weights, the batches and stochastic rounding.
        eval_every: steps between evaluations on held-out text.
        eval_batches: batches of an evaluation.
        save_every: steps between checkpoints, and one at the end; 0 for none. Does not affect the numbers.
        model: shape of the model.
        init: "random", or a folder with a Llama of Transformers, whose weights the run begins with.
        optimizer: a name of `narrowcast_tools.plan`'s: "adamw" keeps everything in float32, the others have bfloat16
            weights and gradients.
        chunked_loss: compute the loss in chunks of the vocabulary; the full scores are never stored.
        saved_activations: "fp8" keeps inputs of norms and activations in codes, where a recipe is in force; or empty.
        step_in_backward: step a block's parameters as soon as the backward has their gradients, and drop these.

    Raises:
        SettingsError: unknown recipe or a value out of range.
    """

    recipe: str = "bf16"
    recipe_table: str = ""
    head_recipe: str = "bf16"
    keep_bf16: str = ""
    emulate: bool = False
    device: str = "cpu"
    compile: bool = False
    by_block: bool = False
    graphs: bool = False
    steps: int = 300
    batch_size: int = 8
    accumulate: int = 1
    recompute: bool = False
    seq_len: int = 128
    lr: float = 1e-3
    warmup: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 25
    eval_batches: int = 8
    save_every: int = 100
    model: ModelConfig = field(default_factory=ModelConfig)
    init: str = RANDOM
    optimizer: str = "adamw"
    chunked_loss: bool = False
    saved_activations: str = ""
    step_in_backward: bool = False

    def __post_init__(self) -> None:
        for name in ("recipe", "head_recipe"):
            object.__setattr__(self, name, recipe_name(getattr(self, name), "--" + name.replace("_", "-")))
        one_of(OPTIMIZERS, self.optimizer, "--optimizer")
        for name in ("steps", "batch_size", "accumulate", "seq_len", "eval_every", "eval_batches"):
            _require_count(self, name)
        _require(
            self.batch_size % self.accumulate == 0,
            "--accumulate",
            self.accumulate,
            f"it must divide --batch-size {self.batch_size}",
        )
        # `not x > 0` also refuses NaN.
        _require(0 < self.lr < math.inf, "--lr", self.lr, "it must be above 0 and finite")
        _require(self.clip > 0, "--clip", self.clip, "it must be a number above 0")
        for name in ("warmup", "weight_decay", "seed", "save_every"):
            _require(getattr(self, name) >= 0, option_of(name), getattr(self, name), "it must be 0 or more")
        _require(self.seed < 2**64, "--seed", self.seed, "it must be below 2^64")
        saved = self.saved_activations
        _require(saved in ("", "fp8"), "--saved-activations", saved, "use fp8, or leave it out")
        if self.step_in_backward:
            self._require_steps_in_backward()

    def _require_steps_in_backward(self) -> None:
        """Check that nothing needs all gradients at once."""
        whole = self.compile and not self.by_block
        for broken, option, value, fix in (
            (self.accumulate > 1, "--accumulate", self.accumulate, "so none can be summed; give 1"),
            (self.clip < float("inf"), "--clip", self.clip, "so their norm is unknown; give --clip inf"),
            (self.graphs, "--graphs", "on", "but a graph needs all of them; give --no-graphs"),
            (whole, "--compile", "on", "but one graph needs all of them; add --by-block"),
        ):
            rest = f"--step-in-backward frees each gradient once it is used, {fix}, or --no-step-in-backward"
            _require(not broken, option, value, rest)

    @property
    def part_size(self) -> int:
        """Sequences that are run at once."""
        return self.batch_size // self.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.seq_len


Settings = TypeVar("Settings", ModelConfig, TrainConfig)
SHOWN = 4  # settings in a message
UNCOMPARED = {"save_every"}


def override(settings: Settings, **given: object) -> Settings:
    """Return the settings with those of `given` that are not None in their place, checked like new ones."""
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def option_of(name: str) -> str:
    """Return the command-line option that sets a field."""
    return "--" + name.replace("_", "-")


def setting_of(name: str, value: object) -> str:
    """Return how the command line spells a value, such as `--dim 256` or `--no-compile`."""
    if name == "vocabulary":  # no option of its own
        return f"a --tokenizer of {value} tokens" if value != VOCABULARY else "no --tokenizer"
    if name == "rope_theta":
        return f"a model with rope_theta {value:g}"
    if isinstance(value, bool):
        return option_of(name) if value else option_of(f"no_{name}")
    return f"{option_of(name)} {value}"


def settings_of(settings: Iterable[tuple[str, object]]) -> str:
    """Return how the command line spells the first settings, and how many more there are."""
    words = [setting_of(name, value) for name, value in settings]
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def compared_fields(config: TrainConfig) -> Iterator[tuple[str, object]]:
    """Yield the name and value of every setting that a resumed run must share with its checkpoint."""
    for part in (config, config.model):
        for item in fields(part):
            value = getattr(part, item.name)
            if item.name not in UNCOMPARED and not isinstance(value, ModelConfig):
                yield item.name, value
