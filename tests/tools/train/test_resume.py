"""A resumed run is the uninterrupted run, bit for bit; a run of other settings is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from narrowcast.optimizers import FusedAdam
from narrowcast_tools.train import trainer
from narrowcast_tools.train.checkpoint import Checkpoint, load, load_newest, save
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.data import Corpus, load_corpus
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.history import RunResult
from narrowcast_tools.train.loop import Run
from narrowcast_tools.train.progress import Progress
from narrowcast_tools.train.recipes import CHOICES
from narrowcast_tools.train.snapshot import CPU_GENERATOR


def interrupted_copy(whole: Path, folder: Path) -> Path:
    """The folder as a kill after the first of two checkpoints would have left it."""
    first = min(whole.glob("step-*"))
    shutil.copytree(first, folder / first.name)
    return folder


def bytes_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {
        f"{stem}/{name}": bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        for stem, tensors in checkpoint.tensors.items()
        for name, tensor in tensors.items()
    }


def resumed(config: TrainConfig, corpus: Corpus, progress: Progress, folder: Path) -> RunResult:
    torch.manual_seed(4242)  # what another process would find in its generator
    return Run(config, corpus, progress, folder, resume=True).train()


EVERYTHING = {"recompute": True, "accumulate": 2, "keep_bf16": "blocks.0.attention"}


@pytest.mark.parametrize("recipe", CHOICES)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "every option"])
def test_resume_is_bitwise(
    recipe: str, options: dict, config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    config = replace(config, recipe=recipe, **options)
    whole = Run(config, corpus, progress, tmp_path / "whole").train()
    folder = interrupted_copy(tmp_path / "whole", tmp_path / "part")
    part = resumed(config, corpus, progress, folder)
    assert part.history == whole.history
    assert len(part.history.train) == config.steps
    expected, found = (bytes_of(load(tmp_path / run / "step-00000006")) for run in ("whole", "part"))
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_resume_is_bitwise_with_tied_embeddings(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    config = replace(config, model=replace(config.model, tie_embeddings=True))
    whole = Run(config, corpus, progress, tmp_path / "whole").train()
    saved = load(tmp_path / "whole" / "step-00000003")
    assert "head.weight" not in saved.tensors["model"]
    folder = interrupted_copy(tmp_path / "whole", tmp_path / "part")
    run = Run(config, corpus, progress, folder, resume=True)
    assert run.trainer.model.head.weight is run.trainer.model.embedding.weight
    assert run.train().history == whole.history


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_resume_is_bitwise_with_the_optimizer_of_gpus(
    recipe: str,
    config: TrainConfig,
    corpus: Corpus,
    progress: Progress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parameters count their steps together again, so that few launches step them."""
    monkeypatch.setattr(
        trainer,
        "_make_optimizer",
        lambda model, config: FusedAdam(model.parameters(), lr=config.lr, weight_codes=model),
    )
    config = replace(config, recipe=recipe)
    whole = Run(config, corpus, progress, tmp_path / "whole").train()
    folder = interrupted_copy(tmp_path / "whole", tmp_path / "part")
    run = Run(config, corpus, progress, folder, resume=True)
    optimizer = run.trainer.optimizer
    assert len({id(state["step"]) for state in optimizer.state.values()}) == 1
    assert run.train().history == whole.history


