"""Presets: the shapes they promise."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.memory import parameters_of
from narrowcast_tools.train.presets import PRESETS, find_preset, presets_table

MILLIONS = {"tiny": 3.1, "125m": 85.3, "1b": 974.2, "8b-slice": 874.5, "8b": 8030.3}


@pytest.mark.parametrize("name", PRESETS)
def test_sizes(name: str) -> None:
    assert parameters_of(find_preset(name).model) / 1e6 == pytest.approx(MILLIONS[name], abs=0.05)


def test_a_vocabulary_of_words_makes_it_125m() -> None:
    model = replace(PRESETS["125m"].model, vocabulary=50257, tie_embeddings=True)
    assert parameters_of(model) / 1e6 == pytest.approx(125, abs=2)


def test_the_slice_is_of_an_8b_llama() -> None:
    model = PRESETS["8b-slice"].model
    assert (model.dim, model.hidden, model.heads, model.kv_heads) == (4096, 14336, 32, 8)


def test_unknown() -> None:
    with pytest.raises(SettingsError, match=r"--preset is '7b'; .*use one of tiny, 125m, 1b, 8b-slice, 8b"):
        find_preset("7b")


def test_the_table_shows_each() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(presets_table())
    text = console.file.getvalue()
    assert all(part in text for part in ("8b-slice", "4096/14336", "974.2M", "32/8", "8x1024"))
    assert all(len(line) <= 80 for line in text.splitlines())
