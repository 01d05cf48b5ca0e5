"""Recipe names, and what a GPU without the kernels is told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast_tools.train import recipes
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.names import recipe_name
from narrowcast_tools.train.recipes import (
    CHOICES,
    EMULATED,
    build_recipe,
    read_recipe_table,
    recipe_table,
)


def test_names() -> None:
    assert [recipe_name(name) for name in CHOICES] == list(CHOICES)
    assert recipe_name("none") == "bf16"
    assert recipe_name("tensorwise") == "current" and set(CHOICES) == {"bf16", *nc.recipe.NAMES}
    told = r"--recipe is 'MXFP8'; the nearest: 'mxfp8'.*; use one of bf16, delayed, "
    with pytest.raises(SettingsError, match=told):
        recipe_name("MXFP8")


def test_the_cpu_runs_every_recipe() -> None:
    built = {name: build_recipe(name, device="cpu", emulate=False) for name in CHOICES}
    assert built.pop("bf16") is None
    assert {name: type(recipe) for name, recipe in built.items()} == {
        "delayed": nc.recipe.DelayedScaling,
        "current": nc.recipe.Float8CurrentScaling,
        "rowwise": nc.recipe.Float8RowwiseScaling,
        "mxfp8": nc.recipe.MXFP8BlockScaling,
        "block": nc.recipe.Float8BlockScaling,
        "nvfp4": nc.recipe.NVFP4BlockScaling,
        "mxfp6": nc.recipe.MXFP6BlockScaling,
        "mxfp4": nc.recipe.MXFP4BlockScaling,
    }


def test_a_gpu_without_kernels_needs_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(CHOICES["mxfp8"], native=lambda return_reason: (False, "too old"))
    monkeypatch.setitem(recipes.CHOICES, "mxfp8", lacking)
    with pytest.raises(SettingsError, match=r"recipe 'mxfp8' is not native .*too old.*; add --emulate"):
        build_recipe("mxfp8", device="cuda", emulate=False)
    assert build_recipe("mxfp8", device="cuda", emulate=True).emulate


@pytest.mark.parametrize("name", EMULATED)
def test_what_no_gpu_runs_is_emulated_when_asked(name: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"'{name}' is not native .*emulated everywhere\); add --emulate"
    ):
        build_recipe(name, device="cuda", emulate=False)
    assert build_recipe(name, device="cuda", emulate=True).emulate


def test_the_environment_may_ask_for_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(CHOICES["nvfp4"], native=lambda return_reason: (False, "too old"))
    monkeypatch.setitem(recipes.CHOICES, "nvfp4", lacking)
    monkeypatch.setenv("NARROWCAST_EMULATE", "1")
    assert build_recipe("nvfp4", device="cuda", emulate=False).emulate


def test_recipes_of_a_table_need_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(CHOICES["mxfp8"], native=lambda return_reason: (False, "too old"))
    monkeypatch.setitem(recipes.CHOICES, "mxfp8", lacking)
    table = nc.recipe.recipes_to_json({"blocks.0": nc.recipe.MXFP8BlockScaling(emulate=False)})
    build = partial(recipe_table, "bf16", keep_bf16="", device="cuda", emulate=False)
    with pytest.raises(
        SettingsError, match=r"the recipe of 'blocks.0' is not native .*give it \"emulate\": true"
    ):
        build(table=table)
    emulated = nc.recipe.recipes_to_json({"blocks.0": nc.recipe.MXFP8BlockScaling(emulate=True)})
    assert build(table=emulated)["head"] is None


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"": {"type": "Fast"}}', '{"": {"type": "MXFP8BlockScaling", "x": 1}}']
)
def test_a_file_that_is_no_table_is_told(content: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"--recipe-table .*table\.json: "):
        read_recipe_table(path)
    with pytest.raises(SettingsError, match=r"--recipe-table is absent\.json, which .*No such file.*"):
        read_recipe_table(Path("absent.json"))
    assert read_recipe_table(None) == ""


def test_a_gpu_with_kernels_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    able = replace(CHOICES["block"], native=lambda return_reason: (True, ""))
    monkeypatch.setitem(recipes.CHOICES, "block", able)
    assert not build_recipe("block", device="cuda", emulate=False).emulate
    assert not build_recipe("block", device="cuda", emulate=True).emulate