def test_stochastic_rounding_needs_the_generator(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    """Without the saved generator NVFP4 goes another way: the bitwise test above is not empty."""
    config = replace(config, recipe="nvfp4")
    whole = Run(config, corpus, progress, tmp_path / "whole").train()
    saved = load(tmp_path / "whole" / "step-00000003")
    saved.tensors["training"][CPU_GENERATOR] = torch.Generator().manual_seed(99).get_state()
    save(tmp_path / "part", step=saved.step, meta=saved.meta, tensors=saved.tensors)
    assert resumed(config, corpus, progress, tmp_path / "part").history != whole.history


def test_a_finished_run_resumes_to_its_result(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    whole = Run(config, corpus, progress, tmp_path).train()
    again = resumed(config, corpus, progress, tmp_path)
    assert again.history == whole.history
    assert again.pace.tokens_per_second == 0.0


def test_the_saving_rhythm_may_change(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    whole = Run(config, corpus, progress, tmp_path / "whole").train()
    folder = interrupted_copy(tmp_path / "whole", tmp_path / "part")
    assert resumed(replace(config, save_every=1), corpus, progress, folder).history == whole.history


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, r"with --seed 5; its run has --seed 0: give those, or another --out"),
        ({"recipe": "mxfp8"}, r"--recipe mxfp8; .*--recipe bf16"),
        ({"steps": 5}, r"has 6 steps, and --steps is 5; give --steps more than 6"),
        ({"compile": True}, r"with --compile; .*--no-compile"),
        ({"model": {"hidden": 64}}, r"--hidden 64; .*--hidden 48"),
    ],
)
def test_another_configuration_is_refused(
    changes: dict, message: str, config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    Run(config, corpus, progress, tmp_path).train()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    if "model" in changes:
        changes = {"model": replace(config.model, **changes["model"])}
    with pytest.raises(SettingsError, match=message):
        Run(replace(config, **changes), corpus, progress, tmp_path, resume=True)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_an_extended_run_goes_on_as_the_longer_one(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    """Its later steps are bit for bit those of any run that stands there and has as many steps before it."""
    short = Run(config, corpus, progress, tmp_path / "a").train()
    longer = replace(config, steps=9)
    run = Run(longer, corpus, progress, tmp_path / "a", resume=True)
    assert run.first_step == 6
    history = run.train().history
    assert history.train[:6] == short.history.train
    assert len(history.train) == 9
    assert load(tmp_path / "a" / "step-00000009").meta["settings"]["steps"] == 9
    folder = tmp_path / "b"
    shutil.copytree(tmp_path / "a" / "step-00000006", folder / "step-00000006")
    assert resumed(longer, corpus, progress, folder).history == history
    with pytest.raises(SettingsError, match=r"--steps is 6; give --steps more than 9"):
        Run(config, corpus, progress, tmp_path / "a", resume=True)


def test_a_shortened_run_ends_as_the_shorter_one(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    """From the checkpoint on, the rate is that of the shorter run; a checkpoint beyond its end is refused."""
    Run(config, corpus, progress, tmp_path / "whole").train()
    shorter = replace(config, steps=5)
    folder = interrupted_copy(tmp_path / "whole", tmp_path / "a")
    first = Run(shorter, corpus, progress, folder, resume=True).train().history
    assert len(first.train) == 5
    second = resumed(shorter, corpus, progress, interrupted_copy(tmp_path / "whole", tmp_path / "b"))
    assert second.history == first
    folder = interrupted_copy(tmp_path / "whole", tmp_path / "c")
    with pytest.raises(SettingsError, match=r"--steps is 2; give --steps more than 3"):
        Run(replace(config, steps=2), corpus, progress, folder, resume=True)


def test_a_checkpoint_of_an_earlier_version_resumes(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    """Settings that it does not name were not there, and are the defaults."""
    whole = Run(config, corpus, progress, tmp_path / "whole").train()
    saved = load(tmp_path / "whole" / "step-00000003")
    for name in ("accumulate", "recompute", "recipe_table", "head_recipe", "keep_bf16", "vocabulary"):
        del saved.meta["settings"][name]
    save(tmp_path / "part", step=saved.step, meta=saved.meta, tensors=saved.tensors)
    assert resumed(config, corpus, progress, tmp_path / "part").history == whole.history


def test_another_text_is_refused_and_a_moved_one_is_not(
    config: TrainConfig, corpus: Corpus, text_file: Path, progress: Progress, tmp_path: Path
) -> None:
    Run(config, corpus, progress, tmp_path / "run").train()
    moved = text_file.rename(tmp_path / "moved.txt")
    Run(config, load_corpus(moved, seq_len=16), progress, tmp_path / "run", resume=True)
    moved.write_text(moved.read_text() + "one more line\n")
    with pytest.raises(SettingsError, match=r"its --data was .*text\.txt .* not .*moved\.txt"):
        Run(config, load_corpus(moved, seq_len=16), progress, tmp_path / "run", resume=True)


def test_a_new_run_does_not_overwrite_an_old_one(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    Run(config, corpus, progress, tmp_path).train()
    with pytest.raises(SettingsError, match=r"step-00000006 is a checkpoint of an earlier run; add --resume"):
        Run(config, corpus, progress, tmp_path)
    assert load_newest(tmp_path)[0].step == config.steps


def test_a_changed_environment_is_told(
    config: TrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    Run(config, corpus, progress, tmp_path).train()
    notes: list[str] = []
    monkeypatch.setattr(type(progress), "note", lambda self, text: notes.append(text))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    Run(config, corpus, progress, tmp_path, resume=True)
    assert len(notes) == 1
    assert "9.9.9" in notes[0]


def test_a_checkpoint_that_does_not_fit_is_passed_over(
    config: TrainConfig,
    corpus: Corpus,
    progress: Progress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole, and still not the state of this run: losses cut short, tensors of no use. The older one serves."""
    whole = Run(config, corpus, progress, tmp_path / "whole").train()
    good = load(tmp_path / "whole" / "step-00000003")
    other = load(tmp_path / "whole" / "step-00000006")
    name = "optimizer.blocks.0.attention.qkv.weight.exp_avg"
    training = other.tensors["training"]
    wrong: dict[str, Checkpoint] = {
        "losses": replace(other, meta={**other.meta, "history": good.meta["history"]}),
        "no history": replace(other, meta={k: v for k, v in other.meta.items() if k != "history"}),
        "no settings": replace(other, meta={k: v for k, v in other.meta.items() if k != "settings"}),
        "no group": replace(other, tensors={"model": other.tensors["model"]}),
        "a moment is missing": with_training(other, {k: v for k, v in training.items() if k != name}),
        "a moment is cut": with_training(other, {**training, name: training[name][1:]}),
        "a moment too many": with_training(
            other, {**training, "optimizer.x.exp_avg": training[name].clone()}
        ),
        "a generator of one byte": with_training(other, {**training, CPU_GENERATOR: torch.ones(1).byte()}),
    }
    notes: list[str] = []
    monkeypatch.setattr(type(progress), "note", lambda self, text: notes.append(text))
    for kind, broken in wrong.items():
        folder = interrupted_copy(tmp_path / "whole", tmp_path / kind)
        save(folder, step=6, meta=broken.meta, tensors=broken.tensors)
        notes.clear()
        run = Run(config, corpus, progress, folder, resume=True)
        assert run.first_step == 3, kind
        passed, goes_on = notes
        assert "passed over" in passed and "step-00000006" in passed, (kind, notes)
        assert goes_on == f"goes on after step 3 of 6, from {folder / 'step-00000003'}"
    assert run.train().history == whole.history


def with_training(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    return replace(checkpoint, tensors={**checkpoint.tensors, "training": tensors})
