"""Text from a trained checkpoint: one token after the other, with the keys and values of earlier ones kept."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast._checks import counted

from . import checkpoint
from .asked import Choice
from .config import ModelConfig, TrainConfig
from .device import compiler_told
from .errors import SettingsError
from .folder import CHECKPOINTS, DESCRIPTION, only_run_of, without_checkpoint
from .model import Decoder, Generation, rope_tables
from .recipes import HEAD, build_recipe, recipe_table, set_recipes
from .snapshot import MODEL, restore_model
from .tokens import TOKENIZER, Tokens, load_tokens

WARM_UP = 4  # tokens that the speed leaves out: the prompt's, and those at which the compiler works


def draw(choice: Choice, scores: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token per row: scores (batch, vocabulary) to int64 (batch, 1)."""
    if choice.temperature == 0:
        return scores.argmax(-1, keepdim=True)
    scores = scores.float() / choice.temperature
    if choice.top_k:
        least = scores.topk(min(choice.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)


@dataclass(frozen=True)
class Trained:
    """A trained model, ready to generate.

    Args:
        model: in bfloat16, in evaluation.
        config: settings of its run.
        tokens: what its tokens are.
        step: of its checkpoint.
        passed_over: a line for each newer checkpoint that is damaged.
    """

    model: Decoder
    config: TrainConfig
    tokens: Tokens
    step: int
    passed_over: list[str]


def load_trained(path: Path, *, device: str, recipe: str | None = None, emulate: bool = False) -> Trained:
    """Load the newest checkpoint of a run.

    Args:
        path: folder of the run, of its checkpoints, or of one checkpoint; or a folder that holds one run alone.
        device: `cpu` or `cuda`.
        recipe: name of a recipe instead of the run's; None for the run's, tables and patterns included.
        emulate: as `recipes.build_recipe` takes it.

    Raises:
        SettingsError: there is no checkpoint, it is damaged, or the device has no kernels for the recipe.
    """
    if (path / DESCRIPTION).exists():
        try:
            found, passed_over, run = checkpoint.load(path), [], path.parent.parent
        except checkpoint.DamagedCheckpoint as error:
            raise SettingsError(f"{path} cannot be read: {error}; give another checkpoint") from error
    else:
        try:
            run = only_run_of(path)
            found, passed_over = checkpoint.load_newest(run / CHECKPOINTS)
        except checkpoint.NoCheckpoint as error:
            why = f" ({error.passed_over})" if error.passed_over else ""
            raise SettingsError(without_checkpoint(path, why)) from error
    settings = found.meta["settings"]
    model_settings = {
        field.name: settings[field.name] for field in fields(ModelConfig) if field.name in settings
    }
    own = {field.name: settings[field.name] for field in fields(TrainConfig) if field.name in settings}
    config = TrainConfig(**{**own, "device": device, "model": ModelConfig(**model_settings)})
    tokenizer = run / TOKENIZER
    tokens = load_tokens(tokenizer if tokenizer.exists() else None)
    if tokens.vocabulary != config.model.vocabulary:
        raise SettingsError(
            f"{path} was trained on {config.model.vocabulary} tokens, and {tokenizer} is not there; put its "
            "tokenizer.json back"
        )
    model = Decoder(config.model, config.seq_len)
    table = recipe_table(
        config.recipe,
        head=config.head_recipe,
        table=config.recipe_table,
        keep_bf16=config.keep_bf16,
        device="cpu" if recipe else device,
        emulate=emulate or config.emulate,
    )
    # first: delayed scaling's state is loaded with the weights
    set_recipes(model, table, keep_bf16=config.keep_bf16)
    restore_model(found.tensors[MODEL], model)
    if recipe is not None:
        set_recipes(model, {"": build_recipe(recipe, device=device, emulate=emulate), HEAD: None})
    model.to(device=device, dtype=torch.bfloat16).eval()
    return Trained(model, replace(config, compile=False), tokens, found.step, passed_over)


@torch.no_grad()
def generate(
    trained: Trained,
    prompt: Tensor,
    count: int,
    *,
    samples: int,
    choice: Choice,
    seed: int,
    compile: bool = False,
    graphs: bool = False,
) -> Iterator[Tensor]:
    """Continue a prompt so many times.

    Args:
        prompt: int64 (length,) on the CPU, not empty.
        count: tokens to make.
        compile: decode with `torch.compile(fullgraph=True)`; the prompt runs uncompiled.
        graphs: replay CUDA graphs of it.

    Yields:
        int64 (samples,) on the device, `count` times.

    Raises:
        SettingsError: the scores are not finite, as after a run that diverged.
        TrainingError: compiling failed.
    """
    model, device = trained.model, trained.config.device
    angles = rope_tables(len(prompt) + count, trained.config.model.dim // trained.config.model.heads)
    model.cos, model.sin = (part.to(device) for part in angles)
    cache = nc.InferenceParams(samples, len(prompt) + count, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    decode = _compiled(model, graphs, device) if compile else model
    new, run = prompt.to(device).expand(samples, -1), model
    for position in range(count):
        cache.pre_step(dict.fromkeys(range(samples), new.shape[1]))
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with compiler_told():
            scores = run(new, Generation(cache, first=position == 0))
        if position == 0 and not scores.isfinite().all():  # once: on a GPU the check waits for the scores
            raise SettingsError(
                f"the model of step {trained.step} gives scores that are not finite: its run diverged; give an "
                f"earlier checkpoint, or train again with --lr below {trained.config.lr:g}"
            )
        new = draw(choice, scores[:, -1], generator)
        yield new[:, 0]
        run = decode


def _compiled(model: Decoder, graphs: bool, device: str) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"triton.cudagraphs": graphs} if device == "cuda" else {}
    return torch.compile(model, fullgraph=True, options=options)


class Answer:
    """Continuations of a prompt, as text.

    Args:
        prompt: text to continue; at least a token.

    Raises:
        SettingsError: the prompt has no token.
    """

    def __init__(self, trained: Trained, prompt: str, count: int, *, samples: int) -> None:
        self._trained, self._prompt, self._count, self._samples = trained, prompt, count, samples
        self._start = trained.tokens.encode([prompt.encode()]).long()
        if not len(self._start):
            raise SettingsError("--prompt is empty; give it some text to continue")
        self.pace = ""

    @property
    def remark(self) -> str:
        """A line for people where more positions are needed than the model has seen."""
        positions, seen = len(self._start) + self._count, self._trained.config.seq_len
        told = (
            f"{positions:,} positions, and the model was trained on {seen:,}: it has not seen the later ones"
        )
        return told if positions > seen else ""

    def texts(self, choice: Choice, *, seed: int, compile: bool, graphs: bool) -> Iterator[str]:
        """Yield the text piece by piece as it is made; of several samples each as a whole, at the end.

        `pace` tells the speed afterwards, without the prompt and the first token after it.
        """
        trained, alone = self._trained, self._samples == 1
        steps = generate(
            trained,
            self._start,
            self._count,
            samples=self._samples,
            choice=choice,
            seed=seed,
            compile=compile,
            graphs=graphs,
        )
        if alone:
            yield self._prompt
        drawn: list[Tensor] = []
        row: list[int] = []
        shown, began = "", 0.0
        for new in steps:
            drawn.append(new)
            if alone:
                row.append(int(new))
                # A last character that is not whole yet waits for its rest.
                text = trained.tokens.decode(row).rstrip("\N{REPLACEMENT CHARACTER}")
                if text.startswith(shown):
                    yield text[len(shown) :]
                    shown = text
            if len(drawn) <= WARM_UP:
                _wait(trained.config.device)
                began = time.perf_counter()
        rows = torch.stack(drawn, 1).tolist()
        seconds, timed = time.perf_counter() - began, len(drawn) - WARM_UP
        speed = f", {timed * self._samples / seconds:,.0f} tok/s" if timed > 0 else ""
        self.pace = f"step {trained.step}, {counted(len(drawn), 'token')}, samples: {self._samples}{speed}"
        if not alone:
            for number, row in enumerate(rows, 1):
                yield f"{'' if number == 1 else chr(10)}--- {number}\n{self._prompt}{trained.tokens.decode(row)}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
