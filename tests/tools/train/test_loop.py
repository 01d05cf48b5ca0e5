"""A run: what it measures, what it tells, how it stops."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import narrowcast as nc
from narrowcast.testing import TOLERANCES
from narrowcast_tools.train import checkpoint
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.data import Corpus
from narrowcast_tools.train.errors import SettingsError, TrainingError
from narrowcast_tools.train.loop import Run
from narrowcast_tools.train.progress import Progress
from narrowcast_tools.train.trainer import Trainer


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "mxfp8", "block", "nvfp4"])
def test_it_learns(recipe: str, config: TrainConfig, corpus: Corpus, progress: Progress) -> None:
    config = replace(config, recipe=recipe, steps=30, batch_size=4, eval_every=15, lr=1e-2)
    history = Run(config, corpus, progress, folder=None).train().history
    assert [step for step, _ in history.held_out] == [0, 15, 30]
    assert history.held_out[0][1] == pytest.approx(math.log(256), abs=0.15)
    assert history.held_out[-1][1] < 4.0


def test_results(config: TrainConfig, corpus: Corpus, progress: Progress) -> None:
    result = Run(config, corpus, progress, folder=None).train()
    assert (result.recipe, result.steps) == ("bf16", 6)
    assert len(result.history.train) == 6
    assert [step for step, _ in result.history.held_out] == [0, 2, 4, 6]
    assert result.held_out_loss == result.history.held_out[-1][1]
    assert 0 < result.pace.tokens_per_second < 1e9
    assert result.seconds > 0


def test_seeds_decide(config: TrainConfig, corpus: Corpus, progress: Progress) -> None:
    def losses(seed: int) -> list[float]:
        return Run(replace(config, seed=seed), corpus, progress, folder=None).train().history.train

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_recipes_start_from_the_same_weights(config: TrainConfig, corpus: Corpus) -> None:
    plain = Trainer(config, corpus).model.state_dict()
    quantized = Trainer(replace(config, recipe="nvfp4"), corpus).model.state_dict()
    assert all(torch.equal(plain[name], quantized[name]) for name in plain)


def test_the_recipe_changes_the_numbers(config: TrainConfig, corpus: Corpus, progress: Progress) -> None:
    losses = {
        recipe: Run(replace(config, recipe=recipe), corpus, progress, folder=None).train().held_out_loss
        for recipe in ("bf16", "delayed", "current", "mxfp8", "block", "nvfp4")
    }
    # Scales that are powers of two may round alike on so small a model: MXFP8 and 128-block FP8 may be equal.
    assert len(set(losses.values())) >= 5, losses
    assert [recipe for recipe in losses if losses[recipe] == losses["bf16"]] == ["bf16"]


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "delayed"])
def test_evaluation_does_not_touch_the_training(
    recipe: str, config: TrainConfig, corpus: Corpus, progress: Progress
) -> None:
    config = replace(config, recipe=recipe)
    often = Run(replace(config, eval_every=1), corpus, progress, folder=None).train().history.train
    rarely = Run(replace(config, eval_every=6), corpus, progress, folder=None).train().history.train
    assert often == rarely


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8"])
def test_a_batch_in_parts_is_the_same_step(
    recipe: str, config: TrainConfig, corpus: Corpus, progress: Progress
) -> None:
    config = replace(config, recipe=recipe, batch_size=4)
    whole, parts = (
        Run(replace(config, accumulate=count), corpus, progress, folder=None).train().history
        for count in (1, 4)
    )
    tolerance = TOLERANCES["training_loss"].relative
    assert parts.train == pytest.approx(whole.train, rel=tolerance)
    assert [loss for _, loss in parts.held_out] == pytest.approx(
        [loss for _, loss in whole.held_out], rel=tolerance
    )


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "mxfp8", "block", "nvfp4"])
def test_recomputing_changes_no_bit(
    recipe: str, config: TrainConfig, corpus: Corpus, progress: Progress
) -> None:
    config = replace(config, recipe=recipe, accumulate=2, steps=3, eval_every=3)
    kept, again = (
        Run(replace(config, recompute=recompute), corpus, progress, folder=None).train().history
        for recompute in (False, True)
    )
    assert again == kept


def test_recomputing_saves_less(config: TrainConfig, corpus: Corpus) -> None:
    sizes = []
    for recompute in (False, True):
        trainer = Trainer(replace(config, recompute=recompute), corpus)
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer._forward(*trainer.held_out[0])
        sizes.append(sum(saved.values()))
    assert sizes[1] < 0.7 * sizes[0]


def test_backward_runs_in_the_calling_thread_and_leaves_autograd_as_it_was(
    config: TrainConfig, corpus: Corpus
) -> None:
    trainer = Trainer(config, corpus)
    seen: list[bool] = []
    next(trainer.model.parameters()).register_hook(
        lambda grad: seen.append(torch._C._is_multithreading_enabled())
    )
    trainer.step(0)
    assert seen == [False] and torch._C._is_multithreading_enabled()


def test_the_first_step_under_delayed_scaling_has_scales_of_its_batch(
    config: TrainConfig, corpus: Corpus
) -> None:
    config = replace(config, recipe="delayed", accumulate=2)
    trainer = Trainer(config, corpus)
    loss = trainer.step(0)
    layers = [one for one in trainer.model.modules() if getattr(one, "scale", None) is not None]
    assert layers and all(one.scale[0] != 16.0 and one.scale[2] != 65536.0 for one in layers)
    current = Trainer(replace(config, recipe="current"), corpus)
    assert torch.allclose(loss, current.step(0), rtol=1e-3)


def test_layers_have_the_recipes_of_their_patterns(config: TrainConfig, corpus: Corpus) -> None:
    table = nc.recipe.recipes_to_json(
        {"blocks.1": nc.recipe.MXFP8BlockScaling(), "head": nc.recipe.Float8CurrentScaling()}
    )
    model = replace(config.model, layers=3)
    config = replace(
        config, recipe="delayed", recipe_table=table, keep_bf16="blocks.*.attention, head", model=model
    )
    recipes = nc.get_recipes(Trainer(config, corpus).model)
    assert {type(recipe) for name, recipe in recipes.items() if ".attention." in name} == {type(None)}
    assert recipes["head"] is None
    assert isinstance(recipes["blocks.0.feed_forward.down"], nc.recipe.DelayedScaling)
    assert isinstance(recipes["blocks.1.feed_forward.down"], nc.recipe.MXFP8BlockScaling)
    with pytest.raises(SettingsError, match=r"^--keep-bf16: 'lm_head' matches no .*the nearest: 'head'"):
        Trainer(replace(config, keep_bf16="lm_head"), corpus)


def test_the_head_has_a_recipe_of_its_own(config: TrainConfig, corpus: Corpus) -> None:
    trainers = [
        Trainer(replace(config, recipe="block", head_recipe=name), corpus) for name in ("none", "current")
    ]
    recipes = [nc.get_recipes(trainer.model) for trainer in trainers]
    assert recipes[0].pop("head") is None
    assert isinstance(recipes[1].pop("head"), nc.recipe.Float8CurrentScaling)
    assert {type(recipe) for one in recipes for recipe in one.values()} == {nc.recipe.Float8BlockScaling}
    losses = [trainer.step(0).item() for trainer in trainers]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.01 * losses[0]


def test_a_loss_that_is_not_finite_ends_the_run(
    config: TrainConfig, corpus: Corpus, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = torch.tensor([5.0, 5.0, 5.0, float("nan"), 5.0, 5.0])
    monkeypatch.setattr(Trainer, "step", lambda self, index: losses[index])
    with pytest.raises(
        TrainingError, match=r"the loss is nan at step 4; lower --lr \(0\.002\) or --clip \(1\.0\)"
    ):
        Run(config, corpus, progress, folder=None).train()


def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_save = checkpoint.save

    def save(folder: Path, **arguments) -> Path:
        if arguments["step"] == 6:
            raise OSError(28, "No space left on device")
        return really_save(folder, **arguments)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(TrainingError, match=r"No space left on device; the checkpoint of step 3 is kept"):
        Run(config, corpus, progress, tmp_path).train()
    assert checkpoint.load_newest(tmp_path)[0].step == 3


def test_running_out_of_memory_is_told(
    config: TrainConfig, corpus: Corpus, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Trainer, index: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(TrainingError, match=r"cpu ran out of memory; lower --batch-size \(2\)"):
        Run(config, corpus, progress, folder=None).train()


def test_a_last_step_that_diverges_is_told(
    config: TrainConfig, corpus: Corpus, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step is that before it, so only an evaluation sees what the last one did."""
    losses = iter((5.0, float("nan")))
    monkeypatch.setattr(Trainer, "evaluate", lambda self: next(losses))
    with pytest.raises(TrainingError, match=r"the held-out loss is nan at step [1-9]\d*; lower --lr"):
        Run(config, corpus, progress, folder=None).train()


