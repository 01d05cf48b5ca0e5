"""TensorBoard: what a run tells is written, and what is done again replaces what was there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from narrowcast_tools.train.board import Board
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.data import Corpus
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.progress import Progress
from narrowcast_tools.train.session import run_in


def test_scalars_are_written(config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(tag: str) -> list[int]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [event.step for event in events.Scalars(tag)]

    config = replace(config, steps=4)
    result = run_in(tmp_path, config, corpus, progress, resume=False, told=False, tensorboard=True)
    assert read("loss/train") == [1, 2, 3, 4]
    assert read("loss/held-out") == [0, 2, 4]
    assert {"loss/train", "learning rate", "memory/GiB", "speed/tokens per second"} <= tags(tmp_path)
    run_in(tmp_path, replace(config, steps=6), corpus, progress, resume=True, told=False, tensorboard=True)
    assert read("loss/train") == [1, 2, 3, 4, 5, 6]
    assert result.steps == 4


def tags(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_a_missing_package_is_told(
    config: TrainConfig, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SettingsError, match=r"; run: \S+ -m pip install tensorboard$"):
        Board(progress, tmp_path, config)
