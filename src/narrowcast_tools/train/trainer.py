"""One model with its optimizer and recipe: a training step and an evaluation."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.optimizers import BackwardSteps, FusedAdam, step_in_backward

from .config import RANDOM, TrainConfig
from .data import Corpus, held_out_batches, train_batch
from .errors import SettingsError
from .memory import require_memory
from .model import Decoder, next_token_loss
from .pretrained import load as load_pretrained
from .ranks import ALONE, Ranks, mesh_of
from .recipes import HEAD, recipe_table, set_recipes
from .schedule import learning_rate

BETAS = (0.9, 0.95)
BACKEND = "inductor"


class Trainer:
    """Builds everything a run computes with, seeded; parameters are float32, with an
    `--optimizer` other than adamw bfloat16, products bfloat16 or narrower.

    Args:
        ranks: the processes that do it together: same model, each with its rows of every batch.

    Raises:
        SettingsError: the device has no kernels for the recipe without emulation, or its memory cannot
            hold the model or a batch.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.ranks = ranks
        self.corpus = corpus
        recipes = recipe_table(
            config.recipe,
            head=config.head_recipe,
            table=config.recipe_table,
            keep_bf16=config.keep_bf16,
            device=config.device,
            emulate=config.emulate,
            saved_activations=config.saved_activations or None,
        )
        if config.chunked_loss and isinstance(recipes.get(HEAD), nc.recipe.DelayedScaling):
            raise SettingsError(
                "--chunked-loss keeps no scales from step to step, and the head's recipe is delayed scaling; give "
                "--head-recipe current or block"
            )
        require_memory(config, ranks.count, ranks.parts)
        torch.manual_seed(config.seed)
        self.model = _make_model(config).to(config.device)
        set_recipes(self.model, recipes, keep_bf16=config.keep_bf16)
        self.model.loss_recipe = recipes.get(HEAD)
        self.orders = ranks.shard(self.model)
        self._delayed = any(isinstance(recipe, nc.recipe.DelayedScaling) for recipe in recipes.values())
        self.optimizer = _make_optimizer(self.model, config)
        self._steps: BackwardSteps | None = None
        if config.graphs:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.loss = _compiled(self.model, config) if config.compile else next_token_loss
        batches = held_out_batches(
            corpus,
            batch_size=config.part_size,
            seq_len=config.seq_len,
            count=config.eval_batches * config.accumulate,
        )
        self.held_out = [self._to_device(batch) for batch in batches]

    def step(self, index: int) -> Tensor:
        """Run one optimizer step.

        Args:
            index: the step's index, which decides batch and learning rate.

        Returns:
            the mean loss of the batch before the update, a detached float32 scalar on the device.
        """
        config = self.config
        rate = learning_rate(index, peak=config.lr, warmup=config.warmup, steps=config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = train_batch(
            self.corpus, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed, step=index
        )
        parts = [self._to_device(part) for part in zip(*(whole.split(config.part_size) for whole in batch))]
        # ranks need common scales; one process has the same history. A run that goes on has them from the checkpoint
        if self._delayed and index == 0:
            self._begin_scales(parts[0])
        if self.config.step_in_backward and self._steps is None:  # after gradients that do not count
            self._steps = step_in_backward(self.optimizer, self.model.blocks)
        losses = [
            self._backward(part, sums_gradients=number == len(parts)) for number, part in enumerate(parts, 1)
        ]
        if config.clip < math.inf:
            if self.ranks.mode:
                nc.distributed.clip_grad_norm_(self.model, config.clip)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self._reduce_amax()
        self.optimizer.step()
        # Gradients that autograd has not allocated yet would be taken out of a replayed graph's memory.
        self.optimizer.zero_grad(set_to_none=not config.graphs)
        return self.ranks.add(torch.stack(losses).sum())

    def _backward(self, part: tuple[Tensor, Tensor], *, sums_gradients: bool) -> Tensor:
        """Run forward and backward of one of a batch's equal parts, and return its share of the mean loss."""
        self.ranks.sums_gradients(self.model, sums_gradients)
        if self.config.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self._forward(*part) / (self.config.accumulate * self.ranks.parts)
        # in this thread: waking the one that autograd keeps for a GPU costs a step of small kernels 3 to 7%
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return loss.detach()

    def _begin_scales(self, part: tuple[Tensor, Tensor]) -> None:
        """Renew the scales from a batch, twice: in the first pass what was not seen yet may saturate."""
        for _ in range(2):
            with torch.random.fork_rng():
                self._backward(part, sums_gradients=True)
            self._reduce_amax()
            nc.renew_delayed_scaling(self.model)
            self.optimizer.zero_grad(set_to_none=not self.config.graphs)

    def _reduce_amax(self) -> None:
        """Agree with the other ranks on what the step has collected, from which it renews the scales."""
        if self._delayed and self.ranks.count > 1:
            nc.reduce_delayed_scaling(self.model)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-out batches, in nats per token."""
        losses = []
        self.model.eval()  # in training mode delayed scaling would count these inputs, too
        for batch in self.held_out:
            if self.config.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            losses.append(self._forward(*batch).clone())  # a replayed graph writes over its result
        self.model.train()
        return self.ranks.add(torch.stack(losses).mean() / self.ranks.parts).item()

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.config.device, dtype=torch.bfloat16):
            return self.loss(self.model, tokens, targets)

    def _to_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        parts = [self.ranks.part(whole) for whole in batch]
        if self.config.device == "cuda":  # a copy out of other memory waits until the GPU has nothing to do
            parts = [part.pin_memory() for part in parts]
        tokens, targets = (part.to(self.config.device, non_blocking=True) for part in parts)
        return tokens, targets


def _make_model(config: TrainConfig) -> Decoder:
    """Build the model; in float32 on the CPU, so that the weights of a seed are the same on every device."""
    place: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    if config.optimizer != "adamw":  # a model that fills a GPU would take minutes there
        place = {"device": config.device, "dtype": torch.bfloat16}
    options = {"recompute": config.recompute, "chunked_loss": config.chunked_loss}
    model = Decoder(config.model, config.seq_len, **options, **place)
    if config.init != RANDOM:
        load_pretrained(model, config.model, Path(config.init))
    return model


def _compiled(model: Decoder, config: TrainConfig) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Compile the blocks of the model or the whole, and return the loss that uses what was compiled."""
    options = {"triton.cudagraphs": config.graphs} if config.device == "cuda" else {}
    given: dict[str, Any] = {"fullgraph": True, "backend": BACKEND, "options": options or None}
    if not config.by_block:
        return torch.compile(next_token_loss, **given)
    for block in model.blocks:
        block.compile(**given)
    return next_token_loss


def _make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `--optimizer` names; AdamW is one pass of `FusedAdam` on a GPU.

    That writes the codes of weights, too; not in the backward, nor where graphs are replayed, which would copy them.
    """
    # Tensors with another placement on ranks are updated separately.
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault((parameter.ndim < 2, mesh_of(parameter)), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": 0.0 if vector else config.weight_decay}
        for (vector, _), parameters in kinds.items()
    ]
    options: dict[str, Any] = {"lr": config.lr, "betas": BETAS}
    if config.optimizer.startswith("fused"):
        moments = torch.bfloat16 if config.optimizer == "fused-bf16" else torch.int8
        options |= {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
        if config.optimizer == "fused-stochastic":
            return FusedAdam(groups, stochastic_rounding=True, **options)
        return FusedAdam(groups, master_weights=True, store_param_remainders=True, **options)
    if config.device == "cuda" and config.optimizer == "adamw":
        codes = None if config.graphs or config.step_in_backward else model
        return FusedAdam(groups, weight_codes=codes, **options)
    return torch.optim.AdamW(groups, fused=True, **options)