def test_weights_that_are_not_finite_are_not_saved(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save without an evaluation replaced the last checkpoint that was good, and generate raised on it."""
    step = Trainer.step

    def diverging(self: Trainer, index: int) -> torch.Tensor:
        loss = step(self, index)
        if index == 1:
            next(self.model.parameters()).data.fill_(torch.nan)
        return loss

    monkeypatch.setattr(Trainer, "step", diverging)
    config = replace(config, save_every=1, eval_every=100)
    with pytest.raises(TrainingError, match=r"the norm of the weights is nan at step 2; lower --lr"):
        Run(config, corpus, progress, tmp_path).train()
    assert checkpoint.load_newest(tmp_path)[0].step == 1


def test_a_model_that_begins_without_finite_weights_is_not_blamed_on_the_learning_rate(
    config: TrainConfig, corpus: Corpus, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda self: float("nan"))
    with pytest.raises(
        TrainingError, match=r"the held-out loss is nan at step 0; give --init finite weights$"
    ):
        Run(config, corpus, progress, folder=None).train()


@pytest.mark.requested
@pytest.mark.inductor
def test_a_compiled_run_learns_the_same(config: TrainConfig, corpus: Corpus, progress: Progress) -> None:
    config = replace(config, recipe="current")
    eager = Run(config, corpus, progress, folder=None).train().history
    compiled = Run(replace(config, compile=True), corpus, progress, folder=None).train().history
    torch.testing.assert_close(compiled.train, eager.train, rtol=5e-3, atol=0)
    assert compiled.held_out[-1][1] == pytest.approx(eager.held_out[-1][1], rel=5e-3)


def test_lines_tell_step_losses_speed_and_time_left(
    config: TrainConfig, corpus: Corpus, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowcast_tools.train.progress.BRISK_SECONDS", 0.0)
    Run(config, corpus, progress, folder=None).train()
    lines = progress._console.file.getvalue().splitlines()
    assert len(lines) == 4
    last_but_one = r"bf16 +step 4/6  loss \d\.\d{3}  held-out \d\.\d{3}  left +\d+:\d\d +"
    last_but_one += r"[\d,]+ tok/s  \d+\.\d GiB"
    assert re.fullmatch(last_but_one, lines[2]), lines[2]
