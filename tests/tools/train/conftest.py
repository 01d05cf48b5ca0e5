"""A small text, and the settings of runs that take a fraction of a second."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.data import Corpus, load_corpus
from narrowcast_tools.train.progress import Lines, Progress


@pytest.fixture
def config() -> TrainConfig:
    return TrainConfig(
        steps=6,
        batch_size=2,
        seq_len=16,
        lr=2e-3,
        warmup=2,
        eval_every=2,
        eval_batches=2,
        save_every=3,
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48),
    )


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} bottles of beer on the wall, {i * i} squared.\n" for i in range(400)))
    return path


@pytest.fixture
def corpus(text_file: Path, config: TrainConfig) -> Corpus:
    return load_corpus(text_file, seq_len=config.seq_len)


@pytest.fixture
def progress() -> Progress:
    return Lines(Console(file=io.StringIO()))
